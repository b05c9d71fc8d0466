"""Stable Diffusion 3, FLUX and Qwen-Image at their true shapes with random weights on the GPU: diffusers against ours.

    python benchmarks/gpu/diffusion.py --out results.json

One process, the same weights and prompt embeddings. By default 512 px and 16 requests at once: diffusers one by one,
then ours plain, with compiled blocks, and with CUDA graphs besides, each with the time that its start takes; a lone
request, too. `--caches` measures caches and what they cost in quality. About two minutes on an H200. To try it out on
a CPU: --models sd3 --size 64 --steps 2 --layers 0.05 --requests 3 --rounds 1 --no-compile.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.config.graph import graph_of
from omnistage.config.schema import DiffusionBudget, PipelineConfig
from omnistage.config.yamlio import load_file
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, PromptEncoder, Tensors
from omnistage.engines.diffusion.decode import DecodeStage
from omnistage.engines.diffusion.encode import EncodeStage
from omnistage.engines.diffusion.stage import DenoiseStage
from omnistage.models._diffusers.base import VaeDecoder
from omnistage.models._diffusers.bridges import denoise2decode, encode2denoise
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.processor import DrawingProcessor
from omnistage.models.flux import FAMILY as FLUX
from omnistage.models.flux import components as flux
from omnistage.models.qwen_image import FAMILY as QWEN
from omnistage.models.qwen_image import components as qwen
from omnistage.models.stable_diffusion_3 import FAMILY as SD3
from omnistage.models.stable_diffusion_3 import components as sd3
from omnistage.omni import AsyncOmni

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"compile": False, "cuda_graphs": False},
    "compiled": {"compile": True, "cuda_graphs": False},
    "compiled, graphs": {"compile": True, "cuda_graphs": True},
}


class GivenEncoder(PromptEncoder):
    """Hands out embeddings that were made beforehand: text encoders are not what is measured."""

    def __init__(self, positive: Tensors, negative: Tensors | None) -> None:
        self._tensors = (positive, negative)

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        pass

    def jobs(self, payload: DiffusionInput, params: DiffusionParams) -> Sequence[EncodeJob]:
        return ()

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        return []

    def condition(self, payload: DiffusionInput, params: DiffusionParams, encoded: Sequence[Tensors]) -> Condition:
        return Condition(*self._tensors, width=params.width or 0, height=params.height or 0)


def _autoencoder(scaling_factor: float, shift_factor: float) -> Any:
    return diffusers().AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
    )


class StableDiffusionCase:
    """Stable Diffusion 3 medium. Classifier-free guidance: two rows a picture, in diffusers one batch of two."""

    name = "Stable Diffusion 3"
    family, denoiser, decoder = SD3, sd3.Denoiser, VaeDecoder

    def __init__(self, device: torch.device, dtype: torch.dtype, layers: float) -> None:
        package = diffusers()
        with torch.device(device), _default(dtype):
            transformer = package.SD3Transformer2DModel(
                num_layers=max(1, round(24 * layers)),
                num_attention_heads=24,
                caption_projection_dim=1536,
                pos_embed_max_size=192,
            )
            vae = _autoencoder(1.5305, 0.0609)
        scheduler = package.FlowMatchEulerDiscreteScheduler(shift=3.0)
        texts = (None,) * 6
        self.pipe = package.StableDiffusion3Pipeline(transformer.eval(), scheduler, vae.eval(), *texts)
        draw = _normal(device, dtype)
        self.positive, self.negative = ({"embeds": draw(333, 4096), "pooled": draw(2048)} for _ in range(2))
        self.guidance = {"guidance": 7.0}

    def reference(self, params: DiffusionParams) -> np.ndarray:
        return self.pipe(
            prompt_embeds=self.positive["embeds"][None],
            pooled_prompt_embeds=self.positive["pooled"][None],
            negative_prompt_embeds=self.negative["embeds"][None],
            negative_pooled_prompt_embeds=self.negative["pooled"][None],
            guidance_scale=7.0,
            **_common(params),
        ).images[0]


class FluxCase:
    """Guidance-distilled: one row a picture."""

    name = "FLUX"
    family, denoiser, decoder = FLUX, flux.Denoiser, VaeDecoder

    def __init__(self, device: torch.device, dtype: torch.dtype, layers: float) -> None:
        package = diffusers()
        double, single = max(1, round(19 * layers)), max(1, round(38 * layers))
        with torch.device(device), _default(dtype):
            transformer = package.FluxTransformer2DModel(
                guidance_embeds=True, num_layers=double, num_single_layers=single
            )
            vae = _autoencoder(0.3611, 0.1159)
        scheduler = package.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
        self.pipe = package.FluxPipeline(scheduler, vae.eval(), None, None, None, None, transformer.eval())
        draw = _normal(device, dtype)
        self.positive = {"embeds": draw(512, 4096), "pooled": draw(768)}
        self.negative: Tensors | None = None
        self.guidance = {"guidance": 3.5}

    def reference(self, params: DiffusionParams) -> np.ndarray:
        return self.pipe(
            prompt_embeds=self.positive["embeds"][None],
            pooled_prompt_embeds=self.positive["pooled"][None],
            guidance_scale=3.5,
            **_common(params),
        ).images[0]


class QwenCase:
    """True classifier-free guidance: two rows a picture, two forwards in diffusers."""

    name = "Qwen-Image"
    family, denoiser, decoder = QWEN, qwen.Denoiser, qwen.Decoder

    def __init__(self, device: torch.device, dtype: torch.dtype, layers: float) -> None:
        package = diffusers()
        with torch.device(device), _default(dtype):
            transformer = package.QwenImageTransformer2DModel(num_layers=max(1, round(60 * layers)))
            vae = package.AutoencoderKLQwenImage()
        scheduler = package.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, shift=1.0, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02
        )
        self.pipe = package.QwenImagePipeline(scheduler, vae.eval(), None, None, transformer.eval())
        draw = _normal(device, dtype)
        self.positive = {"embeds": draw(96, 3584)}
        self.negative = {"embeds": draw(96, 3584)}
        self.guidance = {"true_cfg": 4.0}

    def reference(self, params: DiffusionParams) -> np.ndarray:
        positive, negative = self.positive["embeds"][None], self.negative["embeds"][None]
        mask = torch.ones(positive.shape[:2], dtype=torch.long, device=positive.device)
        return self.pipe(
            prompt_embeds=positive,
            prompt_embeds_mask=mask,
            negative_prompt_embeds=negative,
            negative_prompt_embeds_mask=mask,
            true_cfg_scale=4.0,
            **_common(params),
        ).images[0]


def _common(params: DiffusionParams) -> dict[str, Any]:
    return {
        "width": params.width,
        "height": params.height,
        "num_inference_steps": params.steps,
        "generator": torch.Generator().manual_seed(params.seed or 0),
        "output_type": "np",
    }


class _default:
    """`torch.set_default_dtype` for a block: weights are made in the dtype that they are run in."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)


def _normal(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)


def open_ours(case: Any, device: torch.device, dtype: torch.dtype, **budget: Any) -> tuple[AsyncOmni, float]:
    """Our pipeline around the very same modules, and the seconds that its warm-up took."""
    pipeline = PipelineConfig.model_validate(load_file(case.family.pipeline).data["pipeline"])
    given = DiffusionBudget(**budget)
    stages: dict[str, Any] = {
        "encode": EncodeStage("encode", GivenEncoder(case.positive, case.negative), given),
        "denoise": DenoiseStage("denoise", case.denoiser(case.pipe, device, dtype), given),
        "decode": DecodeStage("decode", case.decoder(case.pipe, device, tiling_pixels=0), given),
    }
    warm_up = clock(stages["denoise"].warm_up)
    omni = AsyncOmni.from_parts(
        graph_of(pipeline),
        stages,
        {"denoise": encode2denoise, "decode": denoise2decode},
        {name: stage.params for name, stage in pipeline.stages.items()},
        DrawingProcessor(takes_images=False),
    )
    return omni, warm_up


async def draw(omni: AsyncOmni, params: DiffusionParams, delay: float = 0.0) -> np.ndarray:
    await asyncio.sleep(delay)
    async for item in omni.generate("a picture", params):
        if item.final is not None:
            if item.final.error is not None:
                raise item.final.error
            return item.final.images[0].pixels
    raise RuntimeError("no picture came")


def run_ours(omni: AsyncOmni, params: Sequence[DiffusionParams], gap: float) -> tuple[float, list[np.ndarray]]:
    async def all_of_them() -> list[np.ndarray]:
        return list(await asyncio.gather(*(draw(omni, own, i * gap) for i, own in enumerate(params))))

    synchronize()
    start = time.perf_counter()
    pictures = asyncio.run(all_of_them())
    return time.perf_counter() - start, pictures


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock(function: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def psnr(picture: np.ndarray, reference: np.ndarray) -> float:
    error = float(np.square(picture.astype(np.float64) - reference.astype(np.float64)).mean())
    return float(min(10 * np.log10(255**2 / max(error, 1e-12)), 120.0))


def measure(kind: Any, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = kind(device, dtype, options.layers)
    case.pipe.set_progress_bar_config(disable=True)
    size = {"width": options.size, "height": options.size, "steps": options.steps}
    params = [DiffusionParams(**size, **case.guidance, seed=i) for i in range(options.requests)]
    short = [own.merged(DiffusionParams(steps=2)) for own in params]
    say = lambda text: print(f"{kind.name}: {text}", flush=True)  # noqa: E731
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in case.pipe.transformer.parameters())}
    with torch.inference_mode():
        case.reference(short[0])
        alone = statistics.median(clock(lambda: case.reference(params[0])) for _ in range(options.rounds))
        one_by_one = clock(lambda: [case.reference(own) for own in params])
        theirs = (case.reference(params[0]) * 255).round()
    figures |= {"diffusers_alone": alone, "diffusers_one_by_one": one_by_one}
    say(f"diffusers: alone {alone:.2f} s, {options.requests} one by one {one_by_one:.2f} s")

    def ours(name: str, **budget: Any) -> list[np.ndarray]:
        omni, start = open_ours(case, device, dtype, warm_sizes=(f"{options.size}x{options.size}",), **budget)
        run_ours(omni, short, 0.0)
        lone = statistics.median(run_ours(omni, params[:1], 0.0)[0] for _ in range(options.rounds))
        together, pictures = run_ours(omni, params, options.gap * alone)
        asyncio.run(omni.shutdown())
        figures[name] = {"start": start, "alone": lone, "together": together, "psnr": psnr(pictures[0], theirs)}
        say(
            f"{name}: start {start:.1f} s, alone {lone:.2f} s ({alone / lone:.2f} times), {options.requests} at once "
            f"{together:.2f} s ({one_by_one / together:.2f} times), {figures[name]['psnr']:.1f} dB from diffusers'"
        )
        return pictures

    plain = ours("plain", **VARIANTS["plain"])
    for spec in options.caches:
        cached = ours(f"cache {spec}", cache=spec)
        figures[f"cache {spec}"]["psnr"] = psnr(cached[0], plain[0])
        say(f"cache {spec}: {figures[f'cache {spec}']['psnr']:.1f} dB from the plain picture")
    for name, budget in VARIANTS.items():
        if budget["compile"] and not options.no_compile:
            torch._dynamo.reset()  # the second one starts with compiled code on disk
            ours(name, **budget)
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--gap", type=float, default=0.0, help="between arrivals, as a share of a lone request's time")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=float, default=1.0, help="share of the true number of layers")
    parser.add_argument("--models", nargs="*", choices=CASES, default=["sd3", "flux"])
    parser.add_argument("--caches", nargs="*", default=[], help="like first_block:0.1 taylorseer:3")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU only to try the script out
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, "diffusers": diffusers().__version__}
    with tempfile.TemporaryDirectory() as compiled:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled  # so that the first start compiles
        for model in options.models:
            results[model] = measure(CASES[model], options, device)
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


CASES = {"sd3": StableDiffusionCase, "flux": FluxCase, "qwen": QwenCase}

if __name__ == "__main__":
    main()
