"""The OpenAPI document, and the service held to it: data that fits it and data that does not, never a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.testclient import TestClient
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from omnistage.omni import AsyncOmni
from omnistage.server.http.app import create_app
from omnistage.server.moderation.wordlist import WordList
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import SERVE_LIMITS, Running, make, serving

FAMILIES = {"lm": "causal_lm", "omni": "qwen2_5_omni", "draw": "stable_diffusion_3", "film": "wan"}
# With a bias for the end token of its family's small models: a transcription that does not end is an error.
ENDING = ("thinker.min_tokens=2", "thinker.logit_bias={877: 100}")
SHORT = {"omni": ("thinker.max_tokens=4", "talker.max_tokens=8", *ENDING), "lm": ("thinker.max_tokens=4",)}
MODELS = {"speech": "omni", "transcriptions": "omni", "images": "draw", "videos": "film"}
"""By a part of the path: the model that can do it. All others are for text."""
MOST = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "min_tokens": 2, "n": 2, "steps": 2}
EXAMPLES = 16
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]
ERRORS = {"400", "401", "404", "413", "503"}


def document() -> dict[str, Any]:
    made: dict[str, Any] = create_app(Service()).openapi()
    return made


DOCUMENT = document()
OPERATIONS = [(method, path) for path, operations in DOCUMENT["paths"].items() for method in operations]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place = tmp_path_factory.mktemp("fuzzed")
    service = Service()
    for name, family in FAMILIES.items():
        given = (*SERVE_LIMITS, *SHORT.get(name, ()))
        omni = AsyncOmni(make(family, place / name), device="cpu", dtype="float32", overrides=given, progress=False)
        service.add(name, omni)
    service.loading = False
    with serving(service, max_body_bytes=2**20, stall_seconds=30.0) as running:
        yield running
        asyncio.run_coroutine_threadsafe(service.jobs.close(), running.loop).result(HANG_SECONDS)
        for model in service.models.values():
            model.omni.orchestrator.check_idle()
    for model in service.models.values():
        asyncio.run(model.omni.shutdown(drain=False))


def kept_small(case: schemathesis.Case) -> None:
    """Aim at a model that is there, and ask for little; what is wrong in the data stays wrong."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = next((name for part, name in MODELS.items() if part in case.operation.path), "lm")
    for name, most in MOST.items():
        if isinstance(body.get(name), int) and not isinstance(body[name], bool):
            body[name] = min(body[name], most)
    if isinstance(body.get("drawing"), dict):
        body["drawing"] = {}
    if "/images" in case.operation.path or "/videos" in case.operation.path:
        body.setdefault("steps", 1)
        if isinstance(body.setdefault("size", "32x32"), str):
            body["size"] = "32x32"
        for name, most in (("seconds", 0.1), ("num_frames", 5)):
            if isinstance(body.get(name), int | float) and not isinstance(body[name], bool):
                body[name] = min(body[name], most)
    if "/videos" in case.operation.path and "seconds" not in body:
        body.setdefault("num_frames", 5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_an_operation_keeps_to_the_document(server: Running, method: str, path: str, mode: str) -> None:
    api = schemathesis.openapi.from_dict(DOCUMENT)
    operation = api[path][method.upper()]
    if mode == "negative" and not (operation.body or operation.query):
        pytest.skip("it takes nothing but text in its path, which cannot be wrong")

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def fuzz(case: schemathesis.Case) -> None:
        kept_small(case)
        answer = case.call(base_url=server.url, timeout=60)
        case.validate_response(answer, checks=CHECKS)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    fuzz()


# --------------------------------------------------------------------------- what no schema says and no random data has

HALF = "\ud800"
DEEP = '[{"a":' * 475 + "1" + "}]" * 475
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string", "enum": ["a", "b"]}}, "required": ["town"]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"town": "a"}'}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "lm",
        "messages": [
            {"role": "system", "content": "Be brief", "name": "ann"},
            {"role": "user", "content": [{"type": "text", "text": "Look"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "description": "x", "parameters": PARAMETERS}}],
        "metadata": {"key": "value"},
        "stop": ["one", "two"],
        "logit_bias": {"5": 1},
        "user": "ann",
        "max_tokens": 1,
    },
    "responses": {
        "model": "lm",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Look"}]},
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        ],
        "instructions": "Be brief",
        "tools": [{"type": "function", "name": "look", "description": "x", "parameters": PARAMETERS}],
        "metadata": {"key": "value"},
        "user": "ann",
        "max_output_tokens": 1,
    },
    "completions": {
        "model": "lm",
        "prompt": ["Once", "upon"],
        "stop": "end",
        "logit_bias": {"5": 1},
        "user": "ann",
        "max_tokens": 1,
    },
    "images/generations": {
        "model": "draw",
        "prompt": "a hat",
        "negative_prompt": "fog",
        "size": "32x32",
        "output_format": "png",
        "user": "ann",
        "quality": "high",
        "steps": 1,
    },
}


@pytest.fixture(params=["plain", "filtered"])
def client(request: pytest.FixtureRequest, models: dict[str, AsyncOmni]) -> Iterator[httpx.Client]:
    """To a service with and without a content filter, which looks at every text before anybody else does."""
    service = Service(content_filter=WordList(["forbidden"]) if request.param == "filtered" else None)
    for name, omni in models.items():
        service.add(name, omni)
    service.loading = False
    with serving(service) as running, httpx.Client(base_url=f"{running.url}/v1/", timeout=60) as made:
        yield made


def changed(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, str, Callable[[str], Any]]]:
    """Every key and every leaf of a body: which it is, where, and the body with a text put there instead."""
    if not isinstance(value, dict | list):
        yield ".".join(place), "leaf", lambda new: new
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        for where, what, make_item in changed(item, (*place, str(key))):

            def around(new: str, key: Any = key, make_item: Callable[[str], Any] = make_item) -> Any:
                return _replaced(value, key, key, make_item(new))

            yield where, what, around
        if isinstance(value, dict):
            yield (
                ".".join((*place, key)),
                "key",
                lambda new, key=key, item=item: _replaced(value, key, f"{key}{new}", item),
            )


def _replaced(value: Any, key: Any, name: Any, item: Any) -> Any:
    if isinstance(value, list):
        return [item if index == key else other for index, other in enumerate(value)]
    return {name if k == key else k: item if k == key else other for k, other in value.items()}


def posted(client: httpx.Client, path: str, content: str) -> httpx.Response:
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


def refused(answer: httpx.Response) -> bool:
    return answer.status_code == 400 and set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", BODIES)
def test_half_a_character_is_refused_wherever_it_is(client: httpx.Client, path: str) -> None:
    assert posted(client, path, json.dumps(BODIES[path])).status_code == 200  # it is the change that is refused
    tried = [(where, what, json.dumps(make_body(HALF))) for where, what, make_body in changed(BODIES[path])]
    assert all(r"\ud800" in content for _, _, content in tried)
    answers = [(where, what, posted(client, path, content)) for where, what, content in tried]
    assert [(where, what, answer.text) for where, what, answer in answers if not refused(answer)] == []


@pytest.mark.parametrize("path", BODIES)
def test_bottomless_nesting_is_refused_wherever_it_is(client: httpx.Client, path: str) -> None:
    for where, what, make_body in changed(BODIES[path]):
        if what == "leaf":
            answer = posted(client, path, json.dumps(make_body("@deep@")).replace('"@deep@"', DEEP))
            assert refused(answer), (where, answer.text)
    extra = json.dumps({**BODIES[path], "unknown": "@deep@"}).replace('"@deep@"', DEEP)
    assert refused(posted(client, path, extra))


def test_the_document_names_every_error_and_none_that_is_never_given() -> None:
    for method, path in OPERATIONS:
        answers = DOCUMENT["paths"][path][method]["responses"]
        assert "422" not in answers, path
        if not path.startswith("/v1/"):
            continue
        assert set(answers) >= ERRORS, path
        assert method != "post" or {"403", "408", "429", "499"} <= set(answers), path
        for status in ERRORS:
            schema = answers[status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, status)


def test_the_document_describes_bodies_files_and_streams() -> None:
    paths, schemas = DOCUMENT["paths"], DOCUMENT["components"]["schemas"]
    for method, path in OPERATIONS:
        operation = paths[path][method]
        content = operation["responses"]["200"]["content"]
        assert content, path
        for kind, described in content.items():
            assert described.get("schema") or described.get("itemSchema"), (path, kind)
        if method == "post" and path != "/ping":  # a health check, which has no body
            assert operation["requestBody"]["content"], path
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/images/generations"):
        item = paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
        for one in item["properties"]["data"]["contentSchema"]["anyOf"]:
            assert one["$ref"].rpartition("/")[2] in schemas
    for path in ("/v1/images/edits", "/v1/audio/transcriptions", "/v1/videos"):
        assert "multipart/form-data" in paths[path]["post"]["requestBody"]["content"]
    assert "#/$defs" not in json.dumps(DOCUMENT)


def test_unknown_paths_and_methods_have_the_same_form_of_error() -> None:
    app: FastAPI = create_app(Service())
    with TestClient(app) as client:
        for answer, status in (
            (client.get("/nowhere"), 404),
            (client.get("/v1/nowhere"), 404),
            (client.put("/health"), 405),
            (client.get("/v1/completions"), 405),
            (client.options("/v1/models"), 405),
        ):
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "POST" in client.get("/v1/completions").headers["Allow"]
