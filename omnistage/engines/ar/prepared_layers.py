"""What makes a component's layers fast before they run: experts, kernels, merged products, compilation."""

from __future__ import annotations

from omnistage.config.schema import ARBudget
from omnistage.core.memory import keep_heap
from omnistage.engines.adapters.layers import AdapterLayers
from omnistage.engines.ar.adapters import install_adapters
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.experts import set_experts
from omnistage.engines.ar.merged import merge_linears
from omnistage.engines.ar.packed_linear import pack_layers, packs
from omnistage.engines.compiling import MIN_SIZE, compile_layers, worth_compiling


def prepare_layers(
    component: ARComponent, budget: ARBudget, *, kernels: bool, adapters: AdapterLayers | None = None
) -> tuple[int, ...]:
    """Do what the budget says; the batch sizes to capture. `kernels`: the stage may run Triton kernels."""
    if component.device.type == "cpu":
        keep_heap()
    if component.spec.own_state is not None or component.spec.grouped:
        return ()  # it runs as it is in transformers
    set_experts(component.decoder, budget.experts, component.device, component.dtype)
    if kernels:
        component.use_kernels()
    if component.device.type == "cuda" if budget.merge_linears == "auto" else budget.merge_linears:
        for decoder in component.decoders:
            merge_linears(decoder)
    if component.device.type == "cpu" and packs(component, budget):
        pack_layers(component.decoders, component.heads, merge=budget.merge_linears is not False)
    install_adapters(adapters, component, budget, kernels=kernels)
    if component.spec.states:
        return ()  # its layers look at the batch, which neither a compiled nor a captured step can do
    sizes = budget.graph_batch_sizes if budget.cuda_graphs else ()
    if worth_compiling([component.decoder]) if budget.compile == "auto" else budget.compile:
        for decoder in component.decoders:
            compile_layers(decoder.layers)  # type: ignore[arg-type]
        sizes = tuple(sorted({max(size, MIN_SIZE) for size in sizes}))
    return sizes
