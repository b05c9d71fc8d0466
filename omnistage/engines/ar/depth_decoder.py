"""A code predictor's small decoder on Triton kernels: five launches a layer for one row of each sequence.

It runs over the codes of a frame, 16 or 32 positions, and each position waits for the code before it: what counts is
how many kernels follow each other, not what they compute. Everything is over the weights of `transformers`' module,
which stays the reference: where the kernels do not give what it gives, it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from omnistage.core.errors import InternalError
from omnistage.engines.ar import triton_depth
from omnistage.engines.ar.merged import merge_linears, merged_weight

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4}
_TOLERANCE_16 = 0.05
"""Relative difference between kernels and module that rounding explains."""


class _Layer(NamedTuple):
    """The weights of a layer, as the kernels take them."""

    input_norm: nn.Module
    qkv: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    head_epsilon: float
    out: Tensor
    post_norm: nn.Module
    gate_up: Tensor
    down: Tensor


class DepthDecoder:
    """The kernels over one decoder's weights, for frames of at most `positions` rows."""

    def __init__(self, decoder: nn.Module, positions: int) -> None:
        """`decoder` has `layers`, `norm` and `rotary_emb`, like any of `transformers`' with RMS norms and SwiGLU."""
        merge_linears(decoder)
        self._layers = [_layer(layer) for layer in decoder.layers]  # type: ignore[union-attr]
        self._norm: nn.Module = decoder.norm  # type: ignore[assignment]
        attention = decoder.layers[0].self_attn  # type: ignore[union-attr,index]
        first = self._layers[0]
        self.width = first.out.shape[0]
        self._head_dim = int(attention.head_dim)
        self._heads = first.out.shape[1] // self._head_dim
        self._scale = float(attention.scaling)
        self._kv_heads = (first.qkv.shape[0] // self._head_dim - self._heads) // 2
        self._positions = positions
        places = torch.arange(positions, device=first.out.device)[None]
        cos, sin = decoder.rotary_emb(first.out.new_empty(1, positions, self.width), places)  # type: ignore[operator]
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()

    @staticmethod
    @torch.inference_mode()
    def of(decoder: nn.Module, positions: int) -> DepthDecoder | None:
        """The kernels for `decoder`; None: they do not fit, or do not compute what it does."""
        try:
            kernels = DepthDecoder(decoder, positions)
        except (AttributeError, TypeError, ValueError):  # it is made of other parts
            return None
        if not triton_depth.fits(kernels.width, kernels._head_dim, positions):
            return None
        rows = torch.randn(2, positions, kernels.width, generator=torch.Generator().manual_seed(0))
        rows = rows.to(kernels._cos.device, kernels._layers[0].qkv.dtype)
        expected = kernels._reference(decoder, rows).double()
        try:
            for count in (2, triton_depth.FEW_ROWS + 2):  # more rows run with tiles of another size
                frame, many = kernels.start(count), rows.repeat(count // 2, 1, 1)
                steps = [kernels._norm(frame.step(many[:, i].contiguous())) for i in range(positions)]
                difference = (torch.stack(steps, dim=1)[:2].double() - expected).norm() / expected.norm()
                if not difference <= _TOLERANCE.get(rows.dtype, _TOLERANCE_16):
                    return None
        except triton_depth.LAUNCH_ERRORS as error:
            logger.warning("the code predictor runs without kernels of its own: %s", error)
            return None
        return kernels

    def _reference(self, decoder: nn.Module, rows: Tensor) -> Tensor:
        """What the module's layers and norm make of whole frames `[S, positions, width]`."""
        length = rows.shape[1]
        mask = rows.new_full((length, length), float("-inf")).triu(1)[None, None]
        for layer in decoder.layers:  # type: ignore[union-attr]
            rows = layer(rows, attention_mask=mask, position_embeddings=(self._cos[None], self._sin[None]))
        return self._norm(rows)  # type: ignore[no-any-return]

    def start(self, sequences: int) -> Frame:
        """A frame of each of `sequences`, without a row yet."""
        return Frame(self, sequences)

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The last norm and a head with `weight` `[V, width]`, of any strides."""
        return triton_depth.linear(rows, weight, norm=_weight(self._norm))


class Frame:
    """Keys and values of a batch of frames."""

    def __init__(self, decoder: DepthDecoder, sequences: int) -> None:
        self._decoder = decoder
        self._length = 0
        weight = decoder._layers[0].qkv
        shape = (len(decoder._layers), 2, sequences, decoder._kv_heads, decoder._positions, decoder._head_dim)
        self._kv = torch.empty(shape, dtype=weight.dtype, device=weight.device)

    def feed(self, rows: Tensor) -> None:
        """A row of which nothing is needed but what the next ones see."""
        self.step(rows)

    def step(self, rows: Tensor) -> Tensor:
        """The next row of each frame, `[S, width]` → what the layers make of it, before the last norm."""
        decoder, place = self._decoder, self._length
        if place >= decoder._positions:
            raise InternalError(f"a frame has {decoder._positions} rows")
        self._length += 1
        for layer, kv in zip(decoder._layers, self._kv, strict=True):
            qkv = triton_depth.linear(rows, layer.qkv, norm=_weight(layer.input_norm))
            attended = triton_depth.attend(
                qkv, kv, decoder._cos[place], decoder._sin[place], place, decoder._heads, layer.query_norm,
                layer.key_norm, layer.head_epsilon, decoder._scale,
            )  # fmt: skip
            rows = triton_depth.linear(attended, layer.out, residual=rows)
            inner = triton_depth.linear(rows, layer.gate_up, norm=_weight(layer.post_norm), gated=True)
            rows = triton_depth.linear(inner, layer.down, residual=rows)
        return rows


class PlainDecoder:
    """The module's own layers, without a cache.

    A few rows more a step cost less than the kernels that would keep keys and values, and layers that know no cache are
    compiled once for all. The module's own forward would look at numbers on the device to make a mask; without one,
    attention is causal.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder

    def start(self, sequences: int) -> PlainFrame:
        del sequences
        return PlainFrame(self._decoder)

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(self._decoder.norm(rows), weight)  # type: ignore[operator]


class PlainFrame:
    """The rows of a batch of frames so far."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self._rows: list[Tensor] = []

    def feed(self, rows: Tensor) -> None:
        self._rows.append(rows)

    def step(self, rows: Tensor) -> Tensor:
        self._rows.append(rows)
        states = torch.stack(self._rows, dim=1)
        places = torch.arange(len(self._rows), device=rows.device)[None]
        embeddings = self._decoder.rotary_emb(states, places)  # type: ignore[operator]
        for layer in self._decoder.layers:  # type: ignore[union-attr]
            states = layer(states, attention_mask=None, position_embeddings=embeddings)
        return states[:, -1]


def predict_codes(
    decoder: DepthDecoder | PlainDecoder,
    first: Sequence[Tensor],
    heads: Sequence[Tensor],
    embed: Callable[[int, Tensor], Tensor],
    choose: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Codes `[S, len(heads)]` of frames that begin with the rows `first`.

    Code `i` is chosen from the logits of `heads[i]`, and `embed(i, code)` is the row that follows it.
    """
    frame, codes = decoder.start(len(first[0])), list[Tensor]()
    for row in first[:-1]:
        frame.feed(row.contiguous())
    row = first[-1].contiguous()
    for index, head in enumerate(heads):
        codes.append(choose(decoder.logits(frame.step(row), head), index))
        if index + 1 < len(heads):
            row = embed(index, codes[-1])
    return torch.stack(codes, dim=1)


def _layer(layer: nn.Module) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    out, down = attention.o_proj, mlp.down_proj  # type: ignore[union-attr]
    if not all(type(linear) is nn.Linear and linear.bias is None for linear in (out, down)):
        raise TypeError("layers with a bias, or of another class")
    query, key = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    epsilons = {None if norm is None else _epsilon(norm) for norm in (query, key)}
    if len(epsilons) > 1:
        raise TypeError("queries and keys with different norms")
    return _Layer(
        layer.input_layernorm,  # type: ignore[arg-type]
        merged_weight(attention.q_proj),  # type: ignore[union-attr,arg-type]
        None if query is None else query.weight,
        None if key is None else key.weight,
        0.0 if query is None else _epsilon(query),
        out.weight,  # type: ignore[union-attr,arg-type]
        layer.post_attention_layernorm,  # type: ignore[arg-type]
        merged_weight(mlp.gate_proj),  # type: ignore[union-attr,arg-type]
        down.weight,  # type: ignore[union-attr,arg-type]
    )


def _epsilon(norm: nn.Module) -> float:
    return float(norm.variance_epsilon)  # type: ignore[arg-type]


def _weight(norm: nn.Module) -> tuple[Tensor, float]:
    return norm.weight, _epsilon(norm)  # type: ignore[return-value]
