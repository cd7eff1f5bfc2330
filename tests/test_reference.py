"""docs/reference.md says what the package has."""

import importlib.util
from pathlib import Path

from didi_instruct.config.recipes import recipe_names
from didi_instruct.sampling.registry import SAMPLERS

DOCS = Path(__file__).parent.parent / "docs"


def page() -> str:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reference()


def test_the_reference_is_that_of_the_package():
    made = page()
    kept = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert made == kept, "run: python docs/make_reference.py"
    assert all(f"| `{name}` |" in made for name in (*SAMPLERS, *recipe_names()))
    assert "| `didi.rollout_steps` | integer: 1 or more | `1` | K, the student's steps" in made
