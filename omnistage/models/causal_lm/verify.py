"""Compare a causal LM on our engine with `transformers`: greedy tokens and the logits they come from.

All cases run in one batch of our stage and one by one in the reference, in float32 on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from omnistage.config.schema import ARBudget
from omnistage.core.errors import ConfigError
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, MediaSpan, RequestInfo, StageInput, TokenChunk
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases, count_differences
from omnistage.engines.ar.attention import PagedContext
from omnistage.engines.ar.component import ARComponent, OwnSequence
from omnistage.engines.ar.group import Group
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers

LOGITS_TOLERANCE = 1e-4
_NEW_TOKENS = 16
_MAX_PROMPT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: tuple[int, ...]
    logits: torch.Tensor
    """float32 `[V]` of the first generated position."""


def run(runner: ModelRunner, *, cases: int = 6, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Two rows for each of `cases` random prompts: differing tokens, and the logits' largest relative difference."""
    check_cases(cases)
    report = progress or (lambda _what, _done: None)
    report("loading the engine's model", 0.0)
    component = _load(runner)
    spec = component.spec
    prompts = _prompts(cases, seed, spec.prompt_vocab_size or spec.vocab_size, spec.max_length)
    report("running the engine", 0.3)
    ours = _ours(component, prompts)
    eos, device = component.eos_token_ids, component.device
    del component  # two copies of a model need not fit at once
    report("loading the reference", 0.4)
    reference = _reference(runner.folder, prompts, eos, device, report)
    rows = []
    for number, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        case = f"{number}: {len(prompts[number])} tokens"
        rows.append(VerifyRow.judge(case, "tokens", count_differences(mine.tokens, theirs.tokens), 0.0))
        rows.append(VerifyRow.judge(case, "logits", _relative(mine.logits, theirs.logits), LOGITS_TOLERANCE))
    report("compared", 1.0)
    return rows


def _prompts(cases: int, seed: int, vocab_size: int, max_length: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    limit = max(1, min(_MAX_PROMPT_TOKENS, max_length - _NEW_TOKENS))
    lengths = torch.randint(1, limit + 1, (cases,), generator=generator).tolist()
    return [tuple(torch.randint(0, vocab_size, (length,), generator=generator).tolist()) for length in lengths]


def _load(runner: ModelRunner) -> ARComponent:
    name, *others = runner.stage_names
    component = runner.load_component(name, device="auto")
    if others or not isinstance(component, ARComponent):
        raise ConfigError(f"{runner.folder} is not a plain causal LM; its own family compares it")
    return component


# -------------------------------------------------------------------------------------------------- ours


class _Tap(ARComponent):
    """The component, with the logits of each step kept."""

    def __init__(self, inner: ARComponent) -> None:
        self._inner = inner
        self.spec, self.decoder = inner.spec, inner.decoder
        self.device, self.dtype = inner.device, inner.dtype
        self.eos_token_ids, self.suppress_token_ids = inner.eos_token_ids, inner.suppress_token_ids
        self.steps: list[torch.Tensor] = []
        self.firsts: list[torch.Tensor] = []
        """Of each sequence, in their order, where the component computes them one by one."""

    @property
    def attention_modules(self) -> Sequence[nn.Module]:
        return self._inner.attention_modules

    @property
    def recurrent_modules(self) -> Sequence[nn.Module]:
        return self._inner.recurrent_modules

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._inner.embed(token_ids)

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        return self._inner.forward(embeds, positions, paged)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._inner.logits(hidden)
        self.steps.append(logits.float().cpu())
        return logits

    def forward_group(self, token_ids: torch.Tensor, group: Group) -> torch.Tensor:
        logits = self._inner.forward_group(token_ids, group)
        if group.lengths == (group.count,):  # a prompt
            self.firsts.append(logits[0].float().cpu())
        return logits

    def open_sequence(self, media: Sequence[MediaSpan] = ()) -> OwnSequence:
        return _TapSequence(self._inner.open_sequence(media), self.firsts)


class _TapSequence(OwnSequence):
    """The sequence, with its first logits kept."""

    def __init__(self, inner: OwnSequence, rows: list[torch.Tensor]) -> None:
        self._inner, self._rows, self._first = inner, rows, True

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits = self._inner.forward(token_ids)
        if self._first:
            self._rows.append(logits.float().cpu())
        self._first = False
        return logits


def _ours(component: ARComponent, prompts: Sequence[tuple[int, ...]]) -> list[_Answer]:
    tap = _Tap(component)
    budget = ARBudget(
        # One step takes all prompts, so that the first logits hold one row a case, in order.
        max_batch_tokens=sum(map(len, prompts)),
        max_running=len(prompts),
        kv_blocks=sum(len(prompt) + _NEW_TOKENS for prompt in prompts),  # one a token: always enough
        prefix_caching=False,
        cuda_graphs=False,
    )
    stage = ARStage("verify", tap, budget)
    params = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS)
    for number, prompt in enumerate(prompts):
        stage.submit(StageInput(RequestInfo(str(number)), params, ARInput(prompt)))
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for chunk in stage.drain():
        if chunk.error is not None:
            raise chunk.error
        if isinstance(chunk.payload, TokenChunk):
            tokens[chunk.request_id].extend(chunk.payload.token_ids)
    first = tap.firsts or tap.steps[0]
    return [_Answer(tuple(tokens[str(number)]), first[number]) for number in range(len(prompts))]


# --------------------------------------------------------------------------------------------- reference


@torch.inference_mode()
def _reference(
    folder: Path,
    prompts: Sequence[tuple[int, ...]],
    eos: tuple[int, ...],
    device: torch.device,
    report: Progress,
) -> list[_Answer]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    model.to(device).eval()
    # Nothing of the checkpoint's own generation settings but where to stop: the stage is asked for plain greedy too.
    settings = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=_NEW_TOKENS,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    model.generation_config = settings
    answers = []
    for number, prompt in enumerate(prompts):
        report(f"reference {number + 1} of {len(prompts)}", 0.5 + 0.5 * number / len(prompts))
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
        )
        tokens = tuple(out.sequences[0, len(prompt) :].tolist())
        answers.append(_Answer(tokens, out.logits[0][0].float().cpu()))
    return answers


def _relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    scale = float(theirs.abs().max()) or 1.0
    return float((mine - theirs).abs().max()) / scale
