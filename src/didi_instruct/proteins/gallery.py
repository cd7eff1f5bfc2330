"""Folds as files to look at: PDB files, a table, a picture and an HTML gallery."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.errors import UserError
from didi_instruct.proteins.folding import Folded, summarise
from didi_instruct.proteins.pictures import CONFIDENCE, Panel, confidence_colour, draw_structures

TEMPLATE = Path(__file__).with_name("gallery.html.j2")
MOST_SHOWN = 60
"""Chains of a gallery: each brings its PDB file, of 100 to 300 kB."""
MOST_DRAWN = 30
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_PLOT = (300.0, 64.0)  # width and height of a plot of pLDDT along a chain


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain with a name and what else is known of it, such as model or NFE."""

    name: str
    fold: Folded
    facts: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def caption(self) -> str:
        """Length and facts in one line, pLDDT in the next."""
        plddt = "no fold" if self.fold.plddt is None else f"pLDDT {self.fold.plddt:.1f}"
        return f"{' · '.join(self.told())}\n{plddt}"

    def told(self) -> list[str]:
        """Return length and facts as a reader sees them."""
        facts = [f"{name} {value}" for name, value in self.facts.items()]
        return [f"{len(self.fold.sequence)} residues", *facts]


def write_structures(chains: Sequence[Chain], folder: Path, *, title: str = "Structures") -> None:
    """Write pdb/NAME.pdb of each chain, plddt.csv, structures.png and gallery.html.

    Chains without a fold are in the table and in the gallery, with the reason.
    """
    if not chains:
        raise UserError(f"{folder}: there are no chains to write.")
    names = file_names(chains)
    with no_space_as_user_error(folder):
        (folder / "pdb").mkdir(parents=True, exist_ok=True)
        for chain, name in zip(chains, names, strict=True):
            if chain.fold.plddt is not None:
                write_atomic(folder / "pdb" / f"{name}.pdb", chain.fold.pdb().encode("ascii"))
        write_atomic(folder / "plddt.csv", _table(chains, names).encode())
        write_atomic(folder / "gallery.html", render_gallery(chains, title=title).encode())
        folded = [chain for chain in chains if chain.fold.plddt is not None]
        if folded:
            drawn = (folded[place] for place in _evenly(len(folded), MOST_DRAWN))
            panels = [Panel(chain.fold.trace(), chain.caption) for chain in drawn]
            draw_structures(panels, folder / "structures.png", title=title)


def file_names(chains: Sequence[Chain]) -> list[str]:
    """Names of files for chains: safe on any disk, and distinct whatever the case of letters."""
    names: list[str] = []
    taken: set[str] = set()
    for number, chain in enumerate(chains, start=1):
        name = _UNSAFE.sub("_", chain.name).strip("._")[:80] or f"chain_{number}"
        while name.lower() in taken:
            name = f"{name}_{number}"
        taken.add(name.lower())
        names.append(name)
    return names


def _table(chains: Sequence[Chain], names: Sequence[str]) -> str:
    """Return a table with one line for each chain."""
    facts = list(dict.fromkeys(name for chain in chains for name in chain.facts))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", *facts, "length", "plddt", "reason", "sequence"])
    for chain, name in zip(chains, names, strict=True):
        fold = chain.fold
        plddt = "" if fold.plddt is None else f"{fold.plddt:.4f}"
        known = [chain.facts.get(fact, "") for fact in facts]
        sequence = fold.sequence
        writer.writerow([name, *known, len(sequence), plddt, fold.reason or "", sequence])
    return text.getvalue()


def _evenly(total: int, most: int) -> list[int]:
    """Return at most `most` places of `total`, spread evenly over all."""
    count = min(most, total)
    return [n * total // count for n in range(count)]


# HTML


def render_gallery(
    chains: Sequence[Chain], *, title: str = "Structures", most: int = MOST_SHOWN
) -> str:
    """Render a page that needs no other file: structures to turn, sequences, pLDDT, PDB files."""
    from jinja2 import Environment, StrictUndefined

    places, names = _evenly(len(chains), most), file_names(chains)
    summary = summarise([chain.fold for chain in chains])
    facts = [f"{len(chains)} chains"]
    if summary.plddt is not None and summary.above_70 is not None:
        facts += [f"mean pLDDT {summary.plddt:.1f}", f"{summary.above_70:.0%} above 70"]
    if summary.failed:
        facts.append(f"{summary.failed} not folded")
    if len(places) < len(chains):
        facts.append(f"{len(places)} shown")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        facts=facts,
        legend=CONFIDENCE,
        cards=[_card(chains[place], names[place]) for place in places],
        data=[_structure(chains[place]) for place in places],
        plot=_PLOT,
    )


def _card(chain: Chain, name: str) -> dict[str, Any]:
    """Fields of a chain's card, which the page shows without its script."""
    fold = chain.fold
    card: dict[str, Any] = {
        "name": chain.name,
        "file": f"{name}.pdb",
        "facts": chain.told(),
        "reason": fold.reason,
    }
    if fold.plddt is None or fold.residue_plddt is None:
        plain = [{"text": fold.sequence, "colour": ""}]
        return card | {"plddt": None, "colour": "", "runs": plain, "line": ""}
    colour = confidence_colour(fold.plddt)
    runs = _runs(fold.sequence, fold.residue_plddt)
    return card | {
        "plddt": f"{fold.plddt:.1f}",
        "colour": colour,
        "runs": runs,
        "line": _polyline(fold.residue_plddt),
    }


def _runs(sequence: str, plddt: np.ndarray[Any, Any]) -> list[dict[str, str]]:
    """Cut a sequence where the colour of its confidence changes."""
    runs: list[dict[str, str]] = []
    for letter, value in zip(sequence, plddt, strict=True):
        colour = confidence_colour(value) if np.isfinite(value) else ""
        if runs and runs[-1]["colour"] == colour:
            runs[-1]["text"] += letter
        else:
            runs.append({"text": letter, "colour": colour})
    return runs


def _polyline(plddt: np.ndarray[Any, Any]) -> str:
    """Return points of a line plot, y from 100 down to 0; unknown residues are skipped."""
    width, height = _PLOT
    step = width / max(len(plddt) - 1, 1)
    points = [(n * step, height * (1 - y / 100)) for n, y in enumerate(plddt) if np.isfinite(y)]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _structure(chain: Chain) -> dict[str, Any] | None:
    """Return what the page's script needs of a chain; None if it was not folded."""
    if chain.fold.plddt is None:
        return None
    text = chain.fold.pdb()
    trace = chain.fold.trace()
    if not len(trace.positions):
        return {"xyz": [], "plddt": [], "pdb": text}
    centred = trace.positions - trace.positions.mean(0)
    return {
        "xyz": [round(float(x), 1) for x in centred.ravel()],
        "plddt": [round(float(x)) for x in trace.plddt],
        "pdb": text,
    }
