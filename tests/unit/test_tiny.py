"""The random checkpoints: they load in stock transformers, and behave like small copies of the real thing."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omnistage import compat
from omnistage.core.errors import CheckpointError, ConfigError, MissingDependencyError
from omnistage.models import _tiny_common as common
from omnistage.models._qwen_omni.tiny import hub_name, write_processor
from omnistage.models._qwen_omni.video_options import video_options
from omnistage.models.causal_lm import tiny as causal_lm
from omnistage.models.qwen2_5_omni import tiny as omni

TEXT = "Déjà vu: 你好, мир! 🦊👩‍👩‍👧 naïve\n\ttabs  and 3.14 user <b>x</b>"
SMALL_VIDEO = {"size": {"shortest_edge": 56 * 56, "longest_edge": 64 * 28 * 28}}
GREEDY = {
    "thinker_do_sample": False,
    "talker_do_sample": False,
    "thinker_max_new_tokens": 8,
    "talker_max_new_tokens": 30,
}
SCALES = [step / 20 for step in range(21)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "omni"
    omni.write(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import Qwen2_5OmniForConditionalGeneration

    return Qwen2_5OmniForConditionalGeneration.from_pretrained(folder)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    from transformers import Qwen2_5OmniProcessor

    return Qwen2_5OmniProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def lm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "lm"
    causal_lm.write(path)
    return path


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(shard))
    return tensors


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def media() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    image = random.integers(0, 255, (84, 112, 3), dtype=np.uint8)
    sound = (0.3 * np.sin(2 * np.pi * 440 * np.arange(3 * 16000) / 16000)).astype(np.float32)
    video = random.integers(0, 255, (8, 3, 56, 84), dtype=np.uint8)  # frames, channels, height, width: 4 s at 2 fps
    return image, sound, video


def test_stock_transformers_loads_every_tensor_as_stored(folder: Path, model: Any) -> None:
    stored = stored_tensors(folder)
    loaded = {hub_name(name): tensor for name, tensor in model.state_dict().items()}

    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)


def test_tensor_names_are_those_of_the_published_checkpoint(folder: Path) -> None:
    names = stored_tensors(folder).keys()

    assert not [name for name in names if "language_model" in name]
    assert {
        "thinker.model.embed_tokens.weight",
        "thinker.model.layers.0.self_attn.q_proj.bias",
        "thinker.visual.blocks.0.attn.q.weight",
        "thinker.audio_tower.conv1.weight",
        "thinker.lm_head.weight",
        "talker.model.layers.0.mlp.down_proj.weight",
        "talker.codec_head.weight",
        "talker.thinker_to_talker_proj.weight",
        "token2wav.code2wav_dit_model.transformer_blocks.0.attn.to_q.weight",
        "token2wav.code2wav_bigvgan_model.ups.0.0.weight",
    } <= set(names)


def test_shards_and_index_agree_and_the_folder_is_small(folder: Path) -> None:
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())

    assert len(shards) >= 3
    assert sorted(set(index["weight_map"].values())) == shards
    assert all(name in load_file(folder / file) for name, file in itertools.islice(index["weight_map"].items(), 5))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 30_000_000
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2_5OmniModel"]


def test_the_speakers_are_the_only_pickle_and_hold_only_tensors(folder: Path) -> None:
    assert {file.suffix for file in folder.iterdir()} == {".json", ".txt", ".safetensors", ".pt"}
    assert [file.name for file in folder.glob("*.pt")] == ["spk_dict.pt"]

    speakers = torch.load(folder / "spk_dict.pt", weights_only=True)

    assert set(speakers) >= {"Chelsie", "Ethan"}
    assert speakers["Chelsie"]["cond"].shape == (1, 192)
    assert speakers["Chelsie"]["ref_mel"].shape[::2] == (1, 80)
    assert speakers["Chelsie"]["bos_token"] != speakers["Ethan"]["bos_token"]


def test_any_text_survives_the_tokenizer(processor: Any, lm_folder: Path) -> None:
    from transformers import AutoTokenizer

    for tokenizer in (processor.tokenizer, AutoTokenizer.from_pretrained(lm_folder)):
        ids = tokenizer(TEXT).input_ids
        assert tokenizer.decode(ids) == TEXT
        assert tokenizer("user").input_ids == [common.USER_TOKEN_ID]


def test_token_ids_agree_between_tokenizer_thinker_and_talker(processor: Any, model: Any) -> None:
    tokenizer, thinker, talker = processor.tokenizer, model.config.thinker_config, model.config.talker_config

    for part in (thinker, talker):
        assert part.audio_token_index == tokenizer.convert_tokens_to_ids(processor.audio_token)
        assert part.image_token_index == tokenizer.convert_tokens_to_ids(processor.image_token)
        assert part.video_token_index == tokenizer.convert_tokens_to_ids(processor.video_token)
        assert part.audio_start_token_id == tokenizer.convert_tokens_to_ids(processor.audio_bos_token)
        assert part.vision_start_token_id == tokenizer.convert_tokens_to_ids(processor.vision_bos_token)
    assert model.thinker.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id[0] == tokenizer.eos_token_id
    text_ids = (talker.tts_text_start_token_id, talker.tts_text_end_token_id, talker.tts_text_pad_token_id)
    assert all(len(tokenizer) <= index < thinker.text_config.vocab_size for index in text_ids)
    assert talker.tts_codec_mask_token_id < talker.vocab_size


def test_special_tokens_keep_their_place_when_the_vocabulary_leaves_a_gap(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ids = omni.special_ids(omni.REAL_VOCAB)
    write_processor(tmp_path, "Qwen2_5OmniProcessor", ids, omni.TOKEN_ATTRIBUTES, omni.CHAT_TEMPLATE, {}, seconds=300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    assert ids["<|IMAGE|>"] == 151655
    assert tokenizer("<|im_start|>user<|IMAGE|>").input_ids == [151644, 872, 151655]
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT


@pytest.mark.parametrize("kind", ["text", "image", "audio", "video", "audio in video"])
def test_stock_generate_answers_with_text_and_sound(kind: str, model: Any, processor: Any) -> None:
    image, sound, video = media()
    with_sound: Any = video_options(processor, 2.0, [0], with_sound=True)
    with_sound["videos_kwargs"] |= SMALL_VIDEO
    part, given = {
        "text": ([], {}),
        "image": ([{"type": "image"}], {"images": [image]}),
        "audio": ([{"type": "audio"}], {"audio": [sound]}),
        "video": ([{"type": "video"}], {"videos": [video], "videos_kwargs": SMALL_VIDEO}),
        "audio in video": (
            [{"type": "video"}],
            {"videos": [video], "audio": [sound], **with_sound},
        ),
    }[kind]
    conversation = [{"role": "user", "content": [*part, {"type": "text", "text": "What is this? 🦊"}]}]
    prompt = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=prompt, return_tensors="pt", **given)
    # transformers hands every unprefixed input to the talker too, which refuses pixels.
    inputs = {f"thinker_{name}" if name.startswith("pixel") else name: value for name, value in inputs.items()}

    torch.manual_seed(0)
    ids, wave = model.generate(**inputs, **GREEDY, use_audio_in_video=kind == "audio in video")

    answer = ids[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(set(answer)) > 3
    assert max(answer) < common.BASE_VOCAB or answer[-1] == model.thinker.generation_config.eos_token_id
    assert wave.shape == (30 * 480,)
    assert 0.01 < wave.std().item() < 0.5
    assert wave.abs().max().item() < 1.0


def test_media_change_the_answer(model: Any, processor: Any) -> None:
    image, _, _ = media()
    prompt = "<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|><|im_end|>\n<|im_start|>assistant\n"
    answers = []
    for picture in (image, 255 - image):
        inputs = processor(text=prompt, images=[picture], return_tensors="pt")
        answers.append(model.thinker.generate(**inputs, max_new_tokens=8, do_sample=False)[0, -8:].tolist())

    assert answers[0] != answers[1]


def test_greedy_choices_are_clear_and_varied(model: Any, processor: Any) -> None:
    inputs = processor(text="<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    result = model.thinker.generate(
        **inputs, max_new_tokens=32, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    best = torch.cat(result.logits).topk(2).values

    assert (best[:, 0] - best[:, 1]).min().item() > 1e-3
    assert len(set(result.sequences[0, -32:].tolist())) > 16


def test_the_chat_template_writes_chatml_with_media(processor: Any) -> None:
    content = [{"type": kind} for kind in ("image", "audio", "video")] + [{"type": "text", "text": "Hi"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]

    assert processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|><|audio_bos|><|AUDIO|><|audio_eos|>"
        "<|vision_bos|><|VIDEO|><|vision_eos|>Hi<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("write", [omni.write, causal_lm.write], ids=["omni", "causal_lm"])
def test_the_seed_decides_every_byte(write: Any, tmp_path: Path) -> None:
    seen: list[float] = []
    write(tmp_path / "a", seed=3, progress=lambda _, fraction: seen.append(fraction))
    write(tmp_path / "b", seed=3)
    write(tmp_path / "c", seed=4)
    first, second, third = (digests(tmp_path / name) for name in "abc")

    assert first == second
    assert {name for name in first if first[name] != third[name]} == {
        name for name in first if name.endswith((".safetensors", ".pt"))
    }
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    with pytest.raises(CheckpointError, match="not empty"):
        write(tmp_path / "a")


def test_a_model_built_without_files_gets_the_same_weights(folder: Path) -> None:
    from transformers import Qwen2_5OmniForConditionalGeneration

    built = Qwen2_5OmniForConditionalGeneration(omni.config_for(0.0))
    omni.initialise(built)
    stored = stored_tensors(folder)

    assert all(torch.equal(stored[hub_name(name)], tensor) for name, tensor in built.state_dict().items())


def test_full_scale_has_the_true_numbers() -> None:
    config = omni.config_for(1.0)
    thinker, talker, token2wav = config.thinker_config, config.talker_config, config.token2wav_config
    text, vision, audio = thinker.text_config, thinker.vision_config, thinker.audio_config
    dit = token2wav.dit_config

    assert (text.hidden_size, text.num_hidden_layers, text.num_attention_heads) == (3584, 28, 28)
    assert (text.num_key_value_heads, text.intermediate_size, text.vocab_size) == (4, 18944, 152064)
    assert list(text.rope_parameters["mrope_section"]) == [16, 24, 24]
    assert (talker.hidden_size, talker.num_hidden_layers, talker.num_attention_heads) == (896, 24, 12)
    assert (talker.num_key_value_heads, talker.head_dim) == (4, 128)
    assert (talker.intermediate_size, talker.embedding_size, talker.vocab_size) == (18944, 3584, 8448)
    assert (vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size) == (32, 1280, 16, 3420)
    assert list(vision.fullatt_block_indexes) == [7, 15, 23, 31]
    assert (audio.encoder_layers, audio.d_model, audio.encoder_ffn_dim) == (32, 1280, 5120)
    assert (dit.num_hidden_layers, dit.hidden_size, dit.num_attention_heads, dit.emb_dim) == (22, 1024, 16, 512)
    assert (list(dit.look_ahead_layers), list(dit.look_backward_layers)) == ([10], [0, 20])
    assert list(dit.enc_channels) == [256, 256, 256, 256, 768]
    assert token2wav.bigvgan_config.upsample_initial_channel == 1536
    assert (thinker.user_token_id, thinker.image_token_index, thinker.eos_token_id) == (872, 151655, 151645)
    assert (talker.tts_text_pad_token_id, talker.tts_text_start_token_id) == (151859, 151860)
    assert omni.speakers(152064)["Chelsie"]["bos_token"] == 151872


def sizes(config: dict[str, Any], prefix: str = "") -> dict[str, int]:
    """Every number of a configuration that is a size."""
    words = ("size", "layers", "heads", "head_dim", "depth", "d_model", "ffn_dim", "emb_dim", "channels", "channel")
    found: dict[str, int] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found.update(sizes(value, f"{prefix}{name}."))
        elif isinstance(value, int) and not isinstance(value, bool) and name.endswith(words):
            found[prefix + name] = value
    return found


@pytest.mark.parametrize("config_for", [omni.config_for, causal_lm.config_for], ids=["omni", "causal_lm"])
def test_every_size_grows_with_scale(config_for: Any) -> None:
    steps = [sizes(config_for(scale).to_dict()) for scale in SCALES]

    for smaller, larger in itertools.pairwise(steps):
        assert all(smaller[name] <= larger[name] for name in smaller)
    assert sum(steps[0][name] < steps[-1][name] for name in steps[0]) > 5


@pytest.mark.parametrize("scale", SCALES[::4])
def test_every_scale_is_a_model_that_can_be_built(scale: float) -> None:
    from transformers import LlamaForCausalLM, Qwen2_5OmniForConditionalGeneration

    config = omni.config_for(scale)
    text, talker = config.thinker_config.text_config, config.talker_config
    with torch.device("meta"):
        Qwen2_5OmniForConditionalGeneration(config)
        LlamaForCausalLM(causal_lm.config_for(scale))

    assert text.num_attention_heads % text.num_key_value_heads == 0
    assert talker.num_attention_heads % talker.num_key_value_heads == 0
    assert sum(text.rope_parameters["mrope_section"]) * 2 == text.hidden_size // text.num_attention_heads
    assert sum(talker.rope_parameters["mrope_section"]) * 2 == talker.head_dim


@pytest.mark.parametrize(("scale", "millions"), [(0.5, (90, 115)), (1.0, (1000, 1200))])
def test_causal_lm_sizes_are_as_documented(scale: float, millions: tuple[int, int]) -> None:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in LlamaForCausalLM(causal_lm.config_for(scale)).parameters())

    assert millions[0] <= count / 1e6 <= millions[1]


@pytest.mark.parametrize("scale", [-0.1, 1.1])
def test_a_scale_outside_its_range_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="scale"):
        omni.config_for(scale)
    with pytest.raises(ConfigError, match="scale"):
        causal_lm.config_for(scale)


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        omni.config_for(0.0, vocab_size=512)


def test_causal_lm_generates_through_its_chat_template(lm_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(lm_folder)
    model = AutoModelForCausalLM.from_pretrained(lm_folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()

    assert len(list(lm_folder.glob("*.safetensors"))) >= 3
    assert len(set(answer)) > 16
    assert tokenizer.decode(answer)


def test_torchvision_is_prepared_once_from_any_thread() -> None:
    threads = [threading.Thread(target=compat.prepare_torchvision) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compat.prepare_torchvision()

    import torchvision

    assert torchvision.__version__


def test_preparing_torchvision_is_enough_for_the_video_processor() -> None:
    # In a new interpreter, where nothing has imported torchvision yet.
    code = (
        "from omnistage.compat import prepare_torchvision\n"
        "prepare_torchvision()\n"
        "from transformers import Qwen2VLVideoProcessor\n"
        "Qwen2VLVideoProcessor()\n"
    )
    root = Path(compat.__file__).parents[1]

    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_a_missing_torchvision_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(compat.importlib.util, "find_spec", lambda name: None)

    compat.prepare_torchvision(required=False)
    with pytest.raises(MissingDependencyError, match=r"omnistage\[qwen\]"):
        compat.prepare_torchvision()
