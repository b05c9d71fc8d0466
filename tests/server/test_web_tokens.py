"""JSON web tokens: who signed them decides, never what they say about themselves."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import websockets.sync.client as sockets
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from websockets.exceptions import ConnectionClosed

from omnistage.core.errors import ConfigError
from omnistage.server.access.jwt import SigningKey, TokenVerifier, read_keys, secret_key
from omnistage.server.access.keys import Holder, Keyring, digest_of, load_keys
from omnistage.server.http.errors import AuthenticationError, PermissionDeniedError, RateLimitError
from omnistage.server.service import Service
from tests.server.harness import serving

SECRET = b"a secret of many bytes: " * 3
OTHER = b"one of as many bytes... " * 3
HS = SigningKey(SECRET, ("HS256",))
KEY = "a-key-for-tests"


def token(key: Any = SECRET, algorithm: str = "HS256", headers: dict[str, Any] | None = None, **claims: Any) -> str:
    given = {"sub": "ann", "exp": time.time() + 600, **claims}
    return jwt.encode({k: v for k, v in given.items() if v is not None}, key, algorithm, headers)


def pem(key: Any) -> bytes:
    shown = serialization.PublicFormat.SubjectPublicKeyInfo
    made: bytes = key.public_key().public_bytes(serialization.Encoding.PEM, shown)
    return made


@pytest.fixture(scope="module")
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


# ----------------------------------------------------------------------------------------------- who signs


def test_a_valid_token_names_its_bearer() -> None:
    bearer = TokenVerifier([HS]).verify(token())
    assert (bearer.name, bearer.rate, bearer.max_concurrent, bearer.models) == ("jwt:ann", None, None, None)
    assert TokenVerifier([HS]).verify(token(exp=2e9)).expires_at == pytest.approx(2e9, abs=60)
    assert (TokenVerifier([HS]).verify(token(exp=10**300)).expires_at or 0) > 2e15


@pytest.mark.parametrize(
    "make_token",
    # Functions: tokens hold the time, and the tests may run long after they were collected.
    [
        lambda: token(key=OTHER),
        lambda: token(exp=time.time() - 60),
        lambda: token(exp=None),
        lambda: token(sub=None),
        lambda: token(sub=""),
        lambda: token(sub="line\nbreak"),
        lambda: token(sub="x" * 300),
        lambda: token(nbf=time.time() + 600),
        lambda: token(aud="elsewhere"),  # for another service, and we name none
        lambda: token(algorithm="HS512"),
        lambda: token(omnistage={"models": "lm"}),
        lambda: token(omnistage={"rate": 5}),
        lambda: token(omnistage={"max_concurrent": 0}),
        lambda: token(scope=["model:lm"]),
        lambda: token(crit_claim=1, headers={"crit": ["unknown"]}),
        lambda: jwt.encode({"sub": "ann", "exp": time.time() + 600}, None, "none"),
        lambda: "a.b.c",
        lambda: "..",
        lambda: "nothing",
        lambda: "x" * 9000,
        lambda: token() + "x",
        lambda: token(exp=float("inf")),
    ],
    ids=[str(number) for number in range(22)],
)
def test_everything_else_is_refused_in_the_same_words(make_token: Callable[[], str]) -> None:
    with pytest.raises(AuthenticationError) as caught:
        TokenVerifier([HS]).verify(make_token())
    assert caught.value.message == "the API key or token is not valid; check it"
    assert caught.value.__cause__ is None


def test_the_tokens_of_a_clock_that_is_slightly_off_are_taken() -> None:
    verifier = TokenVerifier([HS])
    assert verifier.verify(token(exp=time.time() - 3)).name == "jwt:ann"
    with pytest.raises(AuthenticationError):
        verifier.verify(token(exp=time.time() - 30))


def test_audience_and_issuer_must_be_there_and_right() -> None:
    verifier = TokenVerifier([HS], audience="omnistage", issuer="https://id.example")
    right = {"aud": "omnistage", "iss": "https://id.example"}
    assert verifier.verify(token(**right)).name == "jwt:ann"
    assert verifier.verify(token(**{**right, "aud": ["other", "omnistage"]})).name == "jwt:ann"
    for wrong in ({"aud": "omnistage"}, {"iss": "https://id.example"}, {**right, "aud": "x"}, {**right, "iss": "x"}):
        with pytest.raises(AuthenticationError):
            verifier.verify(token(**wrong))


@pytest.mark.parametrize(
    ("make", "algorithm"),
    [
        (lambda: rsa.generate_private_key(65537, 2048), "RS256"),
        (lambda: rsa.generate_private_key(65537, 2048), "PS384"),
        (lambda: ec.generate_private_key(ec.SECP256R1()), "ES256"),
        (lambda: ec.generate_private_key(ec.SECP384R1()), "ES384"),
        (ed25519.Ed25519PrivateKey.generate, "EdDSA"),
    ],
)
def test_public_keys_of_every_kind(tmp_path: Path, make: Callable[[], Any], algorithm: str) -> None:
    key, file = make(), tmp_path / "key.pem"
    file.write_bytes(pem(key))
    assert TokenVerifier(read_keys(file)).verify(token(key, algorithm)).name == "jwt:ann"
    with pytest.raises(AuthenticationError):
        TokenVerifier(read_keys(file)).verify(token(make(), algorithm))


def test_a_public_key_is_never_taken_for_a_secret(tmp_path: Path, rsa_key: rsa.RSAPrivateKey) -> None:
    """The classic: a token signed with HS256, the secret being the public key that everybody has."""
    file = tmp_path / "key.pem"
    file.write_bytes(pem(rsa_key))
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps({"sub": "eve", "exp": time.time() + 600}).encode()).rstrip(b"=")
    signed = hmac.new(pem(rsa_key), head + b"." + body, hashlib.sha256).digest()
    forged = b".".join((head, body, base64.urlsafe_b64encode(signed).rstrip(b"="))).decode()
    assert jwt.get_unverified_header(forged)["alg"] == "HS256"
    with pytest.raises(AuthenticationError):
        TokenVerifier(read_keys(file)).verify(forged)


def _jwk(key: Any, **more: str) -> dict[str, Any]:
    algorithm = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    return {**json.loads(algorithm.to_jwk(key.public_key())), **more}


def test_a_key_set_chooses_by_the_keys_name(tmp_path: Path, rsa_key: rsa.RSAPrivateKey) -> None:
    other, file = ec.generate_private_key(ec.SECP256R1()), tmp_path / "keys.json"
    sets = [_jwk(rsa_key, kid="one", alg="RS256"), _jwk(other, kid="two"), _jwk(other, kid="enc", use="enc")]
    file.write_text(json.dumps({"keys": sets}))
    verifier = TokenVerifier(read_keys(file))
    assert verifier.verify(token(rsa_key, "RS256", {"kid": "one"})).name == "jwt:ann"
    assert verifier.verify(token(other, "ES256", {"kid": "two"})).name == "jwt:ann"
    for wrong in (
        token(rsa_key, "RS256"),
        token(rsa_key, "RS256", {"kid": "two"}),
        token(rsa_key, "RS512", {"kid": "one"}),  # the set says which algorithm
        token(other, "ES256", {"kid": "enc"}),
        token(other, "ES256", {"kid": "three"}),
    ):
        with pytest.raises(AuthenticationError):
            verifier.verify(wrong)


def test_files_that_are_no_public_keys_are_said(tmp_path: Path, rsa_key: rsa.RSAPrivateKey) -> None:
    private = rsa_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    weak = rsa.generate_private_key(65537, 1024)
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "a"}
    cases: list[tuple[bytes, str]] = [
        (private, "private key"),
        (b"nothing", "not a usable"),
        (b"{}", "not a usable"),
        (pem(weak), "2048 bits"),
        (json.dumps({"keys": []}).encode(), "no key"),
        (json.dumps({"keys": [secret]}).encode(), "public keys only"),
        (json.dumps({"keys": [_jwk(rsa_key, alg="ES256")]}).encode(), "not a usable"),
        (json.dumps({"keys": [_jwk(rsa_key), _jwk(rsa_key)]}).encode(), "kid"),
    ]
    for data, why in cases:
        file = tmp_path / "file"
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=why):
            read_keys(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "missing")


def test_a_secret_comes_from_the_environment_and_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SECRET", SECRET.decode())
    assert TokenVerifier([secret_key("TEST_SECRET")]).verify(token()).name == "jwt:ann"
    monkeypatch.setenv("TEST_SECRET", "short")
    with pytest.raises(ConfigError, match="32 bytes") as caught:
        secret_key("TEST_SECRET")
    assert "short" not in str(caught.value)


# --------------------------------------------------------------------------------------- what they may use


def test_claims_say_what_a_bearer_may_use() -> None:
    verifier = TokenVerifier([HS])
    limits = {"models": ["lm", "draw"], "requests_per_minute": 30, "max_concurrent": 2}
    bearer = verifier.verify(token(omnistage=limits))
    assert (bearer.rate, bearer.max_concurrent, bearer.models) == (30, 2, {"lm", "draw"})
    assert verifier.verify(token(scope="openid model:lm model:omni")).models == {"lm", "omni"}
    assert verifier.verify(token(scope="openid email")).models is None
    both = verifier.verify(token(scope="model:lm model:omni", omnistage=limits))
    assert both.models == {"lm"}
    assert verifier.verify(token(omnistage={"models": []})).models == frozenset()


def test_a_token_grants_no_more_than_the_service_allows() -> None:
    verifier = TokenVerifier([HS], rate=10, max_concurrent=3)
    assert (verifier.verify(token()).rate, verifier.verify(token()).max_concurrent) == (10, 3)
    more = verifier.verify(token(omnistage={"requests_per_minute": 500, "max_concurrent": 50}))
    assert (more.rate, more.max_concurrent) == (10, 3)
    less = verifier.verify(token(omnistage={"requests_per_minute": 5, "max_concurrent": 1}))
    assert (less.rate, less.max_concurrent) == (5, 1)


def test_keys_and_tokens_side_by_side() -> None:
    keyring = Keyring([Holder("ann", digest_of(KEY))], tokens=TokenVerifier([HS]))
    assert keyring.authenticate(f"Bearer {KEY}").name == "ann"
    bearer = keyring.authenticate(f"Bearer {token()}")
    assert (bearer.name, bearer.digest) == ("jwt:ann", b"")  # another than the holder of the key
    assert Keyring(tokens=TokenVerifier([HS])).required
    for wrong in (None, "Bearer x", f"Basic {token()}", f"Bearer {token(key=OTHER)}"):
        with pytest.raises(AuthenticationError):
            keyring.authenticate(wrong)


def test_no_key_may_be_called_as_a_token_is(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- {name: 'jwt:ann', key: plain-key-1}\n")
    with pytest.raises(ConfigError, match="web tokens"):
        load_keys([], file)
    file.write_text("keys:\n- {name: key-1, key: plain-key-1}\n")
    with pytest.raises(ConfigError, match="rename"):  # one would see the requests of the other
        load_keys(["from-option"], file)


def test_all_tokens_of_a_bearer_share_their_rate_and_keep_their_own_models() -> None:
    keyring = Keyring(tokens=TokenVerifier([HS], max_concurrent=1))
    narrow = keyring.authenticate(f"Bearer {token(scope='model:lm')}")
    wide = keyring.authenticate(f"Bearer {token()}")
    with keyring.admit(narrow, "lm"):
        with pytest.raises(RateLimitError), keyring.admit(wide, "lm"):
            pass
        with pytest.raises(PermissionDeniedError), keyring.admit(narrow, "draw"):
            pass
    with keyring.admit(wide, "draw"):
        pass


def test_the_memory_of_bearers_is_bounded() -> None:
    now = [0.0]
    keyring = Keyring(tokens=TokenVerifier([HS], rate=1), clock=lambda: now[0], max_token_holders=2)

    def bearer(name: str) -> Holder:
        return keyring.authenticate(f"Bearer {token(sub=name)}")

    first, second = bearer("a"), bearer("b")
    with keyring.admit(first, "lm"):
        bearer("c")  # b goes: a has a request running
        assert bearer("a").use.counts["requests"] == 1
        with keyring.admit(bearer("c"), "lm"), pytest.raises(RateLimitError, match="too many"):
            bearer("d")
    with pytest.raises(RateLimitError), keyring.admit(bearer("a"), "lm"):
        pass  # still remembered: it has had its one
    with keyring.admit(second, "lm"):
        pass


# ------------------------------------------------------------------------------------------------ over HTTP


def test_tokens_come_in_over_http(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="omnistage.audit")
    service = Service(keyring=Keyring([Holder("ann", digest_of(KEY))], tokens=TokenVerifier([HS])))
    service.loading = False
    with serving(service) as running:

        def status(given: str) -> int:
            return httpx.get(f"{running.url}/v1/models", headers={"Authorization": f"Bearer {given}"}).status_code

        right, old = token(sub="bob"), token(exp=time.time() - 60)
        assert [status(given) for given in (right, KEY, old, token(key=OTHER))] == [200, 200, 401, 401]
        answer = httpx.get(f"{running.url}/v1/models", headers={"Authorization": f"Bearer {old}"})
        assert (answer.json()["error"]["code"], answer.headers["WWW-Authenticate"]) == ("invalid_api_key", "Bearer")
        assert "expired" not in answer.text
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "omnistage.audit"]
    assert [line["who"] for line in lines[:4]] == ["jwt:bob", "ann", None, None]
    assert right not in caplog.text


class _Expiring(TokenVerifier):
    """Its tokens are valid at the handshake, and not a moment longer."""

    def verify(self, token: str) -> Holder:
        return replace(super().verify(token), expires_at=time.time())


def test_a_session_ends_when_its_token_expires() -> None:
    service = Service(keyring=Keyring(tokens=_Expiring([HS])))
    service.loading = False
    with serving(service) as running:
        headers = {"Authorization": f"Bearer {token()}"}
        url = f"ws{running.url.removeprefix('http')}/v1/audio/speech/stream"
        with sockets.connect(url, additional_headers=headers) as socket, pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=60)  # it sends nothing before it is asked for something
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason.partition(";")[0]) == (1008, "the token has expired")
