"""Who may come in: API keys, kept as hashes, each with its own rate, concurrency and models."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnistage.config.yamlio import load_file
from omnistage.errors import ConfigError
from omnistage.server.errors import AuthenticationError, PermissionDeniedError, RateLimitError

KEYS_VARIABLE = "OMNISTAGE_API_KEYS"
_OPEN = "anonymous"


class KeyConfig(BaseModel):
    """One line of a key file. Either the key itself or its SHA-256 (`hash`), which is the better habit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=100, description="Who it belongs to, for the audit log.")
    key: str | None = Field(default=None, min_length=8, max_length=500)
    hash: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    requests_per_minute: float | None = Field(default=None, gt=0, le=1e6)
    max_concurrent: int | None = Field(default=None, ge=1, le=100_000)
    models: tuple[str, ...] | None = Field(default=None, description="Models it may use; null: all.")

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash) if self.hash is not None else digest_of(self.key or "")


class KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[KeyConfig, ...] = Field(min_length=1)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(slots=True)
class Holder:
    """A key and what it is using now."""

    name: str
    digest: bytes
    rate: float | None = None
    """Requests a minute."""
    max_concurrent: int | None = None
    models: frozenset[str] | None = None
    running: int = 0
    tokens: float = field(default=0.0)
    """Requests that may start at once: a bucket that fills at `rate`."""
    filled: float = field(default=0.0)

    @property
    def burst(self) -> float:
        """A minute's requests at once, and one at least: a key of less than one a minute still has its turn."""
        return max(self.rate or 0.0, 1.0)


class Keyring:
    """Checks keys and counts their use. An empty one lets everyone in. Used from the event loop only."""

    def __init__(self, holders: Sequence[Holder] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._holders = list(holders)
        self._clock = clock
        now = clock()
        for holder in self._holders:
            holder.tokens, holder.filled = holder.burst, now
        self._anonymous = Holder(_OPEN, b"")

    @property
    def required(self) -> bool:
        return bool(self._holders)

    def authenticate(self, header: str | None) -> Holder:
        """The holder of the key in an `Authorization` header. Raises `AuthenticationError`."""
        if not self._holders:
            return self._anonymous
        scheme, _, given = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise AuthenticationError("an API key is needed; send it as `Authorization: Bearer KEY`")
        digest = digest_of(given.strip())
        # All are compared, each in constant time: how long it takes says nothing about which one is near.
        matches = [holder for holder in self._holders if hmac.compare_digest(holder.digest, digest)]
        if not matches:
            raise AuthenticationError("the API key is not known; check it")
        return matches[0]

    @contextmanager
    def using(self, holder: Holder, model: str) -> Iterator[None]:
        """Count one request of a holder. Raises if it may not use the model, or not now."""
        if holder.models is not None and model not in holder.models:
            raise PermissionDeniedError(f"this key may not use {model!r}", param="model")
        if holder.max_concurrent is not None and holder.running >= holder.max_concurrent:
            raise RateLimitError(
                f"this key has {holder.running} requests running, the most that it may have; wait for one to end",
                retry_after=1.0,
            )
        self._take(holder)
        holder.running += 1
        try:
            yield
        finally:
            holder.running -= 1

    def _take(self, holder: Holder) -> None:
        if holder.rate is None:
            return
        now = self._clock()
        holder.tokens = min(holder.burst, holder.tokens + (now - holder.filled) * holder.rate / 60)
        holder.filled = now
        if holder.tokens < 1:
            wait = (1 - holder.tokens) * 60 / holder.rate
            raise RateLimitError(
                f"this key may start {holder.rate:g} requests a minute; try again in {wait:.1f} s", retry_after=wait
            )
        holder.tokens -= 1


def load_keys(given: Sequence[str], file: Path | None) -> Keyring:
    """Keys from the command line, the environment (joined by commas) and a YAML file."""
    listed = [*given, *(key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip())]
    holders = [Holder(f"key-{i + 1}", digest_of(key)) for i, key in enumerate(listed)]
    if file is not None:
        holders += [_holder(config) for config in _read(file).keys]
    return Keyring(holders)


def _holder(config: KeyConfig) -> Holder:
    models = None if config.models is None else frozenset(config.models)
    return Holder(config.name, config.digest, config.requests_per_minute, config.max_concurrent, models)


def _read(file: Path) -> KeyFile:
    try:
        read = KeyFile.model_validate(load_file(file).data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]  # never the key itself
        path = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{file}: {path}: {first['msg']}") from error
    for index, key in enumerate(read.keys):
        if (key.key is None) == (key.hash is None):
            raise ConfigError(f"{file}: keys.{index}: give exactly one of key and hash")
    return read
