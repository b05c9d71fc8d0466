"""Random checkpoints of models that speak, in the layouts that published ones have."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from omnistage.core.verification import Progress
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models.text_to_speech.processor import SPEAKERS

_LETTERS = "abcdefghijklmnopqrstuvwxyz '-"
_VITS: dict[str, object] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 32,
    "flow_size": 16,
    "spectrogram_bins": 8,
    "duration_predictor_num_flows": 2,
    "duration_predictor_filter_channels": 16,
    "prior_encoder_num_flows": 2,
    "upsample_initial_channel": 32,
    "upsample_rates": [8, 4],
    "upsample_kernel_sizes": [16, 8],
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3]],
    "speaker_embedding_size": 8,
    "num_speakers": 3,
    "sampling_rate": 16_000,
}
_SPEECHT5: dict[str, object] = {
    "hidden_size": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 20,
    "speech_decoder_prenet_units": 32,
    "speech_decoder_postnet_units": 32,
    "speaker_embedding_dim": 16,
    "max_text_positions": 100,
}


def write(
    folder: Path, *, seed: int = 0, scale: float = 0.0, variant: str = "vits", progress: Progress | None = None
) -> None:
    """A VITS with three voices, or a SpeechT5 with its vocoder and two."""
    common.start(folder, scale, variant, ("vits", "speecht5"))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        (_write_vits if variant == "vits" else _write_speecht5)(folder)
    if progress is not None:
        progress("weights written", 1.0)


def _write_vits(folder: Path) -> None:
    path = folder / "vocab.json"
    symbols = ["<pad>", *_LETTERS, "<unk>"]
    path.write_text(json.dumps({symbol: place for place, symbol in enumerate(symbols)}), encoding="utf-8")
    tokenizer = transformers.VitsTokenizer(str(path), language="eng", phonemize=False, is_uroman=False)
    tokenizer.save_pretrained(folder)
    transformers.VitsModel(transformers.VitsConfig(**_VITS, vocab_size=len(symbols))).save_pretrained(folder)


def _write_speecht5(folder: Path) -> None:
    ids = {"<pad>": common.BASE_VOCAB, "</s>": common.BASE_VOCAB + 1, "<s>": common.BASE_VOCAB + 2}
    more = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    common.write_tokenizer(folder, ids, common.tokenizer_settings("PreTrainedTokenizerFast", 100, more, qwen=False))
    tokens = {"pad_token_id": ids["<pad>"], "eos_token_id": ids["</s>"], "bos_token_id": ids["<s>"]}
    config = transformers.SpeechT5Config(**_SPEECHT5, **tokens, vocab_size=common.BASE_VOCAB + 3)
    model = transformers.SpeechT5ForTextToSpeech(config)
    model.speech_decoder_postnet.prob_out.bias.data.fill_(-5.0)  # or it would stop at once
    model.save_pretrained(folder)
    vocoder = transformers.SpeechT5HifiGanConfig(
        model_in_dim=20, upsample_initial_channel=32, upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8]
    )
    hifigan = transformers.SpeechT5HifiGan(vocoder)
    for parameter in hifigan.parameters():  # else the audio would be silent
        parameter.data.mul_(8.0)
    hifigan.save_pretrained(folder / "vocoder")
    save_file({name: torch.randn(16) for name in ("alto", "bass")}, folder / SPEAKERS)
