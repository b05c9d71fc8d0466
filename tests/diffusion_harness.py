"""What the parity tests of the diffusion families share: a checkpoint as ours and as diffusers', and comparisons."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.engines.diffusion.component import Denoiser, Lane, LatentDecoder, PromptEncoder, Row
from omnistage.models._diffusers.verify import (
    Case,
    DiffusersReference,
    DiffusionResult,
    drive,
    load_components,
    rows_of,
)

Components = tuple[PromptEncoder, Denoiser, LatentDecoder]


class Model:
    """A checkpoint, ours and theirs."""

    def __init__(self, folder: Path, reference: type[DiffusersReference]) -> None:
        self.folder = folder
        self.parts: Components = load_components(OmniRunner(folder))
        self.reference = reference(folder)

    def check(self, asked: Case) -> None:
        self.parts[0].check(asked.payload, asked.params)
        self.parts[1].check(asked.params)

    def same(self, asked: Case) -> None:
        self.check(asked)
        rows = rows_of(asked, drive(*self.parts, asked), self.reference(asked))
        assert all(row.ok for row in rows), rows

    def opened(self, asked: Case, steps: int = 0) -> Lane:
        return opened(self.parts, asked, steps)


def case(prompt: str = "a red cat", *, images: tuple[np.ndarray, ...] = (), mask: Any = None, **options: Any) -> Case:
    return Case("case", DiffusionInput(prompt, images, mask), DiffusionParams.parse({"seed": 5, **options}))


@torch.inference_mode()
def opened(parts: Components, asked: Case, steps: int = 0) -> Lane:
    """A lane some steps on its way."""
    encoder, denoiser, _ = parts
    encoded = [encoder.encode([job])[0] for job in encoder.jobs(asked.payload, asked.params)]
    condition = encoder.condition(asked.payload, asked.params, encoded)
    lane = denoiser.open(condition, asked.params, torch.Generator().manual_seed(asked.params.seed or 0))
    for _ in range(steps):
        denoiser.advance(lane, [denoiser.forward([row])[0] for row in denoiser.rows(lane)])
    return lane


@torch.inference_mode()
def check_groups(denoiser: Denoiser, lanes: Sequence[Lane], sizes: list[int], tolerance: float = 2e-5) -> None:
    """Rows fall into groups of these sizes, and each is what it is alone."""
    groups: dict[Hashable, list[Row]] = {}
    for row in (row for lane in lanes for row in denoiser.rows(lane)):
        groups.setdefault(denoiser.group(row), []).append(row)
    assert sorted(len(group) for group in groups.values()) == sizes
    for group in groups.values():
        for row, together in zip(group, denoiser.forward(group), strict=True):
            assert float((together - denoiser.forward([row])[0]).abs().max()) < tolerance


@torch.inference_mode()
def check_decoding(decoder: LatentDecoder, *shape: int) -> None:
    """Pictures of 80 x 48 that are decoded together, from latents of this shape, are those decoded alone."""
    latents = [torch.randn(*shape, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    size = {"width": 80, "height": 48, "num_frames": 1}
    for one, together in zip(latents, decoder.decode(latents, **size), strict=True):
        alone = decoder.decode([one], **size)[0]
        assert together.shape == (48, 80, 3)
        assert np.abs(together.astype(int) - alone.astype(int)).max() <= 1


def distance(one: DiffusionResult, two: DiffusionResult) -> float:
    """Mean difference of the pixels."""
    return float(np.abs(one.pixels.astype(int) - two.pixels.astype(int)).mean())


def check_differ(drawn: Mapping[str, DiffusionResult], least: float) -> None:
    """Every two of these are that far apart, and `base` is no empty picture."""
    assert drawn["base"].pixels.std() > 10
    for name, one in drawn.items():
        for other, two in drawn.items():
            assert name == other or distance(one, two) > least, (name, other, distance(one, two))
