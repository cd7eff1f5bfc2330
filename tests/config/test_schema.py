from dataclasses import dataclass, field
from typing import Literal

import pytest

from didi_instruct.config.schema import apply_overrides, parse, read_yaml
from didi_instruct.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    group_size: int = 4
    lr: float = 1e-3
    kind: Literal["a", "b"] = "a"
    steps: tuple[int, ...] = (1,)
    name: str | None = None
    on: bool = False
    compile: Literal["auto", "on", "off"] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    must: str
    inner: Inner = field(default_factory=Inner)


def test_nested_values_keep_defaults_elsewhere():
    outer = parse(Outer, {"must": "x", "inner": {"group_size": 8, "steps": [4, 8]}}, where="r.yaml")
    assert outer == Outer(must="x", inner=Inner(group_size=8, steps=(4, 8)))


def test_yaml_exponents_without_a_dot_are_numbers(tmp_path):
    """YAML 1.1 reads 1e-4 as text."""
    path = tmp_path / "r.yaml"
    path.write_text("must: x\ninner:\n  lr: 1e-4\n")
    assert parse(Outer, read_yaml(path), where="r").inner.lr == 1e-4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {}}, "r.yaml: `must` is missing."),
        (
            {"must": "x", "inner": {"group_sise": 2}},
            "r.yaml: `inner.group_sise` is not a setting. Did you mean `group_size`?",
        ),
        (
            {"must": "x", "inner": {"group_size": 2.5}},
            "r.yaml: `inner.group_size` is 2.5, but a whole number is needed.",
        ),
        (
            {"must": "x", "inner": {"group_size": True}},
            "r.yaml: `inner.group_size` is True, but a whole number is needed.",
        ),
        ({"must": "x", "inner": {"kind": "c"}}, "r.yaml: `inner.kind` is 'c'; choose one of a, b."),
        ({"must": "x", "inner": 3}, "r.yaml: `inner` is 3, but a section is needed."),
        ({"must": "x", "inner": {"steps": 3}}, "r.yaml: `inner.steps` is 3, but a list is needed."),
        ({"must": "x", "inner": {"lr": "fast"}}, "`inner.lr` is 'fast', but a number is needed."),
    ],
)
def test_a_mistake_is_named_with_its_remedy(values, message):
    with pytest.raises(UserError) as error:
        parse(Outer, values, where="r.yaml")
    assert str(error.value).endswith(message)


def test_exponents_may_be_whole_numbers():
    values = apply_overrides({"must": "x"}, ["inner.group_size=1e3"])
    assert parse(Outer, values, where="r").inner.group_size == 1000


def test_on_and_off_are_words():
    """YAML 1.1 reads them as booleans."""
    values = apply_overrides({"must": "x"}, ["inner.compile=off"])
    assert parse(Outer, values, where="r").inner.compile == "off"


def test_overrides_go_into_their_section_and_leave_the_original_alone():
    values = {"must": "x", "inner": {"group_size": 2}}
    changed = apply_overrides(values, ["inner.group_size=8", "inner.on=true", "inner.steps=[4, 8]"])
    assert changed["inner"] == {"group_size": 8, "on": True, "steps": [4, 8]}
    assert values == {"must": "x", "inner": {"group_size": 2}}


@pytest.mark.parametrize("override", ["inner.group_size", "=3", "must.a=3"])
def test_a_malformed_override_is_refused(override):
    with pytest.raises(UserError, match="--set"):
        apply_overrides({"must": "x"}, [override])
