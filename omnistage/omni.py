"""The two entry points: `AsyncOmni` streams in an event loop, `Omni` runs batches and conversations in plain code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, overload

from omnistage.core.cancellation import cancellation_scope, current_cancellation
from omnistage.core.errors import DeadlineExceededError, InvalidRequestError, OmniError, QueueFullError
from omnistage.core.threads import DaemonThreads
from omnistage.core.types import FinishReason, OmniTokensPrompt, SpeechPrompt, TextBatch
from omnistage.pipeline.batch import Batch, BatchBar, Conversation, conversation_list, params_for_each, prompt_list
from omnistage.pipeline.front import Front
from omnistage.pipeline.intake import (
    ParamsLike,
    Prompt,
    RequestOptions,
    checked_request_id,
    is_constrained,
    is_conversation,
)
from omnistage.pipeline.output_assembler import OutputBuffer, Sink
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.pipeline.preparation import Lane, lane_of, prepare
from omnistage.pipeline.request import RequestPlan, RequestRun
from omnistage.pipeline.stream import OutputStream

_REFRESH_SECONDS = 0.2


# --------------------------------------------------------------------------------------------------- async


class AsyncOmni(Front):
    """A model behind an event loop: requests stream side by side, preparation runs in worker threads.

    ```
    async with AsyncOmni("path/to/model") as omni:
        async for chunk in omni.generate("Hello"):
            print(chunk.text, end="")
    ```
    """

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: ParamsLike = None,
        *,
        request_id: str | None = None,
        modalities: Sequence[str] | None = None,
        voice: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        use_audio_in_video: bool = False,
    ) -> AsyncGenerator[OutputChunk, None]:
        """Stream the answer to one prompt; a list of chat messages goes through the chat template.

        The last item carries `final`. What is wrong with the request raises at the first item; what fails while it
        runs does not raise but ends the stream with `final.finish_reason` "error" and `final.error`. Leaving the
        loop early, closing the iterator or cancelling its task aborts the request.
        """
        options = RequestOptions(modalities, voice, priority, timeout, use_audio_in_video)
        stream = await self.start(prompt, sampling_params, options, request_id)
        try:
            async for item in stream:
                yield item
        finally:
            stream.close()

    async def start(
        self,
        prompt: Prompt,
        sampling_params: ParamsLike = None,
        options: RequestOptions | None = None,
        request_id: str | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> OutputStream:
        """Check and admit a request, then return its stream: for callers that must know of a refusal first.

        The caller must read the stream to its end or `close()` it. `admitted` is called in a thread once the request
        is; it may be cancelled before this returns.
        """
        request_id = checked_request_id(request_id)
        options = options or RequestOptions()
        self.orchestrator.check_room(request_id)  # media are not decoded only to be turned away
        if request_id in self._preparing:
            raise InvalidRequestError("a request with this id is running; use another id", param="request_id")
        requests, orchestrator, arrival = self._requests, self.orchestrator, time.monotonic()
        stream = OutputStream(orchestrator, request_id, self._output_buffer)
        with cancellation_scope() as cancellation:
            cancellation.deadline = requests.deadline(arrival, options.timeout)
            self._preparing[request_id] = cancellation
            try:
                params = requests.stage_params(sampling_params)
                if is_constrained(params):  # compiled first, in threads that others' prompts do not need
                    await prepare(lambda: orchestrator.check_params(params), cancellation, Lane.CONSTRAINT)

                def begin() -> None:
                    """In the thread that prepares it: the stages need not wait until the event loop comes to it."""
                    plan = orchestrator.plan(requests.build(prompt, params, options, request_id, arrival))
                    stream.begin(plan, admitted)
                    if cancellation.cancelled:  # just now, and the stream is still open
                        stream.close()

                await prepare(begin, cancellation, lane_of(prompt, options.tools))
            except BaseException:
                stream.close()
                raise
            finally:
                del self._preparing[request_id]
        return stream

    async def shutdown(self, drain: bool = True, timeout: float = 30.0) -> None:
        """Let requests in flight finish for up to `timeout` seconds, abort the rest, release everything."""
        thread = DaemonThreads(1, "shutdown")  # its own: those that requests use may all be busy
        stopped = thread.submit(self.orchestrator.shutdown, drain, timeout)
        thread.shutdown()
        await asyncio.wrap_future(stopped)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(drain=error is None)


# ---------------------------------------------------------------------------------------------------- sync


class Omni(Front):
    """A model for scripts: call it with prompts or conversations and get whole outputs back.

    ```
    with Omni("path/to/model") as omni:
        print(omni.chat([{"role": "user", "content": "Hello"}]).text)
    ```
    May be called from several threads at once. More prompts than the model takes in flight simply wait.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        modalities: Sequence[str] | None = None,
        voice: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        progress: bool = True,
    ) -> list[OmniRequestOutput]:
        """Answer one prompt or a list of them, in order; `sampling_params` is one for all or one for each.

        Every prompt is checked before the first one runs, and what is wrong raises. A prompt of a list that fails
        while it runs gives an output with `error` set and leaves the others alone; a prompt that was given alone
        raises its error. A passed timeout is no error: the output holds what there was, with reason "deadline".
        """
        single = isinstance(prompts, str | Mapping | OmniTokensPrompt | TextBatch | SpeechPrompt) or is_conversation(
            prompts
        )
        batch: Sequence[Prompt] = [prompts] if single else prompt_list(prompts)  # type: ignore[list-item]
        options = RequestOptions(modalities, voice, priority, timeout)
        return self._run_all(batch, sampling_params, options, progress, raising=single)

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        modalities: Sequence[str] | None = None,
        voice: str | None = None,
        use_audio_in_video: bool = False,
        timeout: float | None = None,
        progress: bool = True,
    ) -> OmniRequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        modalities: Sequence[str] | None = None,
        voice: str | None = None,
        use_audio_in_video: bool = False,
        timeout: float | None = None,
        progress: bool = True,
    ) -> list[OmniRequestOutput]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        modalities: Sequence[str] | None = None,
        voice: str | None = None,
        use_audio_in_video: bool = False,
        timeout: float | None = None,
        progress: bool = True,
    ) -> OmniRequestOutput | list[OmniRequestOutput]:
        """Answer one conversation (a list of messages), or a list of conversations; see `generate` for errors."""
        options = RequestOptions(modalities, voice, 0, timeout, use_audio_in_video)
        conversations, single = conversation_list(messages)
        outputs = self._run_all(conversations, sampling_params, options, progress, raising=single)
        return outputs[0] if single else outputs

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: ParamsLike = None,
        *,
        modalities: Sequence[str] | None = None,
        voice: str | None = None,
        use_audio_in_video: bool = False,
        timeout: float | None = None,
    ) -> Iterator[OutputChunk]:
        """Answer one conversation item by item, the last with `final`. A failed request raises behind that item.

        What is wrong with the request raises at once. Closing the iterator aborts the request, and so does cancelling
        a `cancellation_scope` around the loop, from another thread.
        """
        options = RequestOptions(modalities, voice, 0, timeout, use_audio_in_video)
        conversations, single = conversation_list(messages)
        if not single:
            raise InvalidRequestError("streaming takes one conversation at a time", param="messages")
        return self._stream(self._plan(conversations[0], sampling_params, options))

    def _stream(self, plan: RequestPlan) -> Iterator[OutputChunk]:
        buffer = OutputBuffer(self._output_buffer)
        request_id, cancellation = plan.request.info.request_id, current_cancellation()
        with cancellation.on_cancel(lambda: self.abort(request_id)):
            try:
                while self._try_start(plan, buffer.put) is None:
                    cancellation.check()
                if cancellation.cancelled:  # before there was anything to abort
                    self.abort(request_id)
                final: OmniRequestOutput | None = None
                while final is None:
                    item = buffer.get()
                    if item is not None:
                        yield item
                        final = item.final
                if final.error is not None:
                    raise final.error
            finally:
                self.abort(request_id)

    def _run_all(
        self,
        prompts: Sequence[Prompt],
        params: ParamsLike | Sequence[ParamsLike],
        options: RequestOptions,
        progress: bool,
        *,
        raising: bool,
    ) -> list[OmniRequestOutput]:
        each = params_for_each(params, len(prompts))
        plans: list[RequestPlan | None] = []  # None: its deadline passed
        for index, (prompt, prompt_params) in enumerate(zip(prompts, each, strict=True)):
            try:
                plans.append(self._plan(prompt, prompt_params, options))
            except DeadlineExceededError:
                plans.append(None)
            except InvalidRequestError as error:
                if not raising and error.param is not None and error.param.startswith("messages"):
                    error.param = f"conversations[{index}].{error.param}"
                raise
        outputs = self._run_plans(plans, progress)
        if raising and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def _run_plans(self, plans: Sequence[RequestPlan | None], progress: bool) -> list[OmniRequestOutput]:
        batch = Batch(len(plans))
        try:
            with BatchBar(batch, progress) as bar:
                for index, plan in enumerate(plans):
                    self._admit(index, plan, batch, bar)
                while not batch.wait(_REFRESH_SECONDS):
                    bar.refresh()
        except BaseException:
            # Most of all Ctrl-C: nothing of this call may run on unseen.
            for plan in filter(None, plans):
                self.abort(plan.request.info.request_id)
            raise
        return [output for output in batch.outputs if output is not None]

    def _admit(self, index: int, plan: RequestPlan | None, batch: Batch, bar: BatchBar) -> None:
        """Start a request as soon as there is room; one that can no longer start gives its output at once."""
        request_id = checked_request_id(None) if plan is None else plan.request.info.request_id
        output = OmniRequestOutput(request_id, finish_reason=FinishReason.DEADLINE)
        try:
            while plan is not None:
                if self._try_start(plan, batch.sink(index)) is not None:
                    return
                bar.refresh()
        except OmniError as error:
            if not isinstance(error, DeadlineExceededError):
                output.finish_reason, output.error = FinishReason.ERROR, error
        batch.put(index, output)

    def _try_start(self, plan: RequestPlan, sink: Sink) -> RequestRun | None:
        """Start a request; None if there was no room for a moment."""
        try:
            return self.orchestrator.start(plan, sink)
        except QueueFullError:
            self.orchestrator.wait_for_room(_REFRESH_SECONDS, plan.places)
            return None

    def close(self) -> None:
        """Abort what runs and release everything. Safe to call again."""
        self.orchestrator.shutdown(drain=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


OmniLLM = Omni
