"""What a person does on the chat page, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def opened(chromium: Any, address: str, heard: list[str] | None = None) -> Iterator[Any]:
    """The page of a server in a profile of its own; errors of its script fail the test."""
    heard = [] if heard is None else heard
    context = chromium.new_context(viewport={"width": 1300, "height": 800})
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("console", lambda message: heard.append(message.text) if "Content Security" in message.text else None)
    page.goto(address)
    yield page
    context.close()
    assert heard == []


def send(page: Any, text: str) -> None:
    """Write a question and press Enter."""
    page.fill("#question", text)
    page.press("#question", "Enter")


def ask(page: Any, text: str) -> str:
    """Send a question and wait for the end of its answer, which is returned as it is seen."""
    send(page, text)
    page.locator("#send", has_text="Send").wait_for()
    return str(page.locator(".answer .body").last.inner_text())


def problem(page: Any, text: str) -> str:
    """Send a question and wait for what the page says is wrong."""
    send(page, text)
    return notice(page)


def notice(page: Any) -> str:
    page.locator("#notice").wait_for()
    return str(page.locator("#notice-text").inner_text())


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).last.click()
