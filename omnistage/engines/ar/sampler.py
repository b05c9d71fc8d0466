"""The batched sampler: which rows need what, the state of each request, logprobs and errors.

The arithmetic is in `logits.py`. A batch of the same requests in the same order reuses its plan: index tensors and
stacked counts, built once. Rows without processors never pay for rows with them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omnistage.engines.ar.logits import (
    FAILED,
    UNCOVERED,
    DrawRows,
    Processors,
    RowState,
    argmax_rows,
    mix,
    top_rows,
    uniform,
)
from omnistage.errors import InternalError, InvalidRequestError, OmniError, StageError
from omnistage.types import SamplingParams, TokenLogprob, TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from omnistage.engines.ar.grammar import GrammarCompiler


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's result. With `error` set the token id is -1 and the request must end."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: OmniError | None = None


class _Part:
    """Rows of a batch that are treated alike: all plain, or all processed. `rows` are their places in the batch."""

    def __init__(
        self, rows: list[int], batch: Sequence[RowState], processed: bool, vocab_size: int, device: torch.device
    ) -> None:
        self.rows = rows
        self.states = [batch[row] for row in rows]
        self.index = None if rows == list(range(len(batch))) else torch.tensor(rows, device=device)
        self.processors = Processors(self.states, device) if processed else None
        self.drawn = [i for i, state in enumerate(self.states) if not state.params.greedy]
        self._device = device
        self._vocab_size = vocab_size
        self._draw: DrawRows | None = None
        self._draw_index: Tensor | None = None
        if self.drawn:
            self._draw = DrawRows([self.states[i].params for i in self.drawn], vocab_size, device)
            if len(self.drawn) < len(self.rows):
                self._draw_index = torch.tensor(self.drawn, device=device)
            # Pinned and reused: every step ends with a synchronisation, so the copy has been made by the next one.
            self._u = torch.empty((len(self.drawn), 1), dtype=torch.float64, pin_memory=device.type == "cuda")

    def prepare(self, logits: Tensor) -> Tensor:
        """This part's logits after its processors; the batch's own are left as they are."""
        x = logits if self.index is None else logits.index_select(0, self.index)
        if self.processors is None:
            return x
        x = x.to(torch.float32, copy=x is logits)
        self.processors.apply(x)
        return x

    def pick(self, x: Tensor) -> Tensor:
        """Ids int64 `[len(rows)]`, or `FAILED` or `UNCOVERED`."""
        if self._draw is None:
            return argmax_rows(x)
        for i, local in enumerate(self.drawn):
            state = self.states[local]
            self._u[i, 0] = uniform(state.stream, state.step)
        u = self._u.to(self._device, non_blocking=True)
        if self._draw_index is None:
            return self._draw.draw(x.float(), u)
        ids = argmax_rows(x)
        ids[self._draw_index] = self._draw.draw(x.index_select(0, self._draw_index).float(), u)
        return ids

    def pick_again(self, x: Tensor, local: Sequence[int], attempt: int) -> Tensor:
        """Ids of rows that were left `UNCOVERED`, from more of their logits."""
        states = [self.states[i] for i in local]
        u = torch.tensor([[uniform(s.stream, s.step)] for s in states], dtype=torch.float64, device=self._device)
        rows = x[torch.tensor(local, device=self._device)].float()
        return DrawRows([s.params for s in states], self._vocab_size, self._device).draw(rows, u, attempt=attempt)


class _Plan:
    """What a batch of these requests needs, for as long as `steps` lasts (then `min_tokens` ends for someone)."""

    def __init__(self, keys: tuple[str, ...], states: list[RowState], vocab_size: int, device: torch.device) -> None:
        self.keys = keys
        self.states = states
        self.steps = min((s.params.min_tokens - s.step for s in states if s.holds_stops), default=None)
        plain = [i for i, s in enumerate(states) if not s.processed]
        changed = [i for i, s in enumerate(states) if s.processed]
        changed.sort(key=lambda i: states[i].grammar is None)
        self.parts = [
            _Part(rows, states, processed, vocab_size, device)
            for rows, processed in ((plain, False), (changed, True))
            if rows
        ]
        self.logprob_rows = [i for i, s in enumerate(states) if s.params.logprobs is not None]
        self.constrained = any(s.grammar is not None for s in states)
        self.tops = min(max((s.params.logprobs or 0 for s in states), default=0), vocab_size)
        self._logprob_index = torch.tensor(self.logprob_rows, device=device) if self.logprob_rows else None

    def logprobs(self, logits: Tensor, ids: Tensor) -> Tensor | None:
        """float64 `[L, 1 + 2n]`: logprob of the chosen token, of the n likeliest, and their ids; raw logits."""
        if self._logprob_index is None:
            return None
        rows = logits.index_select(0, self._logprob_index).float()
        mass = rows.logsumexp(dim=1, keepdim=True)
        chosen = rows.gather(1, ids[self._logprob_index].clamp(min=0)[:, None])
        top, top_ids = top_rows(rows, self.tops)
        return torch.cat([(chosen - mass).double(), (top - mass).double(), top_ids.double()], dim=1)


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
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._tokenizer = tokenizer
        self._eos = tuple(dict.fromkeys(eos for eos in eos_token_ids if 0 <= eos < vocab_size))
        self._states: dict[str, RowState] = {}
        self._plan: _Plan | None = None
        self._texts: dict[int, str] = {}

    # ------------------------------------------------------------------------------------------- requests

    def check(self, params: SamplingParams) -> None:
        """Raise `InvalidRequestError` if these parameters can never work here.

        Compiles a grammar, so that `add` finds it in the cache.
        """
        self._check_ids(params.logit_bias or (), "logit_bias")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self._check_ids(params.suppress_token_ids, "suppress_token_ids")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        suppressed = set(params.suppress_token_ids)
        if params.allowed_token_ids is not None and suppressed.issuperset(params.allowed_token_ids):
            raise InvalidRequestError("suppress_token_ids removes every allowed token", param="allowed_token_ids")
        if len(suppressed) >= self._vocab_size:
            raise InvalidRequestError("every token of the vocabulary is suppressed", param="suppress_token_ids")
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("this stage gives no text, so no string can stop it", param="stop")
        if params.structured is not None:
            if not (*self._eos, *params.stop_token_ids):
                raise InvalidRequestError(
                    "the model has no end token, so constrained text could never end; give stop_token_ids",
                    param="structured",
                )
            self._grammars().compile(params.structured)

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"token {token} is outside the vocabulary (0 to {self._vocab_size - 1})", param=param
                )

    def _grammars(self) -> GrammarCompiler:
        if self._tokenizer is None:
            raise InvalidRequestError("this stage gives no text, so it cannot be constrained", param="structured")
        from omnistage.engines.ar.grammar import compiler_for

        return compiler_for(self._tokenizer, self._vocab_size, self._eos)

    def add(self, key: str, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Start a request. Prompt ids outside the vocabulary (media, another embedding table) are not penalised.

        Raises what `check` raises. Without a seed the request gets a random one.
        """
        if key in self._states:
            raise InternalError(f"the sampler already holds request {key!r}")
        self.check(params)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        state = RowState(params, stream=mix(seed))
        if params.repetition_penalty != 1.0:
            known = [token for token in set(prompt_token_ids) if 0 <= token < self._vocab_size]
            state.seen = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
            state.seen[self._ids(known)] = 1
        if params.presence_penalty or params.frequency_penalty:
            state.counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        if params.logit_bias:
            state.bias_ids = self._ids(params.logit_bias)
            values = [value for _, value in sorted(params.logit_bias.items())]
            state.bias_values = torch.tensor(values, dtype=torch.float32, device=self._device)
        if params.allowed_token_ids is not None:
            state.allowed = self._ids(set(params.allowed_token_ids).difference(params.suppress_token_ids))
        elif params.suppress_token_ids:
            state.suppressed = self._ids(params.suppress_token_ids)
        stops = dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self._eos)))
        if params.min_tokens and stops:
            state.stops = self._ids(stops)
        if params.structured is not None:
            ends = tuple(dict.fromkeys((*self._eos, *params.stop_token_ids)))
            state.grammar = self._grammars().start(params.structured, ends)
        self._states[key] = state

    def _ids(self, ids: Iterable[int]) -> Tensor:
        """Ascending int64 ids on the device."""
        return torch.tensor(sorted(ids), dtype=torch.int64, device=self._device)

    def remove(self, key: str) -> None:
        """Forget a request; an unknown key is ignored."""
        if self._states.pop(key, None) is not None and self._plan is not None and key in self._plan.keys:
            self._plan = None

    # ------------------------------------------------------------------------------------------- sampling

    @torch.inference_mode()
    def sample(self, logits: Tensor, keys: Sequence[str]) -> list[Sampled]:
        """Sample and record one token a row; row i of `logits` `[S, V]` belongs to `keys[i]`, all different.

        `logits` is left unchanged. A row that cannot be sampled carries its error; the others are not touched by it.
        """
        if logits.shape != (len(keys), self._vocab_size):
            raise StageError(
                f"logits of shape {tuple(logits.shape)} for {len(keys)} requests and {self._vocab_size} tokens"
            )
        if not keys:
            return []
        logits = logits.detach()
        plan = self._plan_of(tuple(keys))
        prepared = [part.prepare(logits) for part in plan.parts]
        ids = self._pick(plan, prepared)
        tokens, logprobs = self._fetch(plan, logits, ids)
        attempt = 0
        while UNCOVERED in tokens:
            attempt += 1
            self._settle(plan, prepared, ids, tokens, attempt)
            tokens, logprobs = self._fetch(plan, logits, ids)
        self._record(plan, ids)
        return self._results(plan, logits, tokens, logprobs)

    def _plan_of(self, keys: tuple[str, ...]) -> _Plan:
        plan = self._plan
        if plan is None or plan.keys != keys or plan.steps == 0:
            if len(set(keys)) != len(keys):
                raise InternalError("a request is in the batch more than once")
            missing = [key for key in keys if key not in self._states]
            if missing:
                raise InternalError(f"the sampler does not hold request {missing[0]!r}")
            plan = self._plan = _Plan(keys, [self._states[k] for k in keys], self._vocab_size, self._device)
        if plan.steps is not None:
            plan.steps -= 1
        return plan

    def _pick(self, plan: _Plan, prepared: Sequence[Tensor]) -> Tensor:
        if plan.parts[0].index is None:
            return plan.parts[0].pick(prepared[0])
        ids = torch.empty(len(plan.keys), dtype=torch.int64, device=self._device)
        for part, x in zip(plan.parts, prepared, strict=True):
            ids[part.index] = part.pick(x)
        return ids

    @staticmethod
    def _settle(plan: _Plan, prepared: Sequence[Tensor], ids: Tensor, tokens: Sequence[int], attempt: int) -> None:
        """Fill in, in `ids`, the rows whose likeliest tokens did not decide the draw."""
        for part, x in zip(plan.parts, prepared, strict=True):
            local = [i for i, row in enumerate(part.rows) if tokens[row] == UNCOVERED]
            if local:
                ids[[part.rows[i] for i in local]] = part.pick_again(x, local, attempt)

    @staticmethod
    def _fetch(plan: _Plan, logits: Tensor, ids: Tensor) -> tuple[list[int], list[float]]:
        """Token ids and flat logprobs on the host, in a single transfer."""
        logprobs = plan.logprobs(logits, ids)
        if logprobs is None:
            return ids.tolist(), []
        flat: list[float] = torch.cat([ids.double(), logprobs.flatten()]).tolist()
        return [int(token) for token in flat[: len(ids)]], flat[len(ids) :]

    @staticmethod
    def _record(plan: _Plan, ids: Tensor) -> None:
        for part in plan.parts:
            if part.processors is not None and part.processors.records:
                part.processors.record(ids if part.index is None else ids[part.index])

    def _results(self, plan: _Plan, logits: Tensor, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Sampled]:
        for state in plan.states:
            state.step += 1
        if not (plan.constrained or logprobs or FAILED in tokens):
            return [Sampled(token) for token in tokens]
        width = 1 + 2 * plan.tops
        rows = {row: logprobs[i * width : (i + 1) * width] for i, row in enumerate(plan.logprob_rows)}
        results = []
        for row, (state, token) in enumerate(zip(plan.states, tokens, strict=True)):
            if token == FAILED:
                results.append(Sampled(FAILED, error=self._diagnose(logits[row])))
            elif state.grammar is not None and not state.grammar.accept(token):
                results.append(Sampled(FAILED, error=StageError("the sampled token broke the request's grammar")))
            else:
                count = min(state.params.logprobs or 0, plan.tops)
                found = self._logprobs(token, rows[row], count, plan.tops) if row in rows else None
                results.append(Sampled(token, found))
        return results

    @staticmethod
    def _diagnose(row: Tensor) -> OmniError:
        if row.isnan().any():
            return StageError("the model gave NaN logits")
        if row.isposinf().any() or not row.isfinite().any():
            return StageError("the model gave infinite logits")
        return InvalidRequestError("the request's constraints leave no token to sample; loosen them")

    # ------------------------------------------------------------------------------------------- logprobs

    def _logprobs(self, token: int, values: Sequence[float], count: int, tops: int) -> TokenLogprobs:
        ids = values[1 + tops : 1 + tops + count]
        top = tuple(
            TokenLogprob(int(i), value, self._text(int(i))) for i, value in zip(ids, values[1 : 1 + count], strict=True)
        )
        return TokenLogprobs(TokenLogprob(token, values[0], self._text(token)), top)

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        text = self._texts.get(token)
        if text is None:
            decoded = self._tokenizer.decode([token])
            text = self._texts[token] = decoded if isinstance(decoded, str) else "".join(decoded)
        return text
