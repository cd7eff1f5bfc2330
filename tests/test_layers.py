"""Imports go one way, and the command line starts without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "didi_instruct"
ORDER = ["config", "data", "process", "models", "adapters", "sampling", "training", "distillation"]
ORDER += ["proteins", "hub", "model", "evaluation", "benchmarking", "tasks"]
ORDER += ["pretrain", "distill", "finetune", "serving", "reproduce", "cli"]
FOUNDATION = {"errors", "seeding", "transfer", "__version__"}
ENTRANCES = {"__init__", "__main__"}  # lead to all the rest


def imported_parts(path: Path) -> set[str]:
    """First names below didi_instruct that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("didi_instruct.")}
    return found


def files_of(part: str) -> list[Path]:
    """Files of a part: a package, or a module of its own."""
    return [*(PACKAGE / part).rglob("*.py"), *PACKAGE.glob(f"{part}.py")]


@pytest.mark.parametrize("part", ORDER)
def test_a_part_imports_only_what_is_to_its_left(part):
    allowed = set(ORDER[: ORDER.index(part) + 1]) | FOUNDATION
    if part == "process":
        allowed.discard("data")
    assert files_of(part)
    for path in files_of(part):
        assert imported_parts(path) <= allowed, path


def test_what_is_below_all_imports_nothing_else():
    for name in FOUNDATION - {"__version__"}:
        assert imported_parts(PACKAGE / f"{name}.py") <= FOUNDATION, name


def test_every_module_and_package_has_its_place():
    found = {path.stem for path in PACKAGE.glob("*.py")}
    found |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert found == {*ORDER, *FOUNDATION, *ENTRANCES} - {"__version__"}


def test_help_does_not_import_torch():
    code = "import sys; sys.argv = ['didi', '--help']\nimport didi_instruct.cli.main as m\n"
    code += "try: m.main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
