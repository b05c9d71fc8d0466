"""The starter against the libraries that its weights are for.

The language model's tokens and hidden rows against `transformers`, the picture drawn from those rows against a plain
loop over diffusers' transformer and scheduler. The voice and the ears run their own files and have nothing to differ
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.config.schema import ARBudget, DiffusionBudget
from omnistage.core.errors import InternalError
from omnistage.core.messages import ChatMessage, TextPart
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.types import ARInput, ChatInput, Condition, Latents, RequestInfo, StageInput, TokenChunk
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases, count_differences
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.diffusion.stage import DenoiseStage
from omnistage.hf import transformers
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.verify import LATENT_TOLERANCE
from omnistage_starter.bridges import SIZE, SUBJECT, TEXT_ROWS, condition_of
from omnistage_starter.draw import CHANNELS, LEAST_SIGMA, PATCH, Drawer, draw_folder
from omnistage_starter.hear import Prompter
from omnistage_starter.think import DRAW_LAYER, Thinker

ROWS_TOLERANCE = 1e-4
"""Of each row's own length: the first is thousands of times as long as the others."""
_NEW_TOKENS = 16
_STEPS, _GUIDANCE = 6, 4.0
_PROMPTS = (
    "Draw a red fox.",
    "What is the capital of France?",
    "A small robot under an old tree, at night, with a lamp in its hand and a bird on its head.",
    "Hello!",
    "Name three fruits and say which of them you would rather be.",
)


@dataclass(frozen=True, slots=True, eq=False)
class Thought:
    """Greedy tokens of a prompt, and its hidden rows `[n, H]` below the layer that is drawn from."""

    tokens: tuple[int, ...]
    rows: torch.Tensor


def run(runner: ModelRunner, *, cases: int = 3, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Three rows for each case: differing tokens, hidden rows, latents of the picture. All cases share our batches."""
    check_cases(cases)
    folder, report = runner.folder, progress or (lambda doing, share: None)
    prompts = [prompt_of(folder, _PROMPTS[number % len(_PROMPTS)]) for number in range(cases)]
    report("the engine's language model", 0.0)
    ours = think_together(runner, prompts)
    report("transformers", 0.25)
    theirs = Reference(folder / "think")
    thoughts = [theirs(prompt) for prompt in prompts]
    report("the engine's pictures", 0.5)
    conditions = [_condition(prompt, thought) for prompt, thought in zip(prompts, thoughts, strict=True)]
    asked = [DiffusionParams(steps=_STEPS, guidance=_GUIDANCE, seed=seed + number) for number in range(cases)]
    drawn = draw_together(runner, conditions, asked)
    report("diffusers", 0.75)
    loop = Loop(draw_folder(folder))
    rows = []
    for number, (own, their) in enumerate(zip(ours, thoughts, strict=True)):
        case = f"{number + 1}: {len(prompts[number].token_ids)} tokens"
        apart = float(((own.rows - their.rows).norm(dim=-1) / their.rows.norm(dim=-1)).max())
        latents = float((drawn[number] - loop(conditions[number], asked[number])).abs().max())
        rows.append(VerifyRow.judge(case, "tokens", count_differences(own.tokens, their.tokens), 0.0))
        rows.append(VerifyRow.judge(case, "hidden rows", apart, ROWS_TOLERANCE))
        rows.append(VerifyRow.judge(case, "latents", latents, LATENT_TOLERANCE))
    report("compared", 1.0)
    return rows


def prompt_of(folder: Path, text: str) -> ARInput:
    """The language model's prompt for a conversation of one message."""
    return Prompter(folder / "think").prompt(ChatInput((ChatMessage("user", (TextPart(text),)),)))


def _condition(prompt: ARInput, thought: Thought) -> Condition:
    """What the bridge makes of a prompt's rows."""
    start, end = prompt.context[SUBJECT].tolist()
    return condition_of(thought.rows[max(start, end - TEXT_ROWS) : end])


# -------------------------------------------------------------------------------------------------------- ours


def think_together(runner: ModelRunner, prompts: Sequence[ARInput], tokens: int = _NEW_TOKENS) -> list[Thought]:
    """Each prompt on the engine's language model, all in one batch."""
    component = runner.load_component("think")
    if not isinstance(component, Thinker):
        raise InternalError("the think stage has another component")
    blocks = sum(len(prompt.token_ids) + tokens for prompt in prompts)  # one a token: always enough
    stage = ARStage("think", component, ARBudget(kv_blocks=blocks, max_running=len(prompts), cuda_graphs=False))
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    for number, prompt in enumerate(prompts):
        stage.submit(StageInput(RequestInfo(str(number)), params, prompt, emit_hidden=True))
    told: dict[str, list[TokenChunk]] = {str(number): [] for number in range(len(prompts))}
    for chunk in stage.drain():
        if chunk.error is not None:
            raise chunk.error
        if isinstance(chunk.payload, TokenChunk):
            told[chunk.request_id].append(chunk.payload)
    return [_thought(told[str(number)], len(prompt.token_ids)) for number, prompt in enumerate(prompts)]


def _thought(chunks: Sequence[TokenChunk], length: int) -> Thought:
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    rows = torch.cat([chunk.hidden for chunk in chunks if chunk.hidden is not None])
    return Thought(tokens, rows[:length])


def draw_together(
    runner: ModelRunner, conditions: Sequence[Condition], asked: Sequence[DiffusionParams]
) -> list[torch.Tensor]:
    """Latents `[channels, high, wide]` of each condition, all drawn at once on the engine."""
    component = runner.load_component("draw")
    if not isinstance(component, Drawer):
        raise InternalError("the draw stage has another component")
    stage = DenoiseStage("draw", component, DiffusionBudget())
    for number, (condition, params) in enumerate(zip(conditions, asked, strict=True)):
        stage.submit(StageInput(RequestInfo(str(number)), params, condition))
    made: dict[str, torch.Tensor] = {}
    for chunk in stage.drain():
        if chunk.error is not None:
            raise chunk.error
        if isinstance(chunk.payload, Latents):
            made[chunk.request_id] = chunk.payload.picture
    return [made[str(number)] for number in range(len(conditions))]


# ------------------------------------------------------------------------------------------------------ theirs


class Reference:
    """`transformers`' own model in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        ).eval()
        own = self._model.generation_config
        # Nothing of the checkpoint's own settings but where to stop: the stage is asked for plain greedy too.
        self._settings = transformers.GenerationConfig(do_sample=False, eos_token_id=own.eos_token_id, pad_token_id=0)
        self._model.generation_config = self._settings

    @torch.inference_mode()
    def __call__(self, prompt: ARInput, tokens: int = _NEW_TOKENS) -> Thought:
        ids = torch.tensor([prompt.token_ids])
        mask = torch.ones_like(ids)
        made = self._model.generate(ids, attention_mask=mask, max_new_tokens=tokens)
        hidden = self._model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[DRAW_LAYER][0]
        return Thought(tuple(made[0, ids.shape[1] :].tolist()), hidden)


class Loop:
    """diffusers' transformer and scheduler, one step after the other, one picture at a time: as it was trained."""

    def __init__(self, folder: Path) -> None:
        package: Any = diffusers()
        options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
        self._transformer = package.Flux2Transformer2DModel.from_pretrained(folder / "transformer", **options).eval()
        kept = folder / "scheduler"
        self._scheduler = package.FlowMatchEulerDiscreteScheduler.from_pretrained(kept, local_files_only=True)

    @torch.inference_mode()
    def __call__(self, condition: Condition, params: DiffusionParams) -> torch.Tensor:
        """Latents `[channels, high, wide]`."""
        side, steps, scale = SIZE // PATCH, params.steps or 1, params.guidance or 0.0
        start = torch.randn(1, CHANNELS, side, side, generator=torch.Generator().manual_seed(params.seed or 0))
        latents = start.flatten(2).transpose(1, 2)
        zero = torch.arange(1)
        places = torch.cartesian_prod(zero, torch.arange(side), torch.arange(side), zero)
        embeds = torch.stack([condition.positive["embeds"], torch.zeros_like(condition.positive["embeds"])])
        order = torch.cartesian_prod(zero, zero, zero, torch.arange(embeds.shape[1]))
        self._scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
        for timestep in self._scheduler.timesteps:
            # With and without the text in one call, as most pipelines of diffusers do it: one by one the products are
            # rounded otherwise, and the flow makes a thousand times as much of that.
            toward, away = self._transformer(
                hidden_states=latents.expand(2, -1, -1),
                timestep=(timestep / 1000).expand(2),
                encoder_hidden_states=embeds,
                img_ids=places,
                txt_ids=order,
                return_dict=False,
            )[0].split(1)
            clean = (away + scale * (toward - away)).clamp(-1, 1)
            flow = (latents - clean) / max(float(timestep) / 1000, LEAST_SIGMA)
            latents = self._scheduler.step(flow, timestep, latents, return_dict=False)[0]
        return latents[0].T.reshape(CHANNELS, side, side)
