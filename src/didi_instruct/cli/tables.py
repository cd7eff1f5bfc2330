"""Tables of `didi reproduce` on a terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as Rich

    from didi_instruct.reproduce.tables import Table


def render(table: "Table") -> "Rich":
    """A table as the terminal shows it: that of its Markdown, without intervals and notes."""
    from rich.table import Table as Rich
    from rich.text import Text

    from didi_instruct.reproduce.tables import lay_out

    titles, body = lay_out(table, brief=True)
    what = " / ".join(one.title for one in table.shown) if table.across else ""
    shown = Rich(title=table.title, caption=what, title_justify="left", caption_justify="left")
    for number, title in enumerate(titles):
        shown.add_column(Text(title), justify="left" if number < len(table.labels) else "right")
    for line in body:
        shown.add_row(*map(Text, line))
    return shown
