"""Build the data set: captioned colour emoji of permissive licences, from the npm packages of Iconify.

    python training/emoji.py --out build/emoji.safetensors

Needs npm, `pip install resvg_py`, and Pillow. Nothing of it is committed: the packages are fetched by name and version,
drawn at 96 pixels with their transparency, and kept as WebP beside their captions.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import resvg_py
import torch
from captions import plain_name
from PIL import Image
from rich.progress import track
from safetensors.torch import save_file

SIZE = 96
SETS = {
    "fluent-emoji": "1.2.7",
    "fluent-emoji-flat": "1.2.6",
    "noto": "1.2.9",
    "noto-v1": "1.2.5",
    "fxemoji": "1.2.2",
}
"""Package @iconify-json/NAME and version. MIT, MIT, and three times Apache-2.0."""
TONED_SETS = ("fluent-emoji-flat", "noto")
"""Emoji with skin tones are taken from these only: they are many, and differ little."""
WEIGHTS = {
    "Animals & Nature": 3.0,
    "Food & Drink": 3.0,
    "Objects": 2.0,
    "Travel & Places": 2.0,
    "Activities": 2.0,
    "Smileys & Emotion": 2.0,
    "People & Body": 1.0,
    "Symbols": 0.5,
}
_TONED_WEIGHT = 0.25
_EXCLUDED = ("middle-finger",)
_TWO_TONES = re.compile(r"-skin-tone-.*-skin-tone|-(light|medium|dark)-(light|medium|dark)-(light|medium|dark)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One picture of the data set."""

    caption: str
    category: str
    style: str
    weight: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/emoji.safetensors"))
    parser.add_argument("--packages", type=Path, help="a folder with the packages' .tgz files, instead of npm")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        packages = args.packages or _fetch(Path(scratch))
        icons = list(_icons(packages))
    entries, files = [], []
    for entry, svg in track(icons, "drawing"):
        pixels = draw(svg)
        if pixels is not None:
            entries.append(entry)
            files.append(_webp(pixels))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lengths = torch.tensor([len(file) for file in files])
    blob = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
    save_file({"webp": blob, "lengths": lengths}, args.out, {"entries": json.dumps([asdict(e) for e in entries])})
    captions = {entry.caption for entry in entries}
    print(f"{len(entries)} pictures, {len(captions)} captions, {blob.numel() / 1e6:.1f} MB: {args.out}")


def _fetch(folder: Path) -> Path:
    for name, version in SETS.items():
        subprocess.run(["npm", "pack", "--silent", f"@iconify-json/{name}@{version}"], cwd=folder, check=True)
    return folder


def _icons(packages: Path) -> Iterator[tuple[Entry, str]]:
    """Every picture that is kept, with its SVG."""
    sets = {name: _read(packages / f"iconify-json-{name}-{version}.tgz") for name, version in SETS.items()}
    categories = _categories(sets)
    joined: dict[str, str] = {}
    for style, (icons, _) in sets.items():
        for name, icon in icons["icons"].items():
            if style == "fxemoji":  # written as one word there: known only where another set has the same words
                name = joined.get(name, "")
            category = categories.get(name, "")
            if category not in WEIGHTS or _TWO_TONES.search(name) or name.startswith(_EXCLUDED):
                continue
            words, tone = plain_name(name, category == "People & Body")
            if tone is not None and style not in TONED_SETS:
                continue
            joined.setdefault(name.replace("-", ""), name)
            weight = WEIGHTS[category] * (_TONED_WEIGHT if tone else 1.0)
            size = (icon.get("width", icons.get("width", 16)), icon.get("height", icons.get("height", 16)))
            yield Entry(words, category, style, weight), _svg(icon["body"], *size)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with tarfile.open(path, "r:gz") as archive:
        members = ("package/icons.json", "package/metadata.json")
        icons, metadata = (json.load(archive.extractfile(member)) for member in members)  # type: ignore[arg-type]
    return icons, metadata


def _categories(sets: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, str]:
    """The category of every name, of the first set that says one."""
    known: dict[str, str] = {}
    for style, (_, metadata) in sets.items():
        if style != "fxemoji":  # it has categories of its own
            for category, names in metadata.get("categories", {}).items():
                for name in names:
                    known.setdefault(name, category)
    return known


def _svg(body: str, width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{SIZE}" height="{SIZE}" viewBox="0 0 {width} {height}">{body}</svg>'
    )


def draw(svg: str) -> np.ndarray | None:
    """`uint8 [SIZE, SIZE, 4]`; None where nothing is to be seen."""
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg))
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA").resize((SIZE, SIZE)))
    return pixels if (pixels[..., 3] > 128).mean() > 0.02 else None


def _webp(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "WEBP", quality=88, alpha_quality=90, method=4)
    return out.getvalue()


if __name__ == "__main__":
    main()
