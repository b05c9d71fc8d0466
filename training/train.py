"""Train the small diffusion transformer on captioned emoji: one GPU, some minutes, reproducible from a seed.

    python training/train.py --steps 9000
    python training/train.py --seconds 500     # as many steps as fit, which it prints

Reads the output of emoji.py and text.py, and the tokenizer of the checkpoint from `omnistage pull starter`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from network import CONFIG, MIN_SIGMA, PATCH, clean, initialise, patches, position_ids
from safetensors.torch import load_file, save_file
from scenes import SIZE, Batches, EmojiSet, SceneRenderer
from text import ROWS, TextEncoder, condition_rows, mask_of
from torch import Tensor
from torch.utils.data import DataLoader, Subset

_WARMUP = 400
_RATE, _LAST_RATE = 8e-4, 2e-5
_AVERAGE = 0.9995
_NO_TEXT = 0.1
_MEASURED = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/emoji.safetensors"))
    parser.add_argument("--text", type=Path, default=Path("build/text.safetensors"))
    parser.add_argument("--tokenizer", type=Path, default=Path("build/tokenizer"))
    parser.add_argument("--layer", type=int, default=10)
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--seconds", type=float, help="choose the steps so that training takes so long")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("build/draw/transformer"))
    args = parser.parse_args()
    transformers = transformers_module()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pictures = EmojiSet.read(args.data)
    encoder = TextEncoder(args.text, transformers).to(
        device, torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer)
    batches = Batches(pictures, tokenizer, (encoder.prefix, encoder.suffix), args.batch, args.seed)
    trainer = Trainer(SceneRenderer(pictures, device), encoder, args.layer, args.seed)
    trainer.run(batches, args)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer.save(args.out)


class Trainer:
    """The network, its average, and the optimiser."""

    def __init__(self, renderer: SceneRenderer, encoder: TextEncoder, layer: int, seed: int) -> None:
        from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel

        device = next(encoder.parameters()).device
        self.renderer, self.layer, self.device = renderer, layer, device
        self.model = initialise(Flux2Transformer2DModel(**CONFIG)).to(device)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        on_gpu = device.type == "cuda"
        self.encode = torch.compile(encoder, dynamic=True) if on_gpu else encoder
        self.fast = torch.compile(self.model) if on_gpu else self.model
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
        )
        self.where = position_ids(SIZE // PATCH, ROWS, device)
        self.generator = torch.Generator(device).manual_seed(seed + 1)

    def run(self, batches: Batches, args: argparse.Namespace) -> None:
        steps, began, average_loss = args.steps, time.monotonic(), torch.zeros((), device=self.device)
        order = Subset(batches, range(10_000_000))
        options = {"num_workers": args.workers, "prefetch_factor": 8, "pin_memory": self.device.type == "cuda"}
        loader = iter(DataLoader(order, batch_size=None, **options))
        start, step = began, 0
        while step < steps:
            for group in self.optimiser.param_groups:
                group["lr"] = _rate(step, steps)
            loss = self.step({name: value.to(self.device, non_blocking=True) for name, value in next(loader).items()})
            average_loss = average_loss * 0.98 + 0.02 * loss
            step += 1
            self._follow(min(_AVERAGE, step / (step + 10)))
            if step == _MEASURED and args.seconds:
                _finish(self.device)
                start = time.monotonic()
            if step == 3 * _MEASURED and args.seconds:
                _finish(self.device)
                each = (time.monotonic() - start) / (2 * _MEASURED)
                steps = int((args.seconds - (time.monotonic() - began)) / each) + step
                print(f"{each * 1e3:.1f} ms a step: {steps} steps", flush=True)
            if step % 500 == 0:
                print(
                    f"step {step}/{steps} loss {average_loss.item():.4f} {time.monotonic() - began:.0f} s", flush=True
                )
        print(json.dumps({"steps": steps, "seconds": time.monotonic() - began, "batch": args.batch, "seed": args.seed}))

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            clean_rows = patches(self.renderer(batch))
            text = self.text(batch)
            keep = torch.rand(len(text), generator=self.generator, device=self.device) >= _NO_TEXT
            text = text * keep[:, None, None]
            spread = torch.randn(len(text), generator=self.generator, device=self.device)
            sigma = torch.sigmoid(0.4 + 1.1 * spread)[:, None, None]
            noise = torch.randn(clean_rows.shape, generator=self.generator, device=self.device)
            noisy = (1 - sigma) * clean_rows + sigma * noise
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            predicted = clean(self.fast, noisy, sigma[:, 0, 0], text, self.where).float()
        # The error of the velocity, which is what the sampler uses.
        loss = ((predicted - clean_rows) / sigma.clamp(min=2 * MIN_SIGMA)).square().mean()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        return loss.detach()

    @torch.no_grad()
    def text(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"].long()
        return condition_rows(self.encode(ids, mask_of(ids, batch["end"]))[self.layer], batch["start"], batch["end"])

    @torch.no_grad()
    def _follow(self, share: float) -> None:
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - share)

    def save(self, folder: Path) -> None:
        """The average, in half precision, in the layout that diffusers reads, in two files of about 10 MB."""
        state = {name: value.half().contiguous().cpu() for name, value in self.average.state_dict().items()}
        weight_map: dict[str, str] = {}
        total = sum(value.numel() for value in state.values())
        done = 0
        parts: list[dict[str, Tensor]] = [{}, {}]
        for name in sorted(state):
            part = int(done >= total / 2)
            parts[part][name] = state[name]
            weight_map[name] = _FILES[part]
            done += state[name].numel()
        for file, part in zip(_FILES, parts, strict=True):
            save_file(part, folder / file, {"format": "pt"})
        index = {"metadata": {"total_size": 2 * total}, "weight_map": weight_map}
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        self.average.save_config(folder)
        scheduler = folder.parent / "scheduler"
        scheduler.mkdir(exist_ok=True)
        (scheduler / "scheduler_config.json").write_text(json.dumps(_SCHEDULER, indent=2) + "\n")


_SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 2.0,
    "use_dynamic_shifting": False,
}
_FILES = tuple(f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2))


def load(folder: Path, device: torch.device) -> Any:
    """The trained network."""
    from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(**CONFIG)
    model.load_state_dict({k: v.float() for file in _FILES for k, v in load_file(folder / file).items()})
    return model.to(device).eval().requires_grad_(False)


def transformers_module() -> Any:
    try:
        from omnistage.hf import transformers
    except ImportError:  # training needs no installed omnistage
        import transformers
    return transformers


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _rate(step: int, steps: int) -> float:
    if step < _WARMUP:
        return _RATE * (step + 1) / _WARMUP
    done = min((step - _WARMUP) / max(steps - _WARMUP, 1), 1.0)
    return _LAST_RATE + (_RATE - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


if __name__ == "__main__":
    main()
