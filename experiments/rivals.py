"""Table and picture of "Rivals on stories" (docs/results.md) from its frozen numbers.

    python experiments/rivals.py [--out docs/rivals.png]

`rivals.csv` holds the 704 settings of `didi reproduce baselines --scale small` that were measured
in November 2026 on one H200: 512 texts each, seed 0, 0.6 minutes of training per student, judge
`stories15m` at temperature 0.8. Columns ending in `_ci` are half the width of a 95% interval;
columns of the best setting, speed and minutes are filled where temperature and top-p are 1;
`chain_minutes` count a student's bank and a teacher of its own too. The rows can be measured anew:

    didi reproduce baselines --scale small --minutes 0.6 --seeds 1 --data PREPARED \
        --judge STORIES15M --judge-temperature 0.8 --judge-collapse-spaces --judge-end "<s>" \
        --judge-beyond uniform --out rivals
"""

import argparse
import csv
from pathlib import Path
from typing import Any

from didi_instruct.reproduce.baseline_rows import BASELINE
from didi_instruct.reproduce.baselines_figure import draw_baselines

NUMBERS = Path(__file__).with_name("rivals.csv")
TITLE = (
    "small scale, seed 0, judge: stories15m (temperature 0.8, collapse_spaces True, end <s>, "
    "beyond uniform)"
)
TEXT = ("method", "role")
COLUMNS = (
    "nfe", "passes", "ppl", "entropy", "vsf", "vsf_best", "path_kl", "path_kl_best", "self_bleu",
    "mauve", "tokens_per_second",
)  # fmt: skip


def read() -> list[dict[str, Any]]:
    """Rows with numbers as numbers; None where there is none."""
    with NUMBERS.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    rows: list[dict[str, Any]] = []
    for line in lines:
        row: dict[str, Any] = {
            name: text if name in TEXT else float(text) if text else None
            for name, text in line.items()
        }
        row |= {"nfe": int(line["nfe"]), "own_steps": line["own_steps"] == "1"}
        rows.append(row | {"is_baseline": row["method"] == BASELINE})
    return rows


def main() -> None:
    """Print the plain settings as a table; draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="also draw the picture to this PNG file")
    out = parser.parse_args().out
    rows = read()
    print("| method | " + " | ".join(COLUMNS) + " |\n|---" + "|--:" * len(COLUMNS) + "|")
    for row in rows:
        if (row["temperature"], row["top_p"]) == (1, 1):
            cells = ["" if row[name] is None else f"{row[name]:,.6g}" for name in COLUMNS]
            print("| " + " | ".join([row["method"], *cells]) + " |")
    if out is not None:
        draw_baselines(rows, TITLE).savefig(out, dpi=144, facecolor="white")


if __name__ == "__main__":
    main()
