"""The voices of a checkpoint: languages, numbers, vectors, latents or recordings in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from omnistage.core.errors import CheckpointError, MediaError
from omnistage.media.audio import decode_audio_bytes
from omnistage.media.limits import MediaLimits
from omnistage.models.loading import read_generation_config

VOICES = "voices"
"""Folder of voices, inside the checkpoint's: a file each, by its name."""
_ENGLISH = "eng"
_MAX_VOICE_BYTES = 64 * 2**20


def languages(folder: Path) -> tuple[str, ...]:
    """Those that a SeamlessM4T speaks."""
    settings = read_generation_config(folder)
    codes = getattr(settings, "vocoder_lang_code_to_id", None)
    if not isinstance(codes, dict) or not codes:
        raise CheckpointError("generation_config.json names no vocoder_lang_code_to_id; fetch the checkpoint again")
    return tuple(sorted(codes))


def default_language(folder: Path) -> str:
    codes = languages(folder)
    return _ENGLISH if _ENGLISH in codes else codes[0]


def vectors(path: Path, width: int) -> tuple[str, ...]:
    """The names of SpeechT5's voices, which lie in one file."""
    try:
        with safe_open(path, framework="np") as file:
            return tuple(sorted(file.keys()))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"SpeechT5 needs vectors of its voices: put them into {path}, each float32 [{width}] under the voice's name"
        ) from error


def latents(folder: Path, width: int) -> Mapping[str, np.ndarray]:
    """Voices of Pocket TTS and Phonon: `voices/NAME.safetensors`, each with one matrix [frames, width]."""
    latents = {}
    for path in sorted((folder / VOICES).glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                arrays = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118  (no mapping)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
        if len(arrays) != 1 or arrays[0].ndim != 2 or arrays[0].shape[1] != width or not len(arrays[0]):
            raise CheckpointError(
                f"{path} must hold one matrix [frames, {width}], the latents of a voice; caches of keys and values are "
                "not served"
            )
        latents[path.stem] = arrays[0].astype(np.float32)
    return latents


def recordings(folder: Path, rate: int) -> Mapping[str, np.ndarray]:
    """Voices of VibeVoice: `voices/NAME.wav`, each a recording of somebody who speaks."""
    recordings: dict[str, Any] = {}
    for path in sorted((folder / VOICES).glob("*.wav")):
        if path.stat().st_size > _MAX_VOICE_BYTES:
            raise CheckpointError(f"{path} has more than {_MAX_VOICE_BYTES:,} bytes; cut it to some seconds")
        try:
            recordings[path.stem] = decode_audio_bytes(path.read_bytes(), MediaLimits(), rate).samples
        except MediaError as error:
            raise CheckpointError(f"{path} is not a recording of a voice: {error}") from error
    return recordings
