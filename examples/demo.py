"""Stories from the shipped student beside its teacher, a short distillation, and a report.

`make demo` runs this. Everything goes through the public API, so it is also an example of it.
"""

import argparse
import time
from pathlib import Path

import demo_oracle
import demo_stories
from rich.console import Console


def main() -> None:
    """Write, distil, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--stories", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of the student")
    parser.add_argument("--most-steps", type=int, default=128, help="of the teacher at its best")
    parser.add_argument("--train-steps", type=int, default=600)
    parser.add_argument("--distill-steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=256, help="of the oracle language")
    asked = parser.parse_args()
    started, out, console = time.monotonic(), asked.out, Console()

    rows = demo_stories.tell(console, asked.stories, asked.steps, asked.most_steps)
    lines = ["# Demo", "", *demo_stories.as_markdown(rows, asked.stories)]

    console.rule("A distillation on the oracle language", align="left")
    teacher = demo_oracle.train(out, asked.train_steps)
    student = demo_oracle.distil(out, teacher, asked.distill_steps)
    report = demo_oracle.compare(out, teacher, student, asked.samples)
    console.print(report.to_terminal(console.width))
    page, _ = report.write(out / "oracle")
    lines += ["## The oracle language", "", f"[All of it]({page.relative_to(out)})", ""]
    (out / "report.md").write_text("\n".join(lines), encoding="utf-8")
    console.print(f"Report: {out / 'report.md'} and {page}  ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
