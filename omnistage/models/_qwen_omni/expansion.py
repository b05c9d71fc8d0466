"""What the releases of `transformers` call differently in the processors of Qwen-Omni.

Up to 5.22 one method expands all placeholders of a prompt. From 5.23 on there is a replacement for each item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import BatchFeature, ProcessorMixin

Tracks = Sequence[int | None]
"""For each clip of a chat the video whose sound it is; None: it stands alone."""


def video_default(processor: ProcessorMixin, name: str) -> Any:
    """The processor's default for an option of videos; None if it has none."""
    before = getattr(processor.valid_processor_kwargs, "_defaults", {}).get("videos_kwargs", {})  # up to 5.22
    of_videos = getattr(processor, "videos_kwargs", {})
    return before.get(name, of_videos.get(name, getattr(processor, name, None)))


def video_options(processor: ProcessorMixin, fps: float, tracks: Tracks, with_sound: bool) -> dict[str, object]:
    """Arguments of a call of the processor with videos whose frames are chosen already."""
    of_videos: dict[str, object] = {"do_sample_frames": False, "fps": fps}
    if _expands_whole(processor):
        return {"videos_kwargs": {**of_videos, "use_audio_in_video": with_sound}}
    sound = {"load_audio_from_video": True, "audio_from_video_indices": list(tracks)} if with_sound else {}
    return {"videos_kwargs": of_videos, **sound}


def expand(
    processor: ProcessorMixin,
    text: str,
    features: BatchFeature,
    *,
    audio_rows: Sequence[int],
    grid_seconds: Sequence[float],
    tracks: Tracks,
    with_sound: bool,
    interleaving: Mapping[str, float],
) -> str:
    """The text with each placeholder repeated to its item's rows, and those of a video interleaved with its sound's.

    `grid_seconds` are the seconds of each video's grids, which may differ.
    """
    images, videos = features.get("image_grid_thw", ()), features.get("video_grid_thw", ())
    if _expands_whole(processor):
        [expanded] = processor.replace_multimodal_special_tokens(
            [text],
            iter(audio_rows),
            iter(images),
            iter(videos),
            video_second_per_grid=iter(grid_seconds),
            use_audio_in_video=with_sound,
            **interleaving,
        )
        return str(expanded)
    inputs = {**features, "num_audio_tokens": torch.tensor(audio_rows), "video_second_per_grid": grid_seconds}
    sounds = {video: clip for clip, video in enumerate(tracks) if with_sound and video is not None}
    options = {
        "processed_audio": inputs,
        "video_to_audio_indices": [sounds.get(video) for video in range(len(videos))],
        "load_audio_from_video": with_sound,
        **interleaving,
    }
    alone = [clip for clip in range(len(audio_rows)) if clip not in sounds.values()]
    [expanded], _ = processor.get_text_with_replacements(
        [text],
        [processor.replace_image_token(inputs, index) for index in range(len(images))],
        [processor.replace_video_token(inputs, index, **options) for index in range(len(videos))],
        [processor.replace_audio_token(inputs, index) for index in alone],
    )
    return str(expanded)


def _expands_whole(processor: ProcessorMixin) -> bool:
    return hasattr(processor, "replace_multimodal_special_tokens")
