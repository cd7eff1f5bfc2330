"""The three scales of a reproduction: models, data, duration and judge.

`toy` is the oracle language on a CPU, in minutes: the judge is the truth, so a table shows whether
the machinery works and not how large models behave. `small` is stories on one GPU. `paper` is the
paper's own setting: 169M and 424M parameters, OpenWebText, GPT-2 Large as judge.
"""

from dataclasses import replace
from pathlib import Path

from didi_instruct.data.manifest import is_prepared
from didi_instruct.errors import UserError
from didi_instruct.hub.sources import find_shipped, shipped
from didi_instruct.models.checkpoint import is_ours, read_manifest
from didi_instruct.proteins.chains import is_fasta
from didi_instruct.reproduce.add_tokenizer import adopted
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.protein_scales import ITEMS as PROTEIN_ITEMS
from didi_instruct.reproduce.protein_scales import Proteins, paper_proteins, small_proteins
from didi_instruct.reproduce.scale import Given, Scale, ScaleName, Training
from didi_instruct.reproduce.scales_oracle import oracle_scale, toy_scale
from didi_instruct.reproduce.task_files import (
    NAMES,
    find_tasks,
    learning_share,
    printed_split,
    scored_share,
)


def find_scale(name: str, given: Given) -> Scale:
    """The scale of that name, with what the user brings."""
    if given.seeds is not None and given.seeds < 1:
        raise UserError(f"--seeds {given.seeds}: use 1 or more.")
    makers = {"toy": toy_scale, "small": _small, "paper": _paper}
    if given.proteins:
        makers |= {"small": _small_on_proteins, "paper": _paper_on_proteins}
    if name not in makers:
        raise UserError(f"--scale {name}: choose one of {', '.join(makers)}.")
    scale = replace(makers[name](given), judge_options=given.judge_options)
    if given.seeds is not None:
        scale = replace(scale, seeds=tuple(range(given.seeds)))
    return scale


def _small_on_proteins(given: Given) -> Scale:
    if given.data in (None, "oracle"):
        raise UserError(
            "--scale small needs chains for the items on proteins: give a FASTA file with --data."
        )
    _check_chains(given)
    says = (
        "Small scale: chains of --data, a teacher of the shape of DPLM and of about 20M parameters "
        "if none is given, and a shortened schedule. Directions may be compared with the paper's, "
        "values may not."
    )
    return _on_proteins("small", says, small_proteins(given), given)


def _paper_on_proteins(given: Given) -> Scale:
    _check_chains(given)
    says = "Paper scale: DPLM-150M, the paper's distillation to the letter, and ESMFold."
    return _on_proteins("paper", says, paper_proteins(given), given)


def _check_chains(given: Given) -> None:
    """Refuse what rows of real chains cannot be read from, before days of training end at it."""
    if given.data is not None and not is_fasta(given.data):
        raise UserError(
            f"--data {given.data} is no FASTA file, which the items on proteins compare with: give "
            "chains as one .fasta or .fa (it may be compressed)."
        )


def _on_proteins(name: ScaleName, says: str, proteins: Proteins, given: Given) -> Scale:
    """A scale without text: what it has to say of other items is empty."""
    return Scale(
        name=name,
        says=says,
        teacher=proteins.teacher,
        judge=proteins.folding or "none",
        judge_name="ESMFold",
        data=given.data,
        models={},
        ablation=(),
        budgets=(),
        most_steps=0,
        samples=proteins.num,
        seeds=(0,),
        proteins=proteins,
    )


SMALL_STUDENT = ("train.eval_every=0", "watch.budgets=[]")
"""Tables measure students: a quick look before and after took as long as a training."""
SMALL_BANK = ("reference.source=bank", "reference.rows=4096", "reference.steps=64")
"""Clean samples of the teacher, the reading of Algorithm 1 that helps; the item `reference` has the
literal one."""
SMALL_AR = ("train.steps=3000",)
"""Half of the recipe's, for less text: with 142,000 stories it learns them by heart from there."""
SMALL_SDTT = ("sdtt.steps=128", "reference.source=data")
"""Five rounds to 4 steps, the fewest that all samplers take here, on text as the published ones."""
SMALL_DIMO = ("optim.lr=2e-4", "dimo.aux_lr=1e-3")
"""Four and five times the recipe's rates, for runs of a minute: the best of those that were tried
(docs/log.md)."""
SMALL_ABLATION = (
    "train.steps=300",
    "train.batch_size=64",
    "train.ema=0.99",
    "train.log_every=20",
    "train.save_every=100",
    "train.eval_every=0",
    "optim.lr=1e-4",
    "optim.beta2=0.98",
    "discriminator.lr=3e-5",
    "discriminator.warmup=50",
    *SMALL_BANK,
    "watch.budgets=[]",
    "watch.min_entropy=0",
)
SMALL_FINETUNING = (
    "optim.lr=1e-4",  # ten times the paper's, for models of a tenth of its size
    "optim.warmup=200",
    "train.steps=1000",
    "train.eval_every=0",
    "train.ema=0.99",
)
SMALL_READER_STEPS = "train.steps=3000"
"""Of every teacher that reads streams, masked or uniform-state."""
SMALL_LARGER = ("model.layers=8", "model.hidden=512", "model.heads=8")


def _small(given: Given) -> Scale:
    if given.data == "oracle":
        return oracle_scale(given)
    if given.data is None:
        raise UserError(
            "--scale small needs text: give stories (a prepared folder, .jsonl, a folder of .txt) "
            "with --data, or oracle, the built-in language."
        )
    known = given.teacher or ("stories/teacher" if "stories/teacher" in shipped() else None)
    # One tokenizer for all: a judge can only score the tokens that it knows.
    data = _data(given.data, known or given.judge)
    ar = Job(name="ar", does="pretrain", recipe="stories-ar", overrides=(*data, *SMALL_AR))
    teacher = Job(name="teacher", does="pretrain", recipe="stories-teacher", overrides=data)
    tasks = find_tasks(given.tasks)
    scale = Scale(
        name="small",
        says=(
            f"Small scale: models of about 10M parameters on {_titled(given.data)}, a shortened "
            "schedule, texts of up to 256 tokens. Orders and directions may be compared with the "
            "paper's, values may not: data, length, judge and size differ."
        ),
        teacher=known or teacher,
        judge=given.judge or ar,
        judge_name=_told(given) or "a left-to-right model of the same stories, trained here",
        data=given.data,
        text=(*data, "data.rows=document"),
        models={
            "ar": Training("stories-ar", (*data, *SMALL_AR)),
            "duo-teacher": Training("stories-duo-teacher", data),
            "teacher-large": Training("stories-teacher", (*data, *SMALL_LARGER)),
            "didi-large": Training("ablation-all-tricks", SMALL_ABLATION),
            "jump": Training("stories-didi", (*SMALL_STUDENT, *SMALL_BANK, "train.steps=300")),
            "path": Training("stories-path", (*data, *SMALL_STUDENT, "train.steps=1500")),
            "token-matching": Training("stories-token-matching", SMALL_STUDENT),
            "sdtt": Training(
                "stories-sdtt",
                (*data, *SMALL_STUDENT, *SMALL_SDTT, "train.steps=1000", "sdtt.iterations=200"),
            ),
            "dimo": Training("stories-dimo", (*SMALL_STUDENT, *SMALL_DIMO, "train.steps=600")),
            "duo": Training(
                "stories-duo", (*data, *SMALL_STUDENT, "train.steps=1200", "duo.iterations=200")
            ),
        },
        ablation=SMALL_ABLATION,
        among_rivals=("optim.lr=3e-5",),
        budgets=(4, 8, 16),
        few=(1, 2),
        most_steps=128,
        samples=512,
        seeds=(0, 1),
        apart=("scaling", *PROTEIN_ITEMS, *(name for name in NAMES if name not in tasks)),
        until_eot=True,
        mauve=given.mauve,
        causal_judge=given.judge is not None and _reads_text(given.judge),
        corpora=given.corpora,
        reader=_reader(given, data),
        batch_size=256,
        scales_h=(-35.0, 0.0, 2.0, 5.0, 15.0, 35.0),
        candidates=(1, 2, 4, 8),
        anova_points=64,
        anova_h=(0.0, 40.0),
        anova_candidates=(1, 8),
        guided_budgets=(8, 16, 32),
        guided_samples=128,
        parts=6,
        temperatures=(0.9, 0.8, 0.7, 0.6, 0.5),
        top_ps=(0.95, 0.9),
        costly=(15, 33, 69),
        latency={"ar": 256, "teacher": 128, "sdtt": 32, "didi": 16},
        tasks=tasks,
        finetuning={
            "mmlu": (*SMALL_FINETUNING, *learning_share(tasks)),
            "pubmed": (*SMALL_FINETUNING, "train.steps=300", "optim.warmup=60", "data.valid=200"),
        },
        task_options={"mmlu": scored_share(tasks), "mrpc": {"seeds": 3}},
    )
    return replace(scale, readers=_small_readers(scale))


def _small_readers(scale: Scale) -> Scale:
    """The models that downstream tasks ask for, as readers of streams."""
    changes = {
        "ar": ("model.own_window=false",),
        "sdtt": (),
        "duo-teacher": ("model.own_window=false", SMALL_READER_STEPS),
        "duo": (),
    }
    models = {
        role: Training(recipe, (*overrides, *changes[role], "data.rows=stream"))
        for role, (recipe, overrides) in scale.models.items()
        if role in changes
    }
    assert scale.reader is not None
    return replace(scale, teacher=scale.reader, models=models)


def _reader(given: Given, data: tuple[str, ...]) -> Job | str | None:
    """A teacher that reads streams: the one that was given if it does, else one trained here."""
    known = given.teacher and is_ours(Path(given.teacher))
    if known and read_manifest(Path(str(given.teacher))).model.end_id is None:
        return given.teacher
    streams = ("model.own_window=false", "data.rows=stream", SMALL_READER_STEPS)
    return Job(
        name="reader", does="pretrain", recipe="stories-teacher", overrides=(*data, *streams)
    )


def _data(source: str, like: str | None) -> tuple[str, ...]:
    """Overrides that name a text, read with the tokenizer of a model that is there already."""
    words = words_of(like) if like else None
    return (f"data.source={source}", *([f"data.tokenizer={words}"] if words else []))


def words_of(source: str) -> str | None:
    """The tokenizer's file of a model that is here; None where it has none, or is not here."""
    file = (find_shipped(source) or Path(source)) / "tokenizer.json"
    return str(file) if file.is_file() else None


def _reads_text(judge: str) -> bool:
    """True if a judge is a causal LM, which reads texts; models of ours read tokens."""
    return judge != "oracle" and not is_ours(Path(judge))


def _titled(data: str | None) -> str:
    """The data that was given, without the folder it lies in."""
    return Path(data).name if data else "stories"


def _told(given: Given) -> str:
    """The judge that was given, for people."""
    name = Path(given.judge).name if given.judge else ""
    options = ", ".join(f"{k} {v}" for k, v in given.judge_options.items())
    return f"{name} ({options})" if name and options else name


def _speaking(teacher: str, data: str, recipe: Job) -> Job | str:
    """A teacher as it is; one that brings no tokenizer, with that of the texts or the recipe."""
    if words_of(teacher):
        return teacher
    words = data if is_prepared(Path(data)) else recipe.settings().data.tokenizer
    return adopted(teacher, words)


def _paper(given: Given) -> Scale:
    source, tasks = given.data or "hf:Skylion007/openwebtext", find_tasks(given.tasks)
    data = _data(source, given.teacher)
    teacher = Job(name="teacher", does="pretrain", recipe="owt-169m-teacher", overrides=data)
    return Scale(
        name="paper",
        says=(
            "Paper scale: 169M (424M) parameters, OpenWebText, GPT-2 tokenizer, texts of 1,024 "
            "tokens, the paper's schedule. Values may be set against the paper's where the entropy "
            "agrees; the paper has one run per row and 40 samples behind an entropy."
        ),
        teacher=_speaking(given.teacher, source, teacher) if given.teacher else teacher,
        judge=given.judge or "openai-community/gpt2-large",
        judge_name=_told(given) or "GPT-2 Large",
        data=source,
        text=data,
        models={
            "ar": Training("owt-169m-ar", data),
            "duo-teacher": Training("owt-169m-duo-teacher", data),
            "sdtt": Training("owt-169m-sdtt", data),
            "duo": Training("owt-169m-duo", data),
            "teacher-large": Training("owt-424m-teacher", data),
            "didi-large": Training("owt-424m-didi"),
        },
        ablation=(),
        late_from=32,
        budgets=(8, 16, 32, 64, 128),
        costly=(285, 573),
        beyond=(1024,),
        large_beyond=(512, 1024),
        most_steps=1024,
        samples=1024,
        seeds=(0,),
        mauve=given.mauve,
        causal_judge=_reads_text(given.judge or "gpt2-large"),
        corpora=given.corpora,
        batch_size=32,
        scales_h=(0.0, 10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 100.0),
        candidates=(1, 2, 4, 8, 16, 32),
        anova_points=1000,
        guided_samples=16,
        guidance={"reward": "mean", "score": "mean"},
        parts=8,
        latency={"ar": 1024, "teacher": 512, "sdtt": 64, "didi": 16},
        apart=(*PROTEIN_ITEMS, *(name for name in NAMES if name not in tasks)),
        tasks=tasks,
        finetuning={"mmlu": learning_share(tasks)},
        task_options={"mmlu": scored_share(tasks), "mrpc": printed_split(tasks)},
    )
