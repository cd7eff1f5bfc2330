"""The list of items: complete, and whole at every scale."""

from dataclasses import replace
from pathlib import Path

import pytest

from didi_instruct.config.recipes import recipe_names
from didi_instruct.errors import UserError
from didi_instruct.reproduce import paper
from didi_instruct.reproduce.ablations import sampler_of
from didi_instruct.reproduce.experiments import ITEMS, find_item, jobs_of
from didi_instruct.reproduce.methods import METHODS
from didi_instruct.reproduce.preflight import require_gpu
from didi_instruct.reproduce.protein_scales import ITEMS as OF_PROTEINS
from didi_instruct.reproduce.scale import NAMES, Given
from didi_instruct.reproduce.scales import find_scale

from .kit import measuring_jobs, table_of

NOWHERE = Path("nowhere")
MADE = list(ITEMS.values())
WANTED = {
    "figure-1", "generation", "ablation-cumulative", "ablation-leave-one-out", "diversity",
    "latency", "zero-shot", "rgas-landscape", "rgas-anova", "scaling", "samples", "baselines",
    "reference", "mmlu", "pubmed", "mrpc", "protein-plddt", "protein-diversity",
}  # fmt: skip


@pytest.fixture
def scale(request, tmp_path):
    text = tmp_path / "stories.txt"
    text.write_text("Once upon a time there was a story.\n")
    for name in ("mmlu", "pubmed", "mrpc"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
        (tmp_path / "tasks" / name / "auxiliary_train.csv").touch()
    given = Given(data=str(text), tasks=str(tmp_path / "tasks"))
    return find_scale(request.param, Given() if request.param == "toy" else given)


def of(scale):
    """Items of a scale; those on proteins have models of their own but at toy scale."""
    return [item for item in MADE if scale.name == "toy" or item.name not in OF_PROTEINS]


def test_the_list_is_complete():
    assert set(ITEMS) == WANTED
    for name, item in ITEMS.items():
        assert find_item(name, ITEMS) is item


@pytest.mark.parametrize("scale", NAMES, indirect=True)
def test_every_item_has_jobs_and_a_table_at_every_scale(scale):
    """Before anything has run, a table of ours is empty and the paper's numbers stand in it."""
    for item in of(scale):
        assert jobs_of([item], scale, NOWHERE)
        table = table_of(item, scale, {})
        assert not table.rows
        unprinted = ("rgas-landscape", "baselines", "protein-plddt")
        assert bool(table.paper) == (item.name not in unprinted)


@pytest.mark.parametrize("scale", NAMES, indirect=True)
def test_perplexity_is_never_measured_without_entropy(scale):
    measured = [job for job in jobs_of(of(scale), scale, NOWHERE) if "metrics" in job.options]
    assert measured
    for job in measured:
        assert "ppl" not in job.options["metrics"] or "entropy" in job.options["metrics"]


def test_items_share_what_they_have_in_common():
    """At toy scale there is one teacher, and ten ablation trainings, not fourteen rows.

    Two more read the reference in other ways. Tasks are read by models of text, which are others.
    """
    scale = find_scale("toy", Given())
    jobs = jobs_of(MADE, scale, NOWHERE)
    assert sum(job.name == "teacher" for job in jobs) == 1
    trained = [job for job in jobs if job.trains and job.recipe.startswith("ablation-")]
    [teacher] = {job.key for job in jobs if job.name == "teacher"}
    assert len([job for job in trained if job.inputs["teacher"].key == teacher]) == 12


def test_every_row_of_the_ablation_tables_has_its_recipe():
    rows = {*paper.CUMULATIVE, *paper.LEAVE_ONE_OUT}
    assert rows == {name for name in recipe_names() if name.startswith("ablation-")}


def test_only_rows_with_guidance_are_sampled_with_it():
    plain = {name for name in paper.CUMULATIVE if not name.endswith("guidance")}
    plain.add("ablation-without-guidance")
    assert {
        n for n in (*paper.CUMULATIVE, *paper.LEAVE_ONE_OUT) if sampler_of(n) == "ancestral"
    } == plain


def test_at_paper_scale_many_steps_have_a_student_of_their_own():
    """The paper prefers Beta(5, 2) from 32 NFE on; a row without the trick has one student."""
    scale = find_scale("paper", Given())
    few, many = (scale.ablated("ablation-all-tricks", 0, nfe) for nfe in (16, 32))
    assert few.settings().didi.pi == (2, 5)
    assert many.settings().didi.pi == (5, 2)
    uniform = [scale.ablated("ablation-without-pi", 0, nfe) for nfe in (16, 32)]
    assert uniform[0].key == uniform[1].key


def test_larger_students_follow_the_same_law():
    scale = find_scale("paper", Given())
    laws = {
        nfe: ask.job.inputs["model"].settings().didi.pi
        for ask in ITEMS["scaling"].lines(scale)
        if ask.labels["role"] == "didi-large"
        for nfe in ask.job.options["steps"]
    }
    assert laws == {nfe: (2, 5) if nfe < 32 else (5, 2) for nfe in (*paper.NFES, 512, 1024)}
    few, many = (scale.model("didi-large", 0, nfe) for nfe in (16, 32))
    assert (few.name, many.name) == ("didi-large-seed0", "didi-large-late-seed0")
    assert few.inputs["teacher"].key == many.inputs["teacher"].key
    assert "Beta(5, 2), as in the paper" in " ".join(table_of(ITEMS["scaling"], scale, {}).notes)
    toy = find_scale("toy", Given())
    assert len(list(ITEMS["scaling"].lines(toy))) == 2, "a teacher and one student"


@pytest.mark.parametrize(
    "name",
    [
        "figure-1",
        "generation",
        "scaling",
        "samples",
        "diversity",
        "ablation-cumulative",
        "ablation-leave-one-out",
    ],
)
def test_at_paper_scale_all_that_the_paper_prints_is_drawn(name):
    """But for GPT-2, which takes a step per token whatever it is asked for."""
    scale = find_scale("paper", Given())
    lines = [line for line in ITEMS[name].lines(scale) if not line.group]
    drawn = {(each.labels["method"], nfe) for each in lines for nfe in each.job.options["steps"]}
    printed = {(row["method"], row["nfe"]) for row in table_of(ITEMS[name], scale, {}).paper}
    rivals = {(METHODS["ar"].label, 1024), (paper.GENERATION["gpt2"].label, 1024)}
    assert printed - rivals <= drawn


def test_the_reference_is_read_in_three_ways_and_nothing_else_differs():
    for name, given in (("toy", Given()), ("small", Given(data="oracle")), ("paper", Given())):
        scale = find_scale(name, given)
        asked = [a for a in ITEMS["reference"].lines(scale) if a.labels["role"] == "didi-plain"]
        assert len(asked) == 3 * len(scale.seeds)
        assert all(ask.job.options["sampler"] is None for ask in asked)
        found = [ask.job.inputs["model"].settings() for ask in asked[:: len(scale.seeds)]]
        assert [one.reference.source for one in found] == ["online", "bank", "data"]
        assert found[0].reference.steps == 1
        assert found[1].reference.steps > 16
        usual = found[0]
        for one in found[1:]:
            assert replace(one, reference=usual.reference, data=usual.data) == usual
        assert usual.train.seed == scale.seeds[0]


def test_small_scale_on_the_oracle_language_is_judged_by_it_and_has_two_seeds():
    scale = find_scale("small", Given(data="oracle"))
    assert (scale.name, scale.judge, scale.seeds) == ("small", "oracle", (0, 1))
    require_gpu(scale)
    jobs = jobs_of(
        [ITEMS[n] for n in ("ablation-cumulative", "ablation-leave-one-out", "reference")],
        scale,
        NOWHERE,
    )
    trained = [job for job in jobs if job.does == "distill"]
    assert len(trained) == 2 * (10 + 2), "one of the three readings is that of the tables"
    for job in trained:
        settings = job.settings()
        gates = settings.discriminator.chance, settings.discriminator.saturation
        assert (*gates, settings.updates) == (None, None, 1000)


@pytest.mark.parametrize("name", ["baselines", "rgas-landscape", "rgas-anova"])
def test_tables_of_many_settings_have_that_student_too(name):
    scale = find_scale("paper", Given())
    role = "didi" if name == "baselines" else "model"
    jobs = [job for job in measuring_jobs(ITEMS[name], scale) if role in job.inputs]
    assert jobs
    for job in jobs:
        assert job.inputs[role].settings().didi.pi == (2, 5)
        assert job.inputs[f"{role}-late"].settings().didi.pi == (5, 2)
        assert job.options["late_from"] == 32
    for toy in measuring_jobs(ITEMS[name], find_scale("toy", Given())):
        assert f"{role}-late" not in toy.inputs


def test_paper_scale_changes_nothing_of_the_papers_recipes():
    scale = find_scale("paper", Given())
    config = scale.ablated("ablation-all-tricks", 0).settings()
    assert (config.train.steps, config.train.batch_size, config.optim.lr) == (10000, 8, 1e-6)


def test_the_texts_that_are_shown_are_those_of_the_students_that_the_paper_shows():
    """Above its texts stand, from 16 NFE on, the perplexities of the row w/o Regularization."""
    scale = find_scale("paper", Given())
    shown = {
        nfe: ask.job.inputs["model"].recipe
        for ask in ITEMS["samples"].lines(scale)
        if ask.labels["role"] == "didi"
        for nfe in ask.job.options["steps"]
    }
    few, many = "ablation-all-tricks", "ablation-without-regularisation"
    assert shown == {8: few, 16: many, 32: many, 64: many, 128: many}
    printed = paper.LEAVE_ONE_OUT[many].cells
    above = paper.SAMPLES["didi"].cells
    assert all(above[n].ppl == pytest.approx(printed[n].ppl, abs=6e-3) for n in shown if n > 8)


@pytest.mark.parametrize("name", ["figure-1", "rgas-landscape", "rgas-anova", "latency"])
def test_guidance_is_by_means_at_paper_scale_as_it_is_printed(name):
    """Eq. (6), of tilting and of re-ranking; elsewhere by sums, which is what works."""
    means = {"reward": "mean", "score": "mean"}
    found = []
    for job in measuring_jobs(ITEMS[name], find_scale("paper", Given())):
        options = job.options
        if name == "figure-1":
            found += [options["options"]] if options["sampler"] == "rgas" else []
        else:
            found.append(options["guidance"])
    assert found
    assert all(options == means for options in found)
    for job in measuring_jobs(ITEMS[name], find_scale("toy", Given())):
        assert not job.options.get("options")
        assert not job.options.get("guidance")


def test_the_left_to_right_model_is_timed_greedy_and_sampled():
    (job,) = measuring_jobs(ITEMS["latency"], find_scale("paper", Given()))
    assert {r: n for r, n in job.options["steps"].items() if r.startswith("ar")} == {
        "ar-greedy": 1024,
        "ar": 1024,
    }
    labels = job.options["labels"]
    assert labels["ar-greedy"] != labels["ar"]
    theirs = {row["method"]: row["nfe"] for row in table_of(ITEMS["latency"],
        find_scale("paper", Given()), {}).paper}  # fmt: skip
    assert theirs[labels["ar-greedy"]] == 1024
    assert labels["ar"] not in theirs


def test_the_zero_shot_table_has_duo_and_the_printed_rows():
    scale = find_scale("paper", Given())
    (job,) = measuring_jobs(ITEMS["zero-shot"], scale)
    assert {"teacher", "didi", "ar", "duo-teacher", "duo"} <= job.inputs.keys()
    assert job.inputs["duo"].inputs["teacher"].key == job.inputs["duo-teacher"].key
    students = {METHODS["didi"].label, METHODS["duo"].label}
    assert job.options["teachers"].keys() == students
    lines = {row["method"] for row in table_of(ITEMS["zero-shot"], scale, {}).paper}
    assert {f"{name}, as printed" for name in ("GPT2", "SEDD", "SEDD uniform", "UDLM")} <= lines
    assert {METHODS[role].label for role in ("teacher", "didi", "duo-teacher", "duo")} <= lines


def test_seeds_change_students_and_not_their_teacher():
    scale = find_scale("toy", Given(seeds=2))
    one, other = (scale.ablated("ablation-all-tricks", seed) for seed in scale.seeds)
    assert one.key != other.key
    assert one.inputs["teacher"].key == other.inputs["teacher"].key


def test_a_teacher_that_is_given_is_not_trained(tmp_path):
    scale = replace(find_scale("toy", Given()), teacher=str(tmp_path))
    assert not any(job.name == "teacher" for job in jobs_of([ITEMS["generation"]], scale, NOWHERE))


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("toy", Given(data="x"), "--data x: at scale toy"),
        ("toy", Given(seeds=0), "--seeds 0"),
        ("small", Given(), "--scale small needs text"),
        ("large", Given(), "choose one of toy, small, paper"),
    ],
)
def test_what_does_not_fit_a_scale_is_refused_in_one_line(name, given, words):
    with pytest.raises(UserError, match=words) as error:
        find_scale(name, given)
    assert "\n" not in str(error.value)
