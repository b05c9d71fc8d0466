"""The autoregressive stage: scheduler, runner and the text each sequence has produced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from omnistage.config.schema import ARBudget
from omnistage.core.errors import (
    CapacityError,
    LimitExceededError,
    OmniError,
    PromptTooLongError,
    StageError,
)
from omnistage.core.failures import log_defect, stage_failure
from omnistage.core.params import SamplingParams
from omnistage.core.stage import StageStats
from omnistage.core.types import (
    ARInput,
    FinishReason,
    RequestInfo,
    SideRows,
    StageChunk,
    StageFeed,
    StageInput,
    TokenChunk,
)
from omnistage.engines.adapters.library import AdapterLibrary, select
from omnistage.engines.ar.adapters import open_adapters
from omnistage.engines.ar.answer import Answer
from omnistage.engines.ar.attention import make_backend
from omnistage.engines.ar.attention.float8_cache import FLOAT8
from omnistage.engines.ar.block_pool import BlockPool
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.inputs import ContentKeys, check_payload
from omnistage.engines.ar.memory import effective_budget, kv_dtype_of, max_length_of, plan_blocks
from omnistage.engines.ar.prepared_layers import prepare_layers
from omnistage.engines.ar.runner import LaunchedStep, RunnerOutput
from omnistage.engines.ar.runners import runner_of
from omnistage.engines.ar.sampling.grammar_state import GrammarState, await_any
from omnistage.engines.ar.scheduler import Scheduler, SchedulerOutput, SequenceState
from omnistage.engines.ar.text import TextStream, stop_reason
from omnistage.engines.ar.torchscript import scripts
from omnistage.engines.stage import BatchedStage
from omnistage.engines.streams import FED_PRIORITY, PRIORITY

MAX_LOGPROBS = 2**19
"""Log probabilities of one request, over all tokens of all answers: 25,000 tokens with the 20 most likely ones each."""
_MASK_WAIT_SECONDS = 0.002
"""Where only held answers are left, a step waits so long for a mask; stages may share a thread, so it is short."""


class ARStage(BatchedStage[ARInput, SamplingParams]):
    """A stage on the autoregressive engine."""

    params_type = SamplingParams
    payload_type = ARInput

    def __init__(
        self, name: str, component: ARComponent, budget: ARBudget, adapters: AdapterLibrary | None = None
    ) -> None:
        priority = FED_PRIORITY if component.spec.side_input else PRIORITY
        super().__init__(name, component.device, stream_priority=priority)
        self.component = component
        self._budget = budget = effective_budget(component, budget)
        max_length = max_length_of(component, budget)
        num_blocks = plan_blocks(component, budget, max_length)
        self.max_length = min(max_length, num_blocks * budget.block_size)
        limit = "kv_memory" if self.max_length < max_length else "max_model_len"
        self._hint = f" or raise {name}.budget.{limit}" if self.max_length < component.spec.max_length else ""
        """What would make room for longer sequences; nothing where the model itself takes no longer ones."""
        pool = BlockPool(num_blocks, budget.block_size, prefix_caching=budget.prefix_caching)
        self.scheduler = Scheduler(
            pool,
            max_batch_tokens=budget.max_batch_tokens,
            max_running=budget.max_running,
            ageing_steps=budget.ageing_steps,
            prefill_chunk=budget.prefill_chunk,
            cut_pairs=not component.spec.uneven_states,
            adapter_slots=0 if adapters is None else adapters.limits.slots,
        )
        self.adapters, layers = adapters, open_adapters(adapters, component, name)
        kv_dtype = kv_dtype_of(component, budget)
        backend = make_backend(
            budget.attention, component.device, component.spec.plain_attention, float8=kv_dtype == FLOAT8
        )
        graph_sizes = prepare_layers(component, budget, kernels=backend.name == "triton", adapters=layers)
        on_cuda = component.device.type == "cuda"
        self._run_ahead = on_cuda if budget.run_ahead == "auto" else budget.run_ahead
        self.runner = runner_of(component.spec)(
            component,
            backend,
            self.stream,
            budget,
            num_blocks=num_blocks,
            max_length=self.max_length,
            run_ahead=self._run_ahead,
            kv_dtype=kv_dtype,
            graph_batch_sizes=graph_sizes,
            adapters=layers,
            torchscript=layers is None and scripts(component, budget, backend),
        )
        self._launched: LaunchedStep | None = None
        """The step whose tokens have not been read; none between the steps of a stage that does not run ahead."""
        self._serial = 0
        self._answers: dict[str, Answer] = {}
        self._requests: dict[str, list[str]] = {}
        self._waiting: dict[str, GrammarState] = {}
        """Answers that wait for the mask of their grammar: left out of the batch, like starved ones."""
        self._late_masks = 0

    def warm_up(self) -> None:
        """Run what requests will: layers are compiled, and kernels loaded, for each kind of batch that comes first."""
        plain = SamplingParams(max_tokens=4)
        filtered = SamplingParams(
            max_tokens=4, top_k=2, top_p=0.5, repetition_penalty=1.1, presence_penalty=0.1, logit_bias={0: 1.0}
        )
        longest = min(self._budget.max_batch_tokens, self.max_length - 1)
        # One prompt, as long as a step allows, which takes the most memory. Several, then their next tokens, then
        # these beside another prompt.
        self._run_once([(longest, plain)])
        if self._budget.max_running > 2 and self.max_length > 8:
            self._run_once([(3, plain), (2, filtered)], [], [(4, plain)])

    def _run_once(self, *arrivals: Sequence[tuple[int, SamplingParams]]) -> None:
        """A step after each of `arrivals`: prompts of a length, and how they are sampled."""
        keys: list[str] = []
        try:
            for prompts in arrivals:
                for length, params in prompts:
                    keys.append(f"warm-up {len(keys)}")
                    self.runner.add(keys[-1], ARInput((0,) * length), params, capacity=length + 4, emit=False)
                    state = SequenceState(keys[-1], 0.0, [0] * length, length, cacheable=False)
                    self.scheduler.add(state)
                plan = self.scheduler.schedule()
                result = self.runner.read(self.runner.launch(plan))
                self.scheduler.commit(plan)
                for key, sampled in result.sampled.items():
                    self.scheduler.append(key, max(sampled.token_id, 0))
        finally:
            for key in keys:
                self._forget(key)

    # ------------------------------------------------------------------------------------------- requests

    def _check(self, info: RequestInfo, params: SamplingParams, payload: ARInput) -> None:
        self.component.check(info, payload)
        check_payload(payload, self.component)
        length = len(payload.token_ids)
        if length >= self.max_length:
            raise PromptTooLongError(
                f"the prompt has {length} tokens; stage {self.name!r} holds {self.max_length} with at least one for "
                f"the answer: shorten it{self._hint}",
                param="prompt",
            )
        longest = max((end - start for start, end in payload.both_ways), default=0)
        if longest > self._budget.max_batch_tokens:
            raise CapacityError(
                f"{longest} tokens of one media item must be computed in one step, and stage {self.name!r} computes "
                f"{self._budget.max_batch_tokens}: raise {self.name}.budget.max_batch_tokens, or send a smaller one"
            )
        if payload.num_tokens is not None and length + payload.num_tokens > self.max_length:
            raise CapacityError(
                f"{payload.num_tokens} tokens are needed after the prompt's {length}, and stage {self.name!r} holds "
                f"{self.max_length}: choose a smaller picture{self._hint}"
            )
        if self.max_length - length < params.min_tokens:
            raise CapacityError(
                f"min_tokens={params.min_tokens} does not fit: {self.max_length - length} tokens are left after the "
                "prompt",
                param="min_tokens",
            )

    def _check_params(self, params: SamplingParams) -> None:
        if params.logprobs is not None:
            tokens = params.n * min(params.max_tokens, self.max_length)
            if tokens * (params.logprobs + 1) > MAX_LOGPROBS:
                raise LimitExceededError(
                    f"{tokens} tokens with {params.logprobs + 1} log probabilities each are over the limit of "
                    f"{MAX_LOGPROBS} in all; request fewer of them, fewer answers or a smaller max_tokens",
                    param="logprobs",
                )
        self.runner.sampler.check(params)
        select(self.adapters, self.name, params.lora)

    def _prepare(self, info: RequestInfo, payload: ARInput) -> ARInput:
        # On the stage's stream: what it makes is read there, with nothing else to order the two.
        with self.stream.use():
            for rows in (payload.embeds, payload.side_rows):
                if rows is not None:
                    self.stream.share(rows)
            return self.component.prepare(info, payload)

    def _add(self, stage_input: StageInput, params: SamplingParams, payload: ARInput) -> None:
        request_id = stage_input.info.request_id
        seed = payload.seed if params.seed is None else params.seed
        # A key is never used again: the last step of a request that was aborted may still be running.
        self._serial += 1
        keys = [f"{request_id}/{index}/{self._serial}" for index in range(params.n)]
        with ExitStack() as undo:  # whatever fails, the stage is left as it was
            for index, key in enumerate(keys):
                undo.callback(self._forget, key)
                if seed is not None and seed + index != params.seed:
                    params = params.model_copy(update={"seed": (seed + index) % 2**63})
                self._open(key, stage_input, payload, params, index)
            undo.pop_all()
        self._requests[request_id] = keys

    def _open(self, key: str, stage_input: StageInput, payload: ARInput, params: SamplingParams, index: int) -> None:
        info, component = stage_input.info, self.component
        prompt = len(payload.token_ids)
        limit = min(params.max_tokens, self.max_length - prompt) if payload.num_tokens is None else payload.num_tokens
        adapters, capacity = select(self.adapters, self.name, params.lora), prompt + limit
        emit = stage_input.emit_hidden
        self.runner.add(key, payload, params, capacity=capacity, emit=emit, owner=info.owner, adapters=adapters)
        rows = payload.side_rows
        side = float(0 if rows is None else len(rows)) if payload.streaming else None
        plain = not payload.media and payload.positions is None and not payload.position_delta
        known = payload.embeds is None and not payload.streaming
        state = SequenceState(
            key=key,
            rank=0.0,
            token_ids=list(payload.token_ids),
            prompt_length=prompt,
            side_rows=side,
            media_keys=None if plain else ContentKeys(payload),
            salt=adapters.salt,
            adapters=adapters.digests,
            cacheable=known and not (stage_input.emit_hidden and component.spec.emit_anew),
            # A frame is more than its first code, by which it would be found.
            cacheable_length=float("inf") if component.spec.residual is None else prompt,
            both_ways=payload.both_ways,
            max_length=prompt + limit,
            ahead=params.structured is None,  # the mask of its next token depends on the last one
        )
        # The others of several answers stand behind the first ones of requests that come soon after.
        self.scheduler.add(state, info.priority + min(index, 1))
        text = TextStream(component.tokenizer, params) if component.tokenizer is not None else None
        stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else component.eos_token_ids)))
        self._answers[key] = Answer(info.request_id, index, params, payload, text, limit, stop_ids)

    def feed(self, request_id: str, feed: StageFeed) -> None:
        if not isinstance(feed, SideRows):
            raise self._wrong_feed(feed)
        for key in self._requests.get(request_id, ()):
            count = self.runner.feed(key, feed)
            self.scheduler.feed(key, count, final=feed.final)

    def _remove(self, request_id: str) -> None:
        for key in self._requests.pop(request_id):
            self._forget(key)

    def _forget(self, key: str) -> None:
        self.scheduler.remove(key)
        self.runner.remove(key)
        self._answers.pop(key, None)
        self._waiting.pop(key, None)

    # ------------------------------------------------------------------------------------------- stepping

    def has_work(self) -> bool:
        return self._launched is not None or self.scheduler.has_work() or bool(self._waiting)

    def step(self) -> list[StageChunk]:
        """Launch a step, and read one: the same, or where it runs ahead the one that was launched before it."""
        chunks = self._check_waiting() if self._waiting else []
        self.only_waited = bool(self._waiting) and self._launched is None and not self.scheduler.has_work()
        earlier, self._launched = self._launched, None
        if self.scheduler.has_work():
            plan = self.scheduler.schedule()
            if plan.started:
                chunks += self._mark_started(self._answers[key].request_id for key in plan.started)
            # A plan without a batch may still name preempted sequences, whose slots the runner has to forget.
            if plan.batch or plan.preempted:
                try:
                    self._launched = self.runner.launch(plan)
                    # Those that never ran, like those whose media cannot be encoded.
                    for key, error in self._launched.result.failed.items():
                        chunks.append(self._end(key, FinishReason.ERROR, error=error))
                except BaseException as error:  # the boundary of a step: its requests end, the stage goes on
                    if earlier is not None:  # some of them may have ended there
                        chunks += self._read(earlier)
                        earlier = None
                    chunks += self._fail_batch(plan, error)
            if not self._run_ahead:
                earlier, self._launched = self._launched, None
        if earlier is not None:
            chunks += self._read(earlier)
        return chunks

    def _read(self, step: LaunchedStep) -> list[StageChunk]:
        """Account for what a step gave."""
        try:
            result = self.runner.read(step)
        except BaseException as error:  # the same boundary
            return self._fail_batch(step.plan, error)
        chunks: list[StageChunk] = []
        self.scheduler.commit(step.plan, result.late)
        for item in step.plan.batch:
            if item.key in self._answers:  # else it has ended meanwhile
                try:
                    chunk = self._update(item.key, result)
                except BaseException as error:  # the boundary of one answer: what breaks in it ends it alone
                    failure = stage_failure(error, f"an answer of stage {self.name!r}")
                    chunk = self._end(item.key, FinishReason.ERROR, error=failure)
                if chunk is not None:
                    chunks.append(chunk)
        if result.late or result.slow:
            self._hold(result)
        return chunks

    def _hold(self, result: RunnerOutput) -> None:
        """Leave those whose mask is not there out of the next batches; nobody waits for them."""
        self._late_masks += len(result.late)
        for key in (*result.late, *result.slow):
            if key in self._answers:  # else it has just ended
                self._waiting[key] = self.runner.sampler.constrained[key]
                self.scheduler.hold(key)

    def _check_waiting(self) -> list[StageChunk]:
        """Let those go on whose masks have come, and end those whose masks take too long."""
        if self._launched is None and not self.scheduler.has_work():
            await_any(self._waiting.values(), _MASK_WAIT_SECONDS)
        chunks = []
        for key, grammar in list(self._waiting.items()):
            if grammar.ready:
                del self._waiting[key]
                self.scheduler.release(key)
            elif (error := grammar.overdue()) is not None:
                chunks.append(self._end(key, FinishReason.ERROR, error=error))
        return chunks

    def _update(self, key: str, result: RunnerOutput) -> StageChunk | None:
        """Account for what one sequence got."""
        answer = self._answers[key]
        sampled, hidden = result.sampled.get(key), result.hidden.get(key)
        if sampled is None and hidden is None:
            return None
        text, finish, ended_by = "", None, None
        if sampled is not None:
            if sampled.error is not None:
                return self._end(key, FinishReason.ERROR, error=sampled.error)
            self.scheduler.append(key, sampled.token_id)
            text, finish, ended_by = answer.advance(sampled.token_id)
            plain = finish is None and hidden is None and sampled.logprobs is None
            if plain and answer.announced and not result.frames:  # nearly every token
                chunk = TokenChunk((sampled.token_id,), text)
                return StageChunk(answer.request_id, self.name, chunk, answer.index)
        payload = TokenChunk(
            token_ids=() if sampled is None else (sampled.token_id,),
            text=text,
            logprobs=(sampled.logprobs,) if sampled is not None and sampled.logprobs is not None else (),
            hidden=hidden.rows if hidden is not None else None,
            hidden_start=hidden.start if hidden is not None else 0,
            prompt=None if answer.announced else answer.payload,
            ended_by=ended_by,
            stop_reason=None if finish is None else stop_reason(answer.text, answer.params, ended_by),
            cached_tokens=0 if answer.announced else self.scheduler.cached(key),
            frames=(result.frames[key],) if key in result.frames else (),
        )
        answer.announced = True
        if finish is not None:
            return self._end(key, finish, payload=payload)
        return StageChunk(answer.request_id, self.name, payload, answer.index)

    def _end(
        self,
        key: str,
        finish: FinishReason,
        *,
        payload: TokenChunk | None = None,
        error: OmniError | None = None,
    ) -> StageChunk:
        answer = self._answers[key]
        self._forget(key)
        keys = self._requests[answer.request_id]
        keys.remove(key)
        if not keys:
            self.abort(answer.request_id)
        return StageChunk(answer.request_id, self.name, payload, answer.index, finish, error)

    def _fail_batch(self, plan: SchedulerOutput, error: BaseException) -> list[StageChunk]:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            log_defect(f"a step of {len(plan.batch)} sequences in stage {self.name!r}", error)
            error = StageError(
                f"stage {self.name!r} ran out of device memory in this step; lower its budget.max_batch_tokens"
            )
        failure = stage_failure(error, f"a step of stage {self.name!r}")
        # Keys and values of the batch may be half written: nothing computed so far may be reused.
        self.scheduler.pool.forget_prefixes()
        return [
            self._end(item.key, FinishReason.ERROR, error=failure) for item in plan.batch if item.key in self._answers
        ]

    # -------------------------------------------------------------------------------------------- insight

    @property
    def max_model_len(self) -> int:
        return self.max_length

    def stats(self) -> StageStats:
        waiting, running, starved = self.scheduler.counts()
        pool = self.scheduler.pool
        return StageStats(
            waiting=waiting,
            running=running,
            starved=starved,
            steps=self.scheduler.steps,
            tokens=self.scheduler.tokens,
            preemptions=self.scheduler.preemptions,
            capacity=self._budget.max_running,
            extra={
                "one_by_one": float(self.component.spec.own_state is not None),
                "in_groups": float(self.component.spec.grouped),
                "recurrent": float(bool(self.component.spec.states)),
                "whole_media": float(self.component.spec.whole_media),
                "blocks": pool.num_blocks,
                "blocks_free": pool.free_blocks,
                "prefix_lookups": pool.lookups,
                "prefix_hits": pool.hits,
                "encoder_cache_bytes": self.runner.encoder_cache.bytes,
                "encoder_cache_hits": self.runner.encoder_cache.hits,
                "encoder_cache_misses": self.runner.encoder_cache.misses,
                "masks_awaited": len(self._waiting),
                "masks_late": self._late_masks,
            },
        )

    def check_integrity(self) -> None:
        """Raise if a block leaked or is owned twice, or if the stage's tables disagree."""
        self.scheduler.check()
        if not set(self.scheduler.keys()) == set(self.runner.keys()) == set(self._answers):
            raise StageError(f"stage {self.name!r}: scheduler, runner and answers hold different sequences")
