"""Whatever a caller passes to the front doors, a mistake answers with an error of ours that names the argument."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omnistage.config import OmniEngineArgs
from omnistage.core.errors import CheckpointError, ConfigError, InvalidRequestError
from omnistage.core.params import SamplingParams
from omnistage.core.validation import short_repr
from omnistage.omni import AsyncOmni, Omni
from tests.unit.fakes import AUDIO, FakeProcessor, FakeStage, linear, stream_into

pytestmark = pytest.mark.timeout(300)
HELLO = [{"role": "user", "content": "one two three"}]
NAN, HUGE = float("nan"), 10**400


def door(kind: type[Any]) -> Any:
    graph = linear()
    audio = graph.outputs[AUDIO]
    stages = {name: FakeStage(name, audio=name == audio) for name in graph.order}
    bridges = {name: stream_into(audio=name == audio) for name in graph.order[1:]}
    return kind.from_parts(graph, stages, bridges, {}, FakeProcessor())


@pytest.fixture
def omni() -> Iterator[Any]:
    with door(Omni) as omni:
        yield omni
        omni.orchestrator.check_idle()


def refusal(call: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert len(str(caught.value)) < 400
    return caught.value


def named(value: object) -> str:
    """A name that is the same in every process: no address in it."""
    text = short_repr(value)
    return type(value).__name__ if " at 0x" in text else text


@pytest.mark.parametrize("prompt", [None, 5, 1.5, object(), b"text", torch.tensor(1)], ids=named)
def test_what_is_no_prompt(omni: Any, prompt: object) -> None:
    assert refusal(lambda: omni.generate(prompt)).param == "prompts"


@pytest.mark.parametrize("prompts", [[None], [5], iter([5]), b"", torch.zeros(2)], ids=named)
def test_a_batch_of_what_is_no_prompt(omni: Any, prompts: object) -> None:
    assert refusal(lambda: omni.generate(prompts)).param in ("prompt", "prompts")


def test_prompts_may_come_from_any_iterable(omni: Any) -> None:
    assert len(omni.generate(text for text in ("a", "b c"))) == 2
    assert omni.generate([]) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", 5),
        ("modalities", [[]]),
        ("modalities", [5]),
        ("modalities", b"text"),
        ("modalities", {"text": 1}),
        ("modalities", ["x" * 10**6]),
        ("timeout", "a"),
        ("timeout", []),
        ("timeout", HUGE),
        ("timeout", 10**5000),
        ("timeout", -HUGE),
        ("timeout", NAN),
        ("timeout", float("inf")),
        ("timeout", True),
        ("priority", "a"),
        ("priority", None),
        ("priority", []),
        ("priority", HUGE),
        ("priority", 10**5000),
        ("priority", NAN),
        ("priority", 1.5),
        ("priority", True),
        ("priority", 1001),
        ("priority", -1001),
        ("voice", []),
        ("voice", 5),
        ("voice", "x" * 10**6),
    ],
    ids=short_repr,
)
def test_an_option_of_the_wrong_kind(omni: Any, name: str, value: object) -> None:
    assert refusal(lambda: omni.generate("a", **{name: value})).param == name


@pytest.mark.parametrize("priority", [-1000, 0, 1000])
def test_priorities_that_are_taken(omni: Any, priority: int) -> None:
    assert omni.generate("a", priority=priority)[0].text == "a0 "


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"thinker": {5: 1}}, "sampling_params.thinker.5"),
        ({"thinker": {None: 1}}, "sampling_params.thinker"),
        ({5: {}}, "sampling_params.5"),
        ({"x" * 10**6: {}}, "sampling_params." + "x" * 80),
        ({"thinker": {"x" * 10**6: 1}}, "sampling_params.thinker." + "x" * 80),
        ({"thinker": {"max_tokens": "y" * 10**6}}, "sampling_params.thinker.max_tokens"),
        ({"thinker": {"max_tokens": 10**5000}}, "sampling_params.thinker.max_tokens"),
        ({"thinker": {"top_p": [["z" * 10**6] * 100] * 100}}, "sampling_params.thinker.top_p"),
    ],
    ids=short_repr,
)
def test_sampling_parameters_that_are_none(omni: Any, params: object, param: str) -> None:
    error = refusal(lambda: omni.generate("a", params))
    assert error.param is not None
    assert error.param.startswith(param)


def test_a_refused_parameter_is_quoted_in_short() -> None:
    error = refusal(lambda: SamplingParams.parse({"max_tokens": "y" * 10**6}))
    assert "(got 'yyy" in error.message
    assert len(error.message) < 250


def test_a_mapping_of_unknown_keys_is_quoted_in_short(omni: Any) -> None:
    assert refusal(lambda: omni.generate({"k" * 10**6 + str(i): 1 for i in range(9)})).param == "prompt"


@pytest.mark.parametrize("request_id", [5, [], {}, "", b"id", "\ud800"], ids=short_repr)
def test_a_request_id_is_text(request_id: object) -> None:
    async def scenario() -> None:
        async with door(AsyncOmni) as omni:
            with pytest.raises(InvalidRequestError) as caught:
                await anext(omni.generate("a", request_id=request_id))
            assert caught.value.param == "request_id"

    asyncio.run(scenario())


@pytest.mark.parametrize("request_id", [None, 5, [], {}], ids=short_repr)
def test_only_text_can_be_aborted_or_traced(omni: Any, request_id: object) -> None:
    assert refusal(lambda: omni.abort(request_id)).param == "request_id"
    assert refusal(lambda: omni.trace(request_id)).param == "request_id"
    assert omni.abort("nobody") is False
    assert omni.trace("nobody") is None


@pytest.mark.parametrize("kind", [Omni, AsyncOmni])
@pytest.mark.parametrize("overrides", [5, "thinker.max_running=4", [5], None], ids=short_repr)
def test_overrides_are_a_list_of_text(kind: type[Any], overrides: object) -> None:
    with pytest.raises(ConfigError) as caught:
        kind("model", overrides=overrides)
    assert caught.value.param is not None
    assert caught.value.param.startswith("overrides")


def test_overrides_may_be_a_list_or_a_tuple() -> None:
    for overrides in (["a.b=1"], ("a.b=1",)):
        assert OmniEngineArgs.parse({"model": "m", "overrides": overrides}).overrides == ("a.b=1",)


def test_a_model_name_too_long_for_the_system() -> None:
    with pytest.raises(CheckpointError) as caught:
        Omni("x" * 5000)
    assert caught.value.param == "model"


def test_a_configuration_path_with_a_nul(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    with pytest.raises(ConfigError) as caught:
        Omni(tmp_path, config="\0")  # type: ignore[arg-type]
    assert caught.value.param == "config"


def test_of_many_conversations_the_one_at_fault_is_named(omni: Any) -> None:
    bad = [{"role": "user", "content": "\ud800"}]
    assert refusal(lambda: omni.chat([HELLO, bad])).param == "conversations[1].messages[0].content"
    assert refusal(lambda: omni.chat(bad)).param == "messages[0].content"
    assert refusal(lambda: omni.chat([HELLO, HELLO], timeout="a")).param == "timeout"
