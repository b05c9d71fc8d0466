"""JSON web tokens: signed elsewhere, verified here with algorithms that the key decides and not the token.

Only imported where tokens are used.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnistage.core.errors import ConfigError, MissingDependencyError
from omnistage.server.access.keys import INVALID_KEY, TOKEN_PREFIX, Holder
from omnistage.server.http.errors import AuthenticationError

try:
    import jwt
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
except ModuleNotFoundError as error:
    raise MissingDependencyError("JSON web tokens need more packages: pip install 'omnistage[jwt]'") from error

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

_log = logging.getLogger(__name__)
_MAX_TOKEN_CHARS = 8192
_MAX_NAME_CHARS = 200
_LEEWAY_SECONDS = 10
_END_OF_TIME = 2**53
"""In seconds: tokens may name any number."""
_MIN_SECRET_BYTES = 32
_MIN_RSA_BITS = 2048
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
NumberT = TypeVar("NumberT", int, float)


class TokenLimits(BaseModel):
    """The claim `omnistage`: what the token's holder may use, with the names of a key file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    models: list[str] | None = None
    requests_per_minute: float | None = Field(default=None, gt=0, le=1e6)
    max_concurrent: int | None = Field(default=None, ge=1, le=100_000)


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key and the only algorithms that it is used with, whatever a token's header says."""

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
        self._keys = tuple(keys)
        self._audience = audience
        self._issuer = issuer
        self._rate = rate
        self._max_concurrent = max_concurrent
        optional = {"aud": audience, "iss": issuer}
        self._required = ["exp", "sub", *(name for name, value in optional.items() if value is not None)]

    def verify(self, token: str) -> Holder:
        """The holder of a valid token. Raises `AuthenticationError`, which does not say what is wrong with it."""
        try:
            if len(token) > _MAX_TOKEN_CHARS:
                raise ValueError("too long")
            return self._holder(self._claims(token))
        except (jwt.PyJWTError, ValidationError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            # Only the kind of error: what a token contains is its holder's.
            _log.debug("a token was refused: %s", type(error).__name__)
            raise AuthenticationError(INVALID_KEY) from None

    def _claims(self, token: str) -> Mapping[str, object]:
        signing = self._signing_key(jwt.get_unverified_header(token).get("kid"))
        return jwt.decode(
            token,
            signing.key,  # type: ignore[arg-type]  # PyJWT's types leave out keys that it takes
            algorithms=list(signing.algorithms),
            audience=self._audience,
            issuer=self._issuer,
            leeway=_LEEWAY_SECONDS,
            options={"require": self._required},
        )

    def _signing_key(self, key_id: object) -> SigningKey:
        """The key that a token names; a single key needs no name."""
        if len(self._keys) == 1 and (key_id is None or self._keys[0].key_id is None):
            return self._keys[0]
        for signing in self._keys:
            if signing.key_id is not None and signing.key_id == key_id:
                return signing
        raise ValueError("unknown key")

    def _holder(self, claims: Mapping[str, object]) -> Holder:
        subject = claims["sub"]
        if not isinstance(subject, str) or not 0 < len(subject) <= _MAX_NAME_CHARS or not subject.isprintable():
            raise ValueError("not a name")
        limits = TokenLimits.model_validate(claims.get("omnistage", {}))
        models = _scoped_models(claims.get("scope"))
        if limits.models is not None:
            models = frozenset(limits.models) if models is None else models & frozenset(limits.models)
        return Holder(
            TOKEN_PREFIX + subject,
            b"",
            _smaller(limits.requests_per_minute, self._rate),
            _smaller(limits.max_concurrent, self._max_concurrent),
            models,
            expires_at=min(_seconds(claims["exp"]), _END_OF_TIME) + _LEEWAY_SECONDS,
        )


def _seconds(claim: object) -> int:
    """A time in a token, which PyJWT has read the same way."""
    if not isinstance(claim, int | float | str):
        raise TypeError("a time is a number")
    return int(claim)


def _scoped_models(scope: object) -> frozenset[str] | None:
    """The models in a scope like `openid model:chat`; None where it names none."""
    if scope is None:
        return None
    if not isinstance(scope, str):
        raise TypeError("a scope is a string")
    names = [word.removeprefix("model:") for word in scope.split() if word.startswith("model:")]
    return frozenset(names) if names else None


def _smaller(first: NumberT | None, second: NumberT | None) -> NumberT | None:
    return min((value for value in (first, second) if value is not None), default=None)


# --------------------------------------------------------------------------------------------------- keys


def secret_key(variable: str) -> SigningKey:
    """The shared secret in an environment variable, for HS256."""
    secret = os.environ.get(variable, "").encode()
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"the environment variable {variable} must hold a secret of at least {_MIN_SECRET_BYTES} bytes, "
            f"it has {len(secret)}",
            param="--jwt-secret-env",
        )
    return SigningKey(secret, ("HS256",))


def read_keys(file: Path) -> list[SigningKey]:
    """The public keys in a PEM file or a JSON web key set. Raises `ConfigError`."""
    try:
        data = file.read_bytes()
        keys = _parse_jwks(data) if data.lstrip().startswith(b"{") else [_parse_pem(data)]
    except (OSError, ValueError, TypeError, KeyError, jwt.PyJWTError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file} is not a usable public key (PEM) or key set (JWKS): {why}", param="--jwt-key") from (
            error
        )
    ids = [key.key_id for key in keys]
    if len(keys) > 1 and (None in ids or len(set(ids)) < len(ids)):
        raise ConfigError(f"{file}: every key of a set needs its own kid", param="--jwt-key")
    return keys


def _parse_pem(data: bytes) -> SigningKey:
    if b"PRIVATE KEY" in data:
        raise ValueError("it holds a private key; give the public key")
    key = load_pem_public_key(data)
    return SigningKey(key, _algorithms(key))


def _parse_jwks(data: bytes) -> list[SigningKey]:
    keys = []
    for entry in json.loads(data)["keys"]:
        if "d" in entry or entry.get("kty") == "oct":
            raise ValueError("it holds a private key or a secret; give public keys only")
        if entry.get("use", "sig") != "sig":
            continue
        key = jwt.PyJWK(entry).key
        algorithms = _algorithms(key)
        if entry.get("alg") is not None:
            algorithms = tuple(name for name in algorithms if name == entry["alg"])
        if not algorithms:
            raise ValueError("a key's alg does not match its type")
        keys.append(SigningKey(key, algorithms, entry.get("kid")))
    if not keys:
        raise ValueError("it has no key for signatures")
    return keys


def _algorithms(key: PublicKeyTypes) -> tuple[str, ...]:
    if isinstance(key, rsa.RSAPublicKey):
        if key.key_size < _MIN_RSA_BITS:
            raise ValueError(f"an RSA key needs at least {_MIN_RSA_BITS} bits")
        return _RSA
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return (_CURVES[key.curve.name],)
    if isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
        return ("EdDSA",)
    raise ValueError("use RSA, EC on a NIST curve, or Ed25519")
