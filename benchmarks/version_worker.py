"""Answers for one version of the package: reads tasks, writes numbers.

`compare_versions.py` starts one with the version's source first on `PYTHONPATH`. A line of the file
of tasks is `{"id", "do", "case"}`; a line of the answers is `{"id", "found"}`.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from tests.golden import measuring

import didi_instruct as didi


class Worker:
    """Keeps the models of the folder `home` open; runs are made in the folder `room`."""

    def __init__(self, home: Path, room: Path) -> None:
        self.home, self.room = home, room
        self._models: dict[str, didi.Model] = {}

    def answer(self, task: dict[str, Any]) -> measuring.Numbers:
        """Numbers of a task, or how it was refused, or how it failed."""
        do = {"draw": self.draw, "run": self.run, "begin": self.begin, "end": self.end}
        try:
            return measuring.refusable(lambda: do[task["do"]](task))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # whatever it is, the other version may do the same
            return {"failed": type(error).__name__, "why": str(error)[:300]}

    def draw(self, task: dict[str, Any]) -> measuring.Numbers:
        """Numbers of a drawing."""
        name = task["case"]["model"]
        if name not in self._models:
            self._models[name] = didi.load(self.home / name, device="cpu")
        return measuring.drawn(self._models[name], task["case"])

    def run(self, task: dict[str, Any]) -> measuring.Numbers:
        """Numbers of a whole run."""
        return measuring.run_once(task["case"], self.home, self.room / "run")

    def begin(self, task: dict[str, Any]) -> measuring.Numbers:
        """Begin a run and break it after two iterations; leave its folder for another version."""
        measuring.run(task["case"], self.home, Path(task["out"]), stop_after=1)
        return {}

    def end(self, task: dict[str, Any]) -> measuring.Numbers:
        """Resume a copy of a run that was broken, and return its numbers."""
        out = self.room / "resumed"
        shutil.copytree(task["out"], out)
        try:
            measuring.run(task["case"], self.home, out, resume=True)
            return measuring.run_numbers(task["case"], self.home, out)
        finally:
            shutil.rmtree(out)


def main() -> None:
    """Answer all tasks of a file."""
    parser = argparse.ArgumentParser()
    for name in ("source", "home", "room", "tasks", "answers"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    found = Path(didi.__file__).resolve()
    if not found.is_relative_to(options.source.resolve()):
        sys.exit(f"{found} is not of {options.source}: another version was imported")
    torch.set_num_threads(1)
    options.room.mkdir(parents=True, exist_ok=True)
    worker = Worker(options.home, options.room)
    with options.tasks.open() as tasks, options.answers.open("w") as answers:
        for line in tasks:
            task = json.loads(line)
            answer = {"id": task["id"], "found": worker.answer(task)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
