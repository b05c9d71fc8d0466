"""Limits of a request's media, and where they may come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator

from omnistage.media.hosts import HostRule

MIB = 1024 * 1024
MediaKind: TypeAlias = Literal["image", "audio", "video"]
Need: TypeAlias = Callable[[int], None]
"""Called by decoders with the bytes that an item takes once it is decoded, before they take them. It may raise."""


def no_need(nbytes: int) -> None:
    """Where nothing is counted."""


class MediaLimits(BaseModel):
    """Limits that are checked before the work that they bound.

    The defaults suit offline use by the machine's owner. A service sets `allow_paths=False` or names the folders,
    so that a client cannot read files of the host.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_bytes: PositiveInt = Field(
        default=100 * MIB,
        description="Largest encoded item in bytes (a file, a decoded data: URL, an HTTP body).",
    )
    max_items: PositiveInt = Field(
        default=64, description="Maximum of images, audio clips and videos in one request, together."
    )
    max_text_chars: PositiveInt = Field(
        default=2_000_000, description="Maximum of text characters in one request, over all of its messages."
    )
    max_drawing_chars: PositiveInt = Field(
        default=32_000, description="Maximum of characters of a prompt that an image or a video is generated from."
    )
    max_total_pixels: PositiveInt = Field(
        default=768_000_000,
        description="Maximum of decoded pixels in one request: its images and sampled video frames together.",
    )
    max_total_audio_seconds: PositiveFloat = Field(
        default=3600.0, description="Maximum duration of audio in one request, with that of its videos."
    )

    max_image_pixels: PositiveInt = Field(
        default=64_000_000,
        le=178_000_000,
        description="Largest image in pixels, read from its header. Pillow itself refuses anything above 178 MP.",
    )
    max_image_aspect: float = Field(
        default=200.0, ge=1.0, description="Largest ratio of an image's longer side to its shorter side."
    )
    max_image_scans: PositiveInt = Field(
        default=100,
        description="Maximum of scans of a progressive JPEG, each of which goes over the whole image; most have 10.",
    )

    max_audio_seconds: PositiveFloat = Field(
        default=1800.0, description="Maximum duration of an audio clip, by its header and again while decoding."
    )

    max_video_seconds: PositiveFloat = Field(
        default=3600.0, description="Maximum duration of a video, and of the audio that is read from it."
    )
    max_video_frames: PositiveInt = Field(
        default=768, ge=2, description="Maximum of frames sampled from one video; they are spaced to stay within it."
    )
    max_video_pixels: PositiveInt = Field(
        default=4096 * 4096, description="Largest frame of a video in pixels; a larger one is refused."
    )
    max_video_total_pixels: PositiveInt = Field(
        default=512_000_000,
        description=(
            "Maximum of pixels held for one video, over all sampled frames (3 bytes each). Frames are scaled down, "
            "keeping their aspect, to stay within it."
        ),
    )

    max_decode_seconds: PositiveFloat = Field(
        default=30.0,
        description=(
            "Maximum of processor time for decoding one image or audio clip. This and the next two are for media that "
            "are decoded in processes of their own, as `omnistage serve` does."
        ),
    )
    max_video_decode_seconds: PositiveFloat = Field(
        default=300.0, description="The same for one video, over all of its decoder's threads."
    )
    max_decode_memory: int = Field(
        default=4096 * MIB,
        ge=64 * MIB,
        description="Maximum of memory in bytes for decoding one item, its decoded form included.",
    )

    allow_urls: bool = Field(default=False, description="Whether URLs are fetched.")
    url_hosts: tuple[str, ...] = Field(
        default=(),
        description=(
            "Hosts that URLs may lead to, redirects included: `example.org`, `*.example.org` for every host below it, "
            "`example.org:8443` for another port than the usual one; empty means any host and port."
        ),
    )
    allow_http_urls: bool = Field(default=False, description="Whether URLs may be http, not only https.")
    allow_private_urls: bool = Field(
        default=False,
        description="Whether a URL may lead to a loopback, private or otherwise not public address.",
    )
    url_timeout_seconds: PositiveFloat = Field(
        default=20.0, description="Time for fetching one URL, from connecting to its last byte."
    )
    allow_paths: bool = Field(default=True, description="Whether file paths and file:// URLs are read.")
    allowed_path_roots: tuple[Path, ...] = Field(
        default=(),
        description="Folders that files must lie in once symbolic links are resolved; empty means any folder.",
    )

    def decode_seconds(self, kind: MediaKind) -> float:
        """Processor time for decoding one item."""
        return self.max_video_decode_seconds if kind == "video" else self.max_decode_seconds

    @field_validator("url_hosts")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for entry in hosts:
            HostRule.parse(entry)
        return hosts
