"""Models that speak a whole text in one run, with the random numbers that a seed gives in transformers."""

from __future__ import annotations

import contextlib
import secrets
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from omnistage.core.errors import CheckpointError, InternalError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.types import TOKEN_IDS, AudioChunk, ModuleInput
from omnistage.engines.codec.module import Job, JobResult, ModuleComponent
from omnistage.hf import transformers
from omnistage.models.loading import Checkpoint, load_model, read_auto_config, read_generation_config
from omnistage.models.text_to_speech.processor import SPEAKERS

_RANDOM = threading.Lock()
"""These models use torch's own generator, which all threads share."""
_VOCODER = "vocoder"
"""Folder of SpeechT5's vocoder, inside the checkpoint's."""


class Synthesiser(ModuleComponent):
    """One text at a time: the random numbers of a text must not depend on its company."""

    uses_torch = True

    def __init__(self, model: Any, device: torch.device, sample_rate: int) -> None:
        self.model = model
        self._device = device
        self._sample_rate = sample_rate

    @abstractmethod
    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        """The samples of a text, in any shape that holds one channel."""

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        return [self._run(job) for job in jobs]

    def _run(self, job: Job) -> AudioChunk:
        payload = job.payload
        if not isinstance(payload, ModuleInput):
            raise InternalError(f"a synthesiser takes a ModuleInput, not a {type(payload).__name__}")
        arrays = {"input_ids" if name == TOKEN_IDS else name: array for name, array in payload.arrays.items()}
        inputs = {name: torch.from_numpy(array)[None].to(self._device) for name, array in arrays.items()}
        seed = secrets.randbits(63) if job.params.seed is None else job.params.seed
        with seeded(seed, self._device), torch.inference_mode():
            samples = self.speak(inputs, job.info.voice)
        return AudioChunk(samples.reshape(-1).float().cpu().numpy().astype(np.float32), self._sample_rate)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block torch's own generator begins with the seed; behind it, it goes on where it was."""
    with _RANDOM, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class Vits(Synthesiser):
    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        speaker = int(voice or 0) if self.model.config.num_speakers > 1 else None
        samples: torch.Tensor = self.model(**inputs, speaker_id=speaker).waveform
        return samples


class SpeechT5(Synthesiser):
    def __init__(self, model: Any, device: torch.device, vocoder: Any, speakers: dict[str, torch.Tensor]) -> None:
        super().__init__(model, device, vocoder.config.sampling_rate)
        self._vocoder = vocoder
        self._speakers = speakers

    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        speaker = self._speakers[voice or min(self._speakers)]
        samples: torch.Tensor = self.model.generate_speech(inputs["input_ids"], speaker, vocoder=self._vocoder)
        return samples


class Generated(Synthesiser):
    """Bark and MusicGen: `generate` gives samples."""

    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        samples: torch.Tensor = self.model.generate(**inputs)
        return samples


def load_synthesiser(context: LoadContext) -> Synthesiser:
    folder = context.model.folder
    config = read_auto_config(folder)
    name = (config.architectures or [""])[0]
    model: Any = load_model(
        getattr(transformers, name), config, Checkpoint(folder).tensors(), context.device, context.dtype, attention=None
    )
    if (settings := read_generation_config(folder)) is not None:
        model.generation_config = settings
    if config.model_type == "vits":
        return Vits(model, context.device, config.sampling_rate)
    if config.model_type == "speecht5":
        return _load_speecht5(model, context)
    if config.model_type == "bark":
        return Generated(model, context.device, model.generation_config.sample_rate)
    if name.startswith("Musicgen"):
        if config.decoder.audio_channels != 1:
            raise UnsupportedModelError("MusicGen with two channels is not served; speech has one")
        return Generated(model, context.device, config.audio_encoder.sampling_rate)
    raise UnsupportedModelError(f"{name} is not served as text to speech")


def _load_speecht5(model: Any, context: LoadContext) -> SpeechT5:
    folder, config = context.model.folder, model.config
    vocoder = folder / _VOCODER
    if not (vocoder / "config.json").is_file():
        raise CheckpointError(f"SpeechT5 needs its vocoder (microsoft/speecht5_hifigan): put it into {vocoder}")
    settings = transformers.SpeechT5HifiGanConfig.from_pretrained(vocoder, local_files_only=True)
    tensors = Checkpoint(vocoder).tensors()
    hifigan = load_model(transformers.SpeechT5HifiGan, settings, tensors, context.device, context.dtype, attention=None)
    speakers = {name: vector.reshape(1, -1) for name, vector in load_file(folder / SPEAKERS).items()}
    wrong = [name for name, vector in speakers.items() if vector.shape[1] != config.speaker_embedding_dim]
    if wrong or not speakers:
        raise CheckpointError(f"{SPEAKERS} must hold vectors of {config.speaker_embedding_dim} numbers; check {wrong}")
    placed = {name: vector.to(context.device, context.dtype) for name, vector in speakers.items()}
    return SpeechT5(model, context.device, hifigan, placed)
