"""A trace as an animated GIF: a frame before the first step and one after each.

`render` draws the first sample of one trace, `render_beside` those of several in columns, in step
with each other: one that needs more steps is still at work when the others are done.
"""

import importlib.util
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from didi_instruct.errors import MissingExtraError
from didi_instruct.sampling.trace_layout import END, Box, lay_out
from didi_instruct.sampling.trace_view import State, Unit, view

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

PAPER, INK, SOFT, RULE = "#fffefc", "#23211e", "#8b857c", "#e4dfd7"
MASK, HALF, DIM, ACCENT, DRAFT = "#e9e4db", "#d4ccbd", "#c4beb4", "#0d7a74", "#8a5a9e"
FIRST_MS, LAST_MS, WORD_MS, LONGEST_MS = 900, 2000, 20, 6000
"""How long the first frame stays, and the last: a while, and time to read each of its words."""
MOST_STEPS = 128
"""Of a longer trace, this many steps are shown, evenly spread."""
SHADES = 10


@dataclass(frozen=True, slots=True)
class Style:
    """Measures of a column, in pixels."""

    width: int = 760
    margin: int = 40
    header: int = 84
    size: int = 18
    """Of the letters."""
    small: int = 13
    leading: int = 32
    """From line to line."""


ALONE = Style()
BESIDE = Style(width=398, margin=22, header=70, size=15, small=12, leading=26)
"""Two columns are as wide as GitHub shows a picture without shrinking it."""


def require_pillow() -> None:
    """Say what to install where Pillow is missing."""
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtraError("A GIF trace", "eval")


def render(trace: dict[str, Any]) -> bytes:
    """Draw the first sample of what `Trace.as_dict` returns."""
    require_pillow()
    return _animate([_Column(trace, ALONE)])


def render_beside(traces: Mapping[str, dict[str, Any]]) -> bytes:
    """Draw the first samples of several traces beside each other, each under its title."""
    require_pillow()
    parts = enumerate(traces.items())
    return _animate([_Column(t, BESIDE, i * BESIDE.width, title) for i, (title, t) in parts])


def _animate(columns: list["_Column"]) -> bytes:
    from PIL import Image, ImageDraw

    steps = max(column.steps for column in columns)
    drawn = {round(i * steps / min(steps, MOST_STEPS)) for i in range(steps + 1)}
    size = sum(c.style.width for c in columns), max(c.height for c in columns)
    palette, frames = _palette(), []
    for n in range(steps + 1):
        for column in columns:
            column.advance()
        if n not in drawn:
            continue
        page = Image.new("RGB", size, PAPER)
        for column in columns:
            column.draw(ImageDraw.Draw(page))
        frames.append(page.quantize(palette=palette, dither=Image.Dither.NONE))
    step_ms = int(max(60, min(700, 8000 / steps)))
    words = sum(len(column.boxes) for column in columns)
    last_ms = min(LAST_MS + WORD_MS * words, LONGEST_MS)
    return _encode(frames, [FIRST_MS, *[step_ms] * (len(frames) - 2), last_ms])


class _Column:
    """One sample on its way, and where it stands on the page."""

    def __init__(
        self, trace: dict[str, Any], style: Style, left: int = 0, title: str | None = None
    ) -> None:
        sample = trace["samples"][0]
        self.style, self.left, self.title, self.end = style, left, title, sample["end"]
        self.view = view(trace, sample)
        self.steps, self.done = len(self.view.steps), -1
        room = style.width - 2 * style.margin
        self.boxes = lay_out(self.view.units, font(style.size).getlength, room)
        self._frames = self.view.frames()
        self._states: list[State] = []
        self._texts: list[str] = []
        self._fresh: set[int] = set()

    @property
    def height(self) -> int:
        lines = max((box.line for box in self.boxes), default=0) + 1
        return self.style.header + lines * self.style.leading + self.style.margin - 8

    def advance(self) -> None:
        """Go on by a step; after the last nothing is new."""
        found = next(self._frames, None)
        if found is not None:
            self._states, self._texts, fresh = found
            self._fresh |= fresh
            self.done += 1

    def draw(self, pen: "ImageDraw") -> None:
        self._draw_header(pen)
        past = self.view.past_end(self._states, self.end)
        for i, box in enumerate(self.boxes):
            colour = ACCENT if i in self._fresh else DIM if i >= past else INK
            self._draw_unit(pen, box, self.view.units[i], self._states[i], self._texts[i], colour)
        self._fresh = set()

    def _draw_header(self, pen: "ImageDraw") -> None:
        style, count = self.style, f"step {self.done}/{self.steps}"
        left, right = self.left + style.margin, self.left + style.width - style.margin
        begin, end = count, f"t = {self.view.times[self.done]:.2f}"
        if self.title is not None:
            begin, end = self.title, count
        base = style.header - 44
        pen.text((left, base), begin, INK if self.title else SOFT, font(style.small), anchor="ls")
        pen.text((right, base), end, SOFT, font(style.small), anchor="rs")
        pen.rectangle((left, base + 11, right, base + 13), RULE)
        if self.done:
            filled = left + (right - left) * self.done / self.steps
            pen.rectangle((left, base + 11, filled, base + 13), ACCENT)

    def _draw_unit(
        self, pen: "ImageDraw", box: Box, unit: Unit, state: State, text: str, colour: str
    ) -> None:
        style = self.style
        x = self.left + style.margin + box.x
        base = style.header + box.line * style.leading + style.size + 4
        if state < State.SHOWN:
            top, bottom = base - style.size + 1, base + style.size // 4 + 1
            frame = (x + 0.5, top, x + max(box.width, 6) - 1.5, bottom)
            pen.rounded_rectangle(frame, 4, HALF if state == State.PARTIAL else MASK)
        elif unit.eot and state == State.SHOWN:
            if box.word == END:
                pen.rounded_rectangle((x, base - 14, x + box.width, base + 4), 8, outline=colour)
            middle = (x + box.width / 2, base - 5)
            pen.text(middle, box.word, colour, font(style.small - 3), anchor="mm")
        elif state == State.DRAFT:
            word = text.strip()
            room = box.width / max(font(style.size).getlength(word), 1)
            size = max(7, min(style.size, int(style.size * room)))
            pen.text((x, base), word, DRAFT, font(size), anchor="ls")
        elif box.word.strip():
            pen.text((x, base), box.word, colour, font(style.size), anchor="ls")


@cache
def font(size: int) -> "FreeTypeFont":
    """DejaVu Sans, which Matplotlib brings and which knows many scripts; else Pillow's own."""
    from PIL import ImageFont

    spec = importlib.util.find_spec("matplotlib")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if path.is_file():
            return ImageFont.truetype(str(path), size)
    found = ImageFont.load_default(size)
    assert isinstance(found, ImageFont.FreeTypeFont)
    return found


def _palette() -> "Image":
    """Flat colours and the shades of those that are written with: 54, which take 6 bits each.

    All frames share them, or colours would flicker.
    """
    from PIL import Image, ImageColor

    paper = ImageColor.getrgb(PAPER)
    colours: list[tuple[int, ...]] = [paper, *map(ImageColor.getrgb, (RULE, MASK, HALF))]
    for ink in map(ImageColor.getrgb, (INK, SOFT, DIM, ACCENT, DRAFT)):
        for shade in range(1, SHADES + 1):
            mixed = (p + (i - p) * shade // SHADES for p, i in zip(paper, ink, strict=True))
            colours.append(tuple(mixed))
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in colours for part in colour])
    return palette


def _encode(frames: list["Image"], times: list[int]) -> bytes:
    file = io.BytesIO()
    frames[0].save(
        file,
        "GIF",
        save_all=True,
        append_images=frames[1:],
        duration=times,
        loop=0,
        optimize=True,
    )
    return file.getvalue()
