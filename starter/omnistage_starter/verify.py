"""Compare the starter with the reference libraries.

The language model's tokens and hidden states with `transformers`, the latents that are drawn from them with a plain
loop over diffusers' transformer and scheduler. Speech recognition and synthesis have no second implementation.
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
from omnistage.models._diffusers.verify import LATENT_TOLERANCE, PIXEL_TOLERANCE, pixel_difference
from omnistage_starter.bridges import SIZE, SUBJECT, TEXT_ROWS, condition_of
from omnistage_starter.draw import CHANNELS, MIN_SIGMA, PATCH, PatchDecoder, PixelDenoiser, draw_folder
from omnistage_starter.hear import PromptBuilder
from omnistage_starter.think import DRAW_LAYER, Thinker

ROWS_TOLERANCE = 1e-4
"""Relative to each row's norm: that of the first row is thousands of times larger."""
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
class ThinkResult:
    """Greedy tokens of a prompt, and its hidden states `[n, H]` that images are drawn from."""

    tokens: tuple[int, ...]
    rows: torch.Tensor


def run(runner: ModelRunner, *, cases: int = 3, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Four rows for each case: differing tokens, hidden states, latents, and the pixels of all cases in one batch.

    Latents are those of each case alone: the rounding of a matrix product depends on the number of its rows, and the
    flow amplifies that. Diffusers' own latents of the third prompt differ by 1.6e-4 between three in a batch and one.
    """
    check_cases(cases)
    folder, report = runner.folder, progress or (lambda doing, share: None)
    prompts = [prompt_of(folder, _PROMPTS[number % len(_PROMPTS)]) for number in range(cases)]
    report("the engine's language model", 0.0)
    ours = run_think(runner, prompts)
    report("transformers", 0.25)
    reference = ReferenceModel(folder / "think")
    theirs = [reference(prompt) for prompt in prompts]
    report("the engine's images", 0.5)
    conditions = [_condition(prompt, result) for prompt, result in zip(prompts, theirs, strict=True)]
    params = [DiffusionParams(steps=_STEPS, guidance=_GUIDANCE, seed=seed + number) for number in range(cases)]
    alone = [run_draw(runner, [each], [param])[0] for each, param in zip(conditions, params, strict=True)]
    together = run_draw(runner, conditions, params)
    report("diffusers", 0.75)
    loop = ReferenceLoop(draw_folder(folder))
    rows = []
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        case = f"{number + 1}: {len(prompts[number].token_ids)} tokens"
        hidden = float(((our.rows - their.rows).norm(dim=-1) / their.rows.norm(dim=-1)).max())
        latents = loop(conditions[number], params[number])
        difference = float((alone[number] - latents).abs().max())
        pixels = [
            PatchDecoder().decode([each], width=SIZE, height=SIZE, num_frames=1)[0]
            for each in (together[number], latents)
        ]
        rows.append(VerifyRow.judge(case, "tokens", count_differences(our.tokens, their.tokens), 0.0))
        rows.append(VerifyRow.judge(case, "hidden states", hidden, ROWS_TOLERANCE))
        rows.append(VerifyRow.judge(case, "latents", difference, LATENT_TOLERANCE))
        rows.append(VerifyRow.judge(case, "pixels, all at once", pixel_difference(*pixels), PIXEL_TOLERANCE))
    report("compared", 1.0)
    return rows


def prompt_of(folder: Path, text: str) -> ARInput:
    """The language model's prompt for a conversation of one message."""
    return PromptBuilder(folder / "think").prompt(ChatInput((ChatMessage("user", (TextPart(text),)),)))


def _condition(prompt: ARInput, result: ThinkResult) -> Condition:
    """What the bridge computes from a prompt's rows."""
    start, end = prompt.context[SUBJECT].tolist()
    return condition_of(result.rows[max(start, end - TEXT_ROWS) : end])


# -------------------------------------------------------------------------------------------------------- ours


def run_think(runner: ModelRunner, prompts: Sequence[ARInput], tokens: int = _NEW_TOKENS) -> list[ThinkResult]:
    """All prompts in one batch of the engine's language model."""
    component = runner.load_component("think")
    if not isinstance(component, Thinker):
        raise InternalError("the think stage has another component")
    blocks = sum(len(prompt.token_ids) + tokens for prompt in prompts)  # one per token: always enough
    stage = ARStage("think", component, ARBudget(kv_blocks=blocks, max_running=len(prompts), cuda_graphs=False))
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    for number, prompt in enumerate(prompts):
        stage.submit(StageInput(RequestInfo(str(number)), params, prompt, emit_hidden=True))
    chunks: dict[str, list[TokenChunk]] = {str(number): [] for number in range(len(prompts))}
    for chunk in stage.drain():
        if chunk.error is not None:
            raise chunk.error
        if isinstance(chunk.payload, TokenChunk):
            chunks[chunk.request_id].append(chunk.payload)
    return [_think_result(chunks[str(number)], len(prompt.token_ids)) for number, prompt in enumerate(prompts)]


def _think_result(chunks: Sequence[TokenChunk], length: int) -> ThinkResult:
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    rows = torch.cat([chunk.hidden for chunk in chunks if chunk.hidden is not None])
    return ThinkResult(tokens, rows[:length])


def run_draw(
    runner: ModelRunner, conditions: Sequence[Condition], params: Sequence[DiffusionParams]
) -> list[torch.Tensor]:
    """Latents `[channels, height, width]` of all conditions, in one batch of the engine."""
    component = runner.load_component("draw")
    if not isinstance(component, PixelDenoiser):
        raise InternalError("the draw stage has another component")
    stage = DenoiseStage("draw", component, DiffusionBudget())
    for number, (condition, settings) in enumerate(zip(conditions, params, strict=True)):
        stage.submit(StageInput(RequestInfo(str(number)), settings, condition))
    latents: dict[str, torch.Tensor] = {}
    for chunk in stage.drain():
        if chunk.error is not None:
            raise chunk.error
        if isinstance(chunk.payload, Latents):
            latents[chunk.request_id] = chunk.payload.picture
    return [latents[str(number)] for number in range(len(conditions))]


# ------------------------------------------------------------------------------------------------------ theirs


class ReferenceModel:
    """`transformers`' own model in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        ).eval()
        stop = self._model.generation_config.eos_token_id
        # Of the checkpoint's settings only the end token: the stage runs plain greedy decoding too.
        self._settings = transformers.GenerationConfig(do_sample=False, eos_token_id=stop, pad_token_id=0)
        self._model.generation_config = self._settings

    @torch.inference_mode()
    def __call__(self, prompt: ARInput, tokens: int = _NEW_TOKENS) -> ThinkResult:
        ids = torch.tensor([prompt.token_ids])
        mask = torch.ones_like(ids)
        generated = self._model.generate(ids, attention_mask=mask, max_new_tokens=tokens)
        hidden = self._model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[DRAW_LAYER][0]
        return ThinkResult(tuple(generated[0, ids.shape[1] :].tolist()), hidden)


class ReferenceLoop:
    """diffusers' transformer and scheduler in a plain loop, one image at a time, as in training."""

    def __init__(self, folder: Path) -> None:
        package: Any = diffusers()
        options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
        self._transformer = package.Flux2Transformer2DModel.from_pretrained(folder / "transformer", **options).eval()
        scheduler = folder / "scheduler"
        self._scheduler = package.FlowMatchEulerDiscreteScheduler.from_pretrained(scheduler, local_files_only=True)

    @torch.inference_mode()
    def __call__(self, condition: Condition, params: DiffusionParams) -> torch.Tensor:
        """Latents `[channels, height, width]`."""
        side, steps, scale = SIZE // PATCH, params.steps or 1, params.guidance or 0.0
        start = torch.randn(1, CHANNELS, side, side, generator=torch.Generator().manual_seed(params.seed or 0))
        latents = start.flatten(2).transpose(1, 2)
        zero = torch.arange(1)
        image_ids = torch.cartesian_prod(zero, torch.arange(side), torch.arange(side), zero)
        embeds = torch.stack([condition.positive["embeds"], torch.zeros_like(condition.positive["embeds"])])
        text_ids = torch.cartesian_prod(zero, zero, zero, torch.arange(embeds.shape[1]))
        self._scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
        for timestep in self._scheduler.timesteps:
            # Both in one call, as in most pipelines of diffusers: separate calls round differently, and the flow
            # amplifies that a thousand times.
            conditional, unconditional = self._transformer(
                hidden_states=latents.expand(2, -1, -1),
                timestep=(timestep / 1000).expand(2),
                encoder_hidden_states=embeds,
                img_ids=image_ids,
                txt_ids=text_ids,
                return_dict=False,
            )[0].split(1)
            clean = (unconditional + scale * (conditional - unconditional)).clamp(-1, 1)
            flow = (latents - clean) / max(float(timestep) / 1000, MIN_SIGMA)
            latents = self._scheduler.step(flow, timestep, latents, return_dict=False)[0]
        return latents[0].T.reshape(CHANNELS, side, side)
