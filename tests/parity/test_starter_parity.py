"""The starter's language model against transformers, and its pictures against a plain loop over diffusers' modules."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from omnistage_starter import tiny, verify
from omnistage_starter.bridges import SIZE, SUBJECT, condition_of
from omnistage_starter.draw import CHANNELS, PACKAGED_WEIGHTS, PATCH, PatchDecoder
from omnistage_starter.think import Thinker

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import ConfigError, UnsupportedModelError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition
from omnistage.hf import transformers
from omnistage.models.causal_lm import tiny as causal_lm

PROMPTS = ("Draw a red fox.", "What did they say, and who is speaking?", "Hello! " * 30, "7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("starter") / "model"
    tiny.write(made, seed=2)
    return made


@pytest.fixture(scope="module")
def conditions(folder: Path) -> list[Condition]:
    generator = torch.Generator().manual_seed(1)
    width = int(transformers.AutoConfig.from_pretrained(folder / "think").hidden_size)
    return [condition_of(torch.randn(rows, width, generator=generator)) for rows in (24, 7, 1, 16)]


def test_tokens_and_hidden_states_equal_those_of_transformers(folder: Path) -> None:
    prompts = [verify.prompt_of(folder, text) for text in PROMPTS]
    reference = verify.ReferenceModel(folder / "think")
    for ours, prompt in zip(verify.run_think(OmniRunner(folder), prompts, tokens=24), prompts, strict=True):
        theirs = reference(prompt, tokens=24)
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(ours.rows, theirs.rows, rtol=1e-4, atol=1e-4)


def test_the_prompt_is_the_templates_own_and_its_subject_the_last_message(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "think")
    for text in (*PROMPTS, "\n\nIt begins with empty lines"):
        prompt = verify.prompt_of(folder, text)
        messages = [{"role": "user", "content": text}]
        stock = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert prompt.token_ids == tuple(tokenizer.encode(stock, add_special_tokens=False))
        start, end = prompt.context[SUBJECT].tolist()
        assert end == len(prompt.token_ids)
        assert tokenizer.decode(prompt.token_ids[start:]).lstrip("\n").startswith(text.lstrip("\n"))


def test_batched_images_equal_those_of_the_plain_loop(folder: Path, conditions: list[Condition]) -> None:
    asked = [
        DiffusionParams(steps=4, guidance=4.0, seed=1),
        DiffusionParams(steps=6, guidance=2.5, seed=2),
        DiffusionParams(steps=3, guidance=1.0, seed=2**40),
        DiffusionParams(steps=1, guidance=0.0, seed=0),
    ]
    loop = verify.ReferenceLoop(folder / "draw")
    together = verify.run_draw(OmniRunner(folder), conditions, asked)
    for condition, params, drawn in zip(conditions, asked, together, strict=True):
        torch.testing.assert_close(drawn, loop(condition, params), rtol=0, atol=1e-4)
        (alone,) = verify.run_draw(OmniRunner(folder), [condition], [params])
        torch.testing.assert_close(drawn, alone, rtol=0, atol=1e-4)


def test_the_packaged_weights_give_the_plain_loops_images(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "model"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("draw"))
    assert sum(path.stat().st_size for path in PACKAGED_WEIGHTS.rglob("*.safetensors")) <= 20_000_000
    loop = verify.ReferenceLoop(PACKAGED_WEIGHTS)
    rows = torch.randn(12, 576, generator=torch.Generator().manual_seed(4))
    condition, asked = condition_of(rows), DiffusionParams(steps=3, guidance=4.0, seed=3)
    (drawn,) = verify.run_draw(OmniRunner(bare), [condition], [asked])
    torch.testing.assert_close(drawn, loop(condition, asked), rtol=0, atol=1e-4)
    assert float(drawn.abs().max()) < 1.001  # the last step ends at colours
    assert float(drawn.std()) > 0.1


def test_latents_are_patches_of_pixels() -> None:
    chance = np.random.default_rng(0)
    picture = chance.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    side = SIZE // PATCH
    cells = picture.reshape(side, PATCH, side, PATCH, 3)  # row, dy, column, dx, colour
    latents = cells.transpose(4, 1, 3, 0, 2).reshape(CHANNELS, side, side) / 127.5 - 1
    (painted,) = PatchDecoder().decode([torch.from_numpy(latents).float()], width=SIZE, height=SIZE, num_frames=1)
    assert np.array_equal(painted, picture)


def test_colours_beyond_the_range_are_clamped() -> None:
    latents = torch.full((CHANNELS, 2, 2), 5.0)
    bright, dark = PatchDecoder().decode([latents, -latents], width=8, height=8, num_frames=1)
    assert (bright.min(), dark.max()) == (255, 0)


def test_verify_compares_everything(folder: Path) -> None:
    rows = verify.run(OmniRunner(folder), cases=2)
    assert [row.quantity for row in rows] == ["tokens", "hidden states", "latents", "pixels, all at once"] * 2
    assert all(row.ok for row in rows), rows
    with pytest.raises(ConfigError):
        verify.run(OmniRunner(folder), cases=0)


def test_a_shallow_language_model_is_refused(tmp_path: Path) -> None:
    causal_lm.write(tmp_path / "lm")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    with pytest.raises(UnsupportedModelError, match="deeper"):
        Thinker(model)
