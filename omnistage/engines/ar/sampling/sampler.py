"""The batched sampler: which rows need what, the state of each request, logprobs and errors.

The arithmetic is in `processors.py` and `selection.py`. A batch of the same requests in the same order reuses its plan:
index tensors and stacked counts, built once. Rows without processors never pay for rows with them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnistage.core.errors import InternalError, InvalidRequestError, OmniError, StageError
from omnistage.core.params import SamplingParams
from omnistage.core.record import record
from omnistage.core.types import TokenLogprob, TokenLogprobs
from omnistage.engines.ar.sampling.processors import Arrays, Ints, Processors, RowState, mix, uniform
from omnistage.engines.ar.sampling.selection import FAILED, UNCOVERED, TokenSelector, argmax_host, argmax_rows, top_rows
from omnistage.engines.ar.text import token_bytes

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


class _RowGroup:
    """Rows of a batch that are treated alike: all plain, or all processed. `rows` are their places in the batch."""

    def __init__(
        self, rows: list[int], batch: Sequence[RowState], processed: bool, vocab_size: int, device: torch.device
    ) -> None:
        self.rows = rows
        self.states = [batch[row] for row in rows]
        self.index = None if rows == list(range(len(batch))) else torch.tensor(rows, device=device)
        self.processors = Processors(self.states, vocab_size, device) if processed else None
        self.unchanged = self.index is None and self.processors is None
        """Its logits are the batch's own."""
        self._random = [i for i, state in enumerate(self.states) if not state.params.greedy]
        self._device = device
        self._vocab_size = vocab_size
        self._selector: TokenSelector | None = None
        self._random_index: Tensor | None = None
        self._copy: Tensor | None = None
        if self._random:
            self._selector = TokenSelector([self.states[i].params for i in self._random], vocab_size, device)
            if len(self._random) < len(self.rows):
                self._random_index = torch.tensor(self._random, device=device)

    def prepare(self, logits: Tensor) -> Tensor:
        """This group's logits after its processors; the batch's own are left as they are."""
        if self.processors is None:
            return logits if self.index is None else logits.index_select(0, self.index)
        if self.index is not None:
            x = logits.index_select(0, self.index).float()
        else:
            if self._copy is None:  # kept for the next steps: fresh memory costs more than the copy
                self._copy = torch.empty(logits.shape, dtype=torch.float32, device=self._device)
            x = self._copy.copy_(logits)
        self.processors.apply(x)
        return x

    def _uniforms(self, local: Iterable[int]) -> list[float]:
        states = self.states
        return [uniform(states[i].stream, states[i].step) for i in local]

    def _random_rows_of(self, x: Tensor) -> Tensor:
        return (x if self._random_index is None else x.index_select(0, self._random_index)).float()

    def pick(self, x: Tensor) -> list[int]:
        """An id for each row, or `FAILED` or `UNCOVERED`, from logits on the host."""
        if self._selector is None:
            return argmax_host(x)
        ids = self._selector.select(self._random_rows_of(x), self._uniforms(self._random))
        return ids if self._random_index is None else self._merge(argmax_host(x), ids)

    def gather(self, x: Tensor) -> Tensor:
        """What `pick_gathered` needs of logits on a device: int32 `[N]` there."""
        parts = []
        if self._selector is None or self._random_index is not None:
            parts.append(argmax_rows(x).to(torch.int32))
        if self._selector is not None:
            parts.append(self._selector.gather(self._random_rows_of(x)).view(-1))
        return torch.cat(parts)

    def pick_gathered(self, gathered: npt.NDArray[np.int32]) -> list[int]:
        """`pick`, from the host's copy of what `gather` gave."""
        if self._selector is None:
            greedy: list[int] = gathered.tolist()
            return greedy
        split = 0 if self._random_index is None else len(self.rows)
        candidates = gathered[split:].reshape(len(self._random), -1)
        ids = self._selector.select_gathered(candidates, self._uniforms(self._random))
        return self._merge(gathered[:split].tolist(), ids) if split else ids

    def _merge(self, greedy: list[int], ids: list[int]) -> list[int]:
        for i, token in zip(self._random, ids, strict=True):
            greedy[i] = token
        return greedy

    def pick_again(self, x: Tensor, local: Sequence[int], attempt: int) -> list[int]:
        """Ids of rows that were left `UNCOVERED`, from more of their logits."""
        rows = x[torch.tensor(local, device=self._device)].float()
        selector = TokenSelector([self.states[i].params for i in local], self._vocab_size, self._device)
        return selector.select(rows, self._uniforms(local), attempt=attempt)


class _Plan:
    """What a batch of these requests needs, for as long as `steps` lasts (then `min_tokens` ends for someone)."""

    def __init__(self, keys: tuple[str, ...], states: list[RowState], vocab_size: int, device: torch.device) -> None:
        self.keys = keys
        self.states = states
        self.steps = min((s.params.min_tokens - s.step for s in states if s.holds_stops), default=None)
        plain = [i for i, s in enumerate(states) if not s.processed]
        changed = [i for i, s in enumerate(states) if s.processed]
        changed.sort(key=lambda i: states[i].grammar is None)
        self.groups = [
            _RowGroup(rows, states, processed, vocab_size, device)
            for rows, processed in ((plain, False), (changed, True))
            if rows
        ]
        self.logprob_rows = [i for i, s in enumerate(states) if s.params.logprobs is not None]
        self.constrained = any(s.grammar is not None for s in states)
        self.tops = min(max((s.params.logprobs or 0 for s in states), default=0), vocab_size)
        self.records = any(group.processors is not None and group.processors.records for group in self.groups)
        self._logprob_index = torch.tensor(self.logprob_rows, dtype=torch.int64, device=device)

    def logprobs(self, logits: Tensor, ids: Tensor) -> list[float]:
        """`[L, 1 + 2n]` flat: logprob of the chosen token, of the n likeliest, and their ids; raw logits."""
        rows = logits.index_select(0, self._logprob_index).float()
        mass = rows.logsumexp(dim=1, keepdim=True)
        chosen = rows.gather(1, ids[self._logprob_index].clamp(min=0)[:, None])
        top, top_ids = top_rows(rows, self.tops)
        joined = torch.cat([(chosen - mass).double(), (top - mass).double(), top_ids.double()], dim=1)
        values: list[float] = joined.flatten().tolist()
        return values


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
        self._arrays = Arrays(device)
        self._tokenizer = tokenizer
        self._eos = tuple(dict.fromkeys(eos for eos in eos_token_ids if 0 <= eos < vocab_size))
        self._states: dict[str, RowState] = {}
        self._constrained: dict[str, GrammarState] = {}
        self._plan: _Plan | None = None
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
        for param, ids in token_ids.items():
            for token in ids:
                if not 0 <= token < self._vocab_size:
                    raise InvalidRequestError(
                        f"token {token} is outside the vocabulary (0 to {self._vocab_size - 1})", param=param
                    )
        suppressed = set(params.suppress_token_ids)
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

    def _grammars(self) -> GrammarCompiler:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "is not supported by a stage that generates no text; leave it out", param="structured"
            )
        from omnistage.engines.ar.sampling.grammar import compiler_for

        return compiler_for(self._tokenizer, self._vocab_size, self._eos)

    def add(self, key: str, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Start a request whose parameters have passed `check`. Without a seed it gets a random one.

        Prompt ids outside the vocabulary (media, another embedding table) are not penalised.
        """
        if key in self._states:
            raise InternalError(f"the sampler already holds request {key!r}")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        state = RowState(params, stream=mix(seed))
        if params.repetition_penalty != 1.0:
            known = [token for token in set(prompt_token_ids) if 0 <= token < self._vocab_size]
            seen = np.zeros(self._vocab_size, dtype=np.int32)
            seen[known] = 1
            state.seen = self._arrays.put(seen)
        if params.presence_penalty or params.frequency_penalty:
            state.counts = self._arrays.put(np.zeros(self._vocab_size, dtype=np.int32))
        if params.logit_bias:
            state.bias_ids = _ascending(params.logit_bias)
            values = [value for _, value in sorted(params.logit_bias.items())]
            state.bias_values = np.array(values, dtype=np.float32)
        if params.allowed_token_ids is not None:
            state.allowed = _ascending(set(params.allowed_token_ids).difference(params.suppress_token_ids))
        elif params.suppress_token_ids:
            state.suppressed = _ascending(params.suppress_token_ids)
        stops = dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self._eos)))
        if params.min_tokens and stops:
            state.stops = _ascending(stops)
        if params.structured is not None:
            ends = tuple(dict.fromkeys((*self._eos, *params.stop_token_ids)))
            state.grammar = self._constrained[key] = self._grammars().start(params.structured, ends)
        self._states[key] = state

    def remove(self, key: str) -> None:
        """Forget a request; an unknown key is ignored."""
        if self._states.pop(key, None) is not None and self._plan is not None and key in self._plan.keys:
            self._plan = None
        grammar = self._constrained.pop(key, None)
        if grammar is not None:
            grammar.close()

    # ---------------------------------------------------------------------------------------------- masks

    def grammar(self, key: str) -> GrammarState:
        """The state of a request that has a grammar."""
        return self._constrained[key]

    def late(self, keys: Sequence[str]) -> frozenset[str]:
        """Those of `keys` that cannot be sampled yet: their masks have not come within a step's wait."""
        if not self._constrained:
            return frozenset()
        states = [(key, self._constrained[key]) for key in keys if key in self._constrained]
        missing = [state for _, state in states if not (state.ready or state.prepare())]
        if not missing:
            return frozenset()
        from omnistage.engines.ar.sampling.grammar_state import await_masks

        await_masks(missing)
        return frozenset(key for key, state in states if not state.ready)

    def slow(self, keys: Sequence[str]) -> frozenset[str]:
        """Those of `keys` whose next mask may take long, as their last one did."""
        if not self._constrained:
            return frozenset()
        return frozenset(key for key in keys if key in self._constrained and self._constrained[key].slow)

    # ------------------------------------------------------------------------------------------- sampling

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
        logits, names, plan = logits.detach(), tuple(keys), self._plan
        if plan is None or plan.keys != names or plan.steps == 0:
            plan = self._plan = self._make_plan(names)
        if plan.steps is not None:
            plan.steps -= 1
        prepared = [logits if group.unchanged else group.prepare(logits) for group in plan.groups]
        if self._arrays.host:
            picked = [group.pick(x) for group, x in zip(plan.groups, prepared, strict=True)]
        else:
            picked = self._pick_on_device(plan, prepared)
        # A group without an index is the whole batch in its order; one group alone may still be in another.
        tokens = picked[0] if plan.groups[0].index is None else self._in_order(plan, picked)
        attempt = 0
        while UNCOVERED in tokens:
            attempt += 1
            self._select_again(plan, prepared, tokens, attempt)
        logprobs: list[float] = []
        if plan.records or plan.logprob_rows:
            ids = self._record(plan, tokens)
            logprobs = plan.logprobs(logits, ids) if plan.logprob_rows else []
        for state in plan.states:
            state.step += 1
        if plan.constrained or logprobs or FAILED in tokens:
            return self._results(plan, logits, tokens, logprobs)
        return [Sampled(token) for token in tokens]

    def _make_plan(self, keys: tuple[str, ...]) -> _Plan:
        if len(set(keys)) != len(keys):
            raise InternalError("a request is in the batch more than once")
        missing = [key for key in keys if key not in self._states]
        if missing:
            raise InternalError(f"the sampler does not hold request {missing[0]!r}")
        return _Plan(keys, [self._states[key] for key in keys], self._vocab_size, self._device)

    @staticmethod
    def _pick_on_device(plan: _Plan, prepared: Sequence[Tensor]) -> list[list[int]]:
        gathered = [group.gather(x) for group, x in zip(plan.groups, prepared, strict=True)]
        ends = np.cumsum([len(tensor) for tensor in gathered])
        host = torch.cat(gathered).cpu().numpy()  # the step's only wait for the device, logprobs aside
        pieces = np.split(host, ends[:-1])
        return [group.pick_gathered(piece) for group, piece in zip(plan.groups, pieces, strict=True)]

    @staticmethod
    def _in_order(plan: _Plan, picked: Sequence[Sequence[int]]) -> list[int]:
        """The groups' tokens in the order of the batch."""
        tokens = [FAILED] * len(plan.keys)
        for group, ids in zip(plan.groups, picked, strict=True):
            for row, token in zip(group.rows, ids, strict=True):
                tokens[row] = token
        return tokens

    @staticmethod
    def _select_again(plan: _Plan, prepared: Sequence[Tensor], tokens: list[int], attempt: int) -> None:
        """Fill in, in `tokens`, the rows whose likeliest tokens did not settle it."""
        for group, x in zip(plan.groups, prepared, strict=True):
            local = [i for i, row in enumerate(group.rows) if tokens[row] == UNCOVERED]
            if local:
                for i, token in zip(local, group.pick_again(x, local, attempt), strict=True):
                    tokens[group.rows[i]] = token

    def _record(self, plan: _Plan, tokens: Sequence[int]) -> Tensor:
        """Count the sampled tokens for the penalties; the ids where the logits are."""
        ids = torch.tensor(tokens, pin_memory=not self._arrays.host)  # pinned, so that nothing waits for the copy
        if not self._arrays.host:
            ids = ids.to(self._device, non_blocking=True)
        for group in plan.groups:
            if group.processors is not None and group.processors.records:
                group.processors.record(ids if group.index is None else ids[group.index])
        return ids

    def _results(self, plan: _Plan, logits: Tensor, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Sampled]:
        width = 1 + 2 * plan.tops
        rows = {row: logprobs[i * width : (i + 1) * width] for i, row in enumerate(plan.logprob_rows)}
        results = []
        for row, (state, token) in enumerate(zip(plan.states, tokens, strict=True)):
            if token == FAILED:
                failure = state.grammar.failure if state.grammar is not None else None
                results.append(Sampled(FAILED, error=failure or self._diagnose(logits[row])))
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
        return InvalidRequestError("the request's constraints leave no token to sample; relax them")

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


def _ascending(ids: Iterable[int]) -> Ints:
    return np.array(sorted(ids), dtype=np.int64)
