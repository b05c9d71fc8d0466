"""Models that speak a whole text in one run, with the random numbers that a seed gives in transformers.

A run goes in slices of time: before any layer of the model it may stop, and another text or stage has its turn.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from omnistage.core.errors import InternalError, LimitExceededError, StageError
from omnistage.core.memory import host_memory
from omnistage.core.params import CodecParams
from omnistage.core.types import TOKEN_IDS, AudioChunk, ModuleInput, RequestInfo
from omnistage.engines.codec.module import UNFINISHED, Job, JobResult, ModuleComponent, ModulePayload, Partial
from omnistage.models.paused import PausedCall

_RANDOM = threading.Lock()
"""These models use torch's own generator, which all threads share."""
_SLICE_SECONDS = 0.05
"""Of a text before others have their turn."""
_MEMORY_SHARE = 8
"""All texts under way together may take this part of the memory, where what they take grows with their square."""
_UNKNOWN_MEMORY = 8 << 30


class RandomState:
    """Torch's own generator as one text sees it, from slice to slice."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._seed: int | None = seed
        self._states: list[torch.Tensor] = []

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Within the block the generator is this one; behind it, it goes on where it was."""
        with _RANDOM, torch.random.fork_rng(self._devices):
            if self._seed is not None:
                torch.manual_seed(self._seed)
                self._seed = None
            else:
                torch.set_rng_state(self._states[0])
                for device, state in zip(self._devices, self._states[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            try:
                yield
            finally:
                self._states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]


@dataclass(slots=True)
class _Speech:
    """A text that is being spoken."""

    call: PausedCall[torch.Tensor]
    random: RandomState
    memory: int
    """Bytes that it takes at most, as `memory_of` has it."""
    pieces: list[torch.Tensor] = field(default_factory=list)
    """Samples that are ready before the rest, and not emitted yet."""


class Synthesiser(ModuleComponent):
    """Each text alone: its random numbers must not depend on others. Several may be under way, in turns."""

    uses_torch = True
    max_calls = 4
    """Texts under way at once: each has its own keys and values, or activations."""

    def __init__(self, model: Any, device: torch.device, sample_rate: int, *parts: torch.nn.Module) -> None:
        """`parts`: what computes beside the model, such as a vocoder."""
        self.model = model
        self._device = device
        self._sample_rate = sample_rate
        self.memory_budget = _memory(device) // _MEMORY_SHARE
        self._speeches: dict[str, _Speech] = {}
        self._next: str | None = None
        """The request that waits for memory: none begins before it."""
        self._running: _Speech | None = None
        self._until = 0.0
        for part in (model, *parts):
            for module in part.modules():
                if next(module.children(), None) is None:
                    module.register_forward_pre_hook(self._give_way)

    @abstractmethod
    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        """The samples of a text, in any shape that holds one channel; without those given to `emit`."""

    def memory_of(self, tokens: int) -> int:
        """Bytes that a text of so many tokens takes while it is spoken; 0 where that is little for the longest one."""
        del tokens
        return 0

    def check(self, info: RequestInfo, params: CodecParams, payload: ModulePayload) -> None:
        del info, params
        tokens = _num_tokens(payload)
        if (needed := self.memory_of(tokens)) > self.memory_budget:
            raise LimitExceededError(
                f"has {tokens} tokens, for which this model takes {needed / 2**30:.1f} GiB of memory, over the limit "
                f"of {self.memory_budget / 2**30:.1f} GiB here; send it in parts",
                param="prompt",
            )

    def emit(self, samples: torch.Tensor) -> None:
        """In `speak`: the next samples, while the rest is still to come."""
        if self._running is None:
            raise InternalError("samples are emitted while no text is spoken")
        self._running.pieces.append(samples)

    def _give_way(self, module: torch.nn.Module, inputs: object) -> None:
        del module, inputs
        if self._running is not None and time.monotonic() >= self._until:
            self._running.call.pause()

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        return [self._run(job) for job in jobs]

    def _run(self, job: Job) -> JobResult:
        name = job.info.request_id
        speech = self._speeches.get(name)
        if speech is None:
            if len(self._speeches) >= self.max_calls or not self._has_memory(job):
                return UNFINISHED
            speech = self._speeches[name] = self._begin(job)
        self._running, self._until = speech, time.monotonic() + _SLICE_SECONDS
        try:
            with speech.random.current():
                finished = speech.call.advance()
        except BaseException:
            del self._speeches[name]
            raise
        finally:
            self._running = None
        if finished:
            del self._speeches[name]
            speech.pieces.append(speech.call.result)
        samples = [piece.reshape(-1).float().cpu().numpy().astype(np.float32) for piece in speech.pieces]
        speech.pieces.clear()
        if not finished:
            return Partial(AudioChunk(np.concatenate(samples), self._sample_rate)) if samples else UNFINISHED
        return AudioChunk(np.concatenate(samples), self._sample_rate)

    def _has_memory(self, job: Job) -> bool:
        """Whether a text fits beside those under way. The first that does not is the next to begin: while ever more
        short texts came, a long one would wait for ever."""
        name = job.info.request_id
        if self._next not in (None, name):
            return False
        taken = sum(other.memory for other in self._speeches.values())
        fits = not taken or taken + self.memory_of(_num_tokens(job.payload)) <= self.memory_budget
        self._next = None if fits else name
        return fits

    def _begin(self, job: Job) -> _Speech:
        payload = job.payload
        if not isinstance(payload, ModuleInput):
            raise InternalError(f"a synthesiser takes a ModuleInput, not a {type(payload).__name__}")
        arrays = {"input_ids" if name == TOKEN_IDS else name: array for name, array in payload.arrays.items()}
        inputs = {name: self._to_device(array) for name, array in arrays.items()}
        seed = secrets.randbits(63) if job.params.seed is None else job.params.seed

        def call(paused: PausedCall[torch.Tensor]) -> torch.Tensor:
            del paused
            with torch.inference_mode():
                return self.speak(inputs, job.info.voice)

        memory = self.memory_of(_num_tokens(payload))
        return _Speech(PausedCall(call, "speak"), RandomState(seed, self._device), memory)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.asarray(array))[None].to(self._device)
        return tensor.to(self.model.dtype) if tensor.is_floating_point() else tensor

    def forget(self, request_id: str) -> None:
        if self._next == request_id:
            self._next = None
        speech = self._speeches.pop(request_id, None)
        if speech is not None:
            speech.call.cancel()

    def close(self) -> None:
        for request_id in tuple(self._speeches):
            self.forget(request_id)


def _num_tokens(payload: object) -> int:
    return len(payload.arrays.get(TOKEN_IDS, ())) if isinstance(payload, ModuleInput) else 0


def _memory(device: torch.device) -> int:
    """Bytes of the device, whether they are free or not: what is refused must not depend on the moment."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return host_memory() or _UNKNOWN_MEMORY


def audible(samples: Any) -> torch.Tensor:
    """What a model gave, unless it gave nothing."""
    if not isinstance(samples, torch.Tensor) or not samples.numel():
        raise StageError("the model generated no speech for this text; try another text or seed")
    return samples
