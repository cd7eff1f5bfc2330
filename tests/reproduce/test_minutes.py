"""As many steps of each student as fit into the same minutes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from didi_instruct.errors import UserError
from didi_instruct.reproduce import experiments
from didi_instruct.reproduce.baseline_rows import WAYS
from didi_instruct.reproduce.baselines import BASELINE_ITEMS
from didi_instruct.reproduce.experiments import lasting
from didi_instruct.reproduce.jobs import in_order
from didi_instruct.reproduce.methods import METHODS, PATH_FIRST, STUDENTS
from didi_instruct.reproduce.minutes import (
    AFTER,
    DIDI,
    STEPS,
    expected,
    kept,
    measured,
    minutes_of,
    pace_jobs,
    with_minutes,
)
from didi_instruct.reproduce.preflight import plan, plan_paces
from didi_instruct.reproduce.running import RUN, folder_of
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale

from .kit import measuring_jobs

PACES = {
    "sdtt": 3.0,
    "dimo": 1.5,
    "duo": 5.0,
    "jump": 0.75,
    "path": 20.0,
    "token-matching": 1.2,
    DIDI: 2.0,
}


@pytest.fixture
def small(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a b"}\n')
    return find_scale("small", Given(data=str(text), teacher="somewhere"))


def ways(scale, seed=0):
    """Jobs of all ways to sample, of one seed."""
    jobs = measuring_jobs(BASELINE_ITEMS[0], scale)
    return [job for job in jobs if "method" in job.options and job.options["seed"] == seed]


def steps_of(job):
    return job.settings().iterations


def test_every_student_learns_for_as_long(small):
    scale = with_minutes(small, 1.5, PACES)
    for role in ("dimo", "jump", "path"):
        assert steps_of(scale.model(role)) == int(90 * PACES[role])
    assert steps_of(scale.ablated("ablation-all-tricks", 0)) == 180
    for role, settings in (("sdtt", "sdtt"), ("duo", "duo")):
        before, after = (each.model(role).settings() for each in (small, scale))
        rounds = before.train.steps // getattr(before, settings).iterations
        each = getattr(after, settings).iterations
        assert after.train.steps == rounds * each
        assert after.train.steps == pytest.approx(90 * PACES[role], rel=0.03)


@pytest.mark.parametrize("minutes", [0.02, 0.5, 30])
def test_a_student_waits_for_no_larger_a_share_of_its_steps(small, minutes):
    scale = with_minutes(small, minutes, PACES)
    pairs = [
        *((small.model(role), scale.model(role)) for role in ("dimo", "jump", "token-matching")),
        tuple(each.ablated("ablation-all-tricks", 0) for each in (small, scale)),
    ]
    for before, after in ([job.settings() for job in pair] for pair in pairs):
        assert after.warmup <= before.warmup
        assert after.warmup < after.iterations
        most = before.warmup / before.iterations
        assert after.warmup == 1 or after.warmup / after.iterations <= most


@pytest.mark.parametrize("minutes", [0.02, 0.5, 30])
def test_rates_rise_for_no_larger_a_share_of_the_steps(small, minutes):
    """Else short runs of those that warm up, SDTT, DUO and path, learn less than others do."""
    scale, warmed = with_minutes(small, minutes, PACES), 0
    usual = replace(small, models={**small.models, PATH_FIRST: small.models["path"]})
    for role in (*STUDENTS, PATH_FIRST):
        before, after = (each.model(role).settings() for each in (usual, scale))
        most = before.optim.warmup / before.train.steps
        assert after.optim.warmup <= before.optim.warmup
        assert after.optim.warmup <= 1 or after.optim.warmup / after.train.steps <= most
        warmed += after.optim.warmup > 0
    assert warmed == 4


def test_a_chain_of_two_students_takes_no_longer(small):
    scale = with_minutes(small, 1.5, PACES)
    last = scale.model("token-matching", 1)
    first = last.inputs["teacher"]
    assert first.key == scale.model(PATH_FIRST, 1).key != scale.model("path", 1).key
    seconds = steps_of(last) / PACES["token-matching"] + steps_of(first) / PACES["path"]
    assert seconds == pytest.approx(90, rel=0.02)
    assert steps_of(last) == int(90 * AFTER * PACES["token-matching"])
    assert METHODS["token-matching"].starts_from[0] == PATH_FIRST
    (asked,) = [job.inputs for job in ways(scale) if "token-matching" in job.inputs]
    assert asked[PATH_FIRST].key == scale.model(PATH_FIRST, 0).key


def test_without_minutes_nothing_changes(small):
    assert not any(PATH_FIRST in job.inputs for job in measuring_jobs(BASELINE_ITEMS[0], small))
    assert small.model("token-matching").inputs["teacher"].key == small.model("path").key


def test_runs_that_are_timed_are_short_and_as_the_others(small):
    jobs = pace_jobs(small)
    assert set(jobs) == set(PACES)
    for role, job in jobs.items():
        config = job.settings()
        assert config.train.steps == STEPS
        full = small.ablated("ablation-all-tricks", 0) if role == DIDI else small.model(role)
        assert config.train.batch_size == full.settings().train.batch_size
        assert config.method == full.settings().method
    matching = jobs["token-matching"].inputs["teacher"]
    assert matching.key == jobs["path"].key
    assert steps_of(jobs["duo"].inputs["teacher"]) == STEPS


def test_sdtt_is_paced_in_the_round_in_the_middle(small):
    """Of five, from 128 steps to 8 (of which the last learns 4): the third, of 32."""
    full, brief = small.model("sdtt").settings(), pace_jobs(small)["sdtt"].settings()
    assert (full.sdtt.steps, full.rounds.count) == (128, 5)
    assert (brief.sdtt.steps, brief.rounds.count) == (32, 1)


def write_rates(job, out: Path, rates):
    run = folder_of(job, out) / RUN
    run.mkdir(parents=True)
    lines = [{"step": 12 * (n + 1), "iterations_per_second": r} for n, r in enumerate(rates)]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_last_rate_counts(small, tmp_path):
    job = pace_jobs(small)["jump"]
    write_rates(job, tmp_path, [0.1, 3.0, 2.5, None])
    assert measured({"jump": job}, tmp_path) == {"jump": 2.5}


def test_no_rate_is_no_pace(small, tmp_path):
    job = pace_jobs(small)["jump"]
    write_rates(job, tmp_path, [None])
    with pytest.raises(UserError, match="begin again"):
        measured({"jump": job}, tmp_path)


class Board:
    def show(self, standings, changed):
        pass


def test_a_pace_that_fails_stops_before_anything_is_trained(small, tmp_path, monkeypatch):
    def fails(job, out, **options):
        raise UserError("no teacher there")

    monkeypatch.setattr("didi_instruct.reproduce.grid.run_job", fails)
    with pytest.raises(UserError, match="pace-.*no teacher there"):
        lasting(small, 1.0, tmp_path, board=Board())


def test_paces_are_measured_once_for_a_folder(small, tmp_path):
    """Another pace would make other students of those that are there."""
    jobs = pace_jobs(small)
    assert kept(jobs, tmp_path) == {}
    for role, rate in PACES.items():
        write_rates(jobs[role], tmp_path, [rate])
    assert measured(jobs, tmp_path) == PACES == kept(jobs, tmp_path)
    shutil.rmtree(tmp_path / "jobs")
    scale = lasting(small, 1.0, tmp_path, board=Board())
    assert steps_of(scale.model("jump")) == 45, "nothing ran"
    (tmp_path / "paces.json").write_text("[1]")
    with pytest.raises(UserError, match="paces.json cannot be read: delete it"):
        lasting(small, 1.0, tmp_path, board=Board())


def test_paces_are_measured_and_used(small, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(
        experiments.Grid, "run", lambda grid: ran.extend(s.job for s in grid.standings)
    )
    monkeypatch.setattr(experiments, "measured", lambda jobs, out: PACES)
    scale = lasting(small, 1.0, tmp_path, board=Board())
    assert {job.name for job in ran} >= {f"pace-{role}" for role in PACES}
    assert steps_of(scale.model("jump")) == 45


def test_before_paces_are_known_hours_are(small, tmp_path):
    """Two seeds of seven students; of token matching a tenth, after the nine of its first one."""
    scale = expected(small, 30.0, tmp_path)
    planned = plan(BASELINE_ITEMS, scale, tmp_path)
    hours = sum(one.gpu_hours for one in planned if one.job.does == "distill")
    assert hours == pytest.approx(2 * 7 * 0.5)
    minutes = {
        job.name: minutes_of(job, scale)
        for job in in_order(measuring_jobs(BASELINE_ITEMS[0], scale))
        if job.does == "distill"
    }
    assert minutes["token-matching-seed0"] + minutes["path-first-seed0"] == pytest.approx(30)
    others = {n: m for n, m in minutes.items() if not n.startswith(("token", "path-first"))}
    assert set(others.values()) == {30.0}
    assert len(minutes) == 2 * 8
    assert minutes_of(small.model("jump"), small) is None


def test_paces_that_are_kept_are_done(small, tmp_path):
    jobs = pace_jobs(small)
    (tmp_path / "paces.json").write_text(json.dumps({jobs["jump"].key: 0.5}))
    states = {one.job.name: one.is_done for one in plan_paces(small, tmp_path)}
    assert states.pop("pace-jump")
    assert not any(states.values())
    assert steps_of(expected(small, 1.0, tmp_path).model("jump")) == 30


def test_students_learn_alone_and_are_drawn_from_at_the_same_time(small):
    """Their minutes are compared, so nothing may run beside them; samples have no such need."""
    jobs = in_order(measuring_jobs(BASELINE_ITEMS[0], with_minutes(small, 1.5, PACES)))
    assert all(job.timed for job in jobs if job.trains)
    drawn = [job for job in jobs if job.name.startswith("baselines-")]
    assert len(drawn) == len(WAYS) * len(small.seeds)
    assert not any(job.timed for job in drawn)
    speeds = [job for job in jobs if job.name.startswith("speed-")]
    roles = ("teacher", "ar", "dimo", "duo-teacher", "duo", "didi")
    assert [job.name for job in speeds] == [f"speed-{role}" for role in roles]
    assert all(job.timed for job in speeds)


def test_mauve_may_be_left_out(tmp_path):
    text, judge = tmp_path / "text.jsonl", tmp_path / "judge"
    text.write_text('{"text": "a b"}\n')
    judge.mkdir()
    for wanted in (True, False):
        given = Given(data=str(text), teacher="somewhere", judge=str(judge), mauve=wanted)
        scale = find_scale("small", given)
        (job, *_) = measuring_jobs(BASELINE_ITEMS[0], scale)
        assert ("mauve" in job.options["metrics"]) == scale.measures_mauve == wanted
        assert scale.causal_judge
        assert experiments.command(BASELINE_ITEMS[0], scale).endswith(" --no-mauve") != wanted


def test_the_command_of_a_table_says_all_that_was_asked_for(small):
    options = {"temperature": 0.8, "collapse_spaces": True, "end": "<s>"}
    scale = replace(with_minutes(small, 1.5, PACES), judge_options=options)
    words = experiments.command(BASELINE_ITEMS[0], scale)
    assert words.endswith(
        " --judge-temperature 0.8 --judge-collapse-spaces --judge-end '<s>' --minutes 1.5"
    )
