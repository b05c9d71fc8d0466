"""Draw docs/images/gallery.webp and docs/images/denoising.png with small random checkpoints of every family.

    python tools/make_gallery.py

The weights are random, so the pictures are patterns. They show that every family draws, not what it can draw.
The same pictures come out every time; another torch may change the last bit of a pixel.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from rich.progress import track

from omnistage import DiffusionParams, Omni
from omnistage.cli.model_runner import OmniRunner
from omnistage.core.types import DiffusionInput
from omnistage.engines.diffusion.convergence import expected_picture, remember_expected
from omnistage.models._diffusers.verify import load_components
from omnistage.models.registry import REGISTRY

IMAGES = Path(__file__).parents[1] / "docs" / "images"
GALLERY, DENOISING = IMAGES / "gallery.webp", IMAGES / "denoising.png"
PROMPT, SEED = "a lighthouse on a hill", 1
SIDE, STEPS = 128, 8
FAMILIES = {
    "stable_diffusion_3": "Stable Diffusion 3",
    "flux": "FLUX.1",
    "flux2": "FLUX.2 klein",
    "qwen_image": "Qwen-Image",
    "z_image": "Z-Image",
    "glm_image": "GLM-Image",
    "wan": "Wan, two frames",
}
COURSE_FAMILY, COURSE_SIDE = "qwen_image", 80
GAP, LABEL, INK, PAPER = 8, 22, (31, 41, 51), (255, 255, 255)


def pictures(folder: Path) -> list[np.ndarray]:
    """Two pictures of one prompt; of a video its first and last frame."""
    with Omni(folder, device="cpu", dtype="float32", progress=False) as omni:
        video = "video" in omni.modalities
        params = DiffusionParams(width=SIDE, height=SIDE, steps=STEPS, seed=SEED, n=1 if video else 2)
        if video:
            params = params.merged(DiffusionParams(num_frames=9))
        [drawn] = omni.generate(PROMPT, params, progress=False)
    return [drawn.video.frames[0], drawn.video.frames[-1]] if video else [image.pixels for image in drawn.images]


@torch.inference_mode()
def course(folder: Path) -> list[list[np.ndarray]]:
    """After every step of one picture: its latents as they are, decoded, and the preview, which is what they head for.

    The components are driven by hand, for a running pipeline drops previews that newer ones have overtaken.
    """
    encoder, denoiser, decoder = load_components(OmniRunner(folder))
    size = {"width": COURSE_SIDE, "height": COURSE_SIDE}
    params = DiffusionParams(**size, steps=STEPS, seed=SEED, negative_prompt=" ")
    payload = DiffusionInput(PROMPT)
    condition = encoder.condition(payload, params, encoder.encode(encoder.jobs(payload, params)))
    lane = denoiser.open(condition, params, torch.Generator().manual_seed(SEED))

    def decoded(latents: torch.Tensor) -> np.ndarray:
        own, lane.latents = lane.latents, latents
        [pixels] = decoder.decode([denoiser.result(lane)], **size, num_frames=1)
        lane.latents = own
        return pixels

    shown: list[list[np.ndarray]] = []
    while not lane.done:
        before = lane.latents
        denoiser.advance(lane, denoiser.forward(denoiser.rows(lane)))
        remember_expected(lane, before)
        shown.append([decoded(lane.latents), decoded(expected_picture(lane))])
    return shown


def sheet(columns: dict[str, list[np.ndarray]]) -> Image.Image:
    """Columns of pictures of one size, each under its label."""
    side, rows = len(next(iter(columns.values()))[0]), max(len(column) for column in columns.values())
    cell = side + GAP
    made = Image.new("RGB", (len(columns) * cell + GAP, LABEL + rows * cell + GAP), PAPER)
    draw, font = ImageDraw.Draw(made), ImageFont.load_default(size=12)
    for across, (label, column) in enumerate(columns.items()):
        left = GAP + across * cell
        draw.text((left + side / 2, GAP), label, fill=INK, font=font, anchor="mt")
        for down, pixels in enumerate(column):
            made.paste(Image.fromarray(np.ascontiguousarray(pixels)), (left, LABEL + GAP + down * cell))
    return made


def main() -> None:
    torch.set_num_threads(1)
    IMAGES.mkdir(parents=True, exist_ok=True)
    columns: dict[str, list[np.ndarray]] = {}
    with tempfile.TemporaryDirectory() as place:
        for name, title in track(FAMILIES.items(), "drawing"):
            folder = Path(place) / name
            REGISTRY.family(name).tiny(folder, seed=0)
            columns[title] = pictures(folder)
        steps = course(Path(place) / COURSE_FAMILY)
    sheet(columns).save(GALLERY, quality=80, method=6)
    sheet({f"step {number}": pair for number, pair in enumerate(steps, start=1)}).save(DENOISING, optimize=True)
    for path in (GALLERY, DENOISING):
        print(f"wrote {path.relative_to(IMAGES.parents[1])}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
