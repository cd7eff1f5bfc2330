"""Predicted protein structures, and PDB files with pLDDT (0 to 100) as B-factors."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from didi_instruct.errors import UserError
from didi_instruct.models.tensor_files import shown

RESIDUE_ORDER = "ARNDCQEGHILKMFPSTWYV"
"""One-letter codes in AlphaFold's order; the id after the last is an unknown residue, X."""

THREE_LETTERS = {
    "A": "ALA", "R": "ARG", "N": "ASN", "D": "ASP", "C": "CYS", "Q": "GLN", "E": "GLU",
    "G": "GLY", "H": "HIS", "I": "ILE", "L": "LEU", "K": "LYS", "M": "MET", "F": "PHE",
    "P": "PRO", "S": "SER", "T": "THR", "W": "TRP", "Y": "TYR", "V": "VAL",
}  # fmt: skip
_ONE_LETTER = {name: letter for letter, name in THREE_LETTERS.items()}

ATOMS = (
    "N", "CA", "C", "CB", "O", "CG", "CG1", "CG2", "OG", "OG1", "SG", "CD", "CD1", "CD2", "ND1",
    "ND2", "OD1", "OD2", "SD", "CE", "CE1", "CE2", "CE3", "NE", "NE1", "NE2", "OE1", "OE2", "CH2",
    "NH1", "NH2", "OH", "CZ", "CZ2", "CZ3", "NZ", "OXT",
)  # fmt: skip
"""AlphaFold's 37 heavy atoms, the last axis but one of a structure's coordinates."""

LONGEST = 9999
"""Residues that a PDB file can number."""
_FAR = 999.0
"""Angstroms from the origin that fit into a column of a PDB file."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Atoms of one chain.

    Shapes: positions (L, 37, 3) in angstroms, exists (L, 37), plddt (L, 37) from 0 to 100.
    """

    sequence: str
    positions: NDArray[np.float32]
    exists: NDArray[np.bool_]
    plddt: NDArray[np.float32]

    @property
    def mean_plddt(self) -> float:
        """Mean of pLDDT over all existing atoms, as fair-esm's `mean_plddt`."""
        return float(self.plddt[self.exists].mean(dtype=np.float64))

    @property
    def residue_plddt(self) -> NDArray[np.float64]:
        """Mean of pLDDT over the existing atoms of each residue (L,); NaN where there are none."""
        total = np.where(self.exists, self.plddt, 0.0).sum(1, dtype=np.float64)
        count = self.exists.sum(1)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)


@dataclass(frozen=True, slots=True)
class Trace:
    """The C-alpha atoms of a chain: positions (L, 3) in angstroms, plddt (L,) from 0 to 100."""

    sequence: str
    positions: NDArray[np.float64]
    plddt: NDArray[np.float64]


def pdb_text(structure: Structure) -> str:
    """Return a structure as a PDB file: chain A, residues from 1, pLDDT (0 to 100) as B-factor.

    Residues without atoms (X) are left out, and their numbers with them.
    """
    if len(structure.sequence) > LONGEST:
        raise ValueError(f"a PDB file cannot number more than {LONGEST} residues")
    if not np.abs(structure.positions[structure.exists]).max(initial=0.0) <= _FAR:
        raise ValueError("its coordinates do not fit into a PDB file")
    lines = [*_atoms(structure)]
    if lines:
        serial, residue = len(lines) + 1, lines[-1][17:26]
        lines.append(f"TER   {serial % 100_000:>5}      {residue}")
    return "\n".join([*lines, "END", ""])


def _atoms(structure: Structure) -> Iterator[str]:
    serial = 0
    for number, letter in enumerate(structure.sequence, start=1):
        residue = THREE_LETTERS.get(letter, "UNK")
        for atom in np.flatnonzero(structure.exists[number - 1]):
            serial += 1
            name = ATOMS[atom]
            x, y, z = structure.positions[number - 1, atom]
            yield (
                f"ATOM  {serial % 100_000:>5}  {name:<3} {residue} A{number:>4}    "
                f"{x:8.3f}{y:8.3f}{z:8.3f}{1.0:6.2f}{structure.plddt[number - 1, atom]:6.2f}"
                f"          {name[0]:>2}  "
            )


def read_pdb(text: str, name: str = "The PDB file") -> Trace:
    """Read the C-alpha atoms of a PDB file's text, with their B-factors; the first model alone."""
    letters, positions, factors = [], [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("ENDMDL"):
            break
        if not line.startswith("ATOM") or line[12:16].strip() != "CA" or line[16] not in " A":
            continue
        try:
            positions.append([float(line[start : start + 8]) for start in (30, 38, 46)])
            factors.append(float(line[60:66]))
        except ValueError as error:
            raise UserError(
                f"{name}, line {number} is no atom of a PDB file ({shown(line)}): write it again."
            ) from error
        letters.append(_ONE_LETTER.get(line[17:20], "X"))
    return Trace(
        "".join(letters), np.array(positions, float).reshape(-1, 3), np.array(factors, float)
    )


def read_pdb_file(path: Path) -> Trace:
    """Read the C-alpha atoms of a PDB file, with their B-factors."""
    try:
        return read_pdb(path.read_text(encoding="ascii", errors="replace"), str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
