"""Texts for models that speak them. Thread-safe."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omnistage.core.errors import CheckpointError, InvalidRequestError, PromptTooLongError, UnsupportedModalityError
from omnistage.core.messages import ChatMessage, TextPart
from omnistage.core.types import TOKEN_IDS, Modality, ModuleInput, OmniTokensPrompt
from omnistage.core.validation import is_utf8
from omnistage.hf import transformers
from omnistage.models.loading import read_auto_config
from omnistage.models.text_to_speech import voices

MAX_CHARS = 4096
"""Of a text, as OpenAI's speech endpoint has it."""
SPEAKERS = "speakers.safetensors"
"""Of SpeechT5: a vector for each voice, by its name."""
_BARK_TOKENS = 256
_NOTHING = "nothing in this text can be spoken by this model; send some words in its language"


class TextReader(ABC):
    """What speaks one text, as it is."""

    input_modalities = frozenset({Modality.TEXT})

    def __init__(self, names: Sequence[str], max_tokens: int) -> None:
        self._lock = threading.Lock()  # some of these tokenizers are Python code with state
        self._voices = tuple(names)
        self._max_tokens = max_tokens

    def reject_spellings(self, text: str, tokens: Iterable[str]) -> None:
        """Refuse a text that spells one of these special tokens: it would be taken for the token."""
        if (token := next((token for token in tokens if token in text), None)) is not None:
            raise InvalidRequestError(f"contains {token}, the spelling of a special token; remove it", param="prompt")

    @abstractmethod
    def encode(self, text: str) -> Mapping[str, np.ndarray]:
        """Inputs of the model without their first dimension, tokens as `TOKEN_IDS`; called by one thread at a time."""

    def voices(self) -> Sequence[str]:
        return self._voices

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        return [{"role": "assistant", "content": text}]

    def text(self, prompt: str) -> ModuleInput:
        if not is_utf8(prompt):
            raise InvalidRequestError("is not valid Unicode text", param="prompt")
        if len(prompt) > MAX_CHARS:
            raise PromptTooLongError(f"has {len(prompt)} characters, over the limit of {MAX_CHARS}", param="prompt")
        if not prompt.strip():
            raise InvalidRequestError(_NOTHING, param="prompt")
        with self._lock:
            arrays = self.encode(prompt)
        return ModuleInput(arrays)

    def check_length(self, tokens: int) -> None:
        if tokens > self._max_tokens:
            raise PromptTooLongError(
                f"has {tokens} tokens, and the model takes {self._max_tokens}; shorten it", param="prompt"
            )

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> ModuleInput:
        parts = [part for message in messages for part in message.parts]
        if tools or not messages or not all(isinstance(part, TextPart) for part in parts):
            raise UnsupportedModalityError("this model takes one text; send only that", param="messages")
        return self.text("".join(part.text for part in messages[-1].parts if isinstance(part, TextPart)))

    def tokens(self, prompt: OmniTokensPrompt) -> ModuleInput:
        del prompt
        raise InvalidRequestError("this model takes text, not tokens", param="prompt")


class SpeechProcessor(TextReader):
    """Tokenises with the checkpoint's own tokenizer."""

    def __init__(self, tokenizer: Any, names: Sequence[str], options: Mapping[str, object], max_tokens: int) -> None:
        super().__init__(names, max_tokens)
        self._tokenizer = tokenizer
        self._options = options

    @classmethod
    def load(cls, folder: Path) -> TextReader:
        """That of the checkpoint's type."""
        config = read_auto_config(folder)
        if config.model_type in ("dia", "higgs_audio_v2", "pocket_tts", "gradium_phonon_tts", "vibevoice"):
            from omnistage.models.text_to_speech.prompted import load_prompted

            return load_prompted(folder, config)
        tokenizer = load_tokenizer(folder)
        if config.model_type in ("seamless_m4t", "seamless_m4t_v2"):
            from omnistage.models.text_to_speech.prompted import SeamlessProcessor

            return SeamlessProcessor(tokenizer, voices.languages(folder), config.max_position_embeddings)
        if config.model_type == "bark":
            # As transformers' processor of Bark has it: padded to what the model takes.
            options = {"padding": "max_length", "max_length": _BARK_TOKENS, "add_special_tokens": False}
            return cls(tokenizer, (), options, _BARK_TOKENS)
        limit = getattr(config, "max_text_positions", None)  # of SpeechT5
        return cls(tokenizer, _voices(folder, config), {}, limit if isinstance(limit, int) else MAX_CHARS * 4)

    def encode(self, text: str) -> Mapping[str, np.ndarray]:
        length = len(self._tokenizer(text, **{**self._options, "padding": False}).input_ids)
        self.check_length(length)
        encoded = self._tokenizer(text, return_tensors="np", return_attention_mask=True, **self._options)
        ids = encoded["input_ids"][0].astype(np.int64)
        if length == 0 or (len(set(ids.tolist())) < 2 and not text.strip().isalnum()):
            raise InvalidRequestError(_NOTHING, param="prompt")
        return {TOKEN_IDS: ids, "attention_mask": encoded["attention_mask"][0].astype(np.int64)}


def special_spellings(tokenizer: Any) -> frozenset[str]:
    """The special tokens of a tokenizer, as a text may spell them."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return frozenset({*tokenizer.all_special_tokens, *added} - {""})


def load_tokenizer(folder: Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise CheckpointError(f"no usable tokenizer in {folder}: {error}") from error


def _voices(folder: Path, config: Any) -> tuple[str, ...]:
    if config.model_type == "vits":
        return tuple(map(str, range(config.num_speakers))) if config.num_speakers > 1 else ()
    if config.model_type != "speecht5":
        return ()
    return voices.vectors(folder / SPEAKERS, config.speaker_embedding_dim)
