"""The text settling on a terminal, and silence elsewhere."""

import io
import re

import pytest
import torch
from rich.console import Console

from didi_instruct.cli.stream import MASK, NEW_STYLE, TerminalStream, mask_text
from didi_instruct.data.tokenizer import Tokenizer, train_tokenizer
from didi_instruct.sampling.state import PAD, Snapshot

WORDS = Tokenizer.from_words(["a", "small", "cat", "sat", "<eos>"])
MASK_ID, EOT = 5, 4


def step(index, row, new, steps=3):
    tokens = torch.tensor([row, row])
    revealed = torch.zeros_like(tokens, dtype=torch.bool)
    revealed[:, new] = True
    return Snapshot(index, steps, 1.0, tokens, revealed, revealed.double(), revealed | True)


def terminal(width=60, height=20):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height)


def written(console):
    """What was sent to the terminal, without styles and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def play(stream):
    with stream:
        stream(step(0, [0, 5, 5, 5], [0]))
        stream(step(1, [0, 5, 2, 5], [2]))
        stream(step(2, [0, 1, 2, 3], [1, 3]))


def test_every_step_is_shown_and_then_gone():
    console = terminal()
    play(TerminalStream(WORDS, MASK_ID, console=console))
    shown = written(console)
    mask = mask_text(WORDS)
    for text in ("step 1/3", f"a{mask}{mask}{mask}", f"a{mask} cat{mask}", "a small cat sat"):
        assert text in shown
    raw = console.file.getvalue()
    # The last thing it does is to erase its two lines, cursor visible again.
    assert raw.endswith("\x1b[1A\x1b[2K" * 2)
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")


def test_nothing_is_written_off_a_terminal(capfd):
    play(TerminalStream(WORDS, MASK_ID))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("dumb", [True, False])
def test_nothing_is_written_when_not_wanted(dumb, monkeypatch):
    monkeypatch.setenv("TERM", "dumb" if dumb else "xterm")
    console = terminal()
    play(TerminalStream(WORDS, MASK_ID, enabled=dumb, console=console))
    assert console.file.getvalue() == ""


def test_an_error_in_between_gives_the_terminal_back():
    console = terminal()

    def interrupted():
        with TerminalStream(WORDS, MASK_ID, console=console) as stream:
            stream(step(0, [0, 5, 5, 5], [0]))
            assert "\x1b[?25h" not in console.file.getvalue()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "\x1b[?25h" in console.file.getvalue()


def test_new_tokens_stand_out_and_the_rest_is_plain():
    stream = TerminalStream(WORDS, MASK_ID, console=terminal())
    text = stream.text([0, 1, 2, 3], [False, True, False, False])
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert text.plain == "a small cat sat"
    assert styles == {" small": NEW_STYLE}


def test_what_follows_the_end_is_dim_and_padding_is_absent():
    stream = TerminalStream(WORDS, MASK_ID, console=terminal())
    text = stream.text([PAD, EOT, 0, 2, EOT, 3, EOT, PAD], [False] * 8)
    assert text.plain == "<eos> a cat ■  sat"
    assert [text.plain[s.start : s.end] for s in text.spans if s.style == "dim"] == [" ■ ", " sat"]


def test_half_a_character_looks_like_a_mask():
    tokenizer = Tokenizer.load("bytes")
    ids = tokenizer.encode(["é!"])[0]
    stream = TerminalStream(tokenizer, 257, console=terminal())
    assert stream.text([ids[0], 257, ids[2]], [True] * 3).plain == f"{MASK}!"
    assert stream.text(ids, [True] * 3).plain == "é!"


def test_text_cannot_steer_the_terminal():
    tokenizer = Tokenizer.load("bytes")
    ids = tokenizer.encode(["\x1b[2J\x07 [bold]x[/bold]"])[0]
    console = terminal()
    with TerminalStream(tokenizer, 257, console=console) as stream:
        stream(step(0, ids, []))
    assert "\x1b[2J" not in console.file.getvalue()
    assert "␛[2J␇ [bold]x[/bold]" in written(console)


def test_a_text_taller_than_the_terminal_is_cut():
    console = terminal(width=16, height=8)
    with TerminalStream(WORDS, MASK_ID, console=console) as stream:
        stream(step(0, [1, 2] * 20, []))
    frame = written(console).partition("\r")[0].split("\n")
    assert len(frame) == 7  # one less than the terminal has
    assert frame[-1] == "… 9 more lines"


def test_masks_are_about_as_wide_as_tokens():
    assert mask_text(Tokenizer.load("bytes")) == MASK
    learned = train_tokenizer(["once upon a time there was a wonderful story " * 3] * 3, 300)
    assert len(mask_text(learned)) <= 4
    assert mask_text(WORDS) == f" {MASK * 2}"
