"""Text to image on this machine's CPU: this engine against diffusers, in one run, as ratios.

    python benchmarks/diffusion.py [--families stable_diffusion_3 flux] [--out results.json]

Small random checkpoints. Eight requests that arrive one after the other against diffusers called one by one; one
request alone against diffusers; every cache against no cache, with what it costs in quality (PSNR).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from omnistage import AsyncOmni, Omni
from omnistage.core.errors import OmniError
from omnistage.core.params import DiffusionParams
from omnistage.models._diffusers.loading import diffusers
from omnistage.models.registry import REGISTRY

REQUESTS = 8
CACHES = ("first_block:0.05", "first_block:0.1", "first_block:0.2", "taylorseer:3", "mag:0.06", "faster:2", "pyramid:2")
PROMPTS = [f"a {thing} on the {place}" for thing in ("cat", "boat", "tree", "house") for place in ("hill", "sea")]


def reference_call(pipe: Any, prompt: str, params: DiffusionParams) -> np.ndarray:
    """The stock pipeline on the same request."""
    taken = {
        "prompt": prompt,
        "width": params.width,
        "height": params.height,
        "num_inference_steps": params.steps,
        "generator": torch.Generator().manual_seed(params.seed or 0),
        "output_type": "np",
    }
    if params.guidance is not None:
        taken["guidance_scale"] = params.guidance
    return np.asarray(pipe(**taken).images[0])


async def staggered(omni: AsyncOmni, params: list[DiffusionParams], gap: float) -> float:
    """Seconds until the last of several requests, one every `gap` seconds, has finished."""

    async def one(prompt: str, own: DiffusionParams, delay: float) -> None:
        await asyncio.sleep(delay)
        async for _ in omni.generate(prompt, own):
            pass

    start = time.perf_counter()
    await asyncio.gather(*(one(PROMPTS[i], own, i * gap) for i, own in enumerate(params)))
    return time.perf_counter() - start


def clock(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def throughput(folder: Path, pipe: Any, base: DiffusionParams, rounds: int) -> dict[str, float]:
    """Ratios of diffusers' time to ours, the two run alternately; medians over the rounds."""
    alone: list[float] = []
    many: list[float] = []
    params = [base.merged(DiffusionParams(seed=i)) for i in range(REQUESTS)]

    async def run() -> None:
        async with AsyncOmni(folder, device="cpu", dtype="float32", progress=False) as omni:
            await staggered(omni, params[:1], 0.0)
            reference_call(pipe, PROMPTS[0], params[0])  # both warm
            for _ in track(range(rounds), "measuring", transient=True):
                # A different text each time: the cached embedding of a repeated one would flatter us.
                theirs = clock(lambda: reference_call(pipe, PROMPTS[0], params[0]))
                omni.orchestrator.stages["encode"].cache.clear()  # type: ignore[attr-defined]
                ours = await staggered(omni, params[:1], 0.0)
                alone.append(theirs / ours)
                gap = theirs / 4
                omni.orchestrator.stages["encode"].cache.clear()  # type: ignore[attr-defined]
                together = await staggered(omni, params, gap)
                one_by_one = clock(lambda: [reference_call(pipe, PROMPTS[i], p) for i, p in enumerate(params)])
                many.append(one_by_one / together)

    asyncio.run(run())
    return {"alone": statistics.median(alone), "staggered": statistics.median(many)}


def caches(folder: Path, base: DiffusionParams, rounds: int) -> list[dict[str, Any]]:
    """Speed and PSNR of each cache against none, one request at a time."""
    rows: list[dict[str, Any]] = []
    params = base.merged(DiffusionParams(seed=0))
    times, pictures = {}, {}
    for spec in (None, *CACHES):
        overrides = () if spec is None else (f"denoise.cache={spec}",)
        try:
            with Omni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
                draw = lambda omni=omni: omni.generate(PROMPTS[:1], params, progress=False)  # noqa: E731
                draw()
                times[spec] = statistics.median(clock(draw) for _ in range(rounds))
                pictures[spec] = [output.images[0].pixels.astype(np.float64) for output in draw()]
        except OmniError as error:
            rows.append({"cache": spec, "note": str(error)})
            continue
        if spec is not None:
            errors = [np.square(a - b).mean() for a, b in zip(pictures[spec], pictures[None], strict=True)]
            psnr = 10 * np.log10(255**2 / max(float(np.mean(errors)), 1e-12))
            rows.append({"cache": spec, "speed": times[None] / times[spec], "psnr": float(min(psnr, 120.0))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=["stable_diffusion_3", "flux"])
    parser.add_argument("--scale", type=float, default=0.0)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-caches", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    console = Console()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in options.families:
            results[name] = measure(name, Path(place) / name, options, console)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


def measure(name: str, folder: Path, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    family = REGISTRY.family(name)
    if family.tiny is None:
        raise SystemExit(f"{name} has no small checkpoint")
    folder.mkdir()
    family.tiny(folder, seed=0, scale=options.scale)
    pipe = diffusers().DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    base = DiffusionParams(width=options.size, height=options.size, steps=options.steps, guidance=4.0)
    result: dict[str, Any] = throughput(folder, pipe, base, options.rounds)
    console.print(
        f"{name}: {REQUESTS} staggered requests {result['staggered']:.2f} times diffusers one by one (at least 1.5); "
        f"alone {1 / result['alone']:.3f} of its time (at most 1.05)"
    )
    if not options.no_caches:
        result["caches"] = caches(folder, base, options.rounds)
        table = Table("cache", "times as fast", "PSNR, dB", title=f"{name}: caches against none")
        for row in result["caches"]:
            shown = (f"{row['speed']:.2f}", f"{row['psnr']:.1f}") if "speed" in row else ("-", row["note"][:60])
            table.add_row(row["cache"], *shown)
        console.print(table)
    return result


if __name__ == "__main__":
    main()
