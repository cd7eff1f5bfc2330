"""The table of methods: each model that the experiments compare, by role.

A role names a model of a scale. `DISTILLATIONS` has one entry for each method of distillation
(`method` of a recipe), which several roles may use.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ALL_TRICKS = "ablation-all-tricks"
"""Recipe of the paper's algorithm, with every trick of its ablations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A model of the tables: its label, how it is trained and how it is sampled."""

    label: str
    sampler: str | None = None
    """None: the default sampler of the model."""
    distilled: bool = True
    """Students have one model for each seed; a teacher or an AR model is trained once."""
    starts_from: tuple[str, ...] = ()
    """Roles of the model it is distilled from, the first that a scale has; empty: the teacher."""
    compared: bool = True
    """False for models of another size, and for those that only others start from."""


PATH_FIRST = "path-first"
"""The student that token matching starts from, where it is not `path` itself."""
_TEACHER, _STUDENT, _PATH = "MDLM, the teacher", "DiDi-Instruct", "likelihood along streams (ours)"
METHODS: Mapping[str, Method] = {
    "teacher": Method(label=_TEACHER, distilled=False),
    "ar": Method(label="AR, the same trunk", distilled=False),
    "sdtt": Method(label="SDTT"),
    "duo": Method(label="DUO distilled", starts_from=("duo-teacher",)),
    "duo-teacher": Method(label="DUO base", distilled=False),
    "dimo": Method(label="DiMO", sampler="dimo"),
    "didi": Method(label=_STUDENT, sampler="rgas"),
    "didi-plain": Method(label=f"{_STUDENT}, unguided"),
    "jump": Method(label=f"{_STUDENT}, jump variant (ours)"),
    "path": Method(label=_PATH),
    "token-matching": Method(label="token matching (ours)", starts_from=(PATH_FIRST, "path")),
    PATH_FIRST: Method(label=_PATH, compared=False),
    "teacher-large": Method(label=_TEACHER, distilled=False, compared=False),
    "didi-large": Method(
        label=_STUDENT, sampler="rgas", starts_from=("teacher-large",), compared=False
    ),
}
COMPARED = tuple(role for role, method in METHODS.items() if method.compared)
COMMON = ("teacher", "didi", "didi-plain")
"""Roles that every scale has; it names the models of all others."""
RIVALS = tuple(role for role in COMPARED if role not in COMMON)
STUDENTS = tuple(role for role in RIVALS if METHODS[role].distilled)
TRAINED_ONCE = tuple(role for role, method in METHODS.items() if not method.distilled)
"""Roles whose seeds differ in the samples alone."""


def labels(*roles: str) -> dict[str, str]:
    """Labels of methods by role."""
    return {role: METHODS[role].label for role in roles}


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    """Cost and schedule of a method of distillation."""

    passes: int
    """Over a batch in one iteration; a backward pass counts as two."""
    rounds: str = ""
    """Setting with the iterations of a round; empty if the method has no rounds."""
    warmup: str = ""
    """Setting with the iterations before the student learns; empty if it learns at once."""


_FORWARD, _LEARN = 1, 3
DISTILLATIONS: Mapping[str, Distillation] = {
    # Two steps of the student drawn, then scored with gradient; the teacher at both for the KL; the
    # discriminator learns from two texts and rewards one.
    "didi": Distillation(
        passes=2 * _FORWARD + 2 * _LEARN + 2 * _FORWARD + 2 * _LEARN + _FORWARD,
        warmup="discriminator.warmup",
    ),
    # The student's text, the auxiliary denoiser's updates, the teacher, the student's update.
    "dimo": Distillation(
        passes=_FORWARD + 2 * _LEARN + 2 * _FORWARD + _LEARN, warmup="dimo.warmup"
    ),
    # A path of a few steps, the auxiliary denoiser's updates, teacher and student at the contexts.
    "token-matching": Distillation(
        passes=4 * _FORWARD + 2 * _LEARN + 2 * _FORWARD + _LEARN, warmup="token_matching.warmup"
    ),
    "mixture": Distillation(passes=_FORWARD + 2 * _LEARN),
    # Two steps of the teacher, one update of the student.
    "sdtt": Distillation(passes=2 * _FORWARD + _LEARN, rounds="sdtt.iterations"),
    # The target one small step earlier, one update of the student.
    "duo": Distillation(passes=_FORWARD + _LEARN, rounds="duo.iterations"),
}
"""By the method's name in recipes."""
