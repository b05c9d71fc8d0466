"""What it costs to decode media in a process of its own: an ordinary image in the pool and in this process, in turn.

python benchmarks/decode_pool.py                 a JPEG of one megapixel, 300 times each
python benchmarks/decode_pool.py --count 50      quicker
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from omnistage.media.budget import ItemBytes, MediaHold
from omnistage.media.decode_pool import DecodePool
from omnistage.media.image import decode_image_bytes
from omnistage.media.limits import MediaLimits

LIMITS = MediaLimits()
ITEM = ItemBytes(MediaHold(None, None))
"""Not counted: what a budget costs is no part of decoding."""


def photograph(side: int) -> bytes:
    """A JPEG with as much detail as a photograph of that size has, about 0.2 bytes a pixel."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC), np.int16)
    noise = generator.normal(0, 4, picture.shape).astype(np.int16)
    file = io.BytesIO()
    Image.fromarray((picture + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def processor_seconds(process: int) -> float:
    """Processor time of a process, from Linux's /proc."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--side", type=int, default=1024, help="pixels")
    options = parser.parse_args()
    data = photograph(options.side)
    pool = DecodePool(1)
    first = milliseconds(lambda: pool.decode_image(data, LIMITS, ITEM))
    if pool.decode_image(data, LIMITS, ITEM).tobytes() != decode_image_bytes(data, LIMITS).tobytes():
        raise SystemExit("the pixels differ")
    pooled, plain = [], []
    for _ in range(options.count):
        pooled.append(milliseconds(lambda: pool.decode_image(data, LIMITS, ITEM)))
        plain.append(milliseconds(lambda: decode_image_bytes(data, LIMITS)))
    print(f"JPEG of {options.side}x{options.side} pixels, {len(data)} bytes; {options.count} times each, in turn")
    print(f"first item, with the start of its process: {first:.0f} ms")
    for name, pick in (("median", statistics.median), ("minimum", min)):
        a, b = pick(pooled), pick(plain)
        print(f"{name}: {a:.2f} ms in the pool, {b:.2f} ms in the process, {a - b:+.2f} ms")
    [process] = pool.processes()
    before, own = processor_seconds(process), time.process_time()
    for _ in range(options.count):
        pool.decode_image(data, LIMITS, ITEM)
    pooled_cpu = processor_seconds(process) - before + time.process_time() - own
    own = time.process_time()
    for _ in range(options.count):
        decode_image_bytes(data, LIMITS)
    plain_cpu = time.process_time() - own
    a, b = 1000 * pooled_cpu / options.count, 1000 * plain_cpu / options.count
    print(f"processor time: {a:.2f} ms in the pool (both processes), {b:.2f} ms in the process, {a - b:+.2f} ms")
    pool.close()


if __name__ == "__main__":
    main()
