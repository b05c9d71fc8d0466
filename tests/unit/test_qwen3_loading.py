"""Qwen3-Omni checkpoints that are incomplete or wrong are named, not loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import CheckpointError
from omnistage.models.qwen3_omni_moe import tiny
from omnistage.models.qwen3_omni_moe.components import Talker
from omnistage.models.qwen3_omni_moe.load import read_config, voices_of

EXPERT = "talker.model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("q3") / "model"
    tiny.write(folder, seed=2)
    return folder


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "model")


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    if changed is None:
        del index["weight_map"][name]
        index_file.write_text(json.dumps(index))
    else:
        tensors[name] = changed
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_the_experts_of_a_layer_are_put_together_in_their_order(checkpoint: Path) -> None:
    talker = OmniRunner(checkpoint).load_component("talker")
    assert isinstance(talker, Talker)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    stored = load_file(checkpoint / index[EXPERT])[EXPERT]
    experts = talker.model.model.layers[1].mlp.experts
    assert torch.equal(experts.gate_up_proj[3, len(stored) :], stored)
    assert experts.down_proj.shape[0] == talker.model.config.text_config.num_experts


def test_an_expert_that_is_missing_or_of_another_shape_is_named(copied: Path) -> None:
    change_tensor(copied, EXPERT, lambda tensor: tensor[:-1].clone())
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts have different shapes"):
        OmniRunner(copied).load_component("talker")
    change_tensor(copied, EXPERT, lambda _tensor: None)
    with pytest.raises(CheckpointError, match="3, 'up_proj'"):
        OmniRunner(copied).load_component("talker")


def test_fewer_experts_than_the_config_says_are_refused(copied: Path) -> None:
    change_config(copied, lambda config: config["talker_config"]["text_config"].update(num_local_experts=16))
    with pytest.raises(CheckpointError, match=r"shape|numbers"):
        OmniRunner(copied).load_component("talker")


@pytest.mark.parametrize("section", ["thinker_config", "talker_config", "code2wav_config"])
def test_a_section_that_is_missing_is_named(copied: Path, section: str) -> None:
    change_config(copied, lambda config: config.pop(section))
    with pytest.raises(CheckpointError, match=section):
        read_config(copied)


@pytest.mark.parametrize("speakers", [None, {}, {"eve": 3072}, {"eve": -1}, {"eve": "2301"}, {"eve": True}])
def test_voices_that_cannot_be_are_refused(copied: Path, speakers: object) -> None:
    change_config(copied, lambda config: config["talker_config"].update(speaker_id=speakers))
    with pytest.raises(CheckpointError, match=r"voice|eve"):
        read_config(copied)


def test_voices_have_the_names_of_the_model_card(copied: Path) -> None:
    assert set(voices_of(read_config(copied))) == {"Chelsie", "Ethan", "Aiden"}
    change_config(copied, lambda config: config["talker_config"].update(speaker_id={"m02": 2301, "DJ": 2302}))
    assert voices_of(read_config(copied)) == {"M02": 2301, "DJ": 2302}
