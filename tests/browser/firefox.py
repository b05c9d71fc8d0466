"""Firefox over WebDriver BiDi, which it speaks itself: Playwright drives only a build of its own."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.hang_guard import HANG_SECONDS

NAMES = ("firefox-esr", "firefox")
PREFERENCES = {
    "media.navigator.streams.fake": True,
    "media.navigator.permission.disabled": True,
    "media.autoplay.default": 0,
    "media.cubeb.force_mock_context": True,  # without a sound card an audio clock would stand still
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.update.enabled": False,
}
SECONDS = 60.0


class Tab:
    """One tab: it goes to an address and runs scripts."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        self.call("session.new", capabilities={})
        self.call("session.subscribe", events=["log.entryAdded"])
        self._context = self.call("browsingContext.getTree")["contexts"][0]["context"]

    def call(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=SECONDS + 15))
            if answer.get("method") == "log.entryAdded" and answer["params"]["level"] == "error":
                self.problems.append(str(answer["params"]["text"]))
            if answer.get("id") == number:
                assert answer["type"] == "success", answer
                return dict(answer["result"])

    def go(self, url: str) -> None:
        self.call("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def size(self, width: int, height: int) -> None:
        self.call("browsingContext.setViewport", context=self._context, viewport={"width": width, "height": height})

    def run(self, body: str) -> Any:
        """The value of an async function's body, which must be JSON; a user's gesture is taken for granted."""
        expression = f"(async () => {{ {body} }})().then((value) => JSON.stringify(value ?? null))"
        target = {"context": self._context}
        result = self.call(
            "script.evaluate", expression=expression, target=target, awaitPromise=True, userActivation=True
        )
        assert result["type"] == "success", result
        return json.loads(result["result"]["value"])

    def until(self, condition: str) -> Any:
        """Wait until an expression is true of the page."""
        return self.run(
            f"""for (let left = {SECONDS} * 20; left > 0; left -= 1) {{
              const value = {condition};
              if (value) return value;
              await new Promise((done) => setTimeout(done, 50));
            }}
            throw new Error("it did not happen");"""
        )


@contextmanager
def firefox() -> Iterator[Tab]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Firefox")
    with tempfile.TemporaryDirectory(prefix="firefox") as profile:
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in PREFERENCES.items()]
        (Path(profile) / "user.js").write_text("\n".join(lines), encoding="utf-8")
        command = [path, "--headless", "--no-remote", "--remote-debugging-port=0", "--profile", profile]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            with connect(f"{_address(process)}/session", max_size=None, proxy=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
            process.wait(HANG_SECONDS)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if (said := re.search(r"WebDriver BiDi listening on (ws://\S+)", line)) is not None:
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
            return said[1]
    pytest.skip("this Firefox ended before it listened")
