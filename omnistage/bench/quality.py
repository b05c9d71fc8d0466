"""How far outputs are from those of a reference: tokens and logits, pictures, speech."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_MAX_PSNR = 120.0
_SCALES = 4
_WINDOW = 8


@dataclass(frozen=True, slots=True)
class Gate:
    """What a quantity must be."""

    limit: float
    at_least: bool

    def passes(self, value: float) -> bool:
        """False for what is not a number."""
        return value >= self.limit if self.at_least else value <= self.limit


GATES = {
    "token_agreement": Gate(0.9, at_least=True),
    "kl": Gate(0.05, at_least=False),
    "perplexity_ratio": Gate(1.05, at_least=False),
    "psnr": Gate(20.0, at_least=True),
    "structure_distance": Gate(0.1, at_least=False),
    "mel_distance": Gate(3.0, at_least=False),
}
"""By quantity, with the default limit."""


def token_agreement(logits: Tensor, reference: Tensor) -> float:
    """Share of the positions `[T, V]` at which both would choose the same token."""
    return float((logits.argmax(-1) == reference.argmax(-1)).float().mean())


def divergence(logits: Tensor, reference: Tensor) -> float:
    """Mean Kullback-Leibler divergence of the distributions over `[T, V]` from the reference's, in nats."""
    log_q, log_p = logits.double().log_softmax(-1), reference.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def negative_log_likelihood(logits: Tensor, ids: Tensor) -> float:
    """Mean over the tokens `[T]` after the first, of logits `[T, V]`; e to it is the perplexity."""
    return float(functional.cross_entropy(logits[:-1].double(), ids[1:]))


def psnr(pixels: np.ndarray, reference: np.ndarray) -> float:
    """Of `uint8` pictures, in dB."""
    error = float(np.square(pixels.astype(np.float64) - reference.astype(np.float64)).mean())
    return float(min(10 * np.log10(255**2 / max(error, 1e-12)), _MAX_PSNR))


def structure_distance(pixels: np.ndarray, reference: np.ndarray) -> float:
    """1 - structural similarity of `uint8 [h, w, 3]`, the mean over scales: 0 for equal pictures.

    It stands where others put LPIPS, which needs weights of its own; contrasts and edges count, not single pixels.
    """
    ours, theirs = (torch.from_numpy(each).double().permute(2, 0, 1)[None] / 255 for each in (pixels, reference))
    distances = []
    for _ in range(_SCALES):
        if min(ours.shape[-2:]) < _WINDOW:
            break
        distances.append(1 - _similarity(ours, theirs))
        ours, theirs = (functional.avg_pool2d(each, 2) for each in (ours, theirs))
    return float(np.mean(distances)) if distances else float(np.abs(pixels.astype(float) - reference).mean() / 255)


def _similarity(ours: Tensor, theirs: Tensor) -> float:
    def mean(values: Tensor) -> Tensor:
        return functional.avg_pool2d(values, _WINDOW, 1)

    a, b = mean(ours), mean(theirs)
    var_a, var_b, both = mean(ours**2) - a**2, mean(theirs**2) - b**2, mean(ours * theirs) - a * b
    light, contrast = 0.01**2, 0.03**2
    similarity = (2 * a * b + light) * (2 * both + contrast) / ((a**2 + b**2 + light) * (var_a + var_b + contrast))
    return float(similarity.mean())


def mel_distance(wave: np.ndarray, reference: np.ndarray, rate: int) -> float:
    """Root mean square distance of log-mel spectrograms, in dB, over the length of the shorter one."""
    length = min(len(wave), len(reference))
    ours, theirs = log_mel(wave[:length], rate), log_mel(reference[:length], rate)
    return float(np.sqrt(np.mean(np.square(ours - theirs))))


def log_mel(wave: np.ndarray, rate: int = 24_000, size: int = 1024, hop: int = 256, bands: int = 80) -> np.ndarray:
    """`[frames, bands]` in dB, 80 dB below the loudest at least."""
    window = torch.hann_window(size)
    power = torch.stft(torch.from_numpy(wave), size, hop, window=window, return_complex=True).abs().square().numpy()
    mels = np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), bands + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    bins = np.linspace(0, rate / 2, size // 2 + 1)
    low, mid, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    filters = np.clip(np.minimum((bins - low) / (mid - low), (high - bins) / (high - mid)), 0, None)
    levels = 10 * np.log10(np.maximum(filters @ power, 1e-12))
    return np.asarray(np.maximum(levels, levels.max() - 80).T)
