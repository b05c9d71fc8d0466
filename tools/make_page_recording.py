"""Record docs/images/page.gif: the page at `/` in a real browser, with the starter behind it.

    omnistage pull starter
    python tools/make_page_recording.py

It needs Chromium (on the PATH, or named by OMNISTAGE_CHROMIUM); on two cores give torch one thread
(`OMP_NUM_THREADS=1`), for the browser needs the other. Every frame is a screenshot, shown for as long as it
took until the next one; only waiting in which nothing moves is cut short.
"""

from __future__ import annotations

import argparse
import io
import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path

from live_page import ARGUMENTS, WAIT, chromium, serving
from PIL import Image, ImageChops
from playwright.sync_api import Page, sync_playwright

from omnistage.omni import AsyncOmni

RECORDING = Path(__file__).parents[1] / "docs" / "images" / "page.gif"
QUESTION, SUBJECT = "What is the capital of France?", "Draw a blue butterfly."
WIDTH, HEIGHT, SHOWN = 1120, 700, 0.75
COLOURS = 200
LONGEST_STILL, LAST_STILL = 0.4, 1.5
"""Seconds that a frame is shown at most; of the last one."""
MOST_BYTES = 3_000_000


@dataclass
class Recording:
    """Screenshots and when each was taken; one that shows nothing new is not kept."""

    page: Page
    frames: list[tuple[float, Image.Image]] = field(default_factory=list)

    def take(self) -> None:
        shot = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        small = shot.resize((round(WIDTH * SHOWN), round(HEIGHT * SHOWN)), Image.Resampling.LANCZOS)
        if not self.frames or ImageChops.difference(self.frames[-1][1], small).getbbox() is not None:
            self.frames.append((time.monotonic(), small))

    def type(self, text: str) -> None:
        for start in range(0, len(text), 5):
            self.page.locator("#prompt").press_sequentially(text[start : start + 5], delay=10)
            self.take()

    def until(self, selector: str, seconds: float) -> None:
        """Record until something is on the page, and `seconds` more."""
        end = time.monotonic() + WAIT / 1000
        while self.page.locator(selector).count() == 0:
            self.take()
            if time.monotonic() > end:
                raise SystemExit(f"the page never showed {selector}")
        self.during(seconds)

    def during(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.take()

    def save(self, path: Path) -> float:
        """Write the GIF; its length in seconds."""
        times = [at for at, _ in self.frames]
        gaps = [min(after - at, LONGEST_STILL) for at, after in itertools.pairwise(times)]
        lengths = [max(20, round(1000 * gap)) for gap in [*gaps, LAST_STILL]]
        # One palette for all: colours that change from frame to frame would flicker and cost bytes. It covers what is
        # rare as well, or the picture, which is small beside the page, would be drawn in the page's colours.
        shades = Image.new("RGB", (self.frames[0][1].width, 3 * self.frames[0][1].height))
        for number in range(3):
            picked = self.frames[(len(self.frames) - 1) * number // 2][1]
            shades.paste(picked, (0, number * picked.height))
        palette = shades.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
        first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for _, frame in self.frames]
        first.save(path, save_all=True, append_images=others, duration=lengths, loop=0, optimize=True)
        return sum(lengths) / 1000


def ask(recording: Recording, text: str, answers: int, then: str, seconds: float) -> None:
    recording.type(text)
    recording.page.locator("#prompt").press("Enter")
    recording.until(f"#messages > :nth-child({2 * answers}) {then}", seconds)


def record(page: Page, seed: int) -> Recording:
    for name, value in (("seed", seed), ("temperature", 0), ("max_tokens", 40)):
        page.locator(f"#param-{name}").fill(str(value))
    page.locator("#out-audio").set_checked(True)
    page.locator("#panel").evaluate("panel => (panel.scrollTop = 0)")
    page.locator("#prompt").focus()
    recording = Recording(page)
    recording.take()
    ask(recording, QUESTION, 1, ".replay", 0.6)
    page.locator("#out-audio").set_checked(False)
    page.locator("#out-image").set_checked(True)
    recording.take()
    ask(recording, SUBJECT, 2, ".save", 0.6)
    page.locator("#prompt").blur()
    page.locator("#scroll").evaluate("scroll => (scroll.scrollTop = scroll.scrollHeight)")
    recording.take()
    return recording


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="starter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RECORDING)
    args = parser.parse_args()
    starter = {"starter": AsyncOmni(args.model, progress=False)}
    with serving(starter) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=ARGUMENTS)
        context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        context.set_default_timeout(WAIT)
        page = context.new_page()
        page.goto(f"{url}/")
        page.locator("#status[data-state=ready]").wait_for()
        recording = record(page, args.seed)
        browser.close()
    seconds = recording.save(args.out)
    size = args.out.stat().st_size
    print(f"{args.out}: {len(recording.frames)} frames, {seconds:.1f} s, {size / 1e6:.2f} MB")
    if size > MOST_BYTES:
        raise SystemExit(f"over {MOST_BYTES / 1e6:.0f} MB: lower COLOURS or SHOWN")


if __name__ == "__main__":
    main()
