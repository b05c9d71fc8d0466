"""What callers give to a pipeline that draws, brought to one form: a text, pictures, a mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from omnistage.core.errors import InvalidRequestError, LimitExceededError, UnsupportedModalityError
from omnistage.core.validation import is_utf8, short_repr

if TYPE_CHECKING:
    from omnistage.media.limits import MediaLimits

_KEYS = ("prompt", "image", "images", "mask")


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """A request to draw: `images` are `uint8 [h, w, 3]`, `mask` is `uint8 [h, w]` of the first image's size."""

    prompt: str
    images: tuple[np.ndarray, ...] = ()
    mask: np.ndarray | None = None


def parse_drawing(prompt: object, limits: MediaLimits, *, takes_images: bool = True) -> Drawing:
    """From text, a mapping with `prompt`, `image` or `images`, and `mask`, or chat messages; media are decoded here."""
    if isinstance(prompt, str):
        return Drawing(_text(prompt, limits))
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, limits, takes_images)
    if isinstance(prompt, list | tuple):
        return _from_chat(prompt, limits)
    raise InvalidRequestError(
        f"must be text, a mapping with {', '.join(_KEYS)}, or a list of chat messages; got {type(prompt).__name__}. "
        "This model draws from text, not from tokens",
        param="prompt",
    )


def _from_mapping(prompt: Mapping[str, object], limits: MediaLimits, takes_images: bool) -> Drawing:
    if unknown := [short_repr(key) for key in prompt if key not in _KEYS]:
        raise InvalidRequestError(
            f"has unknown keys {', '.join(unknown[:3])}; known: {', '.join(_KEYS)}", param="prompt"
        )
    text = prompt.get("prompt")
    if not isinstance(text, str):
        raise InvalidRequestError("needs a text under prompt", param="prompt")
    sources = _sources(prompt, limits)
    checked = _text(text, limits)
    if sources and not takes_images:  # before they are decoded
        raise UnsupportedModalityError("this model draws from text alone; leave the image out", param="image")
    images = _pictures(sources, limits, single=prompt.get("image") is not None)
    mask = prompt.get("mask")
    return Drawing(checked, images, None if mask is None else _mask(mask, images, limits))


def _sources(prompt: Mapping[str, object], limits: MediaLimits) -> list[object]:
    one, many = prompt.get("image"), prompt.get("images")
    if one is not None and many is not None:
        raise InvalidRequestError("give image or images, not both", param="image")
    if one is not None:
        return [one]
    if many is None:
        return []
    if not isinstance(many, list | tuple):
        raise InvalidRequestError(f"must be a list of pictures, got {type(many).__name__}", param="images")
    if len(many) > limits.max_items:
        raise LimitExceededError(
            f"{len(many)} pictures are over the limit of {limits.max_items}; send fewer", param="images"
        )
    return list(many)


def _pictures(sources: list[object], limits: MediaLimits, *, single: bool) -> tuple[np.ndarray, ...]:
    images: list[np.ndarray] = []
    pixels = 0
    for index, source in enumerate(sources):
        param = "image" if single else f"images.{index}"
        images.append(_picture(source, limits, param))
        pixels += images[-1].shape[0] * images[-1].shape[1]
        if pixels > limits.max_total_pixels:
            raise LimitExceededError(
                f"the request's pictures have {pixels} pixels up to here, over the limit of "
                f"{limits.max_total_pixels} together; send fewer or smaller ones",
                param=param,
            )
    return tuple(images)


def _from_chat(messages: object, limits: MediaLimits) -> Drawing:
    """The last user message: its texts are the prompt, its pictures go with it."""
    from omnistage.core.messages import ImagePart, TextPart
    from omnistage.pipeline.messages.chat import parse_messages

    parsed = parse_messages(messages, limits)  # type: ignore[arg-type]
    user = [message for message in parsed if message.role == "user"]
    if not user:
        raise InvalidRequestError("has no user message; describe in one what to draw", param="messages")
    parts = user[-1].parts
    if other := [type(part).__name__ for part in parts if not isinstance(part, TextPart | ImagePart)]:
        kind = other[0].removesuffix("Part").lower()
        raise InvalidRequestError(f"this model takes text and pictures, not {kind}", param="messages")
    text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
    images = tuple(np.asarray(part.image, dtype=np.uint8) for part in parts if isinstance(part, ImagePart))
    return Drawing(_text(text, limits), images)


def _text(prompt: str, limits: MediaLimits) -> str:
    # Less than other text: it is tokenised in the stage's thread, and encoders read its beginning only.
    limit = min(limits.max_drawing_chars, limits.max_text_chars)
    if len(prompt) > limit:
        raise LimitExceededError(f"{len(prompt)} characters exceed the limit of {limit}; shorten it", param="prompt")
    if not prompt.strip():
        raise InvalidRequestError("is empty; describe what to draw", param="prompt")
    if not is_utf8(prompt):
        raise InvalidRequestError("is not valid Unicode text", param="prompt")
    return prompt


def _picture(source: object, limits: MediaLimits, param: str) -> np.ndarray:
    from omnistage.core.errors import OmniError
    from omnistage.media.context import notify_inspector
    from omnistage.media.image import decode_image

    try:
        image = decode_image(source, limits)  # type: ignore[arg-type]
        notify_inspector(image)
        return np.asarray(image, dtype=np.uint8)
    except OmniError as error:
        if error.param is not None:
            raise
        raise type(error)(error.message, param=param) from error


def _mask(source: object, images: tuple[np.ndarray, ...], limits: MediaLimits) -> np.ndarray:
    mask: np.ndarray = _picture(source, limits, "mask").max(axis=2)
    if not images:
        raise InvalidRequestError("says what to change in a picture; give an image too", param="mask")
    if mask.shape != images[0].shape[:2]:
        height, width = images[0].shape[:2]
        raise InvalidRequestError(
            f"has {mask.shape[1]}x{mask.shape[0]} pixels and the image {width}x{height}; give a mask of its size",
            param="mask",
        )
    return mask
