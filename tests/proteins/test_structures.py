"""PDB files say what the structure says, in the columns of the format, with pLDDT from 0 to 100."""

import numpy as np
import pytest
from transformers import EsmForProteinFolding

from didi_instruct.errors import UserError
from didi_instruct.proteins.folding_model import predict
from didi_instruct.proteins.structures import (
    ATOMS,
    Structure,
    pdb_text,
    read_pdb,
    read_pdb_file,
)

CA = ATOMS.index("CA")


def atoms(text):
    return [line for line in text.splitlines() if line.startswith("ATOM")]


def one_atom(sequence="A", position=(1.0, 2.0, 3.0)):
    shape = (len(sequence), 37)
    exists = np.zeros(shape, bool)
    exists[:, CA] = True
    positions = np.zeros((*shape, 3), np.float32)
    positions[:, CA] = position
    return Structure(sequence, positions, exists, np.full(shape, 50.0, np.float32))


def test_atoms_are_those_that_transformers_writes(folding, chains):
    """The same columns but for the B-factor, which transformers leaves from 0 to 1."""
    network = folding[1]
    ours = atoms(pdb_text(predict(network, chains[:1])[0]))
    theirs = atoms(EsmForProteinFolding.output_to_pdb(network.infer(chains[0]))[0])
    assert len(ours) == len(theirs) > 200
    assert [line[:60] for line in ours] == [line[:60] for line in theirs]
    assert [line[66:] for line in ours] == [line[66:] for line in theirs]
    factors = [[float(line[60:66]) for line in lines] for lines in (ours, theirs)]
    np.testing.assert_allclose(factors[0], 100 * np.array(factors[1]), atol=0.51)
    assert max(factors[0]) > 50


def test_a_trace_comes_back(folding, chains):
    (structure,) = predict(folding[1], chains[:1])
    trace = read_pdb(pdb_text(structure))
    assert trace.sequence == chains[0]
    np.testing.assert_allclose(trace.positions, structure.positions[:, CA], atol=0.00051)
    np.testing.assert_allclose(trace.plddt, structure.plddt[:, CA], atol=0.0051)


def test_means_are_over_existing_atoms():
    """By hand: a residue with two atoms and one with a single atom."""
    structure = one_atom("AA")
    structure.exists[0, 0] = True
    structure.plddt[0, [0, CA]] = 10, 40
    structure.plddt[1, CA] = 100
    structure.plddt[1, 0] = 7  # of an atom that is not there
    assert structure.mean_plddt == 50
    assert structure.residue_plddt.tolist() == [25, 100]


def test_an_unknown_residue_leaves_its_number_out():
    structure = one_atom("AXC")
    structure.exists[1] = False
    text = pdb_text(structure)
    assert [line[17:26] for line in atoms(text)] == ["ALA A   1", "CYS A   3"]
    assert text.splitlines()[-2:] == ["TER       3      CYS A   3", "END"]
    assert np.isnan(structure.residue_plddt).tolist() == [False, True, False]


def test_what_does_not_fit_the_columns_is_refused():
    assert read_pdb(pdb_text(one_atom(position=(-998.5, 0, 998.5)))).positions[0, 0] == -998.5
    for far in (5000.0, float("nan")):
        with pytest.raises(ValueError, match="do not fit"):
            pdb_text(one_atom(position=(0, far, 0)))
    with pytest.raises(ValueError, match="more than 9999"):
        pdb_text(one_atom("A" * 10_000))
    assert len(read_pdb(pdb_text(one_atom("A" * 9999))).plddt) == 9999


def test_files_of_other_programs_are_read():
    """Two models, other places of an atom, other chains, heteroatoms."""
    line = "ATOM      2  CA  {}GLY A   1      11.000  12.000  13.000  1.00 88.50           C"
    calcium = "HETATM    3 CA    CA A   2       0.000   0.000   0.000  1.00  0.00          CA"
    text = "\n".join(["HEADER", line.format("A"), line.format("B"), calcium, "ENDMDL", line])
    trace = read_pdb(
        text.replace("{}", " ").replace("CA  AGLY", "CA AGLY").replace("CA  BGLY", "CA BGLY")
    )
    assert trace.sequence == "G"
    assert trace.positions.tolist() == [[11, 12, 13]]
    assert trace.plddt.tolist() == [88.5]


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "a.pdb"
    path.write_text(pdb_text(one_atom()).replace("2.000", "x.000"))
    with pytest.raises(UserError, match="a.pdb, line 1 is no atom"):
        read_pdb_file(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_pdb_file(tmp_path / "none.pdb")
