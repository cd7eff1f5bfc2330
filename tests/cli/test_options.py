"""Options made from a dataclass are those that its fields say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from didi_instruct.cli.options import with_settings
from didi_instruct.config.schema import Help


@dataclass(frozen=True, kw_only=True)
class Settings:
    source: Annotated[str | None, Help("The model.", positional=True)] = None
    changes: Annotated[Mapping[str, Any], Help("Changes.", flag="--set", metavar="K=V")] = field(
        default_factory=dict
    )
    names: Annotated[tuple[str, ...], Help("Names.")] = ("a",)
    batch_size: Annotated[int, Help("Texts at once.")] = 4
    steps: Annotated[int | None, Help("Steps.")] = None
    guided: Annotated[bool, Help("Guided.")] = False
    fast: Annotated[bool | None, Help("Fast.")] = None


@pytest.fixture
def run():
    """Run a command with such settings: the result, and what it was called with."""
    app, called = typer.Typer(), []

    @app.command()
    @with_settings(Settings)
    def command(settings: Settings, file: Annotated[str, typer.Option(help="A file.")] = "x"):
        """Do it."""
        called.append((settings, file))

    def call(*words):
        return CliRunner().invoke(app, words), called

    return call


@pytest.mark.parametrize(
    ("words", "settings", "file"),
    [
        ([], Settings(), "x"),
        (["m", "--batch-size", "2", "--file", "y"], Settings(source="m", batch_size=2), "y"),
        (["--names", "b, c", "--steps", "3"], Settings(names=("b", "c"), steps=3), "x"),
        (["--set", "a.b=1", "--set", "c=[2]"], Settings(changes={"a": {"b": 1}, "c": [2]}), "x"),
        (["--guided", "--no-fast"], Settings(guided=True, fast=False), "x"),
        (["--fast", "--names", ""], Settings(fast=True, names=()), "x"),
    ],
)
def test_a_command_gets_the_settings_of_its_options(run, words, settings, file):
    result, called = run(*words)
    assert result.exit_code == 0, result.output
    assert called == [(settings, file)]


@pytest.mark.parametrize("words", [["--no-guided"], ["--batch-size", "x"], ["--changes", "a=1"]])
def test_what_is_no_option_is_refused(run, words):
    result, called = run(*words)
    assert result.exit_code == 2
    assert not called


def test_the_help_is_that_of_the_fields(run):
    result, _ = run("--help")
    for words in ("Do it.", "The model.", "--batch-size", "Texts at once.", "K=V", "--no-fast"):
        assert words in result.output
    assert "--no-guided" not in result.output
