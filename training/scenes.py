"""Batches of scenes: emoji, colours, backgrounds and captions."""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from captions import BACKGROUNDS, HUES, Scene, request
from PIL import Image
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

SIZE = 96
RECOLOURED = ("Animals & Nature", "Food & Drink", "Objects", "Travel & Places", "Activities")
SIDES = ("left", "right", "clockwise", "arrow", "hand")
_HUE_NAMES, _BACK_NAMES = tuple(HUES), tuple(BACKGROUNDS)


@dataclass(frozen=True, slots=True)
class EmojiSet:
    """The data set in memory."""

    pixels: Tensor
    """`uint8 [N, SIZE, SIZE, 4]`."""
    captions: tuple[str, ...]
    categories: tuple[str, ...]
    weights: np.ndarray

    @classmethod
    def read(cls, path: Path) -> EmojiSet:
        with safe_open(path, "pt") as file:
            entries = json.loads(file.metadata()["entries"])
            blob, lengths = file.get_tensor("webp").numpy().tobytes(), file.get_tensor("lengths").tolist()
        pixels = torch.empty(len(entries), SIZE, SIZE, 4, dtype=torch.uint8)
        start = 0
        for index, length in enumerate(lengths):
            image = Image.open(io.BytesIO(blob[start : start + length])).convert("RGBA")
            pixels[index] = torch.from_numpy(np.array(image))
            start += length
        weights = np.array([entry["weight"] for entry in entries])
        names, kinds = (tuple(entry[key] for entry in entries) for key in ("caption", "category"))
        return cls(pixels, names, kinds, weights / weights.sum())


@dataclass(frozen=True, slots=True)
class SceneLayout:
    """How one image of a batch is composed. -1: none."""

    scene: Scene
    first: int
    second: int = -1
    hue: int = -1
    back: int = 0
    mirrored: bool = False


class Batches(Dataset[dict[str, Tensor]]):
    """Batch number i, the same for the same seed in every worker."""

    def __init__(self, pictures: EmojiSet, tokenizer: Any, template: tuple[str, str], size: int, seed: int) -> None:
        self.captions, self.categories = pictures.captions, pictures.categories
        self._weights = np.cumsum(pictures.weights)
        self._tokenizer, self._template = tokenizer, template
        self._prefix = len(tokenizer(template[0])["input_ids"])
        self._size, self._seed, self._count = size, seed, 1_000_000_000

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = random.Random(f"{self._seed}/{index}")
        layouts = [self.draw(rng) for _ in range(self._size)]
        texts = [request(item.scene, rng) for item in layouts]
        earlier = [self._earlier(rng) if rng.random() < 0.1 else "" for _ in layouts]
        return {**self.layout_tensors(layouts), **self.tokens(texts, earlier)}

    def pick(self, rng: random.Random) -> int:
        return int(np.searchsorted(self._weights, rng.random() * self._weights[-1]))

    def draw(self, rng: random.Random) -> SceneLayout:
        """A scene that is not held out."""
        while True:
            first = self.pick(rng)
            layout = self.scene(first, rng)
            if layout.scene.held_out() is None:
                return layout

    def scene(self, first: int, rng: random.Random) -> SceneLayout:
        thing = self.captions[first]
        hue = second = -1
        back = 0
        kind = rng.random()
        if kind < 0.3 and self.categories[first] in RECOLOURED and not any(c in thing.split() for c in BACKGROUNDS):
            hue = rng.randrange(len(_HUE_NAMES))
        elif kind > 0.86:
            second = self.pick(rng)
        if rng.random() < 0.25:
            back = rng.randrange(1, len(_BACK_NAMES))
        scene = Scene(
            thing,
            _HUE_NAMES[hue] if hue >= 0 else None,
            self.captions[second] if second >= 0 else None,
            _BACK_NAMES[back] if back else None,
        )
        turns = any(word in thing for word in SIDES) or self.categories[first] == "Symbols"
        return SceneLayout(scene, first, second, hue, back, not turns and rng.random() < 0.3)

    def _earlier(self, rng: random.Random) -> str:
        """An earlier turn of the conversation, about something else."""
        other = self.draw(rng).scene
        text = f"<|im_start|>user\n{request(other, rng)}<|im_end|>\n<|im_start|>assistant\n"
        return f"{text}Here is {other.words(rng)}.<|im_end|>\n"

    def tokens(self, texts: list[str], earlier: list[str] | None = None) -> dict[str, Tensor]:
        """Ids of whole prompts, and which rows of them are the subject's."""
        head, tail = self._template
        opening = head.removesuffix("<|im_start|>user\n")
        prompts, starts = [], []
        for text, before in zip(texts, earlier or [""] * len(texts), strict=True):
            intro = opening + before + "<|im_start|>user\n" if before else head
            starts.append(len(self._tokenizer(intro)["input_ids"]) if before else self._prefix)
            prompts.append(intro + text + tail)
        encoded = self._tokenizer(prompts)["input_ids"]
        length = -(-max(map(len, encoded)) // 16) * 16  # a multiple of 16: fewer shapes to compile
        ids = torch.zeros(len(encoded), length, dtype=torch.int32)
        for row, tokens in zip(ids, encoded, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        ends = torch.tensor([len(tokens) for tokens in encoded])
        return {"ids": ids, "start": torch.tensor(starts), "end": ends}

    @staticmethod
    def layout_tensors(layouts: list[SceneLayout]) -> dict[str, Tensor]:
        columns = ("first", "second", "hue", "back", "mirrored")
        return {name: torch.tensor([int(getattr(item, name)) for item in layouts]) for name in columns}


class SceneRenderer:
    """Composes scenes on the device: recolours, mirrors, places side by side, adds the background."""

    def __init__(self, pictures: EmojiSet, device: torch.device) -> None:
        self._pixels = pictures.pixels.to(device)
        self._hues = torch.tensor(list(HUES.values()), device=device) / 360
        self._backs = torch.tensor(list(BACKGROUNDS.values()), device=device).float() / 255
        self._own = torch.cat([main_hue(part.float() / 255) for part in self._pixels.split(512)])

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        """`[B, 3, SIZE, SIZE]` in [-1, 1]."""
        rgba = self._pixels[batch["first"]].float() / 255
        hue = batch["hue"]
        changed = recolour(rgba[..., :3], self._hues[hue.clamp(min=0)], self._own[batch["first"]])
        rgba = torch.cat([torch.where((hue >= 0)[:, None, None, None], changed, rgba[..., :3]), rgba[..., 3:]], -1)
        rgba = torch.where(batch["mirrored"].bool()[:, None, None, None], rgba.flip(2), rgba)
        rgba = rgba.permute(0, 3, 1, 2)
        over = torch.cat([rgba[:, :3] * rgba[:, 3:], rgba[:, 3:]], 1)
        other = self._pixels[batch["second"].clamp(min=0)].float().permute(0, 3, 1, 2) / 255
        other = torch.cat([other[:, :3] * other[:, 3:], other[:, 3:]], 1)
        pair = torch.nn.functional.avg_pool2d(torch.cat([over, other], 3), 2)
        pair = torch.nn.functional.pad(pair, (0, 0, SIZE // 4, SIZE // 4))
        over = torch.where((batch["second"] >= 0)[:, None, None, None], pair, over)
        back = self._backs[batch["back"]][:, :, None, None]
        return (over[:, :3] + back * (1 - over[:, 3:])) * 2 - 1


def _hsv(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    high, low = rgb.max(-1).values, rgb.min(-1).values
    spread = (high - low).clamp(min=1e-6)
    red, green, blue = rgb.unbind(-1)
    hue = torch.where(
        high == red,
        ((green - blue) / spread) % 6,
        torch.where(high == green, (blue - red) / spread + 2, (red - green) / spread + 4),
    )
    return hue / 6, (high - low) / high.clamp(min=1e-6), high


def _rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    steps = torch.tensor([5.0, 3.0, 1.0], device=hue.device)
    k = (steps + hue[..., None] * 6) % 6
    return value[..., None] * (1 - saturation[..., None] * torch.minimum(k, 4 - k).clamp(0, 1))


def main_hue(rgba: Tensor) -> Tensor:
    """The hue of most of a picture's strong colour, in turns."""
    hue, saturation, value = _hsv(rgba[..., :3])
    strength = (saturation * value * rgba[..., 3]).flatten(1)
    bins = (hue.flatten(1) * 36).long().clamp(0, 35)
    count = torch.zeros(len(rgba), 36, device=rgba.device).scatter_add_(1, bins, strength)
    smooth = count + 0.7 * (count.roll(1, 1) + count.roll(-1, 1))
    return (smooth.argmax(1).float() + 0.5) / 36


def recolour(rgb: Tensor, target: Tensor, own: Tensor) -> Tensor:
    """The main colour turned to `target`; where there is little colour at all, greys are tinted with it."""
    hue, saturation, value = _hsv(rgb)
    own, target = own[:, None, None], target[:, None, None]
    apart = ((hue - own + 0.5) % 1 - 0.5).abs()
    main = (apart < 0.14) & (saturation > 0.15)
    poor = (main.float().mean((1, 2)) < 0.12)[:, None, None]
    main |= poor & (saturation < 0.35) & (value > 0.2)
    strong = torch.maximum(saturation, torch.full_like(saturation, 0.6))
    bright = torch.where(value < 0.8, value * 0.5 + 0.4, value)  # a dark yellow is a brown
    changed = _rgb(target.expand_as(hue), strong, bright)
    return torch.where(main[..., None], changed, rgb)
