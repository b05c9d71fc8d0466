"""The adapters of a stage by name: where they come from, their tensors in host memory within a bound."""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from omnistage.core.errors import AdapterError, InternalError
from omnistage.core.params import AdapterWeight
from omnistage.core.validation import short_repr
from omnistage.engines.adapters.files import AdapterFiles, LoraPair, read_adapter
from omnistage.engines.byte_cache import ByteCache

MAX_ADAPTERS = 1000
"""Names of one stage; the tensors of those that are not in use are read again when they are."""

Pairs = Mapping[str, LoraPair]
Read = Callable[[AdapterFiles, float], Pairs]
"""Pairs by the stage's layers, from an adapter's files and its scale. Raises `AdapterError` where it does not fit."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where an adapter comes from."""

    folder: Path
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. Requests keep it, not its tensors; it outlives its name while they use it."""

    name: str
    source: AdapterSource
    digest: bytes
    """Of its content and scale: keys and values, and places on the device, belong to content, not to names."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a request uses."""

    adapters: tuple[tuple[Adapter, float], ...] = ()
    salt: bytes = b""
    """What prefixes that it computes are keyed by, beside their tokens."""

    @property
    def digests(self) -> frozenset[bytes]:
        return frozenset(adapter.digest for adapter, _weight in self.adapters)


NOTHING = Selection()


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What a stage makes room for."""

    slots: int
    """Adapters on the device at once."""
    rank: int | None
    """None: the largest of the configured ones."""
    memory: int
    """Bytes of tensors that are kept in host memory; no adapter may be larger."""
    at_run_time: bool
    """Others may be loaded while it runs."""


DEFAULT_RANK = 16
"""Of stages that load adapters at run time, where nobody says."""


class AdapterLibrary:
    """Thread-safe. Reading from disk happens in the thread that asks."""

    def __init__(self, stage: str, configured: Mapping[str, AdapterSource], limits: AdapterLimits) -> None:
        self.stage = stage
        # Without others to come, more places than adapters would only be computed with for nothing.
        slots = limits.slots if limits.at_run_time else min(limits.slots, max(len(configured), 1))
        self.limits = replace(limits, slots=slots)
        self.shapes: dict[str, tuple[int, int]] = {}
        """Inputs and outputs of the layers that adapters can change; a stage that is built anew has the same."""
        self._configured = dict(configured)
        self._read: Read | None = None
        self._lock = threading.Lock()
        self._adapters: dict[str, Adapter] = {}
        self._cache = ByteCache[Pairs](limits.memory, _size_of)

    def open(self, read: Read) -> None:
        """Read the configured adapters by what the stage's network is; again for a stage that is built anew."""
        self._read = read
        with self._lock:
            self._cache.clear()
            names = set(self._adapters)
        for name, source in self._configured.items():
            if name not in names:
                self.load(name, source)
        self._configured = {}  # they are like others now

    @property
    def rank(self) -> int:
        """Of the largest adapter that fits: as configured, or that of the adapters that are there."""
        if self.limits.rank is not None:
            return self.limits.rank
        least = DEFAULT_RANK if self.limits.at_run_time else 1
        with self._lock:
            adapters = list(self._adapters.values())
        return max([least, *(len(pair.down) for adapter in adapters for pair in self.pairs(adapter).values())])

    def layers(self) -> set[str]:
        """Those that the adapters which are there change."""
        with self._lock:
            adapters = list(self._adapters.values())
        return {layer for adapter in adapters for layer in self.pairs(adapter)}

    # ----------------------------------------------------------------------------------------------- names

    def names(self) -> dict[str, AdapterSource]:
        with self._lock:
            return {name: adapter.source for name, adapter in self._adapters.items()}

    def load(self, name: str, source: AdapterSource) -> None:
        """Read an adapter and give it a name. Raises `AdapterError` and changes nothing where it does not fit."""
        self._check_new(name)
        try:
            pairs, digest = self._pairs_of(source)
        except AdapterError as error:
            raise AdapterError(f"adapter {short_repr(name)}: {error.message}", param=error.param) from error
        with self._lock:
            self._check_new(name)
            self._adapters[name] = Adapter(name, source, digest)
            self._cache.put(digest, pairs)

    def _check_new(self, name: str) -> None:
        if name in self._adapters:
            raise AdapterError(f"adapter {short_repr(name)} is loaded already; unload it first", param="lora_name")
        if len(self._adapters) >= MAX_ADAPTERS:
            raise AdapterError(f"{MAX_ADAPTERS} adapters are loaded already; unload one first", param="lora_name")

    def unload(self, name: str) -> None:
        """Forget a name. Requests that use it finish; its tensors go at once, and come from disk for these."""
        with self._lock:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                raise _unknown(name, "lora_name")
            if all(other.digest != adapter.digest for other in self._adapters.values()):
                self._cache.drop(adapter.digest)

    # ---------------------------------------------------------------------------------------------- requests

    def select(self, weights: tuple[AdapterWeight, ...]) -> Selection:
        """What a request asks for. Raises the client's error; tensors that are not in host memory are read."""
        if not weights:
            return NOTHING
        with self._lock:
            adapters = [(each, self._adapters.get(each.name)) for each in weights]
        selected: list[tuple[Adapter, float]] = []
        salt = hashlib.blake2b(digest_size=16)
        for each, adapter in adapters:
            if adapter is None:
                raise _unknown(each.name, "lora")
            self.pairs(adapter)
            selected.append((adapter, each.weight))
        for digest, weight in sorted((adapter.digest, weight) for adapter, weight in selected):
            salt.update(digest + struct.pack("<d", weight))
        selection = Selection(tuple(selected), salt.digest())
        if len(selection.digests) > self.limits.slots:
            raise AdapterError(
                f"{len(weights)} adapters in one request are over the {self.limits.slots} that stage {self.stage!r} "
                "holds at once; use fewer or raise deployment.adapter_slots",
                param="lora",
            )
        return selection

    def pairs(self, adapter: Adapter) -> Pairs:
        """An adapter's tensors. Raises `AdapterError` where they have to be read again and have changed."""
        with self._lock:
            pairs = self._cache.get(adapter.digest)
        if pairs is not None:
            return pairs
        pairs, digest = self._pairs_of(adapter.source)
        if digest != adapter.digest:
            raise AdapterError(
                f"the files of adapter {short_repr(adapter.name)} have changed since it was loaded; unload it and load "
                "it again",
                param="lora",
            )
        with self._lock:
            if adapter in self._adapters.values():  # else nobody would drop it
                self._cache.put(digest, pairs)
        return pairs

    @property
    def held_bytes(self) -> int:
        """Of tensors in host memory."""
        return self._cache.bytes

    def _pairs_of(self, source: AdapterSource) -> tuple[Pairs, bytes]:
        if self._read is None:
            raise InternalError(f"the adapters of stage {self.stage!r} were never opened")
        if not math.isfinite(source.scale):
            raise AdapterError("the scale must be a finite number")
        files = read_adapter(source.folder, self.limits.memory)
        pairs = self._read(files, source.scale)
        if (size := _size_of(pairs)) > self.limits.memory:
            raise AdapterError(
                f"it takes {size} bytes, over the limit of {self.limits.memory}; raise deployment.adapter_memory"
            )
        self._check_rank(pairs)
        digest = hashlib.blake2b(files.digest + struct.pack("<d", source.scale), digest_size=16).digest()
        return pairs, digest

    def _check_rank(self, pairs: Pairs) -> None:
        largest, limit = max(len(pair.down) for pair in pairs.values()), self.limits.rank
        if limit is not None and largest > limit:
            raise AdapterError(
                f"it has rank {largest}, over the {limit} that stage {self.stage!r} has room for; raise "
                "deployment.adapter_rank"
            )

    def fix_rank(self) -> int:
        """Let no adapter with a larger rank in from now on; the rank."""
        rank = self.rank
        self.limits = replace(self.limits, rank=rank)
        return rank


def select(library: AdapterLibrary | None, stage: str, weights: tuple[AdapterWeight, ...]) -> Selection:
    """What a request to a stage asks for; most stages have no adapters."""
    if library is not None:
        return library.select(weights)
    if weights:
        raise AdapterError(f"stage {stage!r} has no adapters; configure deployment.adapters", param="lora")
    return NOTHING


def _size_of(pairs: Pairs) -> int:
    return sum(pair.down.nbytes + pair.up.nbytes for pair in pairs.values())


def _unknown(name: str, param: str) -> AdapterError:
    return AdapterError(f"there is no adapter {short_repr(name)}; /v1/models lists those that are loaded", param=param)
