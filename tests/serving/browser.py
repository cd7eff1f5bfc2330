"""A page open in Chromium, and words for what tests do with it."""

import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AXE = Path(os.environ.get("AXE_CORE", ROOT / "out/axe/node_modules/axe-core/axe.min.js"))
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


class Visit:
    """A page that is open, and what its console said."""

    def __init__(self, chromium: Any, url: str, **settings: Any) -> None:
        self.context = chromium.new_context(**settings)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.fault(m.text))
        self.page.on("pageerror", lambda error: self.fault(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.set_default_timeout(30_000)
        self.page.goto(url)

    def fault(self, text: str) -> None:
        """Keep what the console complained of."""
        self.faults.append(text)

    def status(self, text: str) -> None:
        """Wait until the status line says this."""
        self.page.locator("#status", has_text=text).wait_for()

    def ready(self) -> None:
        """Wait until the models are known."""
        self.page.locator("#lane-boxes input").first.wait_for()

    def slide(self, control: str, value: float) -> None:
        """Move a slider."""
        self.page.locator(control).evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', { bubbles: true })); }",
            value,
        )

    def race(self) -> None:
        """Let all write, to the end."""
        self.page.click("#run")
        self.status("All done.")

    def rows(self, lane: int) -> list[list[str | None]]:
        """Read the canvases of a lane: pieces, None for masks; end marks are empty."""
        return (
            self.page.locator(".lane")
            .nth(lane)
            .locator(".canvas")
            .evaluate_all(
                """canvases => canvases.map(c => [...c.children].map(
                s => s.classList.contains("mask") ? null : s.textContent))"""
            )
        )

    def texts(self) -> list[str]:
        """Read what all lanes show."""
        return self.page.locator(".canvas").all_inner_texts()

    def troubles(self) -> list[str]:
        """Read what lanes say went wrong."""
        return self.page.locator(".lane .trouble:visible").all_inner_texts()

    def axe(self) -> list[str]:
        """Name what axe-core finds wrong with the page as it stands."""
        if not AXE.is_file():
            pytest.skip(f"needs axe-core: npm install --prefix {AXE.parents[2]} axe-core")
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run(document)")
        assert found["passes"], "axe-core looked at nothing"
        return [
            f"{v['id']} ({v['impact']}): {node['target']} {node['failureSummary']}"
            for v in found["violations"]
            for node in v["nodes"]
        ]
