"""The starter in one go: a question answered in text, speech and a picture, then a spoken question heard and answered.

    omnistage pull starter
    python examples/starter_tour.py starter --out out

Ends with exit code 3 where the model is not here.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from omnistage.cli.terminal import Terminal, printable, timeline
from omnistage.core.errors import CheckpointError, OmniError
from omnistage.models.registry import REGISTRY

QUESTION = "Tell me about a blue butterfly."
SPOKEN = "What is the capital of Japan?"
NOT_HERE = 3


def ask(omni, args: argparse.Namespace, terminal: Terminal) -> None:
    """One request, all that the model gives."""
    from omnistage import DiffusionParams, SamplingParams

    # Whole sentences, and few of them: after 32 tokens the next one that ends is the last.
    briefly = {"min_tokens": min(32, args.max_tokens), "stop": (". ", '." ', "\n"), "include_stop_str_in_output": True}
    params = {
        "think": SamplingParams(max_tokens=args.max_tokens, temperature=0.0, **briefly),
        "draw": DiffusionParams(seed=args.seed),
    }
    messages = [{"role": "user", "content": args.question}]
    answer = omni.chat(messages, params, modalities=["text", "audio", "image"])
    text = printable(answer.text).strip()
    print(f"you      {args.question}")
    print(f"starter  {text}\n")
    (args.out / "answer.txt").write_text(text + "\n", encoding="utf-8")
    print(f"  {args.out / 'answer.txt'}   what it wrote")
    if answer.audio is not None:
        answer.audio.save(args.out / "answer.wav")
        print(f"  {args.out / 'answer.wav'}   the same, spoken: {answer.audio.seconds:.1f} s")
    if answer.image is not None:
        picture = answer.image.save(args.out / "picture.png")
        print(f"  {picture}  what it drew, {answer.image.width} x {answer.image.height} pixels")
        terminal.show(answer.image.to_pil())
    print(f"\nWhen each stage ran, in one process, for this one request:\n\n{timeline(answer.trace)}\n")


def listen(omni, args: argparse.Namespace) -> None:
    """A question in its own voice, heard again and answered."""
    from omnistage import SamplingParams
    from omnistage.media.audio import decode_audio

    said = omni.chat(omni.processor.read_aloud(args.spoken), modalities=["audio"]).audio
    question = said.save(args.out / "question.wav")
    print(f"you      {question}: {said.seconds:.1f} s of speech, made from {args.spoken!r}")
    heard = omni.processor.transcribe(decode_audio(question, omni.media_limits, omni.processor.audio_sample_rate))
    print(f"heard    {heard}")
    messages = [{"role": "user", "content": [{"type": "audio", "audio": str(question)}]}]
    answer = omni.chat(messages, {"think": SamplingParams(max_tokens=args.max_tokens, temperature=0.0)})
    print(f"starter  {printable(answer.text)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="starter")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--spoken", default=SPOKEN, help="a second question, which is spoken and heard")
    parser.add_argument("--max-tokens", type=int, default=70)
    parser.add_argument("--seed", type=int, default=0, help="same seed, same picture")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TQDM_DISABLE", "1")  # loading has a bar of its own
    try:
        from omnistage.config.checkpoint import find_model

        find_model(args.model, REGISTRY)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_HERE
    try:
        from omnistage import Omni

        # Room for one conversation is enough here, and clearing a gigabyte for many takes its time.
        with Omni(args.model, overrides=("think.kv_memory=128MiB",)) as omni:
            ask(omni, args, Terminal.here())
            if "audio" in omni.processor.input_modalities:
                listen(omni, args)
            else:
                print("It has no ears here: its speech recogniser comes from npm. Install npm, run the same again.")
    except OmniError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\nGo on with: omnistage chat starter, or omnistage serve starter for the page with microphone and speech")
    return 0


if __name__ == "__main__":
    sys.exit(main())
