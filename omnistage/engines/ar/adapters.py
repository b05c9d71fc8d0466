"""Adapters of an autoregressive stage: PEFT's checkpoints on the layers of its decoder."""

from __future__ import annotations

import torch

from omnistage.config.schema import ARBudget
from omnistage.core.errors import AdapterError, ConfigError
from omnistage.engines.adapters.files import AdapterFiles, LoraPair
from omnistage.engines.adapters.layers import AdapterLayers, target_of
from omnistage.engines.adapters.library import AdapterLibrary, Pairs
from omnistage.engines.adapters.peft_format import read_peft
from omnistage.engines.ar.attention import AttentionPlan, PagedContext, bind_caches, current
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.memory import NoAttention
from omnistage.engines.ar.sampling.device_selection import has_kernels

_WORDS = frozenset({"model", "language_model", "text_model", "transformer", "decoder", "gpt_neox", "backbone"})
"""What stands before a decoder's layers in whole models. Encoders of media have other names before theirs."""


def open_adapters(library: AdapterLibrary | None, component: ARComponent, name: str) -> AdapterLayers | None:
    """The layers of a decoder that adapters can change, with the configured ones read; None: there are no adapters."""
    if library is None:
        return None
    if component.spec.own_state is not None or component.spec.grouped:
        raise ConfigError(
            f"stage {name!r} runs its model as it is in transformers, not in a flattened batch, and does not "
            "support adapters; remove deployment.adapters",
            param="deployment.adapters",
        )
    layers = AdapterLayers(
        library,
        {"": component.decoder},
        lambda tokens: _probe(component, tokens),
        by_token=True,
        dtype=component.dtype,
        # Their rows are taken apart by sequence, and stand in another order than those of the step.
        apart=component.recurrent_modules,
    )
    words = _WORDS | {name}

    def read(files: AdapterFiles, scale: float) -> Pairs:
        pairs: dict[str, LoraPair] = {}
        for path, pair in read_peft(files, scale).items():
            layer = target_of(path, layers.shapes, words)
            if layer is None:
                hint = "; those of recurrent layers are none, train it on the others" * bool(component.spec.states)
                raise AdapterError(f"{path} is not a linear layer of stage {name!r} that adapters can change{hint}")
            if layer in pairs:
                raise AdapterError(f"{path} names a layer that another key names, too")
            pairs[layer] = layers.fit(layer, path, pair)
        return pairs

    library.open(read)
    return layers


def install_adapters(
    layers: AdapterLayers | None, component: ARComponent, budget: ARBudget, *, kernels: bool = False
) -> None:
    """Change the decoder's layers, after they were merged and before they are compiled.

    `kernels`: the stage may run Triton kernels.
    """
    if layers is None:
        return
    cuda = component.device.type == "cuda"
    sizes = (budget.max_batch_tokens, budget.max_running, *budget.graph_batch_sizes, *budget.graph_prefill_tokens)
    layers.install(
        max_rows=max(sizes),
        fold=folds(component.device),
        skip_idle=not cuda and budget.compile is not True,
        kernels=kernels and has_kernels(component.device),
    )


def folds(device: torch.device) -> bool:
    """Whether layers compute with the adapters' rows: where launching products costs more than computing them."""
    return device.type == "cuda"


def _probe(component: ARComponent, tokens: int) -> None:
    """A forward over so many tokens, without keys and values."""
    spec, device = component.spec, component.device
    caches = spec.empty_caches(1, 1, lambda shape: torch.zeros(shape, dtype=component.dtype, device=device))
    bind_caches(component.attention_modules, caches)
    ids = torch.arange(tokens, device=device) % spec.vocab_size
    kind = torch.float64 if spec.fractional_positions else torch.int64
    positions = torch.arange(tokens, device=device, dtype=kind).expand(spec.position_dims, tokens)
    paged = current.paged = PagedContext(NoAttention(), torch.full_like(ids, -1), AttentionPlan())
    component.forward(component.embed(ids), positions, paged)
