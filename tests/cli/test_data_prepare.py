"""`didi data prepare` from the command line."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from didi_instruct.cli.data import app
from didi_instruct.cli.progress import PrepareBar
from didi_instruct.data.dataset import open_data
from didi_instruct.data.prepare import PrepareProgress
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.hub.sources import shipped

runner = CliRunner()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("".join(f"one line of text, {i}\n" for i in range(300)))
    return tmp_path / "a.txt"


def arguments(corpus: Path, *more: str) -> list[str]:
    out = str(corpus.parent / "out")
    required = ["--tokenizer", "bytes", "--length", "16", "--out", out]
    return ["prepare", str(corpus), *required, "--documents", "line", *more]


def test_it_writes_data_and_says_so(corpus: Path) -> None:
    result = runner.invoke(app, arguments(corpus, "--valid", "10", "--shard-rows", "20"))
    assert result.exit_code == 0, result.output
    data = open_data(corpus.parent / "out")
    assert f"Wrote: {corpus.parent / 'out'}, vocabulary of 257 ids" in result.stdout
    assert f"train: {data.num_sequences} rows of 16 tokens from 290 documents" in result.stdout
    assert "valid: " in result.stdout
    # Not a terminal: plain lines, beside the result.
    assert "Tokenising: 100%" in result.stderr


@pytest.mark.skipif("stories/teacher" not in shipped(), reason="this installation ships no model")
def test_text_is_read_as_a_shipped_model_reads_it(corpus: Path) -> None:
    """To distil or to judge that model with it: other tokens would be refused."""
    result = runner.invoke(app, arguments(corpus, "--tokenizer", "stories/teacher"))
    assert result.exit_code == 0, result.output
    own = Tokenizer.load(shipped()["stories/teacher"])
    assert open_data(corpus.parent / "out").tokenizer.hash == own.hash


def test_a_second_time_it_has_nothing_to_do(corpus: Path) -> None:
    runner.invoke(app, arguments(corpus))
    result = runner.invoke(app, arguments(corpus))
    assert result.exit_code == 0
    assert "Already prepared" in result.stdout


def test_it_says_how_many_documents_do_not_fit(corpus: Path) -> None:
    """Lines 0 to 9 have 19 characters, the next 90 one more, the others two."""
    options = ["--rows", "document", "--length", "21", "--valid", "290"]
    result = runner.invoke(app, arguments(corpus, *options))
    assert result.exit_code == 0, result.output
    assert "train: 10 rows of 21 tokens from 10 documents, 1 shard\n" in result.stdout
    held_out = "valid: 90 rows of 21 tokens from 290 documents, 1 shard"
    assert f"{held_out}; 200 too long for a row, left out\n" in result.stdout
    again = runner.invoke(app, arguments(corpus, *options))
    assert "; 200 too long for a row, left out\n" in again.stdout
    result = runner.invoke(app, arguments(corpus, *options, "--long", "cut", "--overwrite"))
    assert "290 rows of 21 tokens from 290 documents" in result.stdout
    assert "; 200 too long for a row, cut\n" in result.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--documents", "page"], "--documents is `page`"),
        (["--rows", "page"], "--rows is `page`: use stream or document"),
        (["--long", "cut"], "--long cut needs --rows document"),
        (["--rows", "document", "--long", "keep"], "--long is `keep`: use drop or cut"),
        (["--rows", "document"], "no document of the training part (297 documents) fits"),
        (["--length", "-3"], "--length is -3"),
        (["--tokenizer", "./no/such/tokenizer.json"], "no such tokenizer"),
        (["--valid", "1000"], "leaves nothing to train on"),
    ],
)
def test_a_mistake_is_one_line_that_names_flags(didi, corpus: Path, change, message) -> None:
    code, _, err = didi("data", *arguments(corpus, *change))
    assert code == 2
    last = err.splitlines()[-1]  # progress may stand before it
    assert last.startswith("didi: ")
    assert message in last
    assert not (corpus.parent / "out").exists()


def test_missing_and_unknown_options_are_wrong_usage(corpus: Path) -> None:
    assert runner.invoke(app, ["prepare", str(corpus)]).exit_code == 2
    assert runner.invoke(app, arguments(corpus, "--lenght", "3")).exit_code == 2


def test_overwrite_replaces_other_settings(corpus: Path) -> None:
    runner.invoke(app, arguments(corpus))
    result = runner.invoke(app, arguments(corpus, "--length", "20"))
    assert isinstance(result.exception, UserError)
    assert "length was 16, is 20" in str(result.exception)
    assert runner.invoke(app, arguments(corpus, "--length", "20", "--overwrite")).exit_code == 0
    assert open_data(corpus.parent / "out").length == 20


def test_a_terminal_gets_a_bar_with_rate_and_time_left(corpus: Path, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    result = runner.invoke(app, arguments(corpus, "--valid", "10"))
    assert result.exit_code == 0
    assert "Tokenising" in result.stderr
    assert "MB/s" in result.stderr
    assert "0:00:00" in result.stderr


def test_plain_lines_tell_rate_and_time_left(monkeypatch, capsys) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with PrepareBar() as bar:
        for seconds, done in ((0, 0), (5, 10), (20, 40), (21, 50), (100, 100)):
            now[0] = float(seconds)
            bar(PrepareProgress("tokenise", done * 10**6, 400 * 10**6))
        bar(PrepareProgress("learn tokenizer", 5, 0))
    assert capsys.readouterr().err.splitlines() == [
        "Tokenising: 0%",
        "Tokenising: 10%, 2.0 MB/s, 0:03:00 left",
        "Tokenising: 25%, 1.0 MB/s, 0:05:00 left",
        "Learning the tokenizer",
    ]


def test_nothing_is_drawn_where_nothing_happens(capsys) -> None:
    with PrepareBar():
        pass
    assert capsys.readouterr() == ("", "")


def test_help_does_not_import_what_it_does_not_need() -> None:
    code = (
        "import sys; import didi_instruct.cli.data\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
