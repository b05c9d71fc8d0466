"""Structured output: constraints followed to the end by a sampler with random logits, and constraints refused."""

from __future__ import annotations

import builtins
import json
import re
import sys
from collections.abc import Mapping

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("xgrammar")

from omnistage.core.errors import (
    ConfigError,
    InvalidRequestError,
    LimitExceededError,
    MissingDependencyError,
    StageError,
)
from omnistage.core.params import SamplingParams, StructuredOutput
from omnistage.engines.ar.sampling import grammar, grammar_state
from omnistage.engines.ar.sampling.sampler import Sampler

CPU = torch.device("cpu")
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(['{"name": "Ada", "age": 36}', "hello world true false null"] * 4, trainer)
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", "<im>", "<end>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


TOKENIZER = build_tokenizer()
EOS = TOKENIZER.eos_token_id
WIDTH = len(TOKENIZER) + 30
"""Wider than the tokenizer, as padded embeddings are."""


def sampler() -> Sampler:
    return Sampler(WIDTH, CPU, tokenizer=TOKENIZER, eos_token_ids=[EOS])


def generate(
    structured: Mapping[str, object], *, seed: int = 0, limit: int = 400, **values: object
) -> tuple[str, bool]:
    """Text from random logits, with a taste for ending, and whether an end token came."""
    params = SamplingParams.parse({"structured": structured, "seed": seed, **values})
    ends = {EOS, *params.stop_token_ids}
    engine = sampler()
    engine.add("r", params, [])
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    for _ in range(limit):
        logits = torch.randn(1, WIDTH, generator=generator)
        logits[0, [*TOKENIZER.convert_tokens_to_ids(['"', "}"]), *ends]] += 3.0
        sampled = engine.sample(logits, ["r"])[0]
        assert sampled.error is None
        if sampled.token_id in ends:
            return TOKENIZER.decode(ids), True
        ids.append(sampled.token_id)
    return TOKENIZER.decode(ids), False


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("form", ["dict", "text"])
def test_a_json_schema_is_followed(seed: int, form: str) -> None:
    schema = SCHEMA if form == "dict" else json.dumps(SCHEMA)
    text, ended = generate({"json_schema": schema}, seed=seed)
    assert ended
    value = json.loads(text)
    assert set(value) == {"name", "age"}
    assert isinstance(value["name"], str)
    assert 0 <= value["age"] <= 99


@pytest.mark.parametrize("seed", range(4))
def test_a_regular_expression_is_followed(seed: int) -> None:
    text, ended = generate({"regex": "(ab|cd){2,4}[0-9]+"}, seed=seed)
    assert ended
    assert re.fullmatch("(ab|cd){2,4}[0-9]+", text)


def test_a_constraint_may_begin_behind_a_token() -> None:
    """Up to there all tokens may come but those that end the text, and no mask is computed."""
    after = TOKENIZER.convert_tokens_to_ids("<im>")
    digit, letter = TOKENIZER.convert_tokens_to_ids(["7", "a"])
    params = SamplingParams(structured=StructuredOutput(regex="[0-9]", after_token=after), temperature=0.0)
    engine = sampler()
    engine.check(params)
    engine.add("r", params, [])

    def sampled(*wanted: int) -> int:
        logits = torch.zeros(1, WIDTH)
        for rank, token in enumerate(wanted):
            logits[0, token] = 9.0 - rank
        return int(engine.sample(logits, ["r"])[0].token_id)

    assert [sampled(letter), sampled(digit), sampled(EOS, WIDTH - 1)] == [letter, digit, WIDTH - 1]
    assert sampled(after) == after
    assert [sampled(letter, EOS, after, digit), sampled(letter, EOS)] == [digit, EOS]
    with pytest.raises(InvalidRequestError, match=r"structured\.after_token"):
        engine.check(SamplingParams(structured=StructuredOutput(regex="[0-9]", after_token=WIDTH)))


def test_an_ebnf_grammar_is_followed() -> None:
    text, ended = generate({"grammar": 'root ::= "yes" | "no" | "may" "be"'})
    assert ended
    assert text in {"yes", "no", "maybe"}


def test_structural_tags_are_followed() -> None:
    content = {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 2}
    tag = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    once = {"separator": "", "at_least_one": True, "stop_after_first": True}
    text, ended = generate({"structural_tag": {"type": "tags_with_separator", "tags": [tag], **once}})
    assert ended
    found = re.fullmatch(r"<call>(.*)</call>", text, re.DOTALL)
    assert found is not None
    assert json.loads(found[1]).keys() == {"name", "age"}


def test_any_json_object_is_an_object() -> None:
    for seed in range(3, 8):
        text, ended = generate({"json_object": True}, seed=seed)
        assert text.lstrip().startswith("{")
        assert not ended or isinstance(json.loads(text), dict)


def test_special_tokens_are_never_part_of_the_text() -> None:
    """xgrammar alone would offer '<im>' wherever its five characters fit."""
    engine = sampler()
    engine.add("r", SamplingParams.parse({"temperature": 0, "structured": {"regex": "[a-z<>]{4,20}"}}), [])
    logits = torch.zeros(1, WIDTH)
    logits[0, TOKENIZER.convert_tokens_to_ids("<im>")] = 50.0
    logits[0, TOKENIZER.convert_tokens_to_ids("<")] = 10.0
    assert engine.sample(logits, ["r"])[0].token_id == TOKENIZER.convert_tokens_to_ids("<")


def test_after_the_end_only_end_tokens_come() -> None:
    stop = TOKENIZER.convert_tokens_to_ids("<end>")
    engine = sampler()
    values = {"temperature": 0, "structured": {"regex": "ab"}, "stop_token_ids": (stop,), "min_tokens": 20}
    engine.add("r", SamplingParams.parse(values), [])
    logits = torch.zeros(1, WIDTH)
    logits[0, stop] = 1.0
    tokens = [engine.sample(logits, ["r"])[0] for _ in range(6)]
    assert all(sampled.error is None for sampled in tokens)
    text = TOKENIZER.decode([sampled.token_id for sampled in tokens if sampled.token_id not in (stop, EOS)])
    assert text == "ab"
    # min_tokens must not leave nothing, so the end comes all the same, and again if the request goes on.
    assert [sampled.token_id for sampled in tokens[-3:]] == [stop] * 3


def test_constrained_and_free_rows_share_a_batch() -> None:
    engine = sampler()
    free = SamplingParams(temperature=0.0)
    engine.add("free", free, [])
    engine.add("biased", free.model_copy(update={"logit_bias": {5: 9.0}}), [])
    engine.add("json", SamplingParams.parse({"temperature": 0, "structured": {"json_schema": SCHEMA}}), [])
    engine.add("digits", SamplingParams.parse({"temperature": 0, "structured": {"regex": "[0-9]{30}"}}), [])
    logits = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    rows = engine.sample(logits, ["free", "json", "biased", "digits"])
    assert rows[0].token_id == int(logits[0].argmax())
    assert TOKENIZER.decode([rows[1].token_id]).startswith("{")
    assert rows[2].token_id == 5
    assert TOKENIZER.decode([rows[3].token_id]).isdigit()


def test_ids_that_the_grammar_rules_out_leave_nothing() -> None:
    engine = sampler()
    engine.add("r", SamplingParams.parse({"structured": {"regex": "ab"}, "allowed_token_ids": (EOS,)}), [])
    error = engine.sample(torch.zeros(1, WIDTH), ["r"])[0].error
    assert isinstance(error, InvalidRequestError)


def test_a_token_that_breaks_the_grammar_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sampler()
    engine.add("r", SamplingParams.parse({"temperature": 0, "structured": {"regex": "ab"}}), [])
    monkeypatch.setattr(grammar_state.GrammarMask, "apply", lambda self, x: None)
    logits = torch.zeros(1, WIDTH)
    logits[0, TOKENIZER.convert_tokens_to_ids("z")] = 5.0
    assert isinstance(engine.sample(logits, ["r"])[0].error, StageError)


@pytest.mark.parametrize(
    ("structured", "says"),
    [
        ({"json_schema": "{"}, "not valid JSON"),
        ({"json_schema": {"type": "nope"}}, "nope"),
        ({"json_schema": "[1]"}, "object"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 1}}, "minimum"),
        ({"json_schema": {"$ref": "http://example.com/other"}}, "#"),
        ({"json_schema": {"const": object()}}, "not valid JSON"),
        ({"regex": "(a"}, "parenthesis"),
        ({"regex": "\ud800"}, "Unicode"),
        ({"grammar": "root ::= other"}, "other"),
        ({"grammar": ""}, "root"),
        ({"structural_tag": {"type": "nope"}}, "nope"),
    ],
)
def test_a_wrong_constraint_is_refused_with_the_reason(structured: Mapping[str, object], says: str) -> None:
    params = SamplingParams.model_construct(structured=StructuredOutput.model_construct(**structured))
    with pytest.raises(InvalidRequestError) as refused:
        sampler().check(params)
    assert refused.value.param == f"structured.{next(iter(structured))}"
    assert says in refused.value.message
    assert ".cc:" not in refused.value.message


@pytest.mark.parametrize("depth", [100, 50_000])
def test_a_deep_schema_is_refused_at_once(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_SOURCE_BYTES", 10**7)
    text = '{"items":' * depth + "{}" + "}" * depth
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        sampler().check(SamplingParams(structured=StructuredOutput(json_schema=text)))


@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema"])
def test_a_large_constraint_is_refused(kind: str) -> None:
    with pytest.raises(LimitExceededError, match="at most 65536"):
        sampler().check(SamplingParams(structured=StructuredOutput.model_validate({kind: "a" * 70_000})))


def test_without_an_end_token_a_constraint_cannot_work() -> None:
    engine = Sampler(WIDTH, CPU, tokenizer=TOKENIZER)
    with pytest.raises(InvalidRequestError, match="no end token"):
        engine.check(SamplingParams(structured=StructuredOutput(json_object=True)))


def test_compilers_and_grammars_are_reused_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "CACHED_GRAMMARS", 2)
    compiler = grammar.compiler_for(TOKENIZER, WIDTH + 1, [EOS])
    assert grammar.compiler_for(TOKENIZER, WIDTH + 1, [EOS, EOS]) is compiler
    assert grammar.compiler_for(TOKENIZER, WIDTH + 2, [EOS]) is not compiler
    first, second, third = (StructuredOutput(regex=text) for text in ("a", "b", "c"))
    kept = compiler.compile(first)
    compiler.compile(second)
    assert compiler.compile(first) is kept
    compiler.compile(third)
    assert compiler.compile(first) is kept
    assert list(compiler._cache) == [("regex", "c"), ("regex", "a")]


def test_a_tokenizer_that_xgrammar_cannot_read_is_a_configuration_error() -> None:
    class Odd:
        added_tokens_decoder: Mapping[int, object] = {}
        all_special_ids = ()

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    with pytest.raises(ConfigError, match="cannot use this tokenizer"):
        grammar.compiler_for(Odd(), 10, [0])  # type: ignore[arg-type]


def test_without_xgrammar_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name == "xgrammar":
            raise ImportError(name)
        return original(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.delitem(sys.modules, "xgrammar")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match=r"omnistage\[structured\]"):
        grammar.compiler_for(build_tokenizer(), WIDTH, [EOS])
