"""Decode images, audio and video within limits; encode what pipelines generate."""

from omnistage.core.clips import AudioClip, VideoClip
from omnistage.media.audio import AudioSource, decode_audio
from omnistage.media.audio_output import AudioOutput, encode_wav
from omnistage.media.hashing import content_key
from omnistage.media.image import ImageSource, decode_image
from omnistage.media.image_output import ImageOutput, contact_sheet, read_metadata
from omnistage.media.limits import MediaLimits
from omnistage.media.source import BytesSource, load_bytes
from omnistage.media.video import VideoSource, decode_video
from omnistage.media.video_output import VideoOutput, read_video_metadata

__all__ = [
    "AudioClip",
    "AudioOutput",
    "AudioSource",
    "BytesSource",
    "ImageOutput",
    "ImageSource",
    "MediaLimits",
    "VideoClip",
    "VideoOutput",
    "VideoSource",
    "contact_sheet",
    "content_key",
    "decode_audio",
    "decode_image",
    "decode_video",
    "encode_wav",
    "load_bytes",
    "read_metadata",
    "read_video_metadata",
]
