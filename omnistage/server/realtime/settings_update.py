"""`session.update` takes what it can of an event, and says what it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable

from omnistage.core.errors import InvalidRequestError
from omnistage.server.access.keys import Holder
from omnistage.server.realtime.base import JsonObject
from omnistage.server.realtime.config import SessionConfig, check_config, updated
from omnistage.server.realtime.preview import from_preview
from omnistage.server.realtime.transcription import transcriber_of
from omnistage.server.service import ServedModel, Service

PREFIX = "session"
_MAX_REFUSED = 32


def apply_update(
    config: SessionConfig, update: JsonObject, check: Callable[[SessionConfig], None]
) -> tuple[SessionConfig, list[InvalidRequestError]]:
    """The settings with what can be applied of an update, and what is wrong with the rest, field by field.

    Raises the first problem where nothing can be applied, or where it is about no field of the update.
    """
    settings: JsonObject = from_preview(update)
    errors: list[InvalidRequestError] = []
    while True:
        try:
            changed = updated(config, settings, PREFIX)
            check(changed)
            return changed, errors
        except InvalidRequestError as error:
            if all(error.param != earlier.param for earlier in errors):
                errors.append(error)
            rest = None if error.param is None or len(errors) > _MAX_REFUSED else without(settings, error.param)
            if not rest or rest.keys() == {"type"}:
                raise errors[0] from None
            settings = rest


def without(settings: JsonObject, path: str) -> JsonObject | None:
    """Settings without the one at a path; None where they have none there. A setting goes as a whole, as it is set."""
    steps = re.split(r"[.\[]", path)[1:]
    depth = 3 if steps[:2] in (["audio", "input"], ["audio", "output"]) else 1
    return _without(settings, steps[:depth])


def _without(settings: JsonObject, steps: list[str]) -> JsonObject | None:
    if not steps or steps[0] not in settings:
        return None
    head, value = steps[0], settings[steps[0]]
    inner = _without(value, steps[1:]) if isinstance(value, dict) and len(steps) > 1 else None
    rest = {name: one for name, one in settings.items() if name != head}
    return {**rest, head: inner} if inner else rest


def check_session(service: Service, holder: Holder, model: ServedModel | None, config: SessionConfig) -> None:
    """Raise for settings that this session cannot have."""
    if model is None:
        raise InvalidRequestError("is missing; choose a model first", param=f"{PREFIX}.model")
    if config.model != model.name:
        raise InvalidRequestError("cannot be changed; open a new connection", param=f"{PREFIX}.model")
    check_config(config, model, PREFIX)
    if (settings := config.audio.input.transcription) is not None:
        transcriber_of(service, holder, model, settings, f"{PREFIX}.audio.input.transcription")
