"""A causal decoder behind the codec engine: each window goes on where the last one ended, at the cost of its frames.

An utterance gives the samples of one forward over all of it, however it is cut, up to rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from omnistage.core.params import CodecParams
from omnistage.core.stage_memory import StageMemory
from omnistage.engines.codec.causal_layers import Contexts
from omnistage.engines.codec.component import CodecComponent, CodecLayout, Window
from omnistage.engines.graphs import GraphCache, bucket
from omnistage.engines.peak_memory import META, peak_bytes, weight_bytes
from omnistage.engines.streams import CODEC_PRIORITY, DeviceStream, upload

MAX_FRAMES = 128
"""Of all rows of a forward. More are run one after the other: the device is busy, and activations are large."""
_MAX_PIECE = 64
"""Frames of a row in a forward, without graphs."""
_PLANNED_SIZES = 6  # window sizes that graphs are planned for: they double until they grow no more
_GRAPH_BYTES = 4 << 20  # what the driver takes for one


@dataclass(slots=True)
class _Stream:
    """One request's state between windows."""

    row: Tensor | None = None
    """`[size]`: what the layers keep; None before the first window."""
    num_decoded: int = 0
    """Frames decoded so far."""


@dataclass(slots=True)
class _Job:
    """A window while it is decoded."""

    codes: np.ndarray
    """`int64 [codebooks, frames]`, those that are left."""
    last: bool
    row: Tensor | None
    num_decoded: int
    waves: list[Tensor] = field(default_factory=list)


class CausalDecoder(CodecComponent):
    """Runs `network`, whose layers keep their past in `contexts`.

    The network takes codes (`int64 [B, codebooks, frames]`) and gives samples (`[B, 1, n]`): `frame_samples` for each
    frame, less the `delay` that it is behind at an utterance's beginning and never catches up with. Frames are the
    layout's codes, in blocks of one. `target` is where a network on the meta device will run, for `memory`.
    """

    def __init__(
        self,
        network: nn.Module,
        contexts: Contexts,
        layout: CodecLayout,
        sample_rate: int,
        *,
        frame_samples: int,
        delay: int = 0,
        device: torch.device,
        voices: tuple[str, ...] = (),
        cuda_graphs: bool = True,
        target: torch.device | None = None,
    ) -> None:
        self.network = network.eval()
        self.layout = layout
        self.sample_rate = sample_rate
        self.device = device
        self.frame_samples = frame_samples
        self._delay = delay
        self._voices = voices
        self._contexts = contexts
        self._dtype = next(network.parameters()).dtype
        self._graphs = GraphCache(enabled=cuda_graphs and device.type == "cuda", priority=CODEC_PRIORITY)
        self._plans_graphs = cuda_graphs and device.type == "meta" and target is not None and target.type == "cuda"
        self._sizes: tuple[int, ...] = ()
        """Frames of windows, ascending, for which there are graphs: of first ones the smallest only."""
        self._stream = DeviceStream(device, priority=CODEC_PRIORITY)
        self._stream.follow()

    @property
    def voices(self) -> tuple[str, ...]:
        return self._voices

    @property
    def request_bytes(self) -> int:
        return self._contexts.size * self._dtype.itemsize

    def group(self, params: CodecParams) -> Hashable:
        return None

    def open(self, request_id: str, params: CodecParams, voice: str | None) -> _Stream:
        return _Stream()

    def samples(self, frames: int) -> int:
        """Samples of an utterance's first frames."""
        return max(0, frames * self.frame_samples - self._delay)

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        jobs = [self._job(window) for window in windows]
        with self._stream.use():
            while ready := [job for job in jobs if job.codes.shape[1]]:
                for (first, length), members in self._by_shape(ready).items():
                    rows = _rows(length)
                    for i in range(0, len(members), rows):
                        self._advance(members[i : i + rows], length, first=first)
            waves = _download([job.waves for job in jobs])
        for window, job in zip(windows, jobs, strict=True):  # nothing before changes a stream
            stream = _stream(window)
            stream.row, stream.num_decoded = job.row, job.num_decoded
        return waves

    def _job(self, window: Window) -> _Job:
        stream, codes = _stream(window), window.codes[window.history : window.history + window.emit]
        if stream.num_decoded + len(codes) < self.layout.first_blocks:  # an utterance too short for a single sample
            codes = ()
        books = self.layout.num_codebooks
        array = np.array(codes, dtype=np.int64).reshape(len(codes), books).T
        return _Job(array, window.last, stream.row, stream.num_decoded)

    def _by_shape(self, jobs: Sequence[_Job]) -> dict[tuple[bool, int], list[_Job]]:
        """The jobs whose next pieces share a forward."""
        shapes: dict[tuple[bool, int], list[_Job]] = defaultdict(list)
        for job in jobs:
            shapes[job.num_decoded == 0, self._length(job)].append(job)
        return shapes

    def _length(self, job: _Job) -> int:
        """Frames of the job's next forward. The end of an utterance is padded: what its layers keep is not needed."""
        count = int(job.codes.shape[1])
        if not self._sizes:
            return min(count, _MAX_PIECE)
        largest = self._sizes[-1 if job.num_decoded else 0]
        if count >= largest:
            return largest
        return next(size for size in self._sizes if size >= count) if job.last else count

    def _advance(self, jobs: Sequence[_Job], length: int, *, first: bool) -> None:
        """Decode one piece of each job."""
        count = len(jobs)
        padded = min(bucket(count), _rows(length)) if self._graphs.enabled else count
        codes = np.zeros((padded, self.layout.num_codebooks, length), dtype=np.int64)
        positions = np.zeros(padded, dtype=np.int64)
        for i, job in enumerate(jobs):
            piece = job.codes[:, :length]
            codes[i, :, : piece.shape[1]] = piece
            positions[i] = job.num_decoded
        known_rows = [job.row for job in jobs if job.row is not None]
        # Rows that are not needed change nothing; nobody reads their results.
        rows = torch.stack(known_rows + known_rows[:1] * (padded - count)) if known_rows else self._zeros(padded)
        inputs = upload(codes, self.device), rows, upload(positions, self.device)
        waves, rows = self._graphs((first, padded, length), self._function(first), *inputs)
        # Copies: the next replay overwrites the results, and a row outlives those that it was computed with.
        wave_of, row_of = waves[:count].clone(), _copies(rows[:count])
        for i, job in enumerate(jobs):
            frames = min(length, job.codes.shape[1])
            job.waves.append(wave_of[i, : self.samples(job.num_decoded + frames) - self.samples(job.num_decoded)])
            job.row, job.codes, job.num_decoded = row_of[i], job.codes[:, frames:], job.num_decoded + frames

    def _zeros(self, rows: int) -> Tensor:
        return torch.zeros(rows, self._contexts.size, dtype=self._dtype, device=self.device)

    def _function(self, first: bool) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The network as a function of tensors alone."""

        def run(codes: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            self._contexts.begin(rows, positions, first=first)
            wave = self.network(codes)[:, 0].float()
            return wave, self._contexts.end()

        return run

    # ------------------------------------------------------------------------------------------------- set-up

    def warm_up(self, chunk_blocks: Sequence[int], lookahead: int, max_blocks: int) -> None:
        """Capture a graph for each number of requests and each size of window."""
        if not self._graphs.enabled:
            super().warm_up(chunk_blocks, lookahead, max_blocks)
            return
        self._sizes = tuple(sorted(set(chunk_blocks)))
        shapes = [(False, size) for size in self._sizes] + [(True, self._sizes[0])]
        calls = [(rows, *shape) for shape in shapes for rows in _batches(_rows(shape[1]))]
        books = self.layout.num_codebooks
        with self._stream.use():
            for rows, first, size in sorted(calls, key=lambda call: -call[0] * call[2]):  # others use its memory
                codes, positions = (np.zeros(shape, dtype=np.int64) for shape in ((rows, books, size), (rows,)))
                inputs = upload(codes, self.device), self._zeros(rows), upload(positions, self.device)
                self._graphs((first, rows, size), self._function(first), *inputs)

    def memory(self, rows: int, codes: int, least: int = 1) -> StageMemory:
        """Asked for a network on the meta device."""
        codes = min(codes, MAX_FRAMES)
        rows = min(rows, _rows(codes))
        activations = 3 * rows * self.request_bytes  # the stacked rows, the new ones, and the copy of each
        graphs = 0
        if self._plans_graphs:
            # They share one pool and their buffers, those of the largest. Small windows come in larger batches, and
            # each row has its past beside it, which is more than its frames.
            sizes = {min(least << power, codes) for power in range(_PLANNED_SIZES)}
            forward = max(self._forward_bytes(_rows(size), size) for size in sizes)
            buffers = max(_rows(size) * (self.request_bytes + 4 * size * self.frame_samples) for size in sizes)
            graphs = forward + 2 * buffers + _PLANNED_SIZES * len(_batches(MAX_FRAMES)) * _GRAPH_BYTES
        else:
            activations += self._forward_bytes(rows, codes)
        return StageMemory(weight_bytes((self.network,)), activations=activations, graphs=graphs)

    def _forward_bytes(self, rows: int, codes: int) -> int:
        numbers = torch.empty(rows, self.layout.num_codebooks, codes, dtype=torch.int64, device=META)
        old = torch.empty(rows, self._contexts.size, dtype=self._dtype, device=META)
        return peak_bytes(lambda: self._function(False)(numbers, old, numbers[:, 0, 0]))

    def close(self) -> None:
        self._graphs.clear()


def _rows(length: int) -> int:
    """Most windows of a forward, a power of two."""
    return 1 << (max(1, MAX_FRAMES // length).bit_length() - 1)


def _batches(most: int) -> list[int]:
    """Numbers of windows for which there are graphs."""
    return [1 << power for power in range(max(most, 1).bit_length())]


def _download(waves: Sequence[Sequence[Tensor]]) -> list[np.ndarray]:
    """The pieces of each window as one array on the host, by one copy."""
    pieces = [piece for parts in waves for piece in parts]
    if not pieces:
        return [np.zeros(0, dtype=np.float32) for _ in waves]
    ends = np.cumsum([sum(map(len, parts)) for parts in waves])
    return [wave.copy() for wave in np.split(torch.cat(pieces).cpu().numpy(), ends[:-1])]


def _copies(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.unbind_copy(rows)  # type: ignore[func-returns-value,return-value]


def _stream(window: Window) -> _Stream:
    if not isinstance(window.state, _Stream):
        raise TypeError("the window's state does not come from CausalDecoder.open")
    return window.state
