import pytest

from didi_instruct.errors import first_line


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
