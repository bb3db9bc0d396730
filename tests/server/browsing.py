"""Fixtures of tests that look at the chat page: one browser for all of them, a new profile for each."""

from collections.abc import Iterator
from typing import Any

import pytest
from acts import opened
from headless import Chromium, find_chromium
from stub_server import Stub, running_stub


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    """A headless Chromium under Playwright; tests are skipped with the reason where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    result = find_chromium()
    if not isinstance(result, Chromium):
        pytest.skip(result)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=result.executable, env=result.environment)
        yield browser
        browser.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A server that serves the page and answers from a script."""
    with running_stub() as server:
        yield server


@pytest.fixture
def heard() -> list[str]:
    """What went wrong in the page: errors, and what its headers have refused."""
    return []


@pytest.fixture
def page(chromium: Any, stub: Stub, heard: list[str]) -> Iterator[Any]:
    """The page, opened, with its model's name; what goes wrong in it a test must take note of."""
    with opened(chromium, stub.address, heard) as page:
        # a page that does not know the name yet asks without it
        page.locator("#model", has_text="tiny-llama").wait_for()
        yield page
