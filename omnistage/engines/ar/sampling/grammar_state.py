"""One request's place in its grammar, and the mask of what may come next, computed in other threads (`masks.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnistage.core.errors import InvalidRequestError, OmniError, QueueFullError, StageError
from omnistage.core.failures import stage_failure
from omnistage.engines.ar.sampling.masks import SLOW_SECONDS, GrammarThreads

if TYPE_CHECKING:
    import xgrammar

STEP_WAIT_SECONDS = 0.02
"""How long a step waits, in all, for masks that are not there once its forward pass is launched."""
MASK_SECONDS = 5.0
"""A request ends with an error when one mask takes longer,"""
SLOW_MASKS_SECONDS = 60.0
"""or its slow ones together,"""
MASK_QUEUE_SECONDS = 60.0
"""or when no thread has begun with one after so long."""

INLINE_SECONDS = 0.005
"""A grammar whose masks are cheap by its form is followed in threads after all once one took longer."""

_quick = GrammarThreads("omnistage-mask", threads=2, max_threads=16)
_slow = GrammarThreads("omnistage-slow-mask", threads=2, max_threads=8)
"""Masks of requests whose last one was slow: others never queue behind them."""


def mask_threads_exhausted(owner: str | None) -> bool:
    """Whether slow masks keep so many threads busy that no more constrained requests of the owner should be taken."""
    return _quick.exhausted(owner)


class GrammarState:
    """One request's place in its constraint.

    Its mask is computed in other threads from the start, and again after every accepted token: `ready` tells when it is
    there. Handing work to a thread costs more than most masks do: those of a grammar that is `cheap` by its form are
    computed by `prepare`. All methods are called from the stage's thread; none of them waits, but `wait`.
    """

    def __init__(
        self,
        open_matcher: Callable[[], xgrammar.GrammarMatcher],
        vocab_size: int,
        stops: Sequence[int],
        banned: Iterable[int],
        *,
        after: int | None = None,
        owner: str | None = None,
        slow: bool = False,
        cheap: bool = False,
    ) -> None:
        """`slow`: opening the matcher may take long. `after`: the token behind which the constraint begins."""
        self._owner = owner
        self._open_matcher = open_matcher
        self._matcher: xgrammar.GrammarMatcher | None = None
        self.vocab_size = vocab_size
        self._stop_ids = tuple(stops)
        self._banned = frozenset(banned).difference(stops)
        self.width = -(-vocab_size // 32)
        self.mask = torch.zeros((1, self.width), dtype=torch.int32)
        """The tokens that may come next, as bits; after the end, only those that stop. Valid when `ready`."""
        self._words: npt.NDArray[np.int32] = self.mask.numpy()[0]
        self._cheap = cheap
        self._deferred: int | None = None
        self.slow = slow
        """The last mask took long, and so may this one: nobody should wait for it."""
        self.failure: OmniError | None = None
        """Why there is no mask; no token is allowed then."""
        self._slow_seconds = 0.0
        self._closed = False
        self._after = after
        self.ready = after is not None
        if after is None:
            self._request(None)
        else:  # until then anything but an end
            self._words[:] = ~_bits(self._stop_ids, vocab_size)

    def accept(self, token_id: int) -> bool:
        """Move on by a token that was sampled under `mask`; False if it does not allow it."""
        if not int(self._words[token_id >> 5]) >> (token_id & 31) & 1:
            return False
        if self._after is None:
            self._request(token_id)
        elif token_id == self._after:
            self._after = None
            self._request(None)
        return True

    def close(self) -> None:
        """The request has ended: a mask that no thread has begun with is not computed."""
        self._closed = True

    def prepare(self) -> bool:
        """Compute the mask now if it is a cheap one; whether it is there."""
        if self._deferred is not None:
            token_id, self._deferred = self._deferred, None
            self._compute(token_id)
        return self.ready

    def wait(self) -> None:
        """Until the mask is there, however long it takes."""
        self.prepare()
        threads = _slow if self.slow else _quick
        while not self.ready:
            threads.wait(lambda: self.ready, 1.0)

    def overdue(self) -> OmniError | None:
        """Why the request must end if its mask has not come by now; None while it may still come."""
        if self.ready:
            return None
        now, began = time.monotonic(), self._began
        if began is None:
            if now - self._requested_at < MASK_QUEUE_SECONDS:
                return None
            return QueueFullError(
                "other requests keep all threads for grammars busy; try again later", retry_after=10.0
            )
        if now - began < MASK_SECONDS and self._slow_seconds + now - began < SLOW_MASKS_SECONDS:
            return None
        return InvalidRequestError(
            f"following this grammar takes too long: {now - began:.1f} s for the next token, "
            f"{self._slow_seconds + now - began:.1f} s in all; avoid repetitions whose parts can be told apart in many "
            "ways, like (.{1,9}){9} or (\\w+\\s?)+",
            param="structured",
        )

    # ------------------------------------------------------------------------------- in a thread for masks

    def _request(self, token_id: int | None) -> None:
        self.ready = False
        self._requested_at = time.monotonic()
        self._began: float | None = None
        # The first comes from a thread, while the prompt is computed. So does one after a slow one: its request is held
        # out of the batches, where nobody would ask for a mask that was put off.
        if self._cheap and token_id is not None and not self.slow:
            self._deferred = token_id
            return
        (_slow if self.slow else _quick).submit(partial(self._compute, token_id), self._owner)

    def _compute(self, token_id: int | None) -> None:
        if self._closed:
            return
        self._began = time.monotonic()
        cpu = time.thread_time()  # what others do on the machine says nothing about the grammar
        try:
            self._advance(token_id)
        except BaseException as error:  # the boundary of one request's grammar: it ends this request alone
            self.failure = stage_failure(error, "the grammar")
            self._words[:] = 0
        seconds = time.thread_time() - cpu
        self.slow = seconds > SLOW_SECONDS
        # The first one opens the matcher, and nobody waited for it.
        self._cheap = self._cheap and (token_id is None or seconds < INLINE_SECONDS)
        if self.slow:
            self._slow_seconds += seconds
        self.ready = True

    def _advance(self, token_id: int | None) -> None:
        """Accept the token and write the mask of the next one."""
        if self._matcher is None:
            self._matcher = self._open_matcher()
            self._stops = _bits(self._stop_ids, self.vocab_size)
            self._allowed = ~_bits(self._banned, self.vocab_size)
        elif self._matcher.is_terminated():
            return  # only tokens that stop are left, and the mask has them already
        if token_id is not None and not self._matcher.accept_token(token_id):
            raise StageError("the sampled token violates the request's grammar")
        if self._matcher.is_terminated():
            self._words[:] = self._stops
            return
        self._matcher.fill_next_token_bitmask(self.mask, 0)
        self._words &= self._allowed


def _bits(ids: Collection[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """`[ceil(V / 32)]` with the bits of `ids` set."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def await_masks(states: Collection[GrammarState]) -> None:
    """Wait for masks that can be expected soon, as long as a step may."""
    quick = [state for state in states if not state.slow]
    if quick:
        _quick.wait(lambda: all(state.ready for state in quick), STEP_WAIT_SECONDS)


def await_any(states: Collection[GrammarState], seconds: float) -> None:
    """Wait until one of the masks is there."""
    _slow.wait(lambda: any(state.ready for state in states), seconds)


class GrammarMask:
    """Masks the logits of a fixed list of constrained rows, whatever their device."""

    def __init__(self, states: Sequence[GrammarState], device: torch.device) -> None:
        import xgrammar

        self._apply = xgrammar.apply_token_bitmask_inplace
        self._states = tuple(states)
        self._device = device
        shape = (len(states), states[0].width)
        self._bitmask = torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._rows: npt.NDArray[np.int32] = self._bitmask.numpy()

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, x: Tensor) -> None:
        """Set what may not come next to -inf, in place, in float32 `[len(self), V]`. Waits for masks that are late."""
        for row, state in enumerate(self._states):
            if not state.ready:
                state.wait()  # nobody asked before whether it is late
            self._rows[row] = state.mask.numpy()[0]
        self._apply(x, self._bitmask.to(self._device, non_blocking=True), vocab_size=x.shape[1])
