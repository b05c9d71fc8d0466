"""Damaged and hostile model folders: each is refused by an error of ours that says why, and none takes the memory."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import OmniEngineArgs
from omnistage.core.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from omnistage.core.messages import ChatMessage, TextPart
from omnistage.models.causal_lm import tiny as tiny_lm
from omnistage.models.causal_lm import verify
from omnistage.pipeline.build import EngineParts, build_parts
from tests.e2e.harness import SMALL_POOLS

Damage = Callable[[Path], None]
HELLO = [ChatMessage("user", (TextPart("hello"),))]
DEEP = "[" * 100_000


@pytest.fixture(scope="session")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm") / "model"
    tiny_lm.write(folder, seed=3)
    return folder


@pytest.fixture(autouse=True)
def _nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("the terminal was asked")

    monkeypatch.setattr("builtins.input", ask)


@pytest.fixture(autouse=True)
def _no_memory_is_taken(lm: Path, checkpoint: Path) -> Iterator[None]:
    """A missing section alone used to make room for seven billion weights."""
    del lm, checkpoint  # written first, so that only the test itself is measured
    before = _peak()
    yield
    assert _peak() - before < 2**30


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def broken(healthy: Path, folder: Path, damage: Damage) -> Path:
    """A copy of a checkpoint of which only the weights are shared, damaged."""
    folder.mkdir()
    for file in healthy.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copyfile(file, folder / file.name)
    damage(folder)
    return folder


def open_lm(folder: Path) -> EngineParts:
    args = OmniEngineArgs(model=str(folder), device="cpu", dtype="float32", overrides=("thinker.kv_blocks=64",))
    return build_parts(args, progress=False)


def open_qwen(folder: Path) -> EngineParts:
    args = OmniEngineArgs(model=str(folder), device="cpu", dtype="float32", overrides=SMALL_POOLS)
    return build_parts(args, progress=False)


# ----------------------------------------------------------------------------------------------- damage


def text(file: str, content: str) -> Damage:
    return lambda folder: (folder / file).write_text(content, encoding="utf-8") and None


def without(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def cut(file: str, share: float = 0.5) -> Damage:
    """Only the beginning of a file is left."""

    def damage(folder: Path) -> None:
        (path,) = sorted(folder.glob(file))[:1]
        data = path.read_bytes()
        path.unlink()  # it may be a link to the healthy one
        path.write_bytes(data[: int(len(data) * share)])

    return damage


def edit(file: str, *route: str, **changes: Any) -> Damage:
    """A JSON file with some keys changed, under `route`; None removes them."""

    def damage(folder: Path) -> None:
        path = folder / file
        tree = json.loads(path.read_text(encoding="utf-8"))
        place = tree
        for key in route:
            place = place[key]
        for key, value in changes.items():
            place[key] = value
            if value is None:
                del place[key]
        path.write_text(json.dumps(tree), encoding="utf-8")

    return damage


def config(*route: str, **changes: Any) -> Damage:
    return edit("config.json", *route, **changes)


def voice(change: Callable[[dict[str, Any]], object]) -> Damage:
    """spk_dict.pt after `change`, which may alter it or give another."""

    def damage(folder: Path) -> None:
        path = folder / "spk_dict.pt"
        voices = torch.load(path, weights_only=True)
        changed = change(voices)
        torch.save(voices if changed is None else changed, path)

    return damage


def part(**parts: Any) -> Damage:
    return voice(lambda voices: voices["Ethan"].update(parts))


def no_template(folder: Path) -> None:
    edit("tokenizer_config.json", chat_template=None)(folder)
    (folder / "chat_template.json").unlink(missing_ok=True)


def template(source: str) -> Damage:
    def damage(folder: Path) -> None:
        edit("tokenizer_config.json", chat_template=source)(folder)
        if (folder / "chat_template.json").exists():
            edit("chat_template.json", chat_template=source)(folder)

    return damage


INDEX = "model.safetensors.index.json"
FOREIGN_CODE = {
    "model_type": "mallory",
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
}

LM: dict[str, tuple[Damage, str]] = {
    "unknown type with code": (config(**FOREIGN_CODE), "mallory"),
    "known type with code": (config(auto_map={"AutoConfig": "evil.Config"}, vocab_size="x"), "vocab_size"),
    "generation config damaged": (text("generation_config.json", "{"), "generation_config"),
    "generation config a list": (text("generation_config.json", "[]"), "generation_config"),
    "generation config deep": (text("generation_config.json", DEEP), "generation_config"),
    "end token a word": (edit("generation_config.json", eos_token_id="x"), "eos_token_id"),
    "end token negative": (edit("generation_config.json", eos_token_id=[1, -4]), "eos_token_id"),
    "tokenizer cut": (cut("tokenizer.json"), "tokenizer"),
    "tokenizer config a list": (text("tokenizer_config.json", "[]"), "tokenizer"),
    "tokenizer config deep": (text("tokenizer_config.json", DEEP), "tokenizer"),
    "shard cut": (cut("model-*.safetensors"), r"model-00001.*safetensors"),
    "index deep": (text(INDEX, DEEP), "index"),
    "no kv heads": (config(num_key_value_heads=0), "num_key_value_heads=0"),
    "no heads": (config(num_attention_heads=0), "config.json"),
    "no vocabulary": (config(vocab_size=0), "vocab_size=0"),
    "layers a word": (config(num_hidden_layers="many"), "num_hidden_layers"),
    "hidden size a list": (config(hidden_size=[64]), "hidden_size"),
    "rope a word": (config(rope_parameters="x"), "rope|model"),
    "unknown activation": (config(hidden_act="evil"), "evil"),
    "unknown quantisation": (config(quantization_config={"quant_method": "mallory"}), "mallory"),
    "quantisation without a name": (config(quantization_config={}), "quant"),
    "quantised vocabulary of a billion": (
        config(quantization_config={"quant_method": "fp8"}, vocab_size=10**9),
        "fetch the model again",
    ),
    "quantisation a word": (config(quantization_config="x"), "config.json"),
    "vocabulary of a billion": (config(vocab_size=10**9), "fetch the model again"),
    "hidden size past all numbers": (config(hidden_size=10**18), "llama that config.json describes.*RuntimeError"),
    "a billion layers": (config(num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
}

NAN = float("nan")
QWEN: dict[str, tuple[Damage, str]] = {
    "no thinker section": (config(thinker_config=None), "thinker_config"),
    "no talker section": (config(talker_config=None), "talker_config"),
    "no token2wav section": (config(token2wav_config=None), "token2wav_config"),
    "section a list": (config(talker_config=[]), "talker_config"),
    "no text section": (config("thinker_config", text_config=None), "fetch the model again|shape"),
    "no dit section": (config("token2wav_config", dit_config=None), "fetch the model again|shape|spk_dict"),
    "thinker vocabulary of a billion": (
        config("thinker_config", "text_config", vocab_size=10**9),
        "fetch the model again",
    ),
    "another vocabulary": (config("thinker_config", "text_config", vocab_size=1300), r"shape \[1296, 64\]"),
    "no vocabulary": (config("thinker_config", "text_config", vocab_size=0), "vocab_size=0"),
    "talker of a billion layers": (config("talker_config", num_hidden_layers=10**9), "num_hidden_layers"),
    "talker without kv heads": (config("talker_config", num_key_value_heads=0), "'talker'|num_key_value_heads"),
    "sounds of a billion places": (
        config("thinker_config", "audio_config", max_source_positions=10**9),
        "fetch the model again",
    ),
    "no tokenizer config": (without("tokenizer_config.json"), "tokenizer_config"),
    "tokenizer cut": (cut("tokenizer.json"), "tokenizer"),
    "tokenizer config a list": (text("tokenizer_config.json", "[]"), "processor"),
    "preprocessor config a list": (text("preprocessor_config.json", "[]"), "processor"),
    "preprocessor config deep": (text("preprocessor_config.json", DEEP), "processor"),
    "generation config a list": (text("generation_config.json", "[]"), "generation_config"),
    "end token a word": (edit("generation_config.json", eos_token_id="x"), "eos_token_id"),
    "index deep": (text(INDEX, DEEP), "index"),
    "voices cut": (cut("spk_dict.pt"), "spk_dict"),
    "voices of a few bytes": (cut("spk_dict.pt", 0.001), "spk_dict"),
    "voices plain text": (text("spk_dict.pt", "hello, I am not a table of voices\n" * 20), "spk_dict"),
    "voices empty": (text("spk_dict.pt", ""), "spk_dict"),
    "voices a list": (voice(lambda voices: list(voices.values())), "no voice"),
    "no voices": (voice(lambda voices: {}), "no voice"),
    "voice a tensor": (voice(lambda voices: {"Ethan": torch.ones(2)}), "'Ethan'"),
    "voice named by a number": (voice(lambda voices: {7: voices["Ethan"]}), "voice 7"),
    "voice without a beginning": (voice(lambda voices: voices["Ethan"].pop("bos_token") and None), "'Ethan'.*bos"),
    "beginning a truth": (part(bos_token=True), "'Ethan'.*bos_token True"),
    "beginning a fraction": (part(bos_token=1.5), "'Ethan'.*bos_token"),
    "beginning negative": (part(bos_token=-1), "'Ethan'.*bos_token -1"),
    "beginning past the vocabulary": (part(bos_token=1296), "'Ethan'.*1296 tokens"),
    "cond a number": (part(cond=3), "cond of voice 'Ethan'"),
    "cond of whole numbers": (part(cond=torch.ones(1, 192, dtype=torch.int64)), "cond of voice 'Ethan'"),
    "cond flat": (part(cond=torch.ones(192)), r"cond of voice 'Ethan'.*\[192\]"),
    "cond of another size": (part(cond=torch.ones(1, 191)), r"cond of voice 'Ethan'.*\[1, 191\]"),
    "cond not finite": (part(cond=torch.full((1, 192), NAN)), "cond of voice 'Ethan'.*finite"),
    "mel empty": (part(ref_mel=torch.ones(1, 0, 80)), "ref_mel of voice 'Ethan'"),
    "mel of two clips": (part(ref_mel=torch.ones(2, 9, 80)), "ref_mel of voice 'Ethan'"),
    "mel of another size": (part(ref_mel=torch.ones(1, 9, 81)), "ref_mel of voice 'Ethan'"),
    "mel not finite": (part(ref_mel=torch.full((1, 9, 80), NAN)), "ref_mel of voice 'Ethan'.*finite"),
}


@pytest.mark.parametrize("case", LM)
def test_a_broken_causal_lm_is_refused_when_it_is_loaded(case: str, lm: Path, tmp_path: Path) -> None:
    damage, reason = LM[case]
    with pytest.raises(CheckpointError, match=rf"(?s){reason}"):
        open_lm(broken(lm, tmp_path / "broken", damage))


@pytest.mark.parametrize("case", QWEN)
def test_a_broken_qwen_is_refused_when_it_is_loaded(case: str, checkpoint: Path, tmp_path: Path) -> None:
    damage, reason = QWEN[case]
    with pytest.raises(CheckpointError, match=rf"(?s){reason}"):
        open_qwen(broken(checkpoint, tmp_path / "broken", damage))


def test_code_in_a_checkpoint_is_neither_run_nor_asked_about(lm: Path, tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        config(**FOREIGN_CODE)(folder)
        (folder / "evil.py").write_text("raise SystemExit('code of the checkpoint was run')")

    folder = broken(lm, tmp_path / "broken", damage)
    with pytest.raises(UnsupportedModelError, match="mallory"):
        open_lm(folder)
    with pytest.raises(UnsupportedModelError, match="mallory"):
        verify.run(OmniRunner(folder), cases=1)


BAD_TEMPLATES = ["{{ 1/0 }}", "{{ messages + 5 }}", "{{ raise_exception('no') }}", "{% if %}", "{{ nothing.at.all }}"]


@pytest.fixture(scope="module", params=["lm", "qwen"])
def processor_of(request: pytest.FixtureRequest) -> tuple[Path, Callable[[Path], Any]]:
    from omnistage.models.causal_lm.processor import CausalLMProcessor
    from omnistage.models.qwen2_5_omni.processor import Qwen25OmniProcessor

    if request.param == "lm":
        return request.getfixturevalue("lm"), CausalLMProcessor.load
    return request.getfixturevalue("checkpoint"), Qwen25OmniProcessor.load


@pytest.mark.parametrize("source", BAD_TEMPLATES)
def test_a_chat_template_that_fails_ends_only_its_request(
    source: str, processor_of: tuple[Path, Callable[[Path], Any]], tmp_path: Path
) -> None:
    healthy, read = processor_of
    processor = read(broken(healthy, tmp_path / "broken", template(source)))
    with pytest.raises(InvalidRequestError, match=r"the chat template refuses these messages: ."):
        processor.chat(HELLO)
    assert processor.text("hello").token_ids


def test_a_model_without_a_chat_template_says_so(
    processor_of: tuple[Path, Callable[[Path], Any]], tmp_path: Path
) -> None:
    healthy, read = processor_of
    processor = read(broken(healthy, tmp_path / "broken", no_template))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        processor.chat(HELLO)
    assert processor.text("hello").token_ids
