"""Speech to text: Moonshine's two ONNX files and the greedy decoding loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.core.errors import (
    CheckpointError,
    LimitExceededError,
    MediaError,
    MissingDependencyError,
    UnclearSpeechError,
)
from omnistage.engines.codec.onnx_external_data import check_external_files
from omnistage.media.vad import speech_spans

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE_RATE: Final = 16_000
ENCODER, DECODER, TOKENIZER = "encoder.onnx", "decoder.onnx", "tokenizer.json"
MIN_SECONDS, MAX_SECONDS = 0.1, 600.0
"""Of a clip. A shorter one gives no text; a longer one is refused."""
_MIN_PIECE_SECONDS, _MAX_PIECE_SECONDS = 8.0, 15.0
"""A longer clip is split at its quietest point between the two."""
_TOKENS_PER_SECOND = 6.5
"""Moonshine's own limit: speech is not faster, so more tokens would be hallucinated."""
_SPARE_TOKENS, _MORE_TOKENS = 4, 32
_MIN_PART_SECONDS = 1.5
"""What is said in a piece whose decoding gives too little, or finds no end, is sought in parts, down to this."""
_SILENCE = 1e-4
"""A clip whose peak is below this (-80 dB) is silent."""
_LEAD_SECONDS, _BEFORE_SECONDS = 0.5, 0.3
"""Of two seconds of quiet before the first word Moonshine makes an empty text: then it is given the clip from shortly
before the speech begins, where more than a lead lies before it."""
_MIN_SPEECH_SECONDS = 0.25
"""Less is a click or a cough, which needs no words."""
_LETTERS_PER_SECOND = 5
"""Of speech without its pauses. Slow speech has 8; where a text has fewer, the model left something out."""
_LOOP_PERIOD, _LOOP_REPEATS, _LOOP_TOKENS = 12, 6, 10
"""A loop: a block of at most 12 tokens that repeats 6 times or more, over at least 10 tokens."""

Samples = NDArray[np.float32]


class SpeechToText:
    """Deterministic transcription; `transcribe` may be called from any thread.

    `folder` holds encoder.onnx, decoder.onnx and tokenizer.json; a missing, broken or different file is a
    CheckpointError that names it. `threads` is the number of CPU threads of one call.
    """

    seconds: Final = (MIN_SECONDS, MAX_SECONDS)
    """The shortest and the longest clip."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self._tokenizer = _load_tokenizer(folder / TOKENIZER)
        self._encoder = _Encoder(folder / ENCODER, threads)
        self._decoder = _Decoder(folder / DECODER, threads, width=self._encoder.width)
        self._start, self._end = (_special(self._tokenizer, token, folder) for token in ("<s>", "</s>"))

    @staticmethod
    def present(folder: Path) -> bool:
        """Whether all of its files are in `folder`."""
        return all((folder / name).is_file() for name in (ENCODER, DECODER, TOKENIZER))

    def transcribe(self, samples: Samples, over: Callable[[], bool] | None = None) -> str:
        """The words in `samples` (mono, 16 kHz, in [-1, 1]); empty where nobody speaks or a clip is too short.

        Raises `UnclearSpeechError` where somebody speaks and the model gives no words for it.

        `over` is called before each piece; once it returns true, the remaining pieces are skipped.
        """
        check_clip(samples)
        pieces = itertools.takewhile(lambda _: over is None or not over(), split(samples))
        return join(self.transcribe_piece(piece) for piece in pieces)

    def transcribe_piece(self, samples: Samples) -> str:
        """The words in one piece of `split`."""
        samples = np.ascontiguousarray(samples, np.float32)
        if len(samples) < MIN_SECONDS * SAMPLE_RATE or float(np.abs(samples).max()) < _SILENCE:
            return ""
        return join(self._texts(samples))

    def _texts(self, samples: Samples) -> Iterator[str]:
        """The words in a piece, whole. Where decoding finds no end, or too few words for the speech that is detected,
        what is said stands in its parts; speech without a word is an error."""
        text, ended = self._text(samples)
        spans = speech_spans(samples)
        seconds = sum(end - start for start, end in spans) / SAMPLE_RATE
        if seconds < _MIN_SPEECH_SECONDS or (ended and _spoken_letters(text) >= _LETTERS_PER_SECOND * seconds):
            yield text
        elif text == "" and (quiet := spans[0][0] - int(_BEFORE_SECONDS * SAMPLE_RATE)) > _LEAD_SECONDS * SAMPLE_RATE:
            yield from self._texts(samples[quiet:])
        elif len(samples) >= 2 * _MIN_PART_SECONDS * SAMPLE_RATE:
            cut = _widest_pause(samples, spans)
            yield from self._texts(samples[:cut])
            yield from self._texts(samples[cut:])
        elif text == "":
            raise UnclearSpeechError(
                f"{seconds:.1f} s of speech were detected for which the model gives no words: speak more clearly, or "
                "send a shorter clip"
            )
        else:
            yield text

    def _text(self, samples: Samples) -> tuple[str, bool]:
        """What the model gives for samples, and whether its decoding found an end within what speech can have.

        What does not end even with many more tokens is no speech, as nobody speaks that fast: a loop stands once, and
        of anything else as much as speech can have.
        """
        hidden = self._encoder(samples)
        max_tokens = int(len(samples) / SAMPLE_RATE * _TOKENS_PER_SECOND) + _SPARE_TOKENS
        tokens: list[int] = []
        limit = max_tokens + _MORE_TOKENS
        if self._decoder.greedy(hidden, self._start, self._end, limit, tokens) is None:
            loops = (loop_start(tokens[:length]) for length in range(len(tokens) + 1))
            return self._words(tokens[: next((keep for keep in loops if keep is not None), max_tokens)]), False
        return self._words(tokens), len(tokens) < max_tokens

    def _words(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text.strip()


def check_clip(samples: Samples) -> None:
    """Raise for an array that is not a valid clip."""
    if samples.ndim != 1:
        raise MediaError(f"a clip must be one-dimensional, got an array of shape {samples.shape}: mix it down to mono")
    if (seconds := len(samples) / SAMPLE_RATE) > MAX_SECONDS:
        raise LimitExceededError(
            f"the clip lasts {seconds:.1f} s and at most {MAX_SECONDS:.0f} s are allowed: send it in parts"
        )
    if not np.isfinite(samples).all():
        raise MediaError("the clip has samples that are not finite numbers: check how it was decoded")


def split(samples: Samples) -> Iterator[Samples]:
    """Consecutive pieces of at most 15 s, split where it is quietest so that no word is cut."""
    while len(samples) > _MAX_PIECE_SECONDS * SAMPLE_RATE:
        cut = _quietest(samples, int(_MIN_PIECE_SECONDS * SAMPLE_RATE), int(_MAX_PIECE_SECONDS * SAMPLE_RATE))
        yield samples[:cut]
        samples = samples[cut:]
    yield samples


def join(texts: Iterable[str]) -> str:
    """The text of a clip from those of its pieces."""
    return " ".join(text for text in texts if text)


def _quietest(samples: Samples, start: int, end: int, window: int = SAMPLE_RATE // 5) -> int:
    """The middle of the quietest 0.2 s in `samples[start:end]`; the last of equal ones, for fewer pieces."""
    power = np.cumsum(np.square(samples[start:end], dtype=np.float64))
    energy = power[window:] - power[:-window]
    return end - window // 2 - int(np.argmin(energy[::-1]))


def _widest_pause(samples: Samples, spans: Sequence[tuple[int, int]]) -> int:
    """Where to cut a piece in two: in the middle of its widest pause, or of its quietest moment where it has none."""
    shortest = SAMPLE_RATE // 2
    pauses = [
        (start - end, (start + end) // 2)
        for (_, end), (start, _) in itertools.pairwise(spans)
        if shortest <= (start + end) // 2 <= len(samples) - shortest
    ]
    return max(pauses)[1] if pauses else _quietest(samples, len(samples) // 4, 3 * len(samples) // 4)


def _spoken_letters(text: str) -> int:
    """About how many letters are spoken; a digit counts as the letters of its name."""
    return sum(4 if letter.isdigit() else letter.isalpha() for letter in text)


def loop_start(tokens: Sequence[int]) -> int | None:
    """How many tokens to keep where the last ones repeat a block (which is kept once); None where they do not."""
    for period in range(1, _LOOP_PERIOD + 1):
        repeats = max(_LOOP_REPEATS, -(-_LOOP_TOKENS // period))
        tail = tokens[-period * repeats :]
        if len(tail) == period * repeats and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return len(tokens) - len(tail) + period
    return None


class _Encoder:
    """Samples `[n]` to hidden states `[1, frames, width]`."""

    def __init__(self, path: Path, threads: int) -> None:
        self._session = _session(path, threads)
        inputs, outputs = _by_name(self._session.get_inputs()), _by_name(self._session.get_outputs())
        _expect(path, "inputs", inputs, {"input_values": ("float", 2)})
        _expect(path, "outputs", outputs, {"last_hidden_state": ("float", 3)})
        self.width = outputs["last_hidden_state"].shape[2]

    def __call__(self, samples: Samples) -> Samples:
        hidden: Samples = self._session.run(["last_hidden_state"], {"input_values": samples[None]})[0]
        return hidden


class _Decoder:
    """Hidden states to tokens, one at a time. The network is stateless: keys and values are passed in and out."""

    def __init__(self, path: Path, threads: int, *, width: int | str | None) -> None:
        self._session = _session(path, threads)
        inputs, outputs = _by_name(self._session.get_inputs()), _by_name(self._session.get_outputs())
        past = {
            name: name.replace("past_key_values", "present") for name in inputs if name.startswith("past_key_values.")
        }
        fixed = {"input_ids": ("int64", 2), "encoder_hidden_states": ("float", 3), "use_cache_branch": ("bool", 1)}
        _expect(path, "inputs", inputs, fixed | dict.fromkeys(past, ("float", 4)))
        _expect(path, "outputs", outputs, {"logits": ("float", 3)} | dict.fromkeys(past.values(), ("float", 4)))
        if not past or inputs["encoder_hidden_states"].shape[2] != width:
            raise CheckpointError(f"{path} does not match {ENCODER} beside it: use both from one release of Moonshine")
        self._empty = {name: _empty(path, inputs[name].shape) for name in past}
        self._all = past
        self._growing = {name: present for name, present in past.items() if ".decoder." in name}

    def greedy(
        self, hidden: Samples, start: int, end: int, max_tokens: int, tokens: list[int] | None = None
    ) -> list[int] | None:
        """Greedy tokens up to `end`; None where it does not come within `max_tokens`. `tokens` collects them."""
        past = dict(self._empty)
        tokens = [] if tokens is None else tokens
        updated = self._all
        for number in range(max_tokens):
            inputs = {
                "input_ids": np.array([[tokens[-1] if tokens else start]], np.int64),
                "encoder_hidden_states": hidden,
                "use_cache_branch": np.array([number > 0]),
            }
            logits, *present = self._session.run(["logits", *updated.values()], inputs | past)
            token = int(logits[0, -1].argmax())
            if token == end:
                return tokens
            tokens.append(token)
            past |= dict(zip(updated, present, strict=True))
            # The encoder's keys and values come from the first call and stay; only the decoder's grow.
            updated = self._growing
        return None


def _session(path: Path, threads: int) -> Any:
    try:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as failures
    except ImportError as error:
        raise MissingDependencyError(
            "speech recognition needs ONNX Runtime: pip install 'omnistage[starter]'"
        ) from error
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: run `omnistage pull starter`")
    check_external_files(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # its errors are raised as exceptions
    # The embedding table is stored in 8 bits: dequantized once when loaded, not for every token (40% faster).
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # Threads that spin while they wait would take the cores from the other stages.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except _load_failures(failures) as error:
        raise CheckpointError(
            f"ONNX Runtime cannot load {path}: remove it and run `omnistage pull starter` again"
        ) from error


def _load_failures(runtime: Any) -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises for a file that it cannot load; the classes have no common base but Exception."""
    names = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented", "RuntimeException")
    return tuple(getattr(runtime, name) for name in names)


class _TensorInfo(Protocol):
    """An input or output as ONNX Runtime describes it."""

    name: str
    type: str
    shape: Sequence[int | str | None]


def _by_name(tensors: Iterable[_TensorInfo]) -> dict[str, _TensorInfo]:
    return {tensor.name: tensor for tensor in tensors}


def _expect(path: Path, kind: str, actual: dict[str, _TensorInfo], required: dict[str, tuple[str, int]]) -> None:
    """Raise unless `actual` has exactly the names of `required`, each with that type and number of dimensions."""
    types = {name: (tensor.type, len(tensor.shape)) for name, tensor in actual.items()}
    expected = {name: (f"tensor({dtype})", rank) for name, (dtype, rank) in required.items()}
    different = sorted(name for name in types.keys() | expected.keys() if types.get(name) != expected.get(name))
    if different:
        raise CheckpointError(
            f"the {kind} of {path} differ from Moonshine's ({', '.join(different[:4])}): remove it and run "
            "`omnistage pull starter` again"
        )


def _empty(path: Path, shape: Sequence[int | str | None]) -> Samples:
    """Empty keys or values `[1, heads, 0, size]`."""
    heads, size = shape[1], shape[3]
    if not isinstance(heads, int) or not isinstance(size, int):
        raise CheckpointError(f"{path} has keys and values of unknown size: export it with fixed heads")
    return np.zeros((1, heads, 0, size), np.float32)


def _load_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise CheckpointError(f"{path} is missing: run `omnistage pull starter`")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself, nothing narrower
        raise CheckpointError(f"{path} is not a tokenizer: remove it and run `omnistage pull starter` again") from error


def _special(tokenizer: Tokenizer, token: str, folder: Path) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise CheckpointError(f"{folder / TOKENIZER} has no token {token}: use the one of Moonshine")
    return int(number)
