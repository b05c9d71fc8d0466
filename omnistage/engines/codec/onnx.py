"""ONNX files on ONNX Runtime: `OnnxModule` for a component's own use, `onnx.module` for a stage by YAML alone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from omnistage.config.arrays import BATCH, ArraySpec, are_batched, format_specs, parse_specs
from omnistage.config.schema import ONNX_MODULE, CodecStageConfig, ModuleAudio, ModuleConfig
from omnistage.core.errors import (
    BridgeError,
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    MissingDependencyError,
    StageError,
)
from omnistage.core.params import CodecParams
from omnistage.core.types import AudioChunk, ModuleInput, ModuleOutput, RequestInfo, StageChunk
from omnistage.engines.codec.module import Job, ModuleComponent, ModulePayload
from omnistage.engines.codec.onnx_external_data import check_external_files

if TYPE_CHECKING:
    import onnxruntime

    from omnistage.core.family import BridgeResult, LoadContext

_DTYPES = {
    "tensor(bool)": "bool",
    "tensor(float16)": "float16",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    **{f"tensor({name})": name for size in (8, 16, 32, 64) for name in (f"int{size}", f"uint{size}")},
}
_MAX_REASON = 200


class OnnxModule:
    """An ONNX file on ONNX Runtime's CPU provider, with declared inputs and outputs.

    `inputs` and `outputs` map names to declarations like `float32[batch, samples]`: a number is a fixed dimension, a
    name a free one, equal names mean equal sizes. Every input of the file must be declared; outputs that are not
    declared are not computed. `threads` is how many CPU threads it uses; None: as many as there are cores.

    Raises `CheckpointError` where the file is broken, refers to files outside its folder or is not as declared, and
    `MissingDependencyError` without ONNX Runtime. `run` and `check` are thread-safe.
    """

    def __init__(
        self, path: Path, *, inputs: Mapping[str, str], outputs: Mapping[str, str], threads: int | None = None
    ) -> None:
        self.path = path
        try:
            self.inputs, self.outputs = parse_specs(inputs), parse_specs(outputs)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not self.outputs:
            raise ConfigError(f"no output of {path.name} is declared; declare at least one", param="outputs")
        if threads is not None and threads < 1:
            raise ConfigError(f"{threads} threads cannot run {path.name}; use 1 or more", param="threads")
        self._session = _session(path, threads)
        _check_declared(path, "input", self.inputs, self._session.get_inputs(), whole=True)
        _check_declared(path, "output", self.outputs, self._session.get_outputs(), whole=False)

    @property
    def is_batched(self) -> bool:
        """Whether pieces of work can be put together along the first dimension of every array."""
        return are_batched((*self.inputs.values(), *self.outputs.values()))

    def check(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        """The sizes of named dimensions; raises `InvalidRequestError` unless the arrays are those that are declared."""
        if missing := [name for name in self.inputs if name not in arrays]:
            raise InvalidRequestError(
                f"is missing; give {format_specs(self.inputs)} for {self.path.name}", param=f"arrays.{missing[0]}"
            )
        if unknown := [name for name in arrays if name not in self.inputs]:
            raise InvalidRequestError(
                f"is not an input of {self.path.name}; it takes {format_specs(self.inputs)}",
                param=f"arrays.{unknown[0]}",
            )
        sizes: dict[str, int] = {}
        for name, spec in self.inputs.items():
            if (problem := spec.problem(arrays[name], sizes)) is not None:
                raise InvalidRequestError(problem, param=f"arrays.{name}")
        return sizes

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The declared outputs by name. Arrays that are not as declared raise `InvalidRequestError` before it runs."""
        sizes = self.check(arrays)
        try:
            results: list[np.ndarray] = self._session.run(list(self.outputs), dict(arrays))
        except MemoryError:
            raise
        except Exception as error:  # ONNX Runtime's errors have no base of their own, and name paths of its sources
            raise StageError(f"{self.path.name} failed on its input ({type(error).__name__})") from error
        outputs = dict(zip(self.outputs, results, strict=True))
        for name, spec in self.outputs.items():
            if (problem := spec.problem(outputs[name], sizes)) is not None:
                raise StageError(f"output {name} of {self.path.name} {problem}; correct its declaration")
        return outputs


def _session(path: Path, threads: int | None) -> onnxruntime.InferenceSession:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            f"{path.name} is an ONNX file and needs ONNX Runtime: pip install 'omnistage[onnx]'"
        ) from error
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}; the checkpoint is incomplete, fetch it again")
    check_external_files(path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised; its log would repeat it, with paths
    if threads is not None:
        options.intra_op_num_threads = threads
    # Threads that spin while they wait would take the cores from the other stages.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except MemoryError:
        raise
    except Exception as error:  # ONNX Runtime's errors have no base of their own
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise CheckpointError(f"{path} cannot be loaded by ONNX Runtime; fetch it again ({reason})") from error


# ------------------------------------------------------------------------------------- against the declaration


class _NodeArg(Protocol):
    """An input or output as ONNX Runtime describes it."""

    name: str
    type: str
    shape: list[int | str | None]


def _check_declared(
    path: Path, kind: str, declared: Mapping[str, ArraySpec], nodes: Sequence[_NodeArg], *, whole: bool
) -> None:
    """Raise unless the file's arrays are as declared; with `whole` it may have no others."""
    by_name = {node.name: node for node in nodes}
    wrong = [name for name, spec in declared.items() if name not in by_name or not _agrees(spec, by_name[name])]
    wrong += [name for name in by_name if whole and name not in declared]
    if wrong:
        actual = format_specs({name: _described(node) for name, node in by_name.items()})
        raise CheckpointError(
            f"{kind} {wrong[0]!r} of {path} is not as declared: declared are {format_specs(declared)}, "
            f"the file has {actual}; correct the declaration or use another file"
        )


def _agrees(spec: ArraySpec, node: _NodeArg) -> bool:
    """Whether all that is declared can be: a free dimension of the file may be declared fixed, never the other way."""
    if _DTYPES.get(node.type) != spec.dtype:
        return False
    if not node.shape:  # a scalar, or a file that does not say
        return True
    if len(node.shape) != len(spec.dims):
        return False
    return all(not isinstance(size, int) or size == dim for size, dim in zip(node.shape, spec.dims, strict=True))


def _described(node: _NodeArg) -> str:
    dims = ", ".join("?" if dim is None else str(dim) for dim in node.shape)
    return f"{_DTYPES.get(node.type, node.type)}[{dims}]"


# ----------------------------------------------------------------------------------------- the general component


class OnnxComponent(ModuleComponent):
    """`onnx.module`: what a stage's `module` section describes.

    Pieces of equal shapes run together where every array has `batch` first. Each gives an `AudioChunk` where an
    output is declared as audio, else a `ModuleOutput` of all declared outputs.
    """

    def __init__(self, module: OnnxModule, *, audio: ModuleAudio | None = None, max_batch: int = 1) -> None:
        self.module = module
        self.audio = audio
        self.max_batch = max_batch if module.is_batched else 1

    def check(self, info: RequestInfo, params: CodecParams, payload: ModulePayload) -> None:
        piece = _piece(payload)
        if piece.text:
            raise InvalidRequestError(f"{self.module.path.name} takes arrays, not a text", param="text")
        sizes = self.module.check(piece.arrays)
        if self.audio is not None and sizes.get(BATCH, 1) != 1:
            raise InvalidRequestError(
                f"{BATCH} is {sizes[BATCH]}, but audio is generated one piece at a time; set it to 1", param="arrays"
            )

    def group(self, job: Job) -> Hashable:
        return tuple(_piece(job.payload).arrays[name].shape for name in self.module.inputs)

    def run(self, jobs: Sequence[Job]) -> list[AudioChunk | ModuleOutput]:
        pieces = [_piece(job.payload).arrays for job in jobs]
        if len(pieces) == 1:
            return [self._chunk(self.module.run(pieces[0]))]
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in self.module.inputs}
        outputs = self.module.run(joined)
        for name, array in outputs.items():
            if len(array) != len(joined[next(iter(joined))]):
                raise StageError(f"output {name} of {self.module.path.name} has {len(array)} rows")
        parts = {name: np.split(array, len(pieces)) for name, array in outputs.items()}
        return [self._chunk({name: rows[i] for name, rows in parts.items()}) for i in range(len(pieces))]

    def _chunk(self, outputs: dict[str, np.ndarray]) -> AudioChunk | ModuleOutput:
        if self.audio is None:
            return ModuleOutput(outputs)
        samples = outputs[self.audio.output]
        scale = 1 / 32768 if samples.dtype == np.int16 else 1
        return AudioChunk(np.clip(samples.reshape(-1).astype(np.float32) * scale, -1, 1), self.audio.sample_rate)


def _piece(payload: ModulePayload) -> ModuleInput:
    if not isinstance(payload, ModuleInput):
        raise InvalidRequestError(f"an ONNX module takes a ModuleInput, not {type(payload).__name__}")
    return payload


def load(context: LoadContext) -> OnnxComponent:
    """The factory of `onnx.module`."""
    stage = context.stage
    if not isinstance(stage, CodecStageConfig) or stage.module is None:
        raise ConfigError(
            "needs `engine: codec` and a module section with file, inputs and outputs",
            param=f"pipeline.stages.{context.stage_name}",
        )
    config = stage.module
    module = OnnxModule(
        module_file(context.model.folder, config),
        inputs=config.inputs,
        outputs=config.outputs,
        threads=config.threads or context.torch_threads,
    )
    return OnnxComponent(module, audio=config.audio, max_batch=config.max_batch)


def module_file(folder: Path, config: ModuleConfig) -> Path:
    """The module's file, which must be inside the model's folder."""
    path = folder / config.file
    # The file itself may be a link (the hub's cache is made of them); its place may not be elsewhere.
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{config.file} is not inside {folder}; put the file there")
    return path


SAMPLES = "samples"


def arrays2module(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """The bridge `onnx.arrays`: a module's output arrays are the next one's input arrays, piece by piece.

    A piece of audio is an array too: `samples`, float32 `[1, n]`.
    """
    final, payload = chunk.finish is not None, chunk.payload
    if isinstance(payload, ModuleOutput):
        return state, [ModuleInput(payload.arrays, final=final)]
    if isinstance(payload, AudioChunk):
        return state, [ModuleInput({SAMPLES: np.asarray(payload.samples, np.float32)[None]}, final=final)]
    if payload is not None:
        raise BridgeError(
            f"stage {chunk.stage!r} outputs a {type(payload).__name__}, and onnx.arrays passes on arrays and audio "
            "only; write a bridge for it"
        )
    return state, [ModuleInput(final=True)] if final else []


COMPONENTS = {ONNX_MODULE: load}
BRIDGES = {"onnx.arrays": arrays2module}
