"""Draw docs/images/page-light.png, page-dark.png and page-phone.png: the page at `/` in a real browser.

    python tools/make_page_screenshots.py

It needs Chromium (on the PATH, or named by OMNISTAGE_CHROMIUM). The models are small and random: what they say is
noise, and the seed is chosen so that the noise is made of letters.
"""

from __future__ import annotations

import base64
import re
import tempfile
from pathlib import Path

import httpx
import numpy as np
from live_page import ARGUMENTS, WAIT, chromium, serving
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from omnistage.models.registry import REGISTRY
from omnistage.omni import AsyncOmni

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MODELS = {"qwen2.5-omni": "qwen2_5_omni", "stable-diffusion-3": "stable_diffusion_3"}
QUESTION, PROMPT = "What do you see in this picture?", "A lighthouse at dusk, watercolour"
TOKENS = 10
SEEDS = range(895, 5000)  # from shortly before the one that was found last


def small_models(folder: Path) -> dict[str, AsyncOmni]:
    """New small models by the names that the page shows."""
    models = {}
    for name, family in MODELS.items():
        tiny = REGISTRY.family(family).tiny
        if tiny is None:
            raise SystemExit(f"{family} makes no small checkpoint")
        (folder / name).mkdir()
        tiny(folder / name, seed=0)
        bound = ("talker.max_tokens=96",) if family == "qwen2_5_omni" else ()
        models[name] = AsyncOmni(folder / name, device="cpu", dtype="float32", overrides=bound, progress=False)
    return models


def picture(file: Path) -> Path:
    """Hills before an evening sky, to have something to ask about."""
    width, height = 1440, 960
    y, x = np.mgrid[0:height, 0:width]
    sky = np.stack([np.interp(y, (0, 620), ends) for ends in ((70, 255), (92, 196), (160, 150))], -1)
    sky[(x - 980) ** 2 + (y - 430) ** 2 < 82**2] = (255, 238, 205)
    for base, swing, colour in ((560, 70, (128, 98, 142)), (660, 90, (86, 74, 122)), (780, 60, (48, 50, 92))):
        ridge = base + swing * np.sin(x / (150 + base / 3) + base) + swing / 3 * np.sin(x / 61 + base)
        sky[y > ridge] = colour
    Image.fromarray(sky.astype(np.uint8)).resize((720, 480), Image.Resampling.LANCZOS).save(file)
    return file


def readable_seed(url: str, file: Path) -> int:
    """A seed with which the noise is letters."""
    data = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": QUESTION}]
    body = {"model": "qwen2.5-omni", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
    with httpx.Client(base_url=url, timeout=120) as client:
        for seed in SEEDS:
            made = client.post("/v1/chat/completions", json={**body, "modalities": ["text"], "seed": seed}).json()
            text = made["choices"][0]["message"]["content"]
            if re.fullmatch(r"[A-Za-z]{2,}( ?[A-Za-z]{2,}){4,}[.,]?", text):
                return seed
    raise SystemExit("no seed gave letters; raise SEEDS")


def opened(browser: Browser, url: str, scheme: str, width: int, height: int) -> Page:
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=2 if width < 500 else 1,
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT)
    page = context.new_page()
    page.goto(f"{url}/")
    page.locator("#status[data-state=ready]").wait_for()
    return page


def fill(page: Page, **values: object) -> None:
    phone = not page.locator("#params").is_visible()
    if phone:
        page.locator("#show-panel").click()
    for name, value in values.items():
        page.locator(f"#param-{name}").fill(str(value))
    if phone:
        page.locator("#hide-panel").click()


def ask(page: Page, text: str, done: str) -> None:
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    page.locator(".answer[data-ended=done]").last.wait_for()
    page.locator(done).last.wait_for()
    page.locator("#panel").evaluate("panel => (panel.scrollTop = 0)")
    page.locator("#prompt").blur()
    page.mouse.move(0, 0)


def spoken(page: Page, file: Path, seed: int) -> None:
    fill(page, max_tokens=TOKENS, seed=seed)
    page.locator("#out-audio").check()
    page.locator("#file").set_input_files(file)
    page.locator(".attachment").wait_for()
    ask(page, QUESTION, ".replay")


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(small_models(Path(folder))) as url,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=ARGUMENTS)
        file = picture(Path(folder) / "colours.png")
        seed = readable_seed(url, file)
        light = opened(browser, url, "light", 1280, 900)
        spoken(light, file, seed)
        light.screenshot(path=IMAGES / "page-light.png")
        dark = opened(browser, url, "dark", 1280, 900)
        dark.locator("#model").select_option("stable-diffusion-3")
        fill(dark, size="320x320", steps=12, seed=7, n=2)
        ask(dark, PROMPT, ".save")
        dark.screenshot(path=IMAGES / "page-dark.png")
        phone = opened(browser, url, "light", 360, 740)
        spoken(phone, file, seed)
        phone.screenshot(path=IMAGES / "page-phone.png")
        browser.close()


if __name__ == "__main__":
    main()
