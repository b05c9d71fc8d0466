"""Whether a pipeline class of diffusers can be driven whole: asked when it is loaded, of the class alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from omnistage.core.errors import UnsupportedModelError
from omnistage.models._diffusers import private_api
from omnistage.models._diffusers.loading import diffusers

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "width": ("width",),
    "height": ("height",),
    "steps": ("num_inference_steps",),
    "guidance": ("guidance_scale",),
    "true_cfg": ("true_cfg_scale",),
    "negative_prompt": ("negative_prompt",),
    "strength": ("strength",),
    "control_scale": ("controlnet_conditioning_scale",),
    "num_frames": ("num_frames", "video_length"),
    "fps": ("frame_rate", "fps", "num_frames"),
    "seconds": ("audio_end_in_s", "audio_length_in_s", "audio_duration", "audio_duration_s", "duration"),
    "max_sequence_length": ("max_sequence_length",),
    "seed": ("generator",),
}
"""Our parameters, and what diffusers' pipelines call them; the first that a pipeline has is used."""
INPUT_ARGUMENTS = {
    "prompt": "prompt",
    "image": "image",
    "control_image": "image",
    "mask_image": "mask",
    "class_labels": "prompt",
}
"""Arguments that are made of the prompt and its pictures, by the name under which a request gives them."""

_NEEDED_INPUTS: Mapping[str, str] = {
    "AnimateDiffControlNetPipeline": "conditioning_frames",
    "AnimateDiffSparseControlNetPipeline": "conditioning_frames",
    "AnimateDiffVideoToVideoControlNetPipeline": "video",
    "AnimateDiffVideoToVideoPipeline": "video",
    "CogVideoXFunControlPipeline": "control_video",
    "CogVideoXVideoToVideoPipeline": "video",
    "IFImg2ImgSuperResolutionPipeline": "original_image",
    "IFInpaintingSuperResolutionPipeline": "original_image",
    "LTX2DFRTemporalRefinePipeline": "latents",
    "LTX2LatentUpsamplePipeline": "video",
    "LTXLatentUpsamplePipeline": "video",
    "SanaWMPipeline": "action",
    "StableAudio3AudioToAudioPipeline": "audio",
    "StableAudio3InpaintPipeline": "audio",
    "VideoToVideoSDPipeline": "video",
    "WanVideoToVideoPipeline": "video",
}
"""Arguments that have a default and without which the pipeline's call fails all the same."""
_HIGH_DYNAMIC_RANGE = frozenset({"LTX2HDRPipeline"})
"""Their frames are beyond what eight bits hold."""
PIXEL_FIELDS = ("frames", "images", "image")
"""Where the outputs of pipelines have their pixels, in the order in which they are looked at."""
SOUND_FIELDS = ("audios", "audio")
"""Where they have their samples."""
STEP_CALLBACKS = frozenset({"callback_on_step_end", "callback"})
"""What a pipeline calls after a step; the second is the older one."""


def check_pipeline(cls: type[DiffusionPipeline]) -> None:
    """Refuse a pipeline that no request could call, or that gives no picture, no video and no sound."""
    if private_api.fetches_checkpoints(cls):
        raise UnsupportedModelError(
            f"{cls.__name__} fetches other checkpoints by itself; serve one of its parts instead"
        )
    _, needs = signature(cls)
    arguments = {*INPUT_ARGUMENTS, *(name for names in ARGUMENTS.values() for name in names)}
    if unknown := sorted(needs - arguments):
        raise UnsupportedModelError(
            f"{cls.__name__} cannot be called without {', '.join(unknown)}, which no request can give"
        )
    if requirement := _NEEDED_INPUTS.get(cls.__name__):
        raise UnsupportedModelError(f"{cls.__name__} fails without {requirement}, which no request can give")
    if cls.__name__ in _HIGH_DYNAMIC_RANGE:
        raise UnsupportedModelError(f"{cls.__name__} gives frames of high dynamic range, which would be cut to 8 bits")
    fields = output_fields(cls)
    if fields and not fields & {*PIXEL_FIELDS, *SOUND_FIELDS}:
        raise UnsupportedModelError(
            f"{cls.__name__} gives {', '.join(sorted(fields))}; only pipelines that give images, frames or audio are "
            "served"
        )


def pipeline_class(name: object) -> type[DiffusionPipeline] | None:
    """The pipeline of diffusers that has this name; None where the installed release has none."""
    package = diffusers()
    cls = getattr(package, name, None) if isinstance(name, str) and not name.startswith("_") else None
    return cls if isinstance(cls, type) and issubclass(cls, package.DiffusionPipeline) else None


def is_sound_pipeline(name: object) -> bool:
    """Whether a name is that of a pipeline that gives sound and no pixels."""
    cls = pipeline_class(name)
    return cls is not None and gives_sound_alone(cls)


def gives_sound_alone(cls: type[DiffusionPipeline]) -> bool:
    """Whether a pipeline gives sound and no pixels."""
    fields = output_fields(cls)
    return bool(fields & set(SOUND_FIELDS)) and not fields & set(PIXEL_FIELDS)


def default_of(cls: type[DiffusionPipeline], names: Sequence[str]) -> float | None:
    """The default of the first of these arguments that a pipeline's call has, where that is a number."""
    parameters = inspect.signature(cls.__call__).parameters
    value = next((parameters[name].default for name in names if name in parameters), None)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def signature(cls: type[DiffusionPipeline]) -> tuple[frozenset[str], frozenset[str]]:
    """What a pipeline can be called with, and what it cannot be called without."""
    parameters = list(inspect.signature(cls.__call__).parameters.values())[1:]
    parameters = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return frozenset(p.name for p in parameters), frozenset(p.name for p in parameters if p.default is p.empty)


def output_fields(cls: type[DiffusionPipeline]) -> frozenset[str]:
    """The fields of what a pipeline's call returns, as its source names them; none where that cannot be read."""
    call = inspect.unwrap(cls.__call__)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    names = {
        node.value.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
    }
    outputs = [value for name in names if is_dataclass(value := call.__globals__.get(name))]
    return frozenset(field.name for output in outputs for field in fields(output))
