"""Stages run side by side: speech begins while the reply is still being written, and is the same speech."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from omnistage.core.types import FinishReason, Modality
from omnistage.omni import AsyncOmni, Omni
from omnistage.pipeline.build import EngineParts
from omnistage.pipeline.outputs import OutputChunk
from tests.e2e.harness import (
    PipelineHarness,
    SpeechModel,
    assert_empty,
    every_speech_model,
    final_of,
    greedy,
    open_door,
    say,
)
from tests.hang_guard import HANG_SECONDS

TOKENS, CODES = 160, 150
QUESTION = "Tell me a long story, please."
BOTH = ["text", "audio"]
SAMPLES_PER_CODE = 480


def snr_db(wave: np.ndarray, reference: np.ndarray) -> float:
    noise = float(np.square(wave - reference, dtype=np.float64).sum())
    return float("inf") if noise == 0 else 10 * np.log10(float(np.square(reference, dtype=np.float64).sum()) / noise)


def click_ratio(error: np.ndarray, borders: np.ndarray) -> float:
    """The error's largest jump at a chunk border, as a multiple of its largest jump anywhere else."""
    jumps = np.abs(np.diff(error))
    at_border = np.zeros(len(jumps), dtype=bool)
    at_border[borders - 1] = True
    return float(jumps[at_border].max() / jumps[~at_border].max())


# ------------------------------------------------------------------------------------ the order of events


@every_speech_model
def test_turn_by_turn_the_first_sound_comes_before_the_last_word(
    load: Callable[..., EngineParts], speech: SpeechModel
) -> None:
    """Without threads each turn gives every stage one step, so the order of events cannot depend on timing."""
    harness = PipelineHarness(load(f"{speech.codec}.max_hold_seconds=0"))
    items = harness.submit("story", say(QUESTION), speech.greedy(TOKENS, CODES), modalities=BOTH)
    turns = 0
    while not any(item.audio is not None for item in items):
        harness.turns(1)
        turns += 1
    trace = harness.orchestrator.trace("story")
    assert trace is not None
    assert trace.stages["thinker"].finish is None
    assert sum(len(item.token_ids) for item in items) < TOKENS / 2
    # Qwen2.5: a block of 12 codes, its vocoder's context and two blocks of look-ahead; Qwen3: its first few frames.
    assert trace.stages["talker"].tokens <= speech.first_codes
    assert turns < TOKENS / 2
    harness.finish()
    output = final_of(items)
    assert output.finish_reason is FinishReason.LENGTH
    assert output.usage.stage_tokens == {"thinker": TOKENS, "talker": CODES, speech.codec: 0}
    assert output.audio is not None
    assert len(output.audio.samples) == speech.samples(CODES)


@every_speech_model
def test_with_threads_sound_does_not_wait_for_the_end_of_the_text(
    load: Callable[..., EngineParts], speech: SpeechModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thinker is held at its last word until a sound has come: the run ends only if the stages overlap."""
    parts = load()
    thinker, heard, stuck = parts.stages["thinker"], threading.Event(), threading.Event()
    step, emitted = thinker.step, 0

    def held_step() -> Any:
        nonlocal emitted
        if emitted == TOKENS - 1 and not heard.wait(HANG_SECONDS):
            stuck.set()
        chunks = step()
        emitted += sum(len(c.payload.token_ids) for c in chunks if c.payload is not None)  # type: ignore[union-attr]
        return chunks

    monkeypatch.setattr(thinker, "step", held_step)

    async def listen() -> list[OutputChunk]:
        items = []
        async with open_door(parts, AsyncOmni) as omni:
            async for item in omni.generate(say(QUESTION), speech.greedy(TOKENS, CODES), modalities=BOTH):
                items.append(item)
                if item.audio is not None:
                    heard.set()
            assert_empty(omni.orchestrator)
        return items

    items = asyncio.run(listen())
    assert not stuck.is_set()
    final = items[-1].final
    assert final is not None
    assert final.trace is not None
    stages = final.trace.stages
    assert stages[speech.codec].first_chunk < stages["thinker"].last_chunk
    assert stages["talker"].first_chunk < stages["thinker"].last_chunk
    assert stages["thinker"].first_chunk < stages["talker"].first_chunk < stages[speech.codec].first_chunk
    kinds = [item.modality for item in items if item.token_ids or item.audio is not None]
    assert kinds.index(Modality.AUDIO) < len(kinds) - 1 - kinds[::-1].index(Modality.TEXT)
    print(f"\n{final.trace}")


# --------------------------------------------------------------------------------------------- the sound


@pytest.fixture(scope="module")
def attentive(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a decoder that attends hard, so that what it does not see in time is heard."""
    folder = tmp_path_factory.mktemp("attentive") / "model"
    shutil.copytree(checkpoint, folder)
    factors = {".attn.to_out": 12.0, ".attn.to_q": 3.0, ".attn.to_k": 3.0}
    changed = 0
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            part = next((part for part in factors if part in name), None)
            if "code2wav_dit_model" in name and part is not None and tensor.ndim == 2:
                tensor *= factors[part]
                changed += 1
        save_file(tensors, path, metadata={"format": "pt"})
    assert changed
    return folder


@pytest.fixture(scope="module")
def spoken(load: Callable[..., EngineParts], attentive: Path) -> dict[str, list[np.ndarray]]:
    """The same utterance at full quality, streamed (also without look-ahead) and whole, as the chunks that came.

    Chunks of one block each: the most borders that there can be, and the same ones whatever the timing.
    """
    wave: dict[str, list[np.ndarray]] = {}
    for lookahead, names in (("2", ("streamed", "whole")), ("0", ("blind",))):
        budget = ("token2wav.max_chunk_blocks=1", f"token2wav.lookahead_blocks={lookahead}")
        with open_door(load(*budget, folder=attentive)) as omni:
            for name in names:
                params = greedy(40, CODES, num_steps=10, streaming=name != "whole")
                items = list(omni.stream_chat(say(QUESTION), params, modalities=BOTH))
                wave[name] = [item.audio.samples for item in items if item.audio is not None]
    return wave


def test_streamed_speech_is_as_long_as_the_whole_utterance_and_sounds_the_same(spoken) -> None:
    streamed, whole = np.concatenate(spoken["streamed"]), np.concatenate(spoken["whole"])
    assert len(spoken["whole"]) == 1
    assert len(spoken["streamed"]) >= 8
    assert len(streamed) == len(whole) == CODES * SAMPLES_PER_CODE
    assert np.abs(whole).max() > 0.01
    snr = snr_db(streamed, whole)
    blind = snr_db(np.concatenate(spoken["blind"]), whole)
    print(
        f"\nstreamed against whole: {snr:.1f} dB ({blind:.1f} dB without look-ahead) "
        f"over {len(whole)} samples in {len(spoken['streamed'])} chunks"
    )
    assert snr > 30
    # The measure hears what a window does not see: without look-ahead much is lost.
    assert blind < snr - 15


def test_streamed_speech_has_no_click_where_chunks_meet(spoken) -> None:
    error = np.concatenate(spoken["streamed"]) - np.concatenate(spoken["whole"])
    borders = np.cumsum([len(chunk) for chunk in spoken["streamed"]])[:-1]
    ratio = click_ratio(error, borders)
    print(f"\nlargest jump of the error at {len(borders)} borders: {ratio:.3f} times the largest elsewhere")
    assert ratio <= 3.0


def test_the_click_measure_finds_a_click(spoken) -> None:
    """A chunk that is out by a little from its first sample on is what the measure is there for."""
    error = np.concatenate(spoken["streamed"]) - np.concatenate(spoken["whole"])
    borders = np.cumsum([len(chunk) for chunk in spoken["streamed"]])[:-1]
    error[borders[1] :] += 10 * np.abs(np.diff(error)).max()
    assert click_ratio(error, borders) > 3.0


# --------------------------------------------------------------------------------------------- text only


@every_speech_model
def test_text_alone_never_touches_the_speech_stages(load: Callable[..., EngineParts], speech: SpeechModel) -> None:
    omni: Omni
    with open_door(load()) as omni:
        outputs = omni.chat([say("one"), say("two")], speech.greedy(5), progress=False)
        stages = omni.stats().stages
        for name in ("talker", speech.codec):
            stats = stages[name]
            assert (stats.steps, stats.tokens, stats.waiting + stats.running + stats.starved) == (0, 0, 0)
        assert stages["thinker"].tokens > 0
        for output in outputs:
            assert output.audio is None
            assert output.trace is not None
            assert list(output.trace.stages) == ["thinker"]
        assert_empty(omni.orchestrator)
