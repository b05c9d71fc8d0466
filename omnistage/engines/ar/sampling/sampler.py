"""The batched sampler: the state of each request, what it sampled, logprobs and errors.

The arithmetic is in `processors.py`, and in `selection.py` for logits on the host or `device_selection.py` for those on
a device; on CUDA the kernels of `triton_sample.py` do all of it. A batch of the same requests in the
same order reuses its plan (`batch.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from omnistage.core.errors import InternalError, InvalidRequestError, OmniError, StageError
from omnistage.core.params import SamplingParams
from omnistage.core.record import record
from omnistage.core.types import TokenLogprob, TokenLogprobs
from omnistage.engines.ar.sampling.batch import BatchPlan
from omnistage.engines.ar.sampling.device_selection import NOTHING
from omnistage.engines.ar.sampling.processors import Arrays, Ints, RowState, mix, residual_numbers
from omnistage.engines.ar.sampling.row_block import Block
from omnistage.engines.ar.sampling.selection import FAILED
from omnistage.engines.ar.text import token_bytes
from omnistage.engines.streams import Download

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from omnistage.engines.ar.sampling.grammar import GrammarCompiler
    from omnistage.engines.ar.sampling.grammar_state import GrammarState


@record
class Sampled:
    """One row's result. With `error` set the token id is -1 and the request must end."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: OmniError | None = None


@dataclass(slots=True)
class PendingTokens:
    """The tokens of a batch while a device may still be selecting them."""

    results: list[Sampled] | None = None
    """Where they were selected on the host."""
    plan: BatchPlan | None = None
    ids: Tensor | None = None
    """int64 `[S]` on the device."""
    download: Download | None = None


class Sampler:
    """Samples one token for each row of a batch and keeps what each request needs for that.

    `check` may be called from any thread; everything else belongs to the engine's thread.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        eos_token_ids: Sequence[int] = (),
        suppress_token_ids: Iterable[int] = (),
        suppress_ignored_ends: bool = False,
        on_host: bool | None = None,
    ) -> None:
        """`suppress_token_ids`: what the model never samples, whatever a request says; `suppress_ignored_ends`: nor end
        tokens where a request ignores them, for models whose tokens are codes: an end cannot be passed on there.

        `on_host`: select in numpy, which is faster where the logits are in the host's memory, and the default.
        """
        self._vocab_size = vocab_size
        self._arrays = Arrays(device, host=device.type == "cpu" if on_host is None else on_host)
        self._tokenizer = tokenizer
        self._eos = tuple(dict.fromkeys(eos for eos in eos_token_ids if 0 <= eos < vocab_size))
        self._suppressed = frozenset(token for token in suppress_token_ids if 0 <= token < vocab_size)
        self._suppressed_ids = _ascending(self._suppressed)
        self._suppresses_ends = suppress_ignored_ends
        self._states: dict[str, RowState] = {}
        self.constrained: dict[str, GrammarState] = {}
        """The states of the requests that have a grammar."""
        self._plan: BatchPlan | None = None
        self._texts: dict[int, tuple[str, bytes]] = {}

    # ------------------------------------------------------------------------------------------- requests

    def check(self, params: SamplingParams) -> None:
        """Raise `InvalidRequestError` if these parameters can never work here.

        Compiles a grammar, so that `add` finds it in the cache.
        """
        token_ids: dict[str, Iterable[int]] = {
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
            "suppress_token_ids": params.suppress_token_ids,
            "stop_token_ids": params.stop_token_ids,
        }
        if params.structured is not None and params.structured.after_token is not None:
            token_ids["structured.after_token"] = (params.structured.after_token,)
        for param, ids in token_ids.items():
            for token in ids:
                if not 0 <= token < self._vocab_size:
                    raise InvalidRequestError(
                        f"token {token} is outside the vocabulary (0 to {self._vocab_size - 1})", param=param
                    )
        suppressed = self._suppressed_for(params)
        if params.allowed_token_ids is not None and suppressed.issuperset(params.allowed_token_ids):
            raise InvalidRequestError("suppress_token_ids removes every allowed token", param="allowed_token_ids")
        if len(suppressed) >= self._vocab_size:
            raise InvalidRequestError("every token of the vocabulary is suppressed", param="suppress_token_ids")
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("is not supported by a stage without text output", param="stop")
        if params.structured is not None:
            if not (*self._eos, *params.stop_token_ids):
                raise InvalidRequestError(
                    "the model has no end token, so constrained text could never end; give stop_token_ids",
                    param="structured",
                )
            self._grammars().compile(params.structured)

    def _suppressed_for(self, params: SamplingParams) -> frozenset[int]:
        """What a request never samples."""
        ends = self._eos if params.ignore_eos and self._suppresses_ends else ()
        more = {*params.suppress_token_ids, *ends}
        return self._suppressed if self._suppressed.issuperset(more) else self._suppressed | more

    def _grammars(self) -> GrammarCompiler:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "is not supported by a stage that generates no text; leave it out", param="structured"
            )
        from omnistage.engines.ar.sampling.grammar import compiler_for

        return compiler_for(self._tokenizer, self._vocab_size, self._eos)

    def add(self, key: str, params: SamplingParams, prompt_token_ids: Sequence[int], owner: str | None = None) -> None:
        """Start a request whose parameters have passed `check`. Without a seed it gets a random one.

        Prompt ids outside the vocabulary (media, another embedding table) are not penalised.
        """
        if key in self._states:
            raise InternalError(f"the sampler already holds request {key!r}")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        state, suppressed = RowState(params, stream=mix(seed)), self._suppressed_for(params)
        if params.repetition_penalty != 1.0:
            token_ids = [token for token in set(prompt_token_ids) if 0 <= token < self._vocab_size]
            counts = np.zeros(self._vocab_size, dtype=np.int32)
            counts[token_ids] = 1
            state.occurrences = self._arrays.put(counts)
        if params.presence_penalty or params.frequency_penalty:
            state.counts = self._arrays.put(np.zeros(self._vocab_size, dtype=np.int32))
        if params.logit_bias:
            state.bias_ids = _ascending(params.logit_bias)
            values = [value for _, value in sorted(params.logit_bias.items())]
            state.bias_values = np.array(values, dtype=np.float32)
        if params.allowed_token_ids is not None:
            state.allowed = _ascending(set(params.allowed_token_ids) - suppressed)
        elif suppressed:
            state.suppressed = self._suppressed_ids if suppressed is self._suppressed else _ascending(suppressed)
        stops = dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self._eos)))
        if params.min_tokens and stops:
            state.stops = _ascending(stops)
        if params.structured is not None:
            ends = tuple(dict.fromkeys((*self._eos, *params.stop_token_ids)))
            state.grammar = self.constrained[key] = self._grammars().start(params.structured, ends, owner)
        self._states[key] = state

    def remove(self, key: str) -> None:
        """Forget a request; an unknown key is ignored."""
        if self._states.pop(key, None) is not None and self._plan is not None and key in self._plan.keys:
            self._plan = None
        grammar = self.constrained.pop(key, None)
        if grammar is not None:
            grammar.close()

    # ---------------------------------------------------------------------------------------------- masks

    def late(self, keys: Sequence[str]) -> frozenset[str]:
        """Those of `keys` that cannot be sampled yet: their masks have not come within a step's wait."""
        states = [(key, self.constrained[key]) for key in keys if key in self.constrained]
        missing = [state for _, state in states if not (state.ready or state.prepare())]
        if not missing:
            return frozenset()
        from omnistage.engines.ar.sampling.grammar_state import await_masks

        await_masks(missing)
        return frozenset(key for key, state in states if not state.ready)

    def slow(self, keys: Sequence[str]) -> frozenset[str]:
        """Those of `keys` whose next mask may take long, as their last one did."""
        return frozenset(key for key in keys if key in self.constrained and self.constrained[key].slow)

    # ------------------------------------------------------------------------------------------- sampling

    def sample(self, logits: Tensor, keys: Sequence[str]) -> list[Sampled]:
        """Sample and record one token a row; row i of `logits` `[S, V]` belongs to `keys[i]`, all different.

        `logits` is left unchanged. A row that cannot be sampled carries its error; the others are not touched by it.
        """
        return self.read(self.launch(logits, keys))

    def block(self, keys: Sequence[str]) -> Block | None:
        """What the kernels in a captured step take to sample this batch: `launch` then gets its ids.

        None: there are none, or a request has a grammar, whose mask is not known before the last token is.
        """
        plan = self._plan_for(tuple(keys))
        return None if plan.constrained else plan.block

    def launch(self, logits: Tensor, keys: Sequence[str], ids: Tensor | None = None) -> PendingTokens:
        """`sample` without waiting for a device: the same requests may be sampled again before `read`.

        `ids`: int64 `[S]` on the device, where the kernels have sampled with `block` already.
        """
        if logits.shape != (len(keys), self._vocab_size):
            raise StageError(
                f"logits of shape {tuple(logits.shape)} for {len(keys)} requests and {self._vocab_size} tokens"
            )
        if not keys:
            return PendingTokens([])
        logits, plan = logits.detach(), self._plan_for(tuple(keys))
        if not self._arrays.host:
            pending = self._launch_on_device(plan, logits, ids)
        else:
            tokens = plan.pick_on_host(logits)
            logprobs = self._record_on_host(plan, logits, tokens) if plan.recording or plan.logprob_rows else ()
            pending = PendingTokens(self._results(plan, tokens, logprobs, logits))
        plan.advance()
        return pending

    def residual_numbers(self, keys: Sequence[str], count: int, temperature: float | None) -> np.ndarray:
        """What the residual codes of the tokens that `launch` samples next are chosen by (`CodePredictor.run`)."""
        return residual_numbers([self._states[key] for key in keys], count, temperature)

    def read(self, pending: PendingTokens) -> list[Sampled]:
        """The result of each row of a batch, once it is there. To be called once."""
        if pending.results is not None:
            return pending.results
        if pending.plan is None or pending.download is None:
            raise InternalError("a batch without tokens")
        tokens, *values = pending.download.wait()
        logprobs = [number for tensor in values for number in tensor.flatten().tolist()]
        return self._results(pending.plan, tokens.tolist(), logprobs)

    def _plan_for(self, keys: tuple[str, ...]) -> BatchPlan:
        plan = self._plan
        if plan is None or plan.keys != keys or plan.steps == 0:
            plan = self._plan = self._make_plan(keys)
        return plan

    def _make_plan(self, keys: tuple[str, ...]) -> BatchPlan:
        if len(set(keys)) != len(keys):
            raise InternalError("a request is in the batch more than once")
        missing = [key for key in keys if key not in self._states]
        if missing:
            raise InternalError(f"the sampler does not hold request {missing[0]!r}")
        return BatchPlan(keys, [self._states[key] for key in keys], self._vocab_size, self._arrays)

    @staticmethod
    def _record_on_host(plan: BatchPlan, logits: Tensor, tokens: Sequence[int]) -> Sequence[float]:
        """Count sampled tokens; the log probabilities of those for which they were requested."""
        ids = torch.tensor(tokens)
        plan.record(ids)
        return plan.logprobs(logits, ids).flatten().tolist() if plan.logprob_rows else ()

    def _launch_on_device(self, plan: BatchPlan, logits: Tensor, ids: Tensor | None) -> PendingTokens:
        if ids is None:
            ids = plan.pick_on_device(logits)
            plan.record(ids)
        logprobs = (plan.logprobs(logits, ids),) if plan.logprob_rows else ()
        return PendingTokens(plan=plan, ids=ids, download=Download(ids, *logprobs))

    def _results(
        self, plan: BatchPlan, tokens: Sequence[int], logprobs: Sequence[float], logits: Tensor | None = None
    ) -> list[Sampled]:
        if not (plan.constrained or logprobs or min(tokens) < 0):
            return [Sampled(token) for token in tokens]
        width = 1 + 2 * plan.tops
        rows = {row: logprobs[i * width : (i + 1) * width] for i, row in enumerate(plan.logprob_rows)}
        results = []
        for row, (state, token) in enumerate(zip(plan.states, tokens, strict=True)):
            if token < 0:
                failure = state.grammar.failure if state.grammar is not None else None
                if failure is None and logits is not None:
                    failure = self._diagnose(logits[row])
                empty = token == NOTHING and row in plan.processed
                results.append(Sampled(FAILED, error=failure or (_no_token_left() if empty else _not_finite())))
            elif state.grammar is not None and not state.grammar.accept(token):
                results.append(Sampled(FAILED, error=StageError("the sampled token violates the request's grammar")))
            else:
                count = min(state.params.logprobs or 0, plan.tops)
                logprobs_of = self._logprobs(token, rows[row], count, plan.tops) if row in rows else None
                results.append(Sampled(token, logprobs_of))
        return results

    @staticmethod
    def _diagnose(row: Tensor) -> OmniError:
        if row.isnan().any():
            return StageError("the model returned NaN logits")
        if row.isposinf().any() or not row.isfinite().any():
            return StageError("the model returned infinite logits")
        return _no_token_left()

    # ------------------------------------------------------------------------------------------- logprobs

    def _logprobs(self, token: int, values: Sequence[float], count: int, tops: int) -> TokenLogprobs:
        ids = values[1 + tops : 1 + tops + count]
        top = tuple(
            TokenLogprob(int(i), value, *self._text(int(i)))
            for i, value in zip(ids, values[1 : 1 + count], strict=True)
        )
        return TokenLogprobs(TokenLogprob(token, values[0], *self._text(token)), top)

    def _text(self, token: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return "", b""
        if token not in self._texts:
            raw = token_bytes(self._tokenizer, token)
            self._texts[token] = raw.decode(errors="replace"), raw
        return self._texts[token]


def _no_token_left() -> OmniError:
    return InvalidRequestError("the request's constraints leave no token to sample; relax them")


def _not_finite() -> OmniError:
    return StageError("the model returned NaN or infinite logits")


def _ascending(ids: Iterable[int]) -> Ints:
    return np.array(sorted(ids), dtype=np.int64)
