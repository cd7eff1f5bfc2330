"""Experiments on proteins (Section 4.5): confidence of structures, and diversity of sequences.

A cell of the tables is a number of steps and a length; samples of a cell are drawn, measured and
kept as by `didi eval --lengths`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from didi_instruct.errors import UserError
from didi_instruct.evaluation.config import EvalConfig
from didi_instruct.evaluation.evaluate import evaluate, open_predictor
from didi_instruct.evaluation.metrics import METRICS
from didi_instruct.evaluation.protein_metrics import sequences_of
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.proteins.folding import Predictor
from didi_instruct.proteins.gallery import Chain, write_structures
from didi_instruct.reproduce import paper
from didi_instruct.reproduce.figures import draw_lines
from didi_instruct.reproduce.jobs import Context, Job
from didi_instruct.reproduce.lines import Answers, Experiment, Line
from didi_instruct.reproduce.measure import EVALS
from didi_instruct.reproduce.protein_scales import FASTA, Proteins
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import PASSES, Row, Shown, Table

FOLDS, STRUCTURES = "folds", "structures"
"""Folders of folds by sequence, and of galleries, in that of the grid."""


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


WHERE = 'Section 4.5 and appendix "Protein Sequence Generation"'


class Way(NamedTuple):
    """A line of a table: which model, and how it is sampled."""

    label: str
    role: str
    sampler: str


WAYS = (
    Way("Teacher, ancestral", "teacher", "ancestral"),
    Way("Teacher, DPLM's decoder", "teacher", "dplm"),
    Way("DiDi-Instruct", "didi", "ancestral"),
)
PRINTED = {"teacher": "DPLM-150M", "didi": "DiDi-Instruct (150M)"}
BY = (
    "The paper does not say which sampler drew its teacher, so both are here: `ancestral` keeps "
    "what it has written, DPLM's decoder may write it again in each step."
)
TWICE = "Repeats and copies fold with confidence too: read pLDDT beside the item protein-diversity."
RANDOM_FOLDS = (
    "At toy scale the folding model has random weights, chains are short and made up, and models "
    "are trained for seconds: the table shows that all of it runs."
)
CEILING = (
    "Entropy of n chains is ln n at most, where no two share a cluster (ln 40 = 3.689, which the "
    "paper prints as 3.68): random chains have that too. At 30% identity MMseqs2 sees no likeness "
    "below about 40 to 50%; chains of low complexity are clustered a second time without masks."
)


def _proteins(scale: Scale) -> Proteins:
    assert scale.proteins is not None
    return scale.proteins


def _cells(
    scale: Scale, name: str, steps: Sequence[int], metrics: Sequence[str], **more: Job | str
) -> list[Line]:
    return [
        Line(_cell(scale, name, way, seed, steps, metrics, more), _labels(way))
        for seed in scale.seeds
        for way in WAYS
    ]


def _cell(
    scale: Scale,
    name: str,
    way: Way,
    seed: int,
    steps: Sequence[int],
    metrics: Sequence[str],
    more: Mapping[str, Job | str],
) -> Job:
    proteins = _proteins(scale)
    model = proteins.teacher if way.role == "teacher" else proteins.distilled(seed)
    return Job(
        name=f"{name}-{way.role}-{way.sampler}-seed{seed}",
        does="cells",
        inputs={"model": model, **more},
        options={
            "label": way.label if seed == scale.seeds[0] else f"{way.label}, seed {seed}",
            "lengths": list(proteins.lengths),
            "steps": list(steps),
            "num": proteins.num,
            "seed": seed,
            "sampler": way.sampler,
            "metrics": list(metrics),
            "batch_size": proteins.batch_size,
        },
    )


def _labels(way: Way) -> Row:
    return {"method": way.label, "role": way.role, "model": None}


def _plddt(scale: Scale) -> list[Line]:
    proteins = _proteins(scale)
    if proteins.folding is None:
        raise UserError(
            "protein-plddt folds chains: name a folding model with --folding SOURCE, such as "
            "facebook/esmfold_v1 or its folder."
        )
    steps = proteins.plddt_steps
    return _cells(scale, "plddt", steps, ["plddt"], folding=proteins.folding)


def _diversity(scale: Scale) -> list[Line]:
    """Cells of all lines; the first measures real and shuffled chains too, the same for all."""
    proteins, steps = _proteins(scale), _proteins(scale).diversity_steps
    metrics = ["clusters", "repeats"]
    asked = _cells(scale, "diversity", steps, metrics)
    if proteins.chains is not None:
        job = asked[0].job
        job = replace(job, inputs={**job.inputs, "chains": proteins.chains})
        asked[0] = replace(asked[0], job=job)
    return asked


def _rows(answers: Answers) -> list[Row]:
    return [
        row | line.labels
        for line in answers.lines
        if line.job.key in answers.results
        for row in answers.results[line.job.key]["rows"]
    ]


def _by_length(scale: Scale, column: str, title: str, form: str) -> tuple[Shown, ...]:
    return tuple(
        Shown(f"{column}_{length}", f"{title}, L = {length}", form)
        for length in _proteins(scale).lengths
    )


def _plddt_table(scale: Scale, answers: Answers) -> Table:
    known = ", ".join(f"{plddt} at {length}" for length, plddt in paper.DPLM_PLDDT.items())
    galleries = f"Structures: {STRUCTURES}/ beside this table's folder, a gallery for each line."
    return Table(
        rows=_rows(answers),
        shown=(
            *_by_length(scale, "plddt", "pLDDT", ".1f"),
            Shown("plddt_above_70", "above 70", ".0%"),
            PASSES,
        ),
        over="chains",
        notes=[
            "Mean pLDDT over the atoms of a chain, then over chains; `above 70` is a share of the "
            "chains of all lengths.",
            f"The paper has a figure alone. The README of DPLM says of 150M, 500 iterations of its "
            f"own decoder: {known}.",
            BY,
            TWICE,
            galleries,
            *([RANDOM_FOLDS] if scale.name == "toy" else []),
        ],
    )


def _draw_plddt(scale: Scale, table: Table, path: Path) -> None:
    caption = f"{scale.name} scale; seeds {scale.seed_list}"
    draw_lines(table, path, _by_length(scale, "plddt", "pLDDT", ".1f"), caption=caption)


def _diversity_table(scale: Scale, answers: Answers) -> Table:
    printed = [
        {"method": PRINTED[role], "nfe": nfe, "cluster_size": size}
        | {
            f"cluster_entropy_{length}": entropy
            for length, entropy in zip(paper.PROTEIN_LENGTHS, entropies, strict=True)
        }
        for role, cells in paper.PROTEIN_DIVERSITY.items()
        for nfe, (entropies, size) in cells.items()
    ]
    return Table(
        rows=_rows(answers),
        shown=(
            *_by_length(scale, "cluster_entropy", "entropy", ".2f"),
            Shown("cluster_size", "cluster size", ".2f"),
            Shown("commonest_residue", "commonest residue", ".1%"),
            Shown("low_complexity", "low complexity", ".0%"),
            PASSES,
        ),
        paper=printed,
        over="chains",
        notes=[
            *_controls(scale, answers),
            CEILING,
            "Cluster size, the share of a chain's commonest residue and of chains of low "
            "complexity are means over lengths; the last two see collapse into repeats, which "
            "clusters do not.",
            BY,
            *([RANDOM_FOLDS] if scale.name == "toy" else []),
        ],
    )


def _controls(scale: Scale, answers: Answers) -> Iterator[str]:
    """A sentence on real chains and one on shuffled ones."""
    first = answers.lines[0].job.key
    found: list[Mapping[str, Any]] = answers.results.get(first, {}).get("controls", [])
    for row in found:
        entropies = ", ".join(
            f"{row[f'cluster_entropy_{length}']:.2f} at {length}"
            for length in _proteins(scale).lengths
            if row[f"cluster_entropy_{length}"] is not None
        )
        if entropies:
            yield (
                f"As many {row['model']} chains: entropy {entropies}; commonest residue "
                f"{row['commonest_residue']:.1%}, low complexity {row['low_complexity']:.0%}."
            )


PROTEIN_ITEMS = (
    Experiment(
        name="protein-plddt",
        title="Proteins: confidence of structures (pLDDT) against NFE",
        where=f"{WHERE}, figure",
        lines=_plddt,
        table=_plddt_table,
        draw=_draw_plddt,
    ),
    Experiment(
        name="protein-diversity",
        title="Proteins: diversity by MMseqs2 clusters",
        where=f"{WHERE}, table",
        lines=_diversity,
        table=_diversity_table,
        packages=("mmseqs",),
    ),
)
