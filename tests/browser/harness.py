"""What tests of the page do with it, and what they note of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Locator, Page, Request, expect

SLOW = 60_000
"""Milliseconds that a busy machine may need for an answer."""
CHAT = "/v1/chat/completions"


def ask(page: Page, text: str) -> Locator:
    """Send a text; the answer that it gets."""
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    answer = page.locator(".answer").last
    answer.wait_for()
    return answer


def letters(text: str) -> str:
    """What is left of a text where signs are shown as lists or in bold."""
    return "".join(filter(str.isalpha, text))


def ended(answer: Locator, how: str = "done") -> None:
    expect(answer).to_have_attribute("data-ended", how, timeout=SLOW)


@dataclass
class Watched:
    """What a page asked for and complained about."""

    requests: list[Request] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()
    """Complaints that a test is about."""

    def sent(self, path: str) -> Request:
        """The latest request to a path of the service."""
        return [request for request in self.requests if urlsplit(request.url).path == path][-1]
