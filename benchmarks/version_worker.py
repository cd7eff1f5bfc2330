"""Answers for one version of the package: reads tasks, writes numbers.

`compare_versions.py` starts one with the version's source first on `PYTHONPATH`. A line of the file
of tasks is `{"id", "do", "case"}`; a line of the answers is `{"id", "found"}`.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tests.golden import measuring

from didi_instruct.errors import UserError


def answer(task: dict[str, Any], home: Path, room: Path) -> measuring.Numbers:
    """Numbers of a task, or how it was refused, or how it failed."""
    case, do = task["case"], task["do"]
    try:
        if do == "begin":  # and break it after two iterations, for another version to end
            measuring.run(case, home, Path(task["out"]), stop_after=1)
            return {}
        if do == "end":
            shutil.copytree(task["out"], room / "run")
        return measuring.answer(case, home, room / "run", resume=do == "end")
    except (KeyboardInterrupt, SystemExit):
        raise
    except UserError as error:
        return {"refused": str(error)}
    except BaseException as error:  # whatever it is, the other version may do the same
        return {"failed": type(error).__name__, "why": str(error)[:300]}


def main() -> None:
    """Answer all tasks of a file, with models of the folder `home` and runs in `room`."""
    parser = argparse.ArgumentParser()
    for name in ("source", "home", "room", "tasks", "answers"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    measuring.check_version(options.source)
    torch.set_num_threads(1)
    options.room.mkdir(parents=True, exist_ok=True)
    with options.tasks.open() as tasks, options.answers.open("w") as answers:
        for line in tasks:
            task = json.loads(line)
            found = answer(task, options.home, options.room)
            answers.write(json.dumps({"id": task["id"], "found": found}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
