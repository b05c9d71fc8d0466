"""Evaluate the network on held-out combinations: does it draw what the caption says?

    python training/evaluate.py --model build/draw/transformer --out build/evaluation

A judge is trained on real pictures only: a small convolutional network and a linear map of the text's rows, so that a
picture lies nearest to its own caption. Then it picks, for pictures drawn from held-out captions, the right caption
among others, some of which differ in the colour or the background alone. Writes grids and numbers.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from captions import BACKGROUNDS, HUES, Scene, a
from network import PATCH, sample
from PIL import Image
from scenes import SIZE, Batches, EmojiSet, SceneLayout, SceneRenderer
from text import TextEncoder, condition_rows, mask_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from train import load, transformers_module

_CANDIDATES = 32
_KINDS = ("colour", "background", "beside")
_TEXT_KEYS = ("ids", "start", "end")
"""Keys of a batch for the text; the others are for the image."""
_FREE = """red apple;cat;dog;house;rocket;blue elephant;green car;pizza;sunflower;robot;purple dragon;snowman
smiling face with sunglasses;guitar;whale on a yellow background;tree;castle;cup of coffee;owl;unicorn
cat and a dog;pink flamingo;orange butterfly on a black background;sailboat"""
_JUDGE_STEPS, _JUDGE_BATCH = 1500, 512


class Judge(nn.Module):
    """EmojiSet and captions in one space."""

    def __init__(self, width: int = 48, size: int = 128, text: int = 576) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for level in range(5):
            wide = width * 2 ** min(level, 3)
            layers += [nn.Conv2d(channels, wide, 3, 2, 1), nn.GroupNorm(8, wide), nn.GELU()]
            layers += [nn.Conv2d(wide, wide, 3, 1, 1), nn.GroupNorm(8, wide), nn.GELU()]
            channels = wide
        self.see = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 9, size))
        self.read = nn.Sequential(nn.Linear(text, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
        self.said = nn.Linear(512, size)
        self.scale = nn.Parameter(torch.tensor(2.5))

    def pictures(self, pixels: Tensor) -> Tensor:
        return nn.functional.normalize(self.see(pixels), dim=-1)

    def texts(self, rows: Tensor) -> Tensor:
        present = rows.abs().sum(-1, keepdim=True).gt(0)
        return nn.functional.normalize(self.said((self.read(rows) * present).sum(1) / present.sum(1)), dim=-1)


class Bench:
    """Everything that an evaluation needs."""

    def __init__(self, args: argparse.Namespace) -> None:
        transformers = transformers_module()

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.all = EmojiSet.read(args.build / "emoji.safetensors")
        self.encoder = TextEncoder(args.build / "text.safetensors", transformers).to(self.device)
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.build / "tokenizer")
        self.batches = Batches(self.all, tokenizer, (self.encoder.prefix, self.encoder.suffix), _JUDGE_BATCH, 12345)
        self.renderer = SceneRenderer(self.all, self.device)
        self.layer = args.layer

    @torch.no_grad()
    def rows(self, said: dict[str, Tensor]) -> Tensor:
        said = {name: value.to(self.device) for name, value in said.items() if name in _TEXT_KEYS}
        mask = mask_of(said["ids"], said["end"])
        return condition_rows(self.encoder(said["ids"].long(), mask)[self.layer], said["start"], said["end"])

    def asked(self, scenes: list[Scene]) -> Tensor:
        return self.rows(self.batches.tokens([f"Draw {plain(scene)}." for scene in scenes]))

    @torch.no_grad()
    def painted(self, drawn: list[SceneLayout]) -> Tensor:
        return self.renderer({k: v.to(self.device) for k, v in self.batches.layout_tensors(drawn).items()})

    def judge(self, workers: int) -> Judge:
        torch.manual_seed(0)
        judge = Judge().to(self.device)
        optimiser = torch.optim.AdamW(judge.parameters(), lr=1e-3, weight_decay=0.05)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1.5e-3, total_steps=_JUDGE_STEPS)
        order = Subset(self.batches, range(_JUDGE_STEPS))
        for batch in DataLoader(order, batch_size=None, num_workers=workers, prefetch_factor=4):
            with torch.no_grad():
                pixels = self.renderer(
                    {k: v.to(self.device) for k, v in batch.items() if k not in ("ids", "start", "end")}
                )
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                seen, said = judge.pictures(pixels), judge.texts(self.rows(batch))
            logits = judge.scale.exp() * seen.float() @ said.float().T
            wanted = torch.arange(len(logits), device=self.device)
            loss = (nn.functional.cross_entropy(logits, wanted) + nn.functional.cross_entropy(logits.T, wanted)) / 2
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            rates.step()
        print(f"judge: loss {loss.item():.3f} over {_JUDGE_BATCH} pairs", flush=True)
        return judge.eval()


def plain(scene: Scene) -> str:
    """The scene in its plainest words."""
    said = a(f"{scene.colour} {scene.thing}" if scene.colour else scene.thing)
    if scene.beside:
        said += f" and {a(scene.beside)}"
    return f"{said} on {a(scene.background)} background" if scene.background else said


def held_out(batches: Batches, kind: str, count: int, seed: int) -> list[SceneLayout]:
    """Scenes of combinations that training never shows, each of another thing."""
    rng = random.Random(f"{kind}/{seed}")
    layouts: dict[str, SceneLayout] = {}
    while len(layouts) < count:
        drawn = batches.scene(batches.pick(rng), rng)
        if drawn.scene.held_out() == kind and not drawn.scene.thing.endswith("skin"):
            layouts.setdefault(drawn.scene.thing, replace(drawn, mirrored=False))
    return list(layouts.values())


def rivals(scene: Scene, others: list[Scene], rng: random.Random) -> list[Scene]:
    """Captions that are wrong: the same thing in other colours or before others, and other things."""
    near = [replace(scene, colour=c) for c in HUES if scene.colour and c != scene.colour]
    near += [replace(scene, background=b) for b in BACKGROUNDS if scene.background and b != scene.background]
    far = [other for other in others if other.thing != scene.thing]
    rng.shuffle(far)
    return (near[: _CANDIDATES // 2] + far)[: _CANDIDATES - 1]


@torch.no_grad()
def retrieval(bench: Bench, judge: Judge, pixels: Tensor, scenes: list[Scene]) -> dict[str, float]:
    """Shares of pictures whose own caption is the nearest, and among the five nearest, of `_CANDIDATES`."""
    rng = random.Random(0)
    seen = judge.pictures(pixels)
    first = fifth = 0
    for picture, scene in zip(seen, scenes, strict=True):
        said = judge.texts(bench.asked([scene, *rivals(scene, scenes, rng)]))
        rank = int((said @ picture > said[0] @ picture).sum())
        first, fifth = first + (rank == 0), fifth + (rank < 5)
    return {"top1": first / len(scenes), "top5": fifth / len(scenes)}


def grid(pixels: Tensor, columns: int, path: Path, scale: int = 1) -> None:
    shown = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    rows = -(-len(shown) // columns)
    sheet = np.full((rows * (SIZE + 4) + 4, columns * (SIZE + 4) + 4, 3), 235, dtype=np.uint8)
    for index, picture in enumerate(shown):
        top, left = 4 + index // columns * (SIZE + 4), 4 + index % columns * (SIZE + 4)
        sheet[top : top + SIZE, left : left + SIZE] = picture
    image = Image.fromarray(sheet)
    image.resize((image.width * scale, image.height * scale), Image.Resampling.LANCZOS).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--model", type=Path, default=Path("build/draw/transformer"))
    parser.add_argument("--out", type=Path, default=Path("build/evaluation"))
    parser.add_argument("--layer", type=int, default=10)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--unbounded", action="store_true", help="let predictions leave the range of colours")
    parser.add_argument("--count", type=int, default=256, help="pictures of each kind")
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    model = load(args.model, bench.device)
    judge = bench.judge(args.workers)
    report: dict[str, Any] = {"candidates": _CANDIDATES, "chance": 1 / _CANDIDATES}
    shown: list[str] = []
    for kind in _KINDS:
        drawn = held_out(bench.batches, kind, args.count, 0)
        scenes = [item.scene for item in drawn]
        real = bench.painted(drawn)
        text = bench.asked(scenes)
        images = draw(model, text, 0, args.guidance, not args.unbounded)
        wrong = text.roll(1, 0)
        report[kind] = {
            "pictures": len(scenes),
            "real": retrieval(bench, judge, real, scenes),
            "drawn": retrieval(bench, judge, images, scenes),
            "drawn for another caption": retrieval(
                bench, judge, draw(model, wrong, 0, args.guidance, not args.unbounded), scenes
            ),
        }
        print(kind, json.dumps(report[kind]), flush=True)
        pairs = torch.stack([real[:24], images[:24]], 1).flatten(0, 1)
        grid(pairs, 12, args.out / f"held-out-{kind}.png")
        shown += [plain(scene) for scene in scenes[:16]]
    names = [name for line in _FREE.splitlines() for name in line.split(";")]
    free = bench.rows(bench.batches.tokens([f"Draw a {name}." for name in names]))
    for guidance in (1.0, 3.0, 5.0):
        grid(draw(model, free, 1, guidance, not args.unbounded), 12, args.out / f"free-{guidance:g}.png")
    (args.out / "held_out.txt").write_text("\n".join(shown) + "\n")
    (args.out / "report.json").write_text(json.dumps(report, indent=1))


def draw(model: Any, text: Tensor, seed: int, guidance: float, bounded: bool) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=text.is_cuda):
        generator = torch.Generator(text.device).manual_seed(seed)
        return sample(
            model, text, generator, side=SIZE // PATCH, steps=20, guidance=guidance, shift=2.0, bounded=bounded
        ).float()


if __name__ == "__main__":
    main()
