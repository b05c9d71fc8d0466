"""Which image-text-to-text and audio-language types of the installed transformers are served exactly.

Each type gets a small random checkpoint with its own processor, is loaded and served as a user's would be (`Omni`), and
is compared with transformers' own `generate`, one chat at a time: six chats at once with no, one and two items of each
kind of media, greedy, prefill in chunks, the same chats again from the prefix cache, and again with so few blocks that
some are preempted. States are those of `coverage.py`.

python tools/coverage_multimodal.py llava qwen3_vl             these types
python tools/coverage_multimodal.py --all --markdown docs/multimodal_coverage.md
python tools/coverage_multimodal.py llava --markdown docs/multimodal_coverage.md    its row anew
python tools/coverage_multimodal.py --all --part 1/2 --json out/part1.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from omnistage.cli.model_runner import OmniRunner
from omnistage.compat import prepare_torchvision
from omnistage.core.errors import OmniError
from omnistage.core.params import SamplingParams
from omnistage.core.types import Modality
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.multimodal_lm.component import MultimodalLM
from omnistage.models.multimodal_lm.own_cache import OwnCacheMultimodalLM
from omnistage.models.multimodal_lm.probe import STOCK_FAILURE
from omnistage.models.multimodal_lm.processor import MultimodalProcessor
from omnistage.models.multimodal_lm.verify import as_sent, make_chats, reference_answers
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni

CHATS = 6
NEW_TOKENS = 16
AUDIO_TYPES = ("audioflamingo3", "musicflamingo")
"""Audio-language types that transformers lists as sequence-to-sequence models."""
FAMILIES = ("qwen2_5_omni", "qwen3_omni_moe")
"""Types that families of their own serve, under the same names, and compare themselves."""
OVERRIDES = (
    "thinker.budget.prefill_chunk=16",
    "thinker.budget.max_batch_tokens=48",
    "thinker.budget.max_model_len=8192",
)
BLOCK, MANY_BLOCKS = 8, 1600
IN_GROUPS = ", in groups"
"""What a row says of types that do not run in flattened batches."""
_ROW = re.compile(r"^\| ([\w.-]+) \| (\w+) \| (.*) \|$", re.MULTILINE)


def _tool(name: str) -> ModuleType:
    """A module beside this one; `coverage` is also a package of its own."""
    spec = importlib.util.spec_from_file_location(f"{name}_tool", Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


causal: Any = _tool("coverage")
checkpoints: Any = _tool("multimodal_checkpoints")


def tasks() -> dict[str, list[str]]:
    """Types by task. A type that also takes pictures counts among those."""
    auto = transformers.models.auto.modeling_auto
    images = sorted(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    others = set(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - set(images)
    return {"image-text-to-text": images, "audio-language": sorted({*others, *AUDIO_TYPES})}


def cover(model_type: str, seed: int = 0) -> Any:
    """Build, serve and compare one type."""
    if model_type in FAMILIES:
        return _verified(model_type, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            checkpoints.write(model_type, folder, seed)
        except Exception as error:  # whatever a type's own code may raise
            return causal.Outcome(model_type, "unbuilt", causal._message(error))
        try:
            return _compare(model_type, folder, seed)
        except OmniError as error:
            if STOCK_FAILURE in str(error):  # the small checkpoint is at fault, and not what serves it
                return causal.Outcome(model_type, "unbuilt", causal._message(error))
            return causal.Outcome(model_type, "refused", causal._message(error).replace(name, "the folder"))
        except Exception as error:  # this is what the tool looks for
            return causal.Outcome(model_type, "crashed", causal._message(error))


def _verified(model_type: str, seed: int) -> Any:
    """By the comparison of the type's own family."""
    with tempfile.TemporaryDirectory() as name:
        folder, entry = Path(name) / model_type, REGISTRY.family(model_type)
        if entry.tiny is None or entry.verify is None:
            raise LookupError(f"the family {model_type} has no comparison")
        entry.tiny(folder, seed=seed)
        rows: Any = entry.verify(OmniRunner(folder), cases=2, seed=seed, progress=lambda *_: None)
    wrong = [f"{row.quantity} of {row.case} differs by {row.difference:.1e}" for row in rows if not row.ok]
    reason = wrong[0] if wrong else f"served by a family of its own; all {len(rows)} quantities of its comparison agree"
    return causal.Outcome(model_type, "wrong" if wrong else "family", reason)


def _compare(model_type: str, folder: Path, seed: int) -> Any:
    with _opened(folder, MANY_BLOCKS) as omni:
        stage = omni.orchestrator.stages["thinker"]
        component = stage.component if isinstance(stage, ARStage) else None
        if not isinstance(component, (MultimodalLM, OwnCacheMultimodalLM)):
            return causal.Outcome(model_type, "refused", "served by a family of its own")
        without, processor, text_alone = component.unsupported, MultimodalProcessor.load(folder), True
        if component.spec.whole_media:
            processor.use_whole_prompts(rows=isinstance(component, MultimodalLM))
        if isinstance(component, OwnCacheMultimodalLM):
            text_alone = component.takes_text_alone
        chats, expected = _reference(
            folder, processor, make_chats(processor, CHATS, seed, without, text_alone=text_alone)
        )
        if len(chats) < CHATS - 1:
            return causal.Outcome(model_type, "unbuilt", "transformers itself cannot answer chats with its media")
        sent = [[as_sent(message) for message in chat] for chat in chats]
        got = _answers(omni, sent) + _answers(omni, sent)
    longest = max(len(processor.chat(chat).token_ids) for chat in chats)
    with _opened(folder, (longest + NEW_TOKENS) // BLOCK + 2) as omni:
        got += _answers(omni, sent)
        preemptions = omni.stats().stages["thinker"].preemptions
    answers = [causal.Answer(answer.token_ids, answer.logprobs) for answer in expected]
    outcome = replace(causal.judge(model_type, answers, got, "float32"), preemptions=preemptions)
    kinds = ", ".join(sorted(processor.input_modalities - {Modality.TEXT, *without}))
    refused = "".join(f"; {kind} refused: {reason}" for kind, reason in without.items())
    if outcome.state != "exact":
        return outcome
    grouped = component.spec.grouped
    one_by_one = isinstance(component, OwnCacheMultimodalLM) and not grouped
    notes = ("" if text_alone else ", never text alone") + (IN_GROUPS if grouped else "")
    state = "fallback" if one_by_one else "exact"
    return replace(outcome, state=state, reason=kinds + notes + refused, in_groups=grouped)


def _opened(folder: Path, blocks: int) -> Omni:
    overrides = (*OVERRIDES, f"thinker.budget.block_size={BLOCK}", f"thinker.budget.kv_blocks={blocks}")
    return Omni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False)


def _answers(omni: Omni, chats: Sequence[Any]) -> list[Any]:
    params, answers = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=0), []
    for output in omni.chat(chats, params, progress=False):
        if output.error is not None:
            raise RuntimeError(f"while generating: {output.error}") from output.error
        logprobs = output.outputs[0].logprobs or []
        answers.append(causal.Answer(output.token_ids, [item.chosen.logprob for item in logprobs]))
    return answers


def _reference(folder: Path, processor: MultimodalProcessor, chats: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The chats that transformers can answer, and its answers: some processors do not mix kinds of media."""
    kept, answers = [], []
    for chat in chats:
        try:
            answers += reference_answers(folder, processor, [chat], NEW_TOKENS)
        except Exception:  # review: allow[ERR03] a type's own code may raise anything; its caller counts the chats left
            continue
        kept.append(chat)
    return kept, answers


def as_markdown(outcomes: Sequence[Any]) -> str:
    """The table of the documentation."""
    by_type = {outcome.model_type: outcome for outcome in outcomes}
    lines = [
        "# Which vision- and audio-language types are served",
        "",
        "By `python tools/coverage_multimodal.py --all --markdown docs/multimodal_coverage.md`: small random",
        "checkpoints with the type's own processor, six chats at once with up to two items of each kind of media,",
        "greedy, prefill in chunks, prefix cache, preemption. Tokens and log probabilities are compared with those of",
        "`generate`, one chat at a time. `in groups` is exact, too: whole prompts, and generated tokens of all",
        "sequences at once. `fallback` is as exact, one sequence at a time with transformers' own forward and cache.",
        "`unbuilt` says nothing of a published checkpoint: no small one could be made here. How it works:",
        "[multimodal models](multimodal_models.md).",
        "Fun-ASR and Granite Speech were judged with the Python part of `torchaudio` 2.11, models with a timm tower "
        "with `timm` 1.0.31,",
        "SmolVLM with `num2words` 0.5.14, Inkling with `scipy` 1.17.1.",
        "",
        f"transformers {transformers.__version__}, float32.",
    ]
    for task, types in tasks().items():
        rows = [by_type[t] for t in types if t in by_type]
        lines += ["", f"## {task}", "", causal.summary(rows) + f" of {len(rows)}.", ""]
        lines += ["| model_type | state | media, or reason |", "| --- | --- | --- |"]
        for row in rows:
            reason = row.reason.replace("|", "\\|").replace("<", "&lt;")
            lines.append(f"| {row.model_type} | {row.state} | {reason} |")
    return "\n".join(lines) + "\n"


def _with_rows_of(page: Path, outcomes: Sequence[Any]) -> list[Any]:
    """`outcomes`, and what the page says of other types."""
    new = {outcome.model_type for outcome in outcomes}
    rows = _ROW.findall(page.read_text(encoding="utf-8")) if page.exists() else []
    kept = [(name, state, reason) for name, state, reason in rows if name not in {*new, "model_type"}]
    texts = ((name, state, reason.replace("\\|", "|").replace("&lt;", "<")) for name, state, reason in kept)
    return [*outcomes, *(causal.Outcome(*row, in_groups=IN_GROUPS in row[2].partition(";")[0]) for row in texts)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; none: --all")
    parser.add_argument("--all", action="store_true", help="every type of the installed transformers")
    parser.add_argument("--part", default="1/1", help="which part of the list, such as 2/4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(argv)
    known = [t for types in tasks().values() for t in types]
    types = args.types or (known if args.all else [])
    unknown = sorted(set(types) - set(known))
    if unknown or not types:
        parser.error(f"unknown types: {', '.join(unknown)}" if unknown else "name types, or give --all")
    part, parts = (int(number) for number in args.part.split("/"))
    prepare_torchvision()
    causal.quiet()
    outcomes = []
    for model_type in types[part - 1 :: parts]:
        start = time.monotonic()
        outcome = cover(model_type, args.seed)
        outcomes.append(outcome)
        print(f"{model_type:28} {outcome.state:8} {time.monotonic() - start:5.1f} s  {outcome.reason}", flush=True)
    print(causal.summary(outcomes))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(as_markdown(_with_rows_of(args.markdown, outcomes)), encoding="utf-8")
    return 1 if any(outcome.state in ("wrong", "crashed") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
