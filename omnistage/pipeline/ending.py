"""A request's last item."""

from __future__ import annotations

from omnistage.core.failures import log_defect
from omnistage.core.types import FinishReason, Modality
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.pipeline.request import RequestRun
from omnistage.pipeline.routing import internal_error


def emit_final(run: RequestRun) -> None:
    """Give the sink of a request that is over its last item, once.

    Where another thread is in the sink, that one does it when it comes out: nobody waits for a consumer, least of all
    the thread that ends requests at their deadlines.
    """
    while run.final_due and run.emit_lock.acquire(blocking=False):
        try:
            if run.final_due:
                run.final_due = False
                _call_sink(run)
        finally:
            run.emit_lock.release()


def _call_sink(run: RequestRun) -> None:
    try:
        item = run.output.final(run.reason or FinishReason.ERROR, run.error, run.usage(), run.trace)
    except BaseException as failure:
        # Every request must end: one whose output cannot be put together ends without it.
        log_defect("assembling an output", failure)
        output = OmniRequestOutput(run.info.request_id, finish_reason=FinishReason.ERROR, trace=run.trace)
        output.error = run.error or internal_error("assembling the output", failure)
        item = OutputChunk(run.info.request_id, Modality.TEXT, final=output)
    try:
        run.sink(item)
    except BaseException as failure:
        # The boundary of a consumer: it is gone or broken, and its request is over anyway.
        log_defect("the consumer of a request's last item", failure)
