"""Texts for models that speak them. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omnistage.core.errors import CheckpointError, InvalidRequestError, PromptTooLongError, UnsupportedModalityError
from omnistage.core.messages import ChatMessage, TextPart
from omnistage.core.types import TOKEN_IDS, Modality, ModuleInput, OmniTokensPrompt
from omnistage.core.validation import is_utf8
from omnistage.hf import transformers
from omnistage.models.loading import read_auto_config

MAX_CHARS = 4096
"""Of a text, as OpenAI's speech endpoint has it."""
SPEAKERS = "speakers.safetensors"
"""Of SpeechT5: a vector for each voice, by its name."""
_BARK_TOKENS = 256
_NOTHING = "nothing in this text can be spoken by this model; send some words in its language"


class SpeechProcessor:
    """Tokenises with the checkpoint's own tokenizer. The text is spoken as it is."""

    input_modalities = frozenset({Modality.TEXT})

    def __init__(self, tokenizer: Any, voices: Sequence[str], options: Mapping[str, object], max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # some of these tokenizers are Python code with state
        self._voices = tuple(voices)
        self._options = options
        self._max_tokens = max_tokens

    @classmethod
    def load(cls, folder: Path) -> SpeechProcessor:
        config = read_auto_config(folder)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise CheckpointError(f"no usable tokenizer in {folder}: {error}") from error
        limit = getattr(config, "max_text_positions", None)  # of SpeechT5
        if config.model_type == "bark":
            # As transformers' processor of Bark has it: padded to what the model takes.
            options = {"padding": "max_length", "max_length": _BARK_TOKENS, "add_special_tokens": False}
            return cls(tokenizer, (), options, _BARK_TOKENS)
        return cls(tokenizer, _voices(folder, config), {}, limit if isinstance(limit, int) else MAX_CHARS * 4)

    def voices(self) -> Sequence[str]:
        return self._voices

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        return [{"role": "assistant", "content": text}]

    def text(self, prompt: str) -> ModuleInput:
        if not is_utf8(prompt):
            raise InvalidRequestError("is not valid Unicode text", param="prompt")
        if len(prompt) > MAX_CHARS:
            raise PromptTooLongError(f"has {len(prompt)} characters, over the limit of {MAX_CHARS}", param="prompt")
        with self._lock:
            length = len(self._tokenizer(prompt, **{**self._options, "padding": False}).input_ids)
            encoded = self._tokenizer(prompt, return_tensors="np", return_attention_mask=True, **self._options)
        if length > self._max_tokens:
            raise PromptTooLongError(
                f"has {length} tokens, and the model takes {self._max_tokens}; shorten it", param="prompt"
            )
        ids = encoded["input_ids"][0].astype(np.int64)
        if length == 0 or (len(set(ids.tolist())) < 2 and not prompt.strip().isalnum()):
            raise InvalidRequestError(_NOTHING, param="prompt")
        return ModuleInput({TOKEN_IDS: ids, "attention_mask": encoded["attention_mask"][0].astype(np.int64)})

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> ModuleInput:
        parts = [part for message in messages for part in message.parts]
        if tools or not messages or not all(isinstance(part, TextPart) for part in parts):
            raise UnsupportedModalityError("this model speaks one text; send just that", param="messages")
        return self.text("".join(part.text for part in messages[-1].parts if isinstance(part, TextPart)))

    def tokens(self, prompt: OmniTokensPrompt) -> ModuleInput:
        del prompt
        raise InvalidRequestError("this model takes text, not tokens", param="prompt")


def _voices(folder: Path, config: Any) -> tuple[str, ...]:
    if config.model_type == "vits":
        return tuple(map(str, range(config.num_speakers))) if config.num_speakers > 1 else ()
    if config.model_type != "speecht5":
        return ()
    from safetensors import SafetensorError, safe_open

    path = folder / SPEAKERS
    try:
        with safe_open(path, framework="np") as file:
            return tuple(sorted(file.keys()))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"SpeechT5 needs vectors of its voices: put them into {path}, each float32 "
            f"[{config.speaker_embedding_dim}] under the voice's name"
        ) from error
