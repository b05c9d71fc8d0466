"""What the sampling kernels know of each row of a batch, as one array that travels to the device in one copy.

A column is a row of the batch. Integers and float64 numbers share it by their bits; zeros are a row that nothing is
sampled for. What is as long as the vocabulary stays on the device, and its address is in the column (0: there is none).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnistage.core.params import SamplingParams
from omnistage.engines.ar.sampling.processors import Arrays, RowState
from omnistage.engines.ar.sampling.selection import temperature_of
from omnistage.engines.streams import upload

_BITS = 32


class Field(IntEnum):
    """Rows of the array. From `TEMPERATURE` on they are float64."""

    ACTIVE = 0
    STREAM = 1
    STEP = 2
    TOP_K = 3
    """The vocabulary's size where it limits nothing."""
    OCCURRENCES = 4
    """int32 `[V]`, as `RowState.occurrences`. Likewise `COUNTS`."""
    COUNTS = 5
    BIAS = 6
    """float32 `[V]`."""
    MASK = 7
    """Ids that may be sampled: bits in int32 words, the lowest first."""
    SPARE = 8
    """The mask with the ids that `min_tokens` holds back: for when nothing else is left."""
    TEMPERATURE = 9
    """0: greedy."""
    TOP_P = 10
    MIN_P = 11
    REPETITION = 12
    PRESENCE = 13
    FREQUENCY = 14


FIELDS = len(Field)
Block = npt.NDArray[np.int64]


def build_block(states: Sequence[RowState], vocab_size: int, arrays: Arrays) -> Block:
    """`[FIELDS, S]` for these rows, valid while none of their `holds_stops` changes; its `STEP` has to be advanced.

    The states own what the addresses point at. Rows with a grammar also need `GrammarMasks`.
    """
    block = np.empty((FIELDS, len(states)), dtype=np.int64)
    longs = [_longs(state, vocab_size, arrays) for state in states]
    block[: Field.TEMPERATURE] = np.array(longs, dtype=np.uint64).view(np.int64).T
    block.view(np.float64)[Field.TEMPERATURE :] = np.array([_numbers(state.params) for state in states]).T
    return block


def _longs(state: RowState, vocab_size: int, arrays: Arrays) -> tuple[int, ...]:
    """From `ACTIVE` to `SPARE`."""
    top_k, holds_stops = state.params.top_k, state.holds_stops
    return (
        1,
        state.stream,
        state.step,
        top_k if 0 < top_k < vocab_size else vocab_size,
        _address(state.occurrences),
        _address(state.counts),
        _address(_bias(state, vocab_size, arrays)),
        _address(_mask(state, vocab_size, arrays, held=holds_stops)),
        _address(_mask(state, vocab_size, arrays, held=False)) if holds_stops else 0,
    )


def _numbers(params: SamplingParams) -> tuple[float, ...]:
    """From `TEMPERATURE` to `FREQUENCY`."""
    return (
        0.0 if params.greedy else temperature_of(params),
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _bias(state: RowState, vocab_size: int, arrays: Arrays) -> Tensor | None:
    if state.bias is None and state.bias_ids is not None:
        bias = np.zeros(vocab_size, dtype=np.float32)
        bias[state.bias_ids] = state.bias_values
        state.bias = arrays.put(bias)
    return state.bias


def _mask(state: RowState, vocab_size: int, arrays: Arrays, *, held: bool) -> Tensor | None:
    """Built once for a request while `min_tokens` holds its stop ids, and once for afterwards."""
    if state.allowed is None and state.suppressed is None and not state.holds_stops:
        return None
    if held not in state.masks:
        state.masks[held] = arrays.put(_words(state, vocab_size, held=held))
    return state.masks[held]


def _words(state: RowState, vocab_size: int, *, held: bool) -> npt.NDArray[np.int32]:
    flags = np.zeros(-(-vocab_size // _BITS) * _BITS, dtype=np.bool_)
    flags[slice(vocab_size) if state.allowed is None else state.allowed] = True
    for ids in (state.suppressed, state.stops if held else None):
        if ids is not None:
            flags[ids] = False
    return np.packbits(flags, bitorder="little").view(np.int32)


class GrammarMasks:
    """The masks of the rows with a grammar: other ones for each step, in memory that the batch's block points at."""

    def __init__(self, states: Sequence[RowState], block: Block, vocab_size: int, device: torch.device) -> None:
        rows = [(row, state, state.grammar) for row, state in enumerate(states) if state.grammar is not None]
        self._grammars = [grammar for _, _, grammar in rows]
        self._others = np.array(
            [
                [_words(state, vocab_size, held=holds_stops and state.holds_stops) for _, state, _ in rows]
                for holds_stops in (True, False)
            ]
        )
        """`[2, G, words]`: what the rows allow beside their grammars, with and without ids that `min_tokens` holds."""
        self._device = torch.zeros(self._others.shape, dtype=torch.int32, device=device)
        for i, (row, state, _) in enumerate(rows):
            block[Field.MASK, row] = self._device[0, i].data_ptr()
            block[Field.SPARE, row] = self._device[1, i].data_ptr() if state.holds_stops else 0

    def upload(self) -> None:
        """Those of the next tokens. Waits for masks that are late."""
        for grammar in self._grammars:
            if not grammar.ready:
                grammar.wait()  # nobody asked before whether it is late
        words = np.concatenate([grammar.mask.numpy() for grammar in self._grammars])
        self._device.copy_(upload(self._others & words, self._device.device))
