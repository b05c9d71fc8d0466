"""What the codec engine needs of a network that turns codes into samples. No torch: a component may run on anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from omnistage.core.params import CodecParams
from omnistage.core.stage_memory import StageMemory
from omnistage.core.types import Code


@dataclass(frozen=True, slots=True)
class CodecLayout:
    """How an utterance may be cut into windows. Everything is counted in codes or in blocks of codes."""

    block_codes: int
    """Codes in a block. Windows start on block borders; only an utterance's last window may end inside a block."""
    codebook_size: int
    """Codes are in `[0, codebook_size)`."""
    max_codes: int
    """Longest utterance."""
    history_blocks: int = 0
    """Blocks before a window that can change its result or its shapes; two windows that have at least this many
    before them are alike."""
    max_lookahead_blocks: int = 0
    """Most blocks after a window that can change its result: 0 for a causal decoder."""
    code_seconds: float = 0.0
    """Seconds of audio in a code; 0: not known."""
    first_blocks: int = 1
    """Fewest blocks from which the first window gives any samples."""
    num_codebooks: int = 1
    """Codes of a frame: with one, a frame is an `int`; with several, a tuple of so many."""
    mixed_windows: bool = False
    """Whether windows of different shapes may share a forward."""


@dataclass(frozen=True, slots=True)
class Window:
    """One request's share of a forward.

    `codes` is `history` codes that were decoded before, then `emit` codes to decode now, then look-ahead: codes whose
    result is thrown away and computed again by the next window. `last` ends the utterance (there is no look-ahead
    then) and asks for every sample that was held back; only then may `emit` be 0.
    """

    state: object
    codes: tuple[Code, ...]
    history: int
    emit: int
    last: bool

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        return self.history, len(self.codes), self.emit, self.last


class CodecComponent(ABC):
    """A network behind a codec stage: streaming vocoders, and one-shot modules (one block, no context)."""

    sample_rate: int
    layout: CodecLayout

    @property
    @abstractmethod
    def voices(self) -> tuple[str, ...]:
        """Names that `open` takes; empty where there is one voice only. Thread-safe."""

    @abstractmethod
    def group(self, params: CodecParams) -> Hashable:
        """Requests share a forward only where this is equal. Thread-safe."""

    @abstractmethod
    def open(self, request_id: str, params: CodecParams, voice: str | None) -> object:
        """A request's state, handed back in each of its windows. `voice` is one of `voices` or None (the default)."""

    @abstractmethod
    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        """Samples (`float32 [n]`, n may be 0) that each window completes, in order.

        The windows have one `group`, one `shape` unless `layout.mixed_windows`, and belong to different requests.
        States change only when the whole call succeeds, so that a failed batch can be run again one by one.
        """

    def warm_up(self, chunk_blocks: Sequence[int], lookahead: int, max_blocks: int) -> None:
        """Run what requests will run, before there are any.

        An utterance is cut into windows of `chunk_blocks` blocks and then as the last of them, each followed by
        `lookahead` codes; a forward has `max_blocks` at most. Decodes a first window of zeros.
        """
        length = min(chunk_blocks[0] * self.layout.block_codes + lookahead, self.layout.max_codes)
        books = self.layout.num_codebooks
        frame: Code = 0 if books == 1 else (0,) * books
        state = self.open("warm-up", CodecParams(), None)
        self.decode([Window(state, (frame,) * length, 0, length, True)])

    def memory(self, rows: int, codes: int, least: int = 1) -> StageMemory | None:
        """What it needs to decode `rows` windows of `least` to `codes` codes; on the meta device. None: unknown."""
        return None

    @property
    def request_bytes(self) -> int:
        """Device memory that a request holds between its windows."""
        return 0

    def close(self) -> None:  # noqa: B027  (most components hold nothing that the garbage collector cannot free)
        """Release device memory."""
