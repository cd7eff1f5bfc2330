"""Evaluations whose rows and files are kept: `python -m tests.golden.evaluations` records them.

Run it in the root of the repository, with the package whose numbers are to be kept first on
`PYTHONPATH`.
"""

import json
import os
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from didi_instruct.cli.main import main as didi

from . import tiny

FILE = Path(__file__).with_name("evaluations.json")
MODELS = ("other", "other-windows", "ar", "ar-ends")
CASES = {
    "baseline": "eval other --against other --most-steps 8 --steps 2,4 --num 12 --judge oracle "
    "--metrics ppl,entropy,path-kl,self-bleu,unique-4gram --reference oracle",
    "frontier": "eval other --against other --frontier --steps 2 --num 12 --judge ar "
    "--metrics ppl,path-kl",
    "ends": "eval other-windows ar-ends --steps 2 --num 12 --judge ar-ends --metrics ppl,path-kl "
    "--reference lines.txt --documents line",
    "bound": "eval other-windows --steps 2 --num 12 --judge other-windows --metrics ppl,path-kl",
    "likelihood": "eval other --metrics nelbo --data oracle --sequences 32 --draws 2",
}
CLOCKS = ("tokens_per_second",)
"""Numbers that a clock measured."""


def machine() -> dict[str, str]:
    """What decides how numbers are rounded."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def answer(name: str, home: Path) -> dict[str, Any]:
    """JSON of a case, and the names of the files that it keeps; models are in the folder `home`."""
    before = Path.cwd()
    os.chdir(home)
    folder = [] if name == "likelihood" else ["--out", name]
    sys.argv = ["didi", *CASES[name].split(), "--json", f"{name}.json", *folder]
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            didi()
    except SystemExit as stop:
        if stop.code:
            raise
    finally:
        os.chdir(before)
    found: dict[str, Any] = json.loads((home / f"{name}.json").read_text())
    del found["versions"]
    for row in (*found["rows"], *found.get("baseline", ()), found["reference"]):
        for clock in CLOCKS:
            row.pop(clock, None)
    kept = [path for part in ("samples", "measured") for path in (home / name / part).rglob("*")]
    found["files"] = sorted(str(path.relative_to(home / name)) for path in kept if path.is_file())
    return found


def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        tiny.write_models(home, MODELS)
        tiny.write_texts(home / "lines.txt")
        found = {name: answer(name, home) for name in CASES}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    FILE.write_text(
        f'{{"machine": {json.dumps(machine())},\n"cases": {{\n' + ",\n".join(lines) + "\n}}\n"
    )


if __name__ == "__main__":
    main()
