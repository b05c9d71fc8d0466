"""Incremental detokenisation and stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omnistage.core.errors import ConfigError
from omnistage.core.params import SamplingParams
from omnistage.engines.ar.text import TextStream


def byte_level() -> PreTrainedTokenizerFast:
    """Every byte is a token; so are a few words, and characters cut in two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encode = {b: c for c, b in _byte_of().items()}
    words = ["hello", " world", "héllo", "你", "STOP"]
    pieces = ["".join(encode[b] for b in word.encode()) for word in words]
    pieces += [
        "".join(encode[b] for b in piece) for piece in (b"a\xf0\x9f", b"\x98\x80b", b"\xbd\xa0", b"\xef\xbf\xbd")
    ]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *pieces])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<im>", special=True)])
    # Not of the alphabet that stands for bytes, of it in part, and of it altogether.
    backend.add_tokens([AddedToken("工具"), AddedToken("a b é"), AddedToken("<tool>"), AddedToken("Ġé")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def _byte_of() -> dict[str, int]:
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(others)}


def byte_fallback() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁hello", "▁world", "▁", "a", "b"]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


BYTES = byte_level()
FALLBACK = byte_fallback()


def ids_of(text: str | bytes) -> list[int]:
    encode = {b: c for c, b in _byte_of().items()}
    data = text.encode() if isinstance(text, str) else text
    return [BYTES.convert_tokens_to_ids(encode[b]) for b in data]


def run(ids: list[int], **values: object) -> tuple[list[str], TextStream]:
    stream = TextStream(BYTES, SamplingParams.parse(values))
    pieces = [stream.push(token) for token in ids]
    return [*pieces, stream.finish()], stream


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, len(BYTES) + 2), max_size=40), skip=st.booleans())
def test_the_pieces_are_the_whole_text(ids: list[int], skip: bool) -> None:
    pieces, _ = run(ids, skip_special_tokens=skip)
    assert "".join(pieces) == BYTES.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), skip=st.booleans())
def test_valid_text_comes_out_as_it_went_in_one_character_at_a_time(text: str, skip: bool) -> None:
    pieces, _ = run(ids_of(text), skip_special_tokens=skip)
    assert "".join(pieces) == text
    if "�" not in text:
        assert all(len(piece) <= 1 for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, len(FALLBACK) - 1), max_size=30))
def test_byte_fallback_never_raises_and_keeps_words(ids: list[int]) -> None:
    stream = TextStream(FALLBACK, SamplingParams())
    text = "".join([*(stream.push(token) for token in ids), stream.finish()])
    words = FALLBACK.convert_tokens_to_ids(["▁hello", "▁world"])
    assert text.count("hello") + text.count("world") == sum(token in words for token in ids)


def test_bytes_that_spoil_a_released_character_do_not_stop_the_stream() -> None:
    ids = FALLBACK.convert_tokens_to_ids(["<0xE4>", "<0xBD>", "<0xA0>", "<0xE4>", "a", "b"])
    stream = TextStream(FALLBACK, SamplingParams())
    assert [stream.push(token) for token in ids] == ["", "", "你", "", "�a", "b"]
    assert stream.finish() == ""


def test_an_incomplete_character_comes_out_at_the_end() -> None:
    pieces, _ = run(ids_of("ok é")[:-1])
    assert pieces == ["o", "k", " ", "", "�"]


def test_prompt_ids_keep_the_leading_space() -> None:
    hello, world = FALLBACK.convert_tokens_to_ids(["▁hello", "▁world"])
    assert TextStream(FALLBACK, SamplingParams()).push(world) == "world"
    stream = TextStream(FALLBACK, SamplingParams(), [hello] * 20)
    assert [stream.push(world), stream.push(hello), stream.finish()] == [" world", " hello", ""]


def test_prompt_ids_count_when_nothing_was_released() -> None:
    hello = FALLBACK.convert_tokens_to_ids("▁hello")
    stream = TextStream(FALLBACK, SamplingParams(), [hello])
    assert stream.push(FALLBACK.convert_tokens_to_ids("<0xE4>")) == ""
    assert stream.finish() == "�"


def test_special_tokens_are_dropped_or_shown() -> None:
    ids = [*ids_of("a"), BYTES.eos_token_id]
    assert "".join(run(ids)[0]) == "a"
    assert "".join(run(ids, skip_special_tokens=False)[0]) == "a<eos>"


def test_a_stop_string_across_tokens_ends_the_text() -> None:
    pieces, stream = run(ids_of("go STOP more"), stop="STOP")
    assert pieces[:7] == ["g", "o", " ", "", "", "", ""]
    assert "".join(pieces) == "go "
    assert stream.stopped


def test_the_stop_string_can_be_kept() -> None:
    pieces, stream = run(ids_of("go STOP more"), stop="STOP", include_stop_str_in_output=True)
    assert "".join(pieces) == "go STOP"
    assert stream.stopped


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    pieces, stream = run(ids_of("aab aac"), stop=("aac",))
    assert pieces == ["", "", "aab", " ", "", "", "", ""]
    assert stream.stopped
    pieces, stream = run(ids_of("STO"), stop=("STOP",))
    assert pieces == ["", "", "", "STO"]
    assert not stream.stopped


def test_a_stop_string_inside_a_token_drops_the_rest_of_it() -> None:
    hello = BYTES.convert_tokens_to_ids("hello")
    assert run([hello, hello], stop="ll")[0] == ["he", "", ""]


def test_the_first_stop_string_to_be_complete_wins_and_the_longest_of_those() -> None:
    assert "".join(run(ids_of("xabcd"), stop=("bcd", "abc", "c"))[0]) == "x"
    assert "".join(run(ids_of("xabcd"), stop=("abcd", "b"))[0]) == "xa"


def test_no_stop_before_min_tokens() -> None:
    assert "".join(run(ids_of("a.b.c"), stop=".", min_tokens=3)[0]) == "a.b"
    assert "".join(run(ids_of("a.b.c"), stop=".", min_tokens=2)[0]) == "a"
    # Begun before, complete after: that counts.
    assert "".join(run(ids_of("abab!"), stop="ab", min_tokens=4)[0]) == "ab"


def test_what_finish_releases_can_still_stop() -> None:
    pieces, stream = run([*ids_of("a"), *ids_of("é")[:1]], stop="�")
    assert "".join(pieces) == "a"
    assert stream.stopped


def test_nothing_comes_after_the_end() -> None:
    _, stream = run(ids_of("ab"))
    assert stream.push(ids_of("c")[0]) == ""
    assert stream.finish() == ""


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=25), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_agree_with_a_search_of_the_whole_text(text: str, stops: list[str]) -> None:
    pieces, stream = run(ids_of(text), stop=tuple(stops))
    ends = [(end, -len(stop)) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    assert stream.stopped == bool(ends)
    assert "".join(pieces) == (text[: sum(min(ends))] if ends else text)


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="fast tokenizer"):
        TextStream(object(), SamplingParams())  # type: ignore[arg-type]


def test_long_stop_strings_are_refused() -> None:
    """A table is made of each in the thread of the stage, for every answer."""
    SamplingParams(stop=("a" * 1024,))
    with pytest.raises(ValueError, match="at most 1024 characters"):
        SamplingParams(stop=("a" * 1025,))


def test_answers_share_what_is_computed_of_stop_strings() -> None:
    first, second = (TextStream(BYTES, SamplingParams(stop=("abab",))) for _ in range(2))
    assert first._stops[0]._fallback is second._stops[0]._fallback
