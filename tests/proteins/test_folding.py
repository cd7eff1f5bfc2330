"""Folding many chains: equal to folding each, whatever memory allows and whatever is kept."""

import numpy as np
import pytest
import torch

from didi_instruct.errors import UserError
from didi_instruct.proteins import folding as folding_module
from didi_instruct.proteins.folding import FoldSettings, Predictor, fold, summarise
from didi_instruct.proteins.folding_model import predict, write_random_folding
from didi_instruct.proteins.structures import pdb_text


@pytest.fixture
def settings(folding, tmp_path):
    def make(**changes):
        return FoldSettings(**{"source": folding[0], "cache": tmp_path / "cache"} | changes)

    return make


def watch(predictor, refuse=lambda batch, length, chunk: False):
    """Note shape and chunk of each pass; run out of memory where `refuse` says so."""
    network, passes = predictor.network, []
    forward = network.forward

    def watched(residues, **options):
        shape = (*residues.shape, network.trunk.chunk_size)
        passes.append(shape)
        if refuse(*shape):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return forward(residues, **options)

    network.forward = watched
    return passes


def test_batches_change_nothing(settings, chains, folding, tmp_path):
    one = fold(chains, settings(tokens=1))
    many = fold(chains, settings(tokens=1000, cache=tmp_path / "other"))
    for alone, together, chain in zip(one, many, chains, strict=True):
        (plain,) = predict(folding[1], [chain])
        assert alone.sequence == together.sequence == chain
        assert alone.plddt == pytest.approx(plain.mean_plddt, abs=1e-4)
        assert together.plddt == pytest.approx(plain.mean_plddt, abs=1e-4)
        np.testing.assert_allclose(together.residue_plddt, plain.residue_plddt, atol=1e-3)
        assert alone.pdb() == pdb_text(plain)


def test_batches_keep_to_the_budget_longest_first(settings, chains):
    predictor = Predictor(settings(tokens=60))
    passes = watch(predictor)
    predictor.fold(chains)
    assert [(b, n) for b, n, _ in passes] == [(1, 40), (1, 33), (2, 26), (2, 17)]


def test_a_sequence_is_folded_once(settings, chains):
    predictor = Predictor(settings(tokens=1000))
    passes = watch(predictor)
    folds = predictor.fold([chains[0], chains[3], chains[0]])
    assert [b for b, _, _ in passes] == [2]
    assert [f.sequence for f in folds] == [chains[0], chains[3], chains[0]]
    assert folds[0] is folds[2]


def test_chunks_change_nothing(settings, chains, tmp_path):
    whole = fold(chains, settings())
    predictor = Predictor(settings(chunk_size=4, cache=tmp_path / "other"))
    passes = watch(predictor)
    for one, other in zip(whole, predictor.fold(chains), strict=True):
        assert one.plddt == pytest.approx(other.plddt, abs=1e-4)
    assert {chunk for _, _, chunk in passes} == {4}


def test_without_memory_batches_are_halved_and_stay_so(settings, chains):
    """Room for 70 residues: 6 x 40 and 3 x 40 do not fit, 1 x 40 does."""
    predictor = Predictor(settings(tokens=1000))
    passes = watch(predictor, lambda batch, length, chunk: batch * length > 70)
    folds = predictor.fold(chains)
    assert [f.reason for f in folds] == [None] * len(chains)
    tried = [(b, n) for b, n, _ in passes]
    assert tried == [(6, 40), (3, 40), (1, 40), (2, 33), (3, 17)]
    predictor.fold(["ACDEFGHIKL" * 3, "LKIHGFEDCA" * 3])
    assert [(b, n) for b, n, _ in passes[len(tried) :]] == [(1, 30), (1, 30)]


def test_without_memory_for_one_chain_chunks_shrink(settings, chains, folding):
    predictor = Predictor(settings())
    passes = watch(predictor, lambda batch, length, chunk: length > 20 and (chunk or 999) > 32)
    (found,) = predictor.fold([chains[0]])
    assert [chunk for _, _, chunk in passes] == [None, 128, 64, 32]
    assert found.plddt == pytest.approx(predict(folding[1], [chains[0]])[0].mean_plddt, abs=1e-4)
    assert predictor.network.trunk.chunk_size is None


def test_a_chain_too_large_costs_itself_alone(settings, chains):
    predictor = Predictor(settings(chunk_size=100))
    passes = watch(predictor, lambda batch, length, chunk: length > 35)
    folds = predictor.fold(chains)
    assert [f.plddt is None for f in folds] == [len(c) > 35 for c in chains]
    assert folds[0].reason == "out of memory: 40 residues are too many for cpu"
    assert [chunk for _, n, chunk in passes if n == 40][-3:] == [100, 50, 25]
    with pytest.raises(UserError, match="has no structure: out of memory"):
        folds[0].pdb()


def test_a_chain_that_fails_is_counted_and_named(settings, chains):
    """An error and a NaN of one chain cost those beside it in the batch nothing."""
    predictor = Predictor(settings(tokens=1000))
    forward = predictor.network.forward
    error, nan = chains[1], chains[4]

    def failing(residues, attention_mask, **options):
        out = forward(residues, attention_mask=attention_mask, **options)
        lengths = attention_mask.sum(1).tolist()
        if len(error) in lengths:
            raise RuntimeError("cusolver error: 7\nmore of it")
        out.plddt[[n == len(nan) for n in lengths]] = float("nan")
        return out

    predictor.network.forward = failing
    folds = predictor.fold([*chains[:2], *chains[3:]])
    reasons = {f.sequence: f.reason for f in folds if f.reason}
    assert reasons == {error: "cusolver error: 7", nan: "its confidence is not a number"}
    summary = summarise(folds)
    assert (summary.folded, summary.failed) == (3, 2)
    assert summary.plddt == pytest.approx(np.mean([f.plddt for f in folds if f.plddt]))


def test_what_is_no_chain_is_named(settings):
    folds = fold(["", "AC-D", "acd", "XXU", "A" * 10_000], settings())
    assert [f.plddt for f in folds] == [None] * 5
    reasons = [f.reason for f in folds]
    assert reasons[0] == "it is empty"
    assert reasons[1] == "`-` at 3 is no residue (A to Z)"
    assert reasons[2] == "`a` at 1 is no residue (A to Z)"
    assert reasons[3] == "none of its residues is known"
    assert "10000 residues" in reasons[4]


def test_unknown_residues_have_no_confidence(settings):
    (found,) = fold(["AXAW"], settings())
    assert np.isnan(found.residue_plddt).tolist() == [False, True, False, False]
    assert found.trace().sequence == "AAW"


def test_the_share_above_70_is_of_folded_chains(settings):
    folds = fold(["ACD", "-"], settings())
    changed = [folding_module.Folded("A", plddt) for plddt in (70.0, 70.5, 90.0)]
    assert summarise([*changed, folds[1]]).above_70 == pytest.approx(2 / 3)
    assert summarise([folds[1]]) == folding_module.FoldSummary(None, None, 0, 1)


# The cache


def test_kept_folds_need_no_network(settings, chains, monkeypatch):
    first = fold([*chains, "AXA"], settings())
    monkeypatch.setattr(folding_module, "load_folding", None)
    seen = []
    again = fold([*chains, "AXA"], settings(), lambda *done: seen.append(done))
    assert seen == [(7, 7)]
    for one, other in zip(first, again, strict=True):
        assert (one.plddt, one.reason, one.kept) == (other.plddt, None, other.kept)
        np.testing.assert_array_equal(one.residue_plddt, other.residue_plddt)
        assert one.pdb() == other.pdb()


def test_after_an_interrupt_only_what_is_missing_is_folded(settings, chains):
    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fold(chains, settings(tokens=1), stop)
    predictor = Predictor(settings(tokens=1))
    passes = watch(predictor)
    folds = predictor.fold(chains)
    assert [n for _, n, _ in passes] == [26, 17, 17, 5]
    assert all(f.plddt for f in folds)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_file_is_folded_again(settings, chains, damage):
    one, other = fold(chains[:2], settings())
    before, text = one.plddt, one.pdb()
    content = bytearray(one.kept.read_bytes())
    content[len(content) // 2] ^= 8
    damaged = {"cut": content[:100], "flip": content, "empty": b""}
    one.kept.write_bytes(damaged.get(damage, other.kept.read_bytes()))
    predictor = Predictor(settings())
    passes = watch(predictor)
    again, _ = predictor.fold(chains[:2])
    assert len(passes) == 1
    assert again.plddt == pytest.approx(before, abs=1e-4)
    assert again.pdb() == text


def test_folds_of_other_weights_and_settings_are_apart(settings, chains, tmp_path):
    write_random_folding(tmp_path / "second", seed=1)
    others = [{}, {"source": tmp_path / "second"}, {"bf16": True}, {"recycles": 0}]
    folds = [fold(chains[:1], settings(**changes))[0] for changes in others]
    assert len({f.plddt for f in folds}) == len({f.kept for f in folds}) == 4
    marks = {Predictor(settings(**changes)).fingerprint for changes in others}
    assert len(marks) == 4
    # What changes nothing has no part in it; the default is one recycle.
    same = [{"chunk_size": 8}, {"tokens": 7}, {"recycles": 1}]
    assert {fold(chains[:1], settings(**changes))[0].kept for changes in same} == {folds[0].kept}


def test_confidences_alone(settings, chains):
    sequences = [chains[0], "-", chains[1]]
    predictor, seen = Predictor(settings()), []
    confidences = predictor.plddt(sequences, lambda *done: seen.append(done))
    assert confidences == [f.plddt for f in predictor.fold(sequences)]
    assert confidences[1] is None
    assert seen[-1] == (3, 3)
    assert predictor.name == str(settings().source)


def test_settings_out_of_range_are_refused(settings, tmp_path):
    for changes in ({"tokens": 0}, {"chunk_size": 0}, {"recycles": -1}):
        with pytest.raises(UserError, match=next(iter(changes))):
            settings(**changes)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot hold folds"):
        Predictor(settings(cache=tmp_path / "file"))
