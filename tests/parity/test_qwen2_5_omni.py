"""Qwen2.5-Omni against stock `transformers`: tokens, codes, logits and sound, on random checkpoints in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import OmniEngineArgs
from omnistage.core.clips import VideoClip
from omnistage.core.family import BridgeResult
from omnistage.core.messages import AudioPart, ChatMessage, Part, TextPart, VideoPart
from omnistage.core.params import CodecParams, SamplingParams, StageParams
from omnistage.core.stage import Stage
from omnistage.core.types import FinishReason, RequestInfo, StageChunk
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.media.limits import MediaLimits
from omnistage.models._qwen_omni import verify as omni_cases
from omnistage.models._qwen_omni.bridges import talker2codec
from omnistage.models._qwen_omni.verify import KINDS, Answer, Case, ReferenceOutput, compare, make_cases
from omnistage.models._speech_verify import WAVE_TOLERANCE
from omnistage.models.qwen2_5_omni import tiny, verify
from omnistage.models.qwen2_5_omni.reference import Reference
from omnistage.omni import Omni
from omnistage.pipeline.build import EngineParts, build_parts
from omnistage.pipeline.messages.chat import parse_messages
from tests.e2e.harness import PipelineHarness, final_of
from tests.parity.omni_checks import check_answers, scale_rows

pytestmark = pytest.mark.slow

LOGITS_TOLERANCE = 1e-4 / 4
"""Of the largest logit, which is above 4 everywhere here; float32 sums in another order differ by about 5e-6 of it."""
PLAIN, LARGER, ENDING = "plain", "larger", "ending"
BOTH = ["text", "audio"]


# ---------------------------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class Bench:
    """A checkpoint, chats of every kind, and what the reference and our pipeline (in one batch) made of them."""

    folder: Path
    reference: Reference
    cases: list[Case]
    expected: list[ReferenceOutput]
    logits: list[dict[str, torch.Tensor]]
    """The reference's logits `[steps, V]` for each case, by stage."""
    answers: list[Answer]
    noise: Callable[[int], torch.Tensor]

    def check(self, answers: Sequence[Answer], cases: Sequence[int] | None = None) -> None:
        check_answers(self.cases, self.expected, answers, cases)


def make_ends_likely(folder: Path) -> None:
    """Scale the rows of the end tokens, so that replies and speech end by themselves now and then."""
    config = tiny.config_for(0.0)
    ends = {
        "thinker.lm_head.weight": (config.thinker_config.eos_token_id, 1.6),
        "talker.codec_head.weight": (tiny.CODEC_EOS, 2.6),
    }
    scale_rows(folder, ends)


def write_checkpoint(kind: str, folder: Path) -> None:
    options: dict[str, dict[str, Any]] = {PLAIN: {"seed": 1}, LARGER: {"seed": 2, "scale": 0.08}, ENDING: {"seed": 3}}
    tiny.write(folder, **options[kind])
    if kind == ENDING:
        make_ends_likely(folder)


@contextmanager
def reference_logits(reference: Reference) -> Iterator[dict[str, list[torch.Tensor]]]:
    """The logits `[V]` of every step of the reference, by stage."""
    model = reference.model
    steps: dict[str, list[torch.Tensor]] = {"thinker": [], "talker": []}

    def note(name: str) -> Callable[..., None]:
        return lambda _module, _args, out: steps[name].append(out[0, -1].float().clone())

    handles = [
        model.thinker.lm_head.register_forward_hook(note("thinker")),
        model.talker.codec_head.register_forward_hook(note("talker")),
    ]
    try:
        yield steps
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture(scope="module")
def make_bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """Each checkpoint is written, loaded and run once for the whole module."""
    made: dict[str, Bench] = {}

    def make(kind: str) -> Bench:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind) / "model"
            write_checkpoint(kind, folder)
            cases = make_cases(len(KINDS), seed=(PLAIN, LARGER, ENDING).index(kind))
            answers, noise = verify.run_ours(OmniRunner(folder), cases)
            reference = Reference(folder)
            expected, logits = [], []
            for case in cases:
                with reference_logits(reference) as steps:
                    expected.append(verify.run_reference(reference, case, noise))
                logits.append({name: torch.stack(rows) for name, rows in steps.items() if rows})
            made[kind] = Bench(folder, reference, cases, expected, logits, answers, noise)
        return made[kind]

    return make


# ------------------------------------------------------------------------------------------- whole answers


@pytest.mark.parametrize("kind", [PLAIN, LARGER, ENDING])
def test_chats_of_every_kind_in_one_batch_get_the_reference_answers(make_bench, kind: str) -> None:
    bench = make_bench(kind)
    bench.check(bench.answers)
    assert {case.name.split(":")[1] for case in bench.cases} == set(KINDS)
    # Equal answers must not be equal because they are empty, silent or all the same.
    spoken = [answer for answer in bench.answers if answer.codes]
    assert len(spoken) > len(bench.cases) / 2
    assert len({tuple(answer.codes) for answer in spoken}) == len(spoken)
    assert all(np.abs(answer.waveform).max() > 0.01 for answer in spoken)


def test_the_generated_cases_cover_what_they_must(make_bench) -> None:
    benches = [make_bench(kind) for kind in (PLAIN, LARGER, ENDING)]
    assert sum(len(bench.cases) for bench in benches) >= 20
    widths = {bench.reference.model.config.thinker_config.text_config.hidden_size for bench in benches}
    assert len(widths) == 2


def unusual_cases() -> list[Case]:
    """Sound that is longer or shorter than its video, several videos, media in every order, odd frames and rates."""
    rng = np.random.default_rng(5)

    def video(frames: int, sound: float | None = None, fps: float = 2.0, width: int = 84) -> VideoPart:
        pixels = rng.integers(0, 256, (frames, 56, width, 3), dtype=np.uint8)
        audio = None if sound is None else omni_cases._clip(rng, sound)
        return VideoPart(VideoClip(pixels, fps, frames / fps, audio), use_audio=audio is not None)

    def audio(seconds: float) -> AudioPart:
        return AudioPart(omni_cases._clip(rng, seconds))

    text = TextPart("What is it?")
    media: dict[str, list[Part]] = {
        "sound outlasts its video": [video(4, 9.0)],
        "video outlasts its sound": [video(12, 0.7)],
        "two videos with sound": [video(8, 4.0), video(4, 2.5)],
        "sound, video with sound, image": [audio(1.2), video(8, 4.0), omni_cases._image(rng)],
        "text between all": [text, omni_cases._image(rng), text, audio(1.0), text, video(4)],
        "a picture that is wider than its sound is long": [video(2, 0.05, width=224)],
        "one frame": [video(1)],
        "three frames": [video(3)],
        "slow frames": [video(8, None, 0.5)],
        "an odd rate": [video(10, 5.3, 1.7)],
        "the shortest sound": [omni_cases._image(rng), audio(0.03)],
        "a short sound beside a long one": [audio(0.4), audio(2.5)],
        "two short sounds": [audio(0.2), audio(0.7)],
    }
    return [Case(name, (ChatMessage("user", (*parts, text)),), 4, 14) for name, parts in media.items()]


def test_unusual_mixtures_get_the_reference_answers_too(make_bench) -> None:
    bench = make_bench(PLAIN)
    cases = unusual_cases()
    answers, noise = verify.run_ours(OmniRunner(bench.folder), cases)
    expected = [verify.run_reference(bench.reference, case, noise) for case in cases]
    replace(bench, cases=cases, expected=expected).check(answers)


def test_replies_and_speech_that_end_by_themselves_end_alike(make_bench) -> None:
    bench = make_bench(ENDING)
    short = [a for a, case in zip(bench.answers, bench.cases, strict=True) if len(a.token_ids) < case.max_tokens]
    brief = [a for a, case in zip(bench.answers, bench.cases, strict=True) if len(a.codes) < case.max_codes]
    assert short
    assert brief
    # A reply of one token has no row for the talker, and a talker may say nothing: neither side makes a sound then.
    assert [a.codes for a in bench.answers if len(a.token_ids) == 1] == [[]]
    assert [a.codes for a in bench.answers if len(a.token_ids) > 1].count([]) == 1
    assert all(bool(a.codes) == bool(len(a.waveform)) for a in bench.answers)
    assert all(tiny.CODEC_EOS not in answer.codes for answer in bench.answers)
    bench.check(bench.answers)


def test_a_difference_is_found(make_bench) -> None:
    bench = make_bench(PLAIN)
    answer, expected = bench.answers[0], bench.expected[0]
    changed = {
        "thinker tokens": replace(answer, token_ids=[*answer.token_ids[:-1], answer.token_ids[-1] ^ 1]),
        "talker codes": replace(answer, codes=answer.codes[:-1]),
        "waveform": replace(answer, waveform=answer.waveform + 2e-3),
    }
    for quantity, wrong in changed.items():
        assert [row.quantity for row in compare("", wrong, expected) if not row.ok] == [quantity]
    shorter = replace(answer, waveform=answer.waveform[:-1])
    assert [row.quantity for row in compare("", shorter, expected) if not row.ok] == ["waveform"]


# ------------------------------------------------------------------------------------------------- budgets


def ar_stage(stages: Mapping[str, Stage], name: str) -> ARStage:
    stage = stages[name]
    assert isinstance(stage, ARStage)
    return stage


def answer_turn_by_turn(bench: Bench, overrides: Sequence[str]) -> tuple[list[Answer], EngineParts]:
    """Our answers without threads: which request is preempted when depends on nothing but the budgets."""
    args = OmniEngineArgs(model=str(bench.folder), device="cpu", dtype="float32", overrides=tuple(overrides))
    parts, codes = build_parts(args, progress=False), dict[str, list[int]]()

    def note_codes(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        state, inputs = talker2codec(request, state, chunk)
        for value in inputs:
            codes.setdefault(request.request_id, []).extend(value.codes)  # type: ignore[union-attr]
        return state, inputs

    harness = PipelineHarness(parts, bridges={**parts.bridges, "token2wav": note_codes})
    streams = [
        harness.submit(case.name, case.as_sent(), verify_params(case), modalities=BOTH, use_audio_in_video=True)
        for case in bench.cases
    ]
    harness.finish()
    answers = []
    for case, items in zip(bench.cases, streams, strict=True):
        output = final_of(items)
        assert output.error is None
        assert output.audio is not None
        answers.append(Answer(output.token_ids, codes[case.name], output.audio.samples))
    return answers, parts


def verify_params(case: Case) -> dict[str, StageParams]:
    return {
        "thinker": SamplingParams(temperature=0.0, max_tokens=case.max_tokens),
        "talker": SamplingParams(temperature=0.0, max_tokens=case.max_codes, repetition_penalty=1.05),
        "token2wav": CodecParams(streaming=False, seed=verify._SEED),
    }


@pytest.mark.parametrize("name", ["thinker", "talker"])
def test_small_steps_and_a_pool_that_preempts_change_nothing(make_bench, name: str) -> None:
    bench = make_bench(PLAIN)
    # Room for the longest sequence and a little more, so that the others have to give way.
    longest = max(
        len(parsed_ids(bench, case)) + (case.max_tokens if name == "thinker" else case.max_codes + 2)
        for case in bench.cases
    )
    budget = {"max_batch_tokens": 40, "prefill_chunk": 24, "block_size": 8, "kv_blocks": -(-longest // 8) + 4}
    answers, parts = answer_turn_by_turn(bench, [f"{name}.{key}={value}" for key, value in budget.items()])
    bench.check(answers)
    assert ar_stage(parts.stages, name).stats().preemptions > 0


def parsed_ids(bench: Bench, case: Case) -> Sequence[int]:
    made, _ = bench.reference.inputs(case.messages)
    return made["input_ids"][0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("caching", [True, False])
def test_a_reused_prefix_changes_nothing(make_bench, caching: bool) -> None:
    """Every chat twice; the copies wait for the originals, whose blocks they then find (or not)."""
    bench = make_bench(PLAIN)
    overrides = [f"thinker.prefix_caching={caching}".lower(), "thinker.max_running=4", "thinker.block_size=8"]
    indices = [*range(len(bench.cases))] * 2
    runner = OmniRunner(bench.folder, overrides)
    answers, _ = verify.run_ours(runner, [bench.cases[i] for i in indices])
    bench.check(answers, indices)
    stage = ar_stage(runner.stages, "thinker")
    hits = stage.scheduler.pool.hits
    assert hits > 0 if caching else hits == 0
    stage.check_integrity()


def test_one_sequence_at_a_time_gives_the_same_as_a_batch(make_bench) -> None:
    bench = make_bench(LARGER)
    overrides = ["thinker.max_running=1", "talker.max_running=1", "token2wav.max_batch=1"]
    answers, _ = verify.run_ours(OmniRunner(bench.folder, overrides), bench.cases)
    bench.check(answers)


# -------------------------------------------------------------------------------------------------- logits


def watch_logits(stage: ARStage, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """The logits that our sampler is given, step by step, by request id."""
    steps: dict[str, list[torch.Tensor]] = {}
    launch = stage.runner.sampler.launch

    def watched(logits: torch.Tensor, keys: Sequence[str], ids: torch.Tensor | None) -> Any:
        for row, key in zip(logits.float().clone(), keys, strict=True):
            steps.setdefault(key.rsplit("/", 2)[0], []).append(row)
        return launch(logits, keys, ids)

    monkeypatch.setattr(stage.runner.sampler, "launch", watched)
    return steps


@pytest.mark.parametrize("overrides", [[], ["thinker.max_batch_tokens=24", "talker.max_batch_tokens=24"]])
@pytest.mark.parametrize("kind", [PLAIN, LARGER])
def test_the_logits_of_every_step_are_the_reference_ones(make_bench, monkeypatch, kind: str, overrides) -> None:
    """Both sides are greedy over equal tokens, so each step sees the same history: teacher forcing by equality."""
    bench = make_bench(kind)
    args = OmniEngineArgs(model=str(bench.folder), device="cpu", dtype="float32", overrides=tuple(overrides))
    parts = build_parts(args, progress=False)
    ours = {name: watch_logits(ar_stage(parts.stages, name), monkeypatch) for name in ("thinker", "talker")}
    params = [{**verify_params(case), "token2wav": CodecParams(num_steps=2, seed=0)} for case in bench.cases]
    with Omni.from_parts(parts.graph, parts.stages, parts.bridges, parts.defaults, parts.processor) as omni:
        outputs = omni.chat(
            [case.as_sent() for case in bench.cases],
            params,
            modalities=BOTH,
            use_audio_in_video=True,
            progress=False,
        )
    compared, worst = 0, 0.0
    for case, output, theirs in zip(bench.cases, outputs, bench.logits, strict=True):
        for name in ("thinker", "talker"):
            own, expected = torch.stack(ours[name][output.request_id]), theirs[name]
            assert own.shape == expected.shape, (case.name, name)
            difference = float((own - expected).abs().max() / expected.abs().max().clamp(min=1.0))
            assert difference < LOGITS_TOLERANCE, (case.name, name, difference)
            worst = max(worst, difference)
            compared += len(own)
    assert compared > 100
    print(f"\n{compared} steps, logits differ by at most {worst:.1e} of the largest one")


# -------------------------------------------------------------------------------------------------- voices


@pytest.mark.parametrize("index", [0, 1])
def test_the_other_voice_speaks_as_in_the_reference(make_bench, index: int) -> None:
    bench = make_bench(PLAIN)
    case = bench.cases[index]
    messages = parse_messages(case.as_sent(), MediaLimits())
    expected = bench.reference.run(
        messages, max_tokens=case.max_tokens, max_codes=case.max_codes, voice="Ethan", noise=bench.noise
    )
    assert expected.codes != bench.expected[index].codes
    with Omni(bench.folder, device="cpu", dtype="float32", progress=False) as omni:
        output = omni.chat(case.as_sent(), verify_params(case), modalities=BOTH, voice="Ethan", progress=False)
    assert output.finish_reason is FinishReason.LENGTH
    assert output.token_ids == expected.token_ids
    assert output.audio is not None
    assert expected.waveform is not None
    assert np.abs(output.audio.samples - expected.waveform).max() < WAVE_TOLERANCE


# ----------------------------------------------------------------------------------- the reference itself


def stock_codes(model: Any, inputs: dict[str, torch.Tensor], case: Case) -> list[list[int]]:
    """Codes that a stock model speaks for each row of a batch."""
    codes: list[list[int]] = []
    handle = model.token2wav.register_forward_pre_hook(
        lambda _module, args, _kwargs: codes.append(args[0][0].tolist()), with_kwargs=True
    )
    given = {f"thinker_{k}" if k.startswith("pixel_values") else k: v for k, v in inputs.items()}
    try:
        with torch.inference_mode():
            model.generate(
                **given,
                thinker_max_new_tokens=case.max_tokens,
                thinker_do_sample=False,
                talker_max_new_tokens=case.max_codes,
                talker_do_sample=False,
                token2wav_num_steps=2,
            )
    finally:
        handle.remove()
    return codes


def padded(inputs: dict[str, torch.Tensor], pad: int) -> dict[str, torch.Tensor]:
    """The same prompt, left-padded by one token as in a batch with a longer one."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    more = dict(inputs)
    more["input_ids"] = torch.cat((torch.full_like(ids[:, :1], pad), ids), dim=1)
    more["attention_mask"] = torch.cat((torch.zeros_like(mask[:, :1]), mask), dim=1)
    return more


@pytest.fixture(scope="module")
def stock(make_bench) -> Any:
    """The same checkpoint as `transformers` loads it, without our hook."""
    return transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(
        make_bench(PLAIN).folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    ).eval()


@pytest.mark.parametrize("kind", ["text", "image", "audio"])
def test_the_mask_hook_gives_what_a_stock_padded_batch_gives(make_bench, stock, kind: str) -> None:
    """`_keep_mask` restores what padding makes `transformers` keep by itself; it adds nothing of ours."""
    bench = make_bench(PLAIN)
    index = KINDS.index(kind)
    case = bench.cases[index]
    made, _ = bench.reference.inputs(parse_messages(case.as_sent(), MediaLimits()))
    pad = bench.reference.model.config.thinker_config.pad_token_id
    assert stock_codes(stock, padded(dict(made), pad), case) == [bench.expected[index].codes]
