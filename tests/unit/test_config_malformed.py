"""Every way of getting a configuration wrong is refused with the path, the line and the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omnistage.config import LocatedConfigError, OmniEngineArgs, resolve
from omnistage.config.layers import Layers
from omnistage.config.yamlio import load_file, load_text
from omnistage.core.errors import ConfigError
from omnistage.core.family import Family
from omnistage.core.registry import Registry

PIPELINE = """\
pipeline:
  name: fake
  stages:
    thinker:
      engine: autoregressive
      component: fake.thinker
      output: text
    talker:
      engine: autoregressive
      component: fake.talker
    vocoder:
      engine: codec
      component: fake.vocoder
      output: audio
  edges:
    - from: thinker
      to: talker
      bridge: fake.thinker2talker
    - from: talker
      to: vocoder
      bridge: fake.talker2vocoder
"""


def bridge(request, state, chunk):
    return state, ()


def make_registry(pipeline: Path) -> Registry:
    registry = Registry()
    registry._discovered = True  # no built-in families here
    registry.register(
        Family(
            name="fake",
            architectures=("FakeOmniModel",),
            pipeline=pipeline,
            components={f"fake.{name}": lambda context: None for name in ("thinker", "talker", "vocoder")},
            bridges={"fake.thinker2talker": bridge, "fake.talker2vocoder": bridge},
            processor=lambda model: None,
        )
    )
    return registry


def resolve_with(tmp_path: Path, text: str | bytes, *, pipeline: str = PIPELINE):
    (tmp_path / "pipeline.yaml").write_text(pipeline)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["FakeOmniModel"]}))
    user = tmp_path / "user.yaml"
    user.write_bytes(text if isinstance(text, bytes) else text.encode())
    return resolve(OmniEngineArgs(model=str(model), config=user), registry=make_registry(tmp_path / "pipeline.yaml"))


def edges(*lines: str) -> str:
    return "pipeline:\n  edges:\n" + "".join(f"    - {{{line}}}\n" for line in lines)


def stages(text: str) -> str:
    return "pipeline:\n  stages:\n    " + text + "\n"


TO_TALKER = "from: thinker, to: talker, bridge: fake.thinker2talker"
TO_VOCODER = "from: talker, to: vocoder, bridge: fake.talker2vocoder"
EXTRA = "{engine: codec, component: fake.vocoder}"
THINKER = "pipeline.stages.thinker"

# name: (file, line or None, path, what the message says to do)
MALFORMED: dict[str, tuple[str | bytes, int | None, str | None, str]] = {
    "misspelt key": (
        "pipeline:\n  stages:\n    talker:\n      budget:\n        max_runing: 4\n",
        5,
        "pipeline.stages.talker.budget.max_runing",
        "unknown key; did you mean max_running?",
    ),
    "key one level too high": (
        stages("thinker: {max_running: 4}"),
        3,
        f"{THINKER}.max_running",
        "did you mean budget.max_running?",
    ),
    "key like no other": ("deployment:\n  zzz: 1\n", 2, "deployment.zzz", "unknown key; known: device, dtype"),
    "unknown section": ("deploiment: {}\n", 1, "deploiment", "did you mean deployment?"),
    "unknown key of an edge": (edges(TO_TALKER + ", bridg: x"), 3, "pipeline.edges.0.bridg", "did you mean bridge?"),
    "unknown key in media limits": (
        "limits:\n  media:\n    max_audio_second: 1\n",
        3,
        "limits.media.max_audio_second",
        "did you mean max_audio_seconds?",
    ),
    "unknown sampling parameter": (
        stages("talker: {params: {temprature: 1}}"),
        3,
        "pipeline.stages.talker.params.temprature",
        "did you mean temperature?",
    ),
    "duplicate key": (
        "deployment:\n  device: cpu\n  device: cuda\n",
        3,
        "deployment.device",
        "duplicate key, first on line 2; remove one",
    ),
    "not YAML": ("pipeline: [1, 2\n", 2, None, "not valid YAML"),
    "tab for indentation": ("pipeline:\n\tname: x\n", 2, None, "fix this line"),
    "control character": ("pipeline: \x01\n", None, None, "not valid YAML"),
    "not UTF-8": (b"pipeline: \xff\n", None, None, "save it as UTF-8"),
    "a list at the top": ("- 1\n", 1, None, "must be a mapping with the keys pipeline, deployment or limits"),
    "two documents": ("a: 1\n---\nb: 2\n", 2, None, "not valid YAML"),
    "python object tag": (
        "deployment:\n  device: !!python/object/apply:os.system [ls]\n",
        2,
        "deployment.device",
        "is not allowed",
    ),
    "tagged mapping": ("deployment: !!set {cpu}\n", 1, "deployment", "!!set is not allowed"),
    "date": ("deployment:\n  device: 2020-01-01\n", 2, "deployment.device", "put the value in quotes"),
    "impossible number": ("deployment:\n  max_inflight: !!int x\n", 2, "deployment.max_inflight", "cannot be read"),
    "key that is a list": ("deployment:\n  [a]: 1\n", 2, "deployment", "a key must be plain text"),
    "merge of a scalar": ("deployment:\n  <<: 1\n", 2, "deployment", "only a mapping can be merged"),
    "alias bomb": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{k}: &{k} [{','.join(['*' + p] * 9)}]\n" for p, k in zip("abcdefgh", "bcdefghi", strict=True)),
        None,
        None,
        "use fewer aliases",
    ),
    "alias that holds itself": ("pipeline: &a [*a]\n", 1, None, "use fewer aliases"),
    "merge that holds itself": ("deployment: &a {<<: *a}\n", 1, "deployment", "use fewer aliases"),
    "too deep": ("a: " + "[" * 100_000, 1, None, "flatten it"),
    "too large": ("#" + "x" * 2**20, None, None, "make it smaller"),
    "missing component": (
        stages("extra: {engine: codec}"),
        3,
        "pipeline.stages.extra.component",
        "add `component: ...`",
    ),
    "missing bridge": (edges("from: thinker, to: talker"), 3, "pipeline.edges.0.bridge", "add `bridge: ...`"),
    "missing engine": (
        stages("extra: {component: fake.vocoder}"),
        3,
        "pipeline.stages.extra",
        "add `engine: autoregressive, codec, diffusion or remote`",
    ),
    "unknown engine": (
        stages("thinker: {engine: diffuse}"),
        3,
        THINKER,
        "there is no engine 'diffuse'; use autoregressive, codec, diffusion or remote",
    ),
    "engine that is no text": (
        stages("thinker: {engine: [1]}"),
        3,
        THINKER,
        "use autoregressive, codec, diffusion or remote",
    ),
    "stage that is no mapping": (stages("thinker: 4"), 3, THINKER, "must be a valid dictionary"),
    "empty section": (stages("thinker: {budget: }"), 3, f"{THINKER}.budget", "is empty; set a value or remove"),
    "wrong type": (stages("thinker: {budget: {max_running: many}}"), 3, f"{THINKER}.budget.max_running", "integer"),
    "yes for a number": (
        stages("thinker: {budget: {max_running: yes}}"),
        3,
        f"{THINKER}.budget.max_running",
        "use a number, not true",
    ),
    "number out of range": (
        stages("thinker: {budget: {max_running: 0}}"),
        3,
        f"{THINKER}.budget.max_running",
        "must be greater than or equal to 1, got 0",
    ),
    "block size that no kernel has": (
        stages("thinker: {budget: {block_size: 12}}"),
        3,
        f"{THINKER}.budget.block_size",
        "must be 8, 16, 32 or 64, got 12",
    ),
    "size without unit": (
        stages("thinker: {budget: {kv_memory: 2G}}"),
        3,
        f"{THINKER}.budget.kv_memory",
        "like 2GiB or 512MiB, or auto",
    ),
    "graph sizes not ascending": (
        stages("thinker: {budget: {graph_batch_sizes: [4, 2, 4]}}"),
        3,
        f"{THINKER}.budget.graph_batch_sizes",
        "ascending: [2, 4]",
    ),
    "no graph sizes": (
        stages("thinker: {budget: {graph_batch_sizes: []}}"),
        3,
        f"{THINKER}.budget.graph_batch_sizes",
        "cuda_graphs: false",
    ),
    "first chunk above the largest": (
        stages("vocoder: {budget: {first_chunk_blocks: 17}}"),
        3,
        "pipeline.stages.vocoder.budget",
        "lower the first or raise the second",
    ),
    "device": ("deployment:\n  device: gpu0\n", 2, "deployment.device", "use auto, cpu, cuda, cuda:N or mps"),
    "dtype": ("deployment:\n  dtype: fp8\n", 2, "deployment.dtype", "'bfloat16'"),
    "sampling parameter out of range": (
        stages("thinker: {params: {top_p: 2}}"),
        3,
        f"{THINKER}.params.top_p",
        "less than or equal to 1",
    ),
    "infinite deadline": ("limits:\n  max_deadline_seconds: .inf\n", 2, "limits.max_deadline_seconds", "finite"),
    "edge from nowhere": (
        edges("from: thinkr, to: talker, bridge: fake.thinker2talker"),
        3,
        "pipeline.edges.0.from",
        "no stage 'thinkr'; did you mean thinker?",
    ),
    "edge to nowhere": (
        edges("from: thinker, to: zzz, bridge: fake.thinker2talker"),
        3,
        "pipeline.edges.0.to",
        "no stage 'zzz'; known: thinker, talker, vocoder",
    ),
    "edge without source": (edges("from: [], to: talker, bridge: x"), 3, "pipeline.edges.0.from", "at least 1 item"),
    "source named twice": (
        edges("from: [thinker, thinker], to: talker, bridge: fake.thinker2talker"),
        3,
        "pipeline.edges.0.from",
        "list each source once",
    ),
    "two edges to one stage": (
        edges(TO_TALKER, "from: thinker, to: vocoder, bridge: fake.talker2vocoder", TO_VOCODER),
        5,
        "pipeline.edges.2",
        "one edge with `from: [thinker, talker]`",
    ),
    "self loop": (
        edges("from: [thinker, talker], to: talker, bridge: fake.thinker2talker"),
        3,
        "pipeline.edges.0",
        "'talker' to itself; remove that source",
    ),
    "cycle": (
        edges("from: [thinker, vocoder], to: talker, bridge: fake.thinker2talker", TO_VOCODER),
        2,
        "pipeline.edges",
        "talker -> vocoder -> talker; remove one",
    ),
    "several entries": (edges(TO_TALKER), 1, "pipeline.entry", "set pipeline.entry and add edges"),
    "unknown entry": ("pipeline:\n  entry: thinkr\n", 2, "pipeline.entry", "did you mean thinker?"),
    "entry with an edge to it": (
        "pipeline:\n  entry: talker\n",
        2,
        "pipeline.entry",
        "remove that edge, or enter at thinker",
    ),
    "unreachable stage": (
        f"pipeline:\n  entry: thinker\n  stages:\n    extra: {EXTRA}\n",
        4,
        "pipeline.stages.extra",
        "not reached from the entry 'thinker'; add an edge to it or remove it",
    ),
    "autoregressive stage that gives video": (
        stages("talker: {output: video}"),
        3,
        "pipeline.stages.talker.output",
        "an autoregressive stage outputs text, not video; use text, or null",
    ),
    "codec stage that gives video": (
        stages("vocoder: {output: video}"),
        3,
        "pipeline.stages.vocoder.output",
        "a codec stage outputs audio, or as a module text, embedding or scores, not video; use one of them, or null",
    ),
    "size beyond floats": (
        stages("thinker: {budget: {kv_memory: '" + "9" * 400 + ".0GiB'}}"),
        3,
        f"{THINKER}.budget.kv_memory",
        "use bytes or a number with a unit",
    ),
    "tag of a bool on a word": (
        "deployment: {device: !!bool maybe}\n",
        1,
        "deployment.device",
        "'maybe' cannot be read as !!bool; correct it",
    ),
    "tag of an int on nothing": (
        "deployment: {max_inflight: !!int ''}\n",
        1,
        "deployment.max_inflight",
        "'' cannot be read as !!int; correct it",
    ),
    "tag of a float on nothing": (
        "limits: {max_deadline_seconds: !!float ''}\n",
        1,
        "limits.max_deadline_seconds",
        "'' cannot be read as !!float; correct it",
    ),
    "number in base sixty beyond floats": (
        "limits: {max_deadline_seconds: !!float '" + ":".join("1" * 300) + "'}\n",
        1,
        "limits.max_deadline_seconds",
        "cannot be read as !!float; correct it",
    ),
    "escape of half a surrogate pair": (
        'pipeline: {name: "\\ud800"}\n',
        1,
        "pipeline.name",
        "half of a surrogate pair; remove it",
    ),
    "no output": (
        stages("thinker: {output: null}\n    vocoder: {output: null}"),
        2,
        "pipeline.stages",
        "set `output` on the last stage to one of text",
    ),
    "unknown output": (stages("vocoder: {output: smell}"), 3, "pipeline.stages.vocoder.output", "'audio'"),
    "output given twice": (
        stages("talker: {output: text}"),
        3,
        "pipeline.stages.talker.output",
        "'thinker' gives text already; remove `output` from one",
    ),
    "dead end": (
        stages("vocoder: {output: null}"),
        3,
        "pipeline.stages.vocoder",
        "leads to no output: set `output` on it, add an edge from it, or remove it",
    ),
    "unknown component": (
        stages("thinker: {component: fake.thinkr}"),
        3,
        f"{THINKER}.component",
        "unknown component 'fake.thinkr'",
    ),
    "unknown bridge": (
        edges("from: thinker, to: talker, bridge: fake.thinker2talkr", TO_VOCODER),
        3,
        "pipeline.edges.0.bridge",
        "did you mean fake.thinker2talker?",
    ),
    "stage name": (
        stages("Big-Stage: {engine: codec, component: x}"),
        3,
        "pipeline.stages.Big-Stage",
        "use lower-case",
    ),
    "reserved stage name": (
        stages("limits: {engine: codec, component: x}"),
        3,
        "pipeline.stages.limits",
        "call the stage something else",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_with_path_line_and_fix(name, tmp_path):
    text, line, path, fix = MALFORMED[name]
    with pytest.raises(ConfigError) as caught:
        resolve_with(tmp_path, text)
    error = caught.value
    assert fix in error.message
    assert path is None or error.param == path
    where = f"{tmp_path / 'user.yaml'}:{line}: " if line is not None else f"{tmp_path / 'user.yaml'}"
    assert str(error).startswith(where)


@pytest.mark.parametrize("name", ["pkg.mod:func", "a/b.py", "Pkg.mod", "__import__", "os.system", "fake..x", "a\\b"])
def test_a_name_that_looks_like_code_is_never_followed(name, tmp_path):
    text = edges(f"from: thinker, to: talker, bridge: '{name}'", TO_VOCODER)
    with pytest.raises(ConfigError, match=r"never (imported|followed)") as caught:
        resolve_with(tmp_path, text)
    assert caught.value.param == "pipeline.edges.0.bridge"
    assert "fake.talker2vocoder" in caught.value.message


def test_no_stages_at_all(tmp_path):
    with pytest.raises(ConfigError, match="name at least one stage") as caught:
        resolve_with(tmp_path, "", pipeline="pipeline: {name: x, stages: {}}\n")
    assert caught.value.param == "pipeline.stages"


def test_an_error_in_the_familys_own_file_names_that_file(tmp_path):
    with pytest.raises(ConfigError) as caught:
        resolve_with(tmp_path, "", pipeline=PIPELINE.replace("output: audio", "outptu: audio"))
    assert str(caught.value).startswith("fake/pipeline.yaml:14: pipeline.stages.vocoder.outptu: unknown key")


def test_a_family_file_without_pipeline_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="add `pipeline") as caught:
        resolve_with(tmp_path, "", pipeline="deployment: {}\n")
    assert caught.value.param == "pipeline"


def test_all_problems_are_reported_at_once(tmp_path):
    with pytest.raises(LocatedConfigError) as caught:
        resolve_with(tmp_path, "deployment:\n  device: gpu\n  dtpye: auto\n")
    assert "deployment.device" in str(caught.value)
    assert len(caught.value.others) == 1
    assert caught.value.others[0].endswith("user.yaml:3: deployment.dtpye: unknown key; did you mean dtype?")


def test_long_values_are_cut_in_the_message(tmp_path):
    with pytest.raises(ConfigError) as caught:
        resolve_with(tmp_path, f"deployment: {{max_inflight: {'x' * 500}}}\n")
    assert len(caught.value.message) < 200


def test_a_missing_file_and_a_folder_in_its_place(tmp_path):
    registry = make_registry(tmp_path / "pipeline.yaml")
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    (tmp_path / "config.json").write_text('{"architectures": ["FakeOmniModel"]}')
    with pytest.raises(ConfigError, match="does not exist; check the path"):
        resolve(OmniEngineArgs(model=str(tmp_path), config=tmp_path / "no.yaml"), registry=registry)
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(OmniEngineArgs(model=str(tmp_path), config=tmp_path), registry=registry)


@pytest.mark.parametrize(
    ("override", "param"), [("deployment.device=\udcff", "deployment.device"), ("deployment.\ud800=1", None)]
)
def test_an_override_that_is_not_utf8_is_refused_with_its_key(override, param):
    layers = Layers()
    with pytest.raises(ConfigError, match="not UTF-8 text") as caught:
        layers.apply_overrides([override])
    assert caught.value.param == param
    str(caught.value).encode()


def test_text_that_is_not_utf8_is_refused():
    with pytest.raises(LocatedConfigError, match="x: is not UTF-8 text"):
        load_text("a: \ud800", "x")


@pytest.mark.parametrize("override", ["x" * 10**5, "x" * 10**5 + "=1", "deployment.device=" + "x" * 10**5])
def test_a_long_override_is_quoted_in_short(override, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["FakeOmniModel"]}))
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    args = OmniEngineArgs(model=str(tmp_path), overrides=(override,))
    with pytest.raises(ConfigError) as caught:
        resolve(args, registry=make_registry(tmp_path / "pipeline.yaml"))
    assert len(str(caught.value)) < 250


def test_a_configuration_path_too_long_for_the_system_is_quoted_in_short():
    with pytest.raises(ConfigError, match="cannot be read: File name too long") as caught:
        load_file(Path("x" * 5000))
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("path", ["\0", "\ud800", "a\0" * 5000])
def test_a_configuration_path_that_no_system_takes_is_refused(path):
    with pytest.raises(ConfigError, match="not a usable path; check it") as caught:
        load_file(Path(path))
    assert caught.value.param == "config"
    assert len(str(caught.value)) < 200
