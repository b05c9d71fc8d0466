"""Random checkpoints of models that transcribe, in the layouts that published ones have."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from omnistage.core.verification import Progress
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common

WINDOW_SECONDS = 4
"""Of a Whisper; published ones have 30."""
LANGUAGES = ("en", "de", "fr")
_STEP = 0.02
"""Seconds between two timestamps."""
_SIZES = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}


def write(
    folder: Path, *, seed: int = 0, scale: float = 0.0, variant: str = "whisper", progress: Progress | None = None
) -> None:
    """A Whisper with windows of 4 seconds, or a wav2vec 2.0 with letters."""
    common.start(folder, scale, variant, ("whisper", "wav2vec2"))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        (_write_whisper if variant == "whisper" else _write_wav2vec2)(folder)
    if progress is not None:
        progress("weights written", 1.0)


def _write_whisper(folder: Path) -> None:
    vocab, merges = common.base_vocabulary()
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    special += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
    special += ["<|notimestamps|>"]
    times = [f"<|{place * _STEP:.2f}|>" for place in range(round(WINDOW_SECONDS / _STEP) + 1)]
    tokenizer = transformers.WhisperTokenizer(vocab=vocab, merges=merges)
    for tokens, is_special in ((special, True), (times, False)):
        tokenizer.add_tokens([transformers.AddedToken(one, special=is_special, normalized=False) for one in tokens])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    config = transformers.WhisperConfig(
        **_SIZES,
        **_HEADS,
        **ends,
        vocab_size=len(tokenizer),
        max_source_positions=50 * WINDOW_SECONDS,
        max_target_positions=64,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    for parameter in model.model.decoder.parameters():  # or every clip would have the same text
        parameter.data.mul_(4.0)
    for layer in model.model.decoder.layers:
        for part, factor in (("q_proj", 4.0), ("k_proj", 4.0), ("v_proj", 4.0), ("out_proj", 16.0)):
            getattr(layer.encoder_attn, part).weight.data.mul_(factor)
    model.model.decoder.embed_tokens.weight.data[end].normal_(std=0.1)  # zeros, as it pads too: never the likeliest
    settings = {
        **ends,
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "alignment_heads": [[0, 1], [1, 2]],
        "suppress_tokens": [1, 2],
        "begin_suppress_tokens": [5, end],
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
        "max_length": 48,
        "exponential_decay_length_penalty": [16, 1.5],  # random weights find no end by themselves
    }
    model.generation_config = transformers.GenerationConfig(**settings)
    extractor = transformers.WhisperFeatureExtractor(chunk_length=WINDOW_SECONDS)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    model.save_pretrained(folder)


def _write_wav2vec2(folder: Path) -> None:
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]
    path = folder / "vocab.json"
    path.write_text(json.dumps({letter: place for place, letter in enumerate(letters)}), encoding="utf-8")
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(path))
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True, return_attention_mask=False)
    transformers.Wav2Vec2Processor(extractor, tokenizer).save_pretrained(folder)
    layers = {"conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    config = transformers.Wav2Vec2Config(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        **layers,
    )
    transformers.Wav2Vec2ForCTC(config).save_pretrained(folder)
