"""The OpenAPI document, and the service held to it: data that fits it and data that does not, never a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.testclient import TestClient
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from omnistage.omni import AsyncOmni
from omnistage.server.app import create_app
from omnistage.server.service import Service
from tests.server.conftest import SERVE_LIMITS, Running, make, serving

FAMILIES = {"lm": "causal_lm", "omni": "qwen2_5_omni", "draw": "stable_diffusion_3", "film": "wan"}
SHORT = {"omni": ("thinker.max_tokens=4", "talker.max_tokens=8"), "lm": ("thinker.max_tokens=4",)}
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
        asyncio.run_coroutine_threadsafe(service.jobs.close(), running.loop).result(60)
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
        if method == "post":
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
