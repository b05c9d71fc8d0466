"""Decode damaged media files: whatever is in them, only errors of ours may come out, in time and without a leak.

Files of each format are encoded here, then bytes are changed, repeated or cut off, by a seeded generator.
The files are decoded in processes of their own, as `omnistage serve` does.

python tools/fuzz_media.py                        1,000 files of each format
python tools/fuzz_media.py png mp4 --count 100    these formats only
python tools/fuzz_media.py --seed 7               other files
"""

from __future__ import annotations

import argparse
import io
import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np
import soundfile
from PIL import Image

from omnistage.core.errors import InvalidRequestError
from omnistage.media import MediaLimits, decode_audio, decode_image, decode_video
from omnistage.media.decode_pool import decode_processes

LIMITS = MediaLimits(max_decode_seconds=5.0, max_video_decode_seconds=10.0, max_decode_memory=2 << 30)
MAX_SECONDS = 60.0
"""For one file: its processor time is limited, and other programs may use the processor too."""
_RATE, _SIZE, _FRAMES = 24_000, (96, 64), 12

Decode = Callable[[bytes], object]


def _picture(seed: int = 0) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(_SIZE, Image.Resampling.BICUBIC)


def _image(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    _picture().save(file, kind, **options)
    return file.getvalue()


def _samples() -> np.ndarray:
    time_axis = np.arange(_RATE // 2) / _RATE
    return (0.3 * np.sin(2 * np.pi * 440 * time_axis) + 0.05 * np.sin(9000 * time_axis)).astype(np.float32)


def _sound(kind: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, _samples(), _RATE, format=kind, subtype=subtype)
    return file.getvalue()


def _video(container: str, codec: str, audio_codec: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=12)
        stream.width, stream.height = _SIZE
        stream.pix_fmt = "yuv420p"
        sound = output.add_stream(audio_codec, rate=48_000)
        for index in range(_FRAMES):
            output.mux(stream.encode(av.VideoFrame.from_image(_picture(index))))
        output.mux(stream.encode())
        resampler = av.AudioResampler(sound.format, sound.layout, 48_000, frame_size=sound.frame_size)
        frame = av.AudioFrame.from_ndarray(_samples()[None], format="fltp", layout="mono")
        frame.sample_rate = _RATE
        for piece in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(sound.encode(piece))
        output.mux(sound.encode())
    return file.getvalue()


def image(data: bytes) -> object:
    return decode_image(data, LIMITS)


def audio(data: bytes) -> object:
    return decode_audio(data, LIMITS, 16_000)


def video(data: bytes) -> object:
    return decode_video(data, LIMITS, with_audio=True)


FORMATS: dict[str, tuple[Decode, Callable[[], bytes]]] = {
    "png": (image, lambda: _image("PNG")),
    "jpeg": (image, lambda: _image("JPEG", progressive=True)),
    "webp": (image, lambda: _image("WEBP")),
    "gif": (image, lambda: _image("GIF", save_all=True, append_images=[_picture(1)])),
    "avif": (image, lambda: _image("AVIF")),
    "tiff": (image, lambda: _image("TIFF", compression="tiff_lzw")),
    "wav": (audio, lambda: _sound("WAV")),
    "flac": (audio, lambda: _sound("FLAC")),
    "mp3": (audio, lambda: _sound("MP3")),
    "opus": (audio, lambda: _sound("OGG", "OPUS")),
    "mp4": (video, lambda: _video("mp4", "libx264", "aac")),
    "webm": (video, lambda: _video("webm", "libvpx-vp9", "libopus")),
}


def _repaired_png(data: bytes) -> bytes:
    """The file with the checksums that its chunks have now: a decoder would look no further than a wrong one."""
    copy, position = bytearray(data), 8
    while position + 12 <= len(copy):
        end = position + 8 + int.from_bytes(copy[position : position + 4], "big")
        if end + 4 > len(copy):
            break
        copy[end : end + 4] = zlib.crc32(copy[position + 4 : end]).to_bytes(4, "big")
        position = end + 4
    return bytes(copy)


def mutations(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Damaged copies of a file, the same ones for the same seed."""
    generator = random.Random(seed)
    for _ in range(count):
        copy = bytearray(data)
        for _ in range(generator.choice((1, 1, 2, 4, 16))):
            _mutate(copy, generator)
        yield _repaired_png(bytes(copy)) if data.startswith(b"\x89PNG") else bytes(copy)


def _mutate(data: bytearray, generator: random.Random) -> None:
    if not data:
        return
    # Half of the changes are near the beginning, where headers are.
    reach = min(len(data), 256) if generator.random() < 0.5 else len(data)
    position = generator.randrange(reach)
    length = generator.randrange(1, 65)
    match generator.randrange(7):
        case 0:
            data[position] ^= 1 << generator.randrange(8)
        case 1:
            data[position] = generator.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF))
        case 2:
            data[position : position + 4] = generator.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"))
        case 3:
            data[position : position + length] = generator.randbytes(length)
        case 4:
            del data[position : position + length]
        case 5:
            data[position:position] = data[position : position + length] * generator.choice((1, 2, 50))
        case _:
            del data[max(position, 1) :]


@dataclass
class Report:
    """What came of the files of one format."""

    outcomes: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    slowest: float = 0.0


def fuzz(name: str, count: int, seed: int, folder: Path | None = None) -> Report:
    """Decode damaged files of one format; those that show a defect are kept in `folder`."""
    decode, encode = FORMATS[name]
    report = Report()
    for index, data in enumerate(mutations(encode(), count, seed)):
        started = time.monotonic()
        defect = None
        try:
            decode(data)
            outcome = "decoded"
        except InvalidRequestError as error:
            outcome = type(error).__name__
            if "crashed" in error.message:
                outcome = "crashed"
        except Exception as error:  # the boundary: anything else is what this looks for
            outcome = "defect"
            defect = f"{name} {index}: {type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        if seconds > MAX_SECONDS:
            defect = f"{name} {index}: took {seconds:.1f} s"
        report.outcomes[outcome] += 1
        report.slowest = max(report.slowest, seconds)
        if defect is not None:
            report.defects.append(defect)
        if folder is not None and (defect is not None or outcome == "crashed"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}-{seed}-{index}.{name}").write_bytes(data)
    return report


def resident_mib() -> float:
    """Memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", choices=[*FORMATS, []], default=[])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="write files that show a defect into this folder")
    options = parser.parse_args()
    failed = 0
    with decode_processes(options.processes):
        for name in options.formats or FORMATS:
            before, started = resident_mib(), time.monotonic()
            report = fuzz(name, options.count, options.seed, options.keep)
            outcomes = ", ".join(f"{count} {outcome}" for outcome, count in report.outcomes.most_common())
            print(
                f"{name}: {outcomes}; slowest {report.slowest:.2f} s, {time.monotonic() - started:.0f} s in all, "
                f"memory {resident_mib() - before:+.1f} MiB",
                flush=True,
            )
            for defect in report.defects:
                print(f"  {defect}", flush=True)
            failed += len(report.defects)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
