"""The served models and the requests that run on them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.errors import (
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    QueueFullError,
    ShutdownError,
)
from omnistage.core.family import Thinking
from omnistage.core.params import DiffusionParams, SamplingParams, StageParams
from omnistage.core.types import Modality
from omnistage.core.validation import short_repr
from omnistage.media.context import decode_for
from omnistage.omni import AsyncOmni
from omnistage.pipeline.event_loop import call_soon
from omnistage.pipeline.health import StageHealth
from omnistage.pipeline.intake import ParamsLike, Prompt, RequestOptions, checked_request_id
from omnistage.pipeline.outputs import Trace
from omnistage.pipeline.stream import OutputStream
from omnistage.server.access.keys import Holder, Keyring, network_of
from omnistage.server.adapters import plan_adapters
from omnistage.server.http.errors import (
    AuditError,
    ContentFilterError,
    LoadingError,
    ModelNotFoundError,
    Rename,
    rename_param,
)
from omnistage.server.http.executor import Workers
from omnistage.server.moderation.filtering import start_filtered
from omnistage.server.moderation.filters import ContentFilter, FilterContext, RequestFilter
from omnistage.server.observe.audit import CURRENT_RECORD, DISCONNECTED, FILTERED, AuditFile, AuditRecord, is_tag
from omnistage.server.observe.metrics import RequestMetrics
from omnistage.server.openai.chat.spoken import SpokenAnswers
from omnistage.server.openai.files import FileStore
from omnistage.server.openai.responses.store import ResponseStore
from omnistage.server.openai.videos.jobs import JobStore, VideoJobs
from omnistage.server.reasoning import ReasoningStream, plan_thinking
from omnistage.server.request_stream import ObservedStream

if TYPE_CHECKING:
    from omnistage.server.observe.tracing import Tracing

_MAX_REMEMBERED = 10_000
"""Requests whose holders are remembered: more than the engines keep traces of."""
SESSION_CLOSE_TIMEOUT = 5.0
TRANSCRIBE_THREADS, MAX_QUEUED_CLIPS = 2, 8
"""Transcriptions without a stage: those that run at once, and those that run or wait."""
MAX_QUEUED_ADAPTERS = 16
"""Adapters that are being loaded or wait for it, one at a time: each is a large file."""
KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class ServedModel:
    name: str
    omni: AsyncOmni
    created: int = field(default_factory=lambda: int(time.time()))
    nearest_sizes: dict[tuple[int | None, int | None], tuple[int | None, int | None]] = field(default_factory=dict)
    """Of pictures: what it draws for a size that is a preference."""
    adapter: str | None = None
    """Of a request that names an adapter as its model; `name` is then that of its base."""

    @property
    def requested_name(self) -> str:
        return self.adapter or self.name

    @cached_property
    def thinking(self) -> Thinking | None:
        """The processor of a model that may think before it answers."""
        processor = self.omni.processor
        return processor if isinstance(processor, Thinking) else None

    def stage_for_params(self, kind: type[StageParams]) -> str | None:
        """The first stage that takes parameters of this kind."""
        stages = self.omni.orchestrator.stages
        return next((name for name in self.omni.orchestrator.graph.order if stages[name].params_type is kind), None)

    def answers(self, params: ParamsLike) -> int:
        """How many texts or pictures a request with these parameters gives."""
        mapping = params if isinstance(params, Mapping) else {}
        orchestrator, most = self.omni.orchestrator, 1
        for name in orchestrator.graph.order:
            for each in (mapping.get(name), orchestrator.default_params[name]):
                if isinstance(each, SamplingParams | DiffusionParams) and "n" in each.model_fields_set:
                    most = max(most, each.n)
                    break
        return most

    def with_seed(self, seed: int | None, params: Mapping[str, StageParams]) -> Mapping[str, StageParams]:
        """These parameters, with the seed, if there is one, on every other stage that uses random numbers."""
        if seed is None:
            return params
        seeded = dict(params)
        seed %= 2**63  # OpenAI's may be negative
        stages = self.omni.orchestrator.stages
        for name in self.omni.orchestrator.graph.order:
            kind = stages[name].params_type
            # Shared parameters are given once for several stages, under the name of the first.
            if "seed" not in kind.model_fields or (kind.shared and name != self.stage_for_params(kind)):
                continue
            if name not in seeded:
                seeded[name] = kind.parse({"seed": seed})
            elif kind.shared and getattr(seeded[name], "seed", None) is None:
                seeded[name] = seeded[name].model_copy(update={"seed": seed})
        return seeded


class Drainable(Protocol):
    def drain(self) -> None:
        """Start no new work, and end when the running work has ended."""


class Service:
    """Models by name. `ready` is false while they load and once the service drains.

    Files and jobs are kept in the folder `state`; without one they are deleted with the service.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel] | None = None,
        keyring: Keyring | None = None,
        state: Path | None = None,
        content_filter: ContentFilter | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._content_filter = content_filter
        self.tracing = tracing
        self.models: dict[str, ServedModel] = dict(models or {})
        self.keyring = keyring or Keyring()
        self.loading = not self.models
        self.loading_step = ""
        """What is being loaded, for those who wait."""
        self._began = time.monotonic()
        self.draining = False
        self.metrics = RequestMetrics()
        self.audit_file: AuditFile | None = None
        self.audit_required = False
        """Whether requests are refused while the audit log cannot be written."""
        self.spoken_answers = SpokenAnswers()
        self.responses = ResponseStore()
        self.transcribe_workers = Workers(TRANSCRIBE_THREADS, MAX_QUEUED_CLIPS, "transcribe")
        self.adapter_workers = Workers(1, MAX_QUEUED_ADAPTERS, "adapters", "adapters")
        self.sessions: dict[Drainable, asyncio.Task[None]] = {}
        """Connections that outlive a request, and the tasks that serve them."""
        self._holders: dict[str, str] = {}
        """The holder's name by request id."""
        self._further: Counter[str] = Counter()
        """By model: answers beyond the first of the requests that are admitted."""
        self._tagged: dict[tuple[str, str], str] = {}
        """The request id by holder and the client's own id."""
        if state is None:
            state = Path(tempfile.mkdtemp(prefix="omnistage-"))
            weakref.finalize(self, shutil.rmtree, state, ignore_errors=True)
        self.jobs = VideoJobs(JobStore(state / "videos"))  # first: it refuses a folder that another service has open
        self.files = FileStore(state / "files")

    @property
    def ready(self) -> bool:
        return not self.loading and not self.draining

    def unavailable_stages(self) -> list[tuple[str, StageHealth]]:
        """Stages that take no requests now, with the names of their models."""
        return [
            (name, health)
            for name, model in list(self.models.items())
            for health in model.omni.health().values()
            if not health.available
        ]

    def report_loading(self, name: str, doing: str, fraction: float) -> None:
        """Note how far a model is; called while it loads."""
        self.loading_step = f"{name}: {doing}, {fraction:.0%} after {time.monotonic() - self._began:.0f} s"

    def add(self, name: str, omni: AsyncOmni) -> None:
        self.models[name] = ServedModel(name, omni)

    def check_ready(self, *, new_work: bool = True) -> None:
        """Raise the client's error while no requests are accepted: no new work, or nothing that cannot be audited.

        The audit line of a refused request is the next attempt.
        """
        if new_work and self.loading:
            raise LoadingError("the models are loading; try again soon")
        if new_work and self.draining:
            raise ShutdownError("the service is stopping and accepts no more requests")
        if self.audit_required and self.audit_file is not None and self.audit_file.failing:
            raise AuditError("the audit log cannot be written, and requests are refused until it can; try again later")

    def model(self, name: str | None) -> ServedModel:
        """A model by its name, which may be left out where there is one. Raises the client's error."""
        self.check_ready()
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise InvalidRequestError("is missing; /v1/models lists the models", param="model")
        model = self.models.get(name) or self.adapted(name)
        if model is None:
            # With keys, not everybody may see all models.
            hint = "/v1/models lists the models" if self.keyring.required else f"models: {', '.join(self.models)}"
            raise ModelNotFoundError(f"there is no model {short_repr(name)}; {hint}", param="model")
        return model

    def adapted(self, name: str) -> ServedModel | None:
        """The model with an adapter of this name."""
        models = self.models.values()
        return next((replace(model, adapter=name) for model in models if name in model.omni.adapters.names()), None)

    def tagged(self, holder: Holder, tag: str) -> str | None:
        """The id of the latest request to which a holder gave this id of its own."""
        return self._tagged.get((holder.name, tag))

    def trace(self, request_id: str, holder: Holder | None = None) -> Trace | None:
        """The trace of a request. With a holder: only of its own requests."""
        if not self._may_see(request_id, holder):
            return None
        return next((t for m in self.models.values() if (t := m.omni.trace(request_id)) is not None), None)

    def abort(self, request_id: str, holder: Holder | None = None) -> bool:
        """End a request; whether it was running. With a holder: only its own requests."""
        if not self._may_see(request_id, holder):
            return False
        return any(model.omni.abort(request_id) for model in self.models.values())

    def _may_see(self, request_id: str, holder: Holder | None) -> bool:
        return holder is None or not self.keyring.required or self._holders.get(request_id) == holder.name

    @contextlib.asynccontextmanager
    async def run_request(
        self,
        holder: Holder,
        model: ServedModel,
        prompt: Prompt,
        params: ParamsLike,
        options: RequestOptions,
        request_id: str | None = None,
        *,
        prompts: int = 1,
        rename: Rename | None = None,
    ) -> AsyncIterator[OutputStream]:
        """A request of a key's holder; leaving the block before its end aborts it.

        It counts as many times as it has answers, to each of so many `prompts`; 0: another request counts for it.
        Errors name fields as the client knows them (`rename`).

        A failure before the first chunk raises; later the final chunk carries it. An abort by someone else is always
        a failure, a passed deadline only where there is no output yet.
        """
        preparation = Cancellation()
        answers, param = prompts * model.answers(params), "prompts" if prompts > 1 else "n"
        with self._admitted(holder, model, preparation, answers, rename, param) as record:
            if model.adapter is not None or holder.models is not None:
                params = plan_adapters(model, holder, params)
            speaks = Modality.AUDIO in model.omni.modalities
            params, think_block = plan_thinking(model.thinking, prompt, params, options, speaks=speaks)
            request_id = checked_request_id(request_id)
            _remember(self._holders, request_id, holder.name)
            with (
                contextlib.nullcontext() if record.tag is None else self._tagging(holder, record.tag, request_id),
                cancellation_scope(preparation),
                decode_for(self.owner_of(holder)),
            ):
                note = partial(_note_admitted, record, request_id)
                arguments = (prompt, params, options, request_id, partial(call_soon, asyncio.get_running_loop(), note))
                if self._content_filter is None:
                    stream = await model.omni.start(*arguments)
                else:
                    with self._filtered(self._content_filter, record, holder, model) as request_filter:
                        stream = await start_filtered(request_filter, model.omni, *arguments)
            try:
                observed = ObservedStream(stream, record, self, model.name)
                yield observed if think_block is None else ReasoningStream(observed, think_block)
            finally:
                stream.close()
                self.metrics.observe_trace(model.name, stream.trace)
                if self.tracing is not None:
                    self.tracing.stages(model.name, stream.trace)

    @contextlib.contextmanager
    def _tagging(self, holder: Holder, tag: str, request_id: str) -> Iterator[None]:
        """The client's own id leads to this request from its preparation on; one that is refused does not keep it."""
        if not is_tag(tag):
            raise InvalidRequestError("the header X-Client-Request-Id takes 1 to 128 letters, digits, dots, - and _")
        earlier = self._tagged.get((holder.name, tag))
        _remember(self._tagged, (holder.name, tag), request_id)
        try:
            yield
        except BaseException:
            if earlier is not None and self._tagged.get((holder.name, tag)) == request_id:
                self._tagged[holder.name, tag] = earlier
            raise

    def owner_of(self, holder: Holder) -> str | None:
        """Whose work it is, for threads, processes and memory that leave room to others: a key's, or an address's."""
        return holder.name if self.keyring.required else network_of(holder.address)

    @contextlib.contextmanager
    def run_without_stages(
        self, holder: Holder, model: ServedModel, preparation: Cancellation
    ) -> Iterator[RequestFilter | None]:
        """Work of a key's holder that counts as a request but runs no stage. Gives its filter, if there is one.

        It counts until the work for `preparation` has ended, too.
        """
        with self._admitted(holder, model, preparation) as record:
            if self._content_filter is None:
                yield None
                return
            with self._filtered(self._content_filter, record, holder, model) as request_filter:
                yield request_filter

    @contextlib.contextmanager
    def _admitted(
        self,
        holder: Holder,
        model: ServedModel,
        preparation: Cancellation,
        answers: int = 1,
        rename: Rename | None = None,
        param: str = "n",
    ) -> Iterator[AuditRecord]:
        """Admit a request, on the audit record of its HTTP request; background work gets a record of its own."""
        current = CURRENT_RECORD.get()
        with contextlib.nullcontext(current) if current is not None and not current.closed else _background() as record:
            record.who, record.model = holder.name, model.requested_name
            admission = contextlib.ExitStack()
            try:
                admission.enter_context(self.keyring.admit(holder, model.requested_name, answers, param))
                if answers > 1:
                    admission.enter_context(self._room_for(model, answers, param))
                yield record
            except OmniError as error:
                rename_param(error, rename)
                raise
            finally:
                if preparation.idle:
                    admission.close()
                else:  # the holder's place is taken until what it started has really ended
                    loop = asyncio.get_running_loop()
                    preparation.when_idle(lambda: call_soon(loop, admission.close))

    @contextlib.contextmanager
    def _room_for(self, model: ServedModel, answers: int, param: str) -> Iterator[None]:
        """Answers beyond the first have half of a model's room, all requests together: few could take all of it."""
        limit, num_taken = model.omni.orchestrator.max_inflight, self._further[model.name]
        further, most = answers - 1, limit // 2
        if answers > limit:
            raise LimitExceededError(f"{answers} answers are over the limit of {limit}", param=param)
        if num_taken and num_taken + further > most:
            raise QueueFullError(
                f"answers beyond the first of each request have {most} places together, and "
                f"{num_taken} of them are taken; "
                "try again later, or request fewer at once"
            )
        self._further[model.name] += further
        try:
            yield
        finally:
            self._further[model.name] -= further

    @contextlib.contextmanager
    def _filtered(
        self, content_filter: ContentFilter, record: AuditRecord, holder: Holder, model: ServedModel
    ) -> Iterator[RequestFilter]:
        """A filter for one request; refusals inside the block are counted."""
        try:
            yield content_filter.open(FilterContext(holder.name, model.name))
        except ContentFilterError as error:
            record.ended = FILTERED
            self.metrics.filtered(model.name, error.where).inc()
            raise

    async def drain(self, timeout: float) -> None:
        """Accept no more requests, let running ones finish for `timeout` seconds, abort the rest."""
        self.draining = True
        for session in tuple(self.sessions):
            session.drain()
        models = (model.omni.shutdown(drain=True, timeout=timeout) for model in self.models.values())
        workers = self.transcribe_workers, self.adapter_workers
        await asyncio.gather(*(each.close(timeout) for each in workers), *models)
        await self.jobs.close()
        if self.sessions:
            await asyncio.wait(tuple(self.sessions.values()), timeout=SESSION_CLOSE_TIMEOUT)


@contextlib.contextmanager
def _background() -> Iterator[AuditRecord]:
    """The record of work without an HTTP request, or that outlives it."""
    record = AuditRecord("background")
    try:
        yield record
    except BaseException as error:
        failed = "error" if isinstance(error, Exception) else DISCONNECTED
        record.ended = FILTERED if isinstance(error, ContentFilterError) else failed
        raise
    finally:
        record.close()


def _note_admitted(record: AuditRecord, request_id: str) -> None:
    """Name a request of the engine in its line of the audit log; one whose client has just left gets another line."""
    if not record.closed:
        record.requests.append(request_id)
        return
    with _background() as late:
        late.who, late.model, late.ended = record.who, record.model, DISCONNECTED
        late.requests.append(request_id)


def _remember(names: dict[KeyT, str], key: KeyT, name: str) -> None:
    """Add a name and drop the oldest beyond the limit."""
    names.pop(key, None)
    names[key] = name
    if len(names) > _MAX_REMEMBERED:
        del names[next(iter(names))]
