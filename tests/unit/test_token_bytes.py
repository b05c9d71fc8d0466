"""A token's own bytes, with tokenizers whose tokens are bytes, that fall back to bytes, and that do neither."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omnistage.engines.ar.text import token_bytes


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(sorted(alphabet))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def fallback() -> PreTrainedTokenizerFast:
    vocab = {"▁Hello": 0, "lo": 1, "<unk>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("▁end", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_bytes_of_byte_level_tokens_make_the_text() -> None:
    tokenizer = byte_level()
    for text in ("é", " 日本", "🙂!", "<|end|>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(token_bytes(tokenizer, token) for token in ids) == text.encode()
    assert len(token_bytes(tokenizer, tokenizer.encode("é", add_special_tokens=False)[0])) == 1


def test_bytes_that_others_fall_back_to_and_leading_spaces_are_kept() -> None:
    tokenizer = fallback()
    assert token_bytes(tokenizer, 0) == b" Hello"
    assert token_bytes(tokenizer, 1) == b"lo"
    assert token_bytes(tokenizer, 3 + 0xE2) == b"\xe2"
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("▁end")) == "▁end".encode()


def test_a_token_without_a_backend_is_decoded() -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(97 + i) for i in ids)

    assert token_bytes(Letters(), 2) == b"c"  # type: ignore[arg-type]
