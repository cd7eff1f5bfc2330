"""Methods that tables compare, by role."""

from collections.abc import Mapping
from typing import NamedTuple

ALL_TRICKS = "ablation-all-tricks"
"""The paper's algorithm, with every trick of its ablations."""


class Method(NamedTuple):
    """A method of a table: its name there, and how its model is sampled."""

    label: str
    sampler: str | None = None


METHODS: Mapping[str, Method] = {
    "teacher": Method("MDLM, the teacher"),
    "ar": Method("AR, the same trunk"),
    "sdtt": Method("SDTT"),
    "duo": Method("DUO distilled"),
    "duo-teacher": Method("DUO base"),
    "dimo": Method("DiMO", "dimo"),
    "didi": Method("DiDi-Instruct", "rgas"),
    "didi-plain": Method("DiDi-Instruct, unguided"),
    "jump": Method("DiDi-Instruct, jump variant (ours)"),
    "path": Method("likelihood along streams (ours)"),
    "token-matching": Method("token matching (ours)"),
}
"""By role; each is asked only where a scale has it."""


def labels(*roles: str) -> dict[str, str]:
    """Names of methods by role."""
    return {role: METHODS[role].label for role in roles}
