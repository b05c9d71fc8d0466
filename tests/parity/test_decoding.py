"""Large pictures are decoded in tiles and one by one, small ones whole and together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.models._diffusers.base import VaeDecoder
from omnistage.models._diffusers.verify import load_components
from omnistage.models.registry import REGISTRY

SIZE = 256


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> VaeDecoder:
    folder: Path = tmp_path_factory.mktemp("decoding") / "model"
    folder.mkdir()
    tiny: Callable[..., None] | None = REGISTRY.family("stable_diffusion_3").tiny
    assert tiny is not None
    tiny(folder, seed=0)
    decoder = load_components(OmniRunner(folder))[2]
    assert isinstance(decoder, VaeDecoder)
    # The VAE's own size of a tile is that of the pictures that it was made for; a quarter of ours here.
    decoder.vae.tile_sample_min_size = SIZE // 2
    decoder.vae.tile_latent_min_size = SIZE // 2 // decoder.pipe.vae_scale_factor
    return decoder


def latents_for(decoder: VaeDecoder, count: int) -> list[torch.Tensor]:
    side = SIZE // decoder.pipe.vae_scale_factor
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(decoder.vae.config.latent_channels, side, side, generator=generator) for _ in range(count)]


@torch.inference_mode()
def decoded(decoder: VaeDecoder, tiling_pixels: int, count: int = 3) -> tuple[list[np.ndarray], list[int]]:
    """Pictures of fixed latents, and the batch sizes that the VAE's decoder was run with."""
    vae: Any = decoder.vae
    latents = latents_for(decoder, count)
    decoder._tiling_pixels = tiling_pixels
    batches: list[int] = []
    handle = vae.decoder.register_forward_pre_hook(lambda _module, args: batches.append(len(args[0])))
    try:
        return decoder.decode(latents, width=SIZE, height=SIZE, num_frames=1), batches
    finally:
        handle.remove()


def test_small_pictures_are_decoded_together(decoder: VaeDecoder) -> None:
    _, batches = decoded(decoder, SIZE * SIZE)
    assert batches == [3]


def test_zero_never_tiles(decoder: VaeDecoder) -> None:
    assert decoded(decoder, 0)[1] == [3]


def test_large_ones_go_by_one_in_tiles_as_diffusers_tiles(decoder: VaeDecoder) -> None:
    whole, _ = decoded(decoder, 0)
    tiled, batches = decoded(decoder, SIZE * SIZE - 1)
    assert set(batches) == {1}
    assert len(batches) > 3  # several tiles a picture
    assert all(np.array_equal(ours, expected) for ours, expected in zip(tiled, reference(decoder), strict=True))
    assert not np.array_equal(tiled[0], whole[0])  # norms over a tile are not those over the picture
    again, _ = decoded(decoder, 0)
    assert all(np.array_equal(a, b) for a, b in zip(again, whole, strict=True))  # and it is off again


@torch.inference_mode()
def reference(decoder: VaeDecoder) -> list[np.ndarray]:
    """Each picture by diffusers' own tiled decoding."""
    vae: Any = decoder.vae
    vae.enable_tiling()
    try:
        scaled = [z[None] / vae.config.scaling_factor + vae.config.shift_factor for z in latents_for(decoder, 3)]
        return [decoder.pixels(vae.decode(z, return_dict=False)[0])[0] for z in scaled]
    finally:
        vae.disable_tiling()
