"""The whole pipeline on a random checkpoint: requests side by side, their ends, voices, seeds, loading, commands."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from omnistage.cli import app
from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import CheckpointError, InvalidRequestError
from omnistage.core.params import CodecParams, SamplingParams, StructuredOutput
from omnistage.core.types import FinishReason, OmniTokensPrompt
from omnistage.models._qwen_omni import verify as omni_cases
from omnistage.models.loading import Checkpoint
from omnistage.models.qwen2_5_omni import verify as qwen_verify
from omnistage.models.qwen2_5_omni.components import Thinker
from omnistage.omni import AsyncOmni, Omni
from omnistage.pipeline.build import EngineParts
from omnistage.pipeline.orchestrator import Orchestrator
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

BOTH = ["text", "audio"]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


def picture(seed: int = 0, size: tuple[int, int] = (64, 48)) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    return {"type": "image", "image": Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))}


def sound(seed: int = 0, seconds: float = 0.8) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    return {"type": "audio", "audio": ((0.1 * rng.standard_normal(int(16_000 * seconds))).astype(np.float32), 16_000)}


def film(seed: int = 0) -> dict[str, object]:
    from omnistage.core.clips import VideoClip

    frames = np.random.default_rng(seed).integers(0, 256, (4, 56, 56, 3), dtype=np.uint8)
    return {"type": "video", "video": VideoClip(frames, 2.0, 2.0, None)}


# --------------------------------------------------------------------------------------------- side by side


@every_speech_model
def test_mixed_requests_at_once_get_what_each_gets_alone(omni: Omni, speech: SpeechModel) -> None:
    chats = [
        say("What is this?", picture(1)),
        say("Hello"),
        say("Listen", sound(2)),
        say("Watch", film(3)),
        say("And now?", picture(1), sound(2)),
    ]
    params = [speech.greedy(4 + i, 14 + 5 * i) for i in range(len(chats))]
    alone = [omni.chat(chat, own, modalities=BOTH) for chat, own in zip(chats, params, strict=True)]
    together = omni.chat(chats, params, modalities=BOTH, progress=False)
    for one, other in zip(alone, together, strict=True):
        assert one.error is None
        assert other.token_ids == one.token_ids
        assert one.audio is not None
        assert other.audio is not None
        # Batches change the order of float additions, nothing more.
        np.testing.assert_allclose(other.audio.samples, one.audio.samples, atol=1e-4)
    assert len({tuple(output.token_ids) for output in alone}) == len(chats)


def test_two_threads_may_use_one_model(omni: Omni) -> None:
    prompts = ["Good morning", "Guten Abend"]
    expected = [omni.generate(prompt, greedy(12))[0].token_ids for prompt in prompts]
    barrier = threading.Barrier(2)

    def ask(index: int) -> list[list[int]]:
        barrier.wait(HANG_SECONDS)
        return [omni.generate(prompts[index], greedy(12), progress=False)[0].token_ids for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(ask, range(2)))
    assert found == [[expected[0]] * 3, [expected[1]] * 3]


def test_the_request_of_higher_priority_goes_first(load: Callable[..., EngineParts]) -> None:
    harness = PipelineHarness(load("thinker.max_running=1"))
    order: list[str] = []
    streams = {}
    for name, priority in (("late", 5), ("early", -5), ("middle", 0)):
        streams[name] = harness.submit(name, say("Hello"), greedy(4), priority=priority)
    while len(order) < 3:
        harness.turns(1)
        for name, items in streams.items():
            if name not in order and any(item.final is not None for item in items):
                order.append(name)
    assert order == ["early", "middle", "late"]
    harness.finish()


# ----------------------------------------------------------------------------------------------------- ends


def chunks_of(orchestrator: Orchestrator, request_id: str, stage: str) -> int:
    trace = orchestrator.trace(request_id)
    assert trace is not None
    return trace.stages[stage].chunks


@pytest.mark.parametrize("until", ["thinker", "talker", "token2wav"])
def test_an_abort_at_any_stage_frees_everything(load: Callable[..., EngineParts], until: str) -> None:
    """Aborted right after the first output of each stage; a neighbour goes on and ends as if alone."""
    harness = PipelineHarness(load("token2wav.max_hold_seconds=0"))
    alone = harness.submit("alone", say("Hi"), greedy(6, 30), modalities=BOTH)
    harness.finish()
    neighbour = harness.submit("neighbour", say("Hi"), greedy(6, 30), modalities=BOTH)
    doomed = harness.submit("doomed", say("Tell me more", picture()), greedy(80, 120), modalities=BOTH)
    while not chunks_of(harness.orchestrator, "doomed", until):
        harness.turns(1)
    assert harness.orchestrator.abort("doomed")
    assert not harness.orchestrator.abort("doomed")
    harness.finish()
    cut = final_of(doomed)
    assert cut.finish_reason is FinishReason.ABORT
    assert 0 < len(cut.token_ids) < 80
    mine, other = final_of(neighbour), final_of(alone)
    assert mine.token_ids == other.token_ids
    np.testing.assert_allclose(mine.audio.samples, other.audio.samples, atol=1e-4)  # type: ignore[union-attr]


def test_leaving_the_stream_early_aborts_the_request(load: Callable[..., EngineParts]) -> None:
    async def listen() -> FinishReason | None:
        async with open_door(load(), AsyncOmni) as omni:
            stream = omni.generate(say("Hello"), greedy(400, 4000), request_id="mine", modalities=BOTH)
            async for item in stream:
                if item.audio is not None:
                    break
            await stream.aclose()
            assert_empty(omni.orchestrator)
            trace = omni.trace("mine")
            assert trace is not None
            return trace.stages["talker"].finish

    assert asyncio.run(listen()) is FinishReason.ABORT


def test_a_passed_deadline_ends_a_request_with_what_there_was(load: Callable[..., EngineParts]) -> None:
    now = [time.monotonic()]
    harness = PipelineHarness(load(), clock=lambda: now[0])
    items = harness.submit("slow", say("Hello"), greedy(200, 200), modalities=BOTH, timeout=5.0)
    harness.turns(10)
    now[0] += 4.9
    harness.turns(1)
    assert items[-1].final is None
    now[0] += 0.2
    harness.turns(1)
    output = final_of(items)
    assert output.finish_reason is FinishReason.DEADLINE
    assert output.error is None
    assert 5 < len(output.token_ids) < 200
    harness.finish()


def test_a_timeout_in_real_time_ends_a_long_answer(omni: Omni) -> None:
    output = omni.chat(say("Hello"), SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0), timeout=0.3)
    assert output.finish_reason is FinishReason.DEADLINE
    assert len(output.token_ids) < 3000


@every_speech_model
def test_a_reply_of_one_token_is_not_spoken(omni: Omni, speech: SpeechModel) -> None:
    """The thinker never computes its last token, so there is no row from which the talker could start."""
    output = omni.chat(say("Hello"), speech.greedy(1, 20), modalities=BOTH)
    assert (output.finish_reason, len(output.token_ids), output.audio) == (FinishReason.LENGTH, 1, None)
    assert output.trace is not None
    assert output.trace.stages["talker"].started is None


# ------------------------------------------------------------------------------------------ voices and seeds


def test_two_voices_differ_and_the_default_is_chelsie(omni: Omni) -> None:
    waves = {
        voice: omni.chat(say("Hello"), greedy(6, 24), modalities=BOTH, voice=voice).audio.samples  # type: ignore[union-attr]
        for voice in ("Chelsie", "Ethan", None)
    }
    assert not np.allclose(waves["Chelsie"], waves["Ethan"], atol=1e-3)
    np.testing.assert_array_equal(waves["Chelsie"], waves[None])


def test_an_unknown_voice_is_refused_with_the_known_ones(omni: Omni) -> None:
    with pytest.raises(InvalidRequestError, match="Ethan") as caught:
        omni.chat(say("Hello"), modalities=BOTH, voice="HAL")
    assert caught.value.param == "voice"


@every_speech_model
def test_a_seed_makes_sampled_speech_reproducible_in_any_company(omni: Omni, speech: SpeechModel) -> None:
    def params(seed: int) -> dict[str, Any]:
        return {
            "thinker": SamplingParams(seed=seed, max_tokens=8, ignore_eos=True),
            "talker": SamplingParams(temperature=0.9, top_k=40, top_p=0.8, seed=seed, max_tokens=24, min_tokens=24),
            speech.codec: CodecParams(seed=seed, num_steps=3),
        }

    first, other = (omni.chat(say("Hello"), params(seed), modalities=BOTH) for seed in (1, 2))
    crowd = omni.chat([say("Hello")] * 3, [params(2), params(1), params(3)], modalities=BOTH, progress=False)
    assert crowd[1].token_ids == first.token_ids != other.token_ids
    assert crowd[0].token_ids == other.token_ids
    np.testing.assert_allclose(crowd[1].audio.samples, first.audio.samples, atol=1e-4)  # type: ignore[union-attr]
    assert not np.allclose(first.audio.samples, other.audio.samples, atol=1e-3)  # type: ignore[union-attr]


def test_the_talker_seed_alone_decides_sampled_codes(omni: Omni) -> None:
    def wave(seed: int) -> np.ndarray:
        params = greedy(6, 24)
        params["talker"] = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, min_tokens=24)
        return omni.chat(say("Hello"), params, modalities=BOTH).audio.samples  # type: ignore[union-attr]

    np.testing.assert_array_equal(wave(5), wave(5))
    assert not np.allclose(wave(5), wave(6), atol=1e-3)


# -------------------------------------------------------------------------------------- prompts and answers


def test_several_answers_are_text_only(omni: Omni) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=6, ignore_eos=True)
    output = omni.chat(say("Hello"), params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    with pytest.raises(InvalidRequestError, match="text only"):
        omni.chat(say("Hello"), {"thinker": params}, modalities=BOTH)


def test_text_tokens_and_embeddings_of_one_prompt_give_one_answer(omni: Omni) -> None:
    prompt = "The quick brown fox"
    ids = omni.processor.text(prompt).token_ids
    component = omni.orchestrator.stages["thinker"].component  # type: ignore[attr-defined]
    assert isinstance(component, Thinker)
    with torch.inference_mode():
        embeds = component.embed(torch.tensor(ids)).clone()
    prompts = [prompt, OmniTokensPrompt(ids), {"prompt_token_ids": list(ids)}, {"prompt_embeds": embeds}]
    outputs = omni.generate(prompts, greedy(8, 20), modalities=BOTH, progress=False)
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert {output.usage.prompt_tokens for output in outputs} == {len(ids)}
    waves = [output.audio.samples for output in outputs if output.audio is not None]
    assert len(waves) == len(prompts)
    for wave in waves[1:]:
        np.testing.assert_allclose(wave, waves[0], atol=1e-4)


def test_a_json_schema_holds_even_for_a_random_model(omni: Omni) -> None:
    pytest.importorskip("xgrammar")
    params = greedy(60, 20)
    params["thinker"] = SamplingParams(
        temperature=1.0, seed=1, max_tokens=300, structured=StructuredOutput(json_schema=SCHEMA)
    )
    output = omni.chat(say("Which colour?"), params, modalities=BOTH)
    assert output.trace is not None
    assert output.trace.stages["thinker"].finish is FinishReason.STOP
    assert output.finish_reason is FinishReason.LENGTH  # the speech is cut at 20 codes
    answer = json.loads(output.text)
    assert answer["colour"] in ("red", "blue")
    assert isinstance(answer["sure"], bool)
    assert output.audio is not None


# -------------------------------------------------------------------------------------------------- loading


def test_a_folder_of_links_as_in_the_hub_cache_is_loaded(
    load: Callable[..., EngineParts], checkpoint: Path, tmp_path: Path, omni: Omni
) -> None:
    """The hub keeps contents under blobs/ and links them from snapshots/<commit>/."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(checkpoint.iterdir())):
        (blobs / f"{number:040x}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    with open_door(load(folder=snapshot)) as linked:
        assert linked.chat(say("Hello"), greedy(6)).token_ids == omni.chat(say("Hello"), greedy(6)).token_ids


def test_each_stage_reads_its_own_weights_only_and_each_once(
    load: Callable[..., EngineParts], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, list[str]] = {}
    rows: list[int] = []
    stock_tensors, stock_rows = Checkpoint.tensors, Checkpoint.rows

    def tensors(self: Checkpoint, prefix: str = "", *given: Any) -> dict[str, torch.Tensor]:
        found = stock_tensors(self, prefix, *given)
        read.setdefault(prefix, []).extend(found)
        return found

    def some_rows(self: Checkpoint, names: Any, indices: Any) -> torch.Tensor:
        rows.append(len(indices))
        return stock_rows(self, names, indices)

    monkeypatch.setattr(Checkpoint, "tensors", tensors)
    monkeypatch.setattr(Checkpoint, "rows", some_rows)
    load()
    stored = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(read) == {"thinker.", "talker.", "token2wav."}
    for prefix, names in read.items():
        assert sorted(names) == sorted(name.removeprefix(prefix) for name in stored if name.startswith(prefix))
    assert sum(map(len, read.values())) == len(stored)
    # Of the thinker's embedding the talker takes the end, the padding and one row a voice.
    assert rows == [4]


def copied(checkpoint: Path, folder: Path) -> Path:
    shutil.copytree(checkpoint, folder)
    return folder


def test_a_missing_shard_is_named(load: Callable[..., EngineParts], checkpoint: Path, tmp_path: Path) -> None:
    folder = copied(checkpoint, tmp_path / "model")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(folder=folder)


def test_a_truncated_shard_is_named(load: Callable[..., EngineParts], checkpoint: Path, tmp_path: Path) -> None:
    folder = copied(checkpoint, tmp_path / "model")
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=shard.name):
        load(folder=folder)


class _Payload:
    """Runs a function of our choice when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.write_text, (self.target, "executed")


def test_code_in_the_voices_file_is_refused_and_not_run(
    load: Callable[..., EngineParts], checkpoint: Path, tmp_path: Path
) -> None:
    folder, witness = copied(checkpoint, tmp_path / "model"), tmp_path / "witness"
    voices = torch.load(folder / "spk_dict.pt", weights_only=True)
    torch.save({**voices, "Mallory": _Payload(witness)}, folder / "spk_dict.pt")
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt"):
        load(folder=folder)
    assert not witness.exists()
    # The same file does run its code under a plain unpickler: the test would notice if ours were one.
    torch.load(folder / "spk_dict.pt", weights_only=False)
    assert witness.read_text() == "executed"


def test_a_bare_pickle_in_the_voices_file_is_refused_and_not_run(
    load: Callable[..., EngineParts], checkpoint: Path, tmp_path: Path
) -> None:
    folder, witness = copied(checkpoint, tmp_path / "model"), tmp_path / "witness"
    (folder / "spk_dict.pt").write_bytes(pickle.dumps(_Payload(witness)))
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt"):
        load(folder=folder)
    assert not witness.exists()


@pytest.mark.parametrize(
    "content",
    [{}, [torch.zeros(1)], {"Ethan": 1}, {"Ethan": {"bos_token": 1, "cond": torch.zeros(1, 192)}}],
    ids=["no voice", "a list", "a number", "no ref_mel"],
)
def test_a_voices_file_of_another_shape_is_refused(
    load: Callable[..., EngineParts], checkpoint: Path, tmp_path: Path, content: object
) -> None:
    folder = copied(checkpoint, tmp_path / "model")
    torch.save(content, folder / "spk_dict.pt")
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt"):
        load(folder=folder)


# ------------------------------------------------------------------------------------------------- commands


def test_generate_writes_what_was_written_and_said(checkpoint: Path, tmp_path: Path) -> None:
    Image.new("RGB", (60, 60), (200, 30, 30)).save(tmp_path / "red.png")
    soundfile.write(tmp_path / "noise.wav", np.random.default_rng(0).normal(0, 0.1, 8000), 16_000)
    result = CliRunner().invoke(
        app,
        [
            "generate",
            str(checkpoint),
            "What is this?",
            *("--image", str(tmp_path / "red.png"), "--audio", str(tmp_path / "noise.wav")),
            *("--modalities", "text,audio", "--voice", "Ethan", "--out", str(tmp_path / "answer")),
            *("--max-tokens", "6", "--temperature", "0", "--trace"),
            *("--set", "talker.max_tokens=20", "--set", "talker.min_tokens=20", "--set", "talker.kv_blocks=64"),
            *("--set", "thinker.kv_blocks=64", "--set", "token2wav.num_steps=2", "--device", "cpu"),
        ],
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "answer" / "answer.txt").read_text()
    assert text.strip()
    assert text in result.stdout
    samples, rate = soundfile.read(tmp_path / "answer" / "answer.wav")
    assert (len(samples), rate) == (20 * 480, 24_000)
    assert np.abs(samples).max() > 0.01
    assert "token2wav" in result.stdout


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each kind is enough here; the parity tests run them all."""
    monkeypatch.setattr(omni_cases, "KINDS", ("text", "image"))


def test_verify_ends_with_0_where_both_sides_agree(checkpoint: Path, two_cases: None) -> None:
    result = CliRunner().invoke(app, ["verify", str(checkpoint), "--cases", "2"])
    assert result.exit_code == 0, result.output
    assert "all 6 quantities agree" in result.output


def test_verify_ends_with_1_where_our_side_has_a_wrong_weight(
    checkpoint: Path, tmp_path: Path, two_cases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = copied(checkpoint, tmp_path / "damaged")
    for path in damaged.glob("*.safetensors"):
        tensors = load_file(path)
        if "talker.codec_head.weight" in tensors:
            tensors["talker.codec_head.weight"][: 8192 // 2] *= -1
            save_file(tensors, path, metadata={"format": "pt"})
    stock = qwen_verify.run_ours
    monkeypatch.setattr(qwen_verify, "run_ours", lambda _runner, cases: stock(OmniRunner(damaged), cases))
    result = CliRunner().invoke(app, ["verify", str(checkpoint), "--cases", "2"])
    assert result.exit_code == 1, result.output
    assert "quantities differ" in result.output
    # Only what comes behind the damaged weight: the thinker's tokens still agree.
    table = [line for line in result.output.splitlines() if "FAIL" in line]
    assert table
    assert not any("thinker tokens" in line for line in table)


def test_verify_of_no_folder_ends_with_2(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "nothing")]).exit_code == 2
