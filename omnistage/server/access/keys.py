"""Who may come in: API keys, kept as hashes, and web tokens, each with its own rate, concurrency and models."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from omnistage.config.yamlio import load_file
from omnistage.core.errors import ConfigError
from omnistage.server.access.jwt import PREFIX, REFUSED, TokenVerifier
from omnistage.server.http.errors import AuthenticationError, PermissionDeniedError, RateLimitError

KEYS_VARIABLE = "OMNISTAGE_API_KEYS"
_OPEN = "anonymous"
MAX_TOKEN_HOLDERS = 10_000
"""Holders of web tokens whose use is remembered; beyond it, those that have been idle longest are forgotten."""

_SHORTEST = 8
"""Characters of a key."""


class KeyConfig(BaseModel):
    """One line of a key file. Either the key itself or its SHA-256 (`hash`), which is the better habit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=100, description="Who it belongs to, for the audit log.")
    key: str | None = Field(default=None, min_length=_SHORTEST, max_length=500)
    hash: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    requests_per_minute: float | None = Field(default=None, gt=0, le=1e6)
    max_concurrent: int | None = Field(default=None, ge=1, le=100_000)
    models: tuple[str, ...] | None = Field(default=None, description="Models it may use; null: all.")

    @field_validator("name")
    @classmethod
    def _is_a_keys(cls, name: str) -> str:
        if name.startswith(PREFIX):
            raise ValueError(f"names that begin with {PREFIX} are those of web tokens; choose another")
        return name

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash) if self.hash is not None else digest_of(self.key or "")


class KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[KeyConfig, ...] = Field(min_length=1)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(slots=True)
class HolderUsage:
    """What a holder is using now."""

    running: int = 0
    sending: int = 0
    """Requests whose bodies are on their way."""
    sessions: int = 0
    """Conversations over a WebSocket."""
    left: float = 0.0
    """Requests that may start at once: a bucket that fills at the holder's rate."""
    filled: float | None = None
    """When it was last filled; None: it is full."""

    @property
    def idle(self) -> bool:
        return not (self.running or self.sending or self.sessions)


@dataclass(slots=True)
class Holder:
    """Someone who may come in: the holder of a key, or of a web token (without a digest)."""

    name: str
    digest: bytes
    rate: float | None = None
    """Requests a minute."""
    max_concurrent: int | None = None
    models: frozenset[str] | None = None
    use: HolderUsage = field(default_factory=HolderUsage)
    """Shared by all tokens of one holder, while each says for itself what it may use."""

    @property
    def running(self) -> int:
        return self.use.running

    @property
    def burst(self) -> float:
        """A minute's requests at once, and one at least: a key of less than one a minute still has its turn."""
        return max(self.rate or 0.0, 1.0)

    @contextmanager
    def count_upload(self) -> Iterator[None]:
        """Count a request while its body is on its way: it does not run yet, but takes memory.

        Raises if as many of the holder's are as it may have running; those that run are not counted again.
        """
        use = self.use
        if self.max_concurrent is not None and use.sending >= self.max_concurrent:
            raise RateLimitError(
                f"this key is sending {use.sending} requests, the most that it may have; wait for one to end",
                retry_after=1.0,
            )
        use.sending += 1
        try:
            yield
        finally:
            use.sending -= 1

    @contextmanager
    def count_session(self, most: int | None) -> Iterator[None]:
        """Count a session of the holder. Raises if it has `most` of them (None: any number) or its `max_concurrent`."""
        use, most = self.use, most if self.max_concurrent is None else self.max_concurrent
        if most is not None and use.sessions >= most:
            raise RateLimitError(
                f"this key has {use.sessions} sessions, the most that it may have; end one", retry_after=1.0
            )
        use.sessions += 1
        try:
            yield
        finally:
            use.sessions -= 1


class Keyring:
    """Checks keys and tokens and counts their use. An empty one lets everyone in. Used from the event loop only."""

    def __init__(
        self,
        holders: Sequence[Holder] = (),
        *,
        tokens: TokenVerifier | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_token_holders: int = MAX_TOKEN_HOLDERS,
    ) -> None:
        self._holders = list(holders)
        self._tokens = tokens
        self._clock = clock
        self._max_token_holders = max_token_holders
        self._bearers: OrderedDict[str, HolderUsage] = OrderedDict()
        self._anonymous = Holder(_OPEN, b"")

    @property
    def required(self) -> bool:
        return bool(self._holders) or self._tokens is not None

    def authenticate(self, header: str | None) -> Holder:
        """The holder of the key or token in an `Authorization` header. Raises `AuthenticationError`."""
        if not self.required:
            return self._anonymous
        scheme, _, given = (header or "").partition(" ")
        given = given.strip()
        if scheme.lower() != "bearer" or not given:
            raise AuthenticationError("an API key is needed; send it as `Authorization: Bearer KEY`")
        digest = digest_of(given)
        # All are compared, each in constant time: how long it takes says nothing about which one is near.
        matches = [holder for holder in self._holders if hmac.compare_digest(holder.digest, digest)]
        if matches:
            return matches[0]
        if self._tokens is None:
            raise AuthenticationError(REFUSED)
        bearer = self._tokens.verify(given)
        use = self._use_of(bearer.name)
        return Holder(bearer.name, b"", bearer.rate, bearer.max_concurrent, bearer.models, use)

    def _use_of(self, name: str) -> HolderUsage:
        use = self._bearers.get(name)
        if use is None:
            if len(self._bearers) >= self._max_token_holders:
                self._forget_one()
            use = self._bearers[name] = HolderUsage()
        self._bearers.move_to_end(name)
        return use

    def _forget_one(self) -> None:
        idle = next((name for name, use in self._bearers.items() if use.idle), None)
        if idle is None:
            raise RateLimitError("too many holders of tokens have requests running; try again", retry_after=1.0)
        del self._bearers[idle]

    @contextmanager
    def admit(self, holder: Holder, model: str) -> Iterator[None]:
        """Count one request of a holder. Raises if it may not use the model, or not now."""
        if holder.models is not None and model not in holder.models:
            raise PermissionDeniedError(f"this key may not use {model!r}", param="model")
        if holder.max_concurrent is not None and holder.running >= holder.max_concurrent:
            raise RateLimitError(
                f"this key has {holder.running} requests running, the most that it may have; wait for one to end",
                retry_after=1.0,
            )
        self._take(holder)
        use = holder.use
        use.running += 1
        try:
            yield
        finally:
            use.running -= 1

    def _take(self, holder: Holder) -> None:
        if holder.rate is None:
            return
        use, now = holder.use, self._clock()
        gained = holder.burst if use.filled is None else (now - use.filled) * holder.rate / 60
        use.left, use.filled = min(holder.burst, use.left + gained), now
        if use.left < 1:
            wait = (1 - use.left) * 60 / holder.rate
            raise RateLimitError(
                f"this key may start {holder.rate:g} requests a minute; try again in {wait:.1f} s", retry_after=wait
            )
        use.left -= 1


def load_keys(given: Sequence[str], file: Path | None, tokens: TokenVerifier | None = None) -> Keyring:
    """Keys from the command line, the environment (joined by commas) and a YAML file, with web tokens beside them."""
    listed = [*given, *(key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip())]
    for key in listed:
        if len(key) < _SHORTEST:
            raise ConfigError(f"a key of {len(key)} characters is easily guessed; use {_SHORTEST} at least, better 32")
    holders = [Holder(f"key-{i + 1}", digest_of(key)) for i, key in enumerate(listed)]
    if file is not None:
        taken = {holder.name for holder in holders}
        for index, config in enumerate(_read(file).keys):
            if config.name in taken:  # they would see each other's requests
                raise ConfigError(f"{file}: keys.{index}.name: {config.name!r} is the name of a listed key; rename it")
            holders.append(_holder(config))
    return Keyring(holders, tokens=tokens)


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
