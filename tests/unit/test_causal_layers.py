"""Streamed layers against the same over whole sequences, in float64: what was cut where changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from omnistage.engines.codec.causal_layers import Contexts, StreamedConv, StreamedTransposedConv, streamed_convolutions

CUTS = [[20], [1] * 20, [3, 1, 16], [7, 7, 6]]


def streamed(layer: nn.Module, contexts: Contexts, x: Tensor, cuts: list[int]) -> Tensor:
    rows = torch.zeros(len(x), contexts.size, dtype=x.dtype)
    positions, parts = torch.zeros(len(x), dtype=torch.int64), []
    for part in x.split(cuts, dim=-1):
        contexts.begin(rows, positions, first=not parts)
        parts.append(layer(part))
        rows, positions = contexts.end(), positions + part.shape[-1]
    return torch.cat(parts, dim=-1)


def columns() -> Tensor:
    return torch.randn(2, 6, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize(("kernel", "dilation", "groups"), [(7, 1, 1), (3, 9, 1), (7, 1, 6), (2, 1, 2)])
def test_a_convolution_goes_on_where_it_ended(cuts: list[int], kernel: int, dilation: int, groups: int) -> None:
    contexts, x = Contexts(), columns()
    conv = nn.Conv1d(6, 6, kernel, dilation=dilation, groups=groups, dtype=torch.float64)
    expected = conv(nn.functional.pad(x, (dilation * (kernel - 1), 0)))
    torch.testing.assert_close(streamed(StreamedConv(conv, contexts), contexts, x, cuts), expected)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("kernel", "stride", "groups"), [(8, 4, 1), (4, 2, 6), (6, 3, 2)])
def test_a_transposed_convolution_goes_on_where_it_ended(
    cuts: list[int], waits: bool, kernel: int, stride: int, groups: int
) -> None:
    contexts, x = Contexts(), columns()
    conv = nn.ConvTranspose1d(6, 6, kernel, stride, groups=groups, dtype=torch.float64)
    crop = kernel - stride if waits else 0
    layer = StreamedTransposedConv(conv, crop, contexts)
    torch.testing.assert_close(streamed(layer, contexts, x, cuts), conv(x)[..., crop : 20 * stride])


def test_several_layers_share_a_row() -> None:
    contexts, x = Contexts(), columns()
    first, second = (nn.Conv1d(6, 6, kernel, dtype=torch.float64) for kernel in (3, 5))
    net = nn.Sequential(StreamedConv(first, contexts), nn.Tanh(), StreamedConv(second, contexts))
    assert contexts.size == 6 * 2 + 6 * 4
    hidden = torch.tanh(first(nn.functional.pad(x, (2, 0))))
    expected = second(nn.functional.pad(hidden, (4, 0)))
    torch.testing.assert_close(streamed(net, contexts, x, [3, 17]), expected)


class _Wrapped(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv


def test_a_layer_that_sees_one_column_needs_no_past() -> None:
    contexts = Contexts()
    point, whole = _Wrapped(nn.Conv1d(6, 6, 1)), _Wrapped(nn.ConvTranspose1d(6, 6, 2, 2))
    other = _Wrapped(nn.Linear(6, 6))
    assert streamed_convolutions([point, whole, other], contexts, waits=True) == {point: point.conv, whole: whole.conv}
    assert contexts.size == 0


@pytest.mark.parametrize(
    "conv",
    [nn.Conv1d(6, 6, 4, stride=2), nn.Conv1d(6, 6, 3, padding=1), nn.ConvTranspose1d(6, 6, 5, 2)],
    ids=["stride", "padding", "kernel"],
)
def test_what_cannot_be_streamed_is_refused(conv: nn.Module) -> None:
    with pytest.raises(ValueError, match="a streamed"):
        streamed_convolutions([_Wrapped(conv)], Contexts(), waits=True)
