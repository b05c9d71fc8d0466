"""What DiT caches save and cost on real weights: the starter draws its held-out captions with each of them.

    python benchmarks/starter_caches.py [--prompts 16] [--out results.json]

Against the same picture without a cache: how many times as fast the denoising is (processor time of one thread), and
how far the pixels are (PSNR, mean and worst). Fewer steps without a cache stand beside them, for they save as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omnistage_starter.draw import PatchDecoder, PixelDenoiser
from rich.console import Console
from rich.progress import track
from rich.table import Table

from omnistage import DiffusionParams, Omni
from omnistage.cli.model_runner import OmniRunner
from omnistage.config import DiffusionBudget
from omnistage.core.types import Condition, Latents, Modality, RequestInfo, StageInput
from omnistage.engines.diffusion.stage import DenoiseStage

CAPTIONS = Path(__file__).parents[1] / "training" / "held_out.txt"
STEPS, SIZE = 20, 96
CACHES = ("first_block:0.05", "first_block:0.1", "first_block:0.15", "first_block:0.2", "first_block:0.3")
OTHERS = ("taylorseer:2", "taylorseer:3", "faster:2", "pyramid:2")
FEWER_STEPS = (18, 16, 14, 10)


def conditions_of(captions: list[str]) -> list[Condition]:
    """What the language model makes of the captions, as the draw stage gets it."""
    conditions: list[Condition] = []
    with Omni("starter", progress=False) as omni:
        stage: Any = omni.orchestrator.stages["draw"]
        submit = stage.submit

        def record(stage_input: StageInput) -> None:
            assert isinstance(stage_input.payload, Condition)
            conditions.append(stage_input.payload)
            submit(stage_input)

        stage.submit = record
        for caption in captions:
            message = [{"role": "user", "content": f"Draw {caption}."}]
            omni.chat(message, {"draw": DiffusionParams(steps=1)}, modalities=["image"])
    return conditions


def draw(
    denoiser: PixelDenoiser, conditions: list[Condition], steps: int, cache: str | None
) -> tuple[list[float], list[np.ndarray]]:
    """Processor seconds of each picture, and the pictures."""
    seconds, latents = [], []
    stage = DenoiseStage("draw", denoiser, DiffusionBudget(cache=cache))
    for seed, condition in enumerate(conditions):
        params = DiffusionParams(width=SIZE, height=SIZE, steps=steps, guidance=3.0, seed=seed)
        start = time.thread_time()
        stage.submit(StageInput(RequestInfo(str(seed), frozenset({Modality.IMAGE})), params, condition))
        latents += [chunk.payload.picture for chunk in stage.drain() if isinstance(chunk.payload, Latents)]
        seconds.append(time.thread_time() - start)
    stage.close()
    return seconds, PatchDecoder().decode(latents, width=SIZE, height=SIZE, num_frames=1)


def psnr(picture: np.ndarray, reference: np.ndarray) -> float:
    error = float(np.square(picture.astype(np.float64) - reference.astype(np.float64)).mean())
    return float(min(10 * np.log10(255**2 / max(error, 1e-12)), 120.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--caches", nargs="*", default=[*CACHES, *OTHERS])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    conditions = conditions_of(CAPTIONS.read_text(encoding="utf-8").splitlines()[: options.prompts])
    loaded = OmniRunner(Path("starter")).load_component("draw")
    assert isinstance(loaded, PixelDenoiser)
    draw(loaded, conditions[:1], STEPS, None)
    plain, expected = draw(loaded, conditions, STEPS, None)
    ways: dict[str, tuple[int, str | None]] = {f"{steps} steps": (steps, None) for steps in FEWER_STEPS}
    ways |= {cache: (STEPS, cache) for cache in options.caches}
    title = f"{len(conditions)} pictures of {STEPS} steps, {statistics.median(plain):.3f} s each"
    table, rows = Table("", "times as fast", "PSNR, dB", "worst", title=title), {}
    for name, (steps, cache) in track(ways.items(), "drawing"):
        seconds, pictures = draw(loaded, conditions, steps, cache)
        quality = [psnr(picture, reference) for picture, reference in zip(pictures, expected, strict=True)]
        speed = statistics.median(before / after for before, after in zip(plain, seconds, strict=True))
        rows[name] = {"speed": speed, "psnr": statistics.mean(quality), "worst": min(quality)}
        table.add_row(name, f"{speed:.2f}", f"{rows[name]['psnr']:.1f}", f"{rows[name]['worst']:.1f}")
    Console().print(table)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
