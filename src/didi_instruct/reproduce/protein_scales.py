"""Models and data of the experiments on proteins, at each scale."""

import random
from dataclasses import dataclass

from didi_instruct.data.files import write_atomic
from didi_instruct.data.tokenizer import AMINO_ACIDS
from didi_instruct.proteins.folding_model import write_random_folding
from didi_instruct.reproduce.jobs import DATA, Context, Job
from didi_instruct.reproduce.running import RUN
from didi_instruct.reproduce.scale import Given, Training

ITEMS = ("protein-plddt", "protein-diversity")
"""Items whose models are those of proteins."""
DPLM, ESMFOLD = "airkingbd/dplm_150m", "facebook/esmfold_v1"
FASTA = "chains.fasta"
LENGTHS = (100, 200, 300, 400, 500)
SMALL_STUDENT = (
    "train.steps=1000",
    "train.batch_size=32",
    "train.ema=0.99",
    "train.eval_every=0",
    "train.save_every=250",
    "optim.lr=1e-4",
    "optim.warmup=50",
    "discriminator.lr=3e-5",
    "discriminator.lr_warmup=50",
    "discriminator.trainable_blocks=4",
    "reference.source=bank",
    "reference.rows=4096",
    "reference.steps=64",
    "watch.budgets=[]",
)
"""Ten and six times the paper's rates, for a model of a seventh of its size and a tenth of the
updates; clean samples of the teacher as reference."""
TOY_SHAPE = ("model.layers=2", "model.hidden=32", "model.heads=2", "model.length=48")
TOY_TEACHER = (
    *TOY_SHAPE,
    "train.steps=60",
    "train.batch_size=16",
    "train.pass_tokens=512",
    "train.ema=0.9",
    "train.eval_every=0",
    "train.eval_sequences=8",
    "train.keep=1",
    "optim.warmup=5",
)
TOY_STUDENT = (
    "lengths=24,40",
    "train.steps=12",
    "train.batch_size=8",
    "train.ema=0.9",
    "train.ema_warmup=true",
    "train.eval_every=0",
    "train.keep=1",
    "optim.warmup=2",
    "optim.lr=1e-4",
    "discriminator.lr_warmup=2",
    "discriminator.warmup=4",
    "discriminator.trainable_blocks=1",
    "watch.budgets=[]",
)


@dataclass(frozen=True, kw_only=True)
class Proteins:
    """Models, data and cells of the tables on proteins."""

    teacher: Job | str
    student: Training
    chains: Job | str | None
    """FASTA of real chains, for rows of real and of shuffled ones."""
    folding: Job | str | None
    """Folding model; None: structures are not measured."""
    lengths: tuple[int, ...] = LENGTHS
    plddt_steps: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)
    diversity_steps: tuple[int, ...] = (32, 64, 128, 256, 512)
    num: int = 40
    """Chains of a cell; the paper has 40."""
    batch_size: int = 40

    def distilled(self, seed: int) -> Job:
        """The student of the paper's algorithm."""
        return Job(
            name=f"protein-didi-seed{seed}",
            does="distill",
            recipe=self.student.recipe,
            overrides=(*self.student.overrides, f"train.seed={seed}"),
            inputs={"teacher": self.teacher},
        )


def toy_proteins() -> Proteins:
    """Short chains of three made-up families, and a folding model of random weights."""
    chains = _written("chains")
    return Proteins(
        teacher=Job(
            name="protein-teacher",
            does="pretrain",
            recipe="protein-teacher",
            overrides=TOY_TEACHER,
            inputs={DATA: chains},
        ),
        student=Training("protein-didi", TOY_STUDENT),
        chains=chains,
        folding=_written("folding"),
        lengths=(24, 40),
        plddt_steps=(2, 8),
        diversity_steps=(8,),
        num=4,
    )


def small_proteins(given: Given) -> Proteins:
    """Chains that the user brings, and a teacher that is trained on them if none is given."""
    teacher = Job(
        name="protein-teacher",
        does="pretrain",
        recipe="protein-teacher",
        overrides=(f"data.source={given.data}", "train.steps=10000"),
    )
    return Proteins(
        teacher=given.teacher or teacher,
        student=Training("protein-didi", SMALL_STUDENT),
        chains=given.data,
        folding=given.folding,
    )


def paper_proteins(given: Given) -> Proteins:
    """DPLM-150M, the paper's distillation to the letter, and ESMFold."""
    return Proteins(
        teacher=given.teacher or DPLM,
        student=Training("protein-didi"),
        chains=given.data,
        folding=given.folding or ESMFOLD,
    )


# Toy files


def _written(what: str) -> Job:
    """The job that writes `chains` or the `folding` model."""
    return Job(name=f"toy-{what}", does="write_proteins", options={"what": what})


def write(context: Context, *, what: str) -> dict[str, int]:
    """Write made-up chains as FASTA, or a folding model of random weights; return how many."""
    folder = context.folder / RUN
    folder.mkdir(parents=True, exist_ok=True)
    if what == "folding":
        write_random_folding(folder)
        return {"models": 1}
    chains = _made_up(240)
    text = "".join(f">made_up_{n}\n{chain}\n" for n, chain in enumerate(chains))
    write_atomic(folder / FASTA, text.encode())
    return {"chains": len(chains)}


def _made_up(count: int) -> list[str]:
    """Chains of 20 to 46 residues of three families: a parent with a fifth of it changed."""
    draw = random.Random(0)
    parents = ["".join(draw.choices(AMINO_ACIDS, k=46)) for _ in range(3)]
    return [
        "".join(c if draw.random() < 0.8 else draw.choice(AMINO_ACIDS) for c in parent[:length])
        for parent, length in ((draw.choice(parents), draw.randint(20, 46)) for _ in range(count))
    ]
