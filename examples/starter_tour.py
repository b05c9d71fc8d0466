"""A tour of the starter: a question answered in text, speech and an image, then a spoken question answered.

    omnistage pull starter
    python examples/starter_tour.py starter --out out

Ends with exit code 3 where the model is not installed or was not pulled.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from omnistage.cli.terminal import Terminal, printable, timeline
from omnistage.core.errors import CheckpointError, MissingDependencyError, OmniError
from omnistage.models.registry import REGISTRY

QUESTION = "Tell me about a blue butterfly."
SPOKEN = "What is the capital of Japan?"
EXIT_NO_MODEL = 3


def ask(omni, args: argparse.Namespace, terminal: Terminal) -> None:
    """One request for text, speech and an image."""
    from omnistage import DiffusionParams, SamplingParams

    # Stop at the first end of a sentence after 32 tokens.
    stop = {"min_tokens": min(32, args.max_tokens), "stop": (". ", '." ', "\n"), "include_stop_str_in_output": True}
    params = {
        "think": SamplingParams(max_tokens=args.max_tokens, temperature=0.0, **stop),
        "draw": DiffusionParams(seed=args.seed),
    }
    messages = [{"role": "user", "content": args.question}]
    answer = omni.chat(messages, params, modalities=["text", "audio", "image"])
    text = printable(answer.text).strip()
    print(f"you      {args.question}")
    print(f"starter  {text}\n")
    (args.out / "answer.txt").write_text(text + "\n", encoding="utf-8")
    print(f"  {args.out / 'answer.txt'}   the answer")
    if answer.audio is not None:
        answer.audio.save(args.out / "answer.wav")
        print(f"  {args.out / 'answer.wav'}   the same as speech: {answer.audio.seconds:.1f} s")
    if answer.image is not None:
        picture = answer.image.save(args.out / "picture.png")
        print(f"  {picture}  the image, {answer.image.width} x {answer.image.height} pixels")
        terminal.show(answer.image.to_pil())
    print(f"\nWhen each stage ran for this request, in one process:\n\n{timeline(answer.trace)}\n")


def listen(omni, args: argparse.Namespace) -> None:
    """A question in the model's own voice, transcribed and answered."""
    from omnistage import SamplingParams
    from omnistage.media.audio import decode_audio

    speech = omni.chat(omni.processor.read_aloud(args.spoken), modalities=["audio"]).audio
    question = speech.save(args.out / "question.wav")
    print(f"you      {question}: {speech.seconds:.1f} s of speech, synthesised from {args.spoken!r}")
    heard = omni.processor.transcribe(decode_audio(question, omni.media_limits, omni.processor.audio_sample_rate))
    print(f"heard    {heard}")
    messages = [{"role": "user", "content": [{"type": "audio", "audio": str(question)}]}]
    answer = omni.chat(messages, {"think": SamplingParams(max_tokens=args.max_tokens, temperature=0.0)})
    print(f"starter  {printable(answer.text)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="starter")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--spoken", default=SPOKEN, help="a second question, which is synthesised and transcribed")
    parser.add_argument("--max-tokens", type=int, default=70)
    parser.add_argument("--seed", type=int, default=0, help="same seed, same picture")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TQDM_DISABLE", "1")  # Omni shows its own progress
    try:
        from omnistage.config.checkpoint import find_model

        find_model(args.model, REGISTRY)
    except (CheckpointError, MissingDependencyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NO_MODEL
    try:
        from omnistage import Omni

        # Memory for one conversation is enough here; allocating a gigabyte takes longer.
        with Omni(args.model, overrides=("think.kv_memory=128MiB",)) as omni:
            ask(omni, args, Terminal.here())
            if "audio" in omni.processor.input_modalities:
                listen(omni, args)
            else:
                print("Speech recognition is missing: it comes from npm. Install npm and run the same command again.")
    except OmniError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\nNext: omnistage chat starter, or omnistage serve starter for the page with microphone and speech")
    return 0


if __name__ == "__main__":
    sys.exit(main())
