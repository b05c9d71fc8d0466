"""From text to token ids, with special tokens in users' text kept as text."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING

import torch

from omnistage.core.cancellation import current_cancellation
from omnistage.core.errors import InvalidRequestError, PromptTooLongError
from omnistage.core.threads import interpreter_released
from omnistage.core.types import ARInput, OmniTokensPrompt
from omnistage.core.validation import is_utf8

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

# Two private-use characters around an index: nothing that a template or a tokenizer gives a meaning to.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_SENTINEL = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_MAX_TOKENS = 2**20
"""Where a model does not say how many it holds."""
_MIN_TOKEN_CHARS = 64
"""A token stands for at most so many characters, or for those of the longest spelling."""
_MIN_PIECE_CHARS, _MAX_PIECE_CHARS = 2_048, 32_768
_TOKEN_BYTES = 4
"""Of ordinary text, about. Texts that fit by this measure are tokenised at once, others are counted in pieces first."""
_BATCH_PIECES = 512


@dataclass(frozen=True, slots=True)
class TextLimits:
    """How much text can fit into a model's context at all."""

    max_tokens: int
    max_chars: int

    def check_chars(self, chars: int) -> None:
        if chars > self.max_chars:
            raise self.too_long(f"{chars} characters")

    def too_long(self, size: str) -> PromptTooLongError:
        return PromptTooLongError(
            f"has {size}, and the model holds {self.max_tokens} tokens; shorten it", param="prompt"
        )


@dataclass(slots=True)
class GuardedText:
    """Users' text of one prompt: spellings of special tokens are set aside while the template is applied."""

    pattern: re.Pattern[str] | None
    limits: TextLimits = field(default_factory=lambda: TextLimits(_MAX_TOKENS, _MAX_TOKENS * _MIN_TOKEN_CHARS))
    literals: list[str] = field(default_factory=list)
    _chars: int = 0

    def guard(self, text: str) -> str:
        """`text` with every special token's spelling (and stray sentinels) replaced by a sentinel.

        Raises `PromptTooLongError` as soon as the prompt's texts together cannot fit.
        """
        self._chars += len(text)
        self.limits.check_chars(self._chars)
        if self.pattern is None:
            return text

        def set_aside(match: re.Match[str]) -> str:
            self.literals.append(match.group())
            if len(self.literals) > self.limits.max_tokens:
                raise self.limits.too_long(f"more than {self.limits.max_tokens} spellings of special tokens")
            return f"{_OPEN}{len(self.literals) - 1}{_CLOSE}"

        return self.pattern.sub(set_aside, text)


class PromptTokenizer:
    """A fast tokenizer for several threads at once, which takes parts of a text literally.

    Text that cannot fit into `max_tokens` is refused before all of it is tokenised, and the request's deadline and
    abort are obeyed between pieces. No lock is held: nothing changes the state of the tokenizers used here.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        max_tokens = max_tokens or _MAX_TOKENS
        special = sorted({str(t) for t in tokenizer.get_added_vocab()}, key=len, reverse=True)
        spellings = [re.escape(text) for text in special] + [_OPEN, _CLOSE]
        self._pattern = re.compile("|".join(spellings))
        self.limits = TextLimits(max_tokens, max_tokens * max(_MIN_TOKEN_CHARS, *map(len, tokenizer.get_vocab())))
        # Whether special tokens are parsed is a state of the tokenizer, and others use the given one.
        self._rendered, self._literal = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
        self._literal_ids: dict[str, list[int]] = {}
        # From here on their state is what the calls below need: without padding or truncation.
        self._rendered("a", add_special_tokens=False)
        self._encode_literal("a")
        self._backend = self._rendered.backend_tokenizer

    def guarded(self) -> GuardedText:
        return GuardedText(self._pattern, self.limits)

    def encode(self, text: str, guarded: GuardedText | None = None) -> tuple[int, ...]:
        """Ids of a rendered template; sentinels become the ids of their literal spelling.

        Raises `PromptTooLongError` for a text that cannot fit.
        """
        literals = [] if guarded is None else guarded.literals
        self.check_length(text)
        if not literals:
            return tuple(self._encode([text])[0].ids)
        cancellation, pieces = current_cancellation(), _SENTINEL.split(text)
        ids: list[int] = []
        for start in range(0, len(pieces), 2 * _BATCH_PIECES):
            cancellation.check()
            batch = pieces[start : start + 2 * _BATCH_PIECES]
            for number, encoded in enumerate(self._encode(batch[::2])):
                ids += encoded.ids
                if 2 * number + 1 < len(batch):
                    ids += self._literal_of(literals[int(batch[2 * number + 1])])
        return tuple(ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of a bare prompt: nothing in it is special; the tokenizer's own prefix (bos) is added."""
        if not is_utf8(text):
            raise InvalidRequestError("has half of a surrogate pair, which is not text; remove it", param="prompt")
        self.check_length(text)
        return tuple(self._literal(text, split_special_tokens=True)["input_ids"])

    def text_input(self, prompt: str) -> ARInput:
        """A bare prompt as an input."""
        ids = self.encode_plain(prompt)
        if not prompt or not ids:
            raise InvalidRequestError("the prompt is empty; send some text", param="prompt")
        return ARInput(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for an id without one."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def count(self, text: str) -> int:
        """The tokens of a rendered text, whatever its length."""
        return len(self._encode([text])[0])

    def check_length(self, text: str) -> None:
        """Raise `PromptTooLongError` for a text that is far too long, before the whole of it is tokenised.

        What passes has at most about twice as many tokens as fit; its true number is the stage's to check.
        """
        self.limits.check_chars(len(text))
        if len(text) <= _MIN_PIECE_CHARS:
            return
        text, max_tokens = _SENTINEL.sub("", text), self.limits.max_tokens  # some stand for fewer tokens than they have
        if len(text.encode()) <= _TOKEN_BYTES * max_tokens:
            return
        # Cut anywhere, a text gives a few tokens more than in one piece: hence the factor.
        cancellation, count = current_cancellation(), 0
        size = min(max(max_tokens, _MIN_PIECE_CHARS), _MAX_PIECE_CHARS)
        for start in range(0, len(text), size):
            cancellation.check()
            count += self.count(text[start : start + size])
            if count > 2 * max_tokens:
                raise self.limits.too_long(f"over {count // 2} tokens")

    def _encode(self, texts: list[str]) -> list[Encoding]:
        """Without the lock of the interpreter, and without what `transformers`' own call converts and nobody needs."""
        with interpreter_released():
            encoded: list[Encoding] = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return encoded

    def _literal_of(self, spelling: str) -> list[int]:
        """Ids of a special token's spelling as text. There are only so many spellings."""
        ids = self._literal_ids.get(spelling)
        if ids is None:
            ids = self._literal_ids[spelling] = self._encode_literal(spelling)
        return ids

    def _encode_literal(self, text: str) -> list[int]:
        encoded = self._literal(text, add_special_tokens=False, split_special_tokens=True)
        return list(encoded["input_ids"])


def tokens_input(
    prompt: OmniTokensPrompt, vocab_size: int, embed_size: int, placeholders: Set[int] = frozenset()
) -> ARInput:
    """Check a prompt of ids or embeddings and make it an input. Raises `InvalidRequestError`.

    Ids may not be `placeholders`, which stand for media, where no embeddings come with them.
    """
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
        if not placeholders.isdisjoint(ids):
            raise InvalidRequestError(
                "prompt_token_ids hold media placeholders without media; use chat() to send media",
                param="prompt_token_ids",
            )
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
