"""CSM against transformers: the same frames and samples, alone and together, until the same end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import ARBudget
from omnistage.core.clips import AudioClip
from omnistage.core.errors import CheckpointError, InvalidRequestError, PromptTooLongError
from omnistage.core.messages import AudioPart, ChatMessage, TextPart
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.types import (
    ARInput,
    FinishReason,
    OmniTokensPrompt,
    RequestInfo,
    StageChunk,
    StageInput,
    TokenChunk,
)
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.codec import Window
from omnistage.engines.graphs import GraphCache
from omnistage.hf import transformers
from omnistage.models.csm.backbone import Backbone
from omnistage.models.csm.bridges import END_CODE, frames2codec
from omnistage.models.csm.mimi import Mimi
from omnistage.models.csm.processor import CsmProcessor
from omnistage.models.csm.tiny import config_for, write
from omnistage.models.csm.verify import Reference, make_cases, run, run_ours
from omnistage.omni import Omni
from tests.graph_harness import FakeCapture, HostTensors

Frames = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("csm")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def processor(folder: Path) -> CsmProcessor:
    return CsmProcessor.load(folder)


# ------------------------------------------------------------------------------------------------ whole speech


def test_verify_finds_no_difference(folder: Path) -> None:
    """Twelve texts, half of them after a conversation with clips, in one batch of the streamed pipeline."""
    rows = run(OmniRunner(folder), cases=12, seed=3)
    assert len(rows) == 24
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("backbone.max_batch_tokens=16",),
        ("backbone.block_size=16", "backbone.kv_blocks=12"),
        ("codec.first_chunk_blocks=1", "codec.max_chunk_blocks=1"),
    ],
    ids=["chunked prefill", "preempted", "frame by frame"],
)
def test_how_it_is_scheduled_changes_nothing(folder: Path, reference: Reference, overrides: tuple[str, ...]) -> None:
    cases, runner = make_cases(4, seed=9), OmniRunner(folder, overrides)
    for case, speech in zip(cases, run_ours(runner, cases), strict=True):
        expected = reference.run(case)
        assert speech.frames == expected.frames
        assert np.abs(speech.samples - expected.samples).max() < 1e-5
    if "backbone.kv_blocks=12" in overrides:
        assert runner.stages["backbone"].stats().preemptions > 0


def test_a_voice_is_the_number_before_the_text(folder: Path, processor: CsmProcessor) -> None:
    ids = {v: processor.with_voice(v).text("Hello!").token_ids for v in (None, "0", "7")}
    assert ids[None] == ids["0"] != ids["7"]
    with Omni(folder, device="cpu", progress=False, overrides=("backbone.temperature=0",)) as omni:
        sounds = [
            omni.generate("Hello!", sampling_params={"backbone": {"max_tokens": 4}}, voice=voice)[0].audio
            for voice in (None, "0", "7")
        ]
    assert [sound is not None and len(sound.samples) for sound in sounds] == [4 * 1920] * 3
    assert np.array_equal(sounds[0].samples, sounds[1].samples)  # type: ignore[union-attr]
    assert not np.array_equal(sounds[0].samples, sounds[2].samples)  # type: ignore[union-attr]


def test_the_last_message_is_said_with_the_voice_whoever_sends_it(processor: CsmProcessor) -> None:
    ids = {
        role: processor.with_voice("4").chat([ChatMessage(role, (TextPart("Hello!"),))]).token_ids
        for role in ("user", "assistant")
    }
    assert ids["user"] == ids["assistant"] == processor.with_voice("4").text("Hello!").token_ids


# --------------------------------------------------------------------------------------------------- the end


@pytest.fixture
def backbone(folder: Path) -> Backbone:
    """One that a test may change."""
    component = OmniRunner(folder).load_component("backbone")
    assert isinstance(component, Backbone)
    return component


def generate(component: Backbone, ids: tuple[int, ...], count: int) -> tuple[list[Frames], FinishReason | None]:
    stage = ARStage("backbone", component, ARBudget(kv_blocks=32))
    params = SamplingParams(temperature=0.0, max_tokens=count)
    stage.submit(StageInput(RequestInfo("r"), params, ARInput(ids, context={END_CODE: torch.tensor(0)})))
    state, sent, finish = None, [], None
    for chunk in stage.drain():
        state, inputs = frames2codec(RequestInfo("r"), state, chunk)
        sent += [item.codes for item in inputs]  # type: ignore[union-attr]
        finish = chunk.finish or finish
    return sent, finish


def end_at(model: torch.nn.Module, place: int, codes: tuple[int, ...]) -> None:
    """Let the frame at this place have just these codes, by the logits of both decoders."""
    count = 0

    def backbone(_module: object, _inputs: object, logits: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return bias(logits, codes[0]) if count == place + 1 else logits

    def bias(logits: torch.Tensor, code: int) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([code]), 1e3)

    model.lm_head.register_forward_hook(backbone)  # type: ignore[operator,union-attr]
    weight = model.depth_decoder.codebooks_head.weight  # type: ignore[union-attr]
    inner = model.depth_decoder.model  # type: ignore[union-attr]
    step = 0

    def depth(_module: object, _inputs: object, out: object) -> object:
        nonlocal step
        if count == place + 1 and step < len(codes) - 1:
            # The row that this head turns into the code.
            hidden = out.last_hidden_state  # type: ignore[attr-defined]
            hidden[:, -1] = 100 * weight[step][:, codes[step + 1]]
            step += 1
        return out

    inner.register_forward_hook(depth)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("codes", "kept"),
    [((0, 0, 0, 0), 3), ((0, 0, 0, 5), 4)],
    ids=["a frame of end codes", "its last code differs"],
)
def test_speech_ends_with_a_frame_of_end_codes(
    folder: Path, backbone: Backbone, processor: CsmProcessor, codes: tuple[int, ...], kept: int
) -> None:
    case = make_cases(1, seed=1)[0]
    theirs = Reference(folder)
    end_at(theirs.model, 3, codes)
    expected = theirs.run(type(case)(case.name, (), case.text, 12))
    assert len(expected.frames) == kept
    end_at(backbone.model, 3, codes)
    sent, finish = generate(backbone, processor.text(case.text).token_ids, 12)
    assert finish is FinishReason.STOP
    assert [frame for part in sent for frame in part] == expected.frames
    assert len(expected.samples) == kept * 1920


def test_an_end_code_at_the_beginning_of_a_frame_is_sound(
    folder: Path, backbone: Backbone, processor: CsmProcessor
) -> None:
    case = make_cases(1, seed=1)[0]
    theirs = Reference(folder)
    end_at(theirs.model, 3, (0, 9, 0, 0))
    expected = theirs.run(type(case)(case.name, (), case.text, 8))
    assert len(expected.frames) == 8
    end_at(backbone.model, 3, (0, 9, 0, 0))
    sent, finish = generate(backbone, processor.text(case.text).token_ids, 8)
    assert finish is FinishReason.LENGTH
    assert [frame for part in sent for frame in part] == expected.frames


def test_the_bridge_leaves_out_the_end(processor: CsmProcessor) -> None:
    prompt = processor.text("Hello")
    chunks = [
        TokenChunk((1, 0), frames=((1, 2), (0, 1)), prompt=prompt),
        TokenChunk((0,), frames=((0, 0),)),
        TokenChunk((64,), frames=((64, 3),), ended_by=64),
    ]
    state, sent = None, []
    for chunk, finish in zip(chunks, (None, None, FinishReason.STOP), strict=True):
        state, inputs = frames2codec(RequestInfo("r"), state, StageChunk("r", "backbone", chunk, finish=finish))
        sent += inputs
    assert [(item.codes, item.final) for item in sent] == [(((1, 2), (0, 1)), False), ((), True)]  # type: ignore[union-attr]


def test_a_prompt_that_spells_the_codes_of_other_speech_is_text(folder: Path, reference: Reference) -> None:
    """Blocks of the KV cache are found by tokens: those of frames must not be taken for text."""
    beginning = tuple(range(5))
    with Omni(folder, device="cpu", progress=False, overrides=("backbone.block_size=8",)) as omni:

        def speak(ids: tuple[int, ...], count: int) -> np.ndarray:
            params = {"backbone": SamplingParams(temperature=0.0, max_tokens=count)}
            audio = omni.generate(OmniTokensPrompt(ids), params)[0].audio
            assert audio is not None
            return np.asarray(audio.samples)

        speak(beginning, 30)
        codes = generated(reference, beginning, 25)
        spelled = (*beginning, *(frame[0] for frame in codes))
        wave = speak(spelled, 4)
    expected = torch.tensor(generated(reference, spelled, 4)).T[None]
    with torch.inference_mode():
        whole = reference.model.codec_model.decode(expected).audio_values[0, 0].numpy()
    assert np.abs(wave - whole).max() < 1e-5


def generated(reference: Reference, ids: tuple[int, ...], count: int) -> list[list[int]]:
    options = {"do_sample": False, "depth_decoder_do_sample": False, "max_new_tokens": count}
    with torch.inference_mode():
        tokens = torch.tensor([ids])
        out = reference.model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)
    frames: list[list[int]] = out[0].tolist()
    return frames


def test_a_conversation_that_goes_on_is_found_in_the_prefix_cache(folder: Path, processor: CsmProcessor) -> None:
    backbone = OmniRunner(folder).load_component("backbone")
    assert isinstance(backbone, Backbone)
    clip = AudioClip(np.sin(np.arange(24_000, dtype=np.float32) / 20), 24_000)
    before = ChatMessage("user", (TextPart("What was said before."), AudioPart(clip)))
    params = SamplingParams(temperature=0.0, max_tokens=8)
    found: list[list[Frames]] = []
    for caching in (False, True):
        stage = ARStage("backbone", backbone, ARBudget(kv_blocks=64, block_size=8, prefix_caching=caching))
        found.append([])
        for text in ("One.", "Two of them."):
            payload = processor.chat([before, ChatMessage("user", (TextPart(text),))])
            stage.submit(StageInput(RequestInfo(text), params, payload))
            chunks = [chunk for _ in range(20) for chunk in stage.step()]
            frames = (c.payload.frames for c in chunks if isinstance(c.payload, TokenChunk))
            found[-1].append(tuple(frame for some in frames for frame in some))
    assert found[0] == found[1]
    assert stage.scheduler.pool.hits >= 3


# ------------------------------------------------------------------------------------------------- the codec


@pytest.fixture(scope="module")
def mimi(folder: Path) -> Mimi:
    component = OmniRunner(folder).load_component("codec")
    assert isinstance(component, Mimi)
    return component


@pytest.fixture(scope="module")
def frames() -> Frames:
    codes = torch.randint(0, 64, (40, 4), generator=torch.Generator().manual_seed(1))
    return tuple(tuple(frame) for frame in codes.tolist())


def streamed(mimi: Mimi, frames: Frames, cuts: list[int]) -> np.ndarray:
    state, done, waves = mimi.open("r", CodecParams(), None), 0, []
    for count in (*cuts, len(frames) - sum(cuts)):
        window = Window(state, frames[done : done + count], 0, count, done + count == len(frames))
        waves += mimi.decode([window])
        done += count
    return np.concatenate(waves)


@pytest.mark.parametrize("cuts", [[], [1] * 39, [2, 2, 4, 8, 16], [13, 1]], ids=str)
def test_streamed_windows_equal_the_whole_decode(
    mimi: Mimi, reference: Reference, frames: Frames, cuts: list[int]
) -> None:
    with torch.inference_mode():
        expected = reference.model.codec_model.decode(torch.tensor(frames).T[None]).audio_values[0, 0].numpy()
    assert expected.std() > 1e-3
    wave = streamed(mimi, frames, cuts)
    assert wave.shape == expected.shape == (40 * 1920,)
    assert np.abs(wave - expected).max() < 1e-5


def test_replayed_graphs_give_the_same(folder: Path, mimi: Mimi, frames: Frames) -> None:
    graphed = OmniRunner(folder).load_component("codec")
    assert isinstance(graphed, Mimi)
    graphed._graphs = GraphCache(enabled=True, capture=FakeCapture())
    graphed.warm_up((2, 2, 4, 8), 0, 16)
    captures = graphed._graphs.captures
    assert np.abs(streamed(graphed, frames[:23], [2, 2, 4, 8]) - streamed(mimi, frames[:23], [])).max() < 1e-6
    assert graphed._graphs.captures == captures


def test_a_codec_that_looks_ahead_is_refused(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.model.codec_model.config, "trim_right_ratio", 0.5)
    with pytest.raises(CheckpointError, match="not of a causal codec"):
        Mimi(reference.model.codec_model)


def test_nothing_of_the_host_is_read_in_what_is_captured() -> None:
    config, cuda = config_for(0.0), torch.device("cuda")
    with torch.device("meta"):
        model = transformers.CsmForConditionalGeneration(config)
        codes, ids = torch.zeros(2, 4, 6, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    mimi, backbone = Mimi(model.codec_model, num_codebooks=4, target=cuda), Backbone(model)
    with torch.inference_mode(), HostTensors() as host:
        rows = torch.empty(2, mimi._contexts.size, device="meta")
        mimi._function(False)(codes, rows, codes[:, 0, 0])
        hidden = torch.empty(3, config.hidden_size + 1, device="meta")
        predicted = backbone.predict(hidden, ids, lambda logits, _: logits.argmax(-1))
        backbone.logits(backbone.embed_frames(torch.cat((ids[:, None], predicted), dim=1)))
    assert host.found == []


# ------------------------------------------------------------------------------------------------- requests


def clip(seconds: float = 0.5) -> AudioPart:
    samples = 0.1 * np.random.default_rng(0).standard_normal(int(24_000 * seconds))
    return AudioPart(AudioClip(samples.astype(np.float32), 24_000))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([ChatMessage("system", (TextPart("Be kind."),))], "no system messages"),
        ([ChatMessage("user", (clip(),))], "has no text"),
        ([ChatMessage("user", (TextPart("Hi"), clip()))], "the last message is spoken and has no clip"),
        ([ChatMessage("user", (TextPart("Hi"),)), ChatMessage("assistant", (TextPart("Yes"),))], "has 0 clips"),
    ],
)
def test_conversations_that_cannot_be_spoken_are_refused(
    processor: CsmProcessor, messages: list[ChatMessage], problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        processor.chat(messages)


def test_what_does_not_fit_the_context_is_refused(processor: CsmProcessor) -> None:
    long = ChatMessage("user", (TextPart("Hi"), clip(165.0)))
    with pytest.raises(PromptTooLongError, match="2048 tokens"):
        processor.chat([long, ChatMessage("assistant", (TextPart("Yes"),))])


def test_special_tokens_in_a_text_stay_text(processor: CsmProcessor) -> None:
    ids = processor.text("a <|AUDIO|> b <|audio_eos|>").token_ids
    assert {processor._audio, processor._audio_end} & set(ids) == set()
    with pytest.raises(InvalidRequestError, match="placeholders of audio"):
        processor.tokens(OmniTokensPrompt((processor._audio,)))


def test_a_clip_is_encoded_once_for_its_content(folder: Path, processor: CsmProcessor) -> None:
    said = ChatMessage("assistant", (TextPart("Hi"), clip()))
    spans = [processor.chat([said, ChatMessage("assistant", (TextPart(t),))]).media[0] for t in ("One", "Two")]
    assert spans[0].key == spans[1].key
    assert len(spans[0].positions) == 7  # 0.5 s in frames of 80 ms


# ----------------------------------------------------------------------------------------- small checkpoints


def test_a_checkpoint_grows_to_the_published_shapes() -> None:
    for scale in (0.0, 0.2, 0.5, 0.75):
        config_for(scale)
    ours, published = config_for(1.0).to_dict(), transformers.CsmConfig().to_dict()
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_codebooks")
    assert [ours[name] for name in same] == [published[name] for name in same]
    assert ours["codec_config"] == published["codec_config"]
    depth = {**ours["depth_decoder_config"], "vocab_size": 2051}
    assert depth == published["depth_decoder_config"]


def test_the_seed_decides_every_byte(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "again", seed=0)
    write(tmp_path / "other", seed=1)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    name = "model.safetensors"
    assert (folder / name).read_bytes() != (tmp_path / "other" / name).read_bytes()
