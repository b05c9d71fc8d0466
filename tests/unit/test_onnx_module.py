"""ONNX files as stages: declarations against files and arrays, and pipelines of them by YAML alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.onnx_ml_pb2 import NodeProto

from omnistage.config import OmniEngineArgs
from omnistage.config.arrays import ArraySpec
from omnistage.config.schema import ModuleAudio, ModuleConfig
from omnistage.core.errors import (
    BridgeError,
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    MissingDependencyError,
    StageError,
)
from omnistage.core.family import Family
from omnistage.core.params import CodecParams
from omnistage.core.registry import Registry
from omnistage.core.types import (
    AudioChunk,
    FinishReason,
    Modality,
    ModuleInput,
    ModuleOutput,
    RequestInfo,
    StageChunk,
    TokenChunk,
)
from omnistage.engines.codec import Job, ModuleStage
from omnistage.engines.codec.onnx import BRIDGES, COMPONENTS, OnnxComponent, OnnxModule
from omnistage.engines.codec.onnx_external_data import check_external_files, external_files
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from omnistage.pipeline.build import EngineParts, build_parts

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Arrays = Mapping[str, tuple[int, Sequence[int | str | None] | None]]


def write(
    path: Path,
    nodes: Sequence[NodeProto],
    inputs: Arrays,
    outputs: Arrays,
    initializers: Sequence[TensorProto] = (),
) -> Path:
    values = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in arrays.items()]
        for arrays in (inputs, outputs)
    ]
    graph = helper.make_graph(list(nodes), "graph", *values, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def doubling(folder: Path, name: str = "double.onnx") -> Path:
    """y = x + x; x is [batch, n]."""
    node = helper.make_node("Add", ["x", "x"], ["y"])
    return write(folder / name, [node], {"x": (FLOAT, ["batch", "n"])}, {"y": (FLOAT, ["batch", "n"])})


def adding(folder: Path) -> Path:
    """y = x + z, and the number of dimensions of x besides."""
    nodes = [helper.make_node("Add", ["x", "z"], ["y"]), helper.make_node("Shape", ["x"], ["size"])]
    inputs: Arrays = {"x": (FLOAT, ["batch", 3]), "z": (FLOAT, ["batch", 3])}
    return write(folder / "add.onnx", nodes, inputs, {"y": (FLOAT, ["batch", 3]), "size": (INT64, [2])})


DOUBLE = {"inputs": {"x": "float32[batch, n]"}, "outputs": {"y": "float32[batch, n]"}}
ADD = {"inputs": {"x": "float32[batch, 3]", "z": "float32[batch, 3]"}, "outputs": {"y": "float32[batch, 3]"}}


def rows(*values: float, count: int = 1) -> np.ndarray:
    return np.array([values] * count, np.float32)


# --------------------------------------------------------------------------------------------- declarations


@pytest.mark.parametrize(
    ("text", "dtype", "dims"),
    [
        ("float32[batch, 80, frames]", "float32", ("batch", 80, "frames")),
        (" int64 [ ] ", "int64", ()),
        ("bool[1]", "bool", (1,)),
    ],
)
def test_declarations_are_a_type_and_dimensions(text: str, dtype: str, dims: tuple[int | str, ...]) -> None:
    assert ArraySpec.parse(text) == ArraySpec(dtype, dims)
    assert ArraySpec.parse(str(ArraySpec(dtype, dims))) == ArraySpec(dtype, dims)


@pytest.mark.parametrize(
    "text",
    [
        "float32",
        "float32[batch",
        "float99[2]",
        "object[2]",
        "float32[a-b]",
        "float32[0]",
        "float32[-1]",
        "float32[a,,b]",
    ],
)
def test_what_is_no_declaration_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it like|use one of"):
        ArraySpec.parse(text)


# ---------------------------------------------------------------------------------------------- the module


def test_a_module_gives_its_declared_outputs(tmp_path: Path) -> None:
    module = OnnxModule(adding(tmp_path), **ADD)
    outputs = module.run({"x": rows(1, 2, 3), "z": rows(10, 20, 30)})
    assert list(outputs) == ["y"]  # `size` is in the file and not declared
    assert outputs["y"].tolist() == [[11, 22, 33]]


@pytest.mark.parametrize(
    ("arrays", "param", "says"),
    [
        ({"x": rows(1, 2, 3)}, "arrays.z", "is missing"),
        ({"x": rows(1, 2, 3), "z": rows(1, 2, 3), "q": rows(1)}, "arrays.q", "is not an input"),
        ({"x": rows(1, 2, 3).astype(np.float64), "z": rows(1, 2, 3)}, "arrays.x", "got float64[1, 3]"),
        ({"x": rows(1, 2, 3)[0], "z": rows(1, 2, 3)}, "arrays.x", "got float32[3]"),
        ({"x": rows(1, 2), "z": rows(1, 2, 3)}, "arrays.x", "got float32[1, 2]"),
        ({"x": rows(1, 2, 3), "z": rows(1, 2, 3, count=2)}, "arrays.z", "batch = 1"),
        ({"x": [[1.0, 2.0, 3.0]], "z": rows(1, 2, 3)}, "arrays.x", "got list"),
    ],
)
def test_arrays_that_are_not_as_declared_are_refused_before_anything_runs(
    tmp_path: Path, arrays: dict[str, np.ndarray], param: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = OnnxModule(adding(tmp_path), **ADD)
    monkeypatch.setattr(module, "_session", None)  # whatever runs it fails otherwise
    for call in (module.check, module.run):
        with pytest.raises(InvalidRequestError) as caught:
            call(arrays)
        assert caught.value.param == param
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "outputs", "wrong"),
    [
        ({"x": "float32[batch, n]", "w": "float32[n]"}, DOUBLE["outputs"], "w"),
        ({"mel": "float32[batch, n]"}, DOUBLE["outputs"], "mel"),
        ({"x": "float16[batch, n]"}, DOUBLE["outputs"], "x"),
        ({"x": "float32[batch, n, 2]"}, DOUBLE["outputs"], "x"),
        (DOUBLE["inputs"], {"wave": "float32[batch, n]"}, "wave"),
        (DOUBLE["inputs"], {"y": "int64[batch, n]"}, "y"),
    ],
)
def test_a_file_that_is_not_as_declared_is_refused_with_both_named(
    tmp_path: Path, inputs: dict[str, str], outputs: dict[str, str], wrong: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        OnnxModule(doubling(tmp_path), inputs=inputs, outputs=outputs)
    message = str(caught.value)
    assert repr(wrong) in message
    own = "x: float32[batch, n]" if inputs is not DOUBLE["inputs"] else "y: float32[batch, n]"
    assert f"the file has {own}" in message
    declared = inputs if inputs is not DOUBLE["inputs"] else outputs
    assert all(f"{name}: {spec}" in message for name, spec in declared.items())


def test_an_input_of_the_file_that_is_not_declared_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="input 'z'"):
        OnnxModule(adding(tmp_path), inputs={"x": "float32[batch, 3]"}, outputs=ADD["outputs"])


def test_a_fixed_dimension_of_the_file_must_be_declared_fixed_and_a_free_one_may_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"float32\[batch, 3\]"):
        OnnxModule(adding(tmp_path), inputs={**ADD["inputs"], "x": "float32[batch, n]"}, outputs=ADD["outputs"])
    narrow = OnnxModule(doubling(tmp_path), inputs={"x": "float32[1, 4]"}, outputs={"y": "float32[1, 4]"})
    assert narrow.run({"x": rows(1, 2, 3, 4)})["y"].tolist() == [[2, 4, 6, 8]]
    with pytest.raises(InvalidRequestError):
        narrow.run({"x": rows(1, 2, 3)})


def test_a_file_that_does_not_say_its_ranks_is_held_to_its_declaration_when_it_runs(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.onnx", [helper.make_node("Neg", ["x"], ["y"])], {"x": (FLOAT, None)}, {"y": (FLOAT, None)}
    )
    module = OnnxModule(path, inputs={"x": "float32[n]"}, outputs={"y": "float32[n, 2]"})
    with pytest.raises(StageError, match=r"output y of a.onnx must be float32\[n, 2\], got float32\[2\]"):
        module.run({"x": np.ones(2, np.float32)})


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x3a\xff\xff\xff\xff\x0f", bytes(range(256))])
def test_a_broken_file_is_a_checkpoint_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"broken\.onnx"):
        OnnxModule(path, **DOUBLE)


def test_every_cut_of_a_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    whole = doubling(tmp_path).read_bytes()
    for length in range(1, len(whole), 7):
        path = tmp_path / "cut.onnx"
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            OnnxModule(path, **DOUBLE)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no away\.onnx"):
        OnnxModule(tmp_path / "away.onnx", **DOUBLE)


def test_a_declaration_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="x: 'floats' is not an array"):
        OnnxModule(doubling(tmp_path), inputs={"x": "floats"}, outputs=DOUBLE["outputs"])


def test_without_onnx_runtime_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'omnistage\[onnx\]'"):
        OnnxModule(doubling(tmp_path), **DOUBLE)


# ------------------------------------------------------------------------------------------ files elsewhere


def external(location: str) -> TensorProto:
    """A weight of four ones that lies in another file."""
    tensor = numpy_helper.from_array(np.ones(4, np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def branch(nodes: Sequence[NodeProto], initializers: Sequence[TensorProto] = ()) -> object:
    return helper.make_graph(
        list(nodes), "branch", [], [helper.make_tensor_value_info("b", FLOAT, ["batch", 4])], list(initializers)
    )


def as_initializer(path: Path, location: str) -> Path:
    return _adding_w(path, [], [external(location)])


def as_constant(path: Path, location: str) -> Path:
    return _adding_w(path, [helper.make_node("Constant", [], ["w"], value=external(location))], [])


def in_a_branch(path: Path, location: str) -> Path:
    then = branch([helper.make_node("Add", ["x", "w"], ["b"])], [external(location)])
    other = branch([helper.make_node("Identity", ["x"], ["b"])])
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    return _four(path, [node], [numpy_helper.from_array(np.array(True), "c")])


def _adding_w(path: Path, nodes: Sequence[NodeProto], initializers: Sequence[TensorProto]) -> Path:
    return _four(path, [*nodes, helper.make_node("Add", ["x", "w"], ["y"])], initializers)


def _four(path: Path, nodes: Sequence[NodeProto], initializers: Sequence[TensorProto]) -> Path:
    return write(path, nodes, {"x": (FLOAT, ["batch", 4])}, {"y": (FLOAT, ["batch", 4])}, initializers)


FOUR = {"inputs": {"x": "float32[batch, 4]"}, "outputs": {"y": "float32[batch, 4]"}}
Writer = Callable[[Path, str], Path]


@pytest.mark.parametrize("writer", [as_initializer, as_constant, in_a_branch])
def test_weights_in_a_file_of_the_folder_are_read(tmp_path: Path, writer: Writer) -> None:
    (tmp_path / "sub").mkdir()
    np.ones(4, np.float32).tofile(tmp_path / "sub" / "w.bin")
    path = writer(tmp_path / "m.onnx", "sub/w.bin")
    assert external_files(path) == {"sub/w.bin"}
    assert OnnxModule(path, **FOUR).run({"x": rows(0, 1, 2, 3)})["y"].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("writer", [as_initializer, as_constant, in_a_branch])
@pytest.mark.parametrize("place", ["../w.bin", "sub/../../w.bin", "absolute", "linked/w.bin"])
def test_weights_in_a_file_elsewhere_are_refused(tmp_path: Path, writer: Writer, place: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    np.ones(4, np.float32).tofile(tmp_path / "w.bin")
    (folder / "linked").symlink_to(tmp_path, target_is_directory=True)
    path = writer(folder / "m.onnx", str(tmp_path / "w.bin") if place == "absolute" else place)
    for call in (check_external_files, lambda path: OnnxModule(path, **FOUR)):
        with pytest.raises(CheckpointError, match="outside its folder; refused"):
            call(path)


def test_a_reference_cannot_hide_behind_bits_that_other_readers_drop(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    np.ones(4, np.float32).tofile(tmp_path / "w.bin")
    path = as_initializer(tmp_path / "model" / "m.onnx", "../w.bin")
    data = path.read_bytes()
    model = onnx.load_from_string(data)
    graph = model.graph.SerializeToString()
    at = data.index(graph)
    key = data.rindex(b"\x3a", 0, at)  # field 7, the graph, as one byte
    path.write_bytes(data[:key] + b"\xba\x80\x80\x80\x10" + data[key + 1 :])  # the same with bit 32 set
    with pytest.raises(CheckpointError, match="not a readable ONNX file"):
        check_external_files(path)


def test_what_cannot_be_declared_is_refused(tmp_path: Path) -> None:
    path = doubling(tmp_path)
    with pytest.raises(ConfigError, match="declare at least one"):
        OnnxModule(path, inputs=DOUBLE["inputs"], outputs={})
    with pytest.raises(ConfigError, match="use 1 or more"):
        OnnxModule(path, **DOUBLE, threads=0)


def test_a_file_that_fails_on_values_is_named_without_its_runtime_s_sources(tmp_path: Path) -> None:
    node = helper.make_node("Gather", ["t", "i"], ["y"])
    table = numpy_helper.from_array(np.arange(3, dtype=np.float32), "t")
    write(tmp_path / "g.onnx", [node], {"i": (INT64, ["n"])}, {"y": (FLOAT, ["n"])}, [table])
    module = OnnxModule(tmp_path / "g.onnx", inputs={"i": "int64[n]"}, outputs={"y": "float32[n]"})
    with pytest.raises(StageError, match=r"g\.onnx failed on its input \(\w+\)$"):
        module.run({"i": np.array([99])})


def test_linked_files_of_a_hub_cache_are_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    as_initializer(blobs / "aaa", "w.bin")
    np.ones(4, np.float32).tofile(blobs / "bbb")
    (snapshot / "m.onnx").symlink_to(blobs / "aaa")
    (snapshot / "w.bin").symlink_to(blobs / "bbb")
    assert OnnxModule(snapshot / "m.onnx", **FOUR).run({"x": rows(0, 0, 0, 0)})["y"].tolist() == [[1, 1, 1, 1]]


# -------------------------------------------------------------------------------------------- the component


def job(name: str, **arrays: np.ndarray) -> Job:
    return Job(RequestInfo(name), CodecParams(), ModuleInput(arrays), 0)


def test_pieces_of_equal_shapes_run_together_and_get_their_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = OnnxModule(doubling(tmp_path), **DOUBLE)
    component = OnnxComponent(module, max_batch=8)
    seen: list[tuple[int, ...]] = []
    real = module.run
    monkeypatch.setattr(module, "run", lambda arrays: seen.append(arrays["x"].shape) or real(arrays))
    jobs = [job("a", x=rows(1, 2)), job("b", x=rows(3, 4)), job("c", x=rows(5, 6))]
    assert len({component.group(one) for one in jobs}) == 1
    assert component.group(jobs[0]) != component.group(job("d", x=rows(1, 2, 3)))
    results = component.run(jobs)
    assert [result.arrays["y"].tolist() for result in results] == [[[2, 4]], [[6, 8]], [[10, 12]]]
    assert seen == [(3, 2)]
    alone = [component.run([one])[0] for one in jobs]
    assert all(np.array_equal(one.arrays["y"], many.arrays["y"]) for one, many in zip(alone, results, strict=True))


def test_a_module_without_a_batch_dimension_runs_one_piece_at_a_time(tmp_path: Path) -> None:
    module = OnnxModule(doubling(tmp_path), inputs={"x": "float32[rows, n]"}, outputs={"y": "float32[rows, n]"})
    assert OnnxComponent(module, max_batch=8).max_batch == 1


def test_an_output_that_is_sound_comes_as_sound_within_bounds(tmp_path: Path) -> None:
    component = OnnxComponent(OnnxModule(doubling(tmp_path), **DOUBLE), audio=ModuleAudio(output="y", sample_rate=8000))
    [chunk] = component.run([job("a", x=rows(0.25, -0.25, 3))])
    assert isinstance(chunk, AudioChunk)
    assert (chunk.samples.tolist(), chunk.samples.dtype, chunk.sample_rate) == ([0.5, -0.5, 1.0], np.float32, 8000)
    with pytest.raises(InvalidRequestError, match="batch is 2"):
        component.check(RequestInfo("a"), CodecParams(), ModuleInput({"x": rows(1, count=2)}))


def test_whole_numbers_as_sound_are_scaled(tmp_path: Path) -> None:
    kind = TensorProto.INT16
    node = helper.make_node("Identity", ["x"], ["y"])
    path = write(tmp_path / "a.onnx", [node], {"x": (kind, ["n"])}, {"y": (kind, ["n"])})
    module = OnnxModule(path, inputs={"x": "int16[n]"}, outputs={"y": "int16[n]"})
    component = OnnxComponent(module, audio=ModuleAudio(output="y", sample_rate=8000))
    [chunk] = component.run([job("a", x=np.array([-32768, 16384], np.int16))])
    assert chunk.samples.tolist() == [-1.0, 0.5]


def test_a_text_is_not_an_array(tmp_path: Path) -> None:
    component = OnnxComponent(OnnxModule(doubling(tmp_path), **DOUBLE))
    with pytest.raises(InvalidRequestError, match="takes arrays, not a text"):
        component.check(RequestInfo("a"), CodecParams(), ModuleInput(text="hello"))


# --------------------------------------------------------------------------------------------- by YAML alone

PIPELINE = """
pipeline:
  name: waves
  stages:
    front:
      engine: codec
      component: onnx.module
      module:
        file: parts/double.onnx
        inputs: {x: "float32[batch, n]"}
        outputs: {y: "float32[batch, n]"}
        max_batch: 4
    back:
      engine: codec
      component: onnx.module
      output: audio
      module:
        file: negate.onnx
        inputs: {y: "float32[batch, n]"}
        outputs: {wave: "float32[batch, n]"}
        audio: {output: wave, sample_rate: 16000}
        threads: 1
  edges:
    - {from: front, to: back, bridge: onnx.arrays}
deployment: {device: cpu}
"""


class Numbers:
    """A prompt is numbers."""

    input_modalities = frozenset({Modality.TEXT})

    def text(self, prompt: str) -> ModuleInput:
        return ModuleInput({"x": np.array([prompt.split()], np.float32)})

    def voices(self) -> tuple[str, ...]:
        return ()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "parts").mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["Waves"], "model_type": "waves"}))
    (model / "pipeline.yaml").write_text(PIPELINE)
    doubling(model / "parts")
    negate = helper.make_node("Neg", ["y"], ["wave"])
    shape = ["batch", "n"]
    write(model / "negate.onnx", [negate], {"y": (FLOAT, shape)}, {"wave": (FLOAT, shape)})
    return model


def registry_of(model: Path) -> Registry:
    registry = Registry()
    registry._discovered = True  # only what is registered here
    for name, factory in COMPONENTS.items():
        registry.register_component(name, factory)
    for name, bridge in BRIDGES.items():
        registry.register_bridge(name, bridge)
    registry.register(Family("waves", ("Waves",), model / "pipeline.yaml", {}, {}, lambda _: Numbers()))
    return registry


def build(model: Path, *overrides: str) -> EngineParts:
    args = OmniEngineArgs.parse({"model": str(model), "overrides": overrides})
    return build_parts(args, progress=False, registry=registry_of(model))


def test_any_pipeline_can_name_the_component_and_its_bridge() -> None:
    assert "onnx.module" in REGISTRY.component_names()
    assert "onnx.arrays" in REGISTRY.bridge_names()


def test_a_pipeline_of_onnx_files_runs_by_yaml_alone(folder: Path) -> None:
    parts = build(folder)
    assert all(isinstance(stage, ModuleStage) for stage in parts.stages.values())
    with Omni.from_parts(parts.graph, parts.stages, parts.bridges, parts.defaults, parts.processor) as omni:
        one, two = omni.generate(["0.1 0.2", "0.25"])
        assert one.audio.samples.tolist() == pytest.approx([-0.2, -0.4])
        assert two.audio.samples.tolist() == [-0.5]
        assert one.audio.sample_rate == 16000
        assert one.finish_reason is FinishReason.STOP
        assert one.trace.stages["front"].chunks == one.trace.stages["back"].chunks == 1
        omni.orchestrator.check_idle()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("front.module.file=../double.onnx", "is not a file of the model's folder"),
        ("front.module.file=/etc/double.onnx", "is not a file of the model's folder"),
        ("front.module.file=parts/double.bin", "is not a file of the model's folder"),
        ('front.module.inputs={x: "float32"}', "x: 'float32' is not an array"),
        ('front.module.inputs={x: "float32[rows, n]"}', "max_batch is 4, but"),
        ("back.module.audio.output=mel", "which outputs does not declare"),
        ('back.module.outputs={wave: "float32[batch, n, m]"}', "is not one channel of audio"),
        ("front.module=null", "needs a module section"),
        ("front.component=other.part", "module is read by component onnx.module alone"),
        ("front.module.sizes=3", "sizes"),
    ],
)
def test_a_module_section_that_cannot_be_is_a_config_error(folder: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(folder, f"pipeline.stages.{override}")
    assert says in str(caught.value)
    assert "pipeline.stages." in str(caught.value.param)


def test_a_module_takes_and_gives_something() -> None:
    with pytest.raises(ValueError, match="declare at least one array"):
        ModuleConfig(file="a.onnx", inputs={}, outputs={"y": "float32[n]"})


def test_a_folder_that_leads_elsewhere_is_refused(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    (folder / "parts").rename(elsewhere)
    (folder / "parts").symlink_to(elsewhere, target_is_directory=True)
    with pytest.raises(CheckpointError, match="is not inside"):
        build(folder)


def test_a_file_that_is_missing_or_not_as_declared_fails_before_the_first_request(folder: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"declared are y: float32\[batch, n\], x: float32\[7\], the file has y: "
    ):
        build(folder, 'pipeline.stages.back.module.inputs={x: "float32[7]"}')
    (folder / "negate.onnx").unlink()
    with pytest.raises(CheckpointError, match=r"has no negate\.onnx"):
        build(folder)


def test_arrays_that_do_not_fit_end_the_request_as_its_own_fault(folder: Path) -> None:
    parts = build(
        folder, 'pipeline.stages.back.module.inputs={y: "float32[1, 2]"}', "pipeline.stages.back.module.max_batch=1"
    )
    with Omni.from_parts(parts.graph, parts.stages, parts.bridges, parts.defaults, parts.processor) as omni:
        good, bad = omni.generate(["1 2", "1 2 3"])
        assert good.finish_reason is FinishReason.STOP
        assert isinstance(bad.error, InvalidRequestError)
        assert bad.error.param == "arrays.y"


def test_the_bridge_passes_arrays_on_and_ends_with_its_source() -> None:
    bridge = BRIDGES["onnx.arrays"]
    array = np.ones(1)
    _, [piece] = bridge(RequestInfo("a"), None, StageChunk("a", "front", ModuleOutput({"x": array})))
    assert (piece.arrays["x"] is array, piece.final) == (True, False)
    _, [end] = bridge(RequestInfo("a"), None, StageChunk("a", "front", finish=FinishReason.STOP))
    assert (dict(end.arrays), end.final) == ({}, True)


def test_the_bridge_passes_sound_on_as_samples_and_refuses_the_rest() -> None:
    bridge = BRIDGES["onnx.arrays"]
    sound = AudioChunk(np.linspace(-1, 1, 5, dtype=np.float32), 24_000)
    _, [piece] = bridge(RequestInfo("a"), None, StageChunk("a", "speak", sound))
    assert list(piece.arrays) == ["samples"]
    assert piece.arrays["samples"].shape == (1, 5)
    np.testing.assert_array_equal(piece.arrays["samples"][0], sound.samples)
    with pytest.raises(BridgeError, match="'think' outputs a TokenChunk"):
        bridge(RequestInfo("a"), None, StageChunk("a", "think", TokenChunk((1,))))
    assert bridge(RequestInfo("a"), None, StageChunk("a", "front"))[1] == []
