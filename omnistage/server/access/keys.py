"""API keys, stored as hashes, and JSON web tokens: each holder has a rate, a concurrency limit and models."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from omnistage.config.yamlio import load_file
from omnistage.core.errors import ConfigError, LimitExceededError
from omnistage.core.validation import first_problem
from omnistage.server.http.errors import AuthenticationError, PermissionDeniedError, RateLimitError

if TYPE_CHECKING:
    from omnistage.server.access.jwt import TokenVerifier

KEYS_VARIABLE = "OMNISTAGE_API_KEYS"
TOKEN_PREFIX = "jwt:"
"""Starts the names of token holders; no key may have such a name."""
INVALID_KEY = "the API key or token is not valid; check it"
MAX_TOKEN_HOLDERS = 10_000
"""Token holders whose usage is remembered; beyond it, those that have been idle longest are dropped."""
_MIN_KEY_CHARS = 8
Activity = Literal["requests", "uploads", "sessions"]


class KeyConfig(BaseModel):
    """An entry of a key file. Either the key itself or, better, its SHA-256 (`hash`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=100, description="Who it belongs to, for the audit log.")
    key: str | None = Field(default=None, min_length=_MIN_KEY_CHARS, max_length=500)
    hash: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    requests_per_minute: float | None = Field(default=None, gt=0, le=1e6)
    max_concurrent: int | None = Field(default=None, ge=1, le=100_000)
    models: tuple[str, ...] | None = Field(default=None, description="Models it may use; null: all.")

    @field_validator("name")
    @classmethod
    def _not_a_token(cls, name: str) -> str:
        if name.startswith(TOKEN_PREFIX):
            raise ValueError(f"names that begin with {TOKEN_PREFIX} are reserved for web tokens; choose another")
        return name

    def holder(self) -> Holder:
        digest = bytes.fromhex(self.hash) if self.hash is not None else digest_of(self.key or "")
        models = None if self.models is None else frozenset(self.models)
        return Holder(self.name, digest, self.requests_per_minute, self.max_concurrent, models)


class KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[KeyConfig, ...] = Field(min_length=1)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(slots=True)
class HolderUsage:
    """What a holder is using now."""

    counts: Counter[Activity] = field(default_factory=Counter)
    """Running requests, bodies being uploaded, realtime sessions."""
    tokens: float = 0.0
    """A token bucket that refills at the holder's rate: requests that may start at once."""
    refilled_at: float | None = None
    """None: it is full."""
    held_bytes: int = 0
    """Of its bodies, messages and sessions."""

    @property
    def idle(self) -> bool:
        return not any(self.counts.values()) and not self.held_bytes


@dataclass(slots=True)
class Holder:
    """The holder of a key, or of a web token (without a digest)."""

    name: str
    digest: bytes
    rate: float | None = None
    """Requests a minute."""
    max_concurrent: int | None = None
    models: frozenset[str] | None = None
    use: HolderUsage = field(default_factory=HolderUsage)
    """Shared by all tokens of one holder; the limits are each token's own."""
    address: str | None = None
    """The client's address, for requests without a key."""
    expires_at: float | None = None
    """When a web token is no longer valid, in Unix seconds."""

    @contextmanager
    def count(self, activity: Activity, limit: int | None = None, *, number: int = 1) -> Iterator[None]:
        """Count an activity of the holder. Raises beyond `max_concurrent` of it, or without one beyond `limit`.

        Uploads are counted apart from running requests: they do not run yet, but take memory.
        """
        counts, limit = self.use.counts, limit if self.max_concurrent is None else self.max_concurrent
        if limit is not None and counts[activity] + number > limit:
            raise RateLimitError(
                f"this key has {counts[activity]} {activity} of {limit}; wait for one to end", retry_after=1.0
            )
        counts[activity] += number
        try:
            yield
        finally:
            counts[activity] -= number

    def take_token(self, rate: float, now: float) -> None:
        """Start one request at a rate. Raises where the rate does not allow it yet."""
        # A minute's requests at once, and at least one: a rate below one a minute still allows requests.
        use, burst = self.use, max(rate, 1.0)
        gained = burst if use.refilled_at is None else (now - use.refilled_at) * rate / 60
        use.tokens, use.refilled_at = min(burst, use.tokens + gained), now
        if use.tokens < 1:
            wait = (1 - use.tokens) * 60 / rate
            raise RateLimitError(
                f"this key may start {rate:g} requests a minute; try again in {wait:.1f} s", retry_after=wait
            )
        use.tokens -= 1


class Keyring:
    """Authenticates keys and tokens and enforces their limits; an empty one lets everyone in. Event loop only."""

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
        self._token_usage: OrderedDict[str, HolderUsage] = OrderedDict()
        self._anonymous = Holder("anonymous", b"")
        self.required = bool(self._holders) or tokens is not None

    def authenticate(self, header: str | None, address: str | None = None) -> Holder:
        """The holder of the key or token in an `Authorization` header. Raises `AuthenticationError`."""
        if not self.required:
            return replace(self._anonymous, address=address)
        scheme, _, credential = (header or "").partition(" ")
        credential = credential.strip()
        if scheme.lower() != "bearer" or not credential:
            raise AuthenticationError("an API key is required; send it as `Authorization: Bearer KEY`")
        digest = digest_of(credential)
        # All are compared, each in constant time: the duration does not depend on the keys.
        matches = [holder for holder in self._holders if hmac.compare_digest(holder.digest, digest)]
        if matches:
            return matches[0]
        if self._tokens is None:
            raise AuthenticationError(INVALID_KEY)
        holder = self._tokens.verify(credential)
        holder.use = self._usage_of(holder.name)
        return holder

    def _usage_of(self, name: str) -> HolderUsage:
        usage = self._token_usage.get(name)
        if usage is None:
            if len(self._token_usage) >= self._max_token_holders:
                self._drop_idle_usage()
            usage = self._token_usage[name] = HolderUsage()
        self._token_usage.move_to_end(name)
        return usage

    def _drop_idle_usage(self) -> None:
        idle = next((name for name, usage in self._token_usage.items() if usage.idle), None)
        if idle is None:
            raise RateLimitError("too many token holders have running requests; try again", retry_after=1.0)
        del self._token_usage[idle]

    @contextmanager
    def admit(self, holder: Holder, model: str, answers: int = 1, param: str = "n") -> Iterator[None]:
        """Count a request of a holder, which is as many as it has answers. Raises if it may not run, or not now.

        `param` is the field that asks for so many. One without answers is a part of another, and has its place.
        """
        if holder.models is not None and model not in holder.models:
            raise PermissionDeniedError(f"this key may not use {model!r}", param="model")
        if not answers:
            yield
            return
        if holder.max_concurrent is not None and answers > holder.max_concurrent:
            raise LimitExceededError(
                f"{answers} answers at once are over this key's limit of {holder.max_concurrent}; request fewer",
                param=param,
            )
        with holder.count("requests", number=answers):
            if holder.rate is not None:
                holder.take_token(holder.rate, self._clock())
            yield


@lru_cache(maxsize=1024)
def network_of(address: str | None) -> str | None:
    """A client by its address. With IPv6 one has 2**64 of them."""
    parsed = None if address is None else ip_address(address)
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(ip_network((parsed, 64), strict=False))
    return address


def load_keys(keys: Sequence[str], file: Path | None, tokens: TokenVerifier | None = None) -> Keyring:
    """Keys from the command line, the environment (comma-separated) and a YAML file, beside web tokens."""
    entries = [*keys, *(key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip())]
    for key in entries:
        if len(key) < _MIN_KEY_CHARS:
            raise ConfigError(f"a key of {len(key)} characters is too short; use at least {_MIN_KEY_CHARS}, better 32")
    holders = [Holder(f"key-{i + 1}", digest_of(key)) for i, key in enumerate(entries)]
    if file is not None:
        names = {holder.name for holder in holders}
        for index, config in enumerate(_read(file).keys):
            if config.name in names:  # they would see each other's requests
                raise ConfigError(f"{file}: keys[{index}].name: {config.name!r} is the name of a listed key; rename it")
            holders.append(config.holder())
    return Keyring(holders, tokens=tokens)


def _read(file: Path) -> KeyFile:
    data = load_file(file).data
    try:
        parsed = KeyFile.model_validate(data)
    except ValidationError as error:
        # Without the input, which may be the key itself.
        problem = first_problem(error.errors(include_url=False, include_input=False), data).error()
        raise ConfigError(f"{file}: {problem.param}: {problem.message}") from error
    for index, key in enumerate(parsed.keys):
        if (key.key is None) == (key.hash is None):
            raise ConfigError(f"{file}: keys[{index}]: give exactly one of key and hash")
    return parsed
