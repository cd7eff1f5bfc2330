"""A real Chromium for tests of the page."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from tests.serving.browser import Visit
from tests.serving.stub_server import Stub


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Debian's browser, driven by Playwright."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install playwright"
    )
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    # Chromium refuses its own sandbox to root, as which containers run.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Any]:
    """Open pages; afterwards no console may have complained of what the test did not provoke."""
    visits: list[Visit] = []

    def go(url: str, **settings: Any) -> Visit:
        visits.append(Visit(chromium, url, **settings))
        return visits[-1]

    yield go
    for one in visits:
        one.context.close()
    assert [fault for one in visits for fault in one.faults] == []


@pytest.fixture
def stub() -> Iterator[Stub]:
    """The server with canned diffusions of texts."""
    with Stub() as server:
        yield server
