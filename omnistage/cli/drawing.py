"""What `omnistage generate` knows of pictures and videos: their options, asking for them, writing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnistage.cli.common import err
from omnistage.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from omnistage.core.params import DiffusionParams, SamplingParams, StageParams
    from omnistage.core.types import Modality
    from omnistage.media.image_output import ImageOutput
    from omnistage.omni import Omni
    from omnistage.pipeline.outputs import OmniRequestOutput

_PANEL = "Pictures and videos"
FORMATS = ("png", "jpg", "webp")
DEFAULT_FOLDER = Path("out")

Width = Annotated[int | None, typer.Option(help="Pixels; default: the model's.", rich_help_panel=_PANEL)]
Height = Annotated[int | None, typer.Option(help="Pixels; default: the model's.", rich_help_panel=_PANEL)]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.", rich_help_panel=_PANEL)]
Guidance = Annotated[float | None, typer.Option(help="How closely to follow the prompt.", rich_help_panel=_PANEL)]
TrueCfg = Annotated[
    float | None,
    typer.Option(help="Guidance away from the negative prompt, on distilled models.", rich_help_panel=_PANEL),
]
NegativePrompt = Annotated[str | None, typer.Option(help="What to keep away from.", rich_help_panel=_PANEL)]
Count = Annotated[
    int | None, typer.Option("--n", help="How many; picture i starts from seed + i.", rich_help_panel=_PANEL)
]
Strength = Annotated[
    float | None, typer.Option(help="How far to leave the input picture, 0 to 1.", rich_help_panel=_PANEL)
]
Mask = Annotated[
    Path | None, typer.Option(metavar="FILE", help="White where the picture is to change.", rich_help_panel=_PANEL)
]
Frames = Annotated[int | None, typer.Option("--frames", help="Frames of a video.", rich_help_panel=_PANEL)]
Fps = Annotated[float | None, typer.Option(help="Frames a second of a video.", rich_help_panel=_PANEL)]
Scheduler = Annotated[
    str | None,
    typer.Option(
        help="A diffusers scheduler class that can take the place of the model's own.", rich_help_panel=_PANEL
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(help="Reuse work of earlier steps, like first_block:0.1; off by default.", rich_help_panel=_PANEL),
]
Format = Annotated[str, typer.Option("--format", help="png, jpg or webp.", rich_help_panel=_PANEL)]
Metadata = Annotated[
    bool,
    typer.Option("--metadata/--no-metadata", help="Keep prompt and parameters in the file.", rich_help_panel=_PANEL),
]
ContactSheet = Annotated[
    bool, typer.Option("--contact-sheet", help="Also write all pictures as one.", rich_help_panel=_PANEL)
]


@dataclass(frozen=True, slots=True)
class Saving:
    """How pictures are written."""

    format: str
    metadata: bool
    sheet: bool

    def __post_init__(self) -> None:
        if self.format.lower() not in FORMATS:
            raise InvalidRequestError(f"must be one of {', '.join(FORMATS)}, got {self.format!r}", param="--format")


def parse_params(**options: object) -> DiffusionParams | None:
    """The options that were given; None where there are none."""
    from omnistage.core.params import DiffusionParams

    given = {name: value for name, value in options.items() if value is not None}
    return DiffusionParams.parse(given) if given else None


def cache_override(spec: str | None) -> tuple[str, ...]:
    return () if spec is None else (f"denoise.cache={spec}",)


def draws(omni: Omni, wanted: Sequence[Modality] | None) -> bool:
    """Whether this request is for pictures or videos: asked for, or all that the model gives."""
    from omnistage.core.types import Modality

    given = set(omni.modalities) if wanted is None else set(wanted)
    return bool(given) and given <= {Modality.IMAGE, Modality.VIDEO}


def draw(
    omni: Omni,
    text: str | None,
    images: Sequence[Path],
    mask: Path | None,
    sampling: SamplingParams | None,
    asked: DiffusionParams | None,
    modalities: Sequence[Modality] | None = None,
) -> OmniRequestOutput:
    prompt: dict[str, object] = {"prompt": text or ""}
    if images:
        prompt["images"] = [str(path) for path in images]
    if mask is not None:
        prompt["mask"] = str(mask)
    [answer] = omni.generate(prompt, stage_params(omni, sampling, asked), modalities=modalities)
    return answer


def refuse_unused(**options: object) -> None:
    """Raise for an option that a drawing model would silently leave aside."""
    for name, value in options.items():
        if value:
            raise InvalidRequestError("means nothing to this model, which draws; leave it out", param=_flag(name))


def given_options(asked: DiffusionParams | None, **options: object) -> list[str]:
    """The drawing options of a request, as they are written; the seed is every model's."""
    names = asked.model_fields_set - {"seed"} if asked is not None else set()
    return sorted(_flag(name) for name in {*names, *(name for name, value in options.items() if value)})


def _flag(name: str) -> str:
    return "--frames" if name == "num_frames" else f"--{name.replace('_', '-')}"


def stage_params(
    omni: Omni, sampling: SamplingParams | None, asked: DiffusionParams | None
) -> Mapping[str, StageParams]:
    """The options of each kind, given to the first stage that takes them; those that none takes are refused."""
    chosen: dict[str, StageParams] = {}
    for params in (sampling, asked):
        if params is None:
            continue
        takers = [n for n, stage in omni.orchestrator.stages.items() if isinstance(params, stage.params_type)]
        if takers:
            chosen[takers[0]] = params
        else:  # the seed is one option for both kinds
            refuse_unused(**dict.fromkeys(sorted(params.model_fields_set - {"seed"}), True))
    return chosen


def save(answer: OmniRequestOutput, folder: Path | None, saving: Saving) -> list[Path]:
    """Write the pictures and videos of an answer; where they went."""
    from omnistage.media.image_output import contact_sheet

    if not answer.images and not answer.videos:
        return []
    folder = folder or DEFAULT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    suffix = saving.format.lower()
    written = [
        _written(picture, folder / f"picture{_number(i, len(answer.images))}.{suffix}", saving)
        for i, picture in enumerate(answer.images)
    ]
    written += [
        video.save(folder / f"video{_number(i, len(answer.videos))}.mp4", metadata=saving.metadata)
        for i, video in enumerate(answer.videos)
    ]
    if saving.sheet and len(answer.images) > 1:
        written.append(_written(contact_sheet(answer.images), folder / f"contact-sheet.{suffix}", saving))
    elif saving.sheet:
        err().print("no contact sheet: it takes several pictures, add --n", style="yellow")
    return written


def _written(picture: ImageOutput, path: Path, saving: Saving) -> Path:
    """Save a picture; one whose metadata a format has no room for is kept without."""
    try:
        return picture.save(path, metadata=saving.metadata)
    except InvalidRequestError as error:
        if error.param != "metadata":
            raise
        err().print(f"{path} is without metadata, which is too long for it; --format png has room", style="yellow")
        return picture.save(path, metadata=False)


def _number(index: int, count: int) -> str:
    return f"-{index}" if count > 1 else ""
