"""Recipes that are shipped, their bases, and overrides."""

import re
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.finetune import FinetuneConfig
from didi_instruct.config.model import read_lengths
from didi_instruct.config.recipes import find_recipe, load_recipe, recipe_names
from didi_instruct.config.schema import read_yaml
from didi_instruct.config.train import PretrainConfig
from didi_instruct.errors import UserError

FINETUNINGS = [n for n in recipe_names() if n.startswith("finetune-")]
PRETRAININGS = [n for n in recipe_names() if n.endswith(("-teacher", "-ar"))]
DISTILLATIONS = [n for n in recipe_names() if n not in (*FINETUNINGS, *PRETRAININGS)]


def setting(recipe, name):
    """The value of `section.key`."""
    for part in name.split("."):
        recipe = getattr(recipe, part)
    return recipe


def same_training(one, other):
    return replace(one, reproduces="", expect="") == replace(other, reproduces="", expect="")


# Shipped recipes

TEXT = ["data.source=some.txt"]
"""What recipes that learn from real text ask for."""


@pytest.mark.parametrize("text", ["oracle", "stories", "owt-169m"])
def test_every_text_has_a_recipe_of_each_kind(text):
    """The teacher and the left-to-right model beside it, DiDi-Instruct, and the rivals."""
    kinds = ("teacher", "ar", "didi", "sdtt", "dimo", "duo-teacher", "duo")
    assert {f"{text}-{kind}" for kind in kinds} <= set(recipe_names())


def test_dimo_of_the_papers_teacher_keeps_the_proportions_that_were_tried():
    """Nothing is published for text: rates as to each other, and the share of waiting, are ours."""
    large, small = (load_recipe(DistillConfig, f"{text}-dimo") for text in ("owt-169m", "stories"))
    assert large.dimo.aux_lr / large.optim.lr == pytest.approx(small.dimo.aux_lr / small.optim.lr)
    own = replace(small.dimo, aux_lr=large.dimo.aux_lr, warmup=large.dimo.warmup)
    assert large.dimo == own
    assert large.warmup / large.train.steps <= small.warmup / small.train.steps


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_for_one_verb(name):
    """Teachers are pretrained, most others distilled; the wrong verbs refuse."""
    verbs = {"distill": DistillConfig, "pretrain": PretrainConfig, "finetune": FinetuneConfig}
    verb = "finetune" if name in FINETUNINGS else "pretrain"
    verb = "distill" if name in DISTILLATIONS else verb
    load_recipe(verbs[verb], name, TEXT)
    for other in verbs.keys() - {verb}:
        with pytest.raises(UserError, match=rf"{name}(\.yaml)? is a recipe for `didi {verb}`"):
            load_recipe(verbs[other], name)


def test_fine_tuning_on_the_papers_tasks_has_its_settings():
    """Appendix "Downstream Task Evaluation": AdamW, linear warm-up, then constant."""
    wanted = {"pubmed": (5e-6, 1000, 72), "mmlu": (1e-5, 2500, 32)}
    for name, (lr, warmup, batch) in wanted.items():
        config = load_recipe(FinetuneConfig, f"finetune-{name}")
        found = config.optim.lr, config.optim.warmup, config.train.batch_size
        assert found == (lr, warmup, batch)
        assert (config.train.steps, config.optim.schedule) == (5000, "constant")


@pytest.mark.parametrize("name", FINETUNINGS)
def test_a_recipe_of_fine_tuning_says_what_it_is(name):
    own = read_yaml(find_recipe(name))
    assert own["reproduces"] != ""
    assert own["expect"] != ""
    assert find_recipe(name).read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("name", DISTILLATIONS)
def test_a_recipe_says_what_it_is_and_what_to_expect(name):
    recipe, path = load_recipe(DistillConfig, name, TEXT), find_recipe(name)
    if name in ABLATIONS:
        own = read_yaml(path.parent)["variants"][name]
    else:
        own = read_yaml(path)
        assert path.read_text(encoding="utf-8").startswith("# ")
    assert recipe.reproduces == own["reproduces"] != ""
    assert recipe.expect == own["expect"] != ""


PAPER = {
    "method": "didi",
    "optim.lr": 1e-6,
    "optim.schedule": "linear",
    "optim.final": 0.0,
    "optim.warmup": 0,
    "optim.beta1": 0.9,
    "optim.beta2": 0.999,
    "optim.weight_decay": 0.01,
    "train.batch_size": 8,
    "train.steps": 10_000,
    "train.ema": 0.9999,
    "didi.kl": "forward",
    "didi.kl_weight": 0.05,
    "didi.entropy_weight": 0.0005,
    "didi.score_decomposition": True,
    "didi.coupled_time": True,
    "didi.omega": "schedule",
    "didi.pi": (2, 5),
    "didi.regularisation": True,
    "didi.rollout_steps": 1,
    "didi.score_steps": "all",
    "didi.grouping": "batch",
    "didi.baseline": "mean",
    "didi.scale": "group",
    "didi.omega_min_time": 1e-8,
    "didi.importance_weighting": False,
    "train.ema_warmup": False,
    "updates": 10_000,
    "discriminator.label_smoothing": 0.0,
    "discriminator.positions": "all",
    "discriminator.steps": 1,
    "discriminator.chance": None,
    "discriminator.saturation": None,
    "reference.source": "online",
    "reference.steps": 1,
    "watch.min_entropy": 0.0,
}
"""Its table of hyper-parameters, its appendix on the ablations, Eq. (8) and Algorithm 1."""


@pytest.mark.parametrize(("name", "value"), PAPER.items())
@pytest.mark.parametrize("recipe", ["owt-169m-didi", "owt-424m-didi"])
def test_the_paper_recipes_carry_its_hyper_parameters(recipe, name, value):
    assert setting(load_recipe(DistillConfig, recipe), name) == value


def test_the_larger_recipe_differs_in_its_discriminator_alone():
    """A third of the blocks trains: 4 of 12, 8 of 24; its head has dropout."""
    small, medium = (load_recipe(DistillConfig, f"owt-{size}-didi") for size in ("169m", "424m"))
    assert small.discriminator.trainable_blocks == 4
    assert small.discriminator.dropout == 0
    larger = replace(small.discriminator, trainable_blocks=8, dropout=0.1)
    assert same_training(medium, replace(small, discriminator=larger))


def test_the_recipe_for_proteins_is_the_papers():
    """Rates, warm-ups and at most 4,096 tokens a batch; all else is the text task's."""
    text, own = (load_recipe(DistillConfig, name) for name in ("owt-169m-didi", "protein-didi"))
    assert (own.optim.lr, own.optim.warmup) == (1e-5, 1000)
    assert (own.discriminator.lr, own.discriminator.lr_warmup) == (5e-6, 1000)
    longest = max(read_lengths(own.lengths))
    assert 4000 <= own.train.batch_size * (longest + 2) <= 4096
    optim = replace(text.optim, lr=1e-5, warmup=1000)
    critic = replace(text.discriminator, lr=5e-6, lr_warmup=1000, trainable_blocks=10)
    expected = replace(text, lengths="100-500", optim=optim, discriminator=critic, data=own.data)
    assert same_training(own, expected)


def test_the_settings_that_a_comment_names_are_settings():
    """The other readings of x', late times for many steps, and what we prefer."""
    text = find_recipe("owt-169m-didi").read_text(encoding="utf-8")
    found = [word.rstrip(",)") for word in re.findall(r"--set (\S+)", text)]
    assert {"reference.source=bank", "reference.source=data", "didi.pi=[5,2]"} <= set(found)
    for change in found:
        other = ["data.source=some.txt"] if change == "reference.source=data" else []
        name, value = change.split("=")
        changed = load_recipe(DistillConfig, "owt-169m-didi", [change, *other])
        assert setting(changed, name) != setting(load_recipe(DistillConfig, "owt-169m-didi"), name)
        assert value


@pytest.mark.parametrize("name", ["owt-169m-didi", "owt-424m-didi", "ablation-without-pi"])
def test_the_papers_recipes_need_no_text_and_no_bank(name):
    recipe = load_recipe(DistillConfig, name)
    assert not recipe.reads_bank
    assert recipe.data.source is None
    assert (recipe.iterations, recipe.warmup) == (10_500, 500)


@pytest.mark.parametrize(
    "name", [n for n in recipe_names() if n.startswith(("stories-", "oracle-"))]
)
def test_our_own_recipes_keep_what_the_paper_does_not_have(name):
    """Gates, a warm-up among the steps, an average that is warmed up."""
    if name not in DISTILLATIONS:
        assert load_recipe(PretrainConfig, name, TEXT).train.ema_warmup
        return
    recipe = load_recipe(DistillConfig, name, TEXT)
    gates = recipe.discriminator.chance, recipe.discriminator.saturation
    assert (*gates, recipe.warmup_on_top, recipe.train.ema_warmup) == (0.52, 0.95, False, True)


# The paper's two tables of ablations

TRICKS = ("score_decomposition", "coupled_time", "omega", "pi", "regularisation")
CUMULATIVE = {
    "ablation-cumulative-0-baseline": (False, False, "constant", (1, 1), False),
    "ablation-cumulative-1-score-decomposition": (True, False, "constant", (1, 1), False),
    "ablation-cumulative-2-coupled-time": (True, True, "constant", (1, 1), False),
    "ablation-cumulative-3-omega": (True, True, "schedule", (1, 1), False),
    "ablation-cumulative-4-pi": (True, True, "schedule", (2, 5), False),
    "ablation-cumulative-5-regularisation": (True, True, "schedule", (2, 5), True),
    "ablation-cumulative-6-guidance": (True, True, "schedule", (2, 5), True),
}
LEAVE_ONE_OUT = {
    "ablation-without-score-decomposition": (False, True, "schedule", (2, 5), True),
    "ablation-without-coupled-time": (True, False, "schedule", (2, 5), True),
    "ablation-without-omega": (True, True, "constant", (2, 5), True),
    "ablation-without-pi": (True, True, "schedule", (1, 1), True),
    "ablation-without-regularisation": (True, True, "schedule", (2, 5), False),
    "ablation-without-guidance": (True, True, "schedule", (2, 5), True),
    "ablation-all-tricks": (True, True, "schedule", (2, 5), True),
}
ABLATIONS = CUMULATIVE | LEAVE_ONE_OUT


def switches(name):
    didi = asdict(load_recipe(DistillConfig, name).didi)
    return tuple(didi[trick] for trick in TRICKS)


def differing(one, other):
    """Tricks in which two recipes differ."""
    pairs = zip(TRICKS, switches(one), switches(other), strict=True)
    return [trick for trick, a, b in pairs if a != b]


def test_every_row_of_the_tables_is_shipped():
    assert sorted(ABLATIONS) == [name for name in recipe_names() if name.startswith("ablation-")]


@pytest.mark.parametrize(("name", "expected"), ABLATIONS.items())
def test_a_row_has_the_switches_of_the_papers_table(name, expected):
    assert switches(name) == expected


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_row_names_its_switches_and_changes_nothing_else(name):
    own = read_yaml(find_recipe(name).parent)["variants"][name]
    assert own.keys() == {"reproduces", "expect", "didi"}
    assert tuple(own["didi"]) == TRICKS
    row, full = load_recipe(DistillConfig, name), load_recipe(DistillConfig, "owt-169m-didi")
    tricks = {trick: getattr(full.didi, trick) for trick in TRICKS}
    assert same_training(replace(row, didi=replace(row.didi, **tricks)), full)


def test_cumulative_rows_add_one_trick_at_a_time():
    """The last one is added at sampling time."""
    added = [differing(*pair) for pair in pairwise(CUMULATIVE)]
    assert added == [[trick] for trick in TRICKS] + [[]]


def test_leave_one_out_rows_lack_one_trick_each():
    """The sixth is left out at sampling time."""
    *rows, full = LEAVE_ONE_OUT
    assert [differing(row, full) for row in rows] == [[trick] for trick in TRICKS] + [[]]


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_row_quotes_perplexity_and_entropy_at_five_budgets(name):
    found = load_recipe(DistillConfig, name).expect
    budgets, numbers = found.split(" NFEs: ")
    assert budgets == "perplexity/entropy at 8, 16, 32, 64, 128"
    assert re.fullmatch(r"(\d+(\.\d+)?/\d\.\d\d(, |$)){5}", numbers)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ablation-cumulative-5-regularisation", "ablation-without-guidance"),
        ("ablation-cumulative-6-guidance", "ablation-all-tricks"),
    ],
)
def test_rows_that_are_in_both_tables_agree(one, other):
    first, second = (load_recipe(DistillConfig, name) for name in (one, other))
    assert first.expect == second.expect
    assert same_training(first, second)


# `base`


@pytest.fixture
def write(tmp_path):
    """Write a recipe; its path."""

    def recipe(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return recipe


def test_a_recipe_on_a_base_is_the_base_with_its_changes(write):
    """Section by section; lists and null replace what was there."""
    path = write(
        "mine.yaml",
        "base: oracle-didi\n"
        "optim: {lr: 5e-5}\n"
        "discriminator: {trainable_blocks: null}\n"
        "watch: {budgets: [2]}\n"
        "expect: more\n",
    )
    changes = ["optim.lr=5e-5", "discriminator.trainable_blocks=null", "watch.budgets=[2]"]
    expected = load_recipe(DistillConfig, "oracle-didi", [*changes, "expect=more"])
    assert load_recipe(DistillConfig, path) == expected
    assert expected.optim.beta2 == 0.98


def test_a_base_may_be_a_file_beside_the_recipe_with_a_base_of_its_own(
    write, tmp_path, monkeypatch
):
    write("lower.yaml", "base: oracle-didi\ntrain: {steps: 700, batch_size: 32}\n")
    write("inner/upper.yaml", "base: ../lower.yaml\ntrain: {batch_size: 16}\n")
    path = write("mine.yaml", "base: inner/upper.yaml\n")
    monkeypatch.chdir(tmp_path.parent)
    recipe = load_recipe(DistillConfig, path)
    assert (recipe.train.steps, recipe.train.batch_size) == (700, 16)
    assert recipe.optim == load_recipe(DistillConfig, "oracle-didi").optim


def test_an_override_comes_after_the_base(write):
    path = write("mine.yaml", "base: oracle-didi\ntrain: {steps: 700}\n")
    assert load_recipe(DistillConfig, path, ["train.steps=900"]).train.steps == 900


@pytest.mark.parametrize("bases", [["a"], ["b", "a"], ["b", "c", "b"]])
def test_a_base_that_leads_back_is_refused(write, bases):
    paths = [
        write(f"{name}.yaml", f"base: {base}.yaml\n")
        for name, base in zip("abc", bases, strict=False)
    ]
    with pytest.raises(UserError, match=rf"{bases[-1]}\.yaml: `base` leads back to itself\.$"):
        load_recipe(DistillConfig, paths[0])


def test_an_unknown_base_is_refused_with_the_nearest(write):
    path = write("mine.yaml", "base: oracel-didi\n")
    with pytest.raises(UserError) as caught:
        load_recipe(DistillConfig, path)
    assert str(caught.value) == (
        "`oracel-didi` is neither a recipe file nor a shipped recipe. Did you mean `oracle-didi`?"
    )


@pytest.mark.parametrize("base", ["3", "[oracle-didi]", "null", "true"])
def test_a_base_that_is_no_name_is_refused(write, base):
    path = write("mine.yaml", f"base: {base}\n")
    with pytest.raises(UserError, match=r"mine.yaml: `base` is .*, but the name of a recipe is"):
        load_recipe(DistillConfig, path)


def test_a_teachers_recipe_is_no_base_of_a_distillation(write):
    path = write("mine.yaml", "base: oracle-teacher\nmethod: didi\n")
    with pytest.raises(UserError, match=r"mine.yaml: `model` is not a setting"):
        load_recipe(DistillConfig, path)


# Overrides


def test_overrides_reach_every_section():
    recipe = load_recipe(
        DistillConfig,
        "oracle-didi",
        [
            "didi.pi=[5,2]",
            "didi.regularisation=false",
            "discriminator.trainable_blocks=null",
            "optim.lr=1e-5",
            "reference.bank=banks/mine",
            "student=runs/earlier",
        ],
    )
    assert recipe.didi.pi == (5, 2)
    assert not recipe.didi.regularisation
    assert recipe.discriminator.trainable_blocks is None
    assert recipe.optim.lr == 1e-5
    assert recipe.reference.bank == "banks/mine"
    assert recipe.student == "runs/earlier"
    with pytest.raises(UserError) as caught:
        load_recipe(DistillConfig, "oracle-didi", ["didi.group_sise=4"])
    assert str(caught.value) == (
        "oracle-didi.yaml: `didi.group_sise` is not a setting. Did you mean `group_size`?"
    )
