"""Streams text and speech: prints each chunk with its time, writes the audio chunk by chunk.

python examples/stream_speech.py out/tiny-qwen2.5-omni "Tell me a story" --max-tokens 24 --max-codes 160
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import soundfile

from omnistage import AsyncOmni, OmniError


async def speak(args: argparse.Namespace) -> None:
    params: dict[str, dict[str, object]] = {"thinker": {}, "talker": {}}
    if args.max_tokens is not None:
        params["thinker"]["max_tokens"] = args.max_tokens
    if args.max_codes is not None:
        params["talker"]["max_tokens"] = args.max_codes
    file: soundfile.SoundFile | None = None
    async with AsyncOmni(args.model) as omni:
        start = time.perf_counter()
        messages = [{"role": "user", "content": args.prompt}]
        try:
            async for chunk in omni.generate(messages, params, modalities=["text", "audio"], voice=args.voice):
                at = f"{(time.perf_counter() - start) * 1e3:8.1f} ms"
                if chunk.text:
                    print(f"{at}  text   {chunk.text!r}", flush=True)
                if chunk.audio is not None:
                    if file is None:
                        file = soundfile.SoundFile(args.out, "w", chunk.audio.sample_rate, 1)
                    file.write(chunk.audio.samples)
                    seconds = len(chunk.audio.samples) / chunk.audio.sample_rate
                    print(f"{at}  audio  {seconds:.2f} s", flush=True)
                if chunk.final is not None:
                    if chunk.final.error is not None:
                        raise chunk.final.error
                    print(f"{at}  end    {chunk.final.finish_reason}, {chunk.final.usage.audio_seconds:.2f} s in all")
        finally:
            if file is not None:
                file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Qwen2.5-Omni checkpoint's folder, or its name in the local hub cache")
    parser.add_argument("prompt", nargs="?", default="Tell me a short story.")
    parser.add_argument("--voice", help="default: the model's first")
    parser.add_argument("--max-tokens", type=int, help="maximum tokens of text")
    parser.add_argument("--max-codes", type=int, help="maximum tokens of speech, about 50 per second")
    parser.add_argument("--out", type=Path, default=Path("speech.wav"))
    try:
        asyncio.run(speak(parser.parse_args()))
    except OmniError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
