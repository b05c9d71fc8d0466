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

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return f"{self.param}: {self.message}" if self.param else self.message


class InvalidRequestError(OmniError):
    """The request cannot be run as written."""

    status = 400
    code = "invalid_request"


class UnsupportedModalityError(InvalidRequestError):
    """The model does not take, or does not give, this modality."""

    code = "unsupported_modality"


class MediaError(InvalidRequestError):
    """An image, audio clip or video that cannot be decoded."""

    code = "invalid_media"


class LimitExceededError(InvalidRequestError):
    """Larger than a configured limit; the message gives both numbers."""

    status = 413
    code = "limit_exceeded"


class PromptTooLongError(LimitExceededError):
    """More tokens than the stage can hold."""

    status = 400
    code = "prompt_too_long"


class QueueFullError(OmniError):
    """The service holds as many requests as it may; try again after `retry_after` seconds."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OverloadedError(QueueFullError):
    """The system gives the service no more processes, files or memory for now."""

    status = 503
    code = "overloaded"


class DeadlineExceededError(OmniError):
    """The request's deadline passed before it could finish."""

    status = 408
    code = "deadline_exceeded"


class CancelledRequestError(OmniError):
    """Someone ended the request before it gave anything."""

    status = 499
    code = "cancelled"


class ConfigError(OmniError):
    """A configuration that cannot be used; `param` is the path of the line at fault."""

    code = "invalid_config"


class RegistryError(ConfigError):
    """An unknown or wrongly shaped component, bridge or family."""

    code = "invalid_registration"


class CheckpointError(OmniError):
    """A model folder that is incomplete or not what it says."""

    code = "invalid_checkpoint"


class UnsupportedModelError(CheckpointError):
    """No family serves this model."""

    code = "unsupported_model"


class MissingDependencyError(OmniError):
    """An optional package is needed; the message names the extra that installs it."""

    code = "missing_dependency"


class CapacityError(OmniError):
    """What was asked for can never fit the configured memory; the message says what would."""

    status = 413
    code = "capacity"


class StageError(OmniError):
    """A stage's step failed; the requests in it end, others go on."""

    code = "stage_failed"


class StageUnavailableError(OmniError):
    """A stage that the request needs has failed, or has been stuck in a step for too long."""

    status = 503
    code = "stage_unavailable"


class BridgeError(OmniError):
    """A bridge failed on this request's chunk."""

    code = "bridge_failed"


class ShutdownError(OmniError):
    """The engine is stopping and takes no more requests."""

    status = 503
    code = "shutting_down"


class StorageFullError(OmniError):
    """No space is left on a disk of the service."""

    status = 507
    code = "storage_full"


class InternalError(OmniError):
    """A defect of ours, wrapped at the boundary that caught it."""
