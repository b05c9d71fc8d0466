"""Which speech models of the installed transformers are served exactly, by small random checkpoints of each type.

Speech to text: several clips of different lengths at once, against transformers one clip at a time; the texts must be
equal. Text to speech: several texts at once with a seed, against transformers after `set_seed`; the samples must be
equal within 1e-5. Families that stream their speech are compared by their own `verify`.

    exact      the same texts or samples
    elsewhere  claimed by a family that is no speech family, and not compared here
    refused    claimed by no family, or not loaded, with the reason
    wrong      loaded, and the results differ: never acceptable
    crashed    an error that is not one of ours
    unbuilt    no small checkpoint could be made, or transformers itself cannot run it

python tools/speech_coverage.py whisper vits                 these types
python tools/speech_coverage.py --all --markdown docs/speech_models.md
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import detect_family
from omnistage.core.clips import AudioClip
from omnistage.core.errors import OmniError
from omnistage.core.params import CodecParams
from omnistage.core.types import SpeechPrompt
from omnistage.hf import transformers
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni

sys.path.insert(0, str(Path(__file__).parent))
from listener_checkpoints import LISTENERS, transcribe
from speaker_checkpoints import SEED
from speech_checkpoints import CTC_TYPES, RECOGNIZERS, SPEAKERS, build_ctc

STATES = ("exact", "elsewhere", "refused", "wrong", "crashed", "unbuilt")
_RECOGNITION = ("SPEECH_SEQ_2_SEQ", "CTC", "RNNT", "TDT")
_SYNTHESIS = ("TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM")
_SPEAK_TOO = {"dia": "DiaForConditionalGeneration"}
"""Types that transformers lists as speech to text alone."""
RATE = 16_000
SECONDS = (1.0, 1.7, 2.3, 1.0)
TEXTS = ("hello there", "the weather is bright and the river is quiet", "yes")
TOLERANCE = 1e-5
_AUDIBLE = 5e-3
_DISTINCT = 10 * TOLERANCE
"""By which texts must differ, so that one in place of another would be found."""
_MAX_SEEDS = 12
_EMPTY = "all texts are empty, so nothing was compared"
STREAMED = {"csm": "csm", "qwen2_5_omni": "qwen2_5_omni", "qwen3_omni_moe": "qwen3_omni_moe"}
"""Types with a family of their own."""


@dataclass(frozen=True, slots=True)
class Outcome:
    model_type: str
    task: str
    state: str
    reason: str = ""


def types_of(tasks: Sequence[str]) -> dict[str, str]:
    """Classes by model type."""
    auto, types = transformers.models.auto.modeling_auto, dict(_SPEAK_TOO if tasks is _SYNTHESIS else {})
    for task in tasks:
        types.update(getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES"))
    return dict(sorted(types.items()))


def _unclaimed(model_type: str, task: str, tasks: Sequence[str]) -> Outcome:
    """What becomes of a type that no speech family claims."""
    name = types_of(tasks)[model_type]
    try:
        family = detect_family({"architectures": [name], "model_type": model_type}, REGISTRY)
    except OmniError:
        return Outcome(model_type, task, "refused", f"no family serves {name}")
    return Outcome(model_type, task, "elsewhere", f"{name} is tried by the family {family.name}")


def clips() -> list[np.ndarray]:
    rng = np.random.default_rng(SEED)
    sounds = []
    for place, seconds in enumerate(SECONDS):
        times = np.arange(int(seconds * RATE))
        sound = 0.4 * np.sin(times * (0.02 + place * 0.03)) + 0.1 * rng.standard_normal(len(times))
        sounds.append(sound.astype(np.float32))
    return sounds


def cover_recognition(model_type: str) -> Outcome:
    build = RECOGNIZERS.get(model_type) or (build_ctc if model_type in CTC_TYPES else None)
    if build is None:
        return _unclaimed(model_type, "speech to text", _RECOGNITION)
    return _judge(model_type, "speech to text", build, _expected_texts, _texts, _same_texts)


def cover_synthesis(model_type: str) -> Outcome:
    task = "text to speech"
    if (family := STREAMED.get(model_type)) is not None:
        return _verify(model_type, task, family)
    build = SPEAKERS.get(model_type)
    if build is None:
        return _unclaimed(model_type, task, _SYNTHESIS)
    return _judge(model_type, task, build, _expected_samples, _samples, _same_samples)


def _judge(
    model_type: str,
    task: str,
    build: Callable[[Path, str], None],
    expect: Callable[[Path], list[Any]],
    serve: Callable[[Path], list[Any]],
    same: Callable[[list[Any], list[Any]], str],
) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        try:
            for seed in range(_MAX_SEEDS):
                folder = Path(place) / str(seed) / model_type
                folder.mkdir(parents=True)
                torch.manual_seed(seed)
                build(folder, model_type)
                expected = expect(folder)
                if not same(expected, expected):  # else other weights: these give the same to everything, or nothing
                    break
        except Exception as error:  # whatever a type needs that is not here
            return Outcome(model_type, task, "unbuilt", _message(error))
        try:
            found = serve(folder)
        except OmniError as error:
            return Outcome(model_type, task, "refused", _message(error))
        except Exception as error:  # this is what the tool looks for
            return Outcome(model_type, task, "crashed", _message(error))
    difference = same(expected, found)
    return Outcome(model_type, task, "wrong" if difference else "exact", difference)


def _verify(model_type: str, task: str, family: str) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        folder, entry = Path(place) / family, REGISTRY.family(family)
        if entry.tiny is None or entry.verify is None:
            return Outcome(model_type, task, "unbuilt", f"the family {family} has no comparison")
        entry.tiny(folder, seed=0)
        rows: Any = entry.verify(OmniRunner(folder), cases=2, seed=0, progress=lambda *_: None)
    wrong = [row for row in rows if not row.ok]
    reason = "" if not wrong else f"{wrong[0].quantity} of {wrong[0].case} differs by {wrong[0].difference:.1e}"
    return Outcome(model_type, task, "wrong" if wrong else "exact", reason)


# ------------------------------------------------------------------------------------------------- speech to text


def _model_of(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()


def _expected_texts(folder: Path) -> list[str]:
    model, processor, texts = _model_of(folder), transformers.AutoProcessor.from_pretrained(folder), []
    for clip in clips():
        if model.config.model_type in LISTENERS:
            with torch.inference_mode():
                texts.append(transcribe(model, processor, clip, "en", "en").strip())
            continue
        inputs = processor.feature_extractor(clip, sampling_rate=RATE, return_tensors="pt")
        with torch.inference_mode():
            if callable(getattr(model, "generate", None)):
                task = {"task": "transcribe"} if model.config.model_type == "whisper" else {}
                output = model.generate(**inputs, **task)
                text = processor.batch_decode(getattr(output, "sequences", output), skip_special_tokens=True)[0]
            else:
                text = processor.batch_decode(model(**inputs).logits.argmax(dim=-1))[0]
        texts.append(text.strip())
    return texts


def _texts(folder: Path) -> list[str]:
    with Omni(folder, progress=False) as omni:
        prompts = [SpeechPrompt(AudioClip(clip, RATE)) for clip in clips()]
        return [_finished(output).text for output in omni.generate(prompts, progress=False)]


def _same_texts(expected: list[str], found: list[str]) -> str:
    differ = [place for place, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
    if differ:
        return f"{len(differ)} of {len(expected)} texts differ"
    if len(expected) > 1 and len(set(expected)) == 1:
        return "all texts are the same, so nothing was compared" if any(expected) else _EMPTY
    return "" if any(expected) else _EMPTY


# ------------------------------------------------------------------------------------------------- text to speech


def _expected_samples(folder: Path) -> list[np.ndarray]:
    from speech_checkpoints import speak

    model, tokenizer = _model_of(folder), transformers.AutoTokenizer.from_pretrained(folder)
    waves = []
    for text in TEXTS:
        transformers.set_seed(SEED)
        with torch.inference_mode():
            waves.append(speak(model, tokenizer, folder, text).reshape(-1).numpy())
    return waves


def _samples(folder: Path) -> list[np.ndarray]:
    with Omni(folder, progress=False) as omni:
        outputs = omni.generate(list(TEXTS), CodecParams(seed=SEED), progress=False)
        return [np.zeros(0) if _finished(one).audio is None else one.audio.samples for one in outputs]  # type: ignore[union-attr]


def _same_samples(expected: list[np.ndarray], found: list[np.ndarray]) -> str:
    for ours, theirs in zip(found, expected, strict=True):
        if len(ours) != len(theirs):
            return f"{len(ours)} samples instead of {len(theirs)}"
        if not len(theirs) or not np.abs(ours - theirs).max() <= TOLERANCE:
            return f"samples differ by {np.abs(ours - theirs).max(initial=0):.1e}"
        if np.abs(theirs).max() < _AUDIBLE:
            return "there is silence, so nothing was compared"
    first = expected[0]
    if len(expected) > 1 and all(len(one) == len(first) and np.abs(one - first).max() < _DISTINCT for one in expected):
        return "all texts sound alike, so nothing was compared"
    return ""


def _finished(output: Any) -> Any:
    if output.error is not None:
        raise output.error
    return output


# ------------------------------------------------------------------------------------------------- output


def _message(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if isinstance(error, OmniError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= 240 else text[:239] + "…"


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "# Speech models of transformers",
        "",
        "This page comes from `python tools/speech_coverage.py --all --markdown docs/speech_models.md`: small random",
        "checkpoints of each type, several clips or texts at once, compared with transformers one at a time",
        "([how they are served](speech.md)). Higgs Audio and Granite Speech 5 were judged with the Python part of",
        "`torchaudio` 2.11.",
        "",
        f"transformers {transformers.__version__}, float32.",
    ]
    for task in ("speech to text", "text to speech"):
        mine = [outcome for outcome in outcomes if outcome.task == task]
        counts = Counter(outcome.state for outcome in mine)
        exact = ", ".join(f"`{outcome.model_type}`" for outcome in mine if outcome.state == "exact")
        lines += ["", f"## {task.capitalize()}", "", ", ".join(f"{counts[state]} {state}" for state in STATES) + "."]
        lines += ["", f"Exact: {exact}.", "", "| model_type | state | reason |", "| --- | --- | --- |"]
        lines += [
            f"| {one.model_type} | {one.state} | {one.reason.replace('|', chr(92) + '|').replace('<', '&lt;')} |"
            for one in mine
            if one.state != "exact"
        ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; none: --all")
    parser.add_argument("--all", action="store_true", help="every speech type of the installed transformers")
    parser.add_argument("--markdown", type=Path, help="write the page of the documentation")
    options = parser.parse_args(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    outcomes = []
    for types, cover in ((types_of(_RECOGNITION), cover_recognition), (types_of(_SYNTHESIS), cover_synthesis)):
        for model_type in types:
            if options.all or model_type in options.types:
                outcomes.append(cover(model_type))
                one = outcomes[-1]
                print(f"{one.model_type:<34} {one.task:<15} {one.state:<8} {one.reason}", flush=True)
    print(", ".join(f"{count} {state}" for state, count in Counter(one.state for one in outcomes).items()))
    if options.markdown is not None:
        options.markdown.write_text(as_markdown(outcomes), encoding="utf-8")
    return int(any(one.state in ("wrong", "crashed") for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
