"""Whether the text of a clip is all that is said in it, as far as the model shows: whole, or an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omnistage.core.errors import UnclearSpeechError
from omnistage.core.transcripts import Transcript
from omnistage.media.vad import speech_spans, vad_available
from omnistage.models.speech_to_text.processor import SAMPLE_RATE

_SPEECH_BELOW = 0.2
"""Whisper's probability that nobody speaks, below which a window without a word is an error. It is near 0 for clear
speech, and above 0.6, from where on Whisper's own code leaves a window out, for silence. Music may be on either side:
where a speech detector is installed, it must hear somebody, too."""
_MIN_SPEECH_SECONDS = 0.25
"""Of the detector's; less is a click or a cough."""
_SILENCE = 1e-4
"""Samples whose peak is below this (-80 dB) are silent."""

Outcome = Transcript | UnclearSpeechError
"""What comes of a clip."""


def has_ended(ids: Sequence[int], config: Any) -> bool:
    """Whether a generated row ends with the model's own end, or the padding behind it, and not where it is cut."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return ends == [None] or not ids or ids[-1] in (*ends, config.pad_token_id)


def unfinished(count: int, where: str = "") -> UnclearSpeechError:
    return UnclearSpeechError(
        f"the text{where} finds no end within the {count} tokens that the model gives: send shorter clips; unclear "
        "speech and noise can make a model repeat itself",
        param="audio",
    )


def window_frames(whisper: Any) -> int:
    """Of features, in a window."""
    encoder = whisper.model.encoder
    frames: int = encoder.conv1.stride[0] * encoder.conv2.stride[0] * whisper.config.max_source_positions
    return frames


@dataclass(frozen=True, slots=True)
class WindowLoss:
    """What Whisper's `generate` leaves out of a clip.

    A window whose text finds no end is cut where the model holds no more; only from a pair of timestamps on does the
    next window go over it again. A window may also have no text, though the model hears somebody.
    """

    model: Any
    extractor: Any
    text_tokens: Callable[..., Sequence[int]]
    decode: Callable[[Sequence[int]], str]

    def __call__(self, samples: np.ndarray, features: torch.Tensor, segments: Any) -> UnclearSpeechError | None:
        """Why the segments are not the whole of the clip; None where they are."""
        for _, group in itertools.groupby(segments, lambda segment: id(segment["result"])):
            window = list(group)
            start, end = max(0.0, float(window[0]["start"])), float(window[-1]["end"])
            result = window[0]["result"]
            row = result["sequences"] if isinstance(result, dict) else result
            tokens = row[window[0]["idxs"][0] :].tolist()
            whole = len(self.text_tokens(tokens, ended=True)) == len(tokens)
            if whole and not has_ended(tokens, self.model.generation_config):
                return unfinished(len(tokens), f" between {start:.1f} and {end:.1f} s")
            text = self.decode([token for segment in window for token in segment["tokens"].tolist()])
            if not text.strip() and self._speaks(samples, features, start):
                return UnclearSpeechError(
                    f"from {start:.1f} s on the model gives no words for what it takes for speech: speak more clearly, "
                    "or send these seconds as a clip",
                    param="audio",
                )
        return None

    def _speaks(self, samples: np.ndarray, features: torch.Tensor, start: float) -> bool:
        """Whether somebody is heard in the window from there, by the model's first token."""
        frames, hop = window_frames(self.model), self.extractor.hop_length
        first = round(start * SAMPLE_RATE / hop)
        heard = samples[first * hop : (first + frames) * hop]
        if np.abs(heard).max(initial=0.0) < _SILENCE:
            return False
        window = features[:, first : first + frames]
        window = torch.nn.functional.pad(window, (0, frames - window.shape[-1]))
        config = self.model.generation_config
        begin = torch.tensor([[config.decoder_start_token_id]], device=features.device)
        logits = self.model(input_features=window[None], decoder_input_ids=begin).logits[0, -1].float()
        if float(logits.softmax(-1)[config.no_timestamps_token_id - 1]) >= _SPEECH_BELOW:
            return False
        return not vad_available() or _speech_seconds(heard) >= _MIN_SPEECH_SECONDS


def _speech_seconds(samples: np.ndarray) -> float:
    """How much of it is speech, for the detector, which knows music, noise and silence from it."""
    return sum(end - start for start, end in speech_spans(np.ascontiguousarray(samples, np.float32))) / SAMPLE_RATE
