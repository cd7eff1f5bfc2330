import pytest

from didi_instruct.errors import Argument, Setting, UserError, first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such file"), "no such file"),
        (OSError("\n  Not found. Try again:\r\n- elsewhere\n"), "Not found. Try again"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("...\nmore"), "RuntimeError"),
    ],
)
def test_an_error_is_told_by_its_first_line_or_its_name(error, line):
    """Without what would end our own sentence."""
    assert first_line(error) == line


def test_arguments_that_an_error_names_can_be_reworded():
    """Within errors that quote others, too; what a user wrote is no format."""
    inner = UserError("{} needs {}", Argument("long", "cut"), Setting("data.rows"))
    error = UserError("{}: {}.", "a{b}.yaml", inner)
    assert str(error) == "a{b}.yaml: `long=cut` needs `data.rows`."
    assert (
        str(error.reworded(lambda named: f"<{named.name}>"))
        == "a{b}.yaml: <long> needs <data.rows>."
    )
    assert str(UserError("100% of {this}")) == "100% of {this}"
