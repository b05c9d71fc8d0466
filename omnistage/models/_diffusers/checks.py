"""What requests must not ask of families that draw."""

from __future__ import annotations

from omnistage.core.errors import InvalidRequestError, SizeError
from omnistage.core.params import DiffusionParams


def check_sides(params: DiffusionParams, multiple: int) -> None:
    """Refuse a width or a height that is no multiple of this."""
    for name, value in (("width", params.width), ("height", params.height)):
        if value is not None and value % multiple:
            low = max(value // multiple, 1) * multiple
            raise SizeError(
                f"must be a multiple of {multiple}, got {value}; use {low} or {low + multiple}",
                side=name,
                nearest=low + multiple if value - low > multiple / 2 else low,
            )


def check_frames(frames: int, factor: int) -> None:
    """Refuse a number of frames that is not one for the first latent and `factor` for each other."""
    if (frames - 1) % factor:
        low = (frames - 1) // factor * factor + 1
        raise InvalidRequestError(
            f"must be one more than a multiple of {factor}, got {frames}; use {low} or {low + factor}",
            param="num_frames",
        )


def check_true_cfg(params: DiffusionParams) -> None:
    """Refuse a negative prompt without a scale, or the other way round: diffusers ignores either without the other."""
    guided = params.true_cfg is not None and params.true_cfg > 1
    if params.negative_prompt is not None and not guided:
        raise InvalidRequestError("has an effect only with true_cfg above 1; set that too", param="negative_prompt")
    if guided and params.negative_prompt is None:
        raise InvalidRequestError('needs a negative_prompt; send one, "" if need be', param="true_cfg")
