"""Proteins at each scale, and the functions that jobs call for them (Section 4.5).

Proteins have a teacher, data and measures of their own, so they stand beside the other models of a
scale. A cell of their tables is a number of steps and a length; samples of a cell are drawn,
measured and kept as `didi eval --lengths` does it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from didi_instruct.data.files import write_atomic
from didi_instruct.data.tokenizer import AMINO_ACIDS
from didi_instruct.evaluation.config import EvalConfig
from didi_instruct.evaluation.evaluate import evaluate, open_predictor
from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.metrics import METRICS
from didi_instruct.evaluation.protein_metrics import sequences_of
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.proteins.folding import Predictor
from didi_instruct.proteins.folding_model import write_random_folding
from didi_instruct.proteins.gallery import Chain, write_structures
from didi_instruct.reproduce.jobs import DATA, Context, Job
from didi_instruct.reproduce.measuring import EVALS
from didi_instruct.reproduce.running import RUN
from didi_instruct.reproduce.scale import Given, Training

ITEMS = ("protein-plddt", "protein-diversity")
"""Items whose models are those of proteins."""
DPLM, ESMFOLD = "airkingbd/dplm_150m", "facebook/esmfold_v1"
FASTA = "chains.fasta"
FOLDS, STRUCTURES = "folds", "structures"
"""Folders of folds by sequence, and of galleries, in that of the grid."""
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


def cells(
    context: Context,
    *,
    label: str,
    lengths: Sequence[int],
    steps: Sequence[int],
    num: int,
    seed: int,
    sampler: str,
    metrics: Sequence[str],
    batch_size: int,
) -> dict[str, list[dict[str, Any]]]:
    """A row for each number of steps, with every number by length and as a mean over lengths.

    Where there are real chains, rows of as many of them, and of the same shuffled. The structures
    of the first chain of each cell are written to a gallery.
    """
    folding = None
    if "folding" in context.inputs:
        folds = context.shared / FOLDS
        folding = open_predictor(context.inputs["folding"], folds, context.device)
    config = EvalConfig(
        metrics=tuple(metrics),
        steps=tuple(steps),
        num=num,
        lengths=tuple(lengths),
        sampler=sampler,
        seed=seed,
        batch_size=batch_size,
        reference=_fasta(context.inputs.get("chains")),
        device=context.device,
    )
    found = evaluate(
        [context.inputs["model"]],
        config,
        out=context.shared / EVALS,
        folding=folding,
        progress=lambda stage, done, total: context.tell(f"{stage} {done} of {total}"),
    )
    if folding is not None:
        of_samples = [length for length in lengths for _ in steps]
        drawn = list(zip(of_samples, found.samples, strict=True))
        _write_gallery(context.shared / STRUCTURES, label, drawn, folding)
    columns = [column.field for name in metrics for column in METRICS[name].columns]
    return {
        "rows": _lines(found.rows, lengths, columns),
        "controls": _lines(found.controls, lengths, columns),
    }


def _lines(
    rows: Sequence[Row], lengths: Sequence[int], columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of several lengths and their mean as one line, with the numbers of each (`…_100`)."""
    size = len(lengths) + (len(lengths) > 1)  # one length has no mean beside it
    return [
        _line(rows[first : first + size], lengths, columns) for first in range(0, len(rows), size)
    ]


def _line(rows: Sequence[Row], lengths: Sequence[int], columns: Sequence[str]) -> dict[str, Any]:
    kept = ("model", "nfe", "passes", "num_samples", "seed", *columns)
    line = {name: rows[-1][name] for name in kept}
    for length, row in zip(lengths, rows[: len(lengths)], strict=True):
        line |= {f"{name}_{length}": row[name] for name in columns}
    return line


def _write_gallery(
    folder: Path, label: str, drawn: Sequence[tuple[int, SampleSet]], folding: Predictor
) -> None:
    """Structures of the first chain of each set of samples, which have a length each."""
    folds = folding.fold([sequences_of(samples)[0] for _, samples in drawn])
    name = "-".join("".join(c if c.isalnum() else " " for c in label.lower()).split())
    chains = [
        Chain(f"{name}-{length}-in-{samples.origin.nfe}", fold, {"NFE": samples.origin.nfe})
        for (length, samples), fold in zip(drawn, folds, strict=True)
    ]
    write_structures(chains, folder / name, title=label)


def _fasta(source: str | None) -> str | None:
    """The file of real chains; one that was written here lies in a folder."""
    return str(Path(source) / FASTA) if source and Path(source).is_dir() else source


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
