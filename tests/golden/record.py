"""Write the goldens from the package that is imported: `python -m tests.golden.record`.

Run it in the root of the repository, with the package whose numbers are to be kept first on
`PYTHONPATH`. Drawings in which rows meet by chance are refused: see `cases`.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import didi_instruct as didi

from . import cases, measuring, recipes, tiny

FILE = Path(__file__).with_name("goldens.json")


def machine() -> dict[str, str]:
    """What decides how numbers are rounded."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def record(home: Path) -> dict[str, Any]:
    """Numbers of all cases."""
    models: dict[str, didi.Model] = {}

    def ask(how: Any, case: Any) -> measuring.Numbers:
        name = case["model"]
        if name not in models:
            models[name] = didi.load(home / name, device="cpu")
        return measuring.refusable(lambda: how(models[name], case))

    drawings = cases.drawings()
    found: dict[str, Any] = {
        "machine": machine(),
        "drawings": {name: ask(measuring.drawn, case) for name, case in drawings.items()},
        "writings": {n: ask(measuring.written, c) for n, c in cases.writings().items()},
        "judgements": {n: ask(measuring.judged, c) for n, c in cases.judgements().items()},
        "recipes": recipes.hashes(),
    }
    for name, case in drawings.items():
        if "refused" not in found["drawings"][name]:
            ask(lambda model, case=case: _refuse_meeting(model, case), case)
    runs = {"distillations": cases.distillations(), "pretrainings": cases.pretrainings()}
    for kind, listed in runs.items():
        found[kind] = {
            name: measuring.run_once(case, home, home / "run") for name, case in listed.items()
        }
    return found


def _refuse_meeting(model: didi.Model, case: Any) -> measuring.Numbers:
    """Refuse a drawing in which rows become equal by chance and are then read as one."""
    if model.config.kind != "mdlm" or case["draw"].get("sampler") == "first-hitting":
        return {}  # nothing is shared, since texts have times of their own
    watcher = measuring.Watcher()
    measuring.drawn(model, case, watcher)
    if watcher.rows_met():
        raise SystemExit(f"{case}: rows meet; choose another seed or longer rows")
    return {}


def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        home = tiny.write_models(Path(temporary))
        tiny.write_models(home, tiny.MASKED_LMS)
        tiny.write_texts(home)
        found = record(home)
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
