"""Pictures and videos of `omnistage generate` and `omnistage chat`: options, requests, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from omnistage.cli.common import err
from omnistage.cli.options import option, set_values
from omnistage.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from omnistage.core.params import DiffusionParams, SamplingParams, StageParams
    from omnistage.core.types import Modality
    from omnistage.media.audio_output import AudioOutput
    from omnistage.media.image_output import ImageOutput
    from omnistage.omni import Omni
    from omnistage.pipeline.outputs import OmniRequestOutput

FORMATS = ("png", "jpg", "webp")
DEFAULT_FOLDER = Path("out")


@dataclass(frozen=True, slots=True)
class DrawingOptions:
    """The parameters of a picture or video. Those of `DiffusionParams` bear its names."""

    PANEL: ClassVar[str] = "Pictures and videos"
    width: int | None = option(None, "Pixels; default: the model's.")
    height: int | None = option(None, "Pixels; default: the model's.")
    steps: int | None = option(None, "Denoising steps.")
    guidance: float | None = option(None, "How closely to follow the prompt.")
    true_cfg: float | None = option(None, "Guidance away from the negative prompt, on distilled models.")
    negative_prompt: str | None = option(None, "What to avoid.")
    n: int | None = option(None, "How many; picture i starts from seed + i.", "--n")
    strength: float | None = option(None, "How much to change the input picture, 0 to 1.")
    control_scale: float | None = option(None, "How closely to follow the picture that controls (ControlNet).")
    mask: Path | None = option(None, "White where the picture is to change.", metavar="FILE")
    num_frames: int | None = option(None, "Frames of a video.", "--frames")
    fps: float | None = option(None, "Frames per second of a video.")
    seconds: float | None = option(None, "Length of a sound, for diffusion models that generate one.")
    scheduler: str | None = option(None, "A diffusers scheduler class compatible with the model's.")
    cache: str | None = option(None, "Reuse work of earlier steps, like first_block:0.1; off by default.")

    def params(self, seed: int | None) -> DiffusionParams | None:
        """The parameters that are set; None where none is."""
        from omnistage.core.params import DiffusionParams

        values = {name: value for name, value in set_values(self).items() if name not in ("mask", "cache")}
        if seed is not None:
            values["seed"] = seed
        return DiffusionParams.parse(values) if values else None

    def overrides(self) -> tuple[str, ...]:
        return () if self.cache is None else (f"denoise.cache={self.cache}",)

    def names(self) -> list[str]:
        """The options that are set and go with a picture, as they are written."""
        return sorted(_flag(name) for name in set_values(self) if name != "cache")


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How pictures and videos are written."""

    PANEL: ClassVar[str] = DrawingOptions.PANEL
    format: str = option("png", "png, jpg or webp.")
    metadata: bool = option(True, "Keep prompt and parameters in the file.", "--metadata/--no-metadata")
    contact_sheet: bool = option(False, "Also write all pictures as one.", "--contact-sheet")

    def __post_init__(self) -> None:
        if self.format.lower() not in FORMATS:
            raise InvalidRequestError(f"must be one of {', '.join(FORMATS)}, got {self.format!r}", param="--format")


def is_drawing(omni: Omni, modalities: Sequence[Modality] | None) -> bool:
    """Whether a diffusion model alone answers: with pictures, videos or, where it gives nothing else, sound."""
    from omnistage.core.types import Modality

    outputs = set(omni.modalities if modalities is None else modalities)
    if is_sound_model(omni):
        return True
    return bool(outputs) and outputs <= {Modality.IMAGE, Modality.VIDEO}


def is_sound_model(omni: Omni) -> bool:
    """Whether a diffusion model gives sound and nothing else."""
    from omnistage.core.family import DrawingProcessor
    from omnistage.core.types import Modality

    return isinstance(omni.processor, DrawingProcessor) and set(omni.modalities) == {Modality.AUDIO}


def draw(
    omni: Omni,
    text: str | None,
    images: Sequence[Path],
    mask: Path | None,
    params: Mapping[str, StageParams],
    modalities: Sequence[Modality] | None = None,
) -> OmniRequestOutput:
    prompt: dict[str, object] = {"prompt": text or ""}
    if images:
        prompt["images"] = [str(path) for path in images]
    if mask is not None:
        prompt["mask"] = str(mask)
    [output] = omni.generate(prompt, params, modalities=modalities)
    return output


def refuse_options(**values: object) -> None:
    """Raise for an option that is set and that a drawing model would ignore."""
    for name, value in values.items():
        if value:
            raise InvalidRequestError(
                "is not supported by this model, which generates pictures, videos or sound; remove it",
                param=_flag(name),
            )


def _flag(name: str) -> str:
    return "--frames" if name == "num_frames" else f"--{name.replace('_', '-')}"


def stage_params(
    omni: Omni, sampling: SamplingParams | None, diffusion: DiffusionParams | None
) -> Mapping[str, StageParams]:
    """The parameters of each kind for the first stage of that kind; those of a kind without a stage are refused."""
    by_stage: dict[str, StageParams] = {}
    for params in (sampling, diffusion):
        if params is None:
            continue
        stages = [n for n, stage in omni.orchestrator.stages.items() if isinstance(params, stage.params_type)]
        if stages:
            by_stage[stages[0]] = params
        else:  # the seed is one option for both kinds
            refuse_options(**dict.fromkeys(sorted(params.model_fields_set - {"seed"}), True))
    return by_stage


def save_files(output: OmniRequestOutput, folder: Path | None, options: FileOptions) -> list[Path]:
    """Write the pictures and videos of an output; where they are."""
    from omnistage.media.image_output import contact_sheet

    if not output.images and not output.videos:
        return []
    folder = folder or DEFAULT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    suffix = options.format.lower()
    files = [
        _save_picture(picture, folder / f"picture{_number(i, len(output.images))}.{suffix}", options)
        for i, picture in enumerate(output.images)
    ]
    files += [
        video.save(folder / f"video{_number(i, len(output.videos))}.mp4", metadata=options.metadata)
        for i, video in enumerate(output.videos)
    ]
    if options.contact_sheet and len(output.images) > 1:
        files.append(_save_picture(contact_sheet(output.images), folder / f"contact-sheet.{suffix}", options))
    elif options.contact_sheet:
        err().print("no contact sheet: it needs several pictures, add --n", style="yellow")
    return files


def save_sound(audio: AudioOutput, folder: Path | None) -> Path:
    """Write the sound of a diffusion model; where it is."""
    folder = folder or DEFAULT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return audio.save(folder / "sound.wav")


def _save_picture(picture: ImageOutput, path: Path, options: FileOptions) -> Path:
    """Save a picture, without its metadata where the format has no room for them."""
    try:
        return picture.save(path, metadata=options.metadata)
    except InvalidRequestError as error:
        if error.param != "metadata":
            raise
        message = f"{path}: the metadata are too long for this format and left out; use --format png"
        err().print(message, style="yellow", soft_wrap=True)
        return picture.save(path, metadata=False)


def _number(index: int, count: int) -> str:
    return f"-{index}" if count > 1 else ""
