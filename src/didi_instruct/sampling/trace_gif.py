"""A trace as an animated GIF of its first sample: a frame before the first step, one after each."""

import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from didi_instruct.errors import MissingExtraError
from didi_instruct.sampling.trace_view import State, Unit, view

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

WIDTH, MARGIN, HEADER = 760, 40, 84
SIZE, SMALL, LEADING = 18, 13, 32
PAPER, INK, SOFT, RULE = "#fffefc", "#23211e", "#8b857c", "#e4dfd7"
MASK, HALF, DIM, ACCENT, DRAFT = "#e9e4db", "#d4ccbd", "#c4beb4", "#0d7a74", "#8a5a9e"
FIRST_MS, LAST_MS = 900, 2000
MOST_STEPS = 128
"""Of a longer trace, this many steps are shown, evenly spread."""
SHADES = 10
END, AGAIN = "end", "·"


@dataclass(frozen=True, slots=True)
class Box:
    """Where the word of a unit stands: left edge, line, width."""

    x: float
    line: int
    width: float
    word: str


def require_pillow() -> None:
    """Say what to install where Pillow is missing."""
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtraError("A GIF trace", "eval")


def render(trace: dict[str, Any]) -> bytes:
    """Draw the first sample of what `Trace.as_dict` returns."""
    require_pillow()
    from PIL import Image, ImageDraw

    sample = trace["samples"][0]
    shown = view(trace, sample)
    steps = len(shown.steps)
    boxes = lay_out(shown.units, font(SIZE).getlength, WIDTH - 2 * MARGIN)
    lines = max((box.line for box in boxes), default=0) + 1
    palette = _palette()
    drawn = {round(i * steps / min(steps, MOST_STEPS)) for i in range(steps + 1)}
    frames, fresh = [], set()
    for n, (states, texts, new) in enumerate(shown.frames()):
        fresh |= new
        if n not in drawn:
            continue
        page = Image.new("RGB", (WIDTH, HEADER + lines * LEADING + MARGIN - 8), PAPER)
        pen = ImageDraw.Draw(page)
        _draw_header(pen, n, steps, shown.times[n])
        past = shown.past_end(states, sample["end"])
        for i, box in enumerate(boxes):
            colour = ACCENT if i in fresh else DIM if i >= past else INK
            _draw_unit(pen, box, shown.units[i], states[i], texts[i], colour)
        frames.append(page.quantize(palette=palette, dither=Image.Dither.NONE))
        fresh = set()
    step_ms = int(max(60, min(700, 8000 / steps)))
    return _encode(frames, [FIRST_MS, *[step_ms] * (len(frames) - 2), LAST_MS])


def lay_out(units: list[Unit], length: Callable[[str], float], width: float) -> list[Box]:
    """Set the final text in lines of that width, so that nothing ever moves.

    Lines break before words; a word that is longer than a line breaks between its tokens.
    """
    setter, ended = _Setter(length, width), False
    for unit in units:
        if unit.eot:
            setter.blank("" if ended else " ")
            setter.word.append(AGAIN if ended else END)
            setter.blank(" ")
        ended = unit.eot
        if ended:
            continue
        word = unit.text.strip()
        before, _, after = unit.text.partition(word) if word else ("", "", unit.text)
        if before:
            setter.blank(before)
        if word:
            setter.word.append(word)
        else:
            setter.mark(" ")
        if after:
            setter.blank(after)
    setter.blank("")
    return setter.boxes


@dataclass(slots=True)
class _Setter:
    """Sets word by word; the tokens of a word wait until it is complete."""

    length: Callable[[str], float]
    width: float
    boxes: list[Box] = field(default_factory=list)
    word: list[str] = field(default_factory=list)
    x: float = 0.0
    line: int = 0

    def blank(self, text: str) -> None:
        """End the word and leave white space."""
        if self.x > 0 and self.x + self.length("".join(self.word)) > self.width:
            self._break()
        start, begun = self.x, ""
        for token in self.word:
            if self.x > 0 and start + self.length(begun + token) > self.width:
                self._break()
                start, begun = 0.0, ""
            begun += token
            # Measured from the start of the word, so that kerning does not come and go.
            self.x = start + self.length(begun) - self.length(token)
            self._put(token, self.length(token))
        self.word.clear()
        for _ in range(text.count("\n")):
            self._break()
        self.x += self.length(" ") * len(text.rpartition("\n")[2])

    def mark(self, word: str) -> None:
        """Give white space that is a token of its own a place; it is set by `blank`."""
        self.blank("")
        x = self.x
        self._put(word, self.length(word))
        self.x = x

    def _put(self, word: str, width: float) -> None:
        self.boxes.append(Box(self.x, self.line, width, word))
        self.x += width

    def _break(self) -> None:
        self.x, self.line = 0.0, self.line + 1


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


def _draw_header(pen: "ImageDraw", n: int, steps: int, time: float) -> None:
    pen.text((MARGIN, 40), f"step {n}/{steps}", SOFT, font(SMALL), anchor="ls")
    pen.text((WIDTH - MARGIN, 40), f"t = {time:.2f}", SOFT, font(SMALL), anchor="rs")
    done = MARGIN + (WIDTH - 2 * MARGIN) * n / steps
    pen.rectangle((MARGIN, 51, WIDTH - MARGIN, 53), RULE)
    if n:
        pen.rectangle((MARGIN, 51, done, 53), ACCENT)


def _draw_unit(
    pen: "ImageDraw", box: Box, unit: Unit, state: State, text: str, colour: str
) -> None:
    x, base = MARGIN + box.x, HEADER + box.line * LEADING + 22
    if state < State.SHOWN:
        frame = (x + 0.5, base - 17, x + max(box.width, 6) - 1.5, base + 5)
        pen.rounded_rectangle(frame, 4, HALF if state == State.PARTIAL else MASK)
    elif unit.eot and state == State.SHOWN:
        if box.word == END:
            pen.rounded_rectangle((x, base - 14, x + box.width, base + 4), 8, outline=colour)
        middle = (x + box.width / 2, base - 5)
        pen.text(middle, box.word, colour, font(SMALL - 3), anchor="mm")
    elif state == State.DRAFT:
        word = text.strip()
        room = box.width / max(font(SIZE).getlength(word), 1)
        size = max(7, min(SIZE, int(SIZE * room)))
        pen.text((x, base), word, DRAFT, font(size), anchor="ls")
    elif box.word.strip():
        pen.text((x, base), box.word, colour, font(SIZE), anchor="ls")


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
