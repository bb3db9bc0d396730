"""What a person does on the chat page, for tests."""

from typing import Any


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
