"""The scales on the oracle language: `toy`, and `small` where the data is `oracle`."""

from dataclasses import replace
from shutil import which

from didi_instruct.errors import UserError
from didi_instruct.reproduce.jobs import DATA, Job
from didi_instruct.reproduce.protein_scales import ITEMS as PROTEIN_ITEMS
from didi_instruct.reproduce.protein_scales import toy_proteins
from didi_instruct.reproduce.scale import Given, Scale, Training
from didi_instruct.reproduce.task_files import NAMES, SHARE, toy_data

ORACLE_TEXT = ("data.source=oracle",)
TOY_NETWORK = (
    "model.hidden=64",
    "train.batch_size=32",
    "train.eval_sequences=128",
    "train.keep=1",
)
TOY_STUDENT = (
    "train.batch_size=32",
    "train.eval_every=0",
    "train.save_every=20",
    "train.keep=1",
    "train.eval_sequences=64",
    "watch.budgets=[]",
)
TOY_BANK = ("reference.source=bank", "reference.rows=512", "reference.steps=32")
TOY_ABLATION = (
    *TOY_STUDENT,
    *TOY_BANK,
    "train.batch_size=16",
    "train.steps=60",
    "train.ema=0.9",
    "train.log_every=10",
    "optim.lr=1e-4",
    "discriminator.lr=3e-4",
    "discriminator.warmup=10",
    "discriminator.trainable_blocks=1",
    "watch.min_entropy=0",  # a collapse is a result here
)

TOY_MODELS = {
    "ar": Training("oracle-ar", ("train.steps=400", *TOY_NETWORK)),
    "duo-teacher": Training("oracle-duo-teacher", ("train.steps=900", *TOY_NETWORK)),
    "teacher-large": Training(
        "oracle-teacher", (*TOY_NETWORK, "train.steps=400", "model.hidden=96")
    ),
    "didi-large": Training("ablation-all-tricks", TOY_ABLATION),
    "jump": Training(
        "oracle-didi",
        ("train.steps=60", "discriminator.warmup=10", *TOY_STUDENT, *TOY_BANK),
    ),
    "token-matching": Training(
        "oracle-token-matching",
        ("train.steps=60", "train.ema=0.9", "token_matching.warmup=10", *TOY_STUDENT),
    ),
    "sdtt": Training(
        "oracle-sdtt",
        ("train.steps=60", "sdtt.iterations=20", "train.ema=0.9", *TOY_STUDENT),
    ),
    "dimo": Training(
        "oracle-dimo", ("train.steps=60", "dimo.warmup=10", "train.ema=0.9", *TOY_STUDENT)
    ),
    "duo": Training(
        "oracle-duo",
        ("train.steps=100", "duo.iterations=20", "train.ema=0.9", *TOY_STUDENT),
    ),
}

TOY_READER = (
    "model.length=128",
    "model.learned_positions=false",
    "data.tokenizer=bpe:400",
    "data.documents=line",
    *TOY_NETWORK,
    "train.steps=200",
    "train.batch_size=8",
    "train.eval_sequences=16",
    "optim.warmup=10",
)
TOY_READERS_STUDENT = ("train.batch_size=8", "train.steps=30")
TOY_FINETUNING = (
    "data.valid=32",
    "optim.lr=1e-3",
    "optim.warmup=5",
    "train.steps=20",
    "train.batch_size=8",
    "train.micro_batch=8",
    "train.ema=0",
    "train.eval_every=0",
    "train.eval_sequences=16",
    "train.save_every=20",
    "train.keep=1",
)


def toy_scale(given: Given) -> Scale:
    """Seconds of CPU for each model; the judge is the language itself."""
    for flag, value in (("--data", given.data), ("--judge", given.judge)):
        if value is not None:
            raise UserError(
                f"{flag} {value}: at scale toy the language and its judge are built in, leave it "
                "out or use --scale small."
            )
    teacher = Job(
        name="teacher",
        does="pretrain",
        recipe="oracle-teacher",
        overrides=("train.steps=600", *TOY_NETWORK),
    )
    scale = Scale(
        name="toy",
        says=(
            "Toy scale: the built-in oracle language (32 tokens a text), networks of two layers "
            "trained for seconds, judged by the language itself, exactly (tables of proteins: "
            "made-up chains, and a folding model of random weights). It shows that every part runs "
            "and which way differences point here; none of its values can be set against the "
            "paper's, which has another language, another judge and models a thousand times larger."
        ),
        teacher=given.teacher or teacher,
        judge="oracle",
        judge_name="the oracle language (exact)",
        data=None,
        text=ORACLE_TEXT,
        models=TOY_MODELS,
        ablation=TOY_ABLATION,
        budgets=(4, 8),
        few=(2,),
        most_steps=32,
        samples=128,
        seeds=(0,),
        sequences=128,
        scales_h=(-10.0, 0.0, 10.0, 35.0),
        candidates=(1, 4),
        anova_points=16,
        anova_h=(0.0, 40.0),
        anova_candidates=(1, 8),
        guided_budgets=(4, 8),
        temperatures=(0.8, 0.6),
        top_ps=(0.9,),
        costly=(15,),
        guided_samples=32,
        parts=2,
        latency={"ar": 32, "teacher": 16, "sdtt": 8, "didi": 4},
        tasks={name: toy_data(name) for name in NAMES},
        proteins=toy_proteins(),
        apart=() if which("mmseqs") else ("protein-diversity",),
        finetuning={
            "mmlu": (*TOY_FINETUNING, f"answers.share={SHARE}"),
            "pubmed": (*TOY_FINETUNING, "data.documents=line"),
        },
        task_options={
            "mmlu": {"sft_share": SHARE, "draws": 1},
            "mrpc": {"steps": 40, "evaluations": 2, "seeds": 2, "lr": 1e-3},
        },
    )
    return replace(scale, readers=_toy_readers(scale))


def _toy_readers(scale: Scale) -> Scale:
    """Models of byte pairs that read the text that task_files writes."""
    corpus = toy_data("text")
    teacher = Job(
        name="reader",
        does="pretrain",
        recipe="oracle-teacher",
        overrides=TOY_READER,
        inputs={DATA: corpus},
    )
    models = {
        "ar": Training("oracle-ar", TOY_READER),
        "duo-teacher": Training("oracle-duo-teacher", TOY_READER),
    }
    for role in ("sdtt", "duo"):
        recipe, overrides = scale.models[role]
        rounds = f"{role}.iterations=10"
        models[role] = Training(recipe, (*overrides, *TOY_READERS_STUDENT, rounds))
    ablation = (*scale.ablation, *TOY_READERS_STUDENT)
    return replace(scale, teacher=teacher, corpus=corpus, models=models, ablation=ablation)


ORACLE_ABLATION = (
    "reference.source=bank",
    "reference.rows=4096",
    "reference.steps=64",
    "train.steps=1000",
    "train.batch_size=32",
    "train.ema=0.99",
    "train.log_every=50",
    "train.save_every=250",
    "train.eval_every=0",
    "train.keep=1",
    "optim.lr=1e-4",
    "discriminator.lr=3e-4",
    "discriminator.warmup=100",
    "discriminator.trainable_blocks=1",
    "watch.budgets=[]",
    "watch.min_entropy=0",  # a collapse is a result here
)
"""A few minutes of one CPU thread each; after 500 updates a student has left its teacher."""


def oracle_scale(given: Given) -> Scale:
    """Small scale on the oracle language: the toy scale's networks, trained until they move."""
    teacher = Job(
        name="teacher",
        does="pretrain",
        recipe="oracle-teacher",
        overrides=("train.steps=2000", "train.batch_size=128"),
    )
    return replace(
        toy_scale(replace(given, data=None)),
        name="small",
        says=(
            "Small scale on the built-in oracle language (32 tokens a text): networks of two "
            "layers, judged by the language itself, exactly; students of 1,000 updates of 32 "
            "texts, which is enough to leave the teacher. Differences between rows are real where "
            "they exceed their intervals and both seeds agree; values cannot be set against the "
            "paper's, which has another language, another judge and models a thousand times larger."
        ),
        teacher=given.teacher or teacher,
        proteins=None,
        apart=PROTEIN_ITEMS,
        ablation=ORACLE_ABLATION,
        budgets=(4, 8, 16),
        most_steps=64,
        samples=1024,
        seeds=(0, 1),
        batch_size=256,
    )
