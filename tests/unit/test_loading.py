"""Reading checkpoints: what is wrong with a folder is said by name, and only what is asked for is read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from omnistage.core.errors import CheckpointError, UnsupportedModelError
from omnistage.hf import transformers
from omnistage.models.loading import (
    Checkpoint,
    check_size,
    end_token_ids,
    kv_shape,
    load_model,
    read_auto_config,
    read_generation_config,
)
from omnistage.models.qwen2_5_omni import load as omni_load

INDEX = "model.safetensors.index.json"
CPU = torch.device("cpu")


def write_sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    weight_map = {}
    for file, tensors in shards.items():
        save_file(tensors, str(folder / file))
        weight_map.update(dict.fromkeys(tensors, file))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_sharded(
        tmp_path,
        {
            "one.safetensors": {"a.x": torch.arange(6.0).view(3, 2), "a.y": torch.ones(2)},
            "two.safetensors": {"a.z": torch.zeros(1), "b.x": torch.full((2,), 7.0)},
        },
    )
    return tmp_path


# ---------------------------------------------------------------------------------------------- reading


def test_the_tensors_of_a_prefix_come_from_all_shards_without_it(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)
    assert set(checkpoint.names()) == {"a.x", "a.y", "a.z", "b.x"}
    found = checkpoint.tensors("a.")
    assert set(found) == {"x", "y", "z"}
    assert torch.equal(found["x"], torch.arange(6.0).view(3, 2))


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, str(tmp_path / "model.safetensors"))
    assert torch.equal(Checkpoint(tmp_path).tensors()["w"], torch.ones(2))


def test_only_the_shards_of_a_prefix_are_opened(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)
    (sharded / "one.safetensors").write_bytes(b"rubbish")
    assert set(checkpoint.tensors("b.")) == {"x"}
    with pytest.raises(CheckpointError, match=r"one\.safetensors is not a readable"):
        checkpoint.tensors("a.")


def test_rows_of_a_matrix_come_in_the_order_asked_for(sharded: Path) -> None:
    rows = Checkpoint(sharded).rows(["nowhere", "a.x"], [2, 0, 2])
    assert torch.equal(rows, torch.tensor([[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]))


def test_a_row_that_the_matrix_does_not_have_is_named(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match="3 rows; row 3 is needed"):
        Checkpoint(sharded).rows(["a.x"], [0, 3])


def test_rows_of_no_known_matrix_name_all_that_were_tried(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match="none of p, q"):
        Checkpoint(sharded).rows(["p", "q"], [0])


def test_a_shard_may_be_a_link_as_in_the_hubs_cache(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blob = tmp_path_factory.mktemp("blobs") / "0123"
    (sharded / "one.safetensors").rename(blob)
    (sharded / "one.safetensors").symlink_to(blob)
    assert set(Checkpoint(sharded).tensors("a.")) == {"x", "y", "z"}


# ------------------------------------------------------------------------------------------ what is wrong


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard two\.safetensors is missing"):
        Checkpoint(sharded)


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_must_not_name_a_file_outside_its_folder(tmp_path: Path, link: bool, absolute: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    outside = tmp_path / "outside.safetensors"
    save_file({"w": torch.ones(1)}, str(tmp_path / "real.safetensors"))
    if link:
        outside.symlink_to(tmp_path / "real.safetensors")
    else:
        (tmp_path / "real.safetensors").rename(outside)
    named = str(outside) if absolute else "../outside.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": named}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="outside its folder"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": "x"}', b"null", b"\xff\xfe", b"[" * 100_000],
    ids=lambda text: repr(text[:16]),
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match="not a weight index"):
        Checkpoint(tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        Checkpoint(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 40])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(64)}, str(file))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        Checkpoint(tmp_path)


def test_a_file_that_lost_its_last_bytes_is_named(sharded: Path) -> None:
    file = sharded / "one.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"one\.safetensors is not a readable"):
        Checkpoint(sharded).tensors("a.")


def test_a_prefix_that_no_weight_has_is_named(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights named talker\.\*"):
        Checkpoint(sharded).tensors("talker.")


def test_a_shard_without_a_tensor_that_the_index_promises_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["b.ghost"] = "two.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"two\.safetensors does not hold b\.ghost"):
        Checkpoint(sharded).tensors("b.")
    with pytest.raises(CheckpointError, match=r"two\.safetensors does not hold b\.ghost"):
        Checkpoint(sharded).rows(["b.ghost"], [0])


# ---------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


@pytest.fixture
def weights(config: transformers.LlamaConfig) -> dict[str, torch.Tensor]:
    return dict(transformers.LlamaForCausalLM(config).state_dict())


def test_a_model_takes_its_weights_frozen_and_in_the_asked_precision(
    config: transformers.LlamaConfig, weights: dict[str, torch.Tensor]
) -> None:
    model = load_model(transformers.LlamaForCausalLM, config, weights, CPU, torch.float64)
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"].double())
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.device == CPU


def test_a_missing_weight_is_named(config: transformers.LlamaConfig, weights: dict[str, torch.Tensor]) -> None:
    del weights["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"1 weights of LlamaForCausalLM are missing, first model\.norm\.weight"):
        load_model(transformers.LlamaForCausalLM, config, weights, CPU, torch.float32)


def test_a_weight_of_another_shape_is_refused(
    config: transformers.LlamaConfig, weights: dict[str, torch.Tensor]
) -> None:
    weights["model.norm.weight"] = torch.ones(17)
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        load_model(transformers.LlamaForCausalLM, config, weights, CPU, torch.float32)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("vocab_size", 10**9, "describes a LlamaForCausalLM of"),
        ("vocab_size", 33, r"embed_tokens.weight .* has shape \[32, 16\] in the checkpoint, not \[33, 16\]"),
        ("num_hidden_layers", 10**9, "asks for num_hidden_layers=1000000000"),
        ("quantization_config", {"quant_method": "mallory"}, "quantisation 'mallory'"),
    ],
)
def test_a_config_that_asks_for_other_weights_is_refused_before_they_are_made(
    config: transformers.LlamaConfig,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    value: object,
    reason: str,
) -> None:
    def made(*args: object, **options: object) -> None:
        raise AssertionError("from_pretrained was reached")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", made)
    other = transformers.LlamaConfig.from_dict({**config.to_dict(), key: value})
    with pytest.raises(CheckpointError, match=reason):
        load_model(transformers.LlamaForCausalLM, other, weights, CPU, torch.float32)


def test_a_model_may_be_twice_its_checkpoint_and_have_small_tables_beside_it() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(10, 10, bias=False)
        model.register_buffer("table", torch.empty(2**24), persistent=False)
    check_size(model, 50)
    with pytest.raises(CheckpointError, match="fetch the model again"):
        check_size(model, 49)
    model.register_buffer("more", torch.empty(101, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match="fetch the model again"):
        check_size(model, 50)


def test_the_numbers_of_a_checkpoint_are_counted_from_its_headers(sharded: Path) -> None:
    assert Checkpoint(sharded).num_elements() == 6 + 2 + 1 + 2


def test_the_shape_of_keys_and_values_comes_from_the_config(config: transformers.LlamaConfig) -> None:
    assert kv_shape(config) == (1, 1, 8)
    assert kv_shape(transformers.GPT2Config(n_layer=3, n_head=4, n_embd=32)) == (3, 4, 8)


def test_a_model_without_attention_is_not_supported() -> None:
    with pytest.raises(UnsupportedModelError, match="attention"):
        kv_shape(transformers.MambaConfig(num_hidden_layers=1))


class _Ends:
    def __init__(self, eos_token_id: object) -> None:
        self.eos_token_id = eos_token_id


def test_the_first_config_that_names_end_tokens_is_believed() -> None:
    assert end_token_ids(_Ends(None), object(), _Ends([3, 4]), _Ends(5)) == (3, 4)
    assert end_token_ids(_Ends(5)) == (5,)
    assert end_token_ids(_Ends(0), _Ends(1)) == (0,)
    assert end_token_ids(object()) == ()


@pytest.mark.parametrize("value", ["x", True, -1, [3, None], [2.5], {}])
def test_end_tokens_that_are_no_ids_are_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        end_token_ids(_Ends(value))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"eos_token_id": "x"}', "[" * 100_000])
def test_a_damaged_generation_config_is_refused(tmp_path: Path, text: str) -> None:
    assert read_generation_config(tmp_path) is None
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json|eos_token_id"):
        read_generation_config(tmp_path)


@pytest.mark.parametrize("kind", ["mallory", None, 7, ["llama"]])
def test_an_unknown_model_type_is_not_supported_whatever_code_comes_with_it(
    tmp_path: Path, kind: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the terminal was asked"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": {"AutoConfig": "evil.Config"}}))
    with pytest.raises(UnsupportedModelError, match="model_type"):
        read_auto_config(tmp_path)


@pytest.mark.parametrize("key", ["num_key_value_heads", "num_attention_heads", "num_hidden_layers"])
@pytest.mark.parametrize("value", [0, -1, True, "x"])
def test_a_shape_that_is_no_number_is_refused(key: str, value: object) -> None:
    config = transformers.PreTrainedConfig()
    for name, healthy in (("num_attention_heads", 2), ("num_hidden_layers", 1), ("hidden_size", 16), (key, value)):
        object.__setattr__(config, name, healthy)
    with pytest.raises(CheckpointError, match=f"{key}|attention heads"):
        kv_shape(config)


@pytest.mark.parametrize(
    ("deployment", "asked", "expected"),
    [("float32", "tf32", "float32"), ("auto", "tf32", "tf32"), ("float32", "float16", "float16")],
)
def test_a_float32_deployment_keeps_speech_from_switching_tf32_on(deployment: str, asked: str, expected: str) -> None:
    """The switch is one for the whole process."""
    from omnistage.config import CodecBudget
    from omnistage.models.qwen2_5_omni.load import _precision

    context = SimpleNamespace(requested_dtype=deployment, device=torch.device("cuda"))
    assert _precision(context, CodecBudget(precision=asked)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "deployment", "expected"),
    [("cuda", "auto", "float16"), ("cuda", "float32", "float32"), ("cpu", "auto", "float32")],
)
def test_speech_is_in_half_precision_where_that_is_fast_and_nobody_asked_for_more(
    device: str, deployment: str, expected: str
) -> None:
    from omnistage.config import CodecBudget
    from omnistage.models.qwen2_5_omni.load import _precision

    context = SimpleNamespace(requested_dtype=deployment, device=torch.device(device), target=None)
    assert _precision(context, CodecBudget()) == expected  # type: ignore[arg-type]


def test_a_configuration_is_parsed_again_only_where_its_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class = transformers.Qwen2_5OmniConfig
    config_class().save_pretrained(tmp_path)
    parsed: list[object] = []
    from_pretrained = config_class.from_pretrained

    def spy(folder: Path, **options: object) -> object:
        parsed.append(folder)
        return from_pretrained(folder, **options)

    monkeypatch.setattr(config_class, "from_pretrained", spy)
    first = omni_load.read_config(tmp_path)
    first.thinker_config.text_config.vocab_size = 7  # each caller may change its own
    second = omni_load.read_config(tmp_path)
    assert second.thinker_config.text_config.vocab_size != 7
    assert len(parsed) == 1
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["thinker_config"]["text_config"]["vocab_size"] = 1234
    path.write_text(json.dumps(values))
    assert omni_load.read_config(tmp_path).thinker_config.text_config.vocab_size == 1234
    assert len(parsed) == 2
