"""Sound for tests: vowels that a network takes for speech, and what it does not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (570, 840, 2410), (530, 1840, 2480), (300, 870, 2240))
"""Formants of five vowels."""
_SYLLABLE = 0.18


def voice(seconds: float, rate: int, seed: int = 0) -> NDArray[np.float32]:
    """Vowels one after another: pulses of a throat, shaped by formants, five syllables or so a second."""
    chance = np.random.default_rng(seed)
    count = int(seconds * rate)
    pitch = 120 + 20 * np.sin(2 * np.pi * 2.2 * np.arange(count) / rate)
    pulses = np.diff(np.floor(np.cumsum(pitch) / rate), prepend=0.0)
    throat = np.convolve(pulses, np.exp(-np.arange(rate // 80) / (rate / 800)))[:count]
    throat += 0.01 * chance.normal(size=count)
    made, length = np.zeros(count), int(_SYLLABLE * rate)
    for number, start in enumerate(range(0, count, length)):
        piece = throat[start : start + length]
        shaped = _shaped(piece, _VOWELS[number % len(_VOWELS)], rate)
        made[start : start + length] = shaped * np.sin(np.pi * np.arange(len(piece)) / len(piece)) ** 0.6
    return (0.6 * made / np.abs(made).max()).astype(np.float32)


def _shaped(sound: NDArray[np.float64], formants: tuple[int, ...], rate: int) -> NDArray[np.float64]:
    """`sound` through a resonance at each formant."""
    frequencies = np.fft.rfftfreq(2 * len(sound), 1 / rate)
    shape = np.zeros(len(frequencies), np.complex128)
    for formant, width, gain in zip(formants, (80, 100, 140), (1.0, 0.6, 0.3), strict=True):
        radius = np.exp(-np.pi * width / rate)
        one, two = 2 * radius * np.cos(2 * np.pi * formant / rate), -radius * radius
        z = np.exp(-2j * np.pi * frequencies / rate)
        shape += gain * (1 - one - two) / (1 - one * z - two * z * z)
    return np.fft.irfft(np.fft.rfft(sound, 2 * len(sound)) * shape)[: len(sound)]


def silence(seconds: float, rate: int) -> NDArray[np.float32]:
    return np.zeros(int(seconds * rate), np.float32)


def noise(seconds: float, rate: int) -> NDArray[np.float32]:
    return (0.05 * np.random.default_rng(1).normal(size=int(seconds * rate))).astype(np.float32)


def as_int16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    return (np.clip(samples, -1, 1) * 32767).astype(np.int16)


def as_pcm(samples: NDArray[np.float32]) -> bytes:
    return as_int16(samples).astype("<i2").tobytes()
