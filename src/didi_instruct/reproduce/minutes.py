"""Training time: read from the files of a run, and turned into steps for equal minutes.

`--minutes` trains every student equally long. Short runs measure how fast each learns on this
machine; `paces.json` keeps these rates, since with another rate every student would be another
model. Drawing and compilation before the first step do not count.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.config.schema import read_yaml
from didi_instruct.config.train import PretrainConfig
from didi_instruct.data.files import write_atomic
from didi_instruct.distillation.bank import drawing_seconds
from didi_instruct.errors import UserError
from didi_instruct.evaluation.training_curves import read_log
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.methods import ALL_TRICKS, DISTILLATIONS, PATH_FIRST, STUDENTS
from didi_instruct.reproduce.running import RUN, folder_of
from didi_instruct.reproduce.scale import Scale, Training, role_of

LOG, RECIPE = "log.jsonl", "recipe.yaml"
SHARED = "shared-gpu"
"""A file beside a run that shared its GPU, at any time: its rates compare with nothing."""


def training_minutes(folder: Path) -> float | None:
    """Minutes of the steps of a run; None where the folder has no log of one, or shared its GPU.

    Wall-clock time of steps alone: evaluations, checkpoints and the drawing of a bank are not in a
    log's rates, and the first steps, in which kernels are compiled, count as no slower than those
    after them. Of steps that were made again after an interruption, the last time counts.
    """
    if not (folder / LOG).is_file() or (folder.parent / SHARED).exists():
        return None
    records, before, seconds = read_log(folder / LOG), 0.0, 0.0
    rated = [r for r in records if r.get("iterations_per_second") or r.get("tokens_per_second")]
    if not rated:
        return None
    size = None if "iterations_per_second" in rated[0] else _tokens_per_step(folder)
    rates = [r["tokens_per_second"] / size if size else r["iterations_per_second"] for r in rated]
    for record, rate in zip(rated, [max(rates[:2]), *rates[1:]], strict=True):
        seconds += (record["step"] - before) / rate
        before = record["step"]
    return seconds / 60


def bank_minutes(folder: Path) -> float | None:
    """Minutes in which the bank that a run reads was drawn, 0 where it reads none.

    None where nobody knows: the run shared its GPU, or the bank is gone.
    """
    if not (folder / RECIPE).is_file() or "method" not in read_yaml(folder / RECIPE):
        return 0.0
    config = load_recipe(DistillConfig, str(folder / RECIPE))
    if not config.reads_bank:
        return 0.0
    bank = Path(config.reference.bank) if config.reference.bank else folder / "bank"
    seconds = None if (folder.parent / SHARED).exists() else drawing_seconds(bank)
    return None if seconds is None else seconds / 60


def training_texts(folder: Path) -> int | None:
    """Texts of all steps together, a text counted as often as it was read or written."""
    if not (folder / RECIPE).is_file():
        return None
    kind: Any = DistillConfig if "method" in read_yaml(folder / RECIPE) else PretrainConfig
    config = load_recipe(kind, str(folder / RECIPE))
    texts: int = config.iterations * config.train.batch_size
    return texts


def learning(folder: Path) -> dict[str, Any]:
    """Count the steps that updated a student (`updates`) among all (`updates_of`).

    A student waits while its discriminator warms up or is at chance; one that always waited is its
    teacher. A discriminator waits while it is saturated. `at_chance` and `saturated` are shares of
    all steps. Empty for a run without a discriminator.
    """
    if not (folder / LOG).is_file():
        return {}
    told = {r["step"]: r for r in read_log(folder / LOG) if "student_waits" in r}
    waited, chance, saturated, before = 0.0, 0.0, 0.0, 0.0
    for _, record in sorted(told.items()):
        steps = record["step"] - before
        waited += steps * record["student_waits"]
        chance += steps * record.get("at_chance", 0.0)
        saturated += steps * record.get("disc_waits", 0.0)
        before = record["step"]
    if not before:
        return {}
    return {
        "updates": round(before - waited),
        "updates_of": round(before),
        "at_chance": chance / before,
        "saturated": saturated / before,
    }


def _tokens_per_step(folder: Path) -> int:
    """Tokens of a step of a pretraining run, whose log has tokens per second alone."""
    config = load_recipe(PretrainConfig, str(folder / RECIPE), ())
    return config.train.batch_size * config.model.row_length


KEPT = "paces.json"
"""Iterations per second by the key of the job that measured them."""
STEPS = 48
"""Of a run that is timed; the last quarter of it counts, after all that compiles."""
SHORT = (
    f"train.steps={STEPS}",
    f"train.log_every={STEPS // 4}",
    "train.eval_every=0",
    "train.save_every=1000000",
)
BANK = ("reference.rows=256", "reference.steps=16")
"""Overrides for a small bank: drawing it is not timed."""
STUDENT = (
    *SHORT,
    "watch.budgets=[]",
    *(f"{method.warmup}=2" for method in DISTILLATIONS.values() if method.warmup),
    *(f"{method.rounds}={STEPS}" for method in DISTILLATIONS.values() if method.rounds),
)
"""Overrides for a short training whose steps are as fast as those of a long one."""
DIDI = "didi"
AFTER = 0.2
"""Share of the minutes that token matching has for itself, its first student has the others: as the
recipes share them (on an H200, 150 steps of 0.41 s after 5,000 of 0.05)."""


def pace_jobs(scale: Scale) -> dict[str, Job]:
    """A short run of every student of the baselines, by role; with those that they start from."""
    didi = Training(ALL_TRICKS, scale.ablation)
    brief = replace(
        scale,
        models={role: _brief(role, training) for role, training in scale.models.items()},
        ablation=(*scale.ablation, *_student(didi)),
    )
    jobs = {role: brief.model(role) for role in STUDENTS if scale.has(role)}
    jobs[DIDI] = brief.ablated(ALL_TRICKS, 0)
    return {role: replace(job, name=f"pace-{role}") for role, job in jobs.items()}


def _brief(role: str, training: Training) -> Training:
    more = _student(training) if role in STUDENTS else SHORT
    if role == "sdtt":
        # Small steps reveal nothing of many texts, of which the teacher is not asked again: first
        # rounds are fast, last ones slow. That in the middle stands for all.
        config = _settings(training)
        more = (*more, f"sdtt.steps={config.sdtt.steps >> config.rounds.count // 2}")
    return Training(training.recipe, (*training.overrides, *more))


def _student(training: Training) -> tuple[str, ...]:
    """Overrides for a short training of a student; references drawn online stay as they are."""
    return STUDENT if _settings(training).reference.source == "online" else (*STUDENT, *BANK)


def _settings(training: Training) -> Any:
    job = Job(name="plan", does="distill", recipe=training.recipe, overrides=training.overrides)
    return job.settings()


def kept(jobs: Mapping[str, Job], out: Path) -> dict[str, float]:
    """Iterations per second that were measured before, by role."""
    rates = _read(out)
    return {role: rates[job.key] for role, job in jobs.items() if job.key in rates}


def measured(jobs: Mapping[str, Job], out: Path) -> dict[str, float]:
    """Iterations per second of finished runs, by role; from now on they are kept."""
    found = {role: rate_of(folder_of(job, out) / RUN) for role, job in jobs.items()}
    rates = _read(out) | {job.key: found[role] for role, job in jobs.items()}
    write_atomic(out / KEPT, json.dumps(rates, indent=1).encode())
    return found


def _read(out: Path) -> dict[str, float]:
    try:
        rates = json.loads((out / KEPT).read_text(encoding="utf-8"))
        return {str(key): float(rate) for key, rate in rates.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{out / KEPT} cannot be read: delete it to measure again.") from error


def rate_of(run: Path) -> float:
    """Iterations per second of a run at its end, by its log."""
    rates = [record.get("iterations_per_second") for record in read_log(run / LOG)]
    known = [rate for rate in rates if rate]
    if not known:
        raise UserError(f"{run} has no rates of its steps: delete its folder and begin again.")
    return float(known[-1])


def with_minutes(scale: Scale, minutes: float, paces: Mapping[str, float]) -> Scale:
    """The scale with as many steps of every student as fit into so many minutes.

    Token matching starts from a student of its own, so that both together take no longer.
    """

    def lasting(role: str, share: float = 1.0) -> Training:
        training = scale.models[role]
        more = schedule(training, int(60 * minutes * share * paces[role]))
        return Training(training.recipe, (*training.overrides, *more))

    models = {**scale.models, **{r: lasting(r) for r in STUDENTS if scale.has(r)}}
    if scale.has("path") and scale.has("token-matching"):
        models[PATH_FIRST] = lasting("path", 1 - AFTER)
        models["token-matching"] = lasting("token-matching", AFTER)
    more = schedule(Training(ALL_TRICKS, scale.ablation), int(60 * minutes * paces[DIDI]))
    ablation = (*scale.ablation, *more)
    return replace(scale, models=models, ablation=ablation, minutes=minutes)


def expected(scale: Scale, minutes: float, out: Path) -> Scale:
    """The scale before the paces are measured: those that are not known yet are a guess.

    What is trained that long is right, how many steps that takes is not.
    """
    jobs = pace_jobs(scale)
    return with_minutes(scale, minutes, dict.fromkeys(jobs, 1.0) | kept(jobs, out))


def minutes_of(job: Job, scale: Scale) -> float | None:
    """Minutes that a student of a scale is to train; None where its steps are given."""
    if scale.minutes is None or job.does != "distill":
        return None
    shares = {PATH_FIRST: 1 - AFTER, "token-matching": AFTER} if scale.has(PATH_FIRST) else {}
    return scale.minutes * shares.get(role_of(job), 1.0)


def schedule(training: Training, steps: int) -> tuple[str, ...]:
    """Overrides for so many steps, or a few less: as many rounds, no larger a share of waiting."""
    config = _settings(training)
    method = DISTILLATIONS[config.method]

    def usual(setting: str) -> int:
        section, key = setting.split(".")
        value: int = getattr(getattr(config, section), key)
        return value

    rounds = config.rounds.count if method.rounds else 1
    each = max(1 if method.rounds else 2, steps // rounds)
    found = [f"train.steps={rounds * each}"]
    if method.rounds:
        found.append(f"{method.rounds}={each}")
    waits = ["optim.warmup", *([method.warmup] if method.warmup else [])]
    for name in waits:
        wait = usual(name)
        if wait:
            share = min(wait, max(1, wait * rounds * each // config.iterations))
            found.append(f"{name}={share}")
            if config.warmup_on_top and name == method.warmup:
                found[0] = f"train.steps={max(1, each - share)}"
    return tuple(found)
