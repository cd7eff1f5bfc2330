"""Write the goldens from the package that is imported: `python -m tests.golden.record`.

Run it in the root of the repository, with the package whose numbers are to be kept first on
`PYTHONPATH`. Drawings in which rows meet by chance are refused: see `cases`.
"""

import hashlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import didi_instruct as didi
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.finetune import FinetuneConfig
from didi_instruct.config.recipes import load_recipe, recipe_names
from didi_instruct.config.train import PretrainConfig
from didi_instruct.reproduce.jobs import without_additions

from . import cases, measuring, tiny

FILE = Path(__file__).with_name("goldens.json")


def machine() -> dict[str, str]:
    """What decides how numbers are rounded."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def recipe_hashes() -> dict[str, str]:
    """A hash of all settings of each shipped recipe, also of those that it leaves open.

    Settings that came later have a part in it where they change something.
    """
    found = {}
    for name in recipe_names():
        if name.startswith("finetune-"):
            settings = asdict(load_recipe(FinetuneConfig, name))
        elif name.endswith(("-teacher", "-ar")):
            settings = asdict(load_recipe(PretrainConfig, name))
        else:  # some leave it to their user to name the data
            settings = asdict(load_recipe(DistillConfig, name, ["data.source=oracle"]))
        content = json.dumps(without_additions(settings), sort_keys=True)
        found[name] = hashlib.sha256(content.encode()).hexdigest()[:16]
    return found


def record(home: Path) -> dict[str, Any]:
    """Numbers of all cases."""
    listed = cases.every()
    found: dict[str, Any] = {"machine": machine(), "recipes": recipe_hashes()}
    for kind in listed:
        found[kind] = {n: measuring.answer(c, home, home / "run") for n, c in listed[kind].items()}
    for name, case in listed["drawings"].items():
        if "refused" not in found["drawings"][name]:
            _refuse_meeting(measuring.opened(home / case["model"]), case)
    return found


def _refuse_meeting(model: didi.Model, case: Any) -> None:
    """Refuse a drawing in which rows become equal by chance and are then read as one."""
    if model.config.kind != "mdlm" or case["draw"].get("sampler") == "first-hitting":
        return  # nothing is shared, since texts have times of their own
    watcher = measuring.Watcher()
    measuring.drawn(model, case, watcher)
    if watcher.rows_met():
        raise SystemExit(f"{case}: rows meet; choose another seed or longer rows")


def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        found = record(tiny.write_all(Path(temporary)))
    lines = [
        f"{json.dumps(kind)}: {{\n"
        + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in content.items())
        + "\n}"
        for kind, content in found.items()
    ]
    FILE.write_text("{" + ",\n".join(lines) + "}\n")
    sys.stdout.write(f"{FILE.name}: { ({k: len(v) for k, v in found.items()}) }\n")


if __name__ == "__main__":
    main()
