"""From text to token ids, with special tokens in users' text kept as text."""

from __future__ import annotations

import copy
import re
import threading
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING

import torch

from omnistage.core.errors import InvalidRequestError
from omnistage.core.types import ARInput, OmniTokensPrompt
from omnistage.core.validation import is_utf8

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Two private-use characters around an index: nothing that a template or a tokenizer gives a meaning to.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_SENTINEL = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


@dataclass(slots=True)
class GuardedText:
    """Users' text of one prompt: spellings of special tokens are set aside while the template is applied."""

    pattern: re.Pattern[str] | None
    literals: list[str] = field(default_factory=list)

    def guard(self, text: str) -> str:
        """`text` with every special token's spelling (and stray sentinels) replaced by a sentinel."""
        if self.pattern is None:
            return text

        def set_aside(match: re.Match[str]) -> str:
            self.literals.append(match.group())
            return f"{_OPEN}{len(self.literals) - 1}{_CLOSE}"

        return self.pattern.sub(set_aside, text)


class PromptTokenizer:
    """A fast tokenizer for several threads, which takes parts of a text literally."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        # Whether special tokens are parsed is a state of the tokenizer: literals get their own.
        self._literal = copy.deepcopy(tokenizer)
        special = sorted({str(t) for t in tokenizer.get_added_vocab()}, key=len, reverse=True)
        spellings = [re.escape(text) for text in special] + [_OPEN, _CLOSE]
        self._pattern = re.compile("|".join(spellings))

    def guarded(self) -> GuardedText:
        return GuardedText(self._pattern)

    def encode(self, text: str, guarded: GuardedText | None = None) -> tuple[int, ...]:
        """Ids of a rendered template; sentinels become the ids of their literal spelling."""
        with self._lock:
            if guarded is None or not guarded.literals:
                return tuple(self.tokenizer.encode(text, add_special_tokens=False))
            ids: list[int] = []
            for number, piece in enumerate(_SENTINEL.split(text)):
                if number % 2:
                    ids.extend(self._encode_literal(guarded.literals[int(piece)]))
                elif piece:
                    ids.extend(self.tokenizer.encode(piece, add_special_tokens=False))
            return tuple(ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of a bare prompt: nothing in it is special; the tokenizer's own prefix (bos) is added."""
        if not is_utf8(text):
            raise InvalidRequestError("has half of a surrogate pair, which is not text; remove it", param="prompt")
        with self._lock:
            return tuple(self._literal(text, split_special_tokens=True)["input_ids"])

    def _encode_literal(self, text: str) -> list[int]:
        encoded = self._literal(text, add_special_tokens=False, split_special_tokens=True)
        return list(encoded["input_ids"])


def tokens_input(prompt: OmniTokensPrompt, vocab_size: int, embed_size: int) -> ARInput:
    """Check a prompt of ids or embeddings and make it an input. Raises `InvalidRequestError`."""
    embeds = prompt.prompt_embeds
    try:
        ids = tuple(index(i) for i in prompt.prompt_token_ids)
    except TypeError as error:
        raise InvalidRequestError(f"token ids must be whole numbers: {error}", param="prompt_token_ids") from error
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise InvalidRequestError(f"token ids must be in [0, {vocab_size})", param="prompt_token_ids")
    if embeds is None:
        if not ids:
            raise InvalidRequestError("the prompt is empty; send at least one token", param="prompt_token_ids")
        return ARInput(ids)
    if not isinstance(embeds, torch.Tensor) or embeds.ndim != 2 or embeds.shape[1] != embed_size or not len(embeds):
        shape = list(embeds.shape) if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        raise InvalidRequestError(
            f"prompt_embeds must be a tensor [n, {embed_size}], got {shape}", param="prompt_embeds"
        )
    if embeds.layout is not torch.strided or embeds.is_nested or embeds.device.type not in ("cpu", "cuda"):
        raise InvalidRequestError(
            f"prompt_embeds must be a dense tensor on CPU or CUDA, got {embeds.layout} on {embeds.device}",
            param="prompt_embeds",
        )
    # Finite as float32: what float64 can hold beyond that would reach the model as infinity.
    if not embeds.is_floating_point() or not bool(torch.isfinite(embeds.to(torch.float32)).all()):
        raise InvalidRequestError("prompt_embeds must be finite floating-point numbers", param="prompt_embeds")
    ids = ids or (0,) * len(embeds)
    if len(ids) != len(embeds):
        raise InvalidRequestError(
            f"{len(ids)} prompt_token_ids beside {len(embeds)} rows of prompt_embeds; give one id a row or none",
            param="prompt_token_ids",
        )
    return ARInput(ids, embeds=embeds)
