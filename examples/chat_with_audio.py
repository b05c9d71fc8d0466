"""The first example of the README: text and audio in, text and speech out.

python examples/chat_with_audio.py out/tiny-qwen2.5-omni --set thinker.max_tokens=24 --set talker.max_tokens=96
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

import numpy as np

from omnistage import Omni
from omnistage.media import encode_wav


def short_sound() -> bytes:
    """Half a second of a rising tone, as a WAV file."""
    t = np.arange(8000) / 16_000
    return encode_wav(0.3 * np.sin(2 * np.pi * (300 + 400 * t) * t), 16_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint's folder, or a name in the local hub cache")
    parser.add_argument("--audio", type=Path, help="a WAV file; default: a short tone")
    parser.add_argument("--out", type=Path, default=Path("answer.wav"), help="file for the speech")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `omnistage config`")
    args = parser.parse_args()
    b64 = base64.b64encode(args.audio.read_bytes() if args.audio else short_sound()).decode()

    omni = Omni(args.model, overrides=args.set)
    out = omni.chat(
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What do you hear?"},
                    {"type": "input_audio", "input_audio": {"data": b64, "format": "wav"}},
                ],
            }
        ],
        modalities=["text", "audio"],
    )
    print(out.text)
    print(f"wrote {out.audio.save(args.out)}: {out.audio.seconds:.2f} s at {out.audio.sample_rate} Hz")
    print(out.trace)


if __name__ == "__main__":
    main()
