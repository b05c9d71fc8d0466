"""Stages on a GPU in processes of their own: tensors stay on the device, and results are those of one process."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.core.params import CodecParams, DiffusionParams, SamplingParams, StageParams
from omnistage.core.types import SideRows
from omnistage.models.qwen2_5_omni import tiny
from omnistage.models.stable_diffusion_3 import tiny as tiny_sd3
from omnistage.omni import Omni
from omnistage.pipeline.outputs import OmniRequestOutput
from omnistage.placement.channel import Channel
from omnistage.placement.device_memory import RING_BYTES, used_devices
from omnistage.placement.messages import Feed, Message, Ready
from omnistage.placement.worker_process import LocalProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SMALL = ("thinker.kv_blocks=256", "talker.kv_blocks=256")
PARAMS: dict[str, StageParams] = {
    "thinker": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    "talker": SamplingParams(temperature=0.0, max_tokens=60, min_tokens=60),
    "token2wav": CodecParams(seed=3, num_steps=3),
}


def test_tensors_cross_between_processes_without_leaving_the_device() -> None:
    host = LocalProcess(("-m", "tests.gpu.device_memory_echo"))
    received: queue.Queue[Message] = queue.Queue()

    def receive(messages: Sequence[Message]) -> None:
        for message in messages:
            received.put(message)

    channel = Channel(host.socket, receive, lambda: None, name="test")
    channel.start()
    torch.zeros(1, device="cuda")
    channel.send(Ready(used_devices()))
    ready = received.get(timeout=120)
    assert isinstance(ready, Ready)
    channel.share_devices(ready.devices)
    assert set(ready.devices) & set(used_devices())
    # Small ones go by the host, the last by the host for want of room; together many times the shared memory.
    sizes = [1, 1000, 100_000, 5_000_000, RING_BYTES // 8] * 20 + [RING_BYTES // 2]
    for number, size in enumerate(sizes):
        tensor = torch.rand(size, device="cuda", dtype=torch.float32)
        channel.send(Feed("s", number, "", SideRows(tensor)))
        back = received.get(timeout=120)
        assert isinstance(back, Feed)
        assert isinstance(back.feed, SideRows)
        assert back.key == number
        assert back.stage.startswith("cuda")
        assert back.feed.rows.is_cuda
        assert back.feed.rows.equal(tensor + 1)
    assert channel._devices is not None
    assert channel._devices._rings
    assert channel._devices._mappings
    host.kill()
    assert host.wait(10) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen") / "model"
    tiny.write(made, seed=7)
    return made


def speak(folder: Path, *overrides: str) -> list[OmniRequestOutput]:
    arguments = {"device": "cuda", "dtype": "float32", "overrides": (*SMALL, *overrides), "progress": False}
    prompts = [f"Tell me about number {number}, at some length." for number in range(3)]
    with Omni(folder, **arguments) as omni:  # type: ignore[arg-type]
        outputs = omni.generate(prompts, PARAMS, modalities=["text", "audio"], progress=False)
        omni.orchestrator.check_idle()
    return outputs


def test_speech_is_the_same_in_processes(folder: Path) -> None:
    inline = speak(folder)
    segments = set(os.listdir("/dev/shm"))
    for groups in (
        ["thinker"],
        ["talker, token2wav"],
        ["thinker", "talker", "token2wav"],
        ["thinker, talker, token2wav"],
    ):
        overrides = [f"deployment.placement.g{number}.stages=[{group}]" for number, group in enumerate(groups)]
        placed = speak(folder, *overrides)
        assert [output.error for output in placed] == [None] * 3
        assert [output.token_ids for output in placed] == [output.token_ids for output in inline]
        for ours, theirs in zip(placed, inline, strict=True):
            assert ours.audio is not None
            assert theirs.audio is not None
            np.testing.assert_allclose(ours.audio.samples, theirs.audio.samples, atol=1e-2)
    assert set(os.listdir("/dev/shm")) <= segments


def test_pictures_are_the_same_in_processes(tmp_path: Path) -> None:
    tiny_sd3.write(tmp_path / "sd3", seed=5)

    def draw(*groups: str) -> np.ndarray:
        overrides = [f"deployment.placement.g{number}.stages=[{group}]" for number, group in enumerate(groups)]
        params = DiffusionParams(width=64, height=64, steps=4, seed=3)
        arguments = {"device": "cuda", "dtype": "float32", "overrides": overrides, "progress": False}
        with Omni(tmp_path / "sd3", **arguments) as omni:  # type: ignore[arg-type]
            (output,) = omni.generate(["a red square"], {"denoise": params}, progress=False)
        assert output.error is None
        return output.images[0].pixels.astype(int)

    here = draw()
    for groups in (("encode",), ("denoise, decode",), ("encode", "denoise", "decode")):
        assert np.abs(draw(*groups) - here).max() <= 2
