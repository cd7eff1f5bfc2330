"""Distillation wins on the oracle language, where path KL and latents are exact."""

import numpy as np
import pytest

import didi_instruct as didi
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.evaluation.quick_eval import oracle_facts, oracle_judge, path_gaps
from didi_instruct.evaluation.stats import mean_and_error

SAMPLES = 3072
CONTROLS = [
    *({"temperature": t} for t in (1.0, 0.9, 0.8, 0.7, 0.6)),
    {"top_p": 0.95},
    {"temperature": 0.9, "top_p": 0.98},
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A teacher and its student, as two commands would make them; seed 0."""
    folder = tmp_path_factory.mktemp("runs")
    teacher = ["train.steps=400", "train.save_every=400", "train.eval_sequences=64"]
    didi.pretrain("oracle-teacher", out=folder / "teacher", overrides=teacher)
    settings = (
        "train.steps=90 train.batch_size=64 train.ema=0.9 token_matching.anchor=0.2 "
        "train.save_every=90 train.eval_every=0 watch.budgets=[] train.eval_sequences=64"
    )
    didi.distill(
        "oracle-token-matching",
        teacher=folder / "teacher",
        out=folder / "student",
        overrides=settings.split(),
    )
    return didi.load(folder / "teacher"), didi.load(folder / "student")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, 8])
def test_the_student_beats_the_teachers_best_setting_without_collapse(runs, steps):
    """Path KL at least 3 standard errors lower, latent entropy at least 90% of the truth.

    The teacher's best setting is chosen with 512 samples and other noise, then compared on the same
    noise as the student, pair by pair. Without any gain the first assertion would hold in 0.1% of
    seeds.
    """
    teacher, student = runs
    judge = oracle_judge(OracleLanguage.default())

    def gaps(model, num, seed, **settings):
        drawn = model.draw(num, steps=steps, seed=seed, sampler="ancestral", **settings)
        return path_gaps(drawn, judge), drawn.tokens

    scores = [gaps(teacher, 512, 1, **control)[0].mean() for control in CONTROLS]
    best = CONTROLS[int(np.argmin(scores))]
    ours, tokens = gaps(student, SAMPLES, 2)
    difference, error = mean_and_error(ours - gaps(teacher, SAMPLES, 2, **best)[0])
    assert difference < -3 * error, (best, difference, error)
    assert oracle_facts(tokens)["latent_share"] >= 0.9
