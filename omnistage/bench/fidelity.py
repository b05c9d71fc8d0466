"""What a model answers to some prompts, and how far a quantised one is from it: what `omnistage quantize` measures."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omnistage.bench import quality
from omnistage.config.quantize import QuantizeConfig
from omnistage.core.errors import UnsupportedModelError
from omnistage.core.messages import ChatMessage, TextPart
from omnistage.core.params import DiffusionParams, SamplingParams, StageParams
from omnistage.core.types import ARInput, Modality, OmniTokensPrompt
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.diffusion.component import Denoiser
from omnistage.engines.quantisation.experts import one_by_one
from omnistage.engines.quantisation.transform import (
    Quantiser,
    full_weights,
    network_bytes,
    networks_of,
    quantised_layers,
)
from omnistage.models.loading import use_paged_attention
from omnistage.models.quantised_files import Mark, marks_of
from omnistage.omni import Omni

Report = Callable[[str, float], None]
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in three sentences how a rainbow forms.",
    "Write a short story about a lighthouse keeper.",
    "List five things to pack for a hike in the mountains.",
    "Translate 'The meeting starts at nine' into Spanish and German.",
    "A train travels 180 km in two hours. How fast is it on average?",
    "Write a Python function that reverses a list.",
    "Summarise why leaves change colour in autumn.",
)
"""The default prompts; of pictures as well."""
_MAX_ROWS = 256
"""Of the inputs by which a layer is judged."""


@dataclass(slots=True, eq=False)
class Observation:
    """What a model did with the prompts."""

    sequences: list[list[int]] = field(default_factory=list)
    """Prompt and greedy answer; a second observation is made over those of the first."""
    starts: list[int] = field(default_factory=list)
    """Where the answers begin."""
    logits: list[Tensor] = field(default_factory=list)
    """float32 `[T, V]`: at each position from which a token of the answer follows."""
    likelihoods: list[float] = field(default_factory=list)
    """Mean negative log-likelihood of each sequence."""
    pictures: list[np.ndarray] = field(default_factory=list)
    waves: list[tuple[np.ndarray, int]] = field(default_factory=list)
    seconds: float = 0.0
    """For all prompts one after the other."""
    weight_bytes: int = 0
    layers: dict[str, list[str]] = field(default_factory=dict)
    """Quantised layers by stage."""
    marks: dict[str, dict[str, list[Mark]]] = field(default_factory=dict)
    """By stage and layer: what tells the weights in full precision from each other; of the original alone."""


def components(omni: Omni) -> dict[str, object]:
    """The components of the stages that may be quantised."""
    components_by_stage = {}
    for name, stage in omni.orchestrator.stages.items():
        for attribute in ("component", "denoiser", "encoder"):
            component = getattr(stage, attribute, None)
            if component is not None and networks_of(component):
                components_by_stage[name] = component
    return components_by_stage


def observe(
    omni: Omni,
    prompts: Sequence[str],
    tokens: int,
    steps: int | None,
    report: Report,
    like: Observation | None = None,
) -> Observation:
    """Answer the prompts; logits are over the sequences of `like` where it is given."""
    observation = Observation()
    parts = components(omni)
    for name, component in parts.items():
        networks = networks_of(component)
        observation.weight_bytes += sum(map(network_bytes, networks))
        if layers := [layer for network in networks for layer in quantised_layers(network)]:
            observation.layers[name] = layers
        if like is None:
            weights = (pair for network in networks for pair in full_weights(network) if pair[1].device.type != "meta")
            marks = observation.marks[name] = {}
            for layer, weight in weights:
                marks.setdefault(layer, []).extend(marks_of(weight))
    texts = [part for part in parts.values() if isinstance(part, ARComponent)]
    params = [_params(parts, number, tokens, steps) for number in range(len(prompts))]
    modalities = [each.value for each in omni.modalities if each is not Modality.VIDEO]
    _answer(omni, prompts[0], params[0], modalities)  # the first one finds everything cold
    for number, prompt in enumerate(prompts):
        report(f"prompt {number + 1} of {len(prompts)}", number / len(prompts))
        start = time.perf_counter()
        output = _answer(omni, prompt, params[number], modalities)
        observation.seconds += time.perf_counter() - start
        if output.images:
            observation.pictures.append(output.images[0].pixels)
        if output.audio is not None:
            observation.waves.append((output.audio.samples, output.audio.sample_rate))
        if texts and output.outputs:
            prompt_ids = _prompt_ids(omni, prompt)
            ids = like.sequences[number] if like else [*prompt_ids, *output.outputs[0].token_ids]
            _observe_text(observation, texts[0], ids, like.starts[number] if like else len(prompt_ids))
    if not (observation.logits or observation.pictures or observation.waves):
        raise UnsupportedModelError("this model gave neither text, nor a picture, nor speech that could be compared")
    return observation


def _params(parts: Mapping[str, object], seed: int, tokens: int, steps: int | None) -> dict[str, StageParams]:
    """The likeliest text, and what follows from one seed: speech may be sampled, and pictures begin with noise."""
    params: dict[str, StageParams] = {}
    for name, part in parts.items():
        if isinstance(part, ARComponent):
            params[name] = SamplingParams(seed=seed) if params else SamplingParams(temperature=0.0, max_tokens=tokens)
        elif isinstance(part, Denoiser):
            params[name] = DiffusionParams(seed=seed, steps=steps)
    return params


def _answer(omni: Omni, prompt: str, params: Mapping[str, StageParams], modalities: list[str]) -> Any:
    text = any(isinstance(each, SamplingParams) for each in params.values())
    inputs: Any = [{"role": "user", "content": prompt}] if text else prompt
    return omni.generate(inputs, params, modalities=modalities, progress=False)[0]


def _prompt_ids(omni: Omni, prompt: str) -> Sequence[int]:
    """The language model's prompt, which a family may keep inside a payload of its own."""
    payload: Any = omni.processor.chat([ChatMessage("user", (TextPart(prompt),))])  # type: ignore[union-attr]
    if isinstance(payload, ARInput):
        return payload.token_ids
    tokens = getattr(payload, "tokens", None)
    if not isinstance(tokens, OmniTokensPrompt):
        raise UnsupportedModelError("the prompts of this model are not tokens, so that its text cannot be compared")
    return tokens.prompt_token_ids


def _observe_text(observation: Observation, component: ARComponent, ids: list[int], start: int) -> None:
    logits = whole_logits(component, ids)
    observation.sequences.append(ids)
    observation.starts.append(start)
    observation.logits.append(logits[start - 1 : -1])
    observation.likelihoods.append(quality.negative_log_likelihood(logits, torch.tensor(ids)))


@torch.inference_mode()
def whole_logits(component: ARComponent, ids: Sequence[int]) -> Tensor:
    """float32 `[T, V]` of a sequence, by the model's own forward over transformers' attention."""
    model = getattr(component, "model", None)
    if model is None:
        raise UnsupportedModelError(
            f"{type(component).__name__} has no model of transformers whose logits are compared"
        )
    paged = component.spec.own_state is None and not component.spec.grouped
    if paged:
        _use_stock_attention(component.decoder)
    try:
        out = model(input_ids=torch.tensor([ids], device=component.device), use_cache=False)
    finally:
        if paged:
            use_paged_attention(component.decoder)
    logits: Tensor = out.logits[0].float().cpu()
    return logits


def _use_stock_attention(decoder: nn.Module) -> None:
    try:
        decoder.set_attn_implementation("sdpa")  # type: ignore[operator]
    except ValueError:  # GPT-OSS, whose attention has sinks
        decoder.set_attn_implementation("eager")  # type: ignore[operator]


def compare(original: Observation, quantised: Observation) -> dict[str, float]:
    """The quantities of `quality.GATES` that both observations have."""
    values: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        values.setdefault(name, []).append(value)

    for ours, theirs in zip(quantised.logits, original.logits, strict=True):
        if len(ours):
            add("token_agreement", quality.token_agreement(ours, theirs))
            add("kl", quality.divergence(ours, theirs))
    for mine, reference in zip(quantised.pictures, original.pictures, strict=True):
        add("psnr", quality.psnr(mine, reference))
        add("structure_distance", quality.structure_distance(mine, reference))
    for (mine, rate), (reference, _) in zip(quantised.waves, original.waves, strict=True):
        add("mel_distance", quality.mel_distance(mine, reference, rate))
    figures = {name: float(np.mean(each)) for name, each in values.items()}
    if original.likelihoods:
        figures["perplexity_ratio"] = perplexity(quantised) / perplexity(original)
    return figures


def perplexity(observation: Observation) -> float:
    return math.exp(float(np.mean(observation.likelihoods)))


def layer_errors(
    omni: Omni, configs: Mapping[str, QuantizeConfig], full_precision: Sequence[str], prompt: str
) -> dict[str, float]:
    """Relative error of each layer's own output if it alone is quantised, on what it is given for one prompt.

    The model is one in full precision that runs without captured graphs.
    """
    quantisers: dict[str, tuple[nn.Module, Quantiser]] = {}
    inputs: dict[str, tuple[Tensor, ...]] = {}
    hooks = []
    for stage, component in components(omni).items():
        if stage not in configs:
            continue
        quantiser = Quantiser(configs[stage], not isinstance(component, ARComponent), full_precision)
        for network in networks_of(component):
            for name, layer in quantiser.choose(network).items():
                quantisers[name] = layer, quantiser
                hooks.append(layer.register_forward_pre_hook(_keeper(inputs, name), with_kwargs=True))
    try:
        _run_once(omni, prompt)
    finally:
        for hook in hooks:
            hook.remove()
    with torch.inference_mode():
        return {name: _error(*quantisers[name], x) for name, x in inputs.items()}


def _keeper(
    inputs: dict[str, tuple[Tensor, ...]], name: str
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """Keeps rows `[T, .]` of what a layer is given; experts are given whom they are for, too."""

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in inputs:
            each = (rows.detach().reshape(-1, rows.shape[-1]) for rows in (*args, *kwargs.values()))
            inputs[name] = tuple(rows[:_MAX_ROWS].clone() for rows in each)

    return keep


def _run_once(omni: Omni, prompt: str) -> None:
    params = _params(components(omni), seed=0, tokens=2, steps=2)
    _answer(omni, prompt, params, [each.value for each in omni.modalities if each is not Modality.VIDEO])


def _error(layer: nn.Module, quantiser: Quantiser, rows: Sequence[Tensor]) -> float:
    single = copy.deepcopy(layer)
    quantiser.quantise_layer(single, rows[0].device)
    if isinstance(layer, nn.Linear):
        expected, output = layer(*rows), single(*rows)
    else:
        expected, output = one_by_one(layer, *rows), one_by_one(single, *rows)
    return float((output - expected).float().norm() / expected.float().norm().clamp_min(1e-12))


def worst_first(errors: Mapping[str, float]) -> list[str]:
    return sorted(errors, key=lambda name: -errors[name])


def exclusions(names: Iterable[str]) -> list[str]:
    """Patterns of exactly these layers."""
    return [f"^{name.replace('.', '[.]')}$" for name in names]
