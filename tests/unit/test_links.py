"""Edges inside a worker: folded there, with the same rules as the orchestrator's, and nothing is left of a request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from omnistage.core.errors import BridgeError
from omnistage.core.family import Bridge, BridgeResult
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.types import (
    ARInput,
    CodecFrames,
    CodecInput,
    Condition,
    FinishReason,
    Latents,
    LinkedStage,
    RequestInfo,
    StageChunk,
    StageInput,
    TokenChunk,
)
from omnistage.pipeline.links import Links, links_within
from omnistage.pipeline.loop import StageLoop
from tests.unit.fakes import AUDIO, TEXT, FakeStage, linear, make_graph, stream_into

KEY = 4711


class Rig:
    """talker and vocoder of one worker, driven by hand; what would be sent to the service is in `sent`."""

    def __init__(self, bridge: Bridge) -> None:
        self.sent: list[tuple[int, StageChunk]] = []
        self.stages = {name: FakeStage(name, audio=name == "vocoder") for name in ("talker", "vocoder")}
        self.loops = {name: StageLoop(stage, self._emit) for name, stage in self.stages.items()}
        self.links = Links(linear(), self.loops, {"vocoder": bridge}, self._send)

    def _send(self, key: int, chunk: StageChunk) -> None:
        self.sent.append((key, chunk))

    def _emit(self, key: int, chunk: StageChunk) -> None:
        self._send(key, self.links.pass_on(key, chunk))

    def submit(self, tokens: int = 3) -> None:
        linked = (LinkedStage("vocoder", CodecParams()),)
        stage_input = StageInput(RequestInfo("r"), SamplingParams(), ARInput((tokens,)), linked=linked)
        self.links.open(KEY, stage_input)
        self.loops["talker"].submit(stage_input, KEY)

    def run(self) -> None:
        while any(loop.run_pending() for loop in self.loops.values()):
            pass

    def ends(self, stage: str) -> list[StageChunk]:
        return [chunk for _, chunk in self.sent if chunk.stage == stage and chunk.finish is not None]

    def assert_empty(self) -> None:
        assert not self.links._links
        assert not any(stage.jobs for stage in self.stages.values())


def constant(*inputs: object) -> Callable[..., BridgeResult]:
    def bridge(_info: object, state: object, _chunk: object) -> BridgeResult:
        return True, [] if state else list(inputs)  # type: ignore[return-value]

    return bridge


def test_what_flows_over_an_inner_edge_arrives_and_both_ends_are_sent() -> None:
    rig = Rig(stream_into(audio=True))
    rig.submit(3)
    rig.run()
    assert {key for key, _ in rig.sent} == {KEY}
    assert [end.finish for end in rig.ends("talker") + rig.ends("vocoder")] == [FinishReason.STOP] * 2
    sounds = [chunk.payload for _, chunk in rig.sent if chunk.stage == "vocoder" and chunk.payload is not None]
    assert [sound.samples[0] for sound in sounds] == [0, 1, 2]  # type: ignore[union-attr]
    rig.assert_empty()


def test_a_stage_that_its_bridge_never_starts_ends_with_its_source() -> None:
    rig = Rig(constant())
    rig.submit()
    rig.run()
    assert [end.finish for end in rig.ends("vocoder")] == [FinishReason.STOP]
    rig.assert_empty()


@pytest.mark.parametrize(
    ("bridge", "problem"),
    [
        (constant(CodecInput()), "left the stage waiting"),
        (constant(CodecFrames((1,))), "must start it before"),
        (constant(CodecInput(), CodecInput()), "started it a second time"),
        (constant("nonsense"), "not a stage input"),
        (lambda *_: 1 / 0, "failed with ZeroDivisionError"),
    ],
)
def test_a_bridge_at_fault_ends_its_request_once(bridge: Bridge, problem: str) -> None:
    rig = Rig(bridge)
    rig.submit()
    rig.run()
    (end,) = rig.ends("vocoder")
    assert isinstance(end.error, BridgeError)
    assert problem in str(end.error)
    rig.assert_empty()


@pytest.mark.parametrize("order", [("talker", "vocoder"), ("vocoder", "talker")])
def test_an_abort_ends_a_request_on_both_sides_of_an_edge(order: tuple[str, str]) -> None:
    rig = Rig(stream_into(audio=True))
    rig.submit(50)
    for _ in range(3):
        rig.loops["talker"].run_pending()
        rig.loops["vocoder"].run_pending()
    for stage in order:
        rig.links.close(KEY, "r", stage)
        rig.loops[stage].abort("r", KEY)
    rig.run()
    assert not rig.ends("talker")
    assert not rig.ends("vocoder")
    rig.assert_empty()


def test_an_error_of_the_source_ends_the_stages_behind_it() -> None:
    rig = Rig(stream_into(audio=True))
    rig.submit(50)
    rig.loops["talker"].run_pending()
    rig.loops["vocoder"].run_pending()
    rig.stages["talker"].fail_request["r"] = None
    rig.run()
    assert [end.finish for end in rig.ends("talker")] == [FinishReason.ERROR]
    assert not rig.ends("vocoder")  # the service ends the request
    rig.assert_empty()


def test_tensors_that_only_stages_in_the_process_read_are_not_sent() -> None:
    rig, tensor = Rig(constant()), torch.ones(4, 4)
    payloads = [TokenChunk((1,), hidden=tensor), Condition({"a": tensor}), Latents(tensor, 8, 8)]
    for payload in payloads:
        sent = rig.links.pass_on(KEY, StageChunk("r", "talker", payload)).payload
        assert type(sent) is type(payload)
        assert rig.links.pass_on(KEY, StageChunk("r", "vocoder", payload)).payload is payload
    token, condition, latents = (rig.links.pass_on(KEY, StageChunk("r", "talker", p)).payload for p in payloads)
    assert (token.token_ids, token.hidden) == ((1,), None)  # type: ignore[union-attr]
    assert condition.positive == {}  # type: ignore[union-attr]
    assert latents.picture.numel() == 0  # type: ignore[union-attr]


def test_which_edges_stay_inside_a_group() -> None:
    graph = make_graph(
        ("hear", "think", "talk", "style", "sing"),
        {"think": ("hear",), "talk": ("think",), "style": ("talk",), "sing": ("talk", "style")},
        {TEXT: "think", AUDIO: "sing"},
    )
    everything = links_within(graph, graph.order)
    # Not the lead stage (think), nor one with several sources (sing); style is behind talk, which is behind think.
    assert everything == {"think": ("talk", "style"), "talk": ("style",)}
    assert links_within(graph, ("hear", "think")) == {}
    assert links_within(graph, ("talk", "sing")) == {}
