"""Media in and out: decode images, sound and video within limits, encode what pipelines make."""

from omnistage.media.audio import AudioClip, AudioSource, decode_audio
from omnistage.media.audio_output import AudioOutput, encode_wav
from omnistage.media.hashing import content_key
from omnistage.media.image import ImageSource, decode_image
from omnistage.media.limits import MediaLimits
from omnistage.media.source import BytesSource, load_bytes
from omnistage.media.video import VideoClip, VideoSource, decode_video

__all__ = [
    "AudioClip",
    "AudioOutput",
    "AudioSource",
    "BytesSource",
    "ImageSource",
    "MediaLimits",
    "VideoClip",
    "VideoSource",
    "content_key",
    "decode_audio",
    "decode_image",
    "decode_video",
    "encode_wav",
    "load_bytes",
]
