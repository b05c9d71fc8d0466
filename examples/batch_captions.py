"""Several images in one call: they share batches, and outputs are in the order of the images.

python examples/batch_captions.py out/tiny-qwen2.5-omni --max-tokens 16
python examples/batch_captions.py path/to/model first.png second.jpg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from omnistage import Omni, SamplingParams


def pictures() -> dict[str, object]:
    """Three small gradients, one for each colour."""
    ramp = np.broadcast_to(np.linspace(0, 255, 112).astype(np.uint8)[:, None], (112, 112))
    images: dict[str, object] = {}
    for channel, name in enumerate(("red", "green", "blue")):
        images[name] = np.zeros((112, 112, 3), np.uint8)
        images[name][:, :, channel] = ramp
    return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint's folder, or a name in the local hub cache")
    parser.add_argument("images", nargs="*", type=Path, help="image files; default: three generated ones")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    images = {path.name: path for path in args.images} or pictures()

    conversations = [
        [
            {
                "role": "user",
                "content": [{"type": "image", "image": image}, {"type": "text", "text": "Describe it in a sentence."}],
            }
        ]
        for image in images.values()
    ]
    with Omni(args.model) as omni:
        outputs = omni.chat(conversations, SamplingParams(max_tokens=args.max_tokens, temperature=0.0))
    for name, output in zip(images, outputs, strict=True):
        print(f"{name}: {output.error or output.text!r}")


if __name__ == "__main__":
    main()
