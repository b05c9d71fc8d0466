"""Embeddings and scores equal those of transformers with the pooling of sentence-transformers, on the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.core.errors import InvalidRequestError, OmniError, UnsupportedModelError
from omnistage.core.types import OmniTokensPrompt, TextBatch
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.omni import Omni
from tests.parity.conftest import Checkpoints

TEXTS = (
    "A man is eating food.",
    "Once upon a time there was a little robot who wanted to learn the names of all the birds in the garden",
    "Yes",
    "numbers: 0, 1, 2",
)
TOLERANCE = 2e-6


def reference(folder: Path, texts: tuple[str, ...], pooling: str, *, normalize: bool = True) -> np.ndarray:
    """One text at a time, by transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        count = torch.arange(1, len(hidden) + 1)[:, None]
        row = {
            "cls": hidden[0],
            "lasttoken": hidden[-1],
            "mean": hidden.mean(dim=0),
            "max": hidden.amax(dim=0),
            "mean_sqrt_len": hidden.sum(dim=0) / len(hidden) ** 0.5,
            "weightedmean": (hidden * count).sum(dim=0) / count.sum(),
        }[pooling]
        rows.append(torch.nn.functional.normalize(row, dim=0) if normalize else row)
    return torch.stack(rows).numpy()


def embed(folder: Path, batch: TextBatch) -> np.ndarray:
    with Omni(folder, progress=False) as omni:
        return omni.generate(batch)[0].arrays["embedding"]


@pytest.fixture(scope="module")
def encoder(checkpoint_of: Checkpoints) -> Iterator[Omni]:
    with Omni(checkpoint_of("text_encoder", "encoder"), progress=False) as omni:
        yield omni


@pytest.mark.parametrize(("variant", "pooling"), [("encoder", "mean"), ("decoder", "lasttoken")])
def test_embeddings_of_a_batch_equal_those_of_each_text_alone_in_transformers(
    checkpoint_of: Checkpoints, variant: str, pooling: str
) -> None:
    folder = checkpoint_of("text_encoder", variant)
    found = embed(folder, TextBatch(TEXTS * 3))
    np.testing.assert_allclose(found, np.tile(reference(folder, TEXTS, pooling), (3, 1)), atol=TOLERANCE)


@pytest.mark.parametrize("variant", ["encoder", "decoder"])
def test_embeddings_equal_those_of_sentence_transformers_itself(checkpoint_of: Checkpoints, variant: str) -> None:
    """Where that package is installed; it is no dependency."""
    package = pytest.importorskip("sentence_transformers")
    folder = checkpoint_of("text_encoder", variant)
    expected = package.SentenceTransformer(str(folder), device="cpu").encode(list(TEXTS))
    np.testing.assert_allclose(embed(folder, TextBatch(TEXTS)), expected, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["cls", "max", "mean_sqrt_len", "weightedmean"])
def test_every_pooling_of_the_layout_is_computed(checkpoint_of: Checkpoints, tmp_path: Path, pooling: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("text_encoder", "encoder"), folder)
    common.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})
    np.testing.assert_allclose(embed(folder, TextBatch(TEXTS)), reference(folder, TEXTS, pooling), atol=TOLERANCE)


def test_a_checkpoint_without_a_layout_is_pooled_by_the_mean(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("text_encoder", "encoder"), folder)
    (folder / "modules.json").unlink()
    expected = reference(folder, TEXTS, "mean", normalize=False)
    np.testing.assert_allclose(embed(folder, TextBatch(TEXTS)), expected, atol=TOLERANCE)


def test_a_linear_layer_behind_the_pooling_is_applied(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("text_encoder", "encoder"), folder)
    weight, bias = torch.randn(8, 64, generator=torch.manual_seed(1)), torch.randn(8)
    (folder / "2_Dense").mkdir()
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    common.write_json(folder / "2_Dense" / "config.json", {"activation_function": "torch.nn.modules.activation.Tanh"})
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]
    entries = [{"idx": i, "name": str(i), "path": path, "type": f"x.{kind}"} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    pooled = torch.from_numpy(reference(folder, TEXTS, "mean", normalize=False))
    expected = torch.tanh(pooled @ weight.T + bias).numpy()
    np.testing.assert_allclose(embed(folder, TextBatch(TEXTS)), expected, atol=1e-5)


def test_a_module_that_is_not_served_is_refused_by_name(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("text_encoder", "encoder"), folder)
    text = (folder / "modules.json").read_text().replace("models.Normalize", "models.LSTM")
    (folder / "modules.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match="LSTM"):
        Omni(folder, progress=False)


@pytest.mark.parametrize("variant", ["cross_encoder", "classifier"])
def test_scores_of_pairs_equal_the_logits_of_transformers(checkpoint_of: Checkpoints, variant: str) -> None:
    folder = checkpoint_of("text_encoder", variant)
    with Omni(folder, progress=False) as omni:
        found = omni.generate(TextBatch((TEXTS[0],) * 4, TEXTS))[0].arrays["scores"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        rows = [model(**tokenizer(TEXTS[0], text, return_tensors="pt")).logits[0] for text in TEXTS]
    np.testing.assert_allclose(found, torch.stack(rows).numpy(), atol=TOLERANCE)


def test_a_model_that_looks_past_its_mask_is_run_in_batches_of_equal_lengths(tmp_path: Path) -> None:
    """FNet has no attention mask at all: padded, every text would change."""
    folder = tmp_path / "model"
    write_tokenizer(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 1024}
    transformers.FNetModel(transformers.FNetConfig(**sizes, max_position_embeddings=128)).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.FNetModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        ids = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
        expected = torch.stack([model(one).last_hidden_state[0].mean(dim=0) for one in ids]).numpy()
    np.testing.assert_allclose(embed(folder, TextBatch(TEXTS)), expected, atol=1e-5)


SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 4),
    **{"d_kv": 16, "vocab_size": 1024, "max_position_embeddings": 160, "pad_token_id": 0},
}


@pytest.mark.parametrize("model_type", ["xlm-roberta", "mpnet", "modernbert", "deberta-v2", "t5", "convbert"])
def test_encoders_of_many_types_give_what_transformers_gives(tmp_path: Path, model_type: str) -> None:
    folder = tmp_path / "model"
    write_tokenizer(folder)
    config = transformers.AutoConfig.for_model(model_type)
    for name, value in SIZES.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    cls = transformers.T5EncoderModel if model_type == "t5" else transformers.MODEL_MAPPING[type(config)]
    model = cls(config).eval()
    model.save_pretrained(folder)
    tokenizer, rows = transformers.AutoTokenizer.from_pretrained(folder), []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        rows.append(hidden[0].mean(dim=0).numpy())
    np.testing.assert_allclose(embed(folder, TextBatch(TEXTS)), np.stack(rows), atol=1e-5)


def write_tokenizer(folder: Path) -> None:
    from omnistage.models.causal_lm import tiny

    common.new_folder(folder)
    settings = common.tokenizer_settings("PreTrainedTokenizerFast", 64, {}, qwen=False)
    common.write_tokenizer(folder, tiny.special_ids(), settings)


def test_token_ids_give_what_their_text_gives(encoder: Omni, checkpoint_of: Checkpoints) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint_of("text_encoder", "encoder"))
    ids = tuple(tokenizer(TEXTS[0]).input_ids)
    by_ids, by_text = encoder.generate([OmniTokensPrompt(ids), TEXTS[0]], progress=False)
    np.testing.assert_allclose(by_ids.arrays["embedding"], by_text.arrays["embedding"], atol=TOLERANCE)
    assert by_ids.usage.prompt_tokens == by_text.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("variant", ["encoder", "decoder", "cross_encoder"])
def test_texts_of_different_lengths_share_a_forward_where_the_model_hides_padding(
    checkpoint_of: Checkpoints, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Omni(checkpoint_of("text_encoder", variant), progress=False) as omni:
        component: Any = omni.orchestrator.stages["encode"].component  # type: ignore[attr-defined]
        forward, shapes = component._forward, list[tuple[int, ...]]()
        monkeypatch.setattr(component, "_forward", lambda rows: shapes.append((len(rows),)) or forward(rows))
        omni.generate(TextBatch(tuple((7,) * length for length in (8, 7, 6, 5))))
    assert shapes == [(4,)]


def test_many_requests_at_once_give_what_each_gives_alone(encoder: Omni) -> None:
    batches = [TextBatch(TEXTS[: count % 4 + 1]) for count in range(12)]
    alone = [encoder.generate(batch)[0].arrays["embedding"] for batch in batches]
    together = [output.arrays["embedding"] for output in encoder.generate(batches, progress=False)]
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)
    encoder.orchestrator.check_idle()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (TextBatch(("word " * 200,)), "the model takes 64"),
        (TextBatch(("x" * 10_000,)), "characters"),
        (TextBatch(("",)), "is empty"),
        (TextBatch(((5000,),)), "from 0 to 1023"),
        (TextBatch(()), "1 to 2048 texts"),
    ],
)
def test_what_cannot_be_encoded_is_refused_before_any_work(encoder: Omni, batch: TextBatch, words: str) -> None:
    with pytest.raises(OmniError, match=words):
        encoder.generate(batch)


def test_an_encoder_does_not_chat(encoder: Omni) -> None:
    with pytest.raises(OmniError, match="does not chat"):
        encoder.chat([{"role": "user", "content": "Hello"}])


def test_a_language_model_gives_no_embeddings(checkpoint_of: Checkpoints) -> None:
    with Omni(checkpoint_of("causal_lm"), progress=False) as omni:
        with pytest.raises(OmniError, match="no embeddings"):
            omni.generate(TextBatch(("Hello",)))
        with pytest.raises(InvalidRequestError):
            omni.generate([object()])  # type: ignore[list-item]
