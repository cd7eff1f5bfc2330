"""Measures of proteins as rows of a table."""

import math

import numpy as np
import pytest
import torch

from didi_instruct.data.tokenizer import AMINO_ACIDS, Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation import protein_metrics
from didi_instruct.evaluation.measuring import Context, Measuring
from didi_instruct.evaluation.metrics import METRICS, known_columns, measure
from didi_instruct.evaluation.reference import chain_set, read_chain_set, shuffled_set
from didi_instruct.proteins.chains import read_chains
from didi_instruct.proteins.clusters import Clusters
from didi_instruct.proteins.novelty import Novelty


def samples(*sequences):
    return chain_set("chains", sequences, max(map(len, sequences)), None)


def row(name, *sequences, **context):
    return measure(name, Measuring(samples(*sequences), Context(**context))).row


def fasta(tmp_path, *sequences, name="real.fasta"):
    path = tmp_path / name
    path.write_text("".join(f">{n}\n{s}\n" for n, s in enumerate(sequences)))
    return str(path)


def test_every_metric_brings_its_columns_and_names_differ():
    fields = [column.field for column in known_columns()]
    assert len(set(fields)) == len(fields)
    for name in ("plddt", "clusters", "repeats", "composition", "novelty"):
        assert "residues" in METRICS[name].requires
        assert {column.field for column in METRICS[name].columns} <= {*fields}


def test_a_row_of_repeats_is_the_mean_over_chains():
    found = row("repeats", "AAAAAAAA", "ACDEFGHI")
    assert found["commonest_residue"] == pytest.approx((1 + 1 / 8) / 2)
    assert found["longest_run"] == pytest.approx(4.5)
    assert found["trimer_entropy"] == pytest.approx(math.log(6) / 2)
    assert found["low_complexity"] == 0.5
    assert found["longest_run_ci95"] == [1, 8]


def test_a_row_of_clusters_has_both_runs(monkeypatch):
    given = Clusters((0, 0, 0, 3), (0, 0, 2, 3), 2, "again")
    monkeypatch.setattr(protein_metrics, "cluster", lambda sequences: given)
    found = row("clusters", "MK", "MV", "ML", "MA")
    assert found["cluster_entropy"] == pytest.approx(math.log(4) - 0.75 * math.log(3))
    assert (found["clusters"], found["clusters_plain"], found["cluster_size"]) == (2, 3, 2)
    assert found["cluster_entropy_plain"] == pytest.approx(1.5 * math.log(2))
    assert (found["cluster_low_complexity"], found["cluster_entropy_note"]) == (2, "again")


def test_empty_chains_are_told_where_clusters_leave_them_out(monkeypatch):
    given = Clusters((0, 0), (0, 0), 0, "again")
    monkeypatch.setattr(protein_metrics, "cluster", lambda sequences: given)
    found = row("clusters", "MK", "", "MV")
    assert found["cluster_entropy_note"] == "again; 1 of 3 chains are empty"
    monkeypatch.setattr(protein_metrics, "cluster", lambda sequences: Clusters((0, 0), (0, 0), 0))
    assert "cluster_entropy_note" not in row("clusters", "MK", "MV")


def test_one_chain_has_no_clusters_and_a_note():
    found = row("clusters", "MKV")
    assert found["cluster_entropy"] is None
    assert "2 or more" in found["cluster_entropy_note"]


def test_composition_is_beside_its_floor(tmp_path):
    chains = read_chains(fasta(tmp_path, *["ACDEFGHIKLMNPQRSTVWY" * 3] * 9))
    found = row("composition", "ACDEFGHIKLMNPQRSTVWY" * 3, "W" * 60, chains=chains)
    shares = np.full(20, 0.025)
    shares[AMINO_ACIDS.index("W")] = 0.525
    law, middle = np.full(20, 0.05), (shares + 0.05) / 2
    expected = (shares * np.log(shares / middle) + law * np.log(law / middle)).sum() / 2
    assert found["residue_js"] == pytest.approx(expected)
    assert found["residue_js_floor"] == pytest.approx(0, abs=1e-12)
    assert found["dimer_js"] > found["dimer_js_floor"]
    assert found["trimer_js"] < math.log(2)


def test_novelty_counts_copies_and_chains_without_hit(tmp_path, monkeypatch):
    given = Novelty(*map(np.array, ([1.0, 0.5, 0.0], [True, True, False], [True, False, False])))
    monkeypatch.setattr(protein_metrics, "novelty", lambda *_: given)
    found = row("novelty", "MK", "MV", "ML", chains=read_chains(fasta(tmp_path, "MK")))
    assert found["novelty_identity"] == pytest.approx(0.5)
    assert found["novelty_no_hit"] == found["novelty_copies"] == pytest.approx(1 / 3)


class PretendFolding:
    """pLDDT by sequence; None for what does not fold."""

    name = fingerprint = "pretend"

    def __init__(self, **known):
        self.known = known

    def plddt(self, sequences, progress):
        progress(len(sequences), len(sequences))
        return [self.known.get(sequence) for sequence in sequences]


def test_plddt_is_of_the_chains_that_fold():
    found = row("plddt", "MK", "MV", "ML", folding=PretendFolding(MK=90.0, MV=60.0))
    assert (found["plddt"], found["plddt_above_70"], found["plddt_failed"]) == (75, 0.5, 1)
    assert "1 of 3" in found["plddt_note"]
    found = row("plddt", "MK", folding=PretendFolding())
    assert (found["plddt"], found["plddt_failed"]) == (None, 1)


def test_chains_that_did_not_fold_are_tried_again(tmp_path):
    """A fold may fail for want of memory: its row is not kept, one without failures is."""
    texts = samples("MK", "MV")

    def measured(**known):
        context = Context(folding=PretendFolding(**known))
        return measure("plddt", Measuring(texts, context, folder=tmp_path)).row

    assert measured()["plddt"] is None
    assert measured(MK=90.0)["plddt_failed"] == 1
    assert measured(MK=90.0, MV=60.0)["plddt"] == 75
    assert measured()["plddt"] == 75


def test_a_kept_value_is_of_one_reference(tmp_path):
    texts, values = samples("MKVLMKVL", "MKVVAAAA"), []
    for name, other in (("a", "MKVL" * 5), ("b", "WWWW" * 5)):
        chains = read_chains(fasta(tmp_path, other, name=f"{name}.fasta"))
        measuring = Measuring(texts, Context(chains=chains), folder=tmp_path)
        values.append(measure("composition", measuring).row["residue_js"])
    assert values[0] != values[1]


def test_words_are_no_residues():
    texts = samples("MKV")
    words = type(texts)(texts.origin, texts.tokens, ("once upon",), None, texts.lengths)
    with pytest.raises(UserError, match="chains: sample 1 has `onceupon`, which is no residue"):
        measure("repeats", Measuring(words, Context()))


def test_chains_become_tokens_of_the_model_and_shuffled_ones_too(tmp_path):
    tokenizer = Tokenizer.from_words(["<eos>", *AMINO_ACIDS])
    tokenizer._backend.pre_tokenizer = None
    plain = chain_set("a", ["ACA", "YY"], 4, None)
    assert plain.tokens.tolist() == [[0, 1, 0, 0], [19, 19, 0, 0]]
    assert plain.lengths.tolist() == [3, 2]
    path = fasta(tmp_path, "ACDEFGHIKLMNPQRSTVWY", "ACDEF", "MKVLA")
    found = read_chain_set(path, None, 5)
    assert found.texts == ("ACDEF", "MKVLA")
    other = shuffled_set(found)
    assert other.origin.model == "shuffled"
    assert other.texts != found.texts
    assert torch.equal(other.tokens.sort(1).values, found.tokens.sort(1).values)
    for text, ids in zip(other.texts, other.tokens.tolist(), strict=True):
        assert [AMINO_ACIDS.index(letter) for letter in text] == ids
    with pytest.raises(UserError, match="no chain of 7 residues"):
        read_chain_set(path, None, 7)
