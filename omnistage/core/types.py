"""What flows between layers: prompts, stage inputs and chunks.

Plain dataclasses of tensors and primitives, so that the same contract can be spoken to a stage in another process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from omnistage.core.errors import OmniError
from omnistage.core.params import StageParams
from omnistage.core.record import record
from omnistage.core.transcripts import Transcript, TranscriptionOptions

if TYPE_CHECKING:
    import numpy as np
    import torch

    from omnistage.core.clips import AudioClip
    from omnistage.core.messages import ChatMessage, TemplateOptions


DTypeName = Literal["auto", "float32", "float16", "bfloat16"]


class Modality(StrEnum):
    """What goes into a pipeline or comes out of it."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    EMBEDDING = "embedding"
    """A vector for each text."""
    SCORES = "scores"
    """A number for each class, for each text or pair of texts."""


class FinishReason(StrEnum):
    """Why a request, or one stage of it, ended. Every request gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"
    CONTENT_FILTER = "content_filter"
    """A filter of the service refused what was made."""


# ------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class OmniTokensPrompt:
    """A prompt that is already tokens, or embeddings in place of tokens.

    `prompt_embeds` is `[n, hidden]`; then `prompt_token_ids` may be left out.
    """

    prompt_token_ids: tuple[int, ...] = ()
    prompt_embeds: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Texts to be encoded in one request, each a text or its token ids; with `seconds` each is a pair of texts."""

    texts: tuple[str | tuple[int, ...], ...]
    seconds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SpeechPrompt:
    """Audio to be transcribed: an encoded file, or samples with their rate."""

    audio: bytes | AudioClip
    options: TranscriptionOptions = field(default_factory=TranscriptionOptions)


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What every stage and bridge may know of a request. Immutable for its whole life."""

    request_id: str
    modalities: frozenset[Modality] = frozenset({Modality.TEXT})
    priority: int = 0
    """Lower runs earlier."""
    deadline: float | None = None
    """`time.monotonic()` value past which the request ends with `FinishReason.DEADLINE`."""
    voice: str | None = None
    arrival: float = field(default_factory=time.monotonic)
    owner: str | None = None
    """Whose request it is: a client has no more than its share of what requests wait for. None: no share."""


# -------------------------------------------------------------------------------------------- stage inputs


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """One media item inside a prompt: which rows it fills and what the encoder needs to fill them.

    `positions` are indices into the prompt (`int64 [n]`, not always contiguous: audio and video of one clip are
    interleaved); the encoder's output rows go there in order. `key` is the content's digest: the encoder cache and
    the prefix hash are built on it.
    """

    kind: Modality
    key: bytes
    positions: torch.Tensor
    inputs: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ARInput:
    """Start of an autoregressive stage's work on a request."""

    token_ids: tuple[int, ...]
    embeds: torch.Tensor | None = None
    """`[n, E]` rows used instead of embedding `token_ids` (which then serve penalties only)."""
    positions: torch.Tensor | None = None
    """`[3, n]` for m-RoPE or `[n]`; `None` counts 0, 1, 2, ... Beside `num_tokens` it may go on over those."""
    position_delta: float = 0
    """Generated token at index i gets position i + position_delta, where `positions` does not reach it."""
    num_tokens: int | None = None
    """Generate just as many, whatever the parameters' `max_tokens`: a picture's grid has as many as it has."""
    seed: int | None = None
    """What sampling starts from where the parameters name no seed: the picture's own."""
    media: tuple[MediaSpan, ...] = ()
    context: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What downstream bridges need of the prompt beyond its tokens (grids, lengths), handed on untouched."""
    drawing: DiffusionInput | None = None
    """What a drawing stage behind this one is asked for; bridges find it on the first chunk's `prompt`."""
    streaming: bool = False
    """True: each generated token needs a row of `SideRows` to be computed; the stage waits (starved) without."""
    side_rows: torch.Tensor | None = None
    """`[k, side width]` side rows known already."""
    both_ways: tuple[tuple[int, ...], ...] = ()
    """Pairs `(start, end)`, in order: prompt tokens `[start, end)` attend to all of their range, as those of a picture
    do in some models. Each range is computed in one step."""


@dataclass(frozen=True, slots=True)
class SideRows:
    """Rows added to the embeddings of generated tokens, one a token, in order.

    After `final` the last row of all serves every further token.
    """

    rows: torch.Tensor
    final: bool = False


Code = int | tuple[int, ...]
"""One frame of a codec: its code, or where a frame has several codebooks one code for each, in their order."""


@dataclass(frozen=True, slots=True)
class CodecInput:
    """Start of a codec stage's work on a request; codes follow by `CodecFrames`.

    One entry of `codes` is one frame, so that lengths count frames whatever the number of codebooks; all entries of a
    request are of one kind.
    """

    codes: tuple[Code, ...] = ()
    final: bool = False


@dataclass(frozen=True, slots=True)
class CodecFrames:
    """More codes for a running codec request, one entry a frame as in `CodecInput`."""

    codes: tuple[Code, ...]
    final: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DiffusionInput:
    """What to draw: the prompt and the pictures that go with it. Starts a stage that encodes prompts."""

    prompt: str
    images: tuple[np.ndarray, ...] = ()
    """`uint8 [h, w, 3]`, in the order in which they were given."""
    mask: np.ndarray | None = None
    """`uint8 [h, w]`, of the first image's size: 255 where it is to be painted anew."""
    tokens: tuple[int, ...] = ()
    """Picture tokens of a language model upstream."""
    context: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What else that model gave."""


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """A prompt as a denoiser takes it: what an encoding stage gives and a denoising stage starts from.

    No tensor has a batch dimension. `negative` is None where nothing guides away from it.
    """

    positive: Mapping[str, torch.Tensor]
    negative: Mapping[str, torch.Tensor] | None = None
    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Read by both: latents of input pictures, masks."""
    width: int = 0
    height: int = 0
    num_frames: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """Latents of picture `index` of a request: what a denoising stage gives and a decoding stage takes.

    A preview is of a picture that is still on its way. `final` says that no more latents of the request follow.
    """

    picture: torch.Tensor
    """Without a batch dimension."""
    width: int
    height: int
    num_frames: int = 1
    index: int = 0
    seed: int | None = None
    preview: bool = False
    final: bool = True


TOKEN_IDS = "token_ids"
"""Key of a module's input: the tokens of its texts, `int64 [n]`, which count as the prompt's."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleInput:
    """One piece of work for a one-shot module: named arrays, a text, or both.

    The first starts a request, later ones feed it. `final` says that no more pieces follow; a later piece that has
    nothing in it but `final` only ends the request.
    """

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    text: str = ""
    final: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ChatInput:
    """A conversation whose media are still audio and images: the input of a stage that transcribes. Always complete.

    It has messages, or a bare prompt, or tokens. Where none of its media are left, messages or a bare
    prompt come with the tokens that they make, so that the stage need not make them.
    """

    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions that the model may call."""
    prompt: str | None = None
    """A bare prompt instead of messages; no template is applied."""
    tokens: OmniTokensPrompt | None = None
    drawing_prompt: OmniTokensPrompt | None = None
    """A bare prompt as a user's message: what is read where only a picture is asked for."""
    template: TemplateOptions | None = None
    """How the chat template is applied; None: plainly."""


@dataclass(frozen=True, slots=True, eq=False)
class SpeechInput:
    """One clip for a stage that transcribes: mono samples at the rate of its model. Always complete."""

    samples: np.ndarray
    options: TranscriptionOptions


@dataclass(frozen=True, slots=True)
class LinkedInput:
    """In place of a first input: it comes from a stage in the same process, over an edge that is folded there."""


StagePayloadIn = (
    ARInput | CodecInput | DiffusionInput | Condition | Latents | ModuleInput | ChatInput | SpeechInput | LinkedInput
)
StageFeed = SideRows | CodecFrames | Latents | ModuleInput


@dataclass(frozen=True, slots=True)
class LinkedStage:
    """A stage that will get its input from the one that this goes to, in the same process."""

    name: str
    params: StageParams
    emit_hidden: bool = False


@dataclass(frozen=True, slots=True)
class StageInput:
    """A request as one stage sees it."""

    info: RequestInfo
    params: StageParams
    payload: StagePayloadIn
    emit_hidden: bool = False
    """Someone downstream reads this stage's hidden rows."""
    linked: tuple[LinkedStage, ...] = ()
    """Where stages run in another process: those that follow this one there, in graph order."""


# ------------------------------------------------------------------------------------------- stage outputs


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    text: str = ""
    spelling: bytes = b""
    """The token's own bytes; `text` cannot show one that is part of a character."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and the likeliest alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@record
class TokenChunk:
    """Tokens sampled in a step, the text they completed, and the hidden rows computed since the last chunk.

    `hidden` holds one row for each *computed* token (prompt tokens first, then generated tokens once they have
    been fed back), `hidden_start` is the index of its first row in the sequence. `prompt` rides on the first
    chunk only.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: torch.Tensor | None = None
    hidden_start: int = 0
    prompt: ARInput | None = None
    ended_by: int | None = None
    """The end token, when one ended the answer; it is the last of `token_ids`."""
    stop_reason: int | str | None = None
    """The stop token or stop string of the request's own that ended the answer."""
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache; on one chunk of an answer only."""
    prompt_tokens: int = 0
    """Of the prompt, where the stage counted them first; on one chunk of a request only."""
    unlisted_tokens: int = 0
    """Tokens generated beside all `token_ids`: a server may tell their number alone."""
    frames: tuple[tuple[int, ...], ...] = ()
    """From a stage with a code predictor: for each of `token_ids` all codes of its frame, the token first."""


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """Samples, float32 in [-1, 1]: mono `[n]`, or several channels `[n, channels]`."""

    samples: np.ndarray
    sample_rate: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Denoising steps that a request has done, of those it needs."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True, eq=False)
class ImageChunk:
    """One picture, `uint8 [h, w, 3]`: picture `index` of the request's n."""

    pixels: np.ndarray
    index: int = 0
    preview: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class VideoChunk:
    """One video, `uint8 [frames, h, w, 3]`: video `index` of the request's n."""

    frames: np.ndarray
    fps: float
    index: int = 0
    preview: bool = False
    seed: int | None = None
    audio: AudioChunk | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModuleOutput:
    """What a one-shot module gave: named arrays, a text, or the prompt of the language model behind it."""

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    text: str = ""
    prompt: ARInput | ChatInput | None = None
    """Tokens; a conversation of text where the language model behind it has the tokenizer."""


ChunkPayload = (
    TokenChunk | AudioChunk | Condition | Latents | Progress | ImageChunk | VideoChunk | ModuleOutput | Transcript
)


@record
class StageChunk:
    """A piece of a stage's output for one request. For each `index`, the chunk that carries `finish` is the last.

    A chunk with neither payload nor finish says that the stage ran its first step on the request at `time`.
    """

    request_id: str
    stage: str
    payload: ChunkPayload | None = None
    index: int = 0
    """Which of the request's `n` answers."""
    finish: FinishReason | None = None
    error: OmniError | None = None
    time: float = field(default_factory=time.monotonic)
