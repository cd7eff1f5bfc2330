"""`didi generate` on a terminal: the text settles in place while it is written."""

from statistics import median
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

    from didi_instruct.data.tokenizer import Tokenizer
    from didi_instruct.sampling.state import Snapshot

MASK, BROKEN = "░", "\ufffd"
HEADER_STYLE, MASK_STYLE, NEW_STYLE, PAST_STYLE = "dim", "dim", "bold green", "dim"
WIDEST_MASK = 4


class TerminalStream:
    """A callback that shows the first sample of the batch at hand; silent off a terminal.

    What it shows is gone when it is left, to make way for the result. It writes to standard
    error, so that the output can be piped.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        mask_id: int,
        *,
        enabled: bool = True,
        console: "Console | None" = None,
    ) -> None:
        from rich.console import Console

        self._tokenizer, self._mask_id = tokenizer, mask_id
        self._console = console or Console(stderr=True)
        self._enabled = enabled and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._mask = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, step: "Snapshot") -> None:
        """Show the text after a step."""
        if not self._enabled:
            return
        if self._live is None:
            from rich.live import Live

            self._mask = mask_text(self._tokenizer)
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        rows = (step.tokens, step.revealed, step.open)
        text = self.text(*(row[0].tolist() for row in rows))
        self._live.update(self._page(f"step {step.index + 1}/{step.steps}", text), refresh=True)

    def text(self, row: list[int], new: list[bool], written: list[bool] | None = None) -> "Text":
        """Masks as light blocks, new tokens in green, dim what the output will leave out."""
        from rich.text import Text

        from didi_instruct.sampling.trace import find_end, token_texts, visible

        end = find_end(row, self._tokenizer.eot_id, self._mask_id, written)
        text = Text()
        for i, piece in enumerate(token_texts(row, self._tokenizer.decode, self._mask_id)):
            if row[i] == self._mask_id:
                text.append(self._mask, MASK_STYLE)
            elif row[i] == self._tokenizer.eot_id and end is not None and i >= end:
                text.append(" ■ " if i == end else "", MASK_STYLE)
            elif piece:
                past = end is not None and i > end
                # Half a character is no news: the other half will tell.
                dim = past or BROKEN in piece
                style = PAST_STYLE if dim else NEW_STYLE if new[i] else ""
                text.append(visible(piece.replace(BROKEN, MASK)), style)
        return text

    def _page(self, header: str, text: "Text") -> "RenderableType":
        """The part of the text that fits the terminal, which cannot rewrite what scrolled away."""
        from rich.text import Text

        lines = text.wrap(self._console, self._console.width)
        room = max(1, self._console.height - 3)
        shown = [Text(header, HEADER_STYLE), *lines[:room]]
        if len(lines) > room:
            shown.append(Text(f"… {len(lines) - room} more lines", HEADER_STYLE))
            shown[-1].truncate(self._console.width)
        return Text("\n").join(shown)


def mask_text(tokenizer: "Tokenizer") -> str:
    """A mask about as wide as a token, so that little moves when the token comes."""
    few = range(0, tokenizer.size, max(1, tokenizer.size // 500))
    width = median(len(text) for text in tokenizer.decode_batch([token] for token in few))
    cells = max(1, min(WIDEST_MASK, round(width)))
    return MASK if cells == 1 else " " + MASK * (cells - 1)
