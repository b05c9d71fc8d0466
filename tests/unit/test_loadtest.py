"""The load test's requests, clocks and figures: the same for a seed, right by hand and by another way to count."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.bench.measure import (
    Outcome,
    Playback,
    Spread,
    Stutter,
    count_event,
    parse_goodput,
    play,
    spreads,
    within,
)
from omnistage.bench.workload import Kind, Range, Workload, arrivals, parse_mix, read_prompts
from omnistage.core.errors import InvalidRequestError
from omnistage.core.http_client import Address, EventReader

MODELS = {kind: f"a-{kind}" for kind in Kind}


def workload(mix: str = "text", **options: Any) -> Workload:
    return Workload(parse_mix(mix), MODELS, **options)


def body(load: Workload, number: int) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(load.request(number).body)
    return made


# ------------------------------------------------------------------------------------------------- workload


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    one, again, other = (workload("text=2,speech=1,image=1", seed=seed) for seed in (3, 3, 4))
    assert [one.request(n) for n in range(40)] == [again.request(n) for n in range(40)]
    assert [one.request(n) for n in range(40)] != [other.request(n) for n in range(40)]


def test_a_request_does_not_depend_on_those_before_it() -> None:
    load = workload("text=3,image=1", seed=1)
    late = load.request(25)
    assert [load.request(n) for n in range(30)][25] == late


def test_every_deal_of_the_mix_has_its_shares() -> None:
    load = workload("text=8,speech=1,image=1", seed=5)
    for deal in range(5):
        kinds = [load.kind(n) for n in range(10 * deal, 10 * deal + 10)]
        assert (kinds.count(Kind.TEXT), kinds.count(Kind.SPEECH), kinds.count(Kind.IMAGE)) == (8, 1, 1)
    assert len({tuple(load.kind(n) for n in range(10 * deal, 10 * deal + 10)) for deal in range(20)}) > 1


def test_each_kind_asks_its_endpoint_for_a_stream() -> None:
    load = workload("text,speech,tts,image", image_size="64x64", steps=4, voice="Ann")
    found = {kind: load.of_kind(kind, 0) for kind in Kind}
    assert {kind: request.path for kind, request in found.items()} == {
        Kind.TEXT: "/v1/chat/completions",
        Kind.SPEECH: "/v1/chat/completions",
        Kind.TTS: "/v1/audio/speech",
        Kind.IMAGE: "/v1/images/generations",
    }
    bodies = {kind: json.loads(request.body) for kind, request in found.items()}
    assert all(bodies[kind]["model"] == MODELS[kind] for kind in Kind)
    assert bodies[Kind.TEXT]["stream_options"] == {"include_usage": True}
    assert "modalities" not in bodies[Kind.TEXT]
    assert bodies[Kind.SPEECH]["modalities"] == ["text", "audio"]
    assert bodies[Kind.SPEECH]["audio"] == {"format": "pcm16", "voice": "Ann"}
    assert bodies[Kind.TTS]["response_format"] == "pcm"
    assert (bodies[Kind.IMAGE]["size"], bodies[Kind.IMAGE]["steps"], bodies[Kind.IMAGE]["stream"]) == ("64x64", 4, True)


def test_what_was_not_asked_for_is_not_sent() -> None:
    load = workload("text,image", ignore_eos=False)
    assert not {"size", "steps"} & set(json.loads(load.of_kind(Kind.IMAGE, 0).body))
    assert "ignore_eos" not in json.loads(load.of_kind(Kind.TEXT, 0).body)
    assert body(workload(), 0)["ignore_eos"] is True


def test_lengths_are_drawn_from_their_spans_in_the_service_s_tokens() -> None:
    plain = workload(prompt_tokens=Range(10, 20), max_tokens=Range(3, 5))
    lengths = [len(body(plain, n)["messages"][0]["content"].split()) for n in range(200)]
    assert (min(lengths), max(lengths)) == (10, 20)
    assert {body(plain, n)["max_tokens"] for n in range(200)} == {3, 4, 5}
    # Four tokens a word and eight around them: 40 tokens are 8 words.
    counted = workload(prompt_tokens=Range(40, 40), tokens_per_word=4.0, template_tokens=8.0)
    assert len(body(counted, 0)["messages"][0]["content"].split()) == 8


def test_arrivals_are_those_of_a_poisson_process() -> None:
    moments = list(itertools.islice(arrivals(4.0, seed=1), 4000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert all(gap >= 0 for gap in gaps)
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)  # as exponential ones have it
    assert moments == list(itertools.islice(arrivals(4.0, seed=1), 4000))
    assert moments != list(itertools.islice(arrivals(4.0, seed=2), 4000))


@pytest.mark.parametrize("text", ["", "txet", "text=0", "text=-1", "text=x", "text=", "text,text", "text=99999"])
def test_a_mix_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_mix(text)
    assert raised.value.param == "--mix"


@pytest.mark.parametrize("text", ["", "x", "0", "5..3", "1..", "1.5", "-2..4"])
def test_a_span_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        Range.parse(text, "--max-tokens")
    assert raised.value.param == "--max-tokens"


def test_spans_read_as_they_are_written() -> None:
    assert [str(Range.parse(text, "x")) for text in ("7", "1..9", "4..4")] == ["7", "1..9", "4"]


# -------------------------------------------------------------------------------------------- own prompts


def test_own_prompts_are_used_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "one", "max_tokens": 5},
        {"kind": "image", "prompt": "a fox"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    mix = parse_mix("text,image")
    load = workload("text,image", prompts=read_prompts(file, mix), max_tokens=Range(9, 9))
    asked = [json.loads(load.of_kind(Kind.TEXT, n).body) for n in range(3)]
    assert [one["messages"][-1]["content"] for one in asked] == ["one", "two", "one"]
    assert [one["max_tokens"] for one in asked] == [5, 9, 5]
    assert json.loads(load.of_kind(Kind.IMAGE, 1).body)["prompt"] == "a fox"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be an object"),
        ('{"promt": "x"}', "promt: unknown field; known: kind, prompt"),
        ('{"prompt": ""}', "prompt: .*at least 1 character"),
        ('{"prompt": "x", "messages": [{}]}', "needs a prompt"),
        ('{"kind": "image", "messages": [{}]}', "needs a prompt"),
        ('{"prompt": "x", "kind": "poem"}', "kind: .*'text', 'speech', 'tts' or 'image'"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens: .*valid integer"),
    ],
)
def test_a_line_that_says_nothing_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(InvalidRequestError, match=says) as raised:
        read_prompts(file, parse_mix("text"))
    assert raised.value.param == "--prompts, line 2"


def test_a_kind_without_lines_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n')
    with pytest.raises(InvalidRequestError, match="no line is of kind image"):
        read_prompts(file, parse_mix("text,image"))


# ------------------------------------------------------------------------------------------------- playback


def test_a_player_that_is_fed_in_time_never_waits() -> None:
    assert play([(1.0, 0.5), (1.4, 0.5), (1.9, 0.5)], 0.0) == Playback(1.5, 0.0, 0)


def test_a_late_piece_is_waited_for_once() -> None:
    # It plays from 1.1 to 1.6, waits for 0.4 s, plays to 3.0; the third is there in time.
    heard = play([(1.0, 0.5), (2.0, 1.0), (2.5, 0.5)], 0.1)
    assert heard.seconds == pytest.approx(2.0)
    assert heard.wait == pytest.approx(0.4)
    assert heard.stalls == 1
    assert heard.share == pytest.approx(0.2)


def test_no_sound_is_no_stutter() -> None:
    assert play([], 0.1) == Playback()
    assert Playback().share == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 3)), min_size=1, max_size=12),
    st.floats(0, 2),
)
def test_all_waiting_together_is_the_lateness_of_the_latest_piece(steps: list[tuple[float, float]], buffer) -> None:
    moments = list(itertools.accumulate(gap for gap, _ in steps))
    pieces = [(moment, length) for moment, (_, length) in zip(moments, steps, strict=True)]
    # Another way to see it: a piece may come as late as everything before it takes to play.
    begin, before, latest = moments[0] + buffer, 0.0, 0.0
    for moment, length in pieces:
        latest = max(latest, moment - begin - before)
        before += length
    assert play(pieces, buffer).wait == pytest.approx(latest, abs=1e-6)
    assert play(pieces, buffer + 1.0).wait <= play(pieces, buffer).wait + 1e-9


# ------------------------------------------------------------------------------------------------- outcomes


def spoken() -> Outcome:
    outcome = Outcome(0, Kind.SPEECH, due=1.0, sent=1.0, ended=6.0, status=200)
    for moment, event in [
        (1.1, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        (1.5, {"choices": [{"delta": {"audio": {"transcript": "a"}}}]}),
        (1.7, {"choices": [{"delta": {"audio": {"transcript": "bc"}}}]}),
        (2.0, {"choices": [{"delta": {"audio": {"data": "AAAAAAAA"}}}]}),  # 6 bytes
        (2.3, {"choices": [{"delta": {"audio": {"transcript": "d"}}}]}),
        (4.0, {"choices": [{"delta": {"audio": {"data": "AAA="}}}]}),  # 2 bytes
        (5.0, {"choices": [{"delta": {}, "finish_reason": "stop"}]}),
        (5.0, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 45, **DETAILS}}),
    ]:
        count_event(outcome, moment, event)
    return outcome


DETAILS = {"completion_tokens_details": {"audio_seconds": 2.0, "audio_tokens": 40}}


def test_an_answer_s_clock_is_read_from_its_events() -> None:
    outcome = spoken()
    assert outcome.ttft == pytest.approx(0.5)
    assert outcome.ttfa == pytest.approx(1.0)
    assert outcome.token_gaps() == pytest.approx([0.2, 0.6])
    assert outcome.audio_gaps() == pytest.approx([2.0])
    assert outcome.tpot == pytest.approx(0.8 / 4)  # three pieces carried five tokens
    assert outcome.rtf == pytest.approx(3.0 / 2.0)
    assert outcome.latency == pytest.approx(5.0)
    assert (outcome.prompt_tokens, outcome.text_tokens, outcome.audio_seconds) == (7, 5, 2.0)
    # Three quarters of the bytes are 1.5 s: playing from 2.0 to 3.5, waiting until 4.0.
    assert outcome.audio_chunks == [(2.0, 6), (4.0, 2)]
    assert outcome.playback(0.0).wait == pytest.approx(0.5)
    assert outcome.playback(0.25).wait == pytest.approx(0.25)
    assert Stutter.of([outcome], 0.0) == Stutter(pytest.approx(0.5), pytest.approx(0.25), 1.0)
    assert Stutter.of([outcome], 1.0) == Stutter(0.0, 0.0, 0.0)


def test_pictures_are_counted_and_previews_are_not() -> None:
    outcome = Outcome(0, Kind.IMAGE, 0.0, 0.0, status=200)
    for event in ("progress", "partial_image", "completed", "completed"):
        count_event(outcome, 1.0, {"type": f"image_generation.{event}"})
    assert outcome.pictures == 2


def test_an_error_in_a_stream_is_the_service_s_failure() -> None:
    outcome = Outcome(0, Kind.TEXT, 0.0, 0.0, status=200)
    count_event(outcome, 1.0, {"error": {"message": "it broke", "code": "stage_failed"}})
    assert (outcome.ok, outcome.failed, outcome.error, outcome.message) == (False, True, "stage_failed", "it broke")


@pytest.mark.parametrize(
    ("status", "error", "refused", "failed"),
    [
        (200, None, False, False),
        (429, "queue_full", True, False),
        (400, "invalid_request", False, False),
        (500, "internal_error", False, True),
        (503, "loading", False, True),
        (200, "broken_response", False, True),
        (None, "ConnectionRefusedError", False, True),
        (None, "timeout", False, True),
    ],
)
def test_who_is_to_blame(status: int | None, error: str | None, refused: bool, failed: bool) -> None:
    outcome = Outcome(0, Kind.TEXT, 0.0, 0.0, status=status, error=error)
    assert (outcome.refused, outcome.failed) == (refused, failed)


def test_failed_requests_do_not_colour_the_times_of_good_ones() -> None:
    good = Outcome(0, Kind.TEXT, 0.0, 0.0, 2.0, 200, token_times=[1.0])
    bad = Outcome(1, Kind.TEXT, 0.0, 0.0, 90.0, 500, "internal_error", token_times=[80.0])
    found = spreads([good, bad])
    assert found["latency"] == Spread(1, 2.0, 2.0, 2.0, 2.0, 2.0)
    assert found["ttft"] == Spread(1, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert found["ttfa"] is None


def test_percentiles_lie_where_they_should() -> None:
    spread = Spread.of([float(n) for n in range(101)])
    assert spread == Spread(101, 50.0, 50.0, 90.0, 99.0, 100.0)
    assert Spread.of([]) is None


# -------------------------------------------------------------------------------------------------- goodput


def test_a_limit_binds_what_the_request_gives() -> None:
    outcome = spoken()
    assert within(outcome, {"ttft": 0.6, "ttfa": 1.1})
    assert not within(outcome, {"ttft": 0.6, "ttfa": 0.9})
    assert within(Outcome(0, Kind.IMAGE, 0.0, 0.0, 1.0, 200), {"ttft": 0.1})
    assert not within(Outcome(0, Kind.TEXT, 0.0, 0.0, 1.0, 429, "queue_full"), {"ttft": 0.1})
    assert parse_goodput("ttft:0.5, ttfa:1") == {"ttft": 0.5, "ttfa": 1.0}


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "speed:1"])
def test_a_limit_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_goodput(text)
    assert raised.value.param == "--goodput"


# ------------------------------------------------------------------------------------------------ transport


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000, False, "")),
        ("http://127.0.0.1:8000/v1/", Address("127.0.0.1", 8000, False, "")),
        ("https://models.example/team/v1", Address("models.example", 443, True, "/team")),
        ("http://[::1]:9000", Address("::1", 9000, False, "")),
    ],
)
def test_addresses_are_read(url: str, expected: Address) -> None:
    assert Address.parse(url) == expected
    assert Address.parse(url).netloc == ("[::1]:9000" if "::1" in url else f"{expected.host}:{expected.port}")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://[x", "http://x?y"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        Address.parse(url)
    assert raised.value.param == "URL"


@given(st.lists(st.integers(1, 400)), st.sampled_from(["\n", "\r\n"]))
def test_events_are_read_however_they_are_cut(cuts: list[int], end: str) -> None:
    values = [{"n": n, "text": "ü\n" * n} for n in range(5)]
    text = f": a comment{end}{end}" + "".join(f"event: x{end}data: {json.dumps(v)}{end}{end}" for v in values)
    data = f"{text}data: [DONE]{end}{end}".encode()
    borders = sorted({0, len(data), *(cut for cut in itertools.accumulate(cuts) if cut < len(data))})
    reader = EventReader()
    found = [event for a, b in itertools.pairwise(borders) for event in reader.push(data[a:b])]
    assert found == values
