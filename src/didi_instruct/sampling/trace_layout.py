"""Where the words of a trace stand in a picture: lines of the final text, so that nothing moves."""

from collections.abc import Callable
from dataclasses import dataclass, field

from didi_instruct.sampling.trace_view import Unit

END, AGAIN = "end", "·"
"""What stands for an end-of-text, and for those that follow one."""


@dataclass(frozen=True, slots=True)
class Box:
    """Where the word of a unit stands: left edge, line, width."""

    x: float
    line: int
    width: float
    word: str


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
