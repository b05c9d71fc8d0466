"""The starter's ears: Moonshine's two ONNX files and the loop that turns what they heard into words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.core.errors import CheckpointError, LimitExceededError, MediaError, MissingDependencyError
from omnistage.engines.codec.onnx_external_data import check_external_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RATE: Final = 16_000
ENCODER, DECODER, TOKENIZER = "encoder.onnx", "decoder.onnx", "tokenizer.json"
SHORTEST, LONGEST = 0.1, 600.0
"""Seconds of a clip. A shorter one holds no word; a longer one is refused."""
_PIECE = 15.0
_PIECE_LEAST = 8.0
"""Seconds that the network hears at once: a longer clip is cut at its quietest point between the two."""
_TOKENS_PER_SECOND = 6.5
"""Moonshine's own bound: nobody speaks faster, so more tokens would be invented ones."""
_SPARE_TOKENS = 4
_SILENCE = 1e-4
"""A clip whose loudest sample is below this holds nothing to hear (-80 dB)."""
_LOOP_PERIOD, _LOOP_REPEATS, _LOOP_TOKENS = 12, 6, 10
"""A block of up to so many tokens, said so many times and so long in all: the network runs in circles."""

Samples = NDArray[np.float32]


class Transcriber:
    """Speech to text. `transcribe` may be called from any thread, and the same sound gives the same words.

    `folder` holds encoder.onnx, decoder.onnx and tokenizer.json; a missing, broken or different file is a
    CheckpointError that names it. `threads` is how many cores one call may use.
    """

    rate: Final = RATE
    seconds: Final = (SHORTEST, LONGEST)
    """The shortest clip that can hold a word, and the longest that is taken."""

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
        """The words in `samples` (mono, 16 kHz, in [-1, 1]); of silence, and of what is too short, an empty string.

        Before every piece it is asked whether it is `over`; pieces from there on are left out.
        """
        check_clip(samples)
        heard = itertools.takewhile(lambda _: over is None or not over(), split(samples))
        return join(self.words(piece) for piece in heard)

    def words(self, samples: Samples) -> str:
        """Those of one piece, as `split` gives them: what takes long is a call for each."""
        samples = np.ascontiguousarray(samples, np.float32)
        if len(samples) < SHORTEST * RATE or float(np.abs(samples).max()) < _SILENCE:
            return ""
        most = int(len(samples) / RATE * _TOKENS_PER_SECOND) + _SPARE_TOKENS
        tokens = self._decoder.greedy(self._encoder(samples), self._start, self._end, most)
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text.strip()


def check_clip(samples: Samples) -> None:
    """Refuse what cannot be heard, before any work."""
    if samples.ndim != 1:
        raise MediaError(f"a clip is one row of samples, not an array of shape {samples.shape}: mix it down to mono")
    if len(samples) > LONGEST * RATE:
        raise LimitExceededError(
            f"the clip lasts {len(samples) / RATE:.1f} s and at most {LONGEST:.0f} s are heard: send it in parts"
        )
    if not np.isfinite(samples).all():
        raise MediaError("the clip holds samples that are not finite numbers: send it again, decoded without errors")


def split(samples: Samples) -> Iterator[Samples]:
    """Pieces of at most 15 s that together are `samples`, cut where it is quietest so that no word is cut in two."""
    while len(samples) > _PIECE * RATE:
        cut = _quietest(samples, int(_PIECE_LEAST * RATE), int(_PIECE * RATE))
        yield samples[:cut]
        samples = samples[cut:]
    yield samples


def join(words: Iterable[str]) -> str:
    """The words of all pieces of a clip."""
    return " ".join(piece for piece in words if piece)


def _quietest(samples: Samples, start: int, end: int, window: int = RATE // 5) -> int:
    """The middle of the quietest 0.2 s in `samples[start:end]`; the last of equals, so that pieces are few."""
    power = np.cumsum(np.square(samples[start:end], dtype=np.float64))
    energy = power[window:] - power[:-window]
    return end - window // 2 - int(np.argmin(energy[::-1]))


def loop_start(tokens: Sequence[int]) -> int | None:
    """How many tokens to keep where the last ones say a block over and over (it stays once); None where not."""
    for period in range(1, _LOOP_PERIOD + 1):
        repeats = max(_LOOP_REPEATS, -(-_LOOP_TOKENS // period))
        tail = tokens[-period * repeats :]
        if len(tail) == period * repeats and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return len(tokens) - len(tail) + period
    return None


class _Encoder:
    """Sound to what was heard: [samples] to [1, frames, width]."""

    def __init__(self, path: Path, threads: int) -> None:
        self._session = _session(path, threads)
        inputs, outputs = _described(self._session.get_inputs()), _described(self._session.get_outputs())
        _expect(path, "takes", inputs, {"input_values": ("float", 2)})
        _expect(path, "gives", outputs, {"last_hidden_state": ("float", 3)})
        self.width = outputs["last_hidden_state"].shape[2]

    def __call__(self, samples: Samples) -> Samples:
        heard: Samples = self._session.run(["last_hidden_state"], {"input_values": samples[None]})[0]
        return heard


class _Decoder:
    """What was heard to tokens, one at a time. The file remembers nothing: keys and values are handed in and out."""

    def __init__(self, path: Path, threads: int, *, width: int | str | None) -> None:
        self._session = _session(path, threads)
        inputs, outputs = _described(self._session.get_inputs()), _described(self._session.get_outputs())
        past = {
            name: name.replace("past_key_values", "present") for name in inputs if name.startswith("past_key_values.")
        }
        fixed = {"input_ids": ("int64", 2), "encoder_hidden_states": ("float", 3), "use_cache_branch": ("bool", 1)}
        _expect(path, "takes", inputs, fixed | dict.fromkeys(past, ("float", 4)))
        _expect(path, "gives", outputs, {"logits": ("float", 3)} | dict.fromkeys(past.values(), ("float", 4)))
        if not past or inputs["encoder_hidden_states"].shape[2] != width:
            raise CheckpointError(
                f"{path} does not go with {ENCODER} beside it: take both from one release of Moonshine"
            )
        self._empty = {name: _empty(path, inputs[name].shape) for name in past}
        self._all = past
        self._growing = {name: present for name, present in past.items() if ".decoder." in name}

    def greedy(self, heard: Samples, start: int, end: int, most: int) -> list[int]:
        """The likeliest tokens up to `end`, at most `most`, and none of a circle that it runs in."""
        past = dict(self._empty)
        tokens: list[int] = []
        kept = self._all
        for number in range(most):
            inputs = {
                "input_ids": np.array([[tokens[-1] if tokens else start]], np.int64),
                "encoder_hidden_states": heard,
                "use_cache_branch": np.array([number > 0]),
            }
            logits, *given = self._session.run(["logits", *kept.values()], inputs | past)
            token = int(logits[0, -1].argmax())
            if token == end:
                break
            tokens.append(token)
            if (keep := loop_start(tokens)) is not None:
                return tokens[:keep]
            past |= dict(zip(kept, given, strict=True))
            # The keys and values of what was heard come from the first call and stay; only the tokens' own grow.
            kept = self._growing
        return tokens


def _session(path: Path, threads: int) -> Any:
    try:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as failures
    except ImportError as error:
        raise MissingDependencyError("hearing needs ONNX Runtime: pip install 'omnistage[starter]'") from error
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: `omnistage pull starter` gets it")
    check_external_files(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # its failures come as exceptions
    # The table of tokens is stored in 8 bits: widened once when loaded, and not again for every token (40% faster).
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # Threads that spin while they wait would take the cores from the other stages.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except _load_failures(failures) as error:
        raise CheckpointError(
            f"{path} is no network that ONNX Runtime can load: remove it and pull the starter again"
        ) from error


def _load_failures(runtime: Any) -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises over a file that it cannot load; they have no class in common but Exception."""
    names = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented", "RuntimeException")
    return tuple(getattr(runtime, name) for name in names)


class _Described(Protocol):
    """An input or output as ONNX Runtime describes it."""

    name: str
    type: str
    shape: Sequence[int | str | None]


def _described(these: Iterable[_Described]) -> dict[str, _Described]:
    return {one.name: one for one in these}


def _expect(path: Path, verb: str, found: dict[str, _Described], wanted: dict[str, tuple[str, int]]) -> None:
    """`found` has the names of `wanted` and no others, each of that type and with that many dimensions."""
    held = {name: (one.type, len(one.shape)) for name, one in found.items()}
    asked = {name: (f"tensor({kind})", rank) for name, (kind, rank) in wanted.items()}
    different = sorted(name for name in held.keys() | asked.keys() if held.get(name) != asked.get(name))
    if different:
        raise CheckpointError(
            f"{path} {verb} something else than Moonshine's file of that name ({', '.join(different[:4])}): "
            "remove it and pull the starter again"
        )


def _empty(path: Path, shape: Sequence[int | str | None]) -> Samples:
    """Keys or values [1, heads, 0, size] of nothing yet."""
    heads, size = shape[1], shape[3]
    if not isinstance(heads, int) or not isinstance(size, int):
        raise CheckpointError(f"{path} does not say how large its keys and values are: export it with fixed heads")
    return np.zeros((1, heads, 0, size), np.float32)


def _load_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise CheckpointError(f"{path} is missing: `omnistage pull starter` gets it")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself, nothing narrower
        raise CheckpointError(f"{path} is no tokenizer: remove it and pull the starter again") from error


def _special(tokenizer: Tokenizer, token: str, folder: Path) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise CheckpointError(f"{folder / TOKENIZER} has no token {token}: take the one that goes with Moonshine")
    return int(number)
