"""What training and serving must agree on, and what is held out: the scripts under training/."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from omnistage_starter.bridges import SIZE, TEXT_ROWS, condition_of
from omnistage_starter.draw import MIN_SIGMA, PACKAGED_WEIGHTS, PATCH, PatchDecoder, velocity
from omnistage_starter.think import DRAW_LAYER
from torch.nn.functional import pixel_unshuffle

FOLDER = Path(__file__).parents[2] / "training"
NAMES = ("captions", "scenes", "network", "text", "train")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules; their plain names are taken back afterwards."""
    pytest.importorskip("gguf")
    pytest.importorskip("diffusers")
    sys.path.insert(0, str(FOLDER))
    before = {name: sys.modules.pop(name, None) for name in NAMES}
    try:
        yield {name: __import__(name) for name in NAMES}
    finally:
        sys.path.remove(str(FOLDER))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def test_sizes_are_the_same(scripts: dict[str, ModuleType]) -> None:
    assert scripts["scenes"].SIZE == SIZE
    assert scripts["network"].PATCH == PATCH
    assert scripts["network"].MIN_SIGMA == MIN_SIGMA
    assert scripts["text"].ROWS == TEXT_ROWS
    assert scripts["text"].LAYERS >= DRAW_LAYER


@pytest.mark.parametrize("length", [1, 23, 24, 40])
def test_rows_of_the_text_are_the_same(scripts: dict[str, ModuleType], length: int) -> None:
    hidden = torch.randn(1, 60, 16, generator=torch.Generator().manual_seed(length)) * 50
    start, end = torch.tensor([5]), torch.tensor([5 + length])
    trained = scripts["text"].condition_rows(hidden, start, end)[0]
    served = condition_of(hidden[0, max(5, 5 + length - TEXT_ROWS) : 5 + length])
    assert torch.allclose(trained, served.positive["embeds"], atol=1e-6)
    assert served.negative is not None
    assert not served.negative["embeds"].any()


def test_patches_are_put_together_as_they_were_taken_apart(scripts: dict[str, ModuleType]) -> None:
    picture = torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rows = scripts["network"].patches(picture)
    assert torch.equal(scripts["network"].pictures(rows), picture)
    side = SIZE // PATCH
    latents = rows[0].T.reshape(-1, side, side)
    assert torch.equal(latents, pixel_unshuffle(picture, PATCH)[0])
    pixels = PatchDecoder().decode([latents], width=SIZE, height=SIZE, num_frames=1)[0]
    wanted = ((picture[0] * 0.5 + 0.5).permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    assert np.array_equal(pixels, wanted)


def test_the_trained_sampler_takes_the_served_steps(scripts: dict[str, ModuleType]) -> None:
    class Known(torch.nn.Module):
        """Sees a given picture whatever the noise, and grey without a text."""

        def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **_: object):
            told = encoder_hidden_states.abs().sum((1, 2)) > 0
            return ((hidden_states * 0 + 0.4) * told[:, None, None],)

    text = torch.ones(1, TEXT_ROWS, 576)
    options = {"side": 2, "steps": 4, "guidance": 3.0, "shift": 2.0}
    made = scripts["network"].sample(Known(), text, torch.Generator().manual_seed(0), **options)
    rows = torch.randn(1, 4, 3 * PATCH * PATCH, generator=torch.Generator().manual_seed(0))
    times = torch.linspace(1, 1 / 4, 4)
    sigmas = [*(2 * times / (1 + times)), torch.zeros(())]
    for now, then in itertools.pairwise(sigmas):
        rows = rows + (then - now) * velocity(rows, torch.full_like(rows, 0.4 * 3), now)
    assert torch.allclose(made, scripts["network"].pictures(rows), atol=1e-5)
    assert torch.allclose(made, torch.ones_like(made), atol=1e-5)  # 1.2 is outside the colours


def test_held_out_combinations_are_never_trained_on(scripts: dict[str, ModuleType]) -> None:
    captions, scenes = scripts["captions"], scripts["scenes"]
    things = ("cat", "car", "tree", "rocket")
    pictures = scenes.EmojiSet(
        torch.zeros(4, 1, 1, 4, dtype=torch.uint8), things, ("Animals & Nature",) * 4, np.full(4, 0.25)
    )

    class NoTokens:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [0]}

    batches = scenes.Batches(pictures, NoTokens(), ("", ""), 1, 0)
    rng = random.Random(0)
    drawn = [batches.draw(rng).scene for _ in range(3000)]
    every = [captions.Scene(thing, colour) for thing in things for colour in captions.HUES]
    out = [scene for scene in every if scene.held_out() == "colour"]
    assert 0 < len(out) < len(every) / 4
    assert not set(out) & {captions.Scene(scene.thing, scene.colour) for scene in drawn}
    seen = {scene.thing for scene in drawn}
    assert seen == set(things)  # the things themselves are all known


def test_neither_thing_of_a_pair_is_trained_on_before_what_is_held_out_for_it(scripts: dict[str, ModuleType]) -> None:
    captions = scripts["captions"]
    things = [f"thing {number}" for number in range(40)]
    for one, other in itertools.combinations(things, 2):
        pair, turned = captions.Scene(one, beside=other), captions.Scene(other, beside=one)
        assert pair.held_out() == turned.held_out()
    for back in captions.BACKGROUNDS:
        for thing in things:
            alone = captions.Scene(thing, background=back).held_out()
            behind = captions.Scene("a thing beside", beside=thing, background=back).held_out()
            assert alone is None or behind == "background"


def test_the_grid_of_the_documentation_is_held_out(scripts: dict[str, ModuleType]) -> None:
    captions = scripts["captions"]
    for line in (FOLDER / "held_out.txt").read_text().splitlines():
        plain = re.sub(r"(^| )an ", r"\1a ", line)
        words, _, back = plain.removeprefix("a ").partition(" on a ")
        first, _, second = words.partition(" and a ")
        colour = next((c for c in captions.HUES if first.startswith(f"{c} ")), None)
        named = [captions.Scene(first, None, second or None, back.removesuffix(" background") or None)]
        if colour is not None:
            named.append(captions.Scene(first.removeprefix(f"{colour} "), colour, second or None, named[0].background))
        assert any(scene.held_out() for scene in named), line


@pytest.mark.parametrize(
    ("name", "people", "words"),
    [
        ("red-apple", False, "red apple"),
        ("man-factory-worker-dark", True, "man factory worker with dark skin"),
        ("woman-pilot-medium-light-skin-tone", True, "woman pilot with medium light skin"),
        ("new-moon-face", False, "new moon face"),
    ],
)
def test_names_become_words(scripts: dict[str, ModuleType], name: str, people: bool, words: str) -> None:
    assert scripts["captions"].plain_name(name, people)[0] == words


def test_recolouring_changes_the_main_colour_only(scripts: dict[str, ModuleType]) -> None:
    picture = torch.zeros(1, 8, 8, 4)
    picture[..., 3] = 1
    picture[:, :6, :, 0] = 0.9  # red
    picture[:, 6:, :, 1] = 0.8  # a green stalk
    scenes = scripts["scenes"]
    changed = scenes.recolour(picture[..., :3], torch.tensor([217 / 360]), scenes.main_hue(picture))
    blue, green = changed[0, 0, 0], changed[0, 7, 0]
    assert blue[2] > 0.8 > blue[0]
    assert torch.equal(green, picture[0, 7, 0, :3])


def test_the_weights_are_small_and_described() -> None:
    files = list(PACKAGED_WEIGHTS.rglob("*.safetensors"))
    assert files
    assert sum(file.stat().st_size for file in files) <= 20_000_000
    assert not [file for file in PACKAGED_WEIGHTS.rglob("*") if file.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")]
    config = json.loads((PACKAGED_WEIGHTS / "transformer" / "config.json").read_text())
    assert config["in_channels"] == 3 * PATCH * PATCH
    card = (PACKAGED_WEIGHTS / "README.md").read_text()
    for word in ("Data", "licence", "Held-out results", "Limits"):
        assert word in card


def test_a_seed_gives_the_same_steps_again(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    from omnistage.models._diffusers.loading import diffusers

    diffusers()  # as the package imports it: with what torchvision lacks here
    scenes, train = scripts["scenes"], scripts["train"]
    pixels = (torch.rand(4, SIZE, SIZE, 4, generator=torch.Generator().manual_seed(0)) * 255).byte()
    names = ("cat", "car", "tree", "rocket")
    pictures = scenes.EmojiSet(pixels, names, ("Animals & Nature",) * 4, np.full(4, 0.25))

    class Words:
        """A tokenizer of one token a word."""

        def __call__(self, text: str | list[str]) -> dict[str, Any]:
            if isinstance(text, list):
                return {"input_ids": [self(one)["input_ids"] for one in text]}
            return {"input_ids": [len(word) for word in text.split()]}

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.embedding = torch.nn.Embedding(100, 576)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (self.embedding(ids),) * 11

    def trained(seed: int) -> tuple[list[float], Any]:
        torch.manual_seed(seed)
        batches = scenes.Batches(pictures, Words(), ("", ""), 2, seed)
        trainer = train.Trainer(scenes.SceneRenderer(pictures, torch.device("cpu")), Layers(), 10, seed)
        return [float(trainer.step(batches[number])) for number in range(2)], trainer

    first, trainer = trained(0)
    assert trained(0)[0] == first
    assert trained(1)[0] != first
    folder = tmp_path / "transformer"
    folder.mkdir()
    trainer.save(folder)
    again = train.load(folder, torch.device("cpu"))
    kept = trainer.average.state_dict()["x_embedder.weight"].half().float()
    assert torch.equal(again.state_dict()["x_embedder.weight"], kept)
    settings = json.loads((tmp_path / "scheduler" / "scheduler_config.json").read_text())
    assert settings == json.loads((PACKAGED_WEIGHTS / "scheduler" / "scheduler_config.json").read_text())
