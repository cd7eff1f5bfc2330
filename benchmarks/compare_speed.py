"""Two versions of the package against each other, in turns in one run.

    python benchmarks/compare_speed.py --old SRC --new SRC [--rounds 3] [--threads 2]
        [--cases PATTERN] [--json FILE]

SRC is the folder that holds `didi_instruct`. A process of each version stays alive; while one
works the other waits. In every round each case is timed once by both, the version that begins
changes from round to round, and a first round that warms up is not counted. `--cases 'draw'` takes
the cases whose names match.

A ratio is the new median over the old one; the spread is that of the ratios of single rounds.
`work` is the ratio of the least processor seconds of each version: where others use the machine, it
says more (with `--threads 1` most, since threads that wait for each other work too). A version
compared with itself shows what a machine's noise makes of 1.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("old", "new")

CASES: dict[str, dict[str, Any]] = {
    "stories, draw, 8 steps, 1 text": {"draw": {"num": 1, "steps": 8}, "times": 3},
    "stories, draw, 8 steps, 16 texts": {"draw": {"num": 16, "steps": 8}},
    "stories, draw, 128 steps, 1 text": {"draw": {"num": 1, "steps": 128}},
    "stories, draw, 128 steps, 16 texts": {"draw": {"num": 16, "steps": 128}},
    "stories, generate, 8 steps, 1 text": {"generate": {"num": 1, "steps": 8}, "times": 3},
    "stories, rgas, 8 steps, 1 text": {"draw": {"num": 1, "steps": 8, "sampler": "rgas"}},
    "stories, rgas, 8 steps, 4 texts": {"draw": {"num": 4, "steps": 8, "sampler": "rgas"}},
    "tiny, ancestral, 64 steps, 4 texts": {
        "model": "plain", "draw": {"num": 4, "steps": 64}, "times": 9},
    "tiny, rgas, 32 steps, 4 texts": {
        "model": "plain", "draw": {"num": 4, "steps": 32, "sampler": "rgas"}, "times": 7},
    "tiny, confidence, 32 steps, 4 texts": {
        "model": "plain", "draw": {"num": 4, "steps": 32, "sampler": "confidence"}, "times": 9},
    "tiny, codes, 32 steps, 4 texts": {
        "model": "codes", "draw": {"num": 4, "steps": 32}, "times": 7},
    "tiny, left to right, 16 texts": {"model": "ar", "draw": {"num": 16}, "times": 9},
    "small, iteration of didi": {"method": "didi"},
    "small, iteration of token-matching": {"method": "token-matching"},
    "small, iteration of sdtt": {"method": "sdtt"},
    "small, pretraining step": {"pretrain": "mdlm"},
    "small, pretraining step, left to right": {"pretrain": "ar"},
    "small, pretraining step, uniform-state": {"pretrain": "duo"},
}  # fmt: skip
"""What is timed: `times` drawings in a row, or iterations within one run.

`tiny` cases are all overhead of Python, where a step's arithmetic costs nothing.
"""


class Side:
    """A process of one version."""

    def __init__(self, source: Path, home: Path, room: Path, threads: int) -> None:
        paths = os.pathsep.join(map(str, (source, ROOT)))
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "benchmarks.speed_worker"]
        arguments = [str(source), str(home), str(room), str(threads)]
        self.process = subprocess.Popen(
            [*command, *arguments], env=environment, cwd=room.parent, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, case: dict[str, Any]) -> list[list[float]]:
        """Seconds that a case took, each time: of the clock and of the processor."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"A version broke down at {case}; see above.")
        seconds: list[list[float]] = json.loads(answer)
        return seconds

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@dataclass
class Times:
    """Seconds of a case, by version and round."""

    rounds: list[dict[str, list[list[float]]]] = field(default_factory=list)

    def median(self, side: str) -> float:
        """The middle one of the clock's seconds."""
        return statistics.median(wall for found in self.rounds for wall, _ in found[side])

    def work(self, side: str) -> float:
        """The least of the processor's seconds."""
        return min(work for found in self.rounds for _, work in found[side])

    @property
    def ratios(self) -> list[float]:
        """New over old in each round, rising."""
        middle = [
            {side: statistics.median(wall for wall, _ in found[side]) for side in SIDES}
            for found in self.rounds
        ]
        return sorted(found["new"] / found["old"] for found in middle)


def measure(sides: dict[str, Side], names: list[str], rounds: int) -> dict[str, Times]:
    """Time all cases in turns, after a round that warms up."""
    times = {name: Times() for name in names}
    for n in range(rounds + 1):
        for name in names:
            order = SIDES if n % 2 else SIDES[::-1]
            found = {side: sides[side].ask(CASES[name]) for side in order}
            if n:
                times[name].rounds.append(found)
        print(f"round {n} of {rounds}" + (" (warm-up)" if n == 0 else ""), file=sys.stderr)
    return times


def table(times: dict[str, Times]) -> list[str]:
    """Lines of the table."""
    lines = [f"{'case':40} {'old':>10} {'new':>10} {'ratio':>7} {'work':>7}   ratios of rounds"]
    for name, found in times.items():
        old, new = (1000 * found.median(side) for side in SIDES)
        work = found.work("new") / found.work("old")
        spread = f"{found.ratios[0]:.3f} to {found.ratios[-1]:.3f}"
        line = f"{name:40} {old:7.1f} ms {new:7.1f} ms {new / old:7.3f} {work:7.3f}   {spread}"
        lines.append(line)
    return lines


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", default="", help="a regular expression: the cases to time")
    parser.add_argument("--json", type=Path, help="also write all times to a file")
    options = parser.parse_args()
    names = [name for name in CASES if re.search(options.cases, name)]
    if not names:
        sys.exit(f"No case matches {options.cases}. There are: {'; '.join(CASES)}.")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        room = Path(temporary)
        sources = {"old": options.old.resolve(), "new": options.new.resolve()}
        sides: dict[str, Side] = {}
        try:
            for side, source in sources.items():
                sides[side] = Side(source, room / "home", room / side, options.threads)
                sides[side].ask({"prepare": True})
            times = measure(sides, names, options.rounds)
        finally:
            for each in sides.values():
                each.close()
    print("\n".join(table(times)))
    print(f"{time.monotonic() - started:.0f} s, {options.rounds} rounds, {options.threads} threads")
    if options.json is not None:
        content = {name: found.rounds for name, found in times.items()}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
