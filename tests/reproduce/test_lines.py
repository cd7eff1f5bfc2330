"""What a table says of its students: how often they learnt, and what they are without guidance."""

from didi_instruct.reproduce.ablations import asks, unguided, with_unguided
from didi_instruct.reproduce.experiments import ITEMS
from didi_instruct.reproduce.lines import ask_method, learnt
from didi_instruct.reproduce.methods import METHODS
from didi_instruct.reproduce.paper import LEAVE_ONE_OUT
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale

from .kit import measuring_jobs, table_of


def student(method, updates, seed=0, chance=0.0, nfe=8):
    return {
        "method": method, "nfe": nfe, "seed": seed, "updates": updates, "updates_of": 60,
        "at_chance": chance,
    }  # fmt: skip


def test_a_student_that_never_learnt_is_told_first_and_loudly():
    rows = [student("a", 43), student("a", 43, nfe=16), student("b", 0, chance=0.8)]
    loud, steps, chance = learnt(rows)
    assert loud == "**Made no update, so that the row is the teacher: b.**"
    assert steps.endswith("discriminator: a 43 of 60; b 0 of 60.")
    assert "at chance" in chance
    assert chance.endswith("b (80% of its steps).")
    assert len(learnt(rows[:2])) == 1, "nothing to warn of"


def test_a_discriminator_that_did_not_learn_is_told():
    _, note = learnt([student("a", 43) | {"saturated": 0.9}, student("b", 43) | {"saturated": 0.1}])
    assert note.endswith("sure of itself, and did not learn: a (90% of its steps).")


def test_each_seed_is_a_student_of_its_own():
    loud, _ = learnt([student("a", 43), student("a", 0, seed=1)])
    assert "a, seed 1" in loud
    assert "seed 0" not in loud


def test_a_row_of_several_students_tells_the_one_that_learnt_least():
    loud, *_ = learnt([student("a", 43), student("a", 0, nfe=32), student("a", 50, nfe=64)])
    assert "no update" in loud


def test_models_without_a_discriminator_are_not_mentioned():
    assert learnt([{"method": "teacher", "nfe": 8, "seed": 0}]) == []


def test_path_kl_is_that_of_the_same_student_without_guidance():
    rows = [
        {"recipe": "r", "nfe": nfe, "seed": seed, "path_kl": None}
        for nfe in (4, 8)
        for seed in (0, 1)
    ]
    plain = [
        row | {"path_kl": 10.0 * row["nfe"] + row["seed"], "path_kl_ci95": [1, 2]} for row in rows
    ]
    found = with_unguided(rows, plain[:3])
    assert [row["unguided_path_kl"] for row in found] == [40.0, 41.0, 80.0, None]
    assert found[0]["unguided_path_kl_ci95"] == [1, 2]


def test_every_guided_row_has_its_unguided_student():
    """The same model at the same budgets, sampled by chance alone."""
    scale = find_scale("toy", Given())
    pairs = list(zip(asks(LEAVE_ONE_OUT, scale), unguided(LEAVE_ONE_OUT, scale), strict=True))
    assert len(pairs) == len(LEAVE_ONE_OUT)
    for ask, plain in pairs:
        assert ask.labels == plain.labels
        assert ask.job.inputs["model"].key == plain.job.inputs["model"].key
        assert plain.job.options["sampler"] == "ancestral"
    same = [a.labels["recipe"] for a, b in pairs if a.job.key == b.job.key]
    assert same == ["ablation-without-guidance"], "which is measured once"
    assert not list(unguided(LEAVE_ONE_OUT, find_scale("paper", Given()))), "no path KL there"


def test_ablation_tables_begin_with_their_teacher():
    """It costs nothing, so it stands in each table; its path KL is unguided as it is."""
    scale, item = find_scale("toy", Given()), ITEMS["ablation-leave-one-out"]
    [ask] = ask_method(scale, "teacher")
    assert ask.job.key in {job.key for job in measuring_jobs(item, scale)}
    row = {"nfe": 4, "seed": 0, "path_kl": 3.5, "path_kl_ci95": [3.0, 4.0]}
    [found] = table_of(item, scale, {ask.job.key: [row]}).rows
    assert found["method"] == METHODS["teacher"].label
    assert (found["unguided_path_kl"], found["unguided_path_kl_ci95"]) == (3.5, [3.0, 4.0])
