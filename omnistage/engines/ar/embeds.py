"""The embeddings of a step's tokens, where they are not looked up by id: prompt rows, media, frames, side rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.rows import UNREAD, SequenceRows
from omnistage.engines.ar.scheduler import ScheduledSequence
from omnistage.engines.streams import upload


def fill_frames(
    component: ARComponent,
    embeds: torch.Tensor,
    ids: torch.Tensor,
    batch: Sequence[ScheduledSequence],
    sequences: Mapping[str, SequenceRows],
    last_codes: torch.Tensor,
) -> None:
    """Put what generated tokens are with their residual codes into the batch's embeddings.

    `ids` are the batch's tokens; `last_codes` has the codes that nobody has read yet.
    """
    places, codes, unread = list[int](), list[np.ndarray](), list[tuple[int, int]]()
    offset = 0
    for item in batch:
        rows = sequences[item.key]
        for index in range(max(item.start, rows.prompt_length), item.start + item.count):
            if rows.tokens[index] == UNREAD:
                unread.append((len(places), rows.sampled_row))
            places.append(offset + index - item.start)
            codes.append(rows.frame(index))
        offset += item.count
    if not places:
        return
    where, residual = upload(np.array(places), embeds.device), upload(np.stack(codes), embeds.device)
    if unread:
        pairs = upload(np.array(unread).T.copy(), embeds.device)
        residual[pairs[0]] = last_codes[pairs[1]].clamp(min=0)
    embeds[where] = component.embed_frames(torch.cat((ids[where][:, None], residual), dim=1))


def fill_rows(
    component: ARComponent,
    embeds: torch.Tensor,
    media: torch.Tensor | None,
    batch: Sequence[ScheduledSequence],
    sequences: Mapping[str, SequenceRows],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Put prompt rows, media rows and side rows into the batch's embeddings; and in `media` where media stand.

    Where media may have rows for deeper layers: which rows of the batch they fill, and those.
    """
    offset, width, deep_size = 0, embeds.shape[1], component.spec.deep_size
    deep: list[tuple[torch.Tensor, torch.Tensor]] = []
    side_places, side_rows = list[int](), list[torch.Tensor]()
    for item in batch:
        rows, end = sequences[item.key], item.start + item.count
        prompt_end = min(end, rows.prompt_length)
        if rows.embeds is not None and item.start < prompt_end:
            embeds[offset : offset + prompt_end - item.start] = rows.embeds[item.start : prompt_end]
        if rows.media_rows is not None and item.start < prompt_end:
            low, high = np.searchsorted(rows.media_index, (item.start, end))
            if high > low:
                where = upload(rows.media_index[low:high] - item.start + offset, embeds.device)
                embeds[where] = rows.media_rows[low:high, :width]
                if deep_size:
                    more = rows.media_rows[low:high, width:]
                    deep.append((where, more if more.shape[1] else more.new_zeros(len(where), deep_size)))
                if media is not None:
                    media[where] = True
            if prompt_end == rows.prompt_length:
                rows.media_rows = None
        if rows.payload.streaming:
            for index in range(max(item.start, rows.prompt_length), end):
                side_places.append(offset + index - item.start)
                side_rows.append(rows.side_row(index))
        offset += item.count
    if side_places:
        where = upload(np.array(side_places), embeds.device)
        embeds[where] = component.add_side(embeds[where], torch.stack(side_rows))
    if not deep:
        return None
    filled = torch.zeros(len(embeds), dtype=torch.bool, device=embeds.device)
    filled[torch.cat([where for where, _ in deep])] = True
    return filled, torch.cat([rows for _, rows in deep])
