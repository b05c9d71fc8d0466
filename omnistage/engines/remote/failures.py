"""What a request is told when its server fails. Nothing of the server's address is in it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from omnistage.core.errors import (
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    PromptTooLongError,
    QueueFullError,
    RemoteError,
    RemoteTimeoutError,
    StageUnavailableError,
)

_MAX_QUOTED = 300
_TOO_LONG = ("context_length_exceeded", "prompt_too_long")
_RETRY_SECONDS = 60.0


def status_error(stage: str, status: int, headers: Mapping[str, str], body: object) -> OmniError:
    """The error for a response that is no success."""
    server = f"the server of stage {stage!r}"
    code, message = _quoted(body)
    if status in (400, 422):
        if code in _TOO_LONG or "maximum context length" in message:
            return PromptTooLongError(f"{server} refused the request: {message}", param="prompt")
        return InvalidRequestError(f"{server} refused the request: {message or f'status {status}'}")
    if status == 413:
        return LimitExceededError(f"{server} does not accept a request of this size; shorten it", param="prompt")
    if status == 429:
        return QueueFullError(f"{server} has no room for another request; try again", retry_after=_delay(headers))
    if status == 503:
        return StageUnavailableError(f"{server} accepts no requests at the moment; try again later")
    if status in (408, 504):
        return RemoteTimeoutError(f"{server} gave up waiting (status {status}); send the request again")
    if status in (401, 403):
        return RemoteError(f"{server} refused this service's API key; set it in the variable that api_key_env names")
    if status == 404:
        return RemoteError(f"{server} has no such model or endpoint; check url and model in its configuration")
    if 300 <= status < 400:
        return RemoteError(f"{server} redirects, which is not followed; give its final address as url")
    return RemoteError(f"{server} failed with status {status}; its log says why. Send the request again")


def unreachable(stage: str) -> OmniError:
    return StageUnavailableError(f"the server of stage {stage!r} cannot be reached; try again later")


def broken_response(stage: str) -> OmniError:
    return RemoteError(
        f"the server of stage {stage!r} broke the response off, or sent what is none; send the request again"
    )


def too_slow(stage: str, seconds: float, *, started: bool) -> OmniError:
    what, key = ("no further token", "idle_seconds") if started else ("no token", "first_token_seconds")
    return RemoteTimeoutError(
        f"the server of stage {stage!r} sent {what} within {seconds:g} s; send the request again, or raise "
        f"{stage}.budget.{key}"
    )


def _quoted(body: object) -> tuple[str, str]:
    """Code and message of OpenAI's error body; the message is about this request and its sender may see it."""
    error = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return "", ""
    message = " ".join(str(error.get("message") or "").split())
    return str(error.get("code") or ""), message if len(message) <= _MAX_QUOTED else message[: _MAX_QUOTED - 3] + "..."


def _delay(headers: Mapping[str, str]) -> float:
    try:
        seconds = float(headers.get("retry-after", "1"))
    except ValueError:  # a date
        return 1.0
    return min(max(seconds, 0.1), _RETRY_SECONDS) if math.isfinite(seconds) else 1.0
