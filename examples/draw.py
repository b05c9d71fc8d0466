"""Text to image: several prompts in one call with progress, or one prompt with previews.

python examples/draw.py out/tiny-flux "A lighthouse at dusk" "A fox in the snow" --size 64 --steps 8
python examples/draw.py out/tiny-flux "A lighthouse at dusk" --size 64 --steps 8 --preview-every 2
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from PIL import Image

from omnistage import AsyncOmni, DiffusionParams, Omni, OmniError


def draw(args: argparse.Namespace, params: DiffusionParams) -> None:
    """All prompts in one call: their denoising steps share forwards. On a terminal a bar shows the steps."""
    with Omni(args.model) as omni:
        for number, output in enumerate(omni.generate(args.prompts, params)):
            if output.error is not None:
                raise output.error
            for made in (*output.images, *output.videos):
                suffix = "mp4" if output.videos else "png"
                path = made.save(args.out / f"picture-{number}-{made.metadata['seed']}.{suffix}")
                print(f"{path}: {args.prompts[number]}")


async def watch(args: argparse.Namespace, params: DiffusionParams) -> None:
    """The first prompt as a stream. A preview is an estimate of the final picture; some may be skipped."""
    async with AsyncOmni(args.model) as omni:
        shown = 0
        async for chunk in omni.generate(args.prompts[0], params):
            if chunk.progress is not None:
                print(f"step {chunk.progress.step} of {chunk.progress.steps}", flush=True)
            if chunk.image is not None and chunk.image.preview:
                path = args.out / f"preview-{shown}.png"
                Image.fromarray(chunk.image.pixels).save(path)
                print(f"{path}: a preview of picture {chunk.image.index}", flush=True)
                shown += 1
            if chunk.final is not None:
                if chunk.final.error is not None:
                    raise chunk.final.error
                for made in chunk.final.images:
                    path = made.save(args.out / f"picture-{made.metadata['seed']}.png")
                    print(f"{path}: the picture")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint's folder, or a name in the local hub cache")
    parser.add_argument("prompts", nargs="*", default=["A lighthouse at dusk"])
    parser.add_argument("--size", type=int, help="width and height in pixels; default: the model's")
    parser.add_argument("--steps", type=int, help="default: the model's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=1, help="pictures of each prompt; picture i starts from seed + i")
    parser.add_argument("--preview-every", type=int, default=0, help="stream, with a preview every N steps")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    asked = {"width": args.size, "height": args.size, "steps": args.steps, "seed": args.seed, "n": args.n}
    given = {name: value for name, value in asked.items() if value is not None}
    try:
        params = DiffusionParams.parse({**given, "preview_every": args.preview_every})
        if args.preview_every:
            asyncio.run(watch(args, params))
        else:
            draw(args, params)
    except OmniError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
