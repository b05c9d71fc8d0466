"""Adapters over HTTP: as a model's name, by the field `lora`, loaded and unloaded while requests run."""

from __future__ import annotations

import asyncio
import gc
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import torch

from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.registry import REGISTRY
from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.service import Service
from tests.parity.adapter_checkpoints import CONFIGS, with_adapters
from tests.server.harness import Running, serving

KEYS = {"all-models": None, "only-french": frozenset({"french"}), "only-base": frozenset({"lm"})}


@dataclass
class Served:
    running: Running
    service: Service
    folder: Path
    """Where clients may load from."""

    def post(self, path: str, key: str = "all-models", **body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}-secret"}
        return httpx.post(f"{self.running.url}{path}", json=body, headers=headers, timeout=60)

    def ask(self, model: str = "lm", key: str = "all-models", **fields: object) -> str:
        body = {"model": model, "prompt": "once upon a time", "max_tokens": 6, "temperature": 0, **fields}
        response = self.post("/v1/completions", key, **body)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == model
        return str(response.json()["choices"][0]["text"])

    @property
    def stage(self) -> ARStage:
        stage = self.service.models["lm"].omni.orchestrator.stages["thinker"]
        assert isinstance(stage, ARStage)
        return stage


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, folder = tmp_path_factory.mktemp("models") / "lm", tmp_path_factory.mktemp("adapters")
    tiny = REGISTRY.family("causal_lm").tiny
    assert tiny is not None
    tiny(model, seed=0)
    with_adapters(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), folder=folder)
    outside = tmp_path_factory.mktemp("outside")
    shutil.copytree(folder / "all", outside / "secret")
    (folder / "link").symlink_to(outside / "secret")
    (folder / "linked_file").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "linked_file" / name).symlink_to(outside / "secret" / name)
    overrides = (f'deployment.adapter_folders=["{folder}"]', "deployment.adapter_slots=2")
    omni = AsyncOmni(
        model,
        device="cpu",
        dtype="float32",
        adapters={"french": folder / "all"},
        overrides=overrides,
        progress=False,
    )
    holders = [Holder(name, digest_of(f"{name}-secret"), models=models) for name, models in KEYS.items()]
    service = Service(keyring=Keyring(holders))
    service.add("lm", omni)
    service.loading = False
    with serving(service) as running:
        yield Served(running, service, folder)
    omni.orchestrator.check_idle()
    asyncio.run(omni.shutdown(drain=False))


def test_an_adapter_is_a_model_with_a_parent(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.running.url}/v1", api_key="all-models-secret") as client:
        cards = {card.id: card.to_dict() for card in client.models.list()}
        assert cards["french"]["parent"] == "lm"
        assert cards["french"]["root"] == "all"
        assert "parent" not in cards["lm"]
        assert client.models.retrieve("french").id == "french"


def test_a_request_chooses_by_model_or_field(served: Served) -> None:
    plain, french = served.ask(), served.ask("french")
    assert plain != french
    assert served.ask(lora="french") == served.ask(lora=[{"name": "french"}]) == french
    assert served.ask(lora=[{"name": "french", "weight": 0.0}]) == plain
    assert served.ask(lora=[]) == plain
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}
    answers = [
        served.post("/v1/chat/completions", **chat, **choice).json()["choices"][0]["message"]["content"]
        for choice in ({"model": "lm"}, {"model": "french"}, {"model": "lm", "lora": "french"})
    ]
    assert answers[0] != answers[1] == answers[2]
    response = served.post("/v1/responses", model="french", input="hello", max_output_tokens=6, temperature=0)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "german"}, 404, "model"),
        ({"lora": "german"}, 400, "lora"),
        ({"lora": [{"name": "french"}, {"name": "french"}]}, 400, "lora"),
        ({"lora": [{"name": "french", "weight": 1e9}]}, 400, "lora[0].weight"),
        ({"lora": {"name": "french", "strength": 1}}, 400, "lora.strength"),
        ({"lora": 7}, 400, "lora"),
        ({"lora": ["x"] * 17}, 400, "lora"),
        ({"model": "french", "lora": "french"}, 400, "lora"),
    ],
)
def test_a_wrong_choice_is_refused_by_its_field(
    served: Served, fields: dict[str, object], status: int, param: str
) -> None:
    response = served.post("/v1/completions", **{"model": "lm", "prompt": "x", "max_tokens": 2, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


def test_a_key_uses_the_adapters_that_it_names(served: Served) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    assert served.post("/v1/completions", "only-french", model="french", **body).status_code == 200
    assert served.post("/v1/completions", "only-french", model="lm", **body).status_code == 403
    assert served.post("/v1/completions", "only-base", model="french", **body).status_code == 403
    assert served.post("/v1/completions", "only-base", model="lm", lora="french", **body).status_code == 403
    assert served.post("/v1/completions", "only-base", model="lm", **body).status_code == 200
    load = {"lora_name": "new", "lora_path": "feed"}
    assert served.post("/v1/load_lora_adapter", "only-base", **load).status_code == 403
    assert served.post("/v1/unload_lora_adapter", "only-french", lora_name="french").status_code == 403


@pytest.mark.parametrize(
    "path",
    ["../outside", "/etc", "link", "linked_file", "missing", "a\x00b", "..", "all/../../", "all/adapter_config.json"],
)
def test_nothing_outside_the_folders_is_looked_at(served: Served, path: str) -> None:
    response = served.post("/v1/load_lora_adapter", lora_name="new", lora_path=path)
    assert response.status_code == 400
    assert "no such folder" in response.json()["error"]["message"]


def test_files_that_are_no_adapter_are_refused_by_their_field(served: Served) -> None:
    (served.folder / "damaged").mkdir()
    (served.folder / "damaged" / "adapter_config.json").write_text("{")
    (served.folder / "damaged" / "adapter_model.safetensors").write_bytes(bytes(100))
    for path in (".", "damaged"):
        response = served.post("/v1/load_lora_adapter", lora_name="new", lora_path=path)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_path"), response.text


def test_an_adapter_is_loaded_used_and_leaves_nothing(served: Served) -> None:
    library, plain = served.stage.adapters, served.ask()
    assert library is not None
    held, before = library.held_bytes, set(library.names())
    response = served.post("/v1/load_lora_adapter", lora_name="new", lora_path=str(served.folder / "feed"))
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert served.post("/v1/load_lora_adapter", lora_name="new", lora_path="feed").status_code == 400
    assert served.post("/v1/load_lora_adapter", lora_name="lm", lora_path="feed").status_code == 400
    new = served.ask("new")
    assert new not in (plain, served.ask("french"))
    assert library.held_bytes > held
    tensor = weakref.ref(next(iter(library.pairs(library._adapters["new"]).values())).down)
    assert served.post("/v1/unload_lora_adapter", lora_name="new").status_code == 200
    assert served.post("/v1/unload_lora_adapter", lora_name="new").status_code == 404
    assert served.post("/v1/completions", model="new", prompt="x").status_code == 404
    assert served.ask() == plain
    gc.collect()
    assert (tensor(), library.held_bytes, set(library.names())) == (None, held, before)


def test_requests_finish_with_the_adapter_that_is_unloaded_meanwhile(served: Served) -> None:
    assert served.post("/v1/load_lora_adapter", lora_name="gone", lora_path="outputs").status_code == 200
    whole = served.ask("gone", max_tokens=40, ignore_eos=True)
    with openai.OpenAI(base_url=f"{served.running.url}/v1", api_key="all-models-secret") as client:
        stream = client.completions.create(
            model="gone", prompt="once upon a time", max_tokens=40, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text = next(stream).choices[0].text
        assert served.post("/v1/unload_lora_adapter", lora_name="gone").status_code == 200
        text += "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == whole


def test_more_adapters_than_slots_are_all_answered(served: Served) -> None:
    names = ["attention", "patterns", "feed", "outputs"]
    for name in names:
        assert served.post("/v1/load_lora_adapter", lora_name=name, lora_path=name).status_code == 200
    alone = {name: served.ask(name) for name in names}
    with openai.OpenAI(base_url=f"{served.running.url}/v1", api_key="all-models-secret") as client:
        streams = [
            client.completions.create(
                model=name, prompt="once upon a time", max_tokens=6, temperature=0, stream=True, timeout=60
            )
            for name in names * 2
        ]
        for name, stream in zip(names * 2, streams, strict=True):
            assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == alone[name]
    mixed = [{"name": name} for name in names[:3]]
    response = served.post("/v1/completions", model="lm", prompt="x", lora=mixed)
    assert response.status_code == 400
    assert "adapter_slots" in response.json()["error"]["message"]
    for name in names:
        assert served.post("/v1/unload_lora_adapter", lora_name=name).status_code == 200
    assert len(CONFIGS) == 5


def test_loading_is_off_without_a_folder(served: Served) -> None:
    adapters = served.service.models["lm"].omni.adapters
    folders, adapters._folders = adapters._folders, ()
    try:
        for path in ("load", "unload"):
            response = served.post(
                f"/v1/{path}_lora_adapter", lora_name="x", **({"lora_path": "all"} if path == "load" else {})
            )
            assert response.status_code == 404
            assert "--adapter-folder" in response.json()["error"]["message"]
    finally:
        adapters._folders = folders
