"""Options of videos, which the releases of `transformers` name differently in the processors of Qwen-Omni."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import ProcessorMixin

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


def _expands_whole(processor: ProcessorMixin) -> bool:
    """Up to 5.22 one method expands all placeholders of a prompt; later there is a replacement for each item."""
    return hasattr(processor, "replace_multimodal_special_tokens")
