"""Schemas, layers, provenance, graph queries and family detection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from omnistage.config import (
    ARBudget,
    ARStageConfig,
    CodecStageConfig,
    DeploymentConfig,
    EdgeConfig,
    OmniEngineArgs,
    OmniModelConfig,
    PipelineConfig,
    PipelineGraph,
    detect_family,
    find_model,
    format_size,
    parse_size,
    resolve,
    to_yaml,
)
from omnistage.config.emit import emit_yaml
from omnistage.config.graph import graph_of
from omnistage.config.resolve import check
from omnistage.config.yamlio import load_file, load_text
from omnistage.core.errors import (
    CheckpointError,
    ConfigError,
    RegistryError,
    UnsupportedModalityError,
    UnsupportedModelError,
)
from omnistage.core.family import Family
from omnistage.core.registry import Registry
from omnistage.core.types import Modality
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.request import Route

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
      params: {top_k: 40, stop: "\\n\\n#"}
    vocoder:
      engine: codec
      component: fake.vocoder
      output: audio
      dtype: float32
  edges:
    - from: thinker
      to: talker
      bridge: fake.hop
    - from: [talker, thinker]
      to: vocoder
      bridge: fake.hop
limits:
  max_prompt_tokens: 100
"""


def hop(request, state, chunk):
    return state, ()


def family(name: str, *architectures: str, pipeline: Path = Path("none.yaml"), parts: bool = False) -> Family:
    return Family(
        name=name,
        architectures=architectures,
        pipeline=pipeline,
        components={f"{name}.{part}": lambda context: None for part in ("thinker", "talker", "vocoder")}
        if parts
        else {},
        bridges={f"{name}.hop": hop} if parts else {},
        processor=lambda model: None,
    )


def registry_of(*families: Family) -> Registry:
    registry = Registry()
    registry._discovered = True  # no built-in families here
    for each in families:
        registry.register(each)
    return registry


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["FakeModel"], "model_type": "fake"}))
    return folder


@pytest.fixture
def registry(tmp_path) -> Registry:
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE)
    return registry_of(family("fake", "FakeModel", pipeline=path, parts=True))


@pytest.fixture
def resolved(model, registry):
    def run(*overrides: str, **arguments):
        return resolve(OmniEngineArgs(model=str(model), overrides=overrides, **arguments), registry=registry)

    return run


# ------------------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * 2**30), ("512 MiB", 512 * 2**20), ("1.5kb", 1500), ("7B", 7), ("42", 42), (42, 42), ("0B", 0)],
)
def test_sizes_take_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["2G", "GiB", "-1GiB", "", True, 1.5, None, -3, "1e9B"])
def test_sizes_that_are_not(text):
    with pytest.raises(ValueError, match="like 2GiB or 512MiB"):
        parse_size(text)


@pytest.mark.parametrize("size", [2**63, 10**400, "9" * 19 + "GiB", "9" * 400, "9" * 400 + ".0GiB", "9" * 5000])
def test_a_size_beyond_any_memory_is_refused_in_a_short_message(size):
    with pytest.raises(ValueError, match="like 2GiB or 512MiB") as caught:
        parse_size(size)
    assert len(str(caught.value)) < 250


@given(st.integers(min_value=0, max_value=2**50))
def test_a_printed_size_reads_back_exactly(size):
    assert parse_size(format_size(size)) == size


def test_kv_memory_is_auto_or_bytes():
    assert ARBudget().kv_memory == "auto"
    assert ARBudget.model_validate({"kv_memory": "2GiB"}).kv_memory == 2 * 2**30
    assert ARBudget.model_validate({"kv_memory": 1024}).model_dump(mode="json")["kv_memory"] == "1KiB"
    assert ARBudget().model_dump(mode="json")["kv_memory"] == "auto"


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:1"])
def test_devices(device):
    assert DeploymentConfig(device=device).device == device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "cpu\n", ""])
def test_devices_that_are_not(device):
    with pytest.raises(ValidationError, match="cuda:N"):
        DeploymentConfig(device=device)


def test_configuration_is_frozen(resolved):
    config = resolved().config
    with pytest.raises(ValidationError, match="frozen"):
        config.deployment.device = "cpu"


def test_engine_arguments_are_checked():
    assert OmniEngineArgs.parse({"model": "m", "config": "f.yaml"}).config == Path("f.yaml")
    with pytest.raises(ConfigError, match="known: model, config") as caught:
        OmniEngineArgs.parse({"model": "m", "modle": 1})
    assert caught.value.param == "modle"
    with pytest.raises(ConfigError, match="use auto, cpu"):
        OmniEngineArgs.parse({"model": "m", "device": "gpu"})


# -------------------------------------------------------------------------------------------------- layers


def test_the_engine_chooses_the_stages_type(resolved):
    stages = resolved().config.pipeline.stages
    assert isinstance(stages["thinker"], ARStageConfig)
    assert isinstance(stages["vocoder"], CodecStageConfig)
    assert stages["talker"].params.top_k == 40
    assert stages["vocoder"].dtype == "float32"


def test_later_layers_win_and_say_so(resolved, tmp_path):
    user = tmp_path / "user.yaml"
    user.write_text("# mine\npipeline:\n  stages:\n    talker:\n      params:\n        top_k: 50\n        top_p: 0.5\n")
    result = resolved("talker.params.top_p=0.25", config=user, device="cpu", dtype="float32")
    params = result.config.pipeline.stages["talker"].params
    assert (params.top_k, params.top_p, params.stop) == (50, 0.25, ("\n\n#",))
    talker = "pipeline.stages.talker."
    origin = {path: str(source) for path, source in result.provenance.items()}
    assert origin[talker + "params.top_k"] == f"{user}:6"
    assert origin[talker + "params.top_p"] == "--set"
    assert origin[talker + "params.stop"] == "fake/pipeline.yaml:11"
    assert origin[talker + "params.min_p"] == "default"
    assert origin["pipeline.edges.1.from"] == "fake/pipeline.yaml:21"
    assert origin["deployment.device"] == "--device"
    assert origin["deployment.dtype"] == "--dtype"


def test_lists_are_replaced_whole(resolved, tmp_path):
    user = tmp_path / "user.yaml"
    user.write_text(
        "pipeline:\n  edges:\n    - {from: thinker, to: talker, bridge: fake.hop}\n"
        "    - {from: talker, to: vocoder, bridge: fake.hop}\n"
    )
    result = resolved(config=user)
    assert [edge.source for edge in result.config.pipeline.edges] == [("thinker",), ("talker",)]
    assert str(result.provenance["pipeline.edges.1.to"]) == f"{user}:4"


def test_an_empty_file_changes_nothing(resolved, tmp_path):
    user = tmp_path / "user.yaml"
    user.write_text("# nothing yet\n")
    assert resolved(config=user).config == resolved().config


def test_anchors_and_merge_keys_work(resolved, tmp_path):
    user = tmp_path / "user.yaml"
    user.write_text(
        "pipeline:\n  stages:\n    thinker:\n      params: &p {top_k: 3, top_p: 0.5}\n"
        "    talker:\n      params:\n        <<: [*p, {seed: 1}]\n        top_k: 9\n"
    )
    result = resolved(config=user)
    talker = result.config.pipeline.stages["talker"].params
    assert (talker.top_k, talker.top_p, talker.seed) == (9, 0.5, 1)
    assert str(result.provenance["pipeline.stages.talker.params.top_p"]) == f"{user}:4"
    assert str(result.provenance["pipeline.stages.talker.params.top_k"]) == f"{user}:8"


def test_aliased_sections_are_not_shared(resolved, tmp_path):
    user = tmp_path / "user.yaml"
    user.write_text("pipeline: {stages: {thinker: {budget: &b {max_running: 3}}, talker: {budget: *b}}}\n")
    stages = resolved("thinker.max_running=5", config=user).config.pipeline.stages
    assert (stages["thinker"].budget.max_running, stages["talker"].budget.max_running) == (5, 3)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("thinker.budget.max_running=4", "pipeline.stages.thinker.budget.max_running", 4),
        ("thinker.max_running=4", "pipeline.stages.thinker.budget.max_running", 4),
        ("talker.params.temperature=0", "pipeline.stages.talker.params.temperature", 0.0),
        ("talker.temperature = 0.5", "pipeline.stages.talker.params.temperature", 0.5),
        ("vocoder.num_steps=3", "pipeline.stages.vocoder.params.num_steps", 3),
        ("vocoder.device=cuda:1", "pipeline.stages.vocoder.device", "cuda:1"),
        ("thinker.kv_memory=512MiB", "pipeline.stages.thinker.budget.kv_memory", "512MiB"),
        ("thinker.graph_batch_sizes=[1, 2]", "pipeline.stages.thinker.budget.graph_batch_sizes", [1, 2]),
        ("thinker.max_model_len=null", "pipeline.stages.thinker.budget.max_model_len", None),
        ("thinker.stop=a=b", "pipeline.stages.thinker.params.stop", ["a=b"]),
        ("pipeline.name=other", "pipeline.name", "other"),
        ("deployment.device=cpu", "deployment.device", "cpu"),
        ("limits.media.max_audio_seconds=10", "limits.media.max_audio_seconds", 10.0),
        ("limits.max_prompt_tokens=", "limits.max_prompt_tokens", None),
    ],
)
def test_set_takes_full_and_short_paths(override, path, value, resolved):
    result = resolved(override)
    found = result.config.model_dump(mode="json", by_alias=True)
    for part in path.split("."):
        found = found[part]
    assert found == value
    assert str(result.provenance[path]) == "--set"


def test_the_last_set_wins(resolved):
    assert resolved("thinker.seed=1", "thinker.seed=2").config.pipeline.stages["thinker"].params.seed == 2


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("thinker.budget.max_running", "is not KEY=VALUE"),
        ("=4", "is not KEY=VALUE"),
        ("thinker..seed=4", "joined by single dots"),
        ("thinkr.seed=4", "did you mean thinker?"),
        ("zzz.seed=4", "known: thinker, talker, vocoder, pipeline, deployment, limits"),
        ("thinker=4", "set a key in it, like thinker.KEY="),
        ("deployment=4", "set a key in it, like deployment.KEY="),
        ("thinker.max_runing=4", "did you mean max_running?"),
        ("thinker.budget.max_runing=4", "did you mean max_running?"),
        ("deployment.devise=cpu", "did you mean device?"),
        ("pipeline.edges.0.bridge=fake.hop", "pipeline.edges=[...]"),
        ("thinker.max_running=[", "not valid YAML"),
        ("thinker.max_running=x", "valid integer"),
        ("thinker.component=os.system", "never followed"),
    ],
)
def test_a_wrong_set_says_what_to_write(override, fix, resolved):
    with pytest.raises(ConfigError) as caught:
        resolved(override)
    assert str(caught.value).startswith("--set")
    assert fix in str(caught.value)


def test_a_short_key_with_two_meanings_is_refused(resolved, monkeypatch):
    from omnistage.config import layers

    original = layers.keys_of
    monkeypatch.setattr(
        layers,
        "keys_of",
        lambda m: [*original(m), "both"] if m.__name__ in ("ARBudget", "SamplingParams") else original(m),
    )
    with pytest.raises(ConfigError, match=r"write thinker.budget.both or thinker.params.both"):
        resolved("thinker.both=1")


# --------------------------------------------------------------------------------------------------- to_yaml


def test_every_printed_value_says_where_it_came_from(resolved):
    text = to_yaml(resolved("thinker.max_running=4"))
    lines = {line.split("#")[0].strip(): line.split("  # ")[-1] for line in text.splitlines() if "  # " in line}
    assert lines["max_running: 4"] == "--set"
    assert lines["top_k: 40"] == "fake/pipeline.yaml:11"
    assert lines["encoder_cache: 256MiB"] == "default"
    assert lines["- from: [talker, thinker]"] == "fake/pipeline.yaml:21"
    values = [line for line in text.splitlines()[1:] if not line.rstrip().endswith(":")]
    assert all("  # " in line for line in values)


def test_what_is_printed_loads_back_as_the_same_configuration(resolved, tmp_path):
    first = resolved("thinker.logit_bias={5: -1.5}", "talker.stop=['#', \"a\\nb\", 'é: x']", "thinker.min_p=0.00001")
    user = tmp_path / "saved.yaml"
    user.write_text(to_yaml(first), encoding="utf-8")
    again = resolved(config=user)
    assert again.config == first.config
    assert all(str(source).startswith(str(user)) for source in again.provenance.values())
    assert to_yaml(first) == to_yaml(
        resolved("thinker.logit_bias={5: -1.5}", "talker.stop=['#', \"a\\nb\", 'é: x']", "thinker.min_p=0.00001")
    )


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
_keys = st.text("abc:# -\n\"'é", min_size=1, max_size=4)
_data = st.dictionaries(
    _keys,
    st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3)),
    min_size=1,
    max_size=4,
)


@given(_data)
@example({"a": "\x85"})
@example({"a": ["\u2028 x", "\r"]})
def test_any_data_survives_printing(data):
    text = emit_yaml(data, {})
    assert yaml.safe_load(text) is not None
    assert load_text(text, "x").data == data


# ---------------------------------------------------------------------------------------------------- graph


def ar(**fields: object) -> ARStageConfig:
    return ARStageConfig.model_validate({"engine": "autoregressive", "component": "c", **fields})


def giving(output: Modality) -> ARStageConfig:
    """Unchecked: the graph takes any modality, also one that no engine gives yet."""
    return ar().model_copy(update={"output": output})


def diamond(*text_bridges: str) -> PipelineGraph:
    stages = {
        "last": giving(Modality.AUDIO),
        "left": ar(),
        "start": ar(output="text"),
        "right": ar(),
        "pic": giving(Modality.IMAGE),
    }
    edges = (
        EdgeConfig(source=("left", "right"), to="last", bridge="b"),
        EdgeConfig(source=("start",), to="left", bridge="b"),
        EdgeConfig(source=("start",), to="right", bridge="b2"),
        EdgeConfig(source=("right",), to="pic", bridge="b"),
    )
    return graph_of(PipelineConfig(name="d", stages=stages, edges=edges), text_bridges)


def test_only_stages_whose_hidden_states_are_read_emit_them():
    every = frozenset({Modality.TEXT, Modality.AUDIO, Modality.IMAGE})
    assert Route.over(diamond(), every).emits_hidden == {"start", "left", "right"}
    assert Route.over(diamond("b2"), frozenset({Modality.IMAGE})).emits_hidden == {"right"}
    assert Route.over(diamond("b", "b2"), every).emits_hidden == frozenset()
    assert Route.over(diamond(), frozenset({Modality.TEXT})).emits_hidden == frozenset()


def test_the_graph_answers_what_comes_before_and_after():
    graph = diamond()
    assert graph.entry == "start"
    assert graph.order == ("start", "left", "right", "last", "pic")
    assert graph.sources("last") == ("left", "right")
    assert graph.sources("start") == ()
    assert graph.targets("right") == ("last", "pic")
    assert graph.targets("last") == ()
    assert (graph.bridge("right"), graph.bridge("start")) == ("b2", None)
    assert graph.outputs == {Modality.AUDIO: "last", Modality.TEXT: "start", Modality.IMAGE: "pic"}


def test_only_the_ancestors_of_what_was_asked_for_are_needed():
    graph = diamond()
    assert graph.stages_for({Modality.TEXT}) == {"start"}
    assert graph.stages_for({Modality.IMAGE}) == {"start", "right", "pic"}
    assert graph.stages_for([Modality.TEXT, Modality.AUDIO]) == {"start", "left", "right", "last"}


def test_a_modality_that_the_model_does_not_give():
    with pytest.raises(UnsupportedModalityError, match="has no video output; its outputs: audio, text, image"):
        diamond().stages_for({Modality.VIDEO, Modality.TEXT})
    with pytest.raises(UnsupportedModalityError, match="at least one of"):
        diamond().stages_for(())


def test_the_graph_cannot_be_changed():
    with pytest.raises(TypeError):
        diamond().outputs[Modality.TEXT] = "left"  # type: ignore[index]


# ------------------------------------------------------------------------------------------ model and family


def test_a_family_is_told_by_architecture_then_type_then_wildcard():
    registry = registry_of(family("any", "*"), family("one", "OneForCausalLM"), family("two", "two_type"))
    names = {
        "one": {"architectures": ["OneForCausalLM"]},
        "two": {"architectures": ["Unknown"], "model_type": "two_type"},
        "any": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    }
    for expected, config in names.items():
        assert detect_family(config, registry).name == expected


def test_a_model_that_no_family_serves():
    registry = registry_of(family("any", "*"), family("one", "OneModel"))
    with pytest.raises(UnsupportedModelError, match=r"no family serves BertModel, bert; .*one \(OneModel\)"):
        detect_family({"architectures": ["BertModel"], "model_type": "bert"}, registry)
    with pytest.raises(UnsupportedModelError, match=r"neither `architectures` nor `model_type`.*any, one"):
        detect_family({"architectures": 5}, registry)
    with pytest.raises(UnsupportedModelError, match="families: none"):
        detect_family({"architectures": ["XForCausalLM"]}, registry_of())


def test_two_families_that_claim_one_model():
    with pytest.raises(RegistryError, match="one and two both claim X"):
        detect_family({"architectures": ["X"]}, registry_of(family("one", "X"), family("two", "X")))


def test_a_folder_that_is_no_model(tmp_path, registry):
    with pytest.raises(CheckpointError, match=r"has neither config\.json nor model_index\.json"):
        resolve(OmniEngineArgs(model=str(tmp_path)), registry=registry)


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (b'{"a": 1,\n"b" 2}', r"config\.json:2: not valid JSON"),
        (b"\xff", "not valid JSON text"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "holds a list, not an object"),
    ],
)
def test_a_broken_config_json(content, fix, model, registry):
    (model / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=fix):
        resolve(OmniEngineArgs(model=str(model)), registry=registry)


def test_an_enormous_json_file_is_not_read(model, registry, monkeypatch):
    monkeypatch.setattr("omnistage.core.checkpoint._MAX_JSON_BYTES", 10)
    with pytest.raises(CheckpointError, match="larger than 10 bytes"):
        resolve(OmniEngineArgs(model=str(model)), registry=registry)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "..", "../x"])
def test_a_path_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "..":
        assert find_model(name, REGISTRY) == tmp_path.parent
        return
    with pytest.raises(CheckpointError, match="there is no folder"):
        find_model(name, REGISTRY)


def test_a_file_in_place_of_a_folder(model):
    with pytest.raises(CheckpointError, match="give the folder"):
        find_model(str(model / "config.json"), REGISTRY)


def _fill_hub_cache(cache: Path) -> Path:
    snapshot = cache / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cache / "models--org--name" / "refs").mkdir()
    (cache / "models--org--name" / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_hub_name_is_found_in_the_local_cache(tmp_path):
    snapshot = _fill_hub_cache(tmp_path)
    assert find_model("org/name", REGISTRY, cache_dir=tmp_path) == snapshot


def test_a_hub_name_that_is_not_here_is_not_downloaded_unasked(tmp_path, monkeypatch):
    calls = []

    def download(name, **options):
        from huggingface_hub.errors import LocalEntryNotFoundError

        calls.append(options.get("local_files_only", False))
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match="`hf download org/name` fetches it"):
        find_model("org/name", REGISTRY)
    assert calls == [True]
    with pytest.raises(CheckpointError, match="could not be downloaded: no connection"):
        find_model("org/name", REGISTRY, allow_download=True)
    assert calls == [True, True, False]


def test_a_hub_name_that_the_hub_refuses():
    with pytest.raises(CheckpointError, match="neither a folder nor a name on the hub"):
        find_model("org/name--x", REGISTRY)


def test_a_download_takes_no_code(tmp_path, monkeypatch):
    def download(name, *, local_files_only=False, allow_patterns=None, **options):
        from huggingface_hub.errors import LocalEntryNotFoundError

        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model("org/name", REGISTRY, allow_download=True) == tmp_path


@pytest.fixture
def checkpoint(model, resolved) -> OmniModelConfig:
    return resolved().model


def test_the_model_knows_its_files(checkpoint, model):
    assert (checkpoint.family, checkpoint.name, checkpoint.folder) == ("fake", "model", model.resolve())
    assert checkpoint.hf_config["model_type"] == "fake"
    assert checkpoint.has("config.json")
    assert not checkpoint.has("nothing.json")
    assert checkpoint.json("config.json") == checkpoint.hf_config
    with pytest.raises(CheckpointError, match=r"has no nothing\.json"):
        checkpoint.file("nothing.json")


# ------------------------------------------------------------------------------------------------ built in


def test_the_built_in_families_pass_every_check():
    from omnistage.models.registry import REGISTRY

    for each in REGISTRY.families().values():
        document = load_file(each.pipeline, label=each.name)
        assert isinstance(document.data, dict)
        config, graph = check(document.data, document.sources, REGISTRY)
        assert config.pipeline.name == each.name
        assert graph.outputs


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "~no-such-user-here/model", "\0", "\ud800"])
def test_a_model_name_that_no_system_takes_is_a_checkpoint_error(name):
    with pytest.raises(CheckpointError) as caught:
        find_model(name, REGISTRY)
    assert caught.value.param == "model"
    assert len(str(caught.value)) < 250


# ------------------------------------------------------------------------------------------------- placement


def test_groups_are_given_in_a_file_or_by_set(resolved, tmp_path):
    file = tmp_path / "groups.yaml"
    file.write_text("deployment: {placement: {voice: {stages: [talker, vocoder], replicas: 2}}}\n")
    from_file = resolved(config=file).config.deployment.placement["voice"]
    overrides = ("deployment.placement.voice.stages=[talker, vocoder]", "deployment.placement.voice.replicas=2")
    assert resolved(*overrides).config.deployment.placement["voice"] == from_file
    assert (from_file.kind, from_file.replicas, from_file.stages) == ("process", 2, ("talker", "vocoder"))
    assert resolved().config.deployment.placement == {}


def test_ray_takes_the_groups_that_name_no_kind_or_all_stages(resolved):
    everything = resolved(ray="auto").config
    assert everything.deployment.ray_address == "auto"
    group = everything.deployment.placement["all"]
    assert (group.kind, set(group.stages)) == ("ray", set(everything.pipeline.stages))
    set_ = "deployment.placement"
    groups = resolved(
        f"{set_}.a.stages=[talker]", f"{set_}.b.stages=[vocoder]", f"{set_}.b.kind=process", ray="10.0.0.1:6379"
    ).config.deployment
    assert {name: group.kind for name, group in groups.placement.items()} == {"a": "ray", "b": "process"}
    assert groups.ray_address == "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["a.stages=[talkr]"], "there is no stage 'talkr'; did you mean talker?"),
        (["a.stages=[talker]", "b.stages=[talker]"], "stage 'talker' is in group 'a' as well; name it in one group"),
        (["a.stages=[talker, talker]"], "stage 'talker' is twice; name it in one group, once"),
        (["a.stages=[talker]", "a.replicas=0"], "deployment.placement.a.replicas: must be greater than or equal to 1"),
        (["a.stages=[]"], "at least 1 item"),
        (["a.stages=[talker]", "a.kind=inline", "a.replicas=2"], "use kind: process or remove them"),
        (["a.stages=[talker]", "a.kind=docker"], "must be 'inline', 'process' or 'ray'"),
        (["a.stages=[talker]", "a.num_gpus=1"], "use kind: ray or remove them"),
        (["a b.stages=[talker]"], "'a b' is not a name of a group; use letters, digits, - and _"),
        (["a.stages=[talker]", "a.replica=2"], "did you mean replicas?"),
    ],
)
def test_a_wrong_group_says_what_to_change(overrides, problem, resolved):
    with pytest.raises(ConfigError) as error:
        resolved(*(f"deployment.placement.{override}" for override in overrides))
    assert problem in str(error.value)
