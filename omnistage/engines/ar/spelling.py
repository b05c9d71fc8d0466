"""The bytes of a single token, which need not be whole characters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from omnistage.engines.ar.text import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def spelling(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """What `token` adds to a text, as UTF-8.

    Decoding a token by itself loses a leading space with some tokenizers, and what is part of a character with all.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        table = TokenBytes.of(tokenizer)
        if table is not None:
            return table.get(token, skip_special=False)
        piece = backend.id_to_token(token) or ""
        if token in tokenizer.added_tokens_decoder:
            return piece.encode()  # it stands for its own text
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        if _SPACE in piece:
            return piece.replace(_SPACE, " ").encode()
    decoded = tokenizer.decode([token])
    return (decoded if isinstance(decoded, str) else "".join(decoded)).encode()
