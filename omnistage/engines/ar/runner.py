"""Runs a scheduled batch through the component: tensors, no policy.

All scheduled tokens of all sequences go through one flattened forward. A batch of nothing but generated tokens may
replay a captured CUDA graph instead (`graphs.py`); both paths share the component and give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from omnistage.config.schema import ARBudget
from omnistage.core.errors import InternalError, OmniError, StageError
from omnistage.core.failures import stage_failure
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, SideRows
from omnistage.engines.adapters.layers import AdapterLayers
from omnistage.engines.adapters.library import NOTHING, Selection
from omnistage.engines.ar.attention import AttentionBackend, BatchLayout, PagedContext, bind_caches, current
from omnistage.engines.ar.attention.float8_cache import new_caches
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.embeds import fill_frames, fill_rows
from omnistage.engines.ar.graphs import DecodeGraphs, StepTensors
from omnistage.engines.ar.memory import zeros
from omnistage.engines.ar.prefill_graphs import PrefillGraphs, PromptStep
from omnistage.engines.ar.residual import CodePredictor
from omnistage.engines.ar.rows import UNREAD, SequenceRows, ends_of
from omnistage.engines.ar.sampling.device_selection import has_kernels
from omnistage.engines.ar.sampling.sampler import PendingTokens, Sampled, Sampler
from omnistage.engines.ar.sampling.selection import FAILED
from omnistage.engines.ar.scheduler import ScheduledSequence, SchedulerOutput
from omnistage.engines.ar.torchscript import DecodeScripts
from omnistage.engines.byte_cache import ByteCache
from omnistage.engines.streams import DeviceStream, Download, upload


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Rows of tokens [start, start + len(rows)) of a sequence."""

    rows: torch.Tensor
    start: int


@dataclass(slots=True)
class RunnerOutput:
    """What a step gave, by sequence key."""

    sampled: dict[str, Sampled] = field(default_factory=dict)
    hidden: dict[str, HiddenRows] = field(default_factory=dict)
    failed: dict[str, OmniError] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    """Not sampled although asked: the masks of their grammars are not there. Their last token has to run again."""
    slow: frozenset[str] = frozenset()
    """Sampled, and their next mask may take long."""
    frames: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """All codes of the sampled tokens' frames, where the component predicts them."""


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device may still be computing."""

    plan: SchedulerOutput
    result: RunnerOutput
    """What of it is known already."""
    mark: Download | None = None
    """Set where nothing is sampled."""
    tokens: PendingTokens | None = None
    codes: Download | None = None
    """Residual codes of the sampled tokens."""
    sampled: list[tuple[str, SequenceRows, int]] = field(default_factory=list)
    """Which sequences get a token, and where in them it will stand."""


class Runner:
    """Owns the KV tensors, the sequences' rows and the sampler of one stage."""

    def __init__(
        self,
        component: ARComponent,
        backend: AttentionBackend,
        stream: DeviceStream,
        budget: ARBudget,
        *,
        num_blocks: int,
        max_length: int,
        run_ahead: bool,
        kv_dtype: torch.dtype,
        graph_batch_sizes: Sequence[int],
        adapters: AdapterLayers | None,
        torchscript: bool,
    ) -> None:
        """`run_ahead`: steps are launched before the tokens of those before them are read."""
        spec, block_size = component.spec, budget.block_size
        self.component = component
        self.backend = backend
        self.budget = budget
        self.adapters = adapters
        self.block_size = block_size
        self._stream = stream
        self.encoder_cache = ByteCache[torch.Tensor](budget.encoder_cache, lambda rows: rows.nbytes)
        device, dtype = component.device, component.dtype
        # Zeros, not garbage: a padded gather multiplies unwritten slots by zero, and 0 x NaN is NaN.
        caches = new_caches(spec, num_blocks, block_size, kv_dtype, lambda shape, kind: zeros(shape, device, kind))
        bind_caches(component.attention_modules, caches)
        # The last row takes what padding writes.
        emit_shape = (num_blocks * block_size + 1, spec.emit_size)
        self.emit_pool = zeros(emit_shape, device, dtype) if spec.emit_size else None
        self.sampler = Sampler(
            spec.vocab_size,
            device,
            tokenizer=component.tokenizer,
            eos_token_ids=component.eos_token_ids,
            suppress_token_ids=component.suppress_token_ids,
            suppress_ignored_ends=component.tokenizer is None,
            on_host=device.type == "cpu" and not run_ahead,
        )
        # A captured step may be for more sequences than ever run.
        num_rows = max((budget.max_running, *graph_batch_sizes))
        self.last_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """The tokens that the last step sampled, in its order: the next one may begin before they are read."""
        self.last_codes: torch.Tensor | None = None
        """Their residual codes."""
        if spec.residual is not None:
            self.last_codes = torch.zeros(num_rows, spec.residual.count, dtype=torch.int64, device=device)
        self.predictor: CodePredictor | None = None
        self.sample_in_graph = budget.sample_in_graph and has_kernels(device)
        """Whether captured steps end with the kernels that sample."""
        self._rows: dict[str, SequenceRows] = {}
        self._stream.follow()  # merged weights and the caches' zeros may still be written
        self.graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self.scripts: DecodeScripts | None = None
        sizes = graph_batch_sizes if device.type == "cuda" and backend.supports_graphs else ()
        with self._stream.use():
            if sizes:
                self.graphs = DecodeGraphs(self, sizes, max_length)
                if budget.graph_prefill_tokens:
                    self.prefill_graphs = PrefillGraphs(self, budget.graph_prefill_tokens, max_length)
            if torchscript:
                self.scripts = DecodeScripts(component, backend, caches)
                self.scripts.trace(max_length)
            if spec.residual is not None:
                self.predictor = CodePredictor(component, sizes)

    # ------------------------------------------------------------------------------------------ sequences

    def add(
        self,
        key: str,
        payload: ARInput,
        params: SamplingParams,
        *,
        capacity: int,
        emit: bool,
        owner: str | None = None,
        adapters: Selection = NOTHING,
    ) -> None:
        """Open a sequence. Raises (and keeps nothing) when its parameters do not fit the model."""
        with self._stream.use():
            self.sampler.add(key, params, payload.token_ids, owner)
            device, dtype = self.component.device, self.component.dtype
            residual = self.component.spec.residual
            num_codes = 0 if residual is None else residual.count
            rows = SequenceRows.open(key, payload, capacity, emit, device, dtype, num_codes)
            if payload.side_rows is not None and len(payload.side_rows):
                self._stream.share(payload.side_rows)
                rows.feed(payload.side_rows.to(device, dtype), final=False)
            if payload.embeds is not None:
                self._stream.share(payload.embeds)
            rows.adapters = adapters
            self._rows[key] = rows

    def feed(self, key: str, side: SideRows) -> int:
        """Append side rows, the component's final ones after the last; how many came."""
        rows, new = self._rows[key], side.rows
        device, dtype = self.component.device, self.component.dtype
        self._stream.share(new)
        if new.device == device and new.dtype == dtype and not side.final and rows.may_borrow(new):
            rows.feed(new, final=False)  # most of the time: nothing is computed
            return len(new)
        with self._stream.use():
            new = new.to(device, dtype)
            if side.final:
                new = torch.cat((new, self.component.final_side_rows()))
            rows.feed(new, final=side.final)
            rows.own_side_rows()
        return len(new)

    def remove(self, key: str) -> None:
        self._rows.pop(key, None)
        self.sampler.remove(key)

    def keys(self) -> list[str]:
        return list(self._rows)

    # ------------------------------------------------------------------------------------------- stepping

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Begin with a step. Nothing waits for the device, unless media have to be encoded."""
        step = LaunchedStep(output, RunnerOutput())
        with self._stream.use():
            for key in output.preempted:
                if key in self._rows:
                    self._rows[key].forget_blocks()
            batch = []
            if self.adapters is not None:
                self._activate(self.adapters, output.batch, step.result)
            for item in output.batch:
                rows = self._rows.get(item.key)
                if rows is None:
                    raise InternalError(f"sequence {item.key!r} was scheduled but never added")
                if item.key in step.result.failed:
                    continue
                if len(rows.media_index) and rows.media_rows is None and item.start < rows.prompt_length:
                    try:
                        rows.media_rows = self._encode_media(rows)
                    except BaseException as error:  # the boundary of one request's media: it ends this sequence alone
                        step.result.failed[item.key] = stage_failure(error, "the media encoder")
                        continue
                if len(item.blocks) > len(rows.table):
                    rows.sync_blocks(item.blocks, self.block_size)
                batch.append(item)
            if not batch:
                return step
            replayed = None
            if self.graphs is not None and all(self._is_decode(item) for item in batch):
                names = [item.key for item in batch]
                block = self.sampler.block(names) if self.sample_in_graph else None
                replayed = self.graphs.run(batch, self._rows, block, self._residual_numbers(names))
            sampling = batch
            if replayed is None:
                replayed, sampling = self._forward(batch), [item for item in batch if item.sample]
            logits, hidden, emitted, ids, codes = replayed
            if emitted is not None:
                self._gather_hidden(batch, emitted, step.result)
            keys = [item.key for item in sampling]
            if self.sampler.constrained and logits is not None:
                step.result.late = self.sampler.late(keys)  # on a device, the forward pass runs meanwhile
                on_time = [row for row, key in enumerate(keys) if key not in step.result.late]
                if len(on_time) < len(keys):
                    keys = [keys[row] for row in on_time]
                    index = upload(np.array(on_time, dtype=np.int64), logits.device)
                    logits, hidden = logits[index], None if hidden is None else hidden[index]
            if logits is None or not keys:
                step.mark = self._stream.mark()
                return step
            numbers = self._residual_numbers(keys) if codes is None and self.predictor is not None else None
            step.tokens = self.sampler.launch(logits, keys, ids)
            if step.tokens.ids is not None and ids is None:
                self.last_ids[: len(keys)] = step.tokens.ids
            if codes is not None:
                step.codes = Download(codes)
            elif hidden is not None and numbers is not None:
                step.codes = self._predict(hidden, step.tokens, numbers)
            for row, key in enumerate(keys):
                rows = self._rows[key]
                step.sampled.append((key, rows, rows.length))
                rows.append(UNREAD)
                rows.sampled_row = row
        return step

    def _activate(self, adapters: AdapterLayers, batch: Sequence[ScheduledSequence], result: RunnerOutput) -> None:
        """Have the adapters of a step on the device, before any of its rows is computed."""
        adapters.begin_step()
        for item in batch:
            rows = self._rows.get(item.key)
            if rows is None or not rows.adapters.adapters:
                continue
            try:
                adapters.activate(rows.adapters)
            except BaseException as error:  # the boundary of one request's adapters: it ends this sequence alone
                result.failed[item.key] = stage_failure(error, "reading an adapter")

    def _residual_numbers(self, keys: Sequence[str]) -> np.ndarray | None:
        residual = self.component.spec.residual
        return None if residual is None else self.sampler.residual_numbers(keys, residual.count, residual.temperature)

    def _predict(self, hidden: torch.Tensor, tokens: PendingTokens, numbers: np.ndarray) -> Download:
        """Launch the residual codes of the tokens that are being sampled."""
        ids, last, predictor = tokens.ids, self.last_codes, self.predictor
        if ids is None:
            ids = torch.tensor([sampled.token_id for sampled in tokens.results or ()], device=hidden.device)
        if last is None or predictor is None:
            raise InternalError("this component has no code predictor")
        codes = predictor.run(hidden, ids, numbers)
        last[: len(codes)] = codes
        return Download(codes)

    def read(self, step: LaunchedStep) -> RunnerOutput:
        """What a step gave, once it is there. Steps are read in the order in which they were launched."""
        result = step.result
        if step.mark is not None:
            step.mark.wait()
        if step.tokens is not None:
            results = step.tokens.results  # known already where they were sampled on the host
            if results is None:
                results = self.sampler.read(step.tokens)
            for (key, rows, place), sampled in zip(step.sampled, results, strict=True):
                result.sampled[key] = sampled
                rows.tokens[place] = sampled.token_id
            if step.codes is not None:
                self._read_codes(step, step.codes)
            if self.sampler.constrained:
                result.slow = self.sampler.slow([key for key, _, _ in step.sampled])
        return result

    def _read_codes(self, step: LaunchedStep, download: Download) -> None:
        for (key, rows, place), codes in zip(step.sampled, download.wait()[0].tolist(), strict=True):
            sampled = step.result.sampled[key]
            if sampled.error is None and min(codes) < 0:
                error = StageError("the code predictor returned NaN or infinite logits")
                step.result.sampled[key] = Sampled(FAILED, error=error)
            rows.codes[place - rows.prompt_length] = codes
            step.result.frames[key] = (sampled.token_id, *codes)

    def _forward(self, batch: Sequence[ScheduledSequence]) -> StepTensors:
        """The plain path: any mixture of prompt chunks and generated tokens."""
        component, device = self.component, self.component.device
        total = sum(item.count for item in batch)
        ids = np.empty(total, dtype=np.int64)
        slots = np.empty(total, dtype=np.int64)
        fractional = component.spec.fractional_positions
        positions = np.empty((component.spec.position_dims, total), dtype=np.float64 if fractional else np.int64)
        sequences = [self._rows[item.key] for item in batch]
        if self.adapters is not None:
            self.adapters.select([(item.count, rows.adapters) for item, rows in zip(batch, sequences, strict=True)])
        offset, has_rows = 0, False
        unread: list[tuple[int, int]] = []
        for item, rows in zip(batch, sequences, strict=True):
            start, count = item.start, item.count
            if count == 1 and start >= rows.prompt_length:  # numbers are several times faster than slices
                ids[offset] = rows.tokens[start]
                if ids[offset] == UNREAD:
                    unread.append((offset, rows.sampled_row))
                slots[offset] = rows.slots[start]
                plain = rows.positions is None  # nearly always: no call for every token
                positions[:, offset] = start + rows.payload.position_delta if plain else rows.position(start)
            else:
                ids[offset : offset + count] = rows.tokens[start : start + count]
                slots[offset : offset + count] = rows.slots[start : start + count]
                rows.fill_positions(positions[:, offset : offset + count], start, start + count)
            has_rows = has_rows or start < rows.prompt_length or rows.payload.streaming
            offset += count
        packed = upload(np.concatenate((ids, slots, positions.reshape(-1).view(np.int64))), device)
        slot_mapping = packed[total : 2 * total]
        if unread:
            places = upload(np.array(unread).T.copy(), device)
            # A row that could not be sampled ends with its step; until then any token will do.
            packed[places[0]] = self.last_ids[places[1]].clamp(min=0)
        embeds = component.embed(packed[:total])
        media = torch.zeros(total, 1, dtype=torch.bool, device=device) if self.emit_pool is not None else None
        if self.last_codes is not None:
            fill_frames(component, embeds, packed, batch, self._rows, self.last_codes)
        deep = fill_rows(component, embeds, media, batch, self._rows) if has_rows else None
        layout = BatchLayout(
            np.array([item.count for item in batch], dtype=np.int32),
            np.array([item.start + item.count for item in batch], dtype=np.int32),
            [rows.slots for rows in sequences],
            [rows.table for rows in sequences],
            ends_of(batch, sequences) if has_rows else None,
        )
        places = packed[2 * total :].view(-1, total)
        if fractional:
            places = places.view(torch.float64)
        computed = None
        if deep is None and self.prefill_graphs is not None and layout.ends is None:
            computed = self.prefill_graphs.run(PromptStep(embeds, places, slot_mapping, media, layout))
        if deep is None and self.scripts is not None:
            hidden = self.scripts.run(embeds, places, slot_mapping, layout)
            if hidden is not None:
                computed = hidden, None if media is None else component.emit(embeds, hidden, media)
        if computed is None:
            paged = current.paged = PagedContext(self.backend, slot_mapping, self.backend.plan(layout, device), layout)
            if deep is None:
                hidden = component.forward(embeds, places, paged)
            else:
                hidden = component.forward_media(embeds, places, paged, *deep)
            computed = hidden, None if media is None else component.emit(embeds, hidden, media)
        hidden, emitted = computed
        if self.emit_pool is not None and emitted is not None:
            self.emit_pool.index_copy_(0, slot_mapping, emitted)
        sampling = [item for item in batch if item.sample]
        if not sampling:
            return StepTensors(None, None, emitted)
        if len(sampling) != total:
            ends = np.cumsum([item.count for item in batch]) - 1
            last = [int(e) for e, item in zip(ends, batch, strict=True) if item.sample]
            hidden = hidden.index_select(0, upload(np.array(last), device))
        return StepTensors(component.logits(hidden), hidden, emitted)

    # --------------------------------------------------------------------------------------------- pieces

    def _is_decode(self, item: ScheduledSequence) -> bool:
        """One token that the next one is sampled from, as a captured step takes it."""
        rows = self._rows[item.key]
        if not item.sample or item.count != 1:
            return False
        if item.start >= rows.prompt_length:
            return True
        # The last token of a prompt that was cached up to there, if there is nothing special about it, and it is
        # embedded as a generated one is: not where those are frames.
        plain = rows.embeds is None and not len(rows.media_index) and not rows.payload.streaming
        plain = plain and self.last_codes is None
        return plain and (rows.positions is not None or not rows.payload.position_delta)

    def _encode_media(self, rows: SequenceRows) -> torch.Tensor:
        parts = []
        for span in rows.payload.media:
            encoded = self.encoder_cache.get(span.key)
            if encoded is None:
                encoded = self.component.encode(span).to(self.component.dtype)
                if len(encoded) != len(span.positions):
                    raise StageError(
                        f"the {span.kind} encoder returned {len(encoded)} rows for {len(span.positions)} placeholders"
                    )
                self.encoder_cache.put(span.key, encoded)
            parts.append(encoded)
        order = np.argsort(np.concatenate([s.positions.cpu().numpy() for s in rows.payload.media]), kind="stable")
        widest = max(part.shape[1] for part in parts)
        joined = torch.cat([nn.functional.pad(part, (0, widest - part.shape[1])) for part in parts])
        return joined.index_select(0, upload(order, joined.device))

    def _gather_hidden(self, batch: Sequence[ScheduledSequence], step_rows: torch.Tensor, result: RunnerOutput) -> None:
        """Rows not handed out yet: this step's, and before them those of a reused prefix."""
        offset = 0
        for item in batch:
            rows, end = self._rows[item.key], item.start + item.count
            if rows.emit and end > rows.emitted:
                first = max(rows.emitted, item.start)
                new = step_rows[offset + first - item.start : offset + item.count]
                if rows.emitted < item.start:
                    if self.emit_pool is None:
                        raise InternalError("this component emits no rows")
                    pooled = upload(rows.slots[rows.emitted : item.start], self.emit_pool.device)
                    new = torch.cat((self.emit_pool.index_select(0, pooled), new))
                result.hidden[item.key] = HiddenRows(new, rows.emitted)
                rows.emitted = end
            offset += item.count
