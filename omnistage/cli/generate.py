"""`omnistage generate`: one request, answered in text, speech, pictures or video."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnistage.cli import drawing
from omnistage.cli.common import ConfigOption, DeviceOption, DTypeOption, ModelArgument, SetOption, err, out
from omnistage.cli.terminal import timeline
from omnistage.core.errors import InvalidRequestError, UnsupportedModalityError

if TYPE_CHECKING:
    from omnistage.core.params import SamplingParams
    from omnistage.core.types import Modality
    from omnistage.pipeline.outputs import OmniRequestOutput

MediaFiles = dict[str, list[Path]]
"""Files by kind: image, audio, video."""


def generate(
    model: ModelArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text; - reads it from standard input.")
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A picture. Repeatable.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A sound. Repeatable.")] = None,
    video: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A video. Repeatable.")] = None,
    use_audio_in_video: Annotated[
        bool, typer.Option("--use-audio-in-video", help="Also listen to the sound of the videos.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    modalities: Annotated[str | None, typer.Option(help="What to answer with, like text,audio; default: text.")] = None,
    voice: Annotated[str | None, typer.Option(help="Who speaks; default: the model's first voice.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write answer.txt, answer.wav, pictures and videos here; pictures: ./out."
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of text.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens up to this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens; 0: from all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer. Repeatable.")] = None,
    width: drawing.Width = None,
    height: drawing.Height = None,
    steps: drawing.Steps = None,
    guidance: drawing.Guidance = None,
    true_cfg: drawing.TrueCfg = None,
    negative_prompt: drawing.NegativePrompt = None,
    n: drawing.Count = None,
    strength: drawing.Strength = None,
    mask: drawing.Mask = None,
    num_frames: drawing.Frames = None,
    fps: drawing.Fps = None,
    scheduler: drawing.Scheduler = None,
    cache: drawing.Cache = None,
    picture_format: drawing.Format = "png",
    metadata: drawing.Metadata = True,
    sheet: drawing.ContactSheet = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    device: DeviceOption = None,
    dtype: DTypeOption = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print when each stage ran.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue PROMPT as it is, without the chat template.")] = False,
) -> None:
    """Answer one request, or draw it.

    The text goes to standard output, progress to standard error. Speech needs `--out` to be kept; pictures and
    videos are always written. The options for sampling are those of the stage that writes; any stage's are set with
    `--set`, like `--set talker.temperature=0.9`.

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
    files: MediaFiles = {"image": image or [], "audio": audio or [], "video": video or []}
    _check_request(text, files, mask, raw=raw, system=system)
    wanted = parse_modalities(modalities)
    sampling = sampling_params(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    asked = drawing.parse_params(
        width=width,
        height=height,
        steps=steps,
        guidance=guidance,
        true_cfg=true_cfg,
        negative_prompt=negative_prompt,
        n=n,
        strength=strength,
        num_frames=num_frames,
        fps=fps,
        scheduler=scheduler,
        seed=seed,
    )
    saving = drawing.Saving(picture_format, metadata=metadata, sheet=sheet)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)  # an answer that took minutes must have somewhere to go
    from omnistage.omni import Omni

    # The front door shows bars of its own on a terminal; in a log this line says what takes the time.
    err().print(f"loading {model}", style="dim", soft_wrap=True, markup=False)
    given = (*(overrides or ()), *drawing.cache_override(cache))
    with Omni(model, config=config, overrides=given, device=device, dtype=dtype) as omni:
        mixed = wanted is not None and "image" in wanted  # a picture beside text or speech
        if drawing.draws(omni, wanted):
            drawing.refuse_unused(
                audio=audio,
                video=video,
                system=system,
                voice=voice,
                raw=raw,
                use_audio_in_video=use_audio_in_video,
            )
            answer = drawing.draw(omni, text, files["image"], mask, sampling, asked, wanted)
        elif others := drawing.given_options(None if mixed else asked, mask=mask, contact_sheet=sheet and not mixed):
            raise InvalidRequestError(_unused(mixed), param=others[0])
        elif raw:
            [answer] = omni.generate(text or "", modalities=wanted, sampling_params=sampling, voice=voice)
        else:
            answer = omni.chat(
                chat_messages(text, files, system),
                modalities=wanted,
                sampling_params=drawing.stage_params(omni, sampling, asked) if mixed else sampling,
                voice=voice,
                use_audio_in_video=use_audio_in_video,
            )
    _present(answer, folder, saving, trace=trace)


def _unused(mixed: bool) -> str:
    """Why an option for pictures is refused."""
    if mixed:
        return "goes with pictures alone, not beside text or speech; leave it out"
    return "no picture is asked for; leave it out, or add image to --modalities where the model draws"


def _check_request(text: str | None, files: MediaFiles, mask: Path | None, *, raw: bool, system: str | None) -> None:
    """Refuse what cannot run before the model is loaded, which may take minutes."""
    media = [path for paths in files.values() for path in paths]
    if not text and not media:
        raise InvalidRequestError("is missing; give a text, or a file with --image, --audio or --video", param="PROMPT")
    if raw and (media or system is not None or not text):
        raise InvalidRequestError("takes a text alone; leave out --image, --audio, --video and --system", param="--raw")
    for kind, paths in {**files, "mask": [mask] if mask is not None else []}.items():
        for path in paths:
            if not path.is_file():
                raise InvalidRequestError(f"there is no file {path}; check the path", param=f"--{kind}")


def parse_modalities(text: str | None) -> tuple[Modality, ...] | None:
    """`text,audio` as modalities; None where nothing was asked for."""
    from omnistage.core.types import Modality
    from omnistage.core.validation import short_repr

    if text is None:
        return None
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in list(Modality)]
    if unknown or not names:
        known = ", ".join(Modality)
        raise UnsupportedModalityError(
            f"{short_repr(text)} is not a list of modalities; join some of {known} with commas", param="--modalities"
        )
    return tuple(dict.fromkeys(Modality(name) for name in names))


def sampling_params(**options: object) -> SamplingParams | None:
    """The options that were given, over the stage's defaults; None where there are none."""
    from omnistage.core.params import SamplingParams

    given = {name: value for name, value in options.items() if value is not None and value != []}
    return SamplingParams.parse(given) if given else None


def chat_messages(text: str | None, files: MediaFiles, system: str | None) -> list[dict[str, object]]:
    """One user message, media before the text as the models were trained, after the system message if there is one."""
    content: list[dict[str, object]] = [
        {"type": kind, kind: str(path)} for kind, paths in files.items() for path in paths
    ]
    if text:
        content.append({"type": "text", "text": text})
    messages: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": content}]


def _present(answer: OmniRequestOutput, folder: Path | None, saving: drawing.Saving, *, trace: bool) -> None:
    """Print and write the answer; an answer that failed is raised as its error."""
    if answer.error is not None:
        raise answer.error
    notes = err()
    for path in drawing.save(answer, folder, saving):
        notes.print(f"wrote {path}", soft_wrap=True)
    if answer.outputs:
        typer.echo(answer.text)
    if folder is not None and answer.outputs:
        (folder / "answer.txt").write_text(answer.text + "\n", encoding="utf-8")
        notes.print(f"wrote {folder / 'answer.txt'}", soft_wrap=True)
    if folder is not None and answer.audio is not None:
        answer.audio.save(folder / "answer.wav")
        notes.print(f"wrote {folder / 'answer.wav'} ({answer.audio.seconds:.2f} s of speech)", soft_wrap=True)
    elif answer.audio is not None:
        notes.print(f"{answer.audio.seconds:.2f} s of speech were made and not kept; add --out DIR", style="yellow")
    usage = answer.usage
    made = [f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} text tokens"] if answer.outputs else []
    made += [f"{usage.audio_seconds:.2f} s of audio"] if answer.audio is not None or answer.outputs else []
    made += [f"{usage.images} picture{'s' if usage.images > 1 else ''}"] if usage.images else []
    made += [f"{usage.video_seconds:.2f} s of video"] if usage.video_seconds else []
    made += [f"{usage.steps} denoising steps"] if usage.steps else []
    notes.print(f"{', '.join(made)}, ended by {answer.finish_reason}", style="dim")
    if trace and answer.trace is not None:
        out().print(f"{answer.trace}\n\n{timeline(answer.trace)}", soft_wrap=True, markup=False)
