"""JSON web tokens beside keys: signed elsewhere, checked here, and never trusted to say how they are to be checked."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnistage.core.errors import ConfigError, MissingDependencyError
from omnistage.server.http.errors import AuthenticationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

_log = logging.getLogger(__name__)
PREFIX = "jwt:"
"""Before the names of tokens' holders; no key may have a name that begins so."""
REFUSED = "the API key or token is not valid; check it"
_MOST_CHARS = 8192
_MOST_NAME = 200
_LEEWAY_SECONDS = 10
_LEAST_SECRET = 32
_LEAST_RSA_BITS = 2048
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}


class Limits(BaseModel):
    """The claim `omnistage`: what this token's holder may use, by the names of a key file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    models: list[str] | None = None
    requests_per_minute: float | None = Field(default=None, gt=0, le=1e6)
    max_concurrent: int | None = Field(default=None, ge=1, le=100_000)


@dataclass(frozen=True, slots=True)
class Bearer:
    """Who a token speaks for, and what they may use."""

    name: str
    rate: float | None = None
    max_concurrent: int | None = None
    models: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key and the only algorithms that it is used with: its kind decides, whatever a token's header says."""

    key: PublicKeyTypes | bytes
    algorithms: tuple[str, ...]
    key_id: str | None = None


class TokenVerifier:
    """Checks signature, time, audience and issuer. `rate` and `max_concurrent` bound what a token may grant."""

    def __init__(
        self,
        keys: Sequence[SigningKey],
        *,
        audience: str | None = None,
        issuer: str | None = None,
        rate: float | None = None,
        max_concurrent: int | None = None,
    ) -> None:
        self._jwt = _pyjwt()
        self._keys = tuple(keys)
        self._audience = audience
        self._issuer = issuer
        self._rate = rate
        self._max_concurrent = max_concurrent

    def verify(self, token: str) -> Bearer:
        """The bearer of a valid token. Raises `AuthenticationError`, which does not say what is wrong with it."""
        try:
            if len(token) > _MOST_CHARS:
                raise ValueError("too long")
            return self._bearer(self._claims(token))
        except (self._jwt.PyJWTError, ValidationError, ValueError, TypeError, RecursionError) as error:
            # By its kind alone: what a token says is its holder's.
            _log.debug("a token was refused: %s", type(error).__name__)
            raise AuthenticationError(REFUSED) from None

    def _claims(self, token: str) -> Mapping[str, Any]:
        signing = self._chosen(self._jwt.get_unverified_header(token).get("kid"))
        claims: Mapping[str, Any] = self._jwt.decode(
            token,
            signing.key,
            algorithms=list(signing.algorithms),
            audience=self._audience,
            issuer=self._issuer,
            leeway=_LEEWAY_SECONDS,
            options={"require": self._required()},
        )
        return claims

    def _required(self) -> list[str]:
        audience = ["aud"] if self._audience is not None else []
        return ["exp", "sub", *audience, *(["iss"] if self._issuer is not None else [])]

    def _chosen(self, key_id: object) -> SigningKey:
        """The key that a token names; one that stands alone needs no name."""
        if len(self._keys) == 1 and (key_id is None or self._keys[0].key_id is None):
            return self._keys[0]
        for signing in self._keys:
            if signing.key_id is not None and signing.key_id == key_id:
                return signing
        raise ValueError("no such key")

    def _bearer(self, claims: Mapping[str, Any]) -> Bearer:
        subject = claims["sub"]
        if not subject or len(subject) > _MOST_NAME or not subject.isprintable():
            raise ValueError("not a name")
        limits = Limits.model_validate(claims.get("omnistage", {}))
        named = _scoped_models(claims.get("scope"))
        if limits.models is not None:
            listed = frozenset(limits.models)
            named = listed if named is None else named & listed
        return Bearer(
            PREFIX + subject,
            _least(limits.requests_per_minute, self._rate),
            _least(limits.max_concurrent, self._max_concurrent),
            named,
        )


def _scoped_models(scope: object) -> frozenset[str] | None:
    """The models that words like `model:chat` of a scope name; None where it names none."""
    if scope is None:
        return None
    if not isinstance(scope, str):
        raise TypeError("a scope is words joined by blanks")
    words = [word.removeprefix("model:") for word in scope.split() if word.startswith("model:")]
    return frozenset(words) if words else None


def _least(first: Any, second: Any) -> Any:
    given = [value for value in (first, second) if value is not None]
    return min(given) if given else None


# --------------------------------------------------------------------------------------------------- keys


def secret_key(variable: str) -> SigningKey:
    """The shared secret in an environment variable, for HS256."""
    secret = os.environ.get(variable, "").encode()
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"the environment variable {variable} must hold a secret of at least {_LEAST_SECRET} bytes, "
            f"it has {len(secret)}",
            param="--jwt-secret-env",
        )
    return SigningKey(secret, ("HS256",))


def read_keys(file: Path) -> list[SigningKey]:
    """The public keys in a PEM file or a JSON web key set. Raises `ConfigError`."""
    try:
        data = file.read_bytes()
        made = _from_set(data) if data.lstrip().startswith(b"{") else [_from_pem(data)]
    except (OSError, ValueError, TypeError, KeyError, _pyjwt().PyJWTError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file} is not a usable public key (PEM) or key set (JWKS): {why}", param="--jwt-key") from (
            error
        )
    names = [key.key_id for key in made]
    if len(made) > 1 and (None in names or len(set(names)) < len(names)):
        raise ConfigError(f"{file}: every key of a set needs a kid of its own", param="--jwt-key")
    return made


def _from_pem(data: bytes) -> SigningKey:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if b"PRIVATE KEY" in data:
        raise ValueError("it holds a private key; give the public one, which is all that is needed here")
    key = load_pem_public_key(data)
    return SigningKey(key, _algorithms(key))


def _from_set(data: bytes) -> list[SigningKey]:
    from jwt import PyJWK

    made = []
    for entry in json.loads(data)["keys"]:
        if "d" in entry or entry.get("kty") == "oct":
            raise ValueError("it holds a private key or a secret; give public keys only")
        if entry.get("use", "sig") != "sig":
            continue
        key = PyJWK(entry).key
        algorithms = _algorithms(key)
        if entry.get("alg") is not None:
            algorithms = tuple(name for name in algorithms if name == entry["alg"])
        if not algorithms:
            raise ValueError("a key's alg does not go with its kind")
        made.append(SigningKey(key, algorithms, entry.get("kid")))
    if not made:
        raise ValueError("there is no key for signatures in it")
    return made


def _algorithms(key: PublicKeyTypes) -> tuple[str, ...]:
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

    if isinstance(key, rsa.RSAPublicKey):
        if key.key_size < _LEAST_RSA_BITS:
            raise ValueError(f"an RSA key needs at least {_LEAST_RSA_BITS} bits")
        return _RSA
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return (_CURVES[key.curve.name],)
    if isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
        return ("EdDSA",)
    raise ValueError("keys are RSA, EC on a NIST curve, or Ed25519")


def _pyjwt() -> Any:
    try:
        import jwt
    except ModuleNotFoundError as error:
        raise MissingDependencyError("JSON web tokens need more: pip install 'omnistage[jwt]'") from error
    return jwt
