"""Every error that Omnistage raises on purpose.

Each class carries the HTTP status that the service answers with and a stable `code`; the message says what to
change. Anything that is not an `OmniError` is a defect of ours: the boundary that catches it wraps it in
`InternalError` and ends only the request it belongs to.
"""

from __future__ import annotations


class OmniError(Exception):
    """Base class. `param` names the field at fault (a dotted path) where there is one."""

    status = 500
    code = "internal_error"

    def __init_subclass__(cls, *, status: int | None = None, code: str | None = None) -> None:
        cls.status, cls.code = status or cls.status, code or cls.code

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return f"{self.param}: {self.message}" if self.param else self.message


class InvalidRequestError(OmniError, status=400, code="invalid_request"):
    """The request cannot be run as written."""


class UnsupportedModalityError(InvalidRequestError, code="unsupported_modality"):
    """The model does not take, or does not give, this modality."""


class MediaError(InvalidRequestError, code="invalid_media"):
    """An image, audio clip or video that cannot be decoded."""


class UnclearSpeechError(MediaError, code="unclear_speech"):
    """Speech was detected in a clip, and the model gives no words for it."""


class AdapterError(InvalidRequestError, code="invalid_adapter"):
    """A LoRA adapter that is unknown, cannot be read, or does not fit the model."""


class LimitExceededError(InvalidRequestError, status=413, code="limit_exceeded"):
    """Larger than a configured limit; the message gives both numbers."""


class SizeError(InvalidRequestError):
    """A side of a picture, `width` or `height`, that the model cannot draw; `nearest` is one that it can."""

    def __init__(self, message: str, *, side: str, nearest: int) -> None:
        super().__init__(message, param=side)
        self.side = side
        self.nearest = nearest


class SizeLimitError(SizeError, LimitExceededError, status=413, code="limit_exceeded"):
    """A side that is longer than the model draws."""


class PromptTooLongError(LimitExceededError, status=400, code="context_length_exceeded"):
    """More tokens than the stage can hold."""


class QueueFullError(OmniError, status=429, code="queue_full"):
    """The service holds as many requests as it may; try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OverloadedError(QueueFullError, status=503, code="overloaded"):
    """The system gives the service no more processes, files or memory for now."""


class DeadlineExceededError(OmniError, status=408, code="deadline_exceeded"):
    """The request's deadline passed before it could finish."""


class CancelledRequestError(OmniError, status=499, code="cancelled"):
    """Someone ended the request before it gave anything."""


class ConfigError(OmniError, code="invalid_config"):
    """A configuration that cannot be used; `param` is the path of the line at fault."""


class RegistryError(ConfigError, code="invalid_registration"):
    """An unknown or wrongly shaped component, bridge or family."""


class CheckpointError(OmniError, code="invalid_checkpoint"):
    """A model folder that is incomplete or not what it says."""


class UnsupportedModelError(CheckpointError, code="unsupported_model"):
    """No family serves this model."""


class MissingDependencyError(OmniError, code="missing_dependency"):
    """An optional package is needed; the message names the extra that installs it."""


class CapacityError(OmniError, status=413, code="capacity"):
    """What was asked for can never fit the configured memory; the message says what would."""


class StageError(OmniError, code="stage_failed"):
    """A stage's step failed; the requests in it end, others go on."""


class StageLostError(StageError, status=503, code="stage_unavailable"):
    """A process that the stage cannot do without has ended: the stage is built again."""


class RemoteError(StageError, status=502, code="remote_failed"):
    """The server that a stage runs on failed this request."""


class RemoteTimeoutError(RemoteError, status=504, code="remote_timeout"):
    """That server took longer than it may."""


class StageUnavailableError(OmniError, status=503, code="stage_unavailable"):
    """A stage that the request needs has failed, or has been stuck in a step for too long."""


class BridgeError(OmniError, code="bridge_failed"):
    """A bridge failed on this request's chunk."""


class ShutdownError(OmniError, status=503, code="shutting_down"):
    """The engine is stopping and accepts no more requests."""


class StorageFullError(OmniError, status=507, code="storage_full"):
    """No space is left on a disk of the service."""


class InternalError(OmniError):
    """A defect of ours, wrapped at the boundary that caught it."""
