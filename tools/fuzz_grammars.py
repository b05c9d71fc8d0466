"""Compile and follow random constraints: none may crash the process or hold a stage's thread.

Regular expressions, JSON schemas, grammars and structural tags come from a seeded generator with a taste for large
counts, nesting and repetition, some of them with characters changed. Each is compiled as for a request; those that are
taken are followed for some random tokens. Masks that come from other threads may take their time; those that are
computed in the caller's thread may not.

python tools/fuzz_grammars.py --count 2000 --tokenizer FOLDER    with the vocabulary of a model; else a small one
python tools/fuzz_grammars.py --seed 7 --only 1234               one case
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError, QueueFullError
from omnistage.core.params import StructuredOutput
from omnistage.engines.ar.sampling.grammar import GrammarCompiler
from omnistage.engines.ar.sampling.grammar_state import GrammarState

MAX_INLINE_SECONDS = 0.1
"""Processor time of one mask in the caller's thread; a stage's step takes as long on a CPU."""
MAX_SLOW_SECONDS = 0.3
"""A constraint is followed no further once its masks have taken so long together."""
COUNTS = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6)
ATOMS = ("a", "b", "xy", ".", "[a-z]", "[^a]", "[A-Za-z0-9 ]", r"\d", r"\w", r"\s", r"[\s\S]", "é", r"\.", r"\x41")
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object", ["string", "null"])


# ----------------------------------------------------------------------------------------------------- the cases


def count(rng: random.Random) -> int:
    return rng.choice(COUNTS[: rng.randint(3, len(COUNTS))])


def quantifier(rng: random.Random) -> str:
    low = count(rng)
    bounded = f"{{{low}}}", f"{{{low},}}", f"{{{low},{low + count(rng)}}}"
    return rng.choice(("", "", "", "*", "+", "?", *bounded))


def regex(rng: random.Random, depth: int = 3) -> str:
    pieces = []
    for _ in range(rng.randint(1, 4)):
        if depth and rng.random() < 0.5:
            options = [regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            piece = f"({'|'.join((*options, *([''] if rng.random() < 0.2 else [])))})"
        else:
            piece = rng.choice(ATOMS)
        pieces.append((piece + quantifier(rng)) * rng.choice((1, 1, 1, 1, 2, 10, 40)))
    return "".join(pieces)[:4000]


def ebnf(rng: random.Random) -> str:
    names = ["root", *(f"r{i}" for i in range(rng.randint(0, 6)))]

    def body(later: list[str], depth: int) -> str:
        pieces = []
        for _ in range(rng.randint(1, 3)):
            if depth and rng.random() < 0.4:
                piece = f"({' | '.join(body(later, depth - 1) for _ in range(rng.randint(1, 3)))})"
            else:
                # A rule contains itself only in brackets: where nothing marks its ends, compiling may take for ever.
                piece = rng.choice(('"a"', '"b c"', "[a-z]", "[^x]", '""', '"(" root ")"', *later))
            pieces.append(piece + quantifier(rng))
        return " ".join(pieces * rng.choice((1, 1, 1, 1, 5)))[:3000]

    rules = [[body(names[i + 1 :], 2) for _ in range(rng.randint(1, 3))] for i in range(len(names))]
    return "\n".join(f"{name} ::= {' | '.join(bodies)}" for name, bodies in zip(names, rules, strict=True))


def schema(rng: random.Random, depth: int = 4) -> dict[str, Any]:
    choice = rng.random()
    if depth and choice < 0.15:
        options = [schema(rng, depth - 1) for _ in range(rng.choice((1, 2, 3, 20)))]
        return {rng.choice(("anyOf", "oneOf", "allOf")): options}
    if choice < 0.2:
        return {"$ref": "#"}
    if choice < 0.25:
        return {"enum": [rng.choice(("x", 1, None, f"value {i}")) for i in range(rng.choice((1, 5, 200)))]}
    kind = rng.choice(TYPES if depth else TYPES[:5])
    result: dict[str, Any] = {"type": kind}

    def maybe(keyword: str, value: Callable[[], Any], chance: float = 0.25) -> None:
        if rng.random() < chance:
            result[keyword] = value()

    if "string" in kind:
        maybe("minLength", lambda: count(rng))
        maybe("maxLength", lambda: count(rng) + result.get("minLength", 0))
        maybe("pattern", lambda: regex(rng, 2), 0.2)
        maybe("format", lambda: rng.choice(("date", "email", "uuid", "uri", "ipv6", "nope")), 0.1)
    elif kind in ("integer", "number"):
        maybe("minimum", lambda: rng.randint(-(10 ** rng.randint(0, 12)), 0))
        maybe("maximum", lambda: rng.randint(0, 10 ** rng.randint(0, 12)))
    elif kind == "array":
        maybe("items", lambda: schema(rng, depth - 1), 0.8)
        maybe("minItems", lambda: count(rng))
        maybe("maxItems", lambda: count(rng) + result.get("minItems", 0))
    elif kind == "object":
        names = [rng.choice(("a", "name", f"p{i}", 'quo"te')) + str(i) for i in range(rng.choice((0, 1, 3, 8, 60)))]
        result["properties"] = {name: schema(rng, depth - 1) for name in names}
        maybe("required", lambda: rng.sample(names, rng.randint(0, len(names))), 0.5)
        maybe("additionalProperties", lambda: rng.choice((True, False)), 0.3)
        maybe("minProperties", lambda: rng.randint(0, 5), 0.05)
        maybe("maxProperties", lambda: rng.randint(5, 100), 0.05)
        maybe("patternProperties", lambda: {regex(rng, 1): schema(rng, depth - 1)}, 0.1)
    return result


def structural_tag(rng: random.Random) -> dict[str, Any]:
    def content() -> dict[str, Any]:
        return rng.choice(
            (
                {"type": "json_schema", "json_schema": schema(rng, 2)},
                {"type": "regex", "pattern": regex(rng, 2)},
                {"type": "grammar", "grammar": ebnf(rng)},
                {"type": "const_string", "value": "x" * count(rng)},
                {"type": "any_text"},
            )
        )

    tags = [{"begin": f"<t{i}>", "content": content(), "end": "</t>"} for i in range(rng.choice((1, 2, 10)))]
    if rng.random() < 0.5:
        return {"type": "triggered_tags", "triggers": ["<t"], "tags": tags, "at_least_one": rng.random() < 0.5}
    return {"type": rng.choice(("sequence", "or")), "elements": [content() for _ in range(rng.randint(1, 4))]}


def changed(rng: random.Random, text: str) -> str:
    """With a few characters removed, repeated or replaced."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        text = (
            text[:at] + rng.choice(("", text[at : at + 1] * 3, "(", "]", "{", "\\", '"', "\x00", "é")) + text[at + 1 :]
        )
    return text


def case(seed: int, number: int) -> StructuredOutput:
    """The same for the same numbers."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choice(("regex", "json_schema", "grammar", "structural_tag"))
    if kind == "structural_tag":
        return StructuredOutput(structural_tag=structural_tag(rng))
    makers: dict[str, Callable[[random.Random], str]] = {
        "regex": regex,
        "json_schema": lambda rng: json.dumps(schema(rng)),
        "grammar": ebnf,
    }
    text = makers[kind](rng)
    return StructuredOutput.model_validate({kind: changed(rng, text) if rng.random() < 0.1 else text})


# ---------------------------------------------------------------------------------------------------- running them


@dataclass
class Report:
    outcomes: Counter[str] = field(default_factory=Counter)
    compile_seconds: tuple[float, int] = (0.0, -1)
    """The longest, and the case's number."""
    inline_seconds: tuple[float, int] = (0.0, -1)
    """Processor time of the dearest mask in the caller's thread."""
    mask_seconds: tuple[float, int] = (0.0, -1)
    """The longest wait for a mask from another thread."""
    defects: list[str] = field(default_factory=list)


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Of some 600 tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<eos>"])
    backend.train_from_iterator([Path(__file__).read_text(), '{"name": "Ada", "age": 36, "tags": ["a", "b"]}'], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def fuzz(tokenizer: PreTrainedTokenizerFast, seed: int, numbers: Iterable[int], *, tokens: int = 20) -> Report:
    """Compile these cases, and follow each for so many tokens."""
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    report = Report()
    for number in numbers:
        structured = case(seed, number)
        start = time.monotonic()
        try:
            compiler.compile(structured)
            report.compile_seconds = max(report.compile_seconds, (time.monotonic() - start, number))
        except InvalidRequestError as error:
            late = "took longer" in error.message  # given up; how many depends on the machine
            outcome = "too large" if isinstance(error, LimitExceededError) else "late" if late else "wrong"
        except QueueFullError:
            outcome = "busy"
        except OmniError as error:
            outcome = "failed"
            report.defects.append(f"{number}: {type(error).__name__}: {error}")
        else:
            state = compiler.start(structured, [tokenizer.eos_token_id])
            outcome = follow(state, random.Random(number), tokens, number, report)
        report.outcomes[outcome] += 1
    return report


def follow(state: GrammarState, rng: random.Random, tokens: int, number: int, report: Report) -> str:
    """Accept random tokens; what became of it."""
    slow = 0.0
    for _ in range(tokens):
        cpu = time.thread_time()
        inline = state.prepare()
        seconds = time.thread_time() - cpu
        report.inline_seconds = max(report.inline_seconds, (seconds, number))
        if seconds > MAX_INLINE_SECONDS:
            report.defects.append(f"{number}: a mask in the caller's thread took {seconds:.2f} s")
        if not inline:
            start = time.monotonic()
            state.wait()
            slow += time.monotonic() - start
            report.mask_seconds = max(report.mask_seconds, (time.monotonic() - start, number))
        if state.failure is not None:
            report.defects.append(f"{number}: {state.failure}")
            return "failed"
        if slow > MAX_SLOW_SECONDS:
            return "slow"
        allowed = np.flatnonzero(np.unpackbits(state.mask.numpy().view(np.uint8), bitorder="little"))
        allowed = allowed[allowed < state.vocab_size]
        if not len(allowed):
            return "dead end"
        state.accept(max(rng.choices(allowed.tolist(), k=4)))  # later ones are longer
    return "finished"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json")
    options = parser.parse_args()
    tokenizer = small_tokenizer()
    if options.tokenizer is not None:
        file = str(options.tokenizer / "tokenizer.json")
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=file)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    numbers = range(options.count) if options.only is None else [options.only]
    if options.only is not None:
        print(case(options.seed, options.only))
    report = fuzz(tokenizer, options.seed, numbers, tokens=options.tokens)
    print(f"{len(tokenizer)} tokens; " + ", ".join(f"{n} {outcome}" for outcome, n in report.outcomes.most_common()))
    for what, (seconds, number) in (
        ("compilation", report.compile_seconds),
        ("mask in the caller's thread", report.inline_seconds),
        ("mask from another thread", report.mask_seconds),
    ):
        print(f"longest {what}: {seconds:.3f} s (case {number})")
    for defect in report.defects:
        print(f"  {defect}")
    return 1 if report.defects else 0


if __name__ == "__main__":
    sys.exit(main())
