"""Whether the engine attends over the keys that a model's own mask shows, far beyond any window, without the model.

For queries of zeros all keys weigh alike, so that the answer is the mean of the values that are seen: random values
tell one key too many or too few, at any length. A text through the model would have to be longer than the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from omnistage.core.errors import UnsupportedModelError
from omnistage.engines.ar.attention import BatchLayout, PagedContext, bind_caches, paged_attention
from omnistage.engines.ar.attention.recording import AttentionCall
from omnistage.engines.ar.attention.sdpa import SdpaBackend

_WITHOUT_WINDOW = 1 << 14
"""Half of the text for a mask without a window."""
_ROWS = 3
"""Queries of a chunk."""
_WIDTH = 4
_TOLERANCE = 0.01
"""Of what one key changes. In float64: a mean over a long text is rounded by more in float32."""


@torch.inference_mode()
def check_windows(calls: Sequence[AttentionCall]) -> None:
    """Refuse a model of which an attention module is served with another window than that of its mask.

    On the CPU, by the reference attention. The caches of the modules are others afterwards.
    """
    windows = set()
    for call in calls:
        kind = id(call.shows), call.window, getattr(call.module, "paged_window", None)
        if call.shows is None or kind in windows:
            continue
        windows.add(kind)
        edge = call.window or _WITHOUT_WINDOW
        for length in (edge + 2, 2 * edge + _ROWS):
            values = torch.randn(length, _WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
            zero, keys = torch.tensor(0), torch.arange(length)
            for rows, output in _windowed_outputs(call.module, values):
                visible = call.shows(zero, zero, rows[:, None], keys[None]).expand(len(rows), length).double()
                expected = visible @ values / visible.sum(-1, keepdim=True)
                if not float((output - expected).abs().max()) < _TOLERANCE / length:
                    raise UnsupportedModelError(
                        f"{type(call.module).__name__} would attend to other keys on the paged engine than its mask in "
                        f"transformers shows, in a text of {length} tokens"
                    )


def _windowed_outputs(module: nn.Module, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Queries of a text with these values, and what they get: some at its end as a chunk, and the last alone."""
    length, backend, device = len(values), SdpaBackend(), values.device
    for order in (np.arange(length), np.arange(length)[::-1].copy()):  # slots in a row are read in another way
        slots = torch.from_numpy(order)
        outputs = torch.zeros_like(values)
        outputs[slots] = values
        bind_caches([module], [(torch.zeros_like(outputs).view(1, length, 1, -1), outputs.view(1, length, 1, -1))])
        for count in (_ROWS, 1):
            counts, lengths = (np.array([n], dtype=np.int32) for n in (count, length))
            layout = BatchLayout(counts, lengths, [order], [np.zeros(1, dtype=np.int32)])
            paged = PagedContext(backend, slots[-count:], backend.plan(layout, device))
            own = values[None, None, -count:]
            zeros = torch.zeros_like(own)
            out, _ = paged_attention(module, zeros, zeros, own, None, scaling=1.0, paged=paged)
            yield torch.arange(length - count, length), out[0, :, 0]
