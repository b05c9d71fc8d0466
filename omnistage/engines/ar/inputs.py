"""What comes into an autoregressive stage: is it well formed, and what does a part of it depend on."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from omnistage.core.errors import InvalidRequestError
from omnistage.core.types import ARInput
from omnistage.engines.ar.component import ARComponent


class ContentKeys:
    """What a range of a sequence holds besides token ids, as hash parts.

    For each media item that overlaps it: the content's key, the first row inside and where that stands. The same of
    items whose tokens attend to those of a later one. And the positions, where they do not simply count up: equal
    tokens elsewhere have other keys and values.
    """

    def __init__(self, payload: ARInput) -> None:
        self._spans = [(span.key, sorted(span.positions.tolist())) for span in payload.media]
        self._joint = [(first, last, self._joint_key(first, last)) for first, last in payload.both_ways]
        self._delta = payload.position_delta
        positions = payload.positions
        length = len(payload.token_ids)
        self._positions = np.arange(length)[None] if positions is None else np.atleast_2d(positions.cpu().numpy())
        self._length = self._positions.shape[1]
        self._plain = positions is None and not self._delta

    def __call__(self, start: int, end: int) -> list[bytes]:
        parts = self._item_keys(start, end)
        parts += (key for first, last, key in self._joint if key and first < end and last > start)
        if not self._plain:
            generated = np.arange(max(start, self._length), end) + self._delta
            positions = self._positions[:, start:end]
            parts.append(np.concatenate((positions, np.tile(generated, (len(positions), 1))), axis=1).tobytes())
        return parts

    def _joint_key(self, start: int, end: int) -> bytes:
        """Of a range that tokens attend to both ways: the items in it, where there are several."""
        parts = self._item_keys(start, end)
        return b"".join(parts) if len(parts) > 1 else b""

    def _item_keys(self, start: int, end: int) -> list[bytes]:
        parts: list[bytes] = []
        for key, rows in self._spans:
            first = bisect_left(rows, start)
            if first < len(rows) and rows[first] < end:
                parts.append(key + first.to_bytes(4, "little") + (rows[first] - start).to_bytes(4, "little"))
        return parts


def check_payload(payload: ARInput, component: ARComponent) -> None:
    """Shapes and ranges, before anything is queued."""
    spec, length = component.spec, len(payload.token_ids)
    known_ids = spec.prompt_vocab_size or spec.vocab_size
    if length == 0:
        raise InvalidRequestError("the prompt is empty; send at least one token", param="prompt")
    if payload.embeds is not None:
        if payload.embeds.ndim != 2 or payload.embeds.shape != (length, spec.embed_size):
            raise InvalidRequestError(
                f"prompt embeddings must be [{length}, {spec.embed_size}], got {list(payload.embeds.shape)}",
                param="prompt_embeds",
            )
    elif min(payload.token_ids) < 0 or max(payload.token_ids) >= known_ids:
        raise InvalidRequestError(f"prompt token ids must be in [0, {known_ids})", param="prompt_token_ids")
    if payload.positions is not None:
        count = payload.positions.shape[-1]
        if not length <= count <= length + (payload.num_tokens or 0):
            raise InvalidRequestError(f"positions for {count} of {length} prompt tokens")
    if payload.streaming and not spec.side_input:
        raise InvalidRequestError("this stage does not support streaming side input")
