"""What a caller gets back: outputs, usage and traces of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omnistage.core.errors import OmniError
from omnistage.core.record import record
from omnistage.core.transcripts import Transcript
from omnistage.core.types import AudioChunk, FinishReason, ImageChunk, Modality, Progress, TokenLogprobs, VideoChunk

if TYPE_CHECKING:
    import numpy as np

    from omnistage.media.audio_output import AudioOutput
    from omnistage.media.image_output import ImageOutput
    from omnistage.media.video_output import VideoOutput


@dataclass(slots=True)
class StageTrace:
    """Times of one stage of one request, in seconds since the request arrived; None: it did not happen."""

    stage: str
    submitted: float | None = None
    started: float | None = None
    first_chunk: float | None = None
    last_chunk: float | None = None
    chunks: int = 0
    tokens: int = 0
    finish: FinishReason | None = None

    @property
    def queue(self) -> float | None:
        """Seconds between the stage taking the request and its first step on it."""
        return None if self.submitted is None or self.started is None else self.started - self.submitted


@dataclass(slots=True)
class Trace:
    """What ran when, for one request."""

    request_id: str
    arrival: float
    admitted: float | None = None
    finished: float | None = None
    stages: dict[str, StageTrace] = field(default_factory=dict)

    def __str__(self) -> str:
        def ms(value: float | None) -> str:
            return "-" if value is None else f"{value * 1e3:.1f}"

        lines = [f"request {self.request_id}: {ms(self.finished)} ms in all"]
        lines.append(f"{'stage':<14}{'queue':>9}{'started':>9}{'first':>9}{'last':>9}{'chunks':>8}{'tokens':>8}  end")
        for t in self.stages.values():
            lines.append(
                f"{t.stage:<14}{ms(t.queue):>9}{ms(t.started):>9}{ms(t.first_chunk):>9}{ms(t.last_chunk):>9}"
                f"{t.chunks:>8}{t.tokens:>8}  {t.finish or '-'}"
            )
        return "\n".join(lines)


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's answers."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string of the request's own that ended it."""
    reasoning: str = ""
    """What the model thought before the text, where a service has taken it out of that."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    audio_seconds: float = 0.0
    images: int = 0
    video_seconds: float = 0.0
    steps: int = 0
    """Denoising steps done."""
    stage_tokens: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    prompt_media: dict[Modality, int] = field(default_factory=dict)
    """Prompt tokens that stand for media, by their kind."""
    reasoning_tokens: int = 0
    """Of the completion tokens."""
    writes: bool = True
    """Completion tokens are text, not the frames of a model that only reads aloud."""


@dataclass(slots=True)
class OmniRequestOutput:
    """The whole answer so far. `finished` outputs are final."""

    request_id: str
    outputs: list[CompletionOutput] = field(default_factory=list)
    audio: AudioOutput | None = None
    finish_reason: FinishReason | None = None
    error: OmniError | None = None
    usage: Usage = field(default_factory=Usage)
    trace: Trace | None = None
    images: list[ImageOutput] = field(default_factory=list)
    videos: list[VideoOutput] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """By the name of its modality: `embedding` `[texts, dimensions]`, `scores` `[texts, classes]`."""
    transcript: Transcript | None = None
    """Of a model that transcribes: its last chunk, with all of the text."""

    @property
    def image(self) -> ImageOutput | None:
        """The first picture."""
        return self.images[0] if self.images else None

    @property
    def video(self) -> VideoOutput | None:
        """The first video."""
        return self.videos[0] if self.videos else None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids if self.outputs else []


@record
class OutputChunk:
    """One item of `AsyncOmni.generate()`: what is new, by modality. The last one carries `final`."""

    request_id: str
    modality: Modality
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    audio: AudioChunk | None = None
    image: ImageChunk | None = None
    video: VideoChunk | None = None
    progress: Progress | None = None
    finish_reason: FinishReason | None = None
    """End of this modality's stream (per answer)."""
    reasoning: str = ""
    """It comes before the text of the same item."""
    final: OmniRequestOutput | None = None
