"""Small random checkpoints of models that speak through a processor or in several parts, for `speech_coverage.py`."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from omnistage.hf import transformers
from omnistage.models import _tiny_common as common

Build = Callable[[Path, str], None]
SEED = 5
_FIRST = common.BASE_VOCAB
_LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_SMALL_DAC: dict[str, Any] = {
    "encoder_hidden_size": 4,
    "decoder_hidden_size": 32,
    "hidden_size": 16,
    "n_codebooks": 9,
    "codebook_size": 1024,
    "codebook_dim": 4,
    "downsampling_ratios": [2, 4],
    "upsampling_ratios": [4, 2],
}


def tokenizer_of(folder: Path, tokens: Sequence[str], **named: str) -> tuple[Any, dict[str, int]]:
    """A tokenizer with these special tokens behind its vocabulary, some of them under a name of their own."""
    names = ("<pad>", "</s>", "<s>", *tokens)
    ids = {token: _FIRST + place for place, token in enumerate(names)}
    more = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    settings = common.tokenizer_settings("PreTrainedTokenizerFast", 4096, more, qwen=False)
    common.write_tokenizer(folder, ids, settings)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=named or None)
    return tokenizer, ids


def spread(model: torch.nn.Module, embeddings: float = 0.5) -> None:
    """Weights that keep what differs from text to text; random ones prefer one token or code otherwise."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "weight_g" not in name and "original0" not in name:
            gain = 3.0 if any(part in name for part in ("q_proj", "k_proj")) else 1.3
            deviation = gain / math.sqrt(math.prod(parameter.shape[1:]))
            parameter.data.normal_(0.0, embeddings if "embed" in name or "codebook" in name else deviation)
    for name, buffer in model.named_buffers():
        if name.endswith("codebook.embed"):  # EnCodec's, which are zero at first: all codes would sound alike
            buffer.normal_(0.0, 5.0)


# ------------------------------------------------------------------------------------------- codes of a codec


def dia(folder: Path, model_type: str = "dia") -> None:
    del model_type
    cross = {"cross_num_attention_heads": 2, "cross_num_key_value_heads": 2, "cross_head_dim": 16}
    config = transformers.DiaConfig(
        encoder_config=transformers.DiaEncoderConfig(**_LAYERS),
        decoder_config=transformers.DiaDecoderConfig(**_LAYERS, **cross, cross_hidden_size=32),
    )
    model = transformers.DiaForConditionalGeneration(config)
    spread(model)
    ends = {"pad_token_id": 1025, "eos_token_id": 1024, "bos_token_id": 1026}
    model.generation_config = transformers.GenerationConfig(
        **ends,
        decoder_start_token_id=1026,
        do_sample=True,
        guidance_scale=3.0,
        temperature=1.8,
        top_k=45,
        max_length=40,
    )
    model.save_pretrained(folder)
    codec = transformers.DacModel(transformers.DacConfig(**_SMALL_DAC, sampling_rate=44_100))
    _save_codec(codec, folder)
    extractor = transformers.DiaFeatureExtractor(hop_length=8)
    transformers.DiaProcessor(extractor, transformers.DiaTokenizer(), codec).save_pretrained(folder)


def higgs(folder: Path, model_type: str = "higgs_audio_v2") -> None:
    del model_type
    special = ["<|AUDIO_OUT|>", "<|audio_out_bos|>", "<|audio_eos|>", "<|reserved_special_token_6|>"]
    tokenizer, ids = tokenizer_of(folder, [*special, "<|eot_id|>"])
    audio = {"audio_token_id": ids["<|AUDIO_OUT|>"], "audio_bos_token_id": ids["<|audio_out_bos|>"]}
    config = transformers.HiggsAudioV2Config(
        **_LAYERS,
        **audio,
        vocab_size=_FIRST + 3 + len(ids),
        audio_delay_token_id=ids["<|reserved_special_token_6|>"],
        num_codebooks=4,
        codebook_size=66,
        audio_stream_bos_id=64,
        audio_stream_eos_id=65,
        pad_token_id=ids["<pad>"],
        bos_token_id=ids["<s>"],
        eos_token_id=ids["<|audio_eos|>"],
    )
    model = transformers.HiggsAudioV2ForConditionalGeneration(config)
    spread(model)
    ends = {"pad_token_id": ids["<pad>"], "eos_token_id": ids["<|audio_eos|>"], "bos_token_id": ids["<s>"]}
    model.generation_config = transformers.GenerationConfig(**ends, do_sample=True, top_k=20, max_new_tokens=32)
    model.generation_config.ras_win_len, model.generation_config.ras_win_max_num_repeat = 7, 2
    model.save_pretrained(folder)
    semantic = transformers.HubertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, conv_dim=(8,) * 7,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    acoustic = {**_SMALL_DAC, "downsampling_ratios": [8, 5, 4, 2], "upsampling_ratios": [8, 5, 4, 2]}
    settings = transformers.HiggsAudioV2TokenizerConfig(
        acoustic_model_config=transformers.DacConfig(**acoustic).to_dict(),
        semantic_model_config=semantic.to_dict(),
        codebook_size=64,
        codebook_dim=8,
        target_bandwidths=[1.8],
    )
    codec = transformers.HiggsAudioV2TokenizerModel(settings)
    _save_codec(codec, folder)
    template = (
        "{{ '<s>' }}{% for message in messages %}[{{ message['role'] }}]{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<|audio_out_bos|>{% endif %}"
    )
    extractor = transformers.DacFeatureExtractor(sampling_rate=24_000, hop_length=320)
    transformers.HiggsAudioV2Processor(
        extractor, tokenizer, codec, chat_template=template, audio_stream_bos_id=64, audio_stream_eos_id=65
    ).save_pretrained(folder)


def _save_codec(codec: Any, folder: Path) -> None:
    place = folder / "audio_tokenizer"
    spread(codec)
    codec.save_pretrained(place)
    codec.config._name_or_path = codec.name_or_path = "somebody/audio-tokenizer"  # as published ones have it


# ---------------------------------------------------------------------------------------------------- latents


_FLOW: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "latent_dim": 8,
    "condition_dim": 32,
    "frequency_embedding_size": 16,
}


def pocket(folder: Path, model_type: str) -> None:
    """Pocket TTS, or Phonon, whose voices are those of another encoder."""
    names = {"audio_prompt_token": "<|audio_prompt|>", "audio_latent_token": "<|audio_latent|>"}
    names["audio_bos_token"] = "<|audio_bos|>"
    if model_type == "pocket_tts":
        names["audio_prompt_bos_token"] = "<|audio_prompt_bos|>"
    tokenizer, ids = tokenizer_of(folder, list(names.values()), **names)
    tokens = {f"{name}_id": ids[token] for name, token in names.items()}
    tokens |= {"pad_token_id": ids["<pad>"], "vocab_size": _FIRST + 3 + len(names)}
    if model_type == "pocket_tts":
        config = transformers.PocketTTSConfig(**_LAYERS, **tokens, latent_dim=8, flow_head_config=_FLOW)
        model = transformers.PocketTTSForConditionalGeneration(config)
        width = 8
    else:
        more = {"audio_prompt_dim": 12, "num_speakers_embedding_dim": 4, "duration_delta_embedding_dim": 8}
        config = transformers.GradiumPhononTTSConfig(**_LAYERS, **tokens, **more, latent_dim=8, flow_head_config=_FLOW)
        model = transformers.GradiumPhononTTSForConditionalGeneration(config)
        width = 12
    spread(model)
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=ids["<pad>"], do_sample=True, temperature=0.7, return_dict_in_generate=True, max_new_tokens=16
    )
    model.save_pretrained(folder)
    codec = transformers.PocketTTSAudioTokenizerModel(
        transformers.PocketTTSAudioTokenizerConfig(
            hidden_size=32, num_filters=4, upsampling_ratios=[4, 2], upsample_groups=32, num_hidden_layers=1,
            intermediate_size=48, num_attention_heads=2, num_key_value_heads=2, latent_stride=16, latent_dim=8,
        )
    )  # fmt: skip
    _save_codec(codec, folder)
    template = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
        f"{names.get('audio_prompt_bos_token', '')}<|audio_prompt|>"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}<|audio_bos|>"
    )
    extractor = transformers.PocketTTSFeatureExtractor()
    transformers.PocketTTSProcessor(
        extractor, tokenizer, audio_tokenizer=codec, chat_template=template
    ).save_pretrained(folder)
    voices = folder / "voices"
    voices.mkdir(exist_ok=True)
    for place, name in enumerate(("alto", "bass")):
        save_file({"audio_prompt_latents": torch.randn(5 + place, width)}, voices / f"{name}.safetensors")


def vibevoice(folder: Path, model_type: str = "vibevoice") -> None:
    del model_type
    tokenizer, ids = tokenizer_of(folder, ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"])
    audio = {"num_filters": 4, "downsampling_ratios": [2, 4], "depths": [1, 1, 1], "layer_scale_init_value": 1.0}
    text = transformers.Qwen2Config(
        **{name: value for name, value in _LAYERS.items() if name != "head_dim"}, vocab_size=_FIRST + 6,
    )  # fmt: skip
    head = {"num_hidden_layers": 2, "intermediate_size": 48, "frequency_embedding_size": 16}
    config = transformers.VibeVoiceConfig(
        text_config=text.to_dict(),
        audio_config={"model_type": "vibevoice_acoustic_tokenizer", "hidden_size": 8, **audio},
        semantic_model_config={"model_type": "vibevoice_acoustic_tokenizer_encoder", "hidden_size": 12, **audio},
        diffusion_head_config=head,
        pad_token_id=ids["<pad>"],
        eos_token_id=ids["</s>"],
        audio_bos_token_id=ids["<|vision_start|>"],
        audio_eos_token_id=ids["<|vision_end|>"],
        audio_token_id=ids["<|vision_pad|>"],
    )
    model = transformers.VibeVoiceForConditionalGeneration(config)
    spread(model)
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=ids["<pad>"], eos_token_id=ids["</s>"], bos_token_id=ids["<s>"], guidance_scale=1.3,
        max_new_tokens=12,
    )  # fmt: skip
    model.generation_config.noise_scheduler_class = "DPMSolverMultistepScheduler"
    model.generation_config.suppress_tokens = [ids["</s>"], ids["<|vision_start|>"], ids["<|vision_end|>"]]
    scheduler = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"}
    model.generation_config.noise_scheduler_config = scheduler
    model.generation_config.num_diffusion_steps = 3
    model.save_pretrained(folder)
    template = (
        "{% for message in messages %}Speaker {{ message['role'] }}:{% for part in message['content'] %}"
        "{% if part['type'] == 'audio' %}<|vision_start|><|vision_pad|><|vision_end|>{% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}<|vision_start|>{% endif %}"
    )
    extractor = transformers.VibeVoiceAcousticTokenizerFeatureExtractor(pad_to_multiple_of=8)
    transformers.VibeVoiceProcessor(extractor, tokenizer, chat_template=template).save_pretrained(folder)


# ------------------------------------------------------------------------------------------------- SeamlessM4T


_CODES = ("deu", "eng", "fra")
_SEAMLESS: dict[str, Any] = {
    "hidden_size": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 2,
    "speech_encoder_intermediate_size": 48,
    "t2u_encoder_layers": 1,
    "t2u_decoder_layers": 1,
    "t2u_encoder_ffn_dim": 48,
    "t2u_decoder_ffn_dim": 48,
    "t2u_encoder_attention_heads": 2,
    "t2u_decoder_attention_heads": 2,
    "upsample_initial_channel": 32,
    "upsample_rates": [2, 2],
    "upsample_kernel_sizes": [4, 4],
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3]],
    "unit_embed_dim": 16,
    "lang_embed_dim": 8,
    "spkr_embed_dim": 8,
    "vocoder_num_langs": 4,
    "vocoder_num_spkrs": 4,
    "t2u_vocab_size": 50,
    "unit_hifi_gan_vocab_size": 50,
    "vocoder_offset": 0,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def seamless(folder: Path, model_type: str, *, hears: bool = False) -> None:
    """SeamlessM4T of either version, which speaks a text or writes speech down."""
    letters = [*"abcdefghijklmnopqrstuvwxyz'", "▁"]
    special = ["<pad>", "<unk>", "<s>", "</s>"]
    vocab = {token: place for place, token in enumerate([*special, *letters])}
    tokenizer = transformers.SeamlessM4TTokenizer(
        vocab=vocab, merges=[], src_lang="eng", tgt_lang="eng",
        additional_special_tokens=[f"__{code}__" for code in _CODES],
    )  # fmt: skip
    size, second = len(tokenizer), model_type == "seamless_m4t_v2"
    sizes = {**_SEAMLESS, "vocab_size": size}
    if second:
        more = {"char_vocab_size": size, "t2u_variance_predictor_embed_dim": 32, "t2u_variance_predictor_hidden_dim": 8}
        config = transformers.SeamlessM4Tv2Config(**sizes, **more)
    else:
        config = transformers.SeamlessM4TConfig(**sizes)
    prefix = "SeamlessM4Tv2For" if second else "SeamlessM4TFor"
    model = getattr(transformers, f"{prefix}{'SpeechToText' if hears else 'TextToSpeech'}")(config)
    for name, part in model.named_children():
        if name != "vocoder":
            spread(part, 0.1)
    if not hears:
        _speak_every_unit(model)
    codes = {code: tokenizer.convert_tokens_to_ids(f"__{code}__") for code in _CODES}
    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    numbered = {code: place for place, code in enumerate(_CODES)}
    settings = transformers.GenerationConfig(**ends, max_length=24, min_length=10)
    settings.text_decoder_lang_to_code_id = codes
    settings.t2u_lang_code_to_id = {code: 40 + place for code, place in numbered.items()}
    settings.vocoder_lang_code_to_id = numbered
    settings.suppress_tokens = [0, 1, 2, *codes.values()]
    if hears:
        settings.exponential_decay_length_penalty = (12, 2.0)  # random weights find no end by themselves
    if second:
        settings.id_to_text = {str(place): token for token, place in tokenizer.get_vocab().items()}
        settings.char_to_id = dict(tokenizer.get_vocab())
    model.generation_config = settings
    model.save_pretrained(folder)
    extractor = transformers.SeamlessM4TFeatureExtractor()
    transformers.SeamlessM4TProcessor(extractor, tokenizer).save_pretrained(folder)


def _speak_every_unit(model: Any) -> None:
    """Random durations are near nothing otherwise."""
    for name, parameter in model.named_parameters():
        if "dur_predictor.proj.bias" in name or "duration_predictor.proj.bias" in name:
            parameter.data.fill_(1.2)


# ---------------------------------------------------------------------------- as transformers' documentation has it


def _processor(folder: Path) -> Any:
    """With the audio tokenizer of the folder: the configuration names one elsewhere."""
    settings = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
    named = settings.get("audio_tokenizer")
    if named is None:
        return transformers.AutoProcessor.from_pretrained(folder)
    settings["audio_tokenizer"] = {**named, "audio_tokenizer_name_or_path": str(folder / "audio_tokenizer")}
    with tempfile.TemporaryDirectory() as place:
        copied = Path(place) / "model"
        shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("model*.safetensors", "audio_tokenizer"))
        (copied / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")
        processor = transformers.AutoProcessor.from_pretrained(copied)
    processor.audio_tokenizer.eval()
    return processor


def _talk(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def _speak_dia(model: Any, folder: Path, text: str) -> Any:
    processor = _processor(folder)
    transformers.set_seed(SEED)
    return processor.batch_decode(model.generate(**processor(text=[text], padding=True, return_tensors="pt")))[0]


def _speak_higgs(model: Any, folder: Path, text: str) -> Any:
    processor = _processor(folder)
    transformers.set_seed(SEED)
    system = "Generate audio following instruction."
    talk = [_talk("system", {"type": "text", "text": system}), _talk("user", {"type": "text", "text": text})]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.batch_decode(model.generate(**processor.apply_chat_template(talk, **options)))[0]


def _speak_pocket(model: Any, folder: Path, text: str) -> Any:
    processor = _processor(folder)
    transformers.set_seed(SEED)
    voice = load_file(folder / "voices" / "alto.safetensors")["audio_prompt_latents"]
    prompt = processor.apply_chat_template([_talk("user", {"type": "audio"}, {"type": "text", "text": text})])
    inputs = processor(text=prompt, audio_prompt_latents=[voice], return_tensors="pt")
    output = model.generate(**inputs)
    return processor.decode(output.audio_latents, output.audio_latents_mask)[0]


def _speak_vibevoice(model: Any, folder: Path, text: str) -> Any:
    processor = _processor(folder)
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    transformers.set_seed(SEED)
    inputs = processor.apply_chat_template([_talk("0", {"type": "text", "text": text})], **options)
    return model.generate(**inputs)[0]


def _speak_seamless(model: Any, folder: Path, text: str) -> Any:
    processor = _processor(folder)
    return model.generate(**processor(text=text, src_lang="eng", return_tensors="pt"), tgt_lang="eng")[0]


SPEAK: dict[str, Callable[[Any, Path, str], Any]] = {
    "DiaForConditionalGeneration": _speak_dia,
    "HiggsAudioV2ForConditionalGeneration": _speak_higgs,
    "PocketTTSForConditionalGeneration": _speak_pocket,
    "GradiumPhononTTSForConditionalGeneration": _speak_pocket,
    "VibeVoiceForConditionalGeneration": _speak_vibevoice,
    "SeamlessM4TForTextToSpeech": _speak_seamless,
    "SeamlessM4Tv2ForTextToSpeech": _speak_seamless,
}
