"""A trace as an animated GIF: one frame before the first step and one after each."""

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from didi_instruct.sampling.trace import Change, Span, SpanState, replay, require_pillow

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

PAPER, INK, SOFT, RULE = "#fffefc", "#23211e", "#8b857c", "#e4dfd7"
MASK, HALF, DIM, ACCENT, DRAFT = "#e9e4db", "#d4ccbd", "#c4beb4", "#0d7a74", "#8a5a9e"
SHADES = 10
FIRST_MS, LAST_MS, LAST_MS_PER_WORD, LAST_MS_LIMIT = 900, 2000, 20, 6000
MAX_STEPS = 128  # a longer trace is thinned to this many, evenly spread


@dataclass(frozen=True, slots=True)
class Style:
    """Measures of a column in pixels; `size` and `small` are those of the fonts."""

    width: int = 760
    margin: int = 40
    header: int = 84
    size: int = 18
    small: int = 13
    line_height: int = 32


ALONE = Style()
# Two columns are as wide as GitHub shows a picture without shrinking it.
BESIDE = Style(width=398, margin=22, header=70, size=15, small=12, line_height=26)


def render_gif(trace: dict[str, Any]) -> bytes:
    """Draw the first sample of the dictionary of a trace (`Trace.as_dict`)."""
    return render_beside({"": trace}, ALONE)


def render_beside(traces: Mapping[str, dict[str, Any]], style: Style = BESIDE) -> bytes:
    """Draw the first samples of several traces beside each other, each under its title.

    They keep in step: one that needs more steps is still at work when the others are done.
    """
    require_pillow()
    from PIL import Image, ImageDraw

    columns = [
        _Column(trace, style, title, n * style.width)
        for n, (title, trace) in enumerate(traces.items())
    ]
    steps = max(column.steps for column in columns)
    num_drawn = min(steps, MAX_STEPS)
    size = len(columns) * style.width, max(column.height for column in columns)
    palette, frames, previous = _palette(), [], 0
    for step in (round(n * steps / num_drawn) for n in range(num_drawn + 1)):
        page = Image.new("RGB", size, PAPER)
        for column in columns:
            column.draw(ImageDraw.Draw(page), step, previous)
        frames.append(page.quantize(palette=palette, dither=Image.Dither.NONE))
        previous = step
    step_ms = int(max(60, min(700, 8000 / steps)))
    words = sum(len(column.boxes) for column in columns)
    last_ms = min(LAST_MS + LAST_MS_PER_WORD * words, LAST_MS_LIMIT)
    duration = [FIRST_MS, *[step_ms] * (num_drawn - 1), last_ms]
    file, options = io.BytesIO(), {"save_all": True, "loop": 0, "optimize": True}
    frames[0].save(file, "GIF", append_images=frames[1:], duration=duration, **options)
    return file.getvalue()


class _Column:
    """One trace, below a header that says the step."""

    def __init__(self, trace: dict[str, Any], style: Style, title: str, x: int) -> None:
        self.style, self.title = style, title
        self.left, self.right = x + style.margin, x + style.width - style.margin
        self.replay = replay(trace, trace["samples"][0])
        self.steps = len(self.replay.times) - 1
        length = font(style.size).getlength
        self.boxes = lay_out(self.replay.spans, length, self.right - self.left)
        lines = max((box.line for box in self.boxes), default=0) + 1
        self.height = style.header + lines * style.line_height + style.margin - 8

    def draw(self, pen: "ImageDraw", step: int, previous: int) -> None:
        """Draw the state after `step`; what changed since step `previous` is highlighted."""
        self._draw_header(pen, min(step, self.steps))
        changes = self.replay.after(step)
        ends = (i for i in self.replay.ends if changes[i].state == SpanState.SHOWN)
        end = next(ends, len(changes))
        for i, (change, box) in enumerate(zip(changes, self.boxes, strict=True)):
            colour = ACCENT if change.step > previous else DIM if i > end else INK
            self._draw_span(pen, change, box, colour)

    def _draw_header(self, pen: "ImageDraw", step: int) -> None:
        base, small = self.style.header - 44, font(self.style.small)
        labels = [f"step {step}/{self.steps}", f"t = {self.replay.times[step]:.2f}"]
        if self.title:
            labels = [self.title, labels[0]]
        colour = INK if self.title else SOFT
        pen.text((self.left, base), labels[0], colour, small, anchor="ls")
        pen.text((self.right, base), labels[1], SOFT, small, anchor="rs")
        pen.rectangle((self.left, base + 11, self.right, base + 13), RULE)
        if step:
            filled = self.left + (self.right - self.left) * step / self.steps
            pen.rectangle((self.left, base + 11, filled, base + 13), ACCENT)

    def _draw_span(self, pen: "ImageDraw", change: Change, box: "Box", colour: str) -> None:
        size, x = self.style.size, self.left + box.x
        base = self.style.header + box.line * self.style.line_height + size + 4
        if change.state < SpanState.SHOWN:
            block = (x + 0.5, base - size + 1, x + max(box.width, 6) - 1.5, base + size // 4 + 1)
            pen.rounded_rectangle(block, 4, HALF if change.state == SpanState.PARTIAL else MASK)
        elif change.state == SpanState.DRAFT:
            draft = change.text.strip()
            fitting = size * box.width / max(font(size).getlength(draft), 1)
            pen.text((x, base), draft, DRAFT, font(max(7, min(size, int(fitting)))), anchor="ls")
        elif self.replay.spans[change.span].eot:
            if not self.replay.spans[change.span].repeated_eot:
                pen.rounded_rectangle((x, base - 14, x + box.width, base + 4), 8, outline=colour)
            middle = (x + box.width / 2, base - 5)
            pen.text(middle, box.word, colour, font(self.style.small - 3), anchor="mm")
        else:
            pen.text((x, base), box.word, colour, font(size), anchor="ls")


@dataclass(frozen=True, slots=True)
class Box:
    """Place of a span's word; `x` is its left edge."""

    x: float
    line: int
    width: float
    word: str


def lay_out(spans: list[Span], length: Callable[[str], float], width: float) -> list[Box]:
    """Set the final text in lines of a width, so that nothing moves while it is written.

    Lines break before words; a word that is longer than a line breaks between its spans.
    """
    boxes: list[Box] = []
    x, line = 0.0, 0
    for run, blank in _runs(spans):
        if x > 0 and x + length("".join(run)) > width:
            x, line = 0.0, line + 1
        start, begun = x, ""
        for word in run:
            if x > 0 and start + length(begun + word) > width:
                x, line, start, begun = 0.0, line + 1, 0.0, ""
            begun += word
            x = start + length(begun)  # measured as one text, because of kerning
            boxes.append(Box(x - length(word), line, length(word or " "), word))
        if "\n" in blank:
            x, line = 0.0, line + blank.count("\n")
        x += length(" ") * len(blank.rpartition("\n")[2])
    return boxes


def _runs(spans: list[Span]) -> Iterator[tuple[list[str], str]]:
    """Words of spans without white space between them, and the white space after each run."""
    run: list[str] = []
    for before, word, after in (span.parts for span in spans):
        if before:
            yield run, before
            run = []
        run.append(word)
        if after:
            yield run, after
            run = []
    yield run, ""


@cache
def font(size: int) -> "FreeTypeFont | ImageFont":
    """DejaVu Sans, which Matplotlib brings and which knows many scripts; else Pillow's own."""
    from PIL import ImageFont

    try:
        path = files("matplotlib") / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        return ImageFont.truetype(str(path), size)
    except (ModuleNotFoundError, OSError):
        return ImageFont.load_default(size)


def _palette() -> "Image":
    """Colours of all frames, which would flicker without a common palette; 54 take 6 bits each."""
    from PIL import Image, ImageColor

    flat = [ImageColor.getrgb(colour) for colour in (PAPER, RULE, MASK, HALF)]
    inks = [ImageColor.getrgb(colour) for colour in (INK, SOFT, DIM, ACCENT, DRAFT)]
    shades = [np.linspace(flat[0], ink, SHADES + 1)[1:] for ink in inks]
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.concatenate([flat, *shades]).astype(np.uint8).tobytes())
    return palette
