"""Texts that are far too long are refused before they are tokenised, and tokenising a long one can be ended."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from tokenizers import Encoding

from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.errors import CancelledRequestError, PromptTooLongError
from omnistage.core.messages import ChatMessage, TextPart
from omnistage.models import _tiny_common as common
from omnistage.models import prompts as prompts_module
from omnistage.models.causal_lm import tiny
from omnistage.models.causal_lm.processor import CausalLMProcessor, load_tokenizer
from omnistage.models.prompts import PromptTokenizer
from tests.hang_guard import HANG_SECONDS

SPECIAL = tiny.special_ids()
OPEN, CLOSE = "\ue0f0", "\ue0f1"
MAX_TOKENS = 1000


class Counted(PromptTokenizer):
    """Counts the characters and pieces that reach the tokenizer."""

    chars = pieces = 0

    def _encode(self, texts: list[str]) -> list[Encoding]:
        self.chars += sum(map(len, texts))
        self.pieces += len(texts)
        return super()._encode(texts)

    def _encode_literal(self, text: str) -> list[int]:
        self.pieces += 1
        return super()._encode_literal(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "chat_template": tiny.CHAT_TEMPLATE,
    }
    common.write_tokenizer(folder, SPECIAL, settings)
    return folder


@pytest.fixture
def prompts(folder: Path) -> Counted:
    counted = Counted(load_tokenizer(folder), MAX_TOKENS)
    counted.chars = counted.pieces = 0
    return counted


@pytest.mark.parametrize("spelling", [OPEN, CLOSE, "<|im_start|>", f"a{OPEN}", f"{OPEN}0{CLOSE}"])
def test_more_special_spellings_than_the_model_holds_tokens_are_refused_untokenised(
    prompts: Counted, spelling: str
) -> None:
    guarded = prompts.guarded()
    with pytest.raises(PromptTooLongError, match="holds 1000 tokens; shorten it"):
        guarded.guard(spelling * 4 * MAX_TOKENS)
    assert len(guarded.literals) == MAX_TOKENS + 1  # no further than needed
    guarded = prompts.guarded()
    guarded.guard(spelling)
    with pytest.raises(PromptTooLongError):  # the texts of a prompt count together
        guarded.guard(spelling * MAX_TOKENS)
    assert prompts.pieces == 0


@pytest.mark.parametrize("spelling", ["<|im_end|>", OPEN, f"word {CLOSE}"])
def test_a_spelling_is_tokenised_once_however_often_it_is_there(prompts: Counted, spelling: str) -> None:
    guarded = prompts.guarded()
    text = guarded.guard(spelling * (MAX_TOKENS - 1))
    once = prompts.guarded()
    expected = prompts.encode(once.guard(spelling), once)
    prompts.pieces = 0
    assert prompts.encode(text, guarded) == expected * (MAX_TOKENS - 1)
    # The texts between the spellings, perhaps counted before; the spelling itself is known by now.
    assert MAX_TOKENS <= prompts.pieces <= MAX_TOKENS + 3


def test_pieces_and_literals_keep_their_order_over_many_batches(
    prompts: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "_BATCH_PIECES", 3)
    chance = random.Random(0)
    spellings = ["<|im_start|>", "<|im_end|>", OPEN, CLOSE]
    for count in range(12):
        parts = [chance.choice([*spellings, "one ", "two", ""]) for _ in range(count)]
        guarded = prompts.guarded()
        ids = prompts.encode(guarded.guard("".join(parts)), guarded)
        assert prompts.tokenizer.decode(ids) == "".join(parts)
        assert not set(ids) & set(SPECIAL.values())


def test_text_of_more_characters_than_the_tokens_can_stand_for_is_refused_untokenised(prompts: Counted) -> None:
    for take in (prompts.encode, prompts.encode_plain, prompts.guarded().guard):
        with pytest.raises(PromptTooLongError, match="64001 characters"):
            take("a" * 64_001)
    assert prompts.pieces == 0


@pytest.mark.parametrize("text", ["é7\U0001f9d1 " * 10_000, "a" + "\u0301\u0316" * 2_500, "0 1 " * 2_000])
def test_a_text_far_over_the_limit_is_tokenised_no_further_than_needed(prompts: Counted, text: str) -> None:
    for encode in (prompts.encode, prompts.encode_plain):
        prompts.chars = 0
        with pytest.raises(PromptTooLongError, match=r"over \d{4} tokens"):
            encode(text)
        assert prompts.chars <= 2 * 2_048


@pytest.mark.parametrize("repeats", [10, 200, 250])
def test_long_text_that_fits_is_tokenised_as_in_one_piece(prompts: Counted, repeats: int) -> None:
    text = "How are you today? " * repeats
    assert prompts.encode(text) == tuple(prompts.tokenizer(text, add_special_tokens=False)["input_ids"])
    # Only where it may be too long by its size is it looked at twice.
    assert prompts.chars == (2 if len(text) > 4 * MAX_TOKENS else 1) * len(text)
    assert prompts.encode_plain(text) == prompts.encode(text)


def test_a_cancelled_request_is_tokenised_no_further(prompts: Counted) -> None:
    with cancellation_scope(Cancellation()) as cancellation:
        guarded = prompts.guarded()
        text = guarded.guard(f"word{OPEN}" * 900)
        cancellation.cancel()
        with pytest.raises(CancelledRequestError):
            prompts.encode("word " * 1_000)
        with pytest.raises(CancelledRequestError):
            prompts.encode(text, guarded)
    assert prompts.pieces == 0


def test_one_request_does_not_wait_for_the_tokenising_of_another(folder: Path) -> None:
    blocked, go, released = threading.Event(), threading.Event(), list[bool]()

    class Slow(PromptTokenizer):
        def _encode(self, texts: list[str]) -> list[Encoding]:
            if texts == ["slow"]:
                blocked.set()
                released.append(go.wait(HANG_SECONDS))
            return super()._encode(texts)

    prompts = Slow(load_tokenizer(folder))
    thread = threading.Thread(target=prompts.encode, args=("slow",))
    thread.start()
    assert blocked.wait(HANG_SECONDS)
    assert prompts.encode("quick") == prompts.encode_plain("quick")
    go.set()
    thread.join()
    assert released == [True]


def test_threads_at_once_get_what_one_alone_gets(folder: Path) -> None:
    prompts = PromptTokenizer(load_tokenizer(folder))
    texts = [f"text {number} <|im_end|> {OPEN}" * 5 for number in range(40)]

    def encode(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        guarded = prompts.guarded()
        return prompts.encode(guarded.guard(text), guarded), prompts.encode_plain(text)

    expected = [encode(text) for text in texts]
    results: list[list[object]] = [[] for _ in range(4)]

    def work(into: list[object]) -> None:
        into += [encode(text) for text in texts]

    threads = [threading.Thread(target=work, args=(into,)) for into in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_the_limit_is_that_of_the_model(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    processor = CausalLMProcessor.load(tmp_path)
    with pytest.raises(PromptTooLongError, match="holds 2048 tokens"):
        processor.chat([ChatMessage("user", (TextPart(OPEN * 3000),))])
    with pytest.raises(PromptTooLongError, match="2049 messages"):
        processor.chat([ChatMessage("user", (TextPart("a"),))] * 2049)
    # The template writes several tokens around each message, so fewer are refused before they are rendered.
    with pytest.raises(PromptTooLongError, match="700 messages"):
        processor.chat([ChatMessage("user", (TextPart("a"),))] * 700)
    assert processor.chat([ChatMessage("user", (TextPart("a"),))] * 200)
