"""Small random checkpoints of speech models, for `speech_coverage.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models.speech_to_text import tiny as recognizers
from omnistage.models.text_to_speech import tiny as speakers

sys.path.insert(0, str(Path(__file__).parent))
import speaker_checkpoints as more
from listener_checkpoints import LISTENERS

LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]
Build = Callable[[Path, str], None]
_AUTO = transformers.models.auto.modeling_auto
_CTC = {
    **_AUTO.MODEL_FOR_CTC_MAPPING_NAMES,
    **_AUTO.MODEL_FOR_RNNT_MAPPING_NAMES,
    **_AUTO.MODEL_FOR_TDT_MAPPING_NAMES,
}
CTC_TYPES = tuple(_CTC)
"""And transducers, whose checkpoints are made in the same way."""
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "conv_pos_kernel_size": 5,
    "output_hidden_size": 64,
    "vocab_size": len(LETTERS),
    "pad_token_id": 0,
    "add_adapter": False,
    "num_key_value_heads": 4,
    "decoder_hidden_size": 32,
    "num_decoder_layers": 1,
}


def build_ctc(folder: Path, model_type: str) -> None:
    """A model of letters, with the feature extractor of its type."""
    mapping = transformers.models.auto.feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES
    kind = "SeamlessM4TFeatureExtractor" if model_type == "wav2vec2-bert" else mapping.get(model_type)
    extractor = getattr(transformers, kind or "Wav2Vec2FeatureExtractor")()
    config = transformers.AutoConfig.for_model(model_type)
    _shrink(config)
    inner = getattr(config, "encoder_config", None)
    if inner is not None:
        _shrink(inner)
        extractor = type(extractor)(feature_size=getattr(inner, "num_mel_bins", 80))
    config.vocab_size = len(LETTERS)
    if hasattr(config, "conv_dim"):
        config.conv_dim = (32,) * len(config.conv_dim)
    tokenizer = _letters(folder)
    if inner is not None:  # models of word pieces, whose blank is the last class
        tokenizer, config.vocab_size = _pieces(folder, model_type), common.BASE_VOCAB + 3
        config.pad_token_id = common.BASE_VOCAB
        if hasattr(config, "blank_token_id"):
            config.blank_token_id = common.BASE_VOCAB
    model = getattr(transformers, _CTC[model_type])(config)
    if model_type == "parakeet_ctc":
        more.spread(model)
    if isinstance(model, transformers.GenerationMixin):
        model.generation_config.decoder_start_token_id = config.pad_token_id
    model.save_pretrained(folder)
    names = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES
    processor = getattr(transformers, names.get(model_type, "Wav2Vec2Processor"))
    processor(extractor, tokenizer).save_pretrained(folder)


def _shrink(config: Any) -> None:
    for name, value in _SMALL.items():
        if getattr(config, name, None) is not None or name == "pad_token_id":
            setattr(config, name, value)


def _letters(folder: Path) -> Any:
    path = folder / "vocab.json"
    path.write_text(json.dumps({letter: place for place, letter in enumerate(LETTERS)}), encoding="utf-8")
    return transformers.Wav2Vec2CTCTokenizer(str(path))


def _pieces(folder: Path, model_type: str = "") -> Any:
    ids = {"<pad>": common.BASE_VOCAB, "</s>": common.BASE_VOCAB + 1, "<s>": common.BASE_VOCAB + 2}
    more = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    name = "ParakeetTokenizer" if model_type.startswith("parakeet") else "PreTrainedTokenizerFast"
    common.write_tokenizer(folder, ids, common.tokenizer_settings("PreTrainedTokenizerFast", 512, more, qwen=False))
    base = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    if name == "PreTrainedTokenizerFast":
        return base
    return getattr(transformers, name)(
        tokenizer_object=base.backend_tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )


_ENDS = {
    "pad_token_id": common.BASE_VOCAB,
    "eos_token_id": common.BASE_VOCAB + 1,
    "bos_token_id": common.BASE_VOCAB + 2,
    "decoder_start_token_id": common.BASE_VOCAB + 2,
}


def _whisper(folder: Path, model_type: str) -> None:
    del model_type
    recognizers.write(folder)


def _moonshine(folder: Path, model_type: str) -> None:
    config = transformers.MoonshineConfig(
        vocab_size=common.BASE_VOCAB + 3,
        hidden_size=64,
        intermediate_size=96,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        **_ENDS,
    )
    model = transformers.MoonshineForConditionalGeneration(config)
    _generated(model, folder)
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    transformers.Wav2Vec2Processor(extractor, _pieces(folder)).save_pretrained(folder)


def _speech_to_text(folder: Path, model_type: str) -> None:
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 64, "conv_channels": 32}
    config = transformers.Speech2TextConfig(vocab_size=common.BASE_VOCAB + 3, **layers, **heads, **_ENDS)
    model = transformers.Speech2TextForConditionalGeneration(config)
    more.spread(model)
    _generated(model, folder, factor=1.0)
    extractor = transformers.Speech2TextFeatureExtractor()
    transformers.Speech2TextProcessor(extractor, _pieces(folder)).save_pretrained(folder)


def _speecht5_recognizer(folder: Path, model_type: str) -> None:
    sizes: dict[str, Any] = {**speakers._SPEECHT5, "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16}
    sizes |= {"num_conv_pos_embedding_groups": 4, "max_text_positions": 64}
    config = transformers.SpeechT5Config(**sizes, **_ENDS, vocab_size=common.BASE_VOCAB + 3)
    _generated(transformers.SpeechT5ForSpeechToText(config), folder)
    extractor = transformers.SpeechT5FeatureExtractor()
    transformers.SpeechT5Processor(extractor, _pieces(folder)).save_pretrained(folder)


def _two_parts(folder: Path, model_type: str) -> None:
    encoder = transformers.Wav2Vec2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=(32,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    decoder = transformers.BertConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=common.BASE_VOCAB + 3,
        is_decoder=True,
        add_cross_attention=True,
    )
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **_ENDS)
    _generated(transformers.SpeechEncoderDecoderModel(config=config), folder)
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False)
    transformers.Wav2Vec2Processor(extractor, _pieces(folder)).save_pretrained(folder)


def _generated(model: Any, folder: Path, factor: float = 3.0) -> None:
    """Short texts that differ: random heads prefer one token otherwise."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(factor)
    model.generation_config = transformers.GenerationConfig(
        **_ENDS,
        max_length=24,
        min_length=8,
        suppress_tokens=[_ENDS["pad_token_id"], _ENDS["bos_token_id"]],
        exponential_decay_length_penalty=(10, 2.0),  # random weights find no end by themselves
    )
    model.save_pretrained(folder)


RECOGNIZERS: dict[str, Build] = {
    "whisper": _whisper,
    "moonshine": _moonshine,
    "speech_to_text": _speech_to_text,
    "speecht5": _speecht5_recognizer,
    "speech-encoder-decoder": _two_parts,
    **LISTENERS,
}


# ------------------------------------------------------------------------------------------------- text to speech


def _vits(folder: Path, model_type: str) -> None:
    speakers.write(folder, variant="vits")


def _speecht5(folder: Path, model_type: str) -> None:
    speakers.write(folder, variant="speecht5")


def _vocab(size: int) -> dict[str, int]:
    return {"input_vocab_size": size, "output_vocab_size": size}


def _bark(folder: Path, model_type: str) -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "block_size": 1024}
    codec = transformers.EncodecConfig(num_filters=4, hidden_size=16, codebook_size=1024, codebook_dim=16)
    config = transformers.BarkConfig(
        semantic_config=transformers.BarkSemanticConfig(**sizes, input_vocab_size=129_600, output_vocab_size=10_048),
        coarse_acoustics_config=transformers.BarkCoarseConfig(
            **sizes, input_vocab_size=12_096, output_vocab_size=12_096
        ),
        fine_acoustics_config=transformers.BarkFineConfig(**sizes, **_vocab(1056)),
        codec_config=codec,
    )
    model = transformers.BarkModel(config)
    more.spread(model)
    model.save_pretrained(folder)
    kinds = transformers.models.bark.generation_configuration_bark
    parts = {
        "semantic_config": kinds.BarkSemanticGenerationConfig(max_new_tokens=24),
        "coarse_acoustics_config": kinds.BarkCoarseGenerationConfig(),
        "fine_acoustics_config": kinds.BarkFineGenerationConfig(),
    }
    settings = {name: part.to_dict() for name, part in parts.items()}
    common.write_json(folder / "generation_config.json", {**settings, "sample_rate": 24_000, "codebook_size": 1024})
    _pieces(folder)


def _musicgen(folder: Path, model_type: str) -> None:
    text = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=common.BASE_VOCAB + 3, pad_token_id=0
    )
    audio = transformers.EncodecConfig(num_filters=4, hidden_size=16, codebook_size=64, codebook_dim=16)
    sizes: dict[str, Any] = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "num_codebooks": 4, "pad_token_id": 64, "bos_token_id": 64}
    melody = model_type == "musicgen_melody"
    decoder = (transformers.MusicgenMelodyDecoderConfig if melody else transformers.MusicgenDecoderConfig)(**sizes)
    kind = transformers.MusicgenMelodyConfig if melody else transformers.MusicgenConfig
    config = kind(text_encoder=text.to_dict(), audio_encoder=audio.to_dict(), decoder=decoder.to_dict())
    cls = (
        transformers.MusicgenMelodyForConditionalGeneration if melody else transformers.MusicgenForConditionalGeneration
    )
    model = cls(config)
    more.spread(model)
    ends = {"pad_token_id": 64, "bos_token_id": 64, "decoder_start_token_id": 64}
    model.generation_config = transformers.GenerationConfig(**ends, do_sample=True, guidance_scale=3.0, max_length=16)
    model.save_pretrained(folder)
    _pieces(folder)


SPEAKERS: dict[str, Build] = {
    "vits": _vits,
    "speecht5": _speecht5,
    "bark": _bark,
    "musicgen": _musicgen,
    "musicgen_melody": _musicgen,
    "dia": more.dia,
    "higgs_audio_v2": more.higgs,
    "pocket_tts": more.pocket,
    "gradium_phonon_tts": more.pocket,
    "vibevoice": more.vibevoice,
    "seamless_m4t": more.seamless,
    "seamless_m4t_v2": more.seamless,
}


def speak(model: Any, tokenizer: Any, folder: Path, text: str) -> torch.Tensor:
    """As transformers' documentation has it for each type."""
    name = type(model).__name__
    if name in more.SPEAK:
        said: torch.Tensor = more.SPEAK[name](model, folder, text)
        return said
    if name == "BarkModel":
        settings = {"padding": "max_length", "max_length": 256, "add_special_tokens": False}
        inputs = tokenizer(
            text, return_tensors="pt", return_attention_mask=True, return_token_type_ids=False, **settings
        )
        samples: torch.Tensor = model.generate(**inputs)
        return samples
    inputs = tokenizer(text, return_tensors="pt")
    if name == "VitsModel":
        samples = model(inputs.input_ids, speaker_id=0).waveform
    elif name == "SpeechT5ForTextToSpeech":
        vocoder = transformers.SpeechT5HifiGan.from_pretrained(folder / "vocoder").eval()
        transformers.set_seed(5)
        samples = model.generate_speech(
            inputs.input_ids, load_file(folder / "speakers.safetensors")["alto"][None], vocoder=vocoder
        )
    elif name.startswith("Musicgen"):
        samples = model.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask)
    else:
        raise ValueError(f"{name} is not known here")
    return samples
