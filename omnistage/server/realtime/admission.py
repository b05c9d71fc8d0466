"""Which models a session may use."""

from __future__ import annotations

from omnistage.core.errors import UnsupportedModalityError
from omnistage.core.family import SpeechReader
from omnistage.core.types import Modality
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import NotFoundError, PermissionDeniedError
from omnistage.server.service import ServedModel, Service


def check_model(service: Service, holder: Holder, name: str, param: str = "model") -> ServedModel:
    """A model that this key may use. Raises the client's error."""
    try:
        model = service.model(name)
    except NotFoundError as error:
        error.param = param
        raise
    if holder.models is not None and name not in holder.models:
        raise PermissionDeniedError(f"this key may not use {name!r}", param=param)
    return model


def model_for_session(service: Service, holder: Holder, name: str, param: str = "model") -> ServedModel:
    """A model that this key may use and that has text output. Raises the client's error."""
    model = check_model(service, holder, name, param)
    if isinstance(model.omni.processor, SpeechReader) and Modality.TEXT not in model.omni.modalities:
        raise UnsupportedModalityError(
            "this model converts text to speech only; use /v1/audio/speech, or for a text that is still being "
            "written the WebSocket /v1/audio/speech/stream",
            param=param,
        )
    if Modality.TEXT not in model.omni.modalities:
        raise UnsupportedModalityError("this model has no text output; use one that has", param=param)
    return model
