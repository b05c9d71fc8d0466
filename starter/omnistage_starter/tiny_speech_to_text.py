"""Tiny random speech recognition networks with the files, inputs and outputs of Moonshine.

For `omnistage tiny` and for tests. With a `script` they give those words for every clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from omnistage.core.errors import MissingDependencyError
from omnistage_starter.speech_to_text import DECODER, ENCODER, TOKENIZER

_ENGLISH = "the a cat dog sun sea tree bird red blue two three sees hears says runs in on and with"
WORDS: Final = tuple(_ENGLISH.split())
_SPECIAL = ("<unk>", "<s>", "</s>")
_WIDTH, _HEADS, _SIZE, _LAYERS = 16, 2, 8, 2
_FRAME, _HOP = 768, 384
"""Samples of a frame, and samples between frames: Moonshine's hop."""
_POSITIONS = 64
"""Positions with their own row of logits; later ones use the last."""


def write_speech_to_text(
    folder: Path, *, seed: int = 0, words: Sequence[str] = WORDS, script: Sequence[str] | None = None
) -> None:
    """Write encoder.onnx, decoder.onnx and tokenizer.json to `folder`.

    `script` lists the tokens for every clip, in order: of `words`, or "</s>". The last one repeats, so that a script
    without "</s>" never ends by itself.
    """
    _onnx()  # before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *words))}
    rng = np.random.default_rng(seed)
    _write_tokenizer(folder / TOKENIZER, vocabulary)
    _write_encoder(folder / ENCODER, rng)
    positions = rng.normal(size=(_POSITIONS, len(vocabulary))).astype(np.float32)
    projection = rng.normal(size=(_WIDTH, len(vocabulary))).astype(np.float32)
    if script is not None:
        positions = np.eye(len(vocabulary), dtype=np.float32)[[vocabulary[token] for token in script]]
        projection[:] = 0
    _write_decoder(folder / DECODER, positions, projection)


def _write_tokenizer(path: Path, vocabulary: dict[str, int]) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(path))


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise MissingDependencyError("writing the speech recognition networks needs onnx: pip install onnx") from error
    return onnx


def _write_encoder(path: Path, rng: np.random.Generator) -> None:
    """Samples `[batch, n]` to frames `[batch, frames, width]`: one convolution."""
    node, tensor = _onnx().helper.make_node, _tensor
    weight = rng.normal(size=(_WIDTH, 1, _FRAME)).astype(np.float32) / np.sqrt(_FRAME)
    nodes = [
        node("Unsqueeze", ["input_values", "one"], ["row"]),
        node("Conv", ["row", "weight"], ["seen"], strides=[_HOP]),
        node("Tanh", ["seen"], ["bounded"]),
        node("Transpose", ["bounded"], ["last_hidden_state"], perm=[0, 2, 1]),
    ]
    inputs = [_value("input_values", "FLOAT", ["batch_size", "num_samples"])]
    outputs = [_value("last_hidden_state", "FLOAT", ["batch_size", "frames", _WIDTH])]
    _save(path, nodes, inputs, outputs, [tensor("one", np.array([1])), tensor("weight", weight.astype(np.float32))])


def _write_decoder(path: Path, positions: np.ndarray[Any, Any], projection: np.ndarray[Any, Any]) -> None:
    """Logits of the next token: its position's row and the mean of the frames. Keys and values grow as Moonshine's."""
    onnx = _onnx()
    node = onnx.helper.make_node
    inputs = [
        _value("input_ids", "INT64", ["batch_size", "tokens"]),
        _value("encoder_hidden_states", "FLOAT", ["batch_size", "frames", _WIDTH]),
    ]
    outputs = [_value("logits", "FLOAT", ["batch_size", "tokens", positions.shape[1]])]
    weights = [
        _tensor("positions", positions),
        _tensor("projection", projection),
        _tensor("one", np.array([1])),
        _tensor("two", np.array([2])),
        _tensor("last_position", np.array([len(positions) - 1])),
        _tensor("by_head", np.array([0, 0, _HEADS, _SIZE])),
    ]
    # Keys and values of the frames, as [batch, heads, frames, size].
    nodes = [
        node("Reshape", ["encoder_hidden_states", "by_head"], ["split_heads"]),
        node("Transpose", ["split_heads"], ["encoder_heads"], perm=[0, 2, 1, 3]),
        node("Cast", ["input_ids"], ["ids"], to=onnx.TensorProto.FLOAT),
        node("Unsqueeze", ["ids", "one"], ["ids_row"]),
        node("Unsqueeze", ["ids_row", "last_axis"], ["ids_rows"]),
        node("Expand", ["ids_rows", "head_shape"], ["new"]),
    ]
    weights += [_tensor("last_axis", np.array([3])), _tensor("head_shape", np.array([1, _HEADS, 1, _SIZE]))]
    for layer in range(_LAYERS):
        for kind in ("decoder", "encoder"):
            for part in ("key", "value"):
                name = f"{layer}.{kind}.{part}"
                past, present = f"past_key_values.{name}", f"present.{name}"
                inputs.append(_value(past, "FLOAT", ["batch_size", _HEADS, f"past_{kind}_length", _SIZE]))
                outputs.append(_value(present, "FLOAT", ["batch_size", _HEADS, f"{kind}_length", _SIZE]))
                if kind == "decoder":
                    nodes.append(node("Concat", [past, "new"], [present], axis=2))
                else:
                    nodes.append(_either("use_cache_branch", past, "encoder_heads", present))
    inputs.append(_value("use_cache_branch", "BOOL", [1]))
    nodes += [
        node("Shape", ["past_key_values.0.decoder.key"], ["lengths"]),
        node("Gather", ["lengths", "two"], ["position"]),
        node("Min", ["position", "last_position"], ["row"]),
        node("Gather", ["positions", "row"], ["position_logits"]),
        node("ReduceMean", ["encoder_hidden_states", "one"], ["frame_mean"], keepdims=1),
        node("MatMul", ["frame_mean", "projection"], ["frame_logits"]),
        node("Add", ["frame_logits", "position_logits"], ["logits"]),
    ]
    _save(path, nodes, inputs, outputs, weights)


def _either(condition: str, if_true: str, if_false: str, output: str) -> Any:
    """An If node that passes one of two outer values on, like the branches of Moonshine's merged file."""
    helper = _onnx().helper
    branches = {}
    for branch, source in (("then_branch", if_true), ("else_branch", if_false)):
        name = f"{output}.{branch}"
        passed = helper.make_node("Identity", [source], [name])
        branches[branch] = helper.make_graph([passed], name, [], [_value(name, "FLOAT", None)])
    return helper.make_node("If", [condition], [output], **branches)


def _value(name: str, kind: str, shape: Sequence[int | str] | None) -> Any:
    onnx = _onnx()
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DataType.Value(kind), shape)


def _tensor(name: str, array: np.ndarray[Any, Any]) -> Any:
    return _onnx().numpy_helper.from_array(array, name)


def _save(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any]) -> None:
    onnx = _onnx()
    graph = onnx.helper.make_graph(nodes, path.stem, inputs, outputs, weights)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())
