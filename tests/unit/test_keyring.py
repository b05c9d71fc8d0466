"""API keys and what their holders may use: no server, no model."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from omnistage.core.errors import ConfigError, LimitExceededError
from omnistage.server.access.jwt import INVALID_KEY
from omnistage.server.access.keys import KEYS_VARIABLE, Holder, KeyConfig, KeyFile, Keyring, digest_of, load_keys
from omnistage.server.http.errors import AuthenticationError, PermissionDeniedError, RateLimitError
from omnistage.server.service import Service

KEY = "a-key-for-tests"


def named(keyring: Keyring, key: str) -> str:
    return keyring.authenticate(f"Bearer {key}").name


def test_keys_come_from_options_the_environment_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    hashed = hashlib.sha256(b"hashed-key").hexdigest()
    file.write_text(f"keys:\n- {{name: ann, key: plain-key-1}}\n- {{name: bob, hash: {hashed}}}\n")
    monkeypatch.setenv(KEYS_VARIABLE, "from-environment, and-another")
    keyring = load_keys(["from-option"], file)
    keys = ("from-option", "from-environment", "and-another", "plain-key-1", "hashed-key")
    assert [named(keyring, key) for key in keys] == ["key-1", "key-2", "key-3", "ann", "bob"]
    for key in (hashed, "from-optio", "from-option2", ""):  # a hash that leaks is no key
        with pytest.raises(AuthenticationError):
            named(keyring, key)


def test_no_key_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- {name: ann, key: plain-key-1}\n")
    keyring = load_keys(["from-option"], file)
    assert not any(key in repr(vars(keyring)) for key in ("plain-key-1", "from-option"))


@pytest.mark.parametrize(
    "line",
    [
        "{name: ann}",
        "{name: ann, key: plain-key-1, hash: " + "0" * 64 + "}",
        "{name: ann, key: short}",
        "{name: ann, hash: nothex}",
        "{name: ann, key: plain-key-1, rate: 5}",
        "{name: ann, key: plain-key-1, requests_per_minute: 0}",
    ],
)
def test_a_wrong_key_file_is_named_without_its_keys(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n- {line}\n")
    with pytest.raises(ConfigError, match=r"keys\[0\]") as caught:
        load_keys([], file)
    assert "plain-key-1" not in str(caught.value)


def test_a_rate_fills_up_again() -> None:
    now = [0.0]
    holder = Holder("ann", digest_of(KEY), rate=2)
    keyring = Keyring([holder], clock=lambda: now[0])

    def use() -> None:
        with keyring.admit(holder, "lm"):
            pass

    use()
    use()
    with pytest.raises(RateLimitError) as caught:
        use()
    assert caught.value.retry_after == pytest.approx(30)
    now[0] += 30
    use()
    with pytest.raises(RateLimitError):
        use()


@pytest.mark.parametrize("idle_minutes", [1, 2, 60])
def test_a_holder_that_was_idle_saves_up_no_more_than_its_burst(idle_minutes: float) -> None:
    now = [0.0]
    holder = Holder("ann", digest_of(KEY), rate=2)
    keyring = Keyring([holder], clock=lambda: now[0])
    for _ in range(2):
        with keyring.admit(holder, "lm"):
            pass
    now[0] += 60 * idle_minutes
    for _ in range(2):
        with keyring.admit(holder, "lm"):
            pass
    with pytest.raises(RateLimitError) as caught, keyring.admit(holder, "lm"):
        pass
    assert caught.value.retry_after == pytest.approx(30)


def test_less_than_one_a_minute_is_a_rate() -> None:
    now = [0.0]
    holder = Holder("ann", digest_of(KEY), rate=0.5)
    keyring = Keyring([holder], clock=lambda: now[0])
    for _ in range(2):
        with keyring.admit(holder, "lm"):
            pass
        with pytest.raises(RateLimitError), keyring.admit(holder, "lm"):
            pass
        now[0] += 120


def test_concurrency_is_given_back_whatever_happens() -> None:
    holder = Holder("ann", digest_of(KEY), max_concurrent=1, models=frozenset({"lm"}))
    keyring = Keyring([holder])
    with keyring.admit(holder, "lm"), pytest.raises(RateLimitError), keyring.admit(holder, "lm"):
        pass
    with pytest.raises(ZeroDivisionError), keyring.admit(holder, "lm"):
        raise ZeroDivisionError
    with pytest.raises(PermissionDeniedError), keyring.admit(holder, "draw"):
        pass
    assert holder.use.counts["requests"] == 0


def keyring_of(tmp_path: Path, line: str) -> Keyring:
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n- {line}\n")
    return load_keys([], file)


def test_a_line_of_a_file_says_what_its_holder_may_use(tmp_path: Path) -> None:
    line = "{name: ann, key: plain-key-1, requests_per_minute: 30, max_concurrent: 2, models: [lm, draw]}"
    holder = keyring_of(tmp_path, line).authenticate("Bearer plain-key-1")
    assert (holder.rate, holder.max_concurrent, holder.models) == (30, 2, {"lm", "draw"})
    plain = keyring_of(tmp_path, "{name: ann, key: plain-key-1}").authenticate("Bearer plain-key-1")
    assert (plain.rate, plain.max_concurrent, plain.models) == (None, None, None)


@pytest.mark.parametrize(
    ("field", "fits", "does_not"),
    [
        ("name", "n" * 100, "n" * 101),
        ("name", "n", '""'),
        ("key", "eight888", "seven77"),
        ("key", "k" * 500, "k" * 501),
        ("hash", "a" * 64, "a" * 65),
        ("hash", "f" * 64, "f" * 63),
        ("hash", "f" * 64, "F" * 64),
        ("requests_per_minute", "1000000", "1000001"),
        ("requests_per_minute", "0.001", "0"),
        ("max_concurrent", "1", "0"),
        ("max_concurrent", "100000", "100001"),
    ],
)
def test_a_key_file_is_taken_to_its_bounds_and_not_beyond(tmp_path: Path, field: str, fits: str, does_not: str) -> None:
    usual = {"name": "ann", **({} if field == "hash" else {"key": "plain-key-1"})}

    def line(value: str) -> str:
        return "{" + ", ".join(f"{name}: {given}" for name, given in {**usual, field: value}.items()) + "}"

    assert keyring_of(tmp_path, line(fits)).required
    with pytest.raises(ConfigError, match=rf"keys\[0\]\.{field}"):
        keyring_of(tmp_path, line(does_not))


@pytest.mark.parametrize("text", ["keys: []", "keys: [{name: a, key: plain-key-1}]\nother: 1"])
def test_a_key_file_has_keys_and_nothing_else(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"keys|other"):
        load_keys([], file)


def test_lines_of_a_key_file_do_not_change(tmp_path: Path) -> None:
    config = KeyConfig(name="ann", key="plain-key-1")
    for model, field in ((config, "name"), (KeyFile(keys=(config,)), "keys")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(model, field, None)


def test_the_second_line_that_is_wrong_is_the_one_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\[1\]: give exactly one"):
        keyring_of(tmp_path, "{name: ann, key: plain-key-1}\n- {name: bob}")


def test_keys_given_on_the_command_line_have_eight_characters_at_least() -> None:
    assert load_keys(["eight888"], None).authenticate("Bearer eight888").name == "key-1"
    with pytest.raises(ConfigError, match="a key of 7 characters"):
        load_keys(["seven77"], None)


def test_no_line_has_the_name_of_a_tokens_holder_or_of_a_listed_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\[0\]\.name.*web tokens"):
        keyring_of(tmp_path, "{name: 'jwt:ann', key: plain-key-1}")
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- {name: key-1, key: plain-key-1}\n")
    with pytest.raises(ConfigError, match=r"keys\[0\]\.name.*rename"):  # they would see each other's requests
        load_keys(["from-option"], file)
    assert named(load_keys([], file), "plain-key-1") == "key-1"


def test_a_key_may_hold_what_is_no_text() -> None:
    assert digest_of("\udc80key") != digest_of("key")


# ------------------------------------------------------------------------------------------ who is let in


def test_a_service_without_keys_lets_everyone_in() -> None:
    keyring = Keyring()
    assert not keyring.required
    for header in (None, "", "Bearer anything", "nonsense"):
        assert keyring.authenticate(header).name == "anonymous"


@pytest.mark.parametrize(
    "header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER {KEY}", f"Bearer   {KEY} ", f"Bearer {KEY}\t"]
)
def test_a_key_comes_after_the_word_bearer_in_any_case(header: str) -> None:
    keyring = Keyring([Holder("ann", digest_of(KEY))])
    assert keyring.required
    assert keyring.authenticate(header).name == "ann"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer:{KEY}"])
def test_a_header_without_a_key_is_told_how_to_send_one(header: str | None) -> None:
    keyring = Keyring([Holder("ann", digest_of(KEY))])
    with pytest.raises(AuthenticationError, match="Authorization: Bearer KEY"):
        keyring.authenticate(header)


def test_a_wrong_key_is_not_told_how_wrong_it_is() -> None:
    keyring = Keyring([Holder("ann", digest_of(KEY))])
    with pytest.raises(AuthenticationError, match=re.escape(INVALID_KEY)):
        keyring.authenticate(f"Bearer {KEY}x")


def test_of_two_holders_of_one_key_the_first_is_meant() -> None:
    keyring = Keyring(
        [Holder("other", digest_of("x" * 9)), Holder("ann", digest_of(KEY)), Holder("bob", digest_of(KEY))]
    )
    assert named(keyring, KEY) == "ann"


# ------------------------------------------------------------------------------------------ how much they use


def test_a_refused_request_takes_nothing_of_the_rate() -> None:
    holder = Holder("ann", digest_of(KEY), rate=2, max_concurrent=1, models=frozenset({"lm"}))
    keyring = Keyring([holder], clock=lambda: 0.0)
    with keyring.admit(holder, "lm"):
        for _ in range(3):
            with pytest.raises(RateLimitError, match="1 requests") as busy, keyring.admit(holder, "lm"):
                pass
            assert busy.value.retry_after == 1.0
            with pytest.raises(PermissionDeniedError) as denied, keyring.admit(holder, "draw"):
                pass
            assert denied.value.param == "model"
    with keyring.admit(holder, "lm"):
        pass
    with pytest.raises(RateLimitError, match="2 requests a minute"), keyring.admit(holder, "lm"):
        pass


def test_a_holder_without_a_rate_or_bound_is_never_refused() -> None:
    holder = Holder("ann", digest_of(KEY))
    keyring = Keyring([holder], clock=lambda: 0.0)
    with contextlib.ExitStack() as stack:
        for model in ["lm", "draw"] * 50:
            stack.enter_context(keyring.admit(holder, model))
        assert holder.use.counts["requests"] == 100
    assert holder.use.counts["requests"] == 0
    assert holder.use.idle


def test_more_answers_than_a_key_may_run_at_once_are_refused_for_good() -> None:
    holder = Holder("a", digest_of("secret-1"), max_concurrent=2)
    ring = Keyring([holder])
    with pytest.raises(LimitExceededError, match="3 answers at once are over this key's limit of 2") as raised:
        ring.admit(holder, "m", 3, "prompts").__enter__()
    assert raised.value.param == "prompts"
    with ring.admit(holder, "m", 2):
        pass


def test_a_part_of_a_request_is_saved_up_for_the_next() -> None:
    now = [0.0]
    holder = Holder("ann", digest_of(KEY), rate=1)
    keyring = Keyring([holder], clock=lambda: now[0])
    with keyring.admit(holder, "lm"):
        pass
    for seconds, wait in ((15, 45), (15, 30), (29, 1)):
        now[0] += seconds
        with pytest.raises(RateLimitError) as caught, keyring.admit(holder, "lm"):
            pass
        assert caught.value.retry_after == pytest.approx(wait)
    now[0] += 1
    with keyring.admit(holder, "lm"):
        pass


@pytest.mark.parametrize(("rate", "burst"), [(0.5, 1), (1, 1), (2, 2), (7.5, 7)])
def test_a_minutes_requests_may_start_at_once_and_one_at_least(rate: float, burst: int) -> None:
    holder = Holder("ann", b"", rate=rate)
    keyring = Keyring([holder], clock=lambda: 100.0)
    for _ in range(burst):
        with keyring.admit(holder, "lm"):
            pass
    with pytest.raises(RateLimitError), keyring.admit(holder, "lm"):
        pass


def test_bodies_on_their_way_are_bounded_like_requests_and_given_back() -> None:
    holder = Holder("ann", digest_of(KEY), max_concurrent=2)
    with holder.count("uploads"), holder.count("uploads"):
        assert not holder.use.idle
        with pytest.raises(RateLimitError, match="2 uploads") as caught, holder.count("uploads"):
            pass
        assert caught.value.retry_after == 1.0
    with pytest.raises(ZeroDivisionError), holder.count("uploads"):
        raise ZeroDivisionError
    assert holder.use.counts["uploads"] == 0
    assert holder.use.idle


@pytest.mark.parametrize(("own", "most", "fit"), [(None, 2, 2), (1, 2, 1), (3, 2, 3), (3, None, 3)])
def test_sessions_are_bounded_by_the_holders_own_number_before_the_services(
    own: int | None, most: int | None, fit: int
) -> None:
    holder = Holder("ann", digest_of(KEY), max_concurrent=own)
    with contextlib.ExitStack() as stack:
        for _ in range(fit):
            stack.enter_context(holder.count("sessions", most))
        assert not holder.use.idle
        with pytest.raises(RateLimitError, match=f"{fit} sessions") as caught:
            stack.enter_context(holder.count("sessions", most))
        assert caught.value.retry_after == 1.0
    assert holder.use.counts["sessions"] == 0


def test_sessions_without_a_bound_are_any_number() -> None:
    holder = Holder("ann", digest_of(KEY))
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(holder.count("sessions", None))
        assert holder.use.counts["sessions"] == 20


# ------------------------------------------------------------------------------------------ holders of web tokens


class Names:
    """A verifier that takes every token for its holder's name."""

    def verify(self, token: str) -> Holder:
        return Holder(f"jwt:{token}", b"", rate=1, max_concurrent=2, models=frozenset({"lm"}))


def test_a_key_is_looked_for_before_a_token_and_tokens_share_what_they_use() -> None:
    keyring = Keyring([Holder("ann", digest_of(KEY))], tokens=Names())  # type: ignore[arg-type]
    assert named(keyring, KEY) == "ann"
    one, other = keyring.authenticate("Bearer bob"), keyring.authenticate("Bearer bob")
    assert (one.name, one.digest, one.rate, one.max_concurrent, one.models) == ("jwt:bob", b"", 1, 2, {"lm"})
    assert one.use is other.use
    assert one.use is not keyring.authenticate("Bearer eve").use


def test_tokens_alone_are_reason_to_ask_for_one() -> None:
    keyring = Keyring(tokens=Names())  # type: ignore[arg-type]
    assert keyring.required
    with pytest.raises(AuthenticationError):
        keyring.authenticate(None)


def test_holders_of_tokens_that_came_longest_ago_are_forgotten_first() -> None:
    keyring = Keyring(tokens=Names(), max_token_holders=2)  # type: ignore[arg-type]
    first, second = keyring.authenticate("Bearer a"), keyring.authenticate("Bearer b")
    assert keyring.authenticate("Bearer a").use is first.use  # now `b` came longest ago
    third = keyring.authenticate("Bearer c")
    assert keyring.authenticate("Bearer a").use is first.use
    assert keyring.authenticate("Bearer c").use is third.use
    assert keyring.authenticate("Bearer b").use is not second.use


@pytest.mark.parametrize("what", ["a request", "an upload", "a session"])
def test_holders_of_tokens_who_use_something_are_not_forgotten(what: str) -> None:
    keyring = Keyring(tokens=Names(), max_token_holders=1)  # type: ignore[arg-type]
    holder = keyring.authenticate("Bearer a")
    using = {"a request": keyring.admit(holder, "lm"), "an upload": holder.count("uploads")}
    with using.get(what) or holder.count("sessions", 1):
        with pytest.raises(RateLimitError, match="too many") as caught:
            keyring.authenticate("Bearer b")
        assert caught.value.retry_after == 1.0
    assert keyring.authenticate("Bearer b").use is not holder.use


def test_ten_thousand_holders_of_tokens_are_remembered() -> None:
    keyring = Keyring(tokens=Names())  # type: ignore[arg-type]
    first = keyring.authenticate("Bearer first")
    for number in range(9_999):
        keyring.authenticate(f"Bearer {number}")
    assert keyring.authenticate("Bearer first").use is first.use  # and now it came last
    keyring.authenticate("Bearer one-more")
    assert len(keyring._token_usage) == 10_000


def test_without_keys_work_is_shared_by_address() -> None:
    service = Service()

    def owner(address: str | None) -> str | None:
        return service.owner_of(service.keyring.authenticate(None, address))

    assert owner("192.0.2.1") == "192.0.2.1"
    assert owner("2001:db8:1:2::5") == owner("2001:db8:1:2:ffff::1") != owner("2001:db8:1:3::5")
    assert owner(None) is None
    assert Service(keyring=Keyring([Holder("ann", digest_of(KEY))])).owner_of(Holder("ann", b"")) == "ann"
