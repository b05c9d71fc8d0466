"""A diffusers pipeline behind its own `__call__`: which parameters it takes is read from the signature.

Only classes that diffusers exports are used, only safetensors are loaded, code in a checkpoint is never run.
"""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import nn

from omnistage.core.errors import (
    CheckpointError,
    InvalidRequestError,
    StageError,
    UnsupportedModalityError,
    UnsupportedModelError,
)
from omnistage.core.failures import log_defect
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.core.validation import short_repr
from omnistage.engines.diffusion.whole_pipeline import Generated, OnStep, VideoWithAudio, WholePipeline
from omnistage.models._diffusers.loading import INDEX, Parts, check_weights, diffusers
from omnistage.models._diffusers.schedules import other_scheduler
from omnistage.models.diffusers_pipeline.inspection import (
    ARGUMENTS,
    INPUT_ARGUMENTS,
    PIXEL_FIELDS,
    SOUND_FIELDS,
    STEP_CALLBACKS,
    check_pipeline,
    default_of,
    gives_sound_alone,
    output_fields,
    pipeline_class,
    signature,
)
from omnistage.models.diffusers_pipeline.sounds import sample_rate_of, sound_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)

_Tensors = dict[str, torch.Tensor]
_ENGINE_ONLY = ("preview_every", "early_stop")
"""What only the engine's own loop can do."""
_MAX_REASON_CHARS = 300
_CODE_ERRORS = (TypeError, AttributeError, ImportError, RuntimeError)
"""Errors whose messages are about code and shapes, never about what a user wrote."""


class Pipeline(WholePipeline):
    """One pipeline object of diffusers."""

    def __init__(self, pipe: DiffusionPipeline) -> None:
        cls = type(pipe)
        self.pipe = pipe
        self.takes, self.needs = signature(cls)
        self._sound_alone = gives_sound_alone(cls)
        self._sample_rate = sample_rate_of(pipe) if output_fields(cls) & set(SOUND_FIELDS) else None
        self._default_steps = int(default_of(cls, ARGUMENTS["steps"]) or 1)
        # As fast as it draws them; else sound and frames would not agree.
        self.fps = float(default_of(cls, ("frame_rate", "fps")) or WholePipeline.fps)

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        arguments = self._arguments(payload, params)
        for name in sorted(self.needs - set(arguments)):
            ours = INPUT_ARGUMENTS.get(name) or next(field for field, names in ARGUMENTS.items() if name in names)
            raise InvalidRequestError(f"is missing; {type(self.pipe).__name__} requires it", param=ours)
        for field in _ENGINE_ONLY:
            if getattr(params, field):
                raise InvalidRequestError(
                    "not supported by this model, whose denoising loop is diffusers'; omit it", param=field
                )
        if self._sound_alone and params.n > 1:
            raise InvalidRequestError("must be 1 for sound; send several requests", param="n")
        other_scheduler(getattr(self.pipe, "scheduler", None), params.scheduler)

    def draw(self, payload: DiffusionInput, params: DiffusionParams, seed: int, on_step: OnStep) -> Generated:
        arguments = self._arguments(payload, params)
        if "generator" in self.takes:
            arguments["generator"] = torch.Generator().manual_seed(seed)
        if "output_type" in self.takes:
            arguments["output_type"] = "np" if self._sound_alone else "pil"
        step = 0

        def on_step_end(pipe: DiffusionPipeline, _step: int, _time: object, tensors: _Tensors) -> _Tensors:
            nonlocal step
            step += 1
            on_step(step, self._steps(pipe, params))
            return tensors

        if "callback_on_step_end" in self.takes:
            arguments["callback_on_step_end"] = on_step_end
        elif "callback" in self.takes:  # the older form: it is given no pipeline and returns nothing
            arguments["callback"] = lambda step, time, _latents: on_step_end(self.pipe, step, time, {}) and None
            arguments |= {"callback_steps": 1} if "callback_steps" in self.takes else {}
        stock = getattr(self.pipe, "scheduler", None)
        if (other := other_scheduler(stock, params.scheduler)) is not None:
            self.pipe.scheduler = other
        try:
            with torch.no_grad():
                output = self.pipe(**arguments)
        except ValueError as error:
            if step:
                raise
            # Before the first step, it is diffusers' own check of what it was given.
            reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
            raise InvalidRequestError(f"{type(self.pipe).__name__} cannot run this: {reason}") from error
        except _CODE_ERRORS as error:
            log_defect("a pipeline of diffusers", error)
            raise StageError(f"{type(self.pipe).__name__} failed {_where(error, step)}") from error
        finally:
            if stock is not None:
                self.pipe.scheduler = stock
        return self._result(output)

    # --------------------------------------------------------------------------------------------- pieces

    def _arguments(self, payload: DiffusionInput, params: DiffusionParams) -> dict[str, object]:
        """The request's parameters under diffusers' names; the prompt is left out for a pipeline that takes none."""
        arguments: dict[str, object] = {}
        for field, names in ARGUMENTS.items():
            value = getattr(params, field)
            if value is None:
                continue
            name = next((n for n in names if n in self.takes), None)
            if name is None:
                raise InvalidRequestError(
                    f"{type(self.pipe).__name__} does not support this parameter; omit it", param=field
                )
            if field != "seed" and not (field == "fps" and name == "num_frames"):
                arguments[name] = value
        if "prompt" in self.takes:
            arguments["prompt"] = payload.prompt
        elif "class_labels" in self.takes:
            arguments["class_labels"] = [self._label(payload.prompt)]
        arguments |= self._pictures([Image.fromarray(image) for image in payload.images])
        if payload.mask is not None:
            if "mask_image" not in self.takes:
                raise UnsupportedModalityError("not supported by this model; omit it", param="mask")
            arguments["mask_image"] = Image.fromarray(payload.mask)
        return arguments

    def _pictures(self, pictures: list[Image.Image]) -> dict[str, object]:
        """The request's pictures under diffusers' names: to start from, to control, or the first and the last frame."""
        if "control_image" in self.takes:
            names = [name for name in ("image", "control_image") if name in self.takes]
            if len(pictures) != len(names):
                requirement = "one picture, which controls" if len(names) == 1 else "a picture, then one that controls"
                raise InvalidRequestError(
                    f"{type(self.pipe).__name__} takes {requirement}; got {len(pictures)}", param="image"
                )
            return dict(zip(names, pictures, strict=True))
        if not pictures:
            return {}
        if "image" not in self.takes:
            raise UnsupportedModalityError("not supported by this model; omit it", param="image")
        if "last_image" in self.takes and len(pictures) == 2:
            return {"image": pictures[0], "last_image": pictures[1]}
        return {"image": pictures[0] if len(pictures) == 1 else pictures}

    def _result(self, output: object) -> Generated:
        sound = None if self._sample_rate is None else sound_of(output, self._sample_rate)
        if self._sound_alone:
            if sound is None:
                raise StageError(f"the pipeline returned {type(output).__name__}, which holds no sound")
            return sound
        pixels = pixels_of(output)
        return pixels if sound is None else VideoWithAudio(pixels, sound)

    def _steps(self, pipe: DiffusionPipeline, params: DiffusionParams) -> int:
        """Steps of the call that runs: pipelines note them, as an input picture's strength makes them fewer."""
        count = getattr(pipe, "num_timesteps", None)
        return count if isinstance(count, int) else params.steps or self._default_steps

    def _label(self, prompt: str) -> int:
        """The class that a prompt names, by its number or one of its names."""
        text = prompt.strip()
        names = getattr(self.pipe, "labels", None) or {}
        if text in names:
            return int(names[text])
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
        raise InvalidRequestError(
            f"{short_repr(text)} is not a class of this model; send a class's number or name", param="prompt"
        )


def _where(error: Exception, step: int) -> str:
    """After which step a pipeline failed, in which of diffusers' or other functions, and with what."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "diffusers" in Path(frame.filename).parts), frames[-1])
    reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
    place = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
    return f"after step {step}, at {place} ({type(error).__name__}: {reason})"


# --------------------------------------------------------------------------------------------------- pixels


def pixels_of(output: object) -> np.ndarray:
    """The one picture or video in a pipeline's output."""
    for name in PIXEL_FIELDS:
        values = getattr(output, name, None)
        if values is not None and len(values):
            return np.stack([_picture(frame) for frame in values[0]]) if name == "frames" else _picture(values[0])
    raise StageError(f"the pipeline returned {type(output).__name__}, which holds neither a picture nor a video")


def _picture(value: Image.Image | np.ndarray | torch.Tensor) -> np.ndarray:
    """`uint8 [h, w, 3]` of a Pillow image, or of an array or tensor in 0..1."""
    if isinstance(value, Image.Image):
        return np.asarray(value.convert("RGB"))
    if isinstance(value, torch.Tensor):
        value = value.float().cpu().movedim(0, -1).numpy()  # channels first, as everywhere in torch
    array = np.asarray(value)
    if array.dtype != np.uint8:
        array = (array.clip(0, 1) * 255).round().astype(np.uint8)
    if array.ndim == 2:
        array = array[..., None]
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array[..., :3]


# -------------------------------------------------------------------------------------------------- loading


def load(context: LoadContext) -> Pipeline:
    parts = Parts(context.model.folder)
    cls = _pipeline_class(parts)
    models = _checked_parts(parts)
    loaded: dict[str, nn.Module] = {}
    for index, name in enumerate(models):
        if context.progress is not None:
            context.progress(name, index / len(models))
        # One by one, for diffusers itself fills weights that a text encoder lacks with noise.
        loaded[name] = parts.load_model(name, context.device, context.dtype)
    pipe = cls.from_pretrained(
        parts.folder,
        dtype=context.dtype,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        **loaded,
    ).to(context.device)
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.eval().requires_grad_(False)
    loaded_pipeline = Pipeline(pipe)
    if not loaded_pipeline.takes & STEP_CALLBACKS:
        logger.warning(
            "%s calls nothing after its steps: its requests report no progress, and end early only between pictures",
            cls.__name__,
        )
    return loaded_pipeline


def _pipeline_class(parts: Parts) -> type[DiffusionPipeline]:
    name = parts.pipeline_class
    cls = pipeline_class(name)
    if cls is None:
        raise UnsupportedModelError(
            f"{name}, which {parts.folder / INDEX} names, is not a pipeline of diffusers {diffusers().__version__} as "
            "installed here; code in a checkpoint is not run"
        )
    check_pipeline(cls)
    return cls


def _checked_parts(parts: Parts) -> list[str]:
    """Refuse whatever diffusers would import or unpickle; the names of the parts with weights that we load."""
    models: list[str] = []
    for name, entry in parts.index.items():
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            continue  # a setting, or a part that is left out
        if Path(name).name != name:
            raise CheckpointError(
                f"{INDEX} in {parts.folder} names a part {name!r}, which is not a folder in it; refused"
            )
        cls = parts.part_class(name)
        if issubclass(cls, nn.Module):
            check_weights(parts.folder_of(name))
            models.append(name)
    return models
