"""How many KV blocks a stage gets."""

from __future__ import annotations

import torch

from omnistage.config.schema import ARBudget
from omnistage.core.errors import CapacityError
from omnistage.engines.ar.component import ARComponent

_CPU_SHARE, _CPU_CAP = 0.1, 1 << 30
_DEVICE_SHARE = 0.35


def block_bytes(component: ARComponent, block_size: int) -> int:
    """Bytes of one block: keys and values of all layers, and the hidden rows kept beside them."""
    spec = component.spec
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim + spec.emit_size
    return per_token * block_size * component.dtype.itemsize


def plan_blocks(component: ARComponent, budget: ARBudget, max_length: int) -> int:
    """Blocks that fit the budget, never more than `max_running` sequences of full length could use."""
    useful = -(-max_length // budget.block_size) * budget.max_running
    if budget.kv_blocks is not None:
        return min(budget.kv_blocks, useful)
    size = block_bytes(component, budget.block_size)
    memory = _available(component.device) if budget.kv_memory == "auto" else int(budget.kv_memory)
    blocks = min(memory // size, useful)
    if blocks < 1:
        raise CapacityError(
            f"a KV budget of {memory} bytes holds no block of {size} bytes; raise budget.kv_memory or lower block_size"
        )
    return int(blocks)


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free * _DEVICE_SHARE)
    return min(int(_free_host_memory() * _CPU_SHARE), _CPU_CAP)


def _free_host_memory() -> int:
    """Bytes the kernel would give without swapping; a modest guess where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30
