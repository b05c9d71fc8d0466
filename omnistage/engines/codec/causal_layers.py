"""Layers of a causal decoder that go on where the last window ended, in place of those that see whole utterances.

Each keeps what it needs of its past input: a convolution its last columns, attention the keys and values within its
sliding window. So a window costs its own frames and nothing more, and an utterance gives the same samples however it is
cut. What all layers keep of a request is one row of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn


class Contexts:
    """What the layers keep, each at its own place in a row. One batch runs at a time."""

    def __init__(self) -> None:
        self._shapes: list[tuple[int, ...]] = []
        self._old: tuple[Tensor, ...] = ()
        self._new: dict[int, Tensor] = {}
        self.positions = torch.empty(0)
        """`[B]`: frames that each request has behind it."""
        self.first = False
        """Whether these are the first windows of their requests."""

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return sum(map(math.prod, self._shapes))

    def reserve(self, *shape: int) -> int:
        """A place for a tensor of this shape; its number."""
        self._shapes.append(shape)
        return len(self._shapes) - 1

    def begin(self, rows: Tensor, positions: Tensor, *, first: bool) -> None:
        """Take the rows (`[B, size]`, zeros at an utterance's beginning) that the next forward goes on from."""
        self._old = torch.split(rows, [math.prod(shape) for shape in self._shapes], dim=1)
        self._new = {}
        self.positions, self.first = positions, first

    def old(self, place: int) -> Tensor:
        """`[B, *shape]`, a view of the rows."""
        return torch.unflatten(self._old[place], 1, self._shapes[place])

    def keep(self, place: int, new: Tensor) -> None:
        self._new[place] = new

    def end(self) -> Tensor:
        """The rows for the next windows. Nothing of this batch stays here."""
        rows = torch.cat([self._new[place].flatten(1) for place in range(len(self._shapes))], dim=1)
        self._old, self._new = (), {}
        return rows


class StreamedConv(nn.Module):
    """A convolution over `[B, channels, columns]` with zeros before an utterance and no look-ahead."""

    def __init__(self, conv: nn.Conv1d, contexts: Contexts) -> None:
        super().__init__()
        if conv.stride != (1,) or conv.padding != (0,):
            raise ValueError(f"a streamed convolution has stride 1 and no padding of its own, not {conv}")
        self.conv = conv
        self._contexts = contexts
        self._width = conv.dilation[0] * (conv.kernel_size[0] - 1)
        self._place = contexts.reserve(conv.in_channels, self._width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((self._contexts.old(self._place), x), dim=-1)
        self._contexts.keep(self._place, x[..., x.shape[-1] - self._width :])
        return self.conv(x)  # type: ignore[no-any-return]


class StreamedTransposedConv(nn.Module):
    """A transposed convolution that gives `stride` columns for each of its input.

    Of an utterance's first columns it drops `crop`, as a decoder does that waits for the next column of its input.
    """

    def __init__(self, conv: nn.ConvTranspose1d, crop: int, contexts: Contexts) -> None:
        super().__init__()
        kernel, self._stride = conv.kernel_size[0], conv.stride[0]
        if kernel % self._stride or conv.dilation != (1,) or conv.padding != (0,) or conv.output_padding != (0,):
            raise ValueError(f"the kernel of a streamed transposed convolution is a multiple of its stride, not {conv}")
        self.conv = conv
        self._crop = crop
        self._contexts = contexts
        self._width = kernel // self._stride - 1
        self._place = contexts.reserve(conv.in_channels, self._width)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[-1]
        x = torch.cat((self._contexts.old(self._place), x), dim=-1)
        self._contexts.keep(self._place, x[..., count:])
        start = self._width * self._stride
        out: Tensor = self.conv(x)[..., start : start + count * self._stride]
        return (out[..., self._crop :] if self._contexts.first else out).contiguous()


class _SlidingKeys:
    """The keys and values of one forward as `transformers` asks a cache for them: those of the window, then the new."""

    def __init__(self, contexts: Contexts, places: Sequence[int]) -> None:
        self._contexts = contexts
        self._places = places

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """`[B, heads, tokens, head_dim]` each, of which the last tokens are the new ones."""
        place = self._places[layer_idx]
        both = torch.cat((self._contexts.old(place), torch.stack((keys, values), dim=1)), dim=3)
        self._contexts.keep(place, both[:, :, :, keys.shape[2] :])
        return both[:, 0], both[:, 1]


class StreamedTransformer(nn.Module):
    """A decoder of `transformers`, all of whose layers have sliding-window attention.

    `kv_shape` is its layers, heads of keys and values, and their size; a frame is `frame_tokens` of its tokens. It gets
    masks by the `kinds` of its layers, or one for all.
    """

    def __init__(
        self,
        model: nn.Module,
        window: int,
        kv_shape: tuple[int, int, int],
        contexts: Contexts,
        *,
        frame_tokens: int = 1,
        kinds: Sequence[str] = (),
    ) -> None:
        super().__init__()
        layers, heads, head_dim = kv_shape
        self.model = model
        self._contexts = contexts
        self._past = window - 1
        """Tokens before its own that a token attends to."""
        self._frame_tokens = frame_tokens
        self._kinds = tuple(kinds)
        self._places = [contexts.reserve(2, heads, self._past, head_dim) for _ in range(layers)]

    def forward(self, *args: Tensor, inputs_embeds: Tensor | None = None, **_: object) -> object:
        """Called as the model is for a whole utterance: with embeddings, and nothing else that counts."""
        x = args[0] if inputs_embeds is None else inputs_embeds
        start = self._contexts.positions[:, None] * self._frame_tokens
        query = torch.arange(x.shape[1], device=x.device)
        mask = self._mask(query, start, x.dtype)
        return self.model(
            *args,
            **({} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}),
            attention_mask=dict.fromkeys(self._kinds, mask) if self._kinds else mask,
            position_ids=start + query,
            past_key_values=_SlidingKeys(self._contexts, self._places),
            use_cache=False,
        )

    def _mask(self, query: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to scores, `[B, 1, tokens, keys]`; the keys of the past come first."""
        key = torch.arange(-self._past, len(query), device=query.device)
        near = (key <= query[:, None]) & (key >= query[:, None] - self._past)
        known = key >= -start  # there is nothing before an utterance
        visible = (near & known[:, None])[:, None]
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def wrapped_convolutions(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, nn.Conv1d | nn.ConvTranspose1d]]:
    """Modules around one convolution (`conv`) that pad its input or crop what it gives, in their order."""
    for module in modules:
        conv = dict(module.named_children()).get("conv")
        if isinstance(conv, nn.Conv1d | nn.ConvTranspose1d):
            yield module, conv


def upsampling(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Samples of a column, and by how many those of a decoder come behind it whose transposed convolutions each drop
    `kernel - stride` columns on both sides."""
    scale, delay = 1, 0
    for _, conv in wrapped_convolutions(modules):
        if isinstance(conv, nn.ConvTranspose1d):
            stride = conv.stride[0]
            scale, delay = scale * stride, delay * stride + conv.kernel_size[0] - stride
    return scale, delay


def streamed_convolutions(
    modules: Iterable[nn.Module], contexts: Contexts, *, waits: bool
) -> dict[nn.Module, nn.Module]:
    """What stands in for causal convolutions. One that sees a single column at a time needs nothing around it.

    `waits`: transposed ones drop as many of an utterance's first columns as of its last; else none of the first.
    """
    streamed: dict[nn.Module, nn.Module] = {}
    for module, conv in wrapped_convolutions(modules):
        kernel, stride = conv.kernel_size[0], conv.stride[0]
        if kernel == stride:
            streamed[module] = conv
        elif isinstance(conv, nn.ConvTranspose1d):
            streamed[module] = StreamedTransposedConv(conv, kernel - stride if waits else 0, contexts)
        else:
            streamed[module] = StreamedConv(conv, contexts)
    return streamed
