"""What bridges compute is there when they return, whatever else the device does: stages read it on other streams."""

from __future__ import annotations

import pytest
import torch

from omnistage.core.types import ARInput, RequestInfo, StageChunk, TokenChunk
from omnistage.engines.streams import DeviceStream
from omnistage.models._qwen_omni.bridges import thinker2talker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_the_talker_reads_the_thinkers_rows_and_not_what_was_there_before() -> None:
    device = torch.device("cuda")
    rows = torch.ones(1025, 4096, device=device)
    torch.zeros_like(rows)  # what the allocator gives next
    prompt = ARInput(tuple(range(1024)))
    chunks = [
        TokenChunk(token_ids=(1,), hidden=rows[:1024], prompt=prompt),
        TokenChunk(token_ids=(2,), hidden=rows[1024:], hidden_start=1024),
    ]
    stream = DeviceStream(device, priority=-2)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # 0.1 s on the stream of those that have none
    state: object = None
    for chunk in chunks:
        state, inputs = thinker2talker(RequestInfo("r"), state, StageChunk("r", "thinker", chunk))
    (start,) = inputs
    assert isinstance(start, ARInput)
    assert start.embeds is not None
    with stream.use():
        stream.share(start.embeds)
        total = start.embeds.sum(dtype=torch.float64).item()
    assert total == rows.numel()
