"""Checks before a run: files, hub, extras, disk, GPU, tokenizers that match. Nothing is fetched."""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from didi_instruct.data.manifest import Manifest, is_prepared
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.readers import ReadOptions, read_pieces
from didi_instruct.data.sources import Meter, find_sources
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.corpora import CORPORA
from didi_instruct.hub.sources import find_shipped, shipped
from didi_instruct.models.checkpoint import is_ours
from didi_instruct.models.dit import count_parameters
from didi_instruct.models.foreign.places import locate
from didi_instruct.reproduce.add_tokenizer import ADOPT, here
from didi_instruct.reproduce.costs import cost_of, model_of
from didi_instruct.reproduce.experiments import jobs_of
from didi_instruct.reproduce.jobs import WORDS, Job, in_order
from didi_instruct.reproduce.lines import Experiment
from didi_instruct.reproduce.minutes import kept, minutes_of, pace_jobs
from didi_instruct.reproduce.running import bank_of, finished
from didi_instruct.reproduce.scale import Given, Scale
from didi_instruct.reproduce.scales import words_of

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(@[\w./-]+)?")
FETCH = "fetch it with `hf download`, or check the network and the name"
TIMEOUT = 5.0
"""Seconds that the hub has to answer."""
STATE_BYTES, CHECKPOINTS, WEIGHT_BYTES = 16, 3, 4
"""Bytes of a parameter in a checkpoint (weights, average, two moments), how many there are of them,
and its bytes in a model alone."""
TOKENIZERS = ("tokenizer.json", "vocab.json")
"""Files, one of which a tokenizer on the hub has."""
PACKAGES = {
    "matplotlib": ("reproduce", "figures"),
    "optuna": ("reproduce", "rgas-anova"),
    "sklearn": ("reproduce", "rgas-anova"),
    "scipy": ("reproduce", "rgas-anova"),
    "mauve": ("eval", "MAUVE"),
    "nltk": ("eval", "Self-BLEU of words"),
    "datasets": ("data", "data of the hub"),
}
"""Extra that brings each package, and what it is for."""
OPENWEBTEXT = 60e9
"""Bytes of the corpus, downloaded and as tokens."""


@dataclass(frozen=True, slots=True)
class Check:
    """A requirement of a run, and its remedy if it is missing."""

    what: str
    is_there: bool
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """A job before it runs."""

    job: Job
    is_done: bool
    gpu_hours: float | None


def plan(
    items: Sequence[Experiment], scale: Scale, out: Path, paced: Sequence[Planned] = ()
) -> list[Planned]:
    """All jobs, with what is left to do and what it may cost; those of `paced` come first.

    Of those that share a bank of texts, the first draws it.
    """
    planned, drawn = list(paced), set[str]()
    known = {one.job.key for one in paced}
    for job in (job for job in jobs_of(items, scale, out) if job.key not in known):
        bank = _bank(job)
        cost = cost_of(job, draws_bank=bank not in drawn)
        drawn |= {bank} if bank else set()
        hours, minutes = cost.gpu_hours, minutes_of(job, scale)
        if minutes is not None:  # and its bank, as far as that is known
            hours = minutes / 60 + (replace(cost, training=0.0).gpu_hours or 0.0)
        planned.append(Planned(job, finished(job, out) is not None, hours))
    return planned


def plan_paces(scale: Scale, out: Path) -> list[Planned]:
    """Short runs that measure paces, and what they need; those whose rate is kept are done."""
    jobs = pace_jobs(scale)
    rates = kept(jobs, out)
    missing = in_order([job for role, job in jobs.items() if role not in rates])
    return [
        *(Planned(jobs[role], True, 0.0) for role in rates),
        *(Planned(job, finished(job, out) is not None, cost_of(job).gpu_hours) for job in missing),
    ]


def _bank(job: Job) -> str | None:
    config = job.settings() if job.does == "distill" else None
    return bank_of(job, config) if config else None


def checks(items: Sequence[Experiment], scale: Scale, out: Path) -> Iterator[Check]:
    """Everything that the items need at this scale."""
    jobs = [job for job in jobs_of(items, scale, out) if finished(job, out) is None]
    sources = {
        given
        for job in jobs
        for role, given in job.inputs.items()
        if isinstance(given, str) and role != WORDS
    }
    sources |= {s for job in jobs if job.trains and (s := job.settings().data.source)}
    for source in sorted(sources):
        yield _source(source)
    for words in sorted({words for job in jobs if (words := _words(job))} - sources):
        yield _source(words, what="tokenizer")
    corpora = _corpora(jobs, scale)
    for source in sorted(corpora):
        yield _source(source, "fetch it with `hf download`, or give files with --corpora")
    yield _together(scale)
    yield from _extras(items, scale, sources | corpora)
    yield _disk(jobs, sources, out)
    if scale.judge != "oracle":
        yield _gpu(scale)


def check_given(given: Given) -> None:
    """Refuse missing files before any job starts."""
    for flag in ("data", "judge", "teacher", "corpora", "tasks", "folding"):
        value = getattr(given, flag)
        if value is None or value == "oracle" or Path(value).exists() or value in shipped():
            continue
        on_hub = value.startswith("hf:") if flag == "data" else _HUB_ID.fullmatch(value)
        if flag in ("corpora", "tasks") or not on_hub:
            raise UserError(f"--{flag} {value}: no such file or folder.")


def require_gpu(scale: Scale, device: str | None = None) -> None:
    """Refuse to start days of work on a CPU, unless `--device cpu` asks for it at scale small."""
    if scale.judge == "oracle" or _gpu(scale).is_there:  # that language is for a CPU
        return
    if scale.name == "small" and device == "cpu":
        return
    size, more = ("169M", "") if scale.name == "paper" else ("10M", "--device cpu, ")
    raise UserError(
        f"--scale {scale.name} trains models of {size} parameters and needs a GPU, but torch sees "
        f"none: use a machine with one, {more}a smaller --scale, --dry-run to see what it would "
        "take, or --write-only for tables of what has finished."
    )


def _together(scale: Scale) -> Check:
    """`check_together` as a check."""
    try:
        check_together(scale)
    except UserError as error:
        return Check("texts and models of one tokenizer", False, str(error))
    return Check(f"texts and models of one tokenizer{_lent(scale)}", True)


def _lent(scale: Scale) -> str:
    """Note on the tokenizer that is given to a teacher without one."""
    teacher = scale.teacher
    if isinstance(teacher, str) or teacher.does != ADOPT:
        return ""
    source, words = str(teacher.inputs["model"]), teacher.inputs[WORDS]
    folder = here(source)
    bare = False
    if folder is not None:
        with suppress(UserError):  # what lies there is told by the model's own check
            bare = locate(folder).tokenizer_folder is None
    told = f"which {source} does not bring" if bare else f"unless {source} brings its own"
    return f" ({words}, {told})"


def _corpora(jobs: Sequence[Job], scale: Scale) -> set[str]:
    """Corpora that zero-shot likelihood reads from the hub where no folder was given."""
    if scale.corpora is not None or not any(job.does == "zero_shot" for job in jobs):
        return set()
    return {f"hf:{corpus.hub}" for corpus in CORPORA.values()}


def _words(job: Job) -> str | None:
    """The tokenizer that a run reads texts with, where it has to be there before.

    A student reads with its teacher's; prepared texts bring theirs; `bpe:N` is learnt.
    """
    if job.does == ADOPT:
        return str(job.inputs[WORDS])
    data = job.settings().data if job.does == "pretrain" else None
    if data is None or data.source == "oracle":
        return None
    if data.source is not None and is_prepared(Path(data.source)):  # None: another job writes it
        return None
    return None if data.tokenizer.startswith("bpe:") else str(data.tokenizer)


def _source(source: str, remedy: str = FETCH, what: str = "model") -> Check:
    """A file, a folder, or a name on the hub."""
    if source in ("oracle", "bytes", "esm") or source in shipped():
        return Check(f"{source} (built in)", True)
    if Path(source).exists():
        return Check(source, True)
    kind = "dataset" if source.startswith("hf:") else what
    name = source.removeprefix("hf:").split(":")[0].split("@")[0]
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return Check(source, False, "no such file or folder: check the path")
    problem = _hub(name, kind)
    return Check(f"{source} ({kind} on the hub)", not problem, f"{problem}: {remedy}")


def _hub(name: str, kind: str) -> str:
    """Reason why a name is neither on the hub nor in its local cache; empty if it is."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    files = TOKENIZERS if kind == "tokenizer" else ("config.json",)
    of = "dataset" if kind == "dataset" else "model"
    if any(isinstance(try_to_load_from_cache(name, file, repo_type=of), str) for file in files):
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


def _extras(items: Sequence[Experiment], scale: Scale, sources: set[str]) -> Iterator[Check]:
    asked = {package for item in items for package in item.packages}
    if "mmseqs" in asked:
        yield Check("mmseqs", shutil.which("mmseqs") is not None, "apt install mmseqs2")
    asked |= {"matplotlib"}
    asked |= {"datasets"} if any(source.startswith("hf:") for source in sources) else set()
    asked -= set() if scale.measures_mauve else {"mauve"}
    for package, (extra, use) in PACKAGES.items():
        if package in asked:
            remedy = f'pip install "didi-instruct[{extra}]"'
            yield Check(f"{package} (for {use})", find_spec(package) is not None, remedy)


def _disk(jobs: Sequence[Job], sources: set[str], out: Path) -> Check:
    """Room for checkpoints and data, about."""
    needed = OPENWEBTEXT if any(s.startswith("hf:") for s in sources) else 0.0
    for job in jobs:
        model = model_of(job) if job.trains or job.does == ADOPT else None
        each = STATE_BYTES * CHECKPOINTS if job.trains else WEIGHT_BYTES
        needed += each * count_parameters(model) if model else 0
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


def check_together(scale: Scale) -> None:
    """Refuse a teacher, texts and a judge with different tokenizers, and unreadable texts.

    What is trained here has the teacher's tokenizer; prepared texts have one of their own.
    """
    if scale.is_of_proteins:  # whose residues are letters in every tokenizer
        return
    teacher = scale.teacher if isinstance(scale.teacher, str) else None
    own = _hash(teacher) if teacher else None
    if teacher and own is None:
        raise UserError(
            f"--teacher {teacher}: has no tokenizer.json here, and all models of a table need one "
            "tokenizer: give a folder that has it."
        )
    if scale.name == "toy":
        if own not in (None, OracleLanguage.default().tokenizer.hash):
            raise UserError(
                f"--teacher {teacher}: does not speak the oracle language of --scale toy: leave it "
                "out, or use --scale small with --data."
            )
        return
    words = _words_of_text(scale.data) if scale.data else None
    if words and own not in (None, words):
        raise UserError(
            f"--data {scale.data}: was prepared with another tokenizer than the teacher's "
            f"({teacher}): prepare it with `didi data prepare --tokenizer {words_of(str(teacher))}`"
            ", or give the text itself."
        )
    _check_judge(scale, own or words)


def _words_of_text(data: str) -> str | None:
    """Hash of the tokenizer of prepared texts; of others there must be one, and None is told."""
    if is_prepared(Path(data)):
        return Manifest.read(Path(data)).tokenizer.hash
    if data.startswith("hf:"):
        return None
    sources = find_sources(data)
    if len(sources) == 1 and sources[0].kind == "text":
        raise UserError(
            f"--data {data}: a plain text file is one text as a whole: give .jsonl, a folder of "
            "files, or what `didi data prepare --rows document --documents line` makes of it."
        )
    for source in sources:
        if any(True for _ in read_pieces(source, ReadOptions(), Meter())):
            return None
    raise UserError(f"--data {data}: holds no text: give a file or folder that does.")


def _check_judge(scale: Scale, words: str | None) -> None:
    """A judge of ours reads tokens; a causal LM reads texts, whatever they were made of."""
    judge = scale.judge
    if not isinstance(judge, str) or not is_ours(find_shipped(judge) or Path(judge)):
        return
    if words not in (None, _hash(judge)):
        raise UserError(
            f"--judge {judge}: has another tokenizer than the models it would judge: give one of "
            "the same tokenizer or a causal LM of texts, or leave it out."
        )


def _hash(source: str) -> str | None:
    words = words_of(source)
    return Tokenizer.load(Path(words)).hash if words else None
