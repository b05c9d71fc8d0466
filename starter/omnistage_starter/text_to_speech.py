"""Text to speech with the package hibari-tts.

Nothing is downloaded: only voices whose files are already here can be used.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.core.errors import ConfigError, MissingDependencyError
from omnistage.core.sentences import Sentences, split_point
from omnistage_starter.speakable import speakable

Samples = NDArray[np.float32]

_MAX_PHONEMES = 400
_SILENCE = 1e-3
"""Below this (-60 dB) a sample is silent; the voice's own ends are far below, its softest consonants above."""
_LEAD, _PAUSE, _SHORT_PAUSE = 0.02, 0.14, 0.1
"""Seconds before a piece, after a sentence and after a piece of one. The voice by itself leaves 0.3 and 0.45."""
_FADE = 0.005
"""Seconds of the fade at both ends, against clicks."""


class Voice:
    """One voice at 24 kHz. The same text and seed give the same samples. Not thread-safe."""

    def __init__(self, threads: int = 1, name: str | None = None) -> None:
        hibari, registry = _package()
        self.available = local_voices()
        """Voices whose files are here."""
        self.name: str = name or registry.DEFAULT
        if self.name not in self.available:
            names = ", ".join(self.available)
            raise ConfigError(f"there is no voice {self.name!r} here and none is downloaded; available: {names}")
        # With an explicit file the package downloads nothing.
        model = registry.voice_path(self.name, download_missing=False)
        self._synthesiser = hibari.Hibari(voice=self.name, model=model, threads=threads)
        self._to_phonemes = self._synthesiser.g2p  # loaded now: it takes longer than a sentence
        self.sample_rate = int(self._synthesiser.sample_rate)

    def synthesise(self, text: str, *, seed: int = 0, speed: float = 1.0) -> Samples:
        """Speech for `text` with a pause after it; no samples where nothing can be spoken.

        `seed` is for the noise in the voice; `speed` 1 is its normal rate.
        """
        rng = np.random.default_rng(seed)
        chunks = [np.zeros(0, np.float32)]
        for piece in _pieces(speakable(text)):
            sentence_end = piece.rstrip("\"')").endswith((".", "!", "?"))
            phonemes = list(self._phonemes(piece))
            for number, part in enumerate(phonemes, 1):
                samples = self._synthesiser.from_ids(self._synthesiser.ids(part), speed, rng)
                pause = _PAUSE if sentence_end and number == len(phonemes) else _SHORT_PAUSE
                chunks.append(trim(samples, self.sample_rate, pause))
        return np.concatenate(chunks)

    def _phonemes(self, piece: str) -> Iterator[str]:
        """The phonemes of `piece`, in parts that are short enough for the voice."""
        rest: str
        try:
            rest = self._to_phonemes(piece)
        except (LookupError, ValueError):
            # Its parser of numbers and dates fails on some malformed ones: fall back to the words alone.
            rest = self._to_phonemes(" ".join(re.findall(r"[A-Za-z']+", piece)))
        while len(rest) > _MAX_PHONEMES:
            cut = split_point(rest[:_MAX_PHONEMES])
            yield rest[:cut]
            rest = rest[cut:]
        if any(character.isalpha() for character in rest):
            yield rest


def _package() -> tuple[Any, Any]:
    """The package hibari and its registry of voices."""
    try:
        return importlib.import_module("hibari"), importlib.import_module("hibari.voices")
    except ImportError as error:
        raise MissingDependencyError("speech synthesis needs hibari-tts: pip install 'omnistage[starter]'") from error


def local_voices() -> tuple[str, ...]:
    """Voices whose files are here; the package would download the others."""
    _, registry = _package()
    names = []
    for name in registry.VOICES:
        try:
            path = registry.voice_path(name, download_missing=False)
        except FileNotFoundError:
            continue
        if Path(path).is_file():
            names.append(name)
    return tuple(names)


def _pieces(text: str) -> tuple[str, ...]:
    state, pieces = Sentences(first_words=None).push(text)
    return (*pieces, *state.finish())


def trim(samples: Samples, rate: int, pause: float) -> Samples:
    """`samples` without silence at the ends, faded, with `pause` seconds of silence after them."""
    loud = np.flatnonzero(np.abs(samples) > _SILENCE)
    if not len(loud):
        return np.zeros(0, np.float32)
    lead, fade = int(_LEAD * rate), int(_FADE * rate)
    start, end = max(0, int(loud[0]) - lead), min(len(samples), int(loud[-1]) + 1 + lead)
    result = np.zeros(end - start + max(0, int(pause * rate) - lead), np.float32)
    result[: end - start] = samples[start:end]
    ramp = np.linspace(0, 1, min(fade, end - start), endpoint=False, dtype=np.float32)
    result[: len(ramp)] *= ramp
    result[end - start - len(ramp) : end - start] *= ramp[::-1]
    return result
