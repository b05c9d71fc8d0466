"""A real browser on a real server over small real models. Where there is no Chromium these tests skip and say so."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from omnistage.omni import AsyncOmni
from tests.browser.harness import Watched
from tests.server.conftest import audit as audit
from tests.server.conftest import server as server
from tests.server.conftest import service as service
from tests.server.harness import SERVE_LIMITS, Running, make

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
)
# What the browser is told to play, when, and where it is cut off: kept beside the page's own count.
WATCH_SOUND = """
window.started = [];
const pieces = new WeakMap();
const { start, stop } = AudioBufferSourceNode.prototype;
AudioBufferSourceNode.prototype.start = function (when, ...rest) {
  if (this.context instanceof AudioContext) {
    const { length: samples, sampleRate: rate, duration } = this.buffer;
    const piece = { when, samples, rate, until: when + duration };
    pieces.set(this, piece);
    window.started.push(piece);
  }
  return start.call(this, when, ...rest);
};
AudioBufferSourceNode.prototype.stop = function (...rest) {
  const piece = pieces.get(this);
  if (piece !== undefined) piece.until = Math.min(piece.until, this.context.currentTime);
  return stop.call(this, ...rest);
};
"""


def chromium() -> str | None:
    """The browser to test in: the one that is named, or one that is installed."""
    named = os.environ.get("OMNISTAGE_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


OVERRIDES = {
    "omni": ("talker.max_tokens=40", "token2wav.max_hold_seconds=0"),
    # Random weights sample an end now and then, also where an answer is to be seen running.
    "lm": ("thinker.ignore_eos=true",),
    "draw": (),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncOmni]]:
    """One small model of each kind; what is spoken is short, and comes in more than one piece."""
    place = tmp_path_factory.mktemp("page")
    made = {}
    for name, family in (("omni", "qwen2_5_omni"), ("lm", "causal_lm"), ("draw", "stable_diffusion_3")):
        limits = (*SERVE_LIMITS, *OVERRIDES[name])
        made[name] = AsyncOmni(
            make(family, place / name), device="cpu", dtype="float32", overrides=limits, progress=False
        )
    yield made
    for omni in made.values():
        asyncio.run(omni.shutdown(drain=False))


@contextmanager
def launched(*more: str) -> Iterator[Browser]:
    path = chromium()
    if path is None:
        pytest.skip(f"no Chromium ({', '.join(NAMES)}): install one or set OMNISTAGE_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=[*ARGUMENTS, *more])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, which finds mistakes that keep people out; from npm."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not here, to fetch axe-core")
    folder = tmp_path_factory.mktemp("axe")
    try:
        done = subprocess.run(
            [npm, "pack", "axe-core@4.10.3"], cwd=folder, capture_output=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch axe-core in time: is the registry within reach?")
    packed = next(folder.glob("*.tgz"), None)
    if done.returncode != 0 or packed is None:
        pytest.skip(f"npm could not fetch axe-core: {done.stderr.decode(errors='replace').splitlines()[:1]}")
    with tarfile.open(packed) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1280, "height": 860}, permissions=["microphone"])
    made.set_default_timeout(60_000)
    made.add_init_script(WATCH_SOUND)
    yield made
    made.close()


@pytest.fixture
def watched(context: BrowserContext, server: Running) -> Iterator[Watched]:
    """Every test's page: it asks nobody but the service, and nothing goes wrong in it."""
    seen = Watched()

    def console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            seen.problems.append(message.text)

    context.on("request", lambda request: seen.requests.append(request))
    context.on("console", console)
    context.on("weberror", lambda error: seen.problems.append(str(error.error)))
    yield seen
    hosts = {urlsplit(request.url).netloc for request in seen.requests if request.url.startswith("http")}
    assert hosts == {urlsplit(server.url).netloc}
    unexpected = [text for text in seen.problems if not any(known in text for known in seen.expected)]
    assert unexpected == []


@pytest.fixture
def page(context: BrowserContext, server: Running, watched: Watched) -> Iterator[Page]:
    """The page, with the models shown."""
    made = context.new_page()
    made.goto(f"{server.url}/")
    made.locator("#status[data-state=ready]").wait_for()
    yield made
    made.close()  # before the server ends: the page keeps asking it for its gauges
