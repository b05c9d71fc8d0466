"""`omnistage generate`: one request, answered in text, speech, pictures or video."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnistage.cli import drawing
from omnistage.cli.common import err, out
from omnistage.cli.options import ModelArgument, ModelOptions, option, set_values
from omnistage.cli.terminal import timeline
from omnistage.core.errors import InvalidRequestError, UnsupportedModalityError

if TYPE_CHECKING:
    from omnistage.core.params import DiffusionParams, SamplingParams
    from omnistage.core.types import Modality
    from omnistage.omni import Omni
    from omnistage.pipeline.outputs import OmniRequestOutput

MediaFiles = dict[str, list[Path]]
"""Files by kind: image, audio, video."""


@dataclass(frozen=True, slots=True)
class InputOptions:
    """What goes into a request beside its text."""

    image: list[Path] = option([], "A picture. Repeatable.", metavar="FILE")
    audio: list[Path] = option([], "An audio file. Repeatable.", metavar="FILE")
    video: list[Path] = option([], "A video. Repeatable.", metavar="FILE")
    use_audio_in_video: bool = option(False, "Also use the audio track of the videos.", "--use-audio-in-video")
    system: str | None = option(None, "The system message.")
    raw: bool = option(False, "Continue PROMPT as it is, without the chat template.", "--raw")

    @property
    def files(self) -> MediaFiles:
        return {"image": self.image, "audio": self.audio, "video": self.video}

    def check(self, text: str | None, mask: Path | None) -> None:
        """Refuse what cannot run before the model is loaded, which may take minutes."""
        media = [path for paths in self.files.values() for path in paths]
        if not text and not media:
            raise InvalidRequestError(
                "is missing; give a text, or a file with --image, --audio or --video", param="PROMPT"
            )
        if self.raw and (media or self.system is not None or not text):
            raise InvalidRequestError(
                "takes a text alone; leave out --image, --audio, --video and --system", param="--raw"
            )
        for kind, paths in {**self.files, "mask": [mask] if mask is not None else []}.items():
            for path in paths:
                if not path.is_file():
                    raise InvalidRequestError(f"there is no file {path}; check the path", param=f"--{kind}")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the request generates, and where it goes."""

    modalities: str | None = option(None, "What to generate, like text,audio; default: text.")
    voice: str | None = option(None, "The voice; default: the model's first one.")
    folder: Path | None = option(
        None, "Write answer.txt, answer.wav, pictures and videos here; pictures: ./out.", "--out", metavar="DIR"
    )
    trace: bool = option(False, "Print when each stage ran.", "--trace")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters of the stage that generates text, under the names of `SamplingParams`."""

    max_tokens: int | None = option(None, "Maximum tokens of text.")
    temperature: float | None = option(None, "0 always takes the likeliest token.")
    top_p: float | None = option(None, "Sample from the likeliest tokens up to this mass.")
    top_k: int | None = option(None, "Sample from the k likeliest tokens; 0: from all.")
    seed: int | None = option(None, "Same seed, same output.")
    stop: list[str] = option([], "Text that ends the output. Repeatable.")

    def params(self) -> SamplingParams | None:
        from omnistage.core.params import SamplingParams

        values = set_values(self)
        return SamplingParams.parse(values) if values else None


def generate(
    model: ModelArgument,
    inputs: InputOptions,
    output: OutputOptions,
    sampling: SamplingOptions,
    pictures: drawing.DrawingOptions,
    files: drawing.FileOptions,
    settings: ModelOptions,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text; - reads it from standard input.")
    ] = None,
) -> None:
    """Run one request: text, speech, pictures, video or sound.

    The text goes to standard output, progress to standard error. Speech is kept with `--out` only; pictures, videos
    and the sound of diffusion models are always written. The sampling options are for the stage that generates text;
    those of any stage are set with `--set`, like `--set talker.temperature=0.9`.

    Examples:

    ```
    omnistage generate starter 'A red apple' --modalities text,audio,image --out out --trace
    omnistage generate out/tiny 'Hello' --max-tokens 32
    omnistage generate out/tiny 'What is this?' --image cat.png --audio purr.wav --modalities text,audio --out answer
    omnistage generate out/lm 'Once upon a time' --raw --temperature 0
    omnistage generate out/flux 'A lighthouse at dusk' --width 64 --height 64 --steps 8 --n 4 --contact-sheet
    ```
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    inputs.check(text, pictures.mask)
    request = _Request(
        text,
        inputs,
        parse_modalities(output.modalities),
        output.voice,
        sampling.params(),
        pictures.params(sampling.seed),
        pictures,
        contact_sheet=files.contact_sheet,
    )
    if output.folder is not None:
        output.folder.mkdir(parents=True, exist_ok=True)  # before the work: it may take minutes
    with settings.load(model, overrides=pictures.overrides()) as omni:
        sound = drawing.is_sound_model(omni)
        result = request.run(omni)
    _present(result, output, files, sound=sound)


@dataclass(frozen=True, slots=True)
class _Request:
    """A request that was checked as far as it can be without its model."""

    text: str | None
    inputs: InputOptions
    modalities: tuple[Modality, ...] | None
    voice: str | None
    sampling: SamplingParams | None
    diffusion: DiffusionParams | None
    pictures: drawing.DrawingOptions
    contact_sheet: bool

    def run(self, omni: Omni) -> OmniRequestOutput:
        inputs = self.inputs
        if drawing.is_drawing(omni, self.modalities):
            drawing.refuse_options(
                audio=inputs.audio,
                video=inputs.video,
                system=inputs.system,
                voice=self.voice,
                raw=inputs.raw,
                use_audio_in_video=inputs.use_audio_in_video,
            )
            params = drawing.stage_params(omni, self.sampling, self.diffusion)
            return drawing.draw(omni, self.text, inputs.image, self.pictures.mask, params, self.modalities)
        with_picture = self.modalities is not None and "image" in self.modalities
        self._refuse_picture_options(with_picture)
        if inputs.raw:
            [output] = omni.generate(
                self.text or "", modalities=self.modalities, sampling_params=self.sampling, voice=self.voice
            )
            return output
        return omni.chat(
            chat_messages(self.text, inputs.files, inputs.system),
            modalities=self.modalities,
            sampling_params=(
                drawing.stage_params(omni, self.sampling, self.diffusion) if with_picture else self.sampling
            ),
            voice=self.voice,
            use_audio_in_video=inputs.use_audio_in_video,
        )

    def _refuse_picture_options(self, with_picture: bool) -> None:
        """Raise for an option that needs a picture, or a picture without text or speech beside it."""
        if with_picture:
            names = [] if self.pictures.mask is None else ["--mask"]
            reason = "is only for pictures alone, not beside text or speech; remove it"
        else:
            names = self.pictures.names() + ["--contact-sheet"] * self.contact_sheet
            reason = "is only for pictures; remove it, or add image to --modalities if the model supports it"
        if names:
            raise InvalidRequestError(reason, param=names[0])


def parse_modalities(text: str | None) -> tuple[Modality, ...] | None:
    """`text,audio` as modalities."""
    from omnistage.core.types import Modality
    from omnistage.core.validation import short_repr

    if text is None:
        return None
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names or any(name not in list(Modality) for name in names):
        raise UnsupportedModalityError(
            f"{short_repr(text)} is not a list of modalities; join some of {', '.join(Modality)} with commas",
            param="--modalities",
        )
    return tuple(dict.fromkeys(Modality(name) for name in names))


def chat_messages(text: str | None, files: MediaFiles, system: str | None) -> list[dict[str, object]]:
    """One user message, media before the text as the models were trained, after the system message if there is one."""
    content: list[dict[str, object]] = [
        {"type": kind, kind: str(path)} for kind, paths in files.items() for path in paths
    ]
    if text:
        content.append({"type": "text", "text": text})
    messages: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": content}]


def _present(
    output: OmniRequestOutput, options: OutputOptions, files: drawing.FileOptions, *, sound: bool = False
) -> None:
    """Print and write an output; one that failed is raised as its error. `sound`: its audio is a diffusion model's."""
    if output.error is not None:
        raise output.error
    notes, folder = err(), options.folder
    for path in drawing.save_files(output, folder, files):
        notes.print(f"wrote {path}", soft_wrap=True)
    if output.outputs:
        typer.echo(output.text)
    if folder is not None and output.outputs:
        (folder / "answer.txt").write_text(output.text + "\n", encoding="utf-8")
        notes.print(f"wrote {folder / 'answer.txt'}", soft_wrap=True)
    if sound and output.audio is not None:
        path = drawing.save_sound(output.audio, folder)
        notes.print(f"wrote {path} ({output.audio.seconds:.2f} s of sound)", soft_wrap=True)
    elif folder is not None and output.audio is not None:
        output.audio.save(folder / "answer.wav")
        notes.print(f"wrote {folder / 'answer.wav'} ({output.audio.seconds:.2f} s of speech)", soft_wrap=True)
    elif output.audio is not None:
        notes.print(f"{output.audio.seconds:.2f} s of speech were not saved; add --out DIR", style="yellow")
    notes.print(f"{_usage(output)}, finish reason {output.finish_reason}", style="dim")
    if options.trace and output.trace is not None:
        out().print(f"{output.trace}\n\n{timeline(output.trace)}", soft_wrap=True, markup=False)


def _usage(output: OmniRequestOutput) -> str:
    usage = output.usage
    counts = {
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} text tokens": output.outputs,
        f"{usage.audio_seconds:.2f} s of audio": output.audio is not None or output.outputs,
        f"{usage.images} picture{'s' if usage.images > 1 else ''}": usage.images,
        f"{usage.video_seconds:.2f} s of video": usage.video_seconds,
        f"{usage.steps} denoising steps": usage.steps,
    }
    return ", ".join(text for text, there in counts.items() if there)
