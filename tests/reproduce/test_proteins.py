"""Items on proteins: their cells, what a table makes of them, and what a scale needs."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.errors import UserError
from didi_instruct.evaluation.evaluate import Evaluation
from didi_instruct.evaluation.lengths import joined
from didi_instruct.reproduce import protein_scales, proteins
from didi_instruct.reproduce.experiments import ITEMS, jobs_of
from didi_instruct.reproduce.jobs import Context
from didi_instruct.reproduce.proteins import WAYS
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale
from didi_instruct.reproduce.tables import lay_out

from .kit import measuring_jobs, table_of

PLDDT, DIVERSITY = (ITEMS[name] for name in protein_scales.ITEMS)


@pytest.fixture
def paper():
    return find_scale("paper", Given(proteins=True))


def test_at_paper_scale_all_is_as_the_paper_says(paper, tmp_path):
    """DPLM-150M, its recipe unchanged, ESMFold, 40 chains a cell, all lengths and budgets."""
    found = paper.proteins
    assert (found.teacher, found.folding) == ("airkingbd/dplm_150m", "facebook/esmfold_v1")
    assert (found.num, found.lengths) == (40, (100, 200, 300, 400, 500))
    student = found.distilled(0)
    recipe = load_recipe(DistillConfig, "protein-didi")
    assert student.settings() == replace(recipe, train=replace(recipe.train, seed=0))
    printed = {row["nfe"] for row in table_of(DIVERSITY, paper, {}).paper}
    assert printed == set(found.diversity_steps)
    jobs = jobs_of([PLDDT, DIVERSITY], paper, tmp_path)
    assert sum(job.trains for job in jobs) == 1
    assert len(jobs) == 1 + 2 * len(WAYS)


def test_a_row_has_numbers_by_length_and_their_mean(monkeypatch, tmp_path):
    asked = []

    def evaluate(sources, config, **settings):
        asked.append((sources, config.lengths, config.sampler, config.reference))
        return joined([at_length(config.steps, length) for length in config.lengths], [10, 30])

    def at_length(steps, length):
        rows = [
            {
                "model": "m", "nfe": n, "passes": n / 2 + length, "num_samples": 3, "seed": 5,
                "cluster_entropy": length / 10, "cluster_size": n,
            }
            for n in steps
        ]  # fmt: skip
        real = {**rows[0], "model": "real", "nfe": None, "passes": None, "cluster_size": None}
        return Evaluation(rows=rows, controls=(real,))

    monkeypatch.setattr(proteins, "evaluate", evaluate)
    chains = tmp_path / "run"
    chains.mkdir()
    context = Context(
        folder=tmp_path,
        shared=tmp_path,
        inputs={"model": "there", "chains": str(chains)},
        results={},
    )
    found = proteins.cells(
        context, label="x", lengths=[10, 30], steps=[2, 4], num=3, seed=5, sampler="dplm",
        metrics=["clusters"], batch_size=3,
    )  # fmt: skip
    fasta = str(chains / protein_scales.FASTA)
    assert asked == [(["there"], (10, 30), "dplm", fasta)]
    first, second = found["rows"]
    assert (first["cluster_entropy_10"], first["cluster_entropy_30"]) == (1, 3)
    assert (first["cluster_entropy"], first["cluster_size"], second["cluster_size"]) == (2, 2, 4)
    assert (first["passes"], first["nfe"], first["seed"]) == (21, 2, 5)
    (real,) = found["controls"]
    assert (real["model"], real["cluster_entropy_30"], real["cluster_size"]) == ("real", 3, None)
    assert real["passes"] is None


def test_a_table_has_a_line_for_each_way_and_a_sentence_on_real_chains():
    toy = find_scale("toy", Given())
    jobs = measuring_jobs(DIVERSITY, toy)
    assert [job for job in jobs if "chains" in job.inputs] == jobs[:1], "the same for all"
    numbers = {
        "nfe": 4, "passes": 3.0, "seed": 0, "num_samples": 4, "model": "real",
        "cluster_entropy_24": 1.0, "cluster_entropy_40": 0.5, "cluster_size": 1.5,
        "commonest_residue": 0.1, "low_complexity": 0.0,
    }  # fmt: skip
    results = {job.key: {"rows": [numbers], "controls": [numbers]} for job in jobs}
    table = table_of(DIVERSITY, toy, results)
    assert {row["method"] for row in table.rows} == {way.label for way in WAYS}
    assert "real chains: entropy 1.00 at 24, 0.50 at 40" in table.notes[0]
    lines = lay_out(table)[1]
    assert any("1.00 / 0.50 / 1.50 / 10.0% / 0% / 3" in cell for line in lines for cell in line)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Given(), "give a FASTA file with --data"),
        (Given(data="oracle"), "give a FASTA file with --data"),
    ],
)
def test_small_scale_needs_chains(given, words):
    with pytest.raises(UserError, match=words):
        find_scale("small", replace(given, proteins=True))


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_chains_are_one_fasta_file(scale, tmp_path):
    """A folder of FASTA can be learnt from, but rows of real chains are read from a file."""
    (tmp_path / "chains.fasta").write_text(">a\nMKT\n")
    (tmp_path / "chains.txt").write_text("MKT\n")
    for data in (tmp_path, tmp_path / "chains.txt", "hf:owner/name"):
        with pytest.raises(UserError, match="is no FASTA file"):
            find_scale(scale, Given(proteins=True, data=str(data)))
    fasta = str(tmp_path / "chains.fasta")
    assert find_scale(scale, Given(proteins=True, data=fasta)).proteins.chains == fasta


def test_small_scale_folds_where_a_folding_model_is_given(tmp_path):
    (tmp_path / "chains.fasta").write_text(">a\nMKT\n")
    given = Given(data=str(tmp_path / "chains.fasta"), teacher="airkingbd/dplm_150m")
    scale = find_scale("small", replace(given, proteins=True))
    assert len(measuring_jobs(DIVERSITY, scale)) == len(WAYS)
    with pytest.raises(UserError, match="--folding SOURCE"):
        measuring_jobs(PLDDT, scale)
    scale = find_scale("small", replace(given, proteins=True, folding="facebook/esmfold_v1"))
    assert all(
        job.inputs["folding"] == "facebook/esmfold_v1" for job in measuring_jobs(PLDDT, scale)
    )


def test_items_on_proteins_are_asked_for_apart(didi, tmp_path):
    fasta = tmp_path / "chains.fasta"
    fasta.write_text(">a\nMKT\n")
    asked = ("reproduce", "protein-diversity,latency", "--scale", "small", "--data", fasta)
    code, _, err = didi(*asked, "--out", tmp_path / "out", "--dry-run")
    assert code == 2
    assert "ask for them apart" in err


def test_a_dry_run_of_made_up_chains_needs_no_texts(didi, tmp_path):
    """The teacher's texts are another job's output: there is no file to ask for yet."""
    asked = ("reproduce", "protein-plddt,protein-diversity", "--scale", "toy")
    _, out, err = didi(*asked, "--out", tmp_path / "out", "--dry-run")
    assert "10 jobs, 10 to do" in out
    assert "ok      esm (built in)" in out
    assert err == ""


def test_a_dry_run_checks_for_everything(didi, tmp_path, monkeypatch):
    fasta = tmp_path / "chains.fasta"
    fasta.write_text(">a\nMKT\n")
    monkeypatch.setattr("didi_instruct.reproduce.preflight.shutil.which", lambda name: None)
    asked = ("reproduce", "protein-plddt,protein-diversity", "--scale", "small", "--data", fasta)
    code, out, _ = didi(*asked, "--folding", tmp_path, "--out", tmp_path / "out", "--dry-run")
    assert code == 1
    assert "MISSING mmseqs: apt install mmseqs2" in out
    assert f"ok      {fasta}" in out
    assert "protein-didi-seed0" in out
    assert "of unknown cost" not in out
    assert "ok      esm (built in)" in out
    assert not (tmp_path / "out").exists()


def test_made_up_chains_are_of_three_families(tmp_path):
    context = SimpleNamespace(folder=tmp_path)
    assert protein_scales.write(context, what="chains") == {"chains": 240}
    lines = (tmp_path / "run" / protein_scales.FASTA).read_text().split()
    chains = lines[1::2]
    assert {len(chain) for chain in chains} <= set(range(20, 47))
    starts = {chain[:8] for chain in chains}
    assert 3 < len(starts) <= 240
    assert json.dumps(chains) == json.dumps(protein_scales._made_up(240))
