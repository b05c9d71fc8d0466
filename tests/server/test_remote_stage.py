"""A stage on another server: our own service as that server, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from omnistage import Omni, SamplingParams
from omnistage.cli import app
from omnistage.core.errors import ConfigError, InvalidRequestError, PromptTooLongError, StageUnavailableError
from omnistage.core.types import FinishReason
from omnistage.omni import AsyncOmni
from omnistage.pipeline.outputs import OmniRequestOutput
from omnistage.server.access.keys import Keyring
from omnistage.server.service import Service
from tests.server.fake_llm import fake_server
from tests.server.harness import Running, make, serving, until
from tests.server.realtime_client import QUIET, text_of, until_event

pytestmark = pytest.mark.timeout(300)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ("Once upon a time", "The quick brown fox", "Zwei Königskinder")


def remote(url: str, *more: str, stage: str = "thinker") -> list[str]:
    return [f"{stage}.engine=remote", f"{stage}.url={url}/v1", f"{stage}.model=lm", *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("causal_lm", tmp_path_factory.mktemp("remote") / "lm")


@pytest.fixture(scope="module")
def inline(folder: Path) -> Iterator[Omni]:
    with Omni(folder, device="cpu", dtype="float32", progress=False) as omni:
        yield omni


@pytest.fixture(scope="module")
def upstream(folder: Path) -> Iterator[Running]:
    omni = AsyncOmni(folder, device="cpu", dtype="float32", progress=False)
    service = Service(keyring=Keyring())
    service.add("lm", omni)
    service.loading = False
    with serving(service) as running:
        yield running
    omni.orchestrator.check_idle()  # whatever the tests broke off
    asyncio.run(omni.shutdown(drain=False))


@pytest.fixture(scope="module")
def through(folder: Path, upstream: Running) -> Iterator[Omni]:
    with Omni(folder, overrides=remote(upstream.url), progress=False) as omni:
        yield omni
        omni.orchestrator.check_idle()


def test_greedy_tokens_text_usage_and_finish_are_those_of_the_inline_stage(inline: Omni, through: Omni) -> None:
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=5), SamplingParams(temperature=0.0, max_tokens=40)]
    for here, there in zip(inline.generate(PROMPTS, params), through.generate(PROMPTS, params), strict=True):
        assert there.token_ids == here.token_ids
        assert there.text == here.text
        assert there.finish_reason is here.finish_reason
        assert there.usage.prompt_tokens == here.usage.prompt_tokens
        assert there.usage.completion_tokens == here.usage.completion_tokens


def test_seeds_several_answers_stops_and_penalties_are_passed_on(inline: Omni, through: Omni) -> None:
    for params in (
        SamplingParams(seed=7, n=3, max_tokens=12, top_k=40, top_p=0.9, min_p=0.01),
        SamplingParams(seed=1, max_tokens=30, stop=("e", "a"), repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(seed=2, max_tokens=12, min_tokens=12, ignore_eos=True, logit_bias={65: 3.0}),
    ):
        [here], [there] = inline.generate(PROMPTS[0], params), through.generate(PROMPTS[0], params)
        assert [each.token_ids for each in there.outputs] == [each.token_ids for each in here.outputs]
        assert [each.text for each in there.outputs] == [each.text for each in here.outputs]
        assert [each.finish_reason for each in there.outputs] == [each.finish_reason for each in here.outputs]


def test_log_probabilities_come_with_the_chosen_tokens_ids(inline: Omni, through: Omni) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
    [here], [there] = inline.generate(PROMPTS[1], params), through.generate(PROMPTS[1], params)
    for one, other in zip(here.outputs[0].logprobs, there.outputs[0].logprobs, strict=True):
        assert other.chosen.token_id == one.chosen.token_id
        assert other.chosen.text == one.chosen.text
        assert other.chosen.logprob == pytest.approx(one.chosen.logprob, abs=1e-5)
        assert other.top[0].logprob == pytest.approx(one.top[0].logprob, abs=1e-5)
        assert 1 <= len(other.top) <= 3


def test_conversations_stream_token_by_token(through: Omni) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    pieces = [item for item in through.stream_chat(chat, GREEDY) if item.final is None]
    assert sum(len(item.token_ids) for item in pieces) == 24
    assert len(pieces) > 8


@pytest.mark.parametrize(
    ("params", "name"),
    [({"suppress_token_ids": (5,)}, "suppress_token_ids"), ({"logit_bias": {5: 500.0}}, "logit_bias")],
)
def test_what_the_server_cannot_honour_exactly_is_refused_by_name(
    through: Omni, params: dict[str, object], name: str
) -> None:
    with pytest.raises(InvalidRequestError, match="not supported by this stage's server") as caught:
        through.generate(PROMPTS[0], SamplingParams.model_validate(params))
    assert caught.value.param == name


def test_openais_own_api_has_fewer_parameters(folder: Path, upstream: Running) -> None:
    with Omni(folder, overrides=remote(upstream.url, "thinker.server=openai"), progress=False) as omni:
        with pytest.raises(InvalidRequestError) as caught:
            omni.generate(PROMPTS[0], SamplingParams(top_k=3))
        assert caught.value.param == "top_k"
        [out] = omni.generate(PROMPTS[0], GREEDY)
        assert out.text
        assert not out.token_ids
        assert out.usage.completion_tokens == 24  # as the server counts
        assert out.usage.prompt_tokens > 0


def test_what_the_server_refuses_is_refused_with_its_reason(through: Omni) -> None:
    with pytest.raises(PromptTooLongError, match=r"has 5000 tokens; the server of stage 'thinker' holds 2048"):
        through.generate({"prompt_token_ids": [5] * 5000}, GREEDY)


def test_an_abort_closes_the_connection_and_ends_the_work_upstream(folder: Path, upstream: Running) -> None:
    async def main() -> OmniRequestOutput | None:
        omni = AsyncOmni(folder, overrides=remote(upstream.url), progress=False)
        try:
            long = SamplingParams(max_tokens=1500, ignore_eos=True, seed=1)
            async with contextlib.aclosing(omni.generate(PROMPTS[0], long, request_id="r")) as items:
                async for item in items:
                    if item.final is not None:
                        return item.final
                    omni.abort("r")
        finally:
            await omni.shutdown()
        return None

    final = asyncio.run(main())
    assert final is not None
    assert final.finish_reason is FinishReason.ABORT
    orchestrator = upstream.service.models["lm"].omni.orchestrator
    until(lambda: orchestrator.stats().inflight == 0, "the upstream request's end")


def test_requests_beyond_the_limit_wait_here(folder: Path, upstream: Running) -> None:
    with Omni(folder, overrides=remote(upstream.url, "thinker.max_running=2"), progress=False) as omni:
        most, before = 0, omni.orchestrator.stages["thinker"].step
        stage = omni.orchestrator.stages["thinker"]

        def step() -> object:
            nonlocal most
            chunks = before()
            most = max(most, stage.stats().running)
            return chunks

        stage.step = step  # type: ignore[method-assign, assignment]
        outs = omni.generate([PROMPTS[0]] * 6, GREEDY)
        assert len({tuple(out.token_ids) for out in outs}) == 1
        assert most == 2


def test_a_server_that_is_away_makes_the_stage_unready_until_it_is_back(folder: Path, upstream: Running) -> None:
    omni = AsyncOmni(folder, overrides=remote("http://127.0.0.1:9", "thinker.check_seconds=0.05"), progress=False)
    service = Service(keyring=Keyring())
    service.add("lm", omni)
    service.loading = False
    body = {"model": "lm", "prompt": "Once", "max_tokens": 3}
    with serving(service) as running, httpx.Client(base_url=running.url) as client:
        until(lambda: client.get("/ready").status_code == 503, "unready")
        ready = client.get("/ready").json()
        assert ready["stages"] == [{"model": "lm", "stage": "thinker", "state": "unreachable"}]
        assert client.get("/health").status_code == 200  # a restart would not help
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "server that does not answer" in answer.json()["error"]["message"]
        assert "127.0.0.1:9" not in answer.text
        assert 'omnistage_stage_up{model="lm",stage="thinker"} 0.0' in client.get("/metrics").text
        with pytest.raises(StageUnavailableError):
            asyncio.run(_first(omni))
    asyncio.run(omni.shutdown())


async def _first(omni: AsyncOmni) -> None:
    async for _ in omni.generate("x"):
        pass


def test_the_service_passes_token_ids_on(upstream: Running) -> None:
    with httpx.Client(base_url=upstream.url) as client:
        body = {"model": "lm", "prompt": "Once", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        whole = client.post("/v1/completions", json=body).json()["choices"][0]
        assert len(whole["token_ids"]) == 4
        chat = {"model": "lm", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
        lines = client.post("/v1/chat/completions", json={**chat, "return_token_ids": True}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])]
        assert len(ids) == 4
        assert "token_ids" not in client.post("/v1/chat/completions", json={**chat, "stream": False}).text


# --------------------------------------------------------------------------------- ears and voice around it

EXAMPLE = Path(__file__).parents[2] / "examples" / "starter_vllm.yaml"
HEARD = "the cat sees a bird"


@pytest.fixture(scope="module")
def starter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omnistage_starter import tiny
    from omnistage_starter.tiny_speech_to_text import write_speech_to_text

    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("remote") / "starter"
    tiny.write(folder, seed=1)
    write_speech_to_text(folder / "hear", script=(*HEARD.split(), "</s>"))
    shutil.rmtree(folder / "think")  # neither its weights nor its tokenizer are needed
    return folder


def test_the_example_hears_asks_the_server_and_speaks(starter_folder: Path) -> None:
    with fake_server() as server:
        overrides = [f"think.url={server.url}", "think.model=lm"]
        with Omni(starter_folder, config=EXAMPLE, device="cpu", overrides=overrides, progress=False) as omni:
            samples = np.sin(np.arange(16_000) / 20).astype(np.float32) * 0.3
            clip = {"type": "audio", "audio": (samples, 16_000)}
            chat = [{"role": "user", "content": [{"type": "text", "text": "good:"}, clip]}]
            out = omni.chat(chat, modalities=["text", "audio"])
            assert out.text == "Hello there"
            assert out.usage.prompt_tokens == 3
            assert out.audio is not None
            assert out.audio.seconds > 0.2
            [(path, body, _)] = server.bodies
            assert path == "/v1/chat/completions"
            assert body["messages"] == [{"role": "user", "content": f"good:\n{HEARD}"}]
            assert (body["model"], body["max_tokens"], body["top_p"]) == ("lm", 512, 0.8)
            spoken = omni.chat([{"role": "assistant", "name": "read_aloud", "content": "Hello."}], modalities=["audio"])
            assert spoken.audio is not None
            assert len(server.bodies) == 1  # speech of a given text asks nobody
            assert omni.generate("good prompt")[0].text == "Hello there"


def test_every_text_and_speech_endpoint_works_around_a_server(starter_folder: Path) -> None:
    with fake_server() as upstream:
        overrides = [f"think.url={upstream.url}", "think.model=lm"]
        omni = AsyncOmni(starter_folder, config=EXAMPLE, device="cpu", overrides=overrides, progress=False)
        service = Service(keyring=Keyring())
        service.add("starter", omni)
        service.loading = False
        with serving(service) as running, running.client() as client:
            asked: Any = [{"role": "user", "content": "good day"}]
            chat = client.chat.completions.create(model="starter", messages=asked)
            assert chat.choices[0].message.content == "Hello there"
            response = client.responses.create(model="starter", input="good day")
            assert response.output_text == "Hello there"
            assert response.usage is not None
            assert response.usage.input_tokens == 3
            tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
            asked[0]["content"] = "tools please"
            called = client.chat.completions.create(model="starter", messages=asked, tools=tools)
            assert called.choices[0].finish_reason == "tool_calls"
            [call] = called.choices[0].message.tool_calls or []
            assert json.loads(call.function.arguments) == {"city": "Rome"}  # type: ignore[union-attr]
            refused = httpx.post(
                f"{running.url}/v1/chat/completions",
                json={"model": "starter", "messages": [{"role": "user", "content": "500 now"}], "stream": True},
            )
            assert (refused.status_code, refused.json()["error"]["code"]) == (502, "remote_failed")
            with client.realtime.connect(model="starter") as session:
                session.send({"type": "session.update", "session": QUIET})
                item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "good day"}]}
                session.send({"type": "conversation.item.create", "item": item})  # type: ignore[typeddict-item]
                session.send({"type": "response.create"})
                events = until_event(session, "response.done")
            assert text_of(events, "response.output_audio_transcript.delta") == "Hello there"
            assert any(event.type == "response.output_audio.delta" for event in events)
        omni.orchestrator.check_idle()
        asyncio.run(omni.shutdown())


def test_a_stage_that_reads_hidden_states_is_refused_behind_a_server(starter_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"stage 'draw' reads hidden states of 'think' .* run 'think' on") as caught:
        Omni(starter_folder, overrides=remote("http://127.0.0.1:9", stage="think"), progress=False)
    assert caught.value.param == "pipeline.edges.2"


def test_the_memory_plan_leaves_the_stage_to_its_server(starter_folder: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(starter_folder), "--config", str(EXAMPLE)])
    assert result.exit_code == 0, result.output
    assert "think: on the server at http://127.0.0.1:8001/v1, which plans its own memory" in result.output
    plan = json.loads(CliRunner().invoke(app, ["plan", str(starter_folder), "--config", str(EXAMPLE), "--json"]).output)
    assert plan["remote"] == {"think": "http://127.0.0.1:8001/v1"}
    assert all(stage["name"] != "think" for device in plan["devices"] for stage in device["stages"])
