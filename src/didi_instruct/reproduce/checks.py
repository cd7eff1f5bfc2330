"""What a run needs before it starts: files, hub, extras, disk, GPU. Nothing is fetched."""

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from didi_instruct.api.shipped import shipped
from didi_instruct.errors import UserError
from didi_instruct.evaluation.corpora import CORPORA
from didi_instruct.models.build import count_parameters
from didi_instruct.reproduce.costs import cost_of, model_of
from didi_instruct.reproduce.items import Item
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.making import jobs_of
from didi_instruct.reproduce.running import bank_of, finished
from didi_instruct.reproduce.scale import Given, Scale
from didi_instruct.reproduce.together import check_together

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(@[\w./-]+)?")
FETCH = "fetch it with `hf download`, or check the network and the name"
TIMEOUT = 5.0
"""Seconds that the hub has to answer."""
STATE_BYTES, CHECKPOINTS = 16, 3
"""Bytes of a parameter in a checkpoint (weights, average, two moments), and how many there are."""
OPENWEBTEXT = 60e9
"""Bytes of the corpus, downloaded and as tokens."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is needed, and whether it is there."""

    what: str
    is_there: bool
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """A job before it runs."""

    job: Job
    is_done: bool
    gpu_hours: float | None


def plan(items: Sequence[Item], scale: Scale, out: Path) -> list[Planned]:
    """All jobs, with what is left to do and what it may cost.

    Of those that share a bank of texts, the first draws it.
    """
    planned, drawn = [], set[str]()
    for job in jobs_of(items, scale, out):
        bank = _bank(job)
        hours = cost_of(job, draws_bank=bank not in drawn).gpu_hours
        drawn |= {bank} if bank else set()
        planned.append(Planned(job, finished(job, out) is not None, hours))
    return planned


def _bank(job: Job) -> str | None:
    config = job.settings() if job.does == "distill" else None
    return bank_of(job, config) if config else None


def checks(items: Sequence[Item], scale: Scale, out: Path) -> Iterator[Check]:
    """Everything that the items need at this scale."""
    jobs = [job for job in jobs_of(items, scale, out) if finished(job, out) is None]
    sources = {given for job in jobs for given in job.inputs.values() if isinstance(given, str)}
    sources |= {s for job in jobs if job.trains and (s := job.settings().data.source)}
    for source in sorted(sources):
        yield _source(source)
    corpora = _corpora(jobs, scale)
    for source in sorted(corpora):
        yield _source(source, "fetch it with `hf download`, or give files with --corpora")
    yield _together(scale)
    yield from _extras(items, scale, sources | corpora)
    yield _disk(jobs, sources, out)
    if scale.name != "toy":
        yield _gpu(scale)


def check_given(given: Given) -> None:
    """Refuse files that are not there, before any job fails for the want of them."""
    for flag in ("data", "judge", "teacher", "corpora"):
        value = getattr(given, flag)
        if value is None or value == "oracle" or Path(value).exists() or value in shipped():
            continue
        on_hub = value.startswith("hf:") if flag == "data" else _HUB_ID.fullmatch(value)
        if flag == "corpora" or not on_hub:
            raise UserError(f"--{flag} {value}: no such file or folder.")


def require_gpu(scale: Scale, device: str | None = None) -> None:
    """Refuse to begin days or weeks of work on a CPU; who asks for one has `small` on it."""
    if scale.name == "toy" or _gpu(scale).is_there:
        return
    if scale.name == "small" and device == "cpu":
        return
    size, more = ("169M", "") if scale.name == "paper" else ("10M", "--device cpu, ")
    raise UserError(
        f"--scale {scale.name} trains models of {size} parameters and needs a GPU, but torch sees "
        f"none: use a machine with one, {more}a smaller --scale, or --dry-run to see what it would "
        "take."
    )


def _together(scale: Scale) -> Check:
    """The same as a check."""
    try:
        check_together(scale)
    except UserError as error:
        return Check("texts and models of one tokenizer", False, str(error))
    return Check("texts and models of one tokenizer", True)


def _corpora(jobs: Sequence[Job], scale: Scale) -> set[str]:
    """What zero-shot likelihood reads from the hub where no folder was given."""
    if scale.corpora is not None or not any(job.does.endswith(":zero_shot") for job in jobs):
        return set()
    return {f"hf:{corpus.hub.name}" for corpus in CORPORA.values()}


def _source(source: str, remedy: str = FETCH) -> Check:
    """A file, a folder, or a name on the hub."""
    if source == "oracle" or source in shipped():
        return Check(f"{source} (built in)", True)
    if Path(source).exists():
        return Check(source, True)
    kind = "dataset" if source.startswith("hf:") else "model"
    name = source.removeprefix("hf:").split(":")[0].split("@")[0]
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return Check(source, False, "no such file or folder: check the path")
    problem = _hub(name, kind)
    return Check(f"{source} ({kind} on the hub)", not problem, f"{problem}: {remedy}")


def _hub(name: str, kind: str) -> str:
    """Why a name cannot be had from the hub or from its cache here; empty where it can."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json", repo_type=kind), str):
        return ""
    api = HfApi()
    try:
        if kind == "dataset":
            api.dataset_info(name, timeout=TIMEOUT)
        else:
            api.model_info(name, timeout=TIMEOUT)
    except Exception as error:  # whatever the network's libraries raise
        return f"not reached ({type(error).__name__})"
    return ""


def _extras(items: Sequence[Item], scale: Scale, sources: set[str]) -> Iterator[Check]:
    names = {item.name for item in items}
    wanted = [("matplotlib", "reproduce", "figures", True)]
    wanted += [
        ("optuna", "reproduce", "rgas-anova", "rgas-anova" in names),
        ("scipy", "reproduce", "rgas-anova", "rgas-anova" in names),
        (
            "mauve",
            "eval",
            "MAUVE",
            scale.measures_mauve and bool(names & {"diversity", "baselines"}),
        ),
        ("datasets", "data", "data of the hub", any(s.startswith("hf:") for s in sources)),
    ]
    for package, extra, use, needed in wanted:
        if needed:
            remedy = f'pip install "didi-instruct[{extra}]"'
            yield Check(f"{package} (for {use})", find_spec(package) is not None, remedy)


def _disk(jobs: Sequence[Job], sources: set[str], out: Path) -> Check:
    """Room for checkpoints and data, about."""
    needed = OPENWEBTEXT if any(s.startswith("hf:") for s in sources) else 0.0
    for job in jobs:
        model = model_of(job) if job.trains else None
        needed += STATE_BYTES * CHECKPOINTS * count_parameters(model) if model else 0
    place = next(folder for folder in (out.resolve(), *out.resolve().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    return Check(
        f"disk: about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free",
        free > needed,
        "make room, or choose another --out",
    )


def _gpu(scale: Scale) -> Check:
    import torch

    found = torch.cuda.is_available()
    names = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if found else []
    )
    what = f"GPU ({', '.join(names)})" if names else "GPU"
    return Check(what, found, f"--scale {scale.name} is for a GPU: torch sees none")
