"""The files of the page: where they are, how they are sent."""

from dataclasses import dataclass
from importlib.resources import files

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Known here, not asked of the machine, which may call modules plain text: browsers refuse that."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Sent with every file of the page."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, as it is sent."""

    content: bytes
    media_type: str


def page_files() -> dict[str, PageFile]:
    """Files of the page by path below the server's root; the page itself is the empty path."""
    found = {}
    for entry in files("didi_instruct.serving").joinpath("page").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in MEDIA_TYPES:
            path = "" if entry.name == "index.html" else f"page/{entry.name}"
            found[path] = PageFile(entry.read_bytes(), MEDIA_TYPES[suffix])
    return found
