"""Adapters of a denoising stage: LoRA checkpoints of diffusers, by its own converters, on its transformers' layers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import AdapterError, ConfigError
from omnistage.core.params import DiffusionParams
from omnistage.engines.adapters.files import AdapterFiles, LoraPair
from omnistage.engines.adapters.layers import AdapterLayers
from omnistage.engines.adapters.library import AdapterLibrary, Pairs
from omnistage.engines.adapters.peft_format import read_pairs, read_peft
from omnistage.engines.diffusion.component import Denoiser, Row

_METADATA = "lora_adapter_metadata"
"""Under which diffusers keeps PEFT's configuration in a file's header."""
_PARTS = ("transformer", "transformer_2")
_PROBED_SIZE = (64, 64, 1)


def open_adapters(
    library: AdapterLibrary | None, denoiser: Denoiser, name: str, budget: DiffusionBudget
) -> AdapterLayers | None:
    """The layers of a denoiser with room for adapters, the configured ones read; None: there are no adapters."""
    if library is None:
        return None
    pipeline = denoiser.adapter_pipeline
    if pipeline is None or not hasattr(pipeline, "lora_state_dict"):
        raise ConfigError(
            f"diffusers has no LoRA loader for the model of stage {name!r}; remove its adapters",
            param="deployment.adapters",
        )
    networks = dict(zip(_PARTS, denoiser.transformers, strict=False))
    weight = next(denoiser.transformer.parameters())
    layers = AdapterLayers(library, networks, lambda rows: _probe(denoiser, rows), by_token=False, dtype=weight.dtype)

    def read(files: AdapterFiles, scale: float) -> Pairs:
        pairs = _read_diffusers(pipeline, files, scale) if files.config is None else _read_peft(files, scale)
        for path in pairs:
            if path not in layers.shapes:
                raise AdapterError(f"{path} is not a linear layer of stage {name!r} that adapters can change")
        return {path: layers.fit(path, path, pair) for path, pair in pairs.items()}

    library.open(read)
    cuda = weight.device.type == "cuda"
    layers.install(max_rows=budget.max_batch, fold=cuda, skip_idle=not cuda and budget.compile is not True)
    return layers


def _read_peft(files: AdapterFiles, scale: float) -> dict[str, LoraPair]:
    """Trained by PEFT on the transformer alone, or on the pipeline's parts by their names."""
    return {
        path if path.split(".")[0] in _PARTS else f"transformer.{path}": pair
        for path, pair in read_peft(files, scale).items()
    }


def _read_diffusers(pipeline: Any, files: AdapterFiles, scale: float) -> dict[str, LoraPair]:
    """By diffusers' converters: the formats of other trainers become its own, with its rules for ranks and alphas."""
    if any("dora_scale" in key for key in files.tensors):
        raise AdapterError("it is a DoRA checkpoint (dora_scale), which cannot be mixed within a batch")
    has_alphas = "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters
    options = {"return_alphas": True} if has_alphas else {}
    try:
        state_dict = pipeline.lora_state_dict(dict(files.tensors), **options)
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise AdapterError(f"diffusers cannot convert it for {pipeline.__name__}: {error!r}") from error
    state, alphas = state_dict if options else (state_dict, None)
    pairs: dict[str, LoraPair] = {}
    for part in sorted({key.split(".")[0] for key in state}):
        if part not in _PARTS:
            raise AdapterError(f"it changes {part}; adapters change the transformer of a pipeline only")
        own = {key.removeprefix(f"{part}."): tensor for key, tensor in state.items() if key.startswith(f"{part}.")}
        own_alphas = {key.removeprefix(f"{part}."): alpha for key, alpha in (alphas or {}).items()}
        config = _metadata(files, part) or _inferred(own, own_alphas)
        pairs |= {f"{part}.{path}": pair for path, pair in read_pairs(own, config, scale).items()}
    return pairs


def _metadata(files: AdapterFiles, part: str) -> dict[str, object] | None:
    """PEFT's configuration, where the file has it."""
    if _METADATA not in files.metadata:
        return None
    try:
        values = json.loads(files.metadata[_METADATA])
        config = {key.removeprefix(f"{part}."): value for key, value in values.items() if key.startswith(f"{part}.")}
    except (ValueError, AttributeError, RecursionError) as error:
        raise AdapterError(f"{_METADATA} in the file's header is not valid: {error}") from error
    return {"peft_type": "LORA", **config} if config else None


def _inferred(state: Mapping[str, torch.Tensor], alphas: Mapping[str, Any]) -> dict[str, object]:
    """The configuration that diffusers makes of the tensors alone."""
    from diffusers.utils import get_peft_kwargs

    ranks = {key: tensor.shape[1] for key, tensor in state.items() if "lora_B" in key and tensor.ndim > 1}
    if not ranks:
        raise AdapterError("it has no lora_B weights")
    numbers = {key: float(alpha) for key, alpha in alphas.items()}
    config = get_peft_kwargs(ranks, network_alpha_dict=numbers or None, peft_state_dict=state)
    return {"peft_type": "LORA", **{name: value for name, value in config.items() if name != "lora_bias"}}


def activate(layers: AdapterLayers, rows: Sequence[Row]) -> None:
    """Have the rows' adapters on the device for their forward."""
    layers.begin_step()
    for row in rows:
        layers.activate(row.lane.adapters)
    layers.select([(1, row.lane.adapters) for row in rows])


def within_slots(layers: AdapterLayers, rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in as few forwards as have places on the device for all of their adapters."""
    parts: list[tuple[set[bytes], list[Row]]] = []
    for row in rows:
        lane_digests = row.lane.adapters.digests
        for digests, part in parts:
            if len(digests | lane_digests) <= layers.library.limits.slots:
                digests |= lane_digests
                part.append(row)
                break
        else:
            parts.append((set(lane_digests), [row]))
    return [part for _digests, part in parts]


def _probe(denoiser: Denoiser, rows: int) -> None:
    """A forward over so many rows of a small picture, at the first step and at the last: experts share the steps."""
    condition = denoiser.planned_condition(*_PROBED_SIZE)
    if condition is None:
        raise ConfigError(
            f"{type(denoiser).__name__} has no planned_condition, by which adapters find the layers that they can "
            "change; remove the adapters",
            param="deployment.adapters",
        )
    lane = denoiser.open(condition, DiffusionParams(), torch.Generator().manual_seed(0))
    for step in (0, lane.steps - 1):
        lane.step = step
        denoiser.forward([Row(lane, "positive")] * rows)
