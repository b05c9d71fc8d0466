"""Qwen3-Omni against stock `transformers`: tokens, codes of all codebooks and sound, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import OmniEngineArgs
from omnistage.core.errors import InvalidRequestError
from omnistage.core.messages import AudioPart, ChatMessage, TextPart
from omnistage.core.params import CodecParams, SamplingParams, StageParams
from omnistage.core.types import ARInput, CodecFrames, CodecInput, FinishReason, Modality, RequestInfo
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models._qwen_omni import verify as omni_cases
from omnistage.models._qwen_omni.verify import KINDS, Answer, Case, ReferenceOutput, make_cases
from omnistage.models._speech_verify import WAVE_TOLERANCE
from omnistage.models.qwen3_omni_moe import tiny, verify
from omnistage.models.qwen3_omni_moe.components import Talker, Thinker
from omnistage.models.qwen3_omni_moe.processor import Qwen3OmniProcessor
from omnistage.models.qwen3_omni_moe.reference import Reference
from omnistage.omni import Omni
from omnistage.pipeline.build import EngineParts, build_parts
from tests.e2e.harness import PipelineHarness, final_of
from tests.parity.omni_checks import check_answers, scale_rows
from tests.parity.test_qwen2_5_omni import ar_stage, unusual_cases

pytestmark = pytest.mark.slow

PLAIN, LARGER, ENDING = "plain", "larger", "ending"
BOTH = ["text", "audio"]


@dataclass(frozen=True)
class Bench:
    """A checkpoint, chats of every kind, and what the reference made of them."""

    folder: Path
    reference: Reference
    cases: list[Case]
    expected: list[ReferenceOutput]

    def check(self, answers: Sequence[Answer], cases: Sequence[int] | None = None) -> None:
        check_answers(self.cases, self.expected, answers, cases)


def make_ends_likely(folder: Path) -> None:
    """Scale the rows of the end tokens, so that replies and speech end by themselves now and then."""
    ends = {
        "thinker.lm_head.weight": (tiny.config_for(0.0).im_end_token_id, 3.0),
        "talker.codec_head.weight": (tiny.CODEC_EOS, 2.2),
    }
    scale_rows(folder, ends)


@pytest.fixture(scope="module")
def make_bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """Each checkpoint is written and run by the reference once for the whole module."""
    made: dict[str, Bench] = {}

    def make(kind: str) -> Bench:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind) / "model"
            tiny.write(folder, seed={PLAIN: 0, LARGER: 1, ENDING: 5}[kind], scale=0.06 if kind == LARGER else 0.0)
            if kind == ENDING:
                make_ends_likely(folder)
            cases = make_cases(len(KINDS), seed=(PLAIN, LARGER, ENDING).index(kind))
            reference = Reference(folder)
            expected = [verify.run_reference(reference, case) for case in cases]
            made[kind] = Bench(folder, reference, cases, expected)
        return made[kind]

    return make


# ------------------------------------------------------------------------------------------- whole answers


@pytest.mark.parametrize("kind", [PLAIN, LARGER, ENDING])
def test_chats_of_every_kind_in_one_batch_get_the_reference_answers(make_bench, kind: str) -> None:
    bench = make_bench(kind)
    answers = verify.run_ours(OmniRunner(bench.folder), bench.cases)
    bench.check(answers)
    # Equal answers must not be equal because they are empty, silent or all the same.
    spoken = [answer for answer in answers if answer.codes]
    assert len(spoken) > len(bench.cases) / 2
    assert len({tuple(answer.codes) for answer in spoken}) == len(spoken)
    assert all(np.abs(answer.waveform).max() > 0.01 for answer in spoken)
    groups = bench.reference.model.config.talker_config.num_code_groups
    assert {len(frame) for answer in spoken for frame in answer.codes} == {groups}
    if kind == ENDING:
        pairs = list(zip(answers, bench.cases, strict=True))
        assert any(len(a.token_ids) < case.max_tokens for a, case in pairs)
        assert any(0 < len(a.codes) < case.max_codes for a, case in pairs)


def test_the_cases_cover_what_they_must(make_bench) -> None:
    """A test over all three checkpoints compares at least twenty answers, as many of each kind as there are models."""
    benches = [make_bench(kind) for kind in (PLAIN, LARGER, ENDING)]
    kinds = [case.name.split(":")[1] for bench in benches for case in bench.cases]
    assert sorted(kinds) == sorted(KINDS * len(benches))
    assert len(kinds) >= 20
    assert sum(bool(expected.codes) for bench in benches for expected in bench.expected) >= 20


def test_unusual_mixtures_get_the_reference_answers_too(make_bench) -> None:
    bench = make_bench(PLAIN)
    cases = unusual_cases()
    expected = [verify.run_reference(bench.reference, case) for case in cases]
    Bench(bench.folder, bench.reference, cases, expected).check(verify.run_ours(OmniRunner(bench.folder), cases))


@pytest.mark.parametrize("seconds", [64.5, 70.3, 137.0])
def test_a_long_sound_is_encoded_in_pieces_that_change_nothing(make_bench, monkeypatch, seconds: float) -> None:
    bench = make_bench(PLAIN)
    sound = AudioPart(omni_cases._clip(np.random.default_rng(3), seconds))
    case = Case("long", (ChatMessage("user", (sound, TextPart("What is it?"))),), 4, 5)
    calls: list[int] = []
    stock = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.get_audio_features

    def counted(self: object, input_features: torch.Tensor, **options: object) -> object:
        calls.append(input_features.shape[-1])
        return stock(self, input_features, **options)

    expected = verify.run_reference(bench.reference, case)
    monkeypatch.setattr(transformers.Qwen3OmniMoeThinkerForConditionalGeneration, "get_audio_features", counted)
    answers = verify.run_ours(OmniRunner(bench.folder), [case])
    Bench(bench.folder, bench.reference, [case], [expected]).check(answers)
    assert sum(calls) == int(seconds * 100)
    assert max(calls) < 6500
    assert len(calls) == (1 if seconds < 65 else int(seconds // 64) + 1)


@pytest.mark.parametrize("voice", ["Chelsie", "aiden"])
def test_each_voice_speaks_as_in_the_reference(make_bench, voice: str) -> None:
    bench = make_bench(PLAIN)
    case = bench.cases[0]
    assert set(Qwen3OmniProcessor.load(bench.folder).voices()) == {"Chelsie", "Ethan", "Aiden"}
    options = {"max_tokens": case.max_tokens, "max_codes": case.max_codes}
    expected = bench.reference.run(case.messages, **options, voice=voice)
    assert expected.codes != bench.expected[0].codes
    with Omni(bench.folder, device="cpu", dtype="float32", progress=False) as omni:
        output = omni.chat(case.as_sent(), params_of(case), modalities=BOTH, voice=voice, progress=False)
    assert output.finish_reason is FinishReason.LENGTH
    assert output.token_ids == expected.token_ids
    assert output.audio is not None
    assert expected.waveform is not None
    assert np.abs(output.audio.samples - expected.waveform).max() < WAVE_TOLERANCE


# ------------------------------------------------------------------------------------------------- budgets


def params_of(case: Case) -> dict[str, StageParams]:
    return omni_cases.greedy(case, "code2wav")


def answer_turn_by_turn(bench: Bench, overrides: Sequence[str]) -> tuple[list[Answer], EngineParts]:
    """Our answers without threads: which request is preempted when depends on nothing but the budgets."""
    args = OmniEngineArgs(model=str(bench.folder), device="cpu", dtype="float32", overrides=tuple(overrides))
    parts, codes = build_parts(args, progress=False), dict[str, list[object]]()
    bridge = parts.bridges["code2wav"]

    def note_codes(request: RequestInfo, state: object, chunk: object) -> object:
        state, inputs = bridge(request, state, chunk)  # type: ignore[arg-type]
        for value in inputs:
            assert isinstance(value, CodecInput | CodecFrames)
            codes.setdefault(request.request_id, []).extend(value.codes)
        return state, inputs

    bridges: Mapping[str, object] = {**parts.bridges, "code2wav": note_codes}
    harness = PipelineHarness(parts, bridges=bridges)  # type: ignore[arg-type]
    streams = [
        harness.submit(case.name, case.as_sent(), params_of(case), modalities=BOTH, use_audio_in_video=True)
        for case in bench.cases
    ]
    harness.finish()
    answers = []
    for case, items in zip(bench.cases, streams, strict=True):
        output = final_of(items)
        assert output.error is None
        sound = np.zeros(0, np.float32) if output.audio is None else output.audio.samples  # a reply of one token
        answers.append(Answer(output.token_ids, codes.get(case.name, []), sound))  # type: ignore[arg-type]
    return answers, parts


@pytest.mark.parametrize("kind", [PLAIN, LARGER, ENDING])
@pytest.mark.parametrize(("name", "ahead"), [("thinker", False), ("talker", False), ("talker", True)])
def test_small_steps_and_a_pool_that_preempts_change_nothing(make_bench, name: str, ahead: bool, kind: str) -> None:
    """Chunks end inside pictures, whose features for deeper layers follow them; frames are fed back again."""
    bench = make_bench(kind)
    # Room for the longest sequence and a little more, so that the others have to give way.
    longest = max(
        len(bench.reference.inputs(case.messages)[0]["input_ids"][0])
        + (case.max_tokens if name == "thinker" else case.max_codes + 9)
        for case in bench.cases
    )
    budget = {"max_batch_tokens": 40, "prefill_chunk": 24, "block_size": 8, "kv_blocks": -(-longest // 8) + 4}
    overrides = [f"{name}.{key}={value}" for key, value in budget.items()]
    if ahead:
        overrides += ["thinker.run_ahead=true", "talker.run_ahead=true"]
    answers, parts = answer_turn_by_turn(bench, overrides)
    bench.check(answers)
    assert ar_stage(parts.stages, name).stats().preemptions > 0


@pytest.mark.parametrize("kind", [PLAIN, LARGER, ENDING])
def test_a_reused_prefix_changes_nothing(make_bench, kind: str) -> None:
    """Every chat twice; the copies wait for the originals, whose blocks they then find."""
    bench = make_bench(kind)
    overrides = ["thinker.prefix_caching=true", "thinker.max_running=4", "thinker.block_size=8"]
    indices = [*range(len(bench.cases))] * 2
    runner = OmniRunner(bench.folder, overrides)
    bench.check(verify.run_ours(runner, [bench.cases[i] for i in indices]), indices)
    stage = ar_stage(runner.stages, "thinker")
    assert stage.scheduler.pool.hits > 0
    stage.check_integrity()


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_no_implementation_of_the_experts_changes_an_answer(make_bench, experts: str) -> None:
    bench = make_bench(LARGER)
    overrides = [f"{stage}.experts={experts}" for stage in ("thinker", "talker")]
    bench.check(verify.run_ours(OmniRunner(bench.folder, overrides), bench.cases[:3]), range(3))


@pytest.mark.parametrize("kind", [PLAIN, LARGER, ENDING])
def test_streamed_speech_is_the_whole_utterance(make_bench, kind: str) -> None:
    bench = make_bench(kind)
    with Omni(bench.folder, device="cpu", dtype="float32", progress=False) as omni:
        for case, expected in zip(bench.cases, bench.expected, strict=True):
            params = {**params_of(case), "code2wav": CodecParams(streaming=True)}
            stream = omni.stream_chat(case.as_sent(), params, modalities=BOTH, use_audio_in_video=True)
            sounds = [item.audio.samples for item in stream if item.audio is not None]
            whole = np.zeros(0, np.float32) if expected.waveform is None else expected.waveform
            streamed = np.concatenate(sounds) if sounds else np.zeros(0, np.float32)
            assert streamed.shape == whole.shape, case.name
            assert np.abs(streamed - whole).max(initial=0.0) < WAVE_TOLERANCE, case.name


# --------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("variant", ["thinking", "captioner"])
def test_a_checkpoint_without_a_talker_answers_in_text_alone(tmp_path: Path, variant: str) -> None:
    folder = tmp_path / "model"
    tiny.write(folder, seed=4, variant=variant)
    assert Qwen3OmniProcessor.load(folder).voices() == ()
    case = make_cases(2, seed=4)[1]
    with Omni(folder, device="cpu", dtype="float32", progress=False) as omni:
        params = {"thinker": SamplingParams(temperature=0.0, max_tokens=6)}
        output = omni.chat(case.as_sent(), params, progress=False)
        with pytest.raises(InvalidRequestError, match="audio"):
            omni.chat(case.as_sent(), params, modalities=BOTH, progress=False)
    assert output.token_ids == Reference(folder).run(case.messages, max_tokens=6).token_ids


@pytest.fixture(name="talker", scope="module")
def _talker(make_bench) -> Talker:
    stage = OmniRunner(make_bench(PLAIN).folder).build_stage("talker")
    assert isinstance(stage, ARStage)
    assert isinstance(stage.component, Talker)
    return stage.component


def test_the_talker_refuses_what_is_no_chat(talker: Talker) -> None:
    whole = talker._whole
    start, user, assistant = whole.im_start_token_id, whole.user_token_id, whole.assistant_token_id
    for ids in ((1, 2, 3, 4), (start, user, 5, 6), (start, assistant, 5)):
        rows = torch.zeros(len(ids), whole.talker_config.thinker_hidden_size)
        with pytest.raises(InvalidRequestError, match="chat"):
            talker.prepare(RequestInfo("a"), ARInput(ids, embeds=rows))
    with pytest.raises(InvalidRequestError, match="thinker"):
        talker.prepare(RequestInfo("a"), ARInput((1,)))
    with pytest.raises(InvalidRequestError, match="Aiden"):
        talker.prepare(RequestInfo("a", voice="Eve"), ARInput((1,), embeds=torch.zeros(1, 4)))


def test_a_reply_that_began_in_the_prompt_is_spoken_from_its_beginning(talker: Talker) -> None:
    whole = talker._whole
    ids = (whole.im_start_token_id, whole.assistant_token_id, 5, 6, 7, 8)
    rows = torch.randn(6, whole.talker_config.thinker_hidden_size, generator=torch.Generator().manual_seed(1))
    later = torch.randn(2, rows.shape[1], generator=torch.Generator().manual_seed(2))
    made = talker.prepare(RequestInfo("a"), ARInput(ids, embeds=rows, side_rows=later, streaming=True))
    assert len(made.token_ids) == 9
    assert made.side_rows is not None
    assert torch.equal(made.side_rows, torch.cat((rows[4:], later)))


def test_pictures_reach_the_first_layers(make_bench) -> None:
    stage = OmniRunner(make_bench(PLAIN).folder).build_stage("thinker")
    assert isinstance(stage, ARStage)
    assert isinstance(stage.component, Thinker)
    levels = len(stage.component.model.config.vision_config.deepstack_visual_indexes)
    assert stage.component.spec.deep_size == levels * stage.component.spec.embed_size
    messages = [ChatMessage("user", (*make_cases(2, seed=0)[1].messages[0].parts, TextPart("?")))]
    payload = Qwen3OmniProcessor.load(make_bench(PLAIN).folder).chat(messages)
    [span] = payload.media
    assert span.kind is Modality.IMAGE
    with torch.inference_mode():
        rows = stage.component.encode(span)
    assert rows.shape == (len(span.positions), (1 + levels) * stage.component.spec.embed_size)
