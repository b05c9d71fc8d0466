"""Registering checks names and signatures; nothing is half registered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from omnistage.core import registry as registry_module
from omnistage.core.errors import RegistryError
from omnistage.core.family import Family
from omnistage.core.registry import Registry, check_bridge


def good_bridge(request, state, chunk):
    return state, ()


def good_component(context):
    return None


def make_family(name: str = "fam", **changes: object) -> Family:
    fields = {
        "name": name,
        "architectures": ("X",),
        "pipeline": Path("pipeline.yaml"),
        "components": {f"{name}.part": good_component},
        "bridges": {f"{name}.hop": good_bridge},
        "processor": lambda model: None,
    }
    return Family(**{**fields, **changes})


@pytest.fixture
def registry() -> Registry:
    fresh = Registry()
    fresh._discovered = True  # no built-in families here
    return fresh


def test_what_a_family_brings_is_found_by_name(registry):
    registry.register(make_family())
    assert registry.family("fam").name == "fam"
    assert registry.component("fam.part") is good_component
    assert registry.bridge("fam.hop") is good_bridge
    assert (registry.component_names(), registry.bridge_names()) == (["fam.part"], ["fam.hop"])
    assert list(registry.families()) == ["fam"]


def wrong_order(state, request, chunk): ...
def too_few(request, state): ...
def too_many(request, state, chunk, extra): ...
def with_default(request, state, chunk, extra=None): ...
def catch_all(*args): ...
def keyword_only(request, state, *, chunk): ...
def other_names(a, b, c): ...


@pytest.mark.parametrize(
    "bridge", [wrong_order, too_few, too_many, with_default, catch_all, keyword_only, other_names, lambda: None]
)
def test_a_bridge_with_another_signature_is_refused(bridge, registry):
    with pytest.raises(RegistryError, match=r"must be \(request, state, chunk\)"):
        registry.register_bridge("fam.hop", bridge)
    with pytest.raises(RegistryError, match="signature"):
        registry.register(make_family(bridges={"fam.hop": bridge}))
    assert registry.bridge_names() == []


def test_a_bridge_must_be_callable(registry):
    with pytest.raises(RegistryError, match="not callable"):
        check_bridge("fam.hop", "os.system")


@pytest.mark.parametrize("factory", [lambda: None, lambda a, b: None, "os.system"])
def test_a_component_factory_takes_the_load_context(factory, registry):
    with pytest.raises(RegistryError, match="LoadContext"):
        registry.register_component("fam.part", factory)


@pytest.mark.parametrize(
    "name", ["pkg.mod:func", "a/b.py", "Pkg.Thing", "", ".", "a..b", "a.", "1a", "a b", "os.Path", "a\n"]
)
def test_a_name_that_is_no_registry_name_is_refused(name, registry):
    with pytest.raises(RegistryError, match=r"like 'family\.part'"):
        registry.register_bridge(name, good_bridge)
    with pytest.raises(RegistryError, match=r"like 'family\.part'"):
        registry.register_component(name, good_component)
    with pytest.raises(RegistryError, match=r"like 'family\.part'"):
        registry.register(make_family(name, components={}, bridges={}))


def test_a_name_is_given_once(registry):
    registry.register(make_family())
    with pytest.raises(RegistryError, match="family 'fam' is registered already"):
        registry.register(make_family())
    with pytest.raises(RegistryError, match=r"component 'fam\.part' is registered already"):
        registry.register_component("fam.part", good_component)
    with pytest.raises(RegistryError, match=r"bridge 'fam\.hop' is registered already"):
        registry.register_bridge("fam.hop", good_bridge)


@pytest.mark.parametrize(
    "changes",
    [
        {"components": {"new.part": good_component, "fam.part": good_component}},
        {"bridges": {"new.hop": good_bridge, "fam.hop": good_bridge}},
        {"bridges": {"new.hop": too_few}},
    ],
)
def test_a_family_that_is_refused_leaves_nothing_behind(changes, registry):
    registry.register(make_family())
    with pytest.raises(RegistryError):
        registry.register(make_family("new", **changes))
    assert list(registry.families()) == ["fam"]
    assert registry.component_names() == ["fam.part"]
    assert registry.bridge_names() == ["fam.hop"]


@pytest.mark.parametrize("kind", ["family", "component", "bridge"])
def test_an_unknown_name_lists_the_known(kind, registry):
    lookup = getattr(registry, kind)
    with pytest.raises(RegistryError, match=f"unknown {kind} 'nope'; known: none"):
        lookup("nope")
    registry.register(make_family())
    with pytest.raises(RegistryError, match="known: fam"):
        lookup("nope")


def test_single_parts_can_be_registered(registry):
    registry.register_bridge("mine.hop", good_bridge)
    registry.register_component("mine.part", good_component)
    assert registry.bridge("mine.hop") is good_bridge
    assert registry.component("mine.part") is good_component


def test_families_of_installed_packages_are_found_once(monkeypatch):
    loads = []

    def entry_points(*, group):
        assert group == "omnistage.families"
        return [SimpleNamespace(name="theirs", load=lambda: loads.append(1) or make_family("theirs"))]

    monkeypatch.setattr(registry_module, "entry_points", entry_points)
    registry = Registry(lambda own: own.register(make_family("ours")))
    assert list(registry.families()) == ["ours", "theirs"]
    assert registry.component("theirs.part") is good_component
    assert len(loads) == 1


def test_an_entry_point_that_is_no_family_is_refused(monkeypatch):
    entry = SimpleNamespace(name="theirs", load=lambda: "not a family")
    monkeypatch.setattr(registry_module, "entry_points", lambda *, group: [entry])
    with pytest.raises(RegistryError, match=r"'theirs' of omnistage\.families is not a Family"):
        Registry().families()
