"""What tables make of results that are written by hand."""

from dataclasses import replace

import pytest

from didi_instruct.reproduce import paper
from didi_instruct.reproduce.experiments import ITEMS
from didi_instruct.reproduce.methods import METHODS
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale
from didi_instruct.reproduce.tables import lay_out

from .kit import measuring_jobs, table_of

TOY = find_scale("toy", Given())
TEACHER, STUDENT = METHODS["teacher"].label, METHODS["didi"].label


def row(nfe, ppl, entropy=3.0, seed=0, **more):
    return {"nfe": nfe, "ppl": ppl, "entropy": entropy, "seed": seed, "passes": 2.0 * nfe, **more}


def results_of(asks, make):
    """What each job would return: `make` of role and budget."""
    return {
        ask.job.key: [
            make(ask.labels["role"], nfe, ask.job.options["seed"])
            for nfe in ask.job.options["steps"]
        ]
        for ask in asks
    }


def found(table, **wanted):
    """The only row of ours with those values."""
    (one,) = [r for r in table.rows if all(r[name] == value for name, value in wanted.items())]
    return one


# Scaling


PPL = {
    ("teacher-large", 4): 40.0, ("teacher-large", 8): 20.0, ("teacher-large", 32): 10.0,
    ("didi-large", 4): 10.0, ("didi-large", 8): 8.0,
}  # fmt: skip


def test_a_larger_student_lies_below_its_teacher_by_a_share():
    """10 beside 40 and 8 beside 20 at the same NFE; both beside 10, the teacher of 32."""
    results = results_of(
        ITEMS["scaling"].lines(TOY), lambda role, nfe, seed: row(nfe, PPL[role, nfe])
    )
    table = table_of(ITEMS["scaling"], TOY, results)
    students = {nfe: found(table, method=STUDENT, nfe=nfe) for nfe in (4, 8)}
    assert {nfe: r["gain"] for nfe, r in students.items()} == pytest.approx({4: 0.75, 8: 0.6})
    assert {nfe: r["below_most"] for nfe, r in students.items()} == pytest.approx({4: 0, 8: 0.2})
    for nfe in (4, 8, 32):
        assert "gain" not in found(table, method=TEACHER, nfe=nfe)
    assert "60.0%" in next(line for line in lay_out(table)[1] if line[0] == STUDENT)[3]


def test_gains_are_those_of_the_same_seed():
    scale = replace(TOY, seeds=(0, 1))
    results = results_of(
        ITEMS["scaling"].lines(scale),
        lambda role, nfe, seed: row(nfe, PPL[role, nfe] * (1 + seed), seed=seed),
    )
    lost = {key: rows for key, rows in results.items() if rows[0]["ppl"] != 80.0}
    table = table_of(ITEMS["scaling"], scale, lost)
    assert found(table, method=STUDENT, nfe=8, seed=0)["gain"] == pytest.approx(0.6)
    assert "gain" not in found(table, method=STUDENT, nfe=8, seed=1), "its teacher was lost"


def test_the_papers_gains_stand_beside_ours():
    table = table_of(ITEMS["scaling"], TOY, {})
    theirs = {r["nfe"]: r for r in table.paper if r["method"] == STUDENT}
    assert {n: r["gain"] for n, r in theirs.items() if r["gain"]} == paper.SCALING_GAIN
    assert {n: r["below_most"] for n, r in theirs.items() if r["below_most"]} == {
        16: 0.114, 64: 0.568, 128: 0.612, 1024: 0.642
    }  # fmt: skip
    assert theirs[8]["gain"] == 0.885
    assert (theirs[16]["ppl"], theirs[16]["entropy"]) == (32.79, 5.52)
    assert all("gain" not in r for r in table.paper if r["method"] == TEACHER)


# Latency


def test_speeds_are_told_as_multiples_of_left_to_right():
    speeds = {"ar-greedy": 50.0, "ar": 40.0, "teacher": 25.0, "sdtt": 200.0, "didi": 400.0}
    rows = [
        row(
            TOY.latency[role.removesuffix("-greedy")],
            9.0,
            role=role,
            method=f"the line of {role}",
            tokens_per_second=speed,
        )
        for role, speed in speeds.items()
    ]
    table = table_of(ITEMS["latency"], TOY, {measuring_jobs(ITEMS["latency"], TOY)[0].key: rows})
    ratios = {r["role"]: r["ratio_to_ar"] for r in table.rows}
    assert ratios == {"ar-greedy": 1, "ar": 0.8, "teacher": 0.5, "sdtt": 4, "didi": 8}
    theirs = {r["method"]: r for r in table.paper}
    assert theirs[STUDENT]["ratio_to_ar"] == pytest.approx(2366.604 / 179.042)
    assert theirs[TEACHER]["ratio_to_ar"] == pytest.approx(0.62, abs=0.01)
    assert theirs[STUDENT]["nfe"] == 16


def test_without_a_left_to_right_model_there_are_no_multiples_of_it():
    scale = replace(TOY, models={r: m for r, m in TOY.models.items() if r != "ar"})
    assert "ar" not in measuring_jobs(ITEMS["latency"], scale)[0].inputs
    rows = [row(4, 9.0, role="didi", method=STUDENT, tokens_per_second=400.0)]
    table = table_of(
        ITEMS["latency"], scale, {measuring_jobs(ITEMS["latency"], scale)[0].key: rows}
    )
    assert [r["ratio_to_ar"] for r in table.rows] == [None]


# Diversity


def test_variety_stands_under_its_method_beside_the_papers():
    def make(role, nfe, seed):
        return row(nfe, 9.0, self_bleu_words=nfe / 100, unique_4gram=0.5)

    table = table_of(ITEMS["diversity"], TOY, results_of(ITEMS["diversity"].lines(TOY), make))
    names = {METHODS[role].label for role in ("teacher", "sdtt", "duo", "didi")}
    assert {r["method"] for r in table.rows} == {r["method"] for r in table.paper} == names
    assert found(table, method=STUDENT, nfe=8)["self_bleu_words"] == 0.08
    (theirs,) = [r for r in table.paper if (r["method"], r["nfe"]) == (METHODS["sdtt"].label, 8)]
    assert (theirs["mauve"], theirs["self_bleu_words"]) == pytest.approx((5.60e-3, 5.02e-2))


def test_a_lost_method_leaves_the_others():
    made = results_of(
        ITEMS["diversity"].lines(TOY), lambda role, nfe, seed: row(nfe, 9.0, role=role)
    )
    kept = {key: rows for key, rows in made.items() if rows[0]["role"] != "duo"}
    table = table_of(ITEMS["diversity"], TOY, kept)
    assert {r["role"] for r in table.rows} == {"teacher", "sdtt", "didi"}


@pytest.mark.parametrize("name", ["diversity", "baselines"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "MAUVE compares features of a causal LM"),
        ({"causal_judge": True, "mauve": False}, "MAUVE was left out (--no-mauve)"),
        ({"causal_judge": True}, None),
    ],
)
def test_where_mauve_is_left_out_the_table_says_why(name, change, words):
    notes = table_of(ITEMS[name], replace(TOY, **change), {}).notes
    told = [n for n in notes if n.startswith(("MAUVE compares", "MAUVE was"))]
    assert len(told) == (words is not None)
    assert words is None or words in told[0]


# Samples


def test_texts_follow_the_table_each_under_its_numbers():
    def make(role, nfe, seed):
        first = {"text": f"one of {role}\nin {nfe}", "ppl": 12.345, "entropy": 2.5}
        return row(nfe, 9.0, texts=[first, {"text": "", "ppl": None, "entropy": 0.0}])

    table = table_of(ITEMS["samples"], TOY, results_of(ITEMS["samples"].lines(TOY), make))
    assert {(r["method"], r["nfe"]) for r in table.rows} == {
        (TEACHER, 32), (STUDENT, 4), (STUDENT, 8)
    }  # fmt: skip
    assert not any("texts" in r for r in table.rows)
    head = f"### {STUDENT}, 8 NFE, seed 0"
    wanted = f"{head}\n\nperplexity 12.35, entropy 2.50\n\n> one of didi\n> in 8\n\n"
    assert wanted + f"{head}\n\nentropy 0.00\n\n> " in table.appendix
    assert table.appendix.count("### ") == 6
