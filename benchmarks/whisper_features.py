"""Whisper's features of 16 clips at once: one after another, as before, and in threads, as the stage has them now.

    python benchmarks/whisper_features.py [--mels 128] [--repeats 5]

Prints a line of JSON: seconds of the wall clock, the least of the repeats, and whether the features are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from omnistage.hf import transformers
from omnistage.models.speech_to_text.features import EarlyFeatures

RATE, COUNT, SECONDS = 16_000, 16, 30


def least(function: Callable[[], list[Any]], repeats: int) -> tuple[float, list[Any]]:
    times, result = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return min(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mels", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    extractor = transformers.WhisperFeatureExtractor(feature_size=options.mels)
    rng = np.random.default_rng(0)
    clips = [(0.1 * rng.standard_normal(SECONDS * RATE)).astype(np.float32) for _ in range(COUNT)]

    def extract(clip: np.ndarray) -> torch.Tensor:
        features: torch.Tensor = extractor(clip, sampling_rate=RATE, return_tensors="pt").input_features
        return features

    early = EarlyFeatures(extract)
    serial, expected = least(lambda: [extract(clip) for clip in clips], options.repeats)
    threaded, found = least(lambda: early.of(clips), options.repeats)
    early.close()
    line = {
        "clips": COUNT,
        "seconds_each": SECONDS,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "one_after_another": round(serial, 3),
        "in_threads": round(threaded, 3),
        "equal": all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
