"""Texts as token ids for encoders. Thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omnistage.core.errors import (
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedModalityError,
    UnsupportedModelError,
)
from omnistage.core.messages import ChatMessage
from omnistage.core.types import TOKEN_IDS, Modality, ModuleInput, OmniTokensPrompt, TextBatch
from omnistage.core.validation import is_utf8
from omnistage.models.causal_lm.processor import load_tokenizer
from omnistage.models.loading import positive, read_auto_config
from omnistage.models.text_encoder.layout import Layout, read_layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

LENGTHS, SEGMENTS = "lengths", "segments"
"""Keys of the stage's input beside the tokens: tokens of each text, and the segment of each token."""
_MAX_TOKENS = 2**17
"""Of a text, where the model does not say."""
_MIN_TOKEN_CHARS = 64
MAX_TEXTS = 2048
"""Of a request, as with OpenAI."""


class EncoderProcessor:
    """What sentence-transformers and transformers' tokenizers do with texts: special tokens in them are special."""

    input_modalities = frozenset({Modality.TEXT})

    def __init__(self, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig, layout: Layout) -> None:
        self.prompts = layout.prompts
        self.default_prompt = layout.default_prompt
        self.labels: tuple[str, ...] = tuple(config.id2label[index] for index in range(config.num_labels))
        self.multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
        self.scores_sigmoid = _scores_sigmoid(config)
        """Whether a cross-encoder's single score is its logit's sigmoid, as sentence-transformers has it."""
        self.dimensions = _matryoshka(config)
        """Sizes that an embedding may be cut to: any below the largest where it is empty; None: it may not."""
        hidden = getattr(config.get_text_config(), "hidden_size", None)
        self.size: int | None = hidden * len(layout.pooling) if isinstance(hidden, int) and not layout.dense else None
        """Numbers of an embedding, where the configuration says it."""
        self._tokenizer = tokenizer
        self._lower_case = layout.lower_case
        self._vocab = positive(config.get_text_config(), "vocab_size")
        self._max_tokens = max_tokens(tokenizer, config, layout)
        self._max_chars = self._max_tokens * max(_MIN_TOKEN_CHARS, *map(len, tokenizer.get_vocab()))
        self._tokenize(["a"], None)  # files may hold padding and truncation, which this call switches off for all

    @classmethod
    def load(cls, folder: Path) -> EncoderProcessor:
        return cls(load_tokenizer(folder), read_auto_config(folder), read_layout(folder))

    def encode(self, batch: TextBatch) -> ModuleInput:
        if not batch.texts or len(batch.texts) > 2 * MAX_TEXTS:  # of as many pairs, each encoded by itself
            raise InvalidRequestError(f"must be 1 to {MAX_TEXTS} texts, got {len(batch.texts)}", param="input")
        for place, text in enumerate((*batch.texts, *batch.seconds)):
            self._check(text, place % len(batch.texts))
        ids: list[Sequence[int]] = [text if isinstance(text, tuple) else () for text in batch.texts]
        segments: list[Sequence[int]] = [(0,) * len(one) for one in ids]
        places = [place for place, text in enumerate(batch.texts) if isinstance(text, str)]
        if places:
            firsts = [text for text in batch.texts if isinstance(text, str)]
            encoded = self._tokenize(firsts, list(batch.seconds) or None)
            types = encoded.get("token_type_ids") or [[0] * len(one) for one in encoded["input_ids"]]
            for place, tokens, kinds in zip(places, encoded["input_ids"], types, strict=True):
                ids[place], segments[place] = tokens, kinds
        for place, one in enumerate(ids):
            if len(one) > self._max_tokens:
                raise PromptTooLongError(
                    f"has {len(one)} tokens, and the model takes {self._max_tokens}; shorten it",
                    param=f"input[{place}]",
                )
        lengths = np.array([len(one) for one in ids], dtype=np.int64)
        arrays = {TOKEN_IDS: _joined(ids), LENGTHS: lengths}
        return ModuleInput({**arrays, SEGMENTS: _joined(segments)})

    def _tokenize(self, texts: list[str], seconds: list[str] | None) -> Mapping[str, list[list[int]]]:
        if self._lower_case:
            texts = [text.lower() for text in texts]
            seconds = seconds and [text.lower() for text in seconds]
        encoded: Mapping[str, list[list[int]]] = self._tokenizer(
            texts, seconds, padding=False, truncation=False, return_attention_mask=False
        )
        return encoded

    def _check(self, text: str | tuple[int, ...], place: int) -> None:
        if not text:
            raise InvalidRequestError("is empty; send a text", param=f"input[{place}]")
        if isinstance(text, tuple):
            if not all(0 <= token < self._vocab for token in text):
                raise InvalidRequestError(f"token ids must be from 0 to {self._vocab - 1}", param=f"input[{place}]")
            return
        if not is_utf8(text):
            raise InvalidRequestError("is not valid Unicode text", param=f"input[{place}]")
        if len(text) > self._max_chars:  # before it is tokenised
            raise PromptTooLongError(
                f"has {len(text)} characters, and the model takes {self._max_tokens} tokens; shorten it",
                param=f"input[{place}]",
            )

    def text(self, prompt: str) -> ModuleInput:
        return self.encode(TextBatch((self.prompts.get(self.default_prompt or "", "") + prompt,)))

    def tokens(self, prompt: OmniTokensPrompt) -> ModuleInput:
        if prompt.prompt_embeds is not None:
            raise InvalidRequestError("is not supported by this model; send a text", param="prompt_embeds")
        return self.encode(TextBatch((prompt.prompt_token_ids,)))

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> ModuleInput:
        del messages, tools
        raise UnsupportedModalityError(
            "this model gives embeddings or scores and does not chat; use /v1/embeddings, /v1/score or /v1/rerank",
            param="model",
        )

    def voices(self) -> Sequence[str]:
        return ()


def max_tokens(tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig, layout: Layout) -> int:
    """Tokens of a text: the least that the layout, the tokenizer and the model's positions say."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    stated = (layout.max_tokens, tokenizer.model_max_length, positions)
    return min([_MAX_TOKENS, *(limit for limit in stated if isinstance(limit, int) and limit > 0)])


def _matryoshka(config: PreTrainedConfig) -> tuple[int, ...] | None:
    sizes = getattr(config, "matryoshka_dimensions", None)
    if isinstance(sizes, list | tuple) and all(isinstance(size, int) for size in sizes):
        return tuple(sizes)
    return () if getattr(config, "is_matryoshka", None) is True else None


def _scores_sigmoid(config: PreTrainedConfig) -> bool:
    settings = getattr(config, "sentence_transformers", None)
    activation = settings.get("activation_fn") if isinstance(settings, dict) else None
    activation = activation or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    kind = str(activation).rsplit(".", 1)[-1]
    if kind not in ("Sigmoid", "Identity"):
        raise UnsupportedModelError(f"config.json asks for scores by {kind}; Sigmoid and Identity are served")
    return kind == "Sigmoid"


def _joined(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
