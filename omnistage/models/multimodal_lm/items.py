"""Media items of a prompt by transformers' own processor, one at a time.

An item is given to the processor with nothing but its placeholder, which comes back as the text that stands for it in a
prompt, with the inputs of the model's forward. So every type's processor is used in one way, an item is the same in
every prompt, and its content alone decides its key.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from omnistage.core.clips import VideoClip
from omnistage.core.errors import MediaError
from omnistage.core.types import Modality
from omnistage.media.hashing import content_key

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from omnistage.models.prompts import PromptTokenizer

Media = tuple[Modality, Any]
"""A kind and a PIL image, samples `float32 [n]` or a `VideoClip`."""
KINDS = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
DEFAULT_RATE = 16_000
_OF_TEXT = ("input_ids", "token_type_ids", "attention_mask")
"""How names end of what processors give for text."""
_SMALL = 64
"""Numbers of an item's tensor, at most, that is a grid or a size and not its content."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One item, or several that the processor does not take apart."""

    kind: Modality
    text: str
    """What its placeholder becomes."""
    token_ids: tuple[int, ...]
    """Of that text, from the first special token to the last."""
    inputs: Mapping[str, torch.Tensor]
    """Of the model's forward for these tokens, `input_ids` `[1, n]` among them."""

    @property
    def key(self) -> bytes:
        return _key(self.kind, self.inputs)

    def sizes(self) -> dict[str, torch.Tensor]:
        """Grids and the like, which positions are computed from."""
        by_token = self.inputs["input_ids"].shape
        return {n: t for n, t in self.inputs.items() if t.shape != by_token and t.ndim and t.numel() <= _SMALL}

    def by_token(self) -> dict[str, torch.Tensor]:
        """Tensors with one number a token, but for the ids."""
        shape = self.inputs["input_ids"].shape
        return {n: t for n, t in self.inputs.items() if t.shape == shape and n != "input_ids"}

    def is_within(self, other: MediaItem) -> bool:
        """Whether the processor says the same of its tokens where `other` has them among more."""
        start, theirs = find(np.asarray(other.token_ids), self.token_ids, 0), other.by_token()
        if start is None:
            return False
        end = start + len(self.token_ids)
        return all(torch.equal(value, theirs[name][:, start:end]) for name, value in self.by_token().items())


class _TextRecorder:
    """In the tokenizer's place: passes everything on and keeps the text that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.text = str(text[0] if isinstance(text, list | tuple) else text)
        return self._tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class ItemProcessor:
    """Not thread-safe, as transformers' processors are not."""

    def __init__(self, processor: ProcessorMixin, prompts: PromptTokenizer) -> None:
        self._prompts = prompts
        self._recorder = _TextRecorder(processor.tokenizer)
        self._processor = copy.copy(processor)
        self._processor.tokenizer = self._recorder
        self._processor.return_mm_token_type_ids = True  # some models cannot do without, and not all processors say so
        self._bos = processor.tokenizer.bos_token or ""
        self.adds_bos = False
        """The processor writes the tokenizer's first token into a text itself; known once an item was made."""
        added = set(processor.tokenizer.get_added_vocab().values())
        self._added = np.array(sorted(added))

    @property
    def audio_processor(self) -> Any:
        """The part that takes sound; None where there is none."""
        names = ("audio_processor", "feature_extractor")
        return next((getattr(self._processor, name) for name in names if hasattr(self._processor, name)), None)

    @property
    def audio_rate(self) -> int:
        extractor = self.audio_processor
        return int(getattr(extractor, "sampling_rate", None) or DEFAULT_RATE)

    def call(self, text: str, media: Sequence[Media]) -> tuple[str, dict[str, Any]]:
        """The processor's own call: the text with media expanded, and its outputs."""
        options = self.arguments(media)
        try:
            outputs = self._processor(text=[text], return_tensors="pt", **options)
        except (ValueError, TypeError, LookupError, AttributeError, StopIteration, RuntimeError, ImportError) as error:
            reason = str(error) or type(error).__name__
            raise MediaError(f"the processor cannot take these media: {reason}", param="messages") from error
        return self._recorder.text, dict(outputs)

    def arguments(self, media: Sequence[Media]) -> dict[str, Any]:
        """Of the processor's call for these items."""
        images = [value for kind, value in media if kind is Modality.IMAGE]
        audios = [value for kind, value in media if kind is Modality.AUDIO]
        videos = [value for kind, value in media if kind is Modality.VIDEO]
        options: dict[str, Any] = {}
        if images:
            options["images"] = images
        if audios:
            options |= {"audio": audios, "audio_kwargs": {"sampling_rate": self.audio_rate}}
        if videos:
            options["videos"] = [clip.frames for clip in videos]
            options["videos_kwargs"] = {
                "do_sample_frames": False,
                "fps": videos[0].fps,
                "video_metadata": [_metadata(clip) for clip in videos],
            }
        return options

    def item(self, placeholder: str, media: Sequence[Media]) -> MediaItem:
        """An item whose `placeholder` in the rendered chat stands for it; several where these come together."""
        text, outputs = self.call(placeholder, media)
        if self._bos and text.startswith(self._bos):
            self.adds_bos, text = True, text.removeprefix(self._bos)
        ids = self._core(self._prompts.encode(text))
        theirs = _token_ids(outputs)
        start = find(theirs, ids, 0) if ids else None
        if start is None:
            raise MediaError("the processor's placeholder tokens depend on the text around them", param="messages")
        inputs = {"input_ids": torch.tensor([ids])}
        for name, value in outputs.items():
            tensor = _tensor(value)
            if tensor is None or name == "attention_mask":
                continue
            inputs[name] = tensor[:, start : start + len(ids)] if tensor.shape == (1, len(theirs)) else tensor
        kind = media[0][0]
        return MediaItem(kind, text, ids, inputs)

    def prompt(self, text: str, media: Sequence[Media]) -> tuple[tuple[int, ...], dict[str, torch.Tensor], bytes]:
        """Token ids of a whole prompt as the processor itself makes them, the other inputs of a forward, and a key."""
        outputs = self.call(text, media)[1]
        ids = _token_ids(outputs)
        tensors = {n: _tensor(value) for n, value in outputs.items() if value is not None and n != "attention_mask"}
        inputs = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        missing = sorted(tensors.keys() - inputs.keys())
        if missing or all(name.endswith(_OF_TEXT) for name in inputs):
            what = f"{', '.join(missing)} is not a tensor" if missing else "it returns no inputs for them"
            raise MediaError(f"the processor's outputs for these media cannot be used: {what}", param="messages")
        return tuple(ids.tolist()), inputs, _key(media[0][0], {"input_ids": torch.from_numpy(ids), **inputs})

    def _core(self, ids: Sequence[int]) -> tuple[int, ...]:
        """From the first special token to the last: what a neighbouring text cannot merge with."""
        special = np.flatnonzero(np.isin(np.asarray(ids), self._added))
        return tuple(ids[special[0] : special[-1] + 1]) if len(special) else tuple(ids)

    def count_tokens(self, media: Sequence[Media]) -> int | None:
        """Tokens of images by their sizes alone, where the processor can say."""
        count: Callable[..., Any] | None = getattr(self._processor, "_get_num_multimodal_tokens", None)
        sizes = [(value.height, value.width) for kind, value in media if kind is Modality.IMAGE]
        if count is None or not sizes:
            return None
        try:
            numbers = count(image_sizes=sizes)["num_image_tokens"]
        except (AttributeError, TypeError, KeyError, ValueError, NotImplementedError):
            return None
        return None if numbers is None else int(sum(numbers))


def find(ids: np.ndarray, part: Sequence[int], start: int) -> int | None:
    """Where `part` begins in `ids`, at `start` or later."""
    for place in np.flatnonzero(ids[start:] == part[0]) + start:
        if tuple(ids[place : place + len(part)]) == tuple(part):
            return int(place)
    return None


def sample_media(kind: Modality, number: int, rate: int) -> Media:
    """A small item to try a model with; another for each number."""
    rng = np.random.default_rng(number)
    if kind is Modality.AUDIO:
        return kind, (0.1 * rng.standard_normal(int(rate * (1.0 + 0.5 * number)))).astype(np.float32)
    height, width = ((48, 64), (80, 56))[number % 2]
    if kind is Modality.IMAGE:
        return kind, Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    return kind, VideoClip(rng.integers(0, 256, (4, height, width, 3), dtype=np.uint8), 2.0, 2.0)


def accepted_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's `generate` takes of a processor's outputs."""
    functions = model.forward, type(model).generate, model.prepare_inputs_for_generation
    names = {name for function in functions for name in inspect.signature(function).parameters}
    return {name: value for name, value in inputs.items() if name in names}


def _token_ids(outputs: dict[str, Any]) -> np.ndarray:
    """Those among a processor's outputs, which are taken out of them."""
    if "input_ids" not in outputs:
        raise MediaError("the processor makes no tokens of a text beside these media", param="messages")
    return np.asarray(outputs.pop("input_ids")).reshape(-1)


def _metadata(clip: VideoClip) -> dict[str, Any]:
    count, height, width, _ = clip.frames.shape
    frames = list(range(count))
    shape = {"height": height, "width": width}
    return {"total_num_frames": count, "fps": clip.fps, "duration": clip.seconds, "frames_indices": frames, **shape}


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    if isinstance(value, list | tuple) and value:
        if len(value) == 1:
            inner = _tensor(value[0])
            return None if inner is None else inner[None]
        if all(isinstance(item, int | float) for item in value):
            return torch.tensor(value)
    return torch.tensor(value) if isinstance(value, int | float) else None


def _key(kind: Modality, inputs: Mapping[str, torch.Tensor]) -> bytes:
    key = b""
    for name in sorted(inputs):
        value = inputs[name].contiguous()
        if value.dtype == torch.bfloat16:  # numpy has none
            value = value.view(torch.int16)
        key = content_key(kind.value, value.numpy(), name, key)
    return key
