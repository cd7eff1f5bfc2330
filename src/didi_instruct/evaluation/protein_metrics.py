"""Metrics of samples that are chains of residues: entries of the registry, with their columns."""

import numpy as np

from didi_instruct.errors import UserError
from didi_instruct.evaluation.measuring import Measured, Measuring, Metric, Row, nothing
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.table import Column
from didi_instruct.proteins.chains import LETTERS
from didi_instruct.proteins.clusters import Clusters, cluster, entropy, entropy_interval
from didi_instruct.proteins.composition import divergence
from didi_instruct.proteins.folding import CONFIDENT
from didi_instruct.proteins.mmseqs import find_mmseqs
from didi_instruct.proteins.novelty import novelty
from didi_instruct.proteins.repeats import repeats

KMERS = ("residue", "dimer", "trimer")


def sequences_of(samples: SampleSet) -> list[str]:
    """Texts of samples as chains; refuse those that are none."""
    found = ["".join(text.split()) for text in samples.texts]
    for number, sequence in enumerate(found, 1):
        odd = sequence.strip(LETTERS)
        if odd:
            raise UserError(
                f"{samples.origin.model}: sample {number} has `{odd[:10]}`, which is no residue: "
                "measures of proteins are for models that write residues."
            )
    return found


def _clusters(m: Measuring) -> Measured:
    sequences = [s for s in sequences_of(m.samples) if s]
    empty = len(m.samples) - len(sequences)
    if len(sequences) < 2:
        lacking: Row = dict.fromkeys(("clusters", "cluster_size"))
        return nothing("cluster_entropy", "clusters are of 2 or more chains") | Measured(lacking)
    row = cluster_row(cluster(sequences))
    if empty:
        notes = (row.get("cluster_entropy_note"), f"{empty} of {len(m.samples)} chains are empty")
        row["cluster_entropy_note"] = "; ".join(note for note in notes if note)
    return Measured(row)


def cluster_row(found: Clusters) -> Row:
    """Keys of a row for clusters; `…_plain` are those of the first run alone."""
    ends = entropy_interval(found.labels)
    row: Row = {
        "cluster_entropy": entropy(found.labels),
        "cluster_entropy_ci95": None if ends is None else list(ends),
        "cluster_size": len(found.labels) / len(set(found.labels)),
        "clusters": len(set(found.labels)),
        "clusters_plain": None if found.plain is None else len(set(found.plain)),
        "cluster_entropy_plain": None if found.plain is None else entropy(found.plain),
        "cluster_low_complexity": found.low_complexity,
    }
    return row | ({} if found.note is None else {"cluster_entropy_note": found.note})


def _repeats(m: Measuring) -> Measured:
    found = repeats(sequences_of(m.samples))
    values = {
        "commonest_residue": found.commonest,
        "trimer_entropy": found.trimer_entropy,
        "longest_run": found.longest_run,
        "low_complexity": found.low_complexity,
    }
    row: Row = {name: float(numbers.mean()) for name, numbers in values.items()}
    row |= {f"{name}_ci95": m.interval(numbers) for name, numbers in values.items()}
    return Measured(row, values)


def _composition(m: Measuring) -> Measured:
    sequences, row = sequences_of(m.samples), Row()
    for k, name in enumerate(KMERS, 1):
        found = divergence(sequences, m.chains, k, m.context.seed)
        row[f"{name}_js"] = found.value
        row[f"{name}_js_ci95"] = None if found.ci95 is None else list(found.ci95)
        row[f"{name}_js_floor"] = found.floor
        m.tell(k, len(KMERS))
    return Measured(row)


def _novelty(m: Measuring) -> Measured:
    sequences = sequences_of(m.samples)
    if not all(sequences):
        return nothing("novelty_identity", "a sample is empty") | Measured({"novelty_no_hit": None})
    found = novelty(sequences, m.chains)
    lacks = (~found.hit).astype(np.float64)
    row = {
        "novelty_identity": float(found.identity.mean()),
        "novelty_identity_ci95": m.interval(found.identity),
        "novelty_no_hit": float(lacks.mean()),
        "novelty_no_hit_ci95": m.interval(lacks),
        "novelty_copies": float(found.copy.mean()),
    }
    return Measured(row, {"novelty_identity": found.identity})


def _plddt(m: Measuring) -> Measured:
    folding = m.context.folding
    assert folding is not None
    folds = folding.plddt(sequences_of(m.samples), m.tell)
    known = np.array([value for value in folds if value is not None], np.float64)
    failed = len(folds) - len(known)
    if not len(known):
        lacking: Row = {"plddt_above_70": None, "plddt_failed": failed}
        return nothing("plddt", "no chain could be folded") | Measured(lacking, lasting=False)
    above = (known > CONFIDENT).astype(np.float64)
    row: Row = {
        "plddt": float(known.mean()),
        "plddt_ci95": m.interval(known),
        "plddt_above_70": float(above.mean()),
        "plddt_above_70_ci95": m.interval(above),
        "plddt_failed": failed,
    }
    if failed:
        row["plddt_note"] = f"{failed} of {len(folds)} chains could not be folded and do not count"
    # Numbers that belong to samples by their place cannot lack any. A fold that failed for want of
    # memory may succeed on another machine, so the row of a set with failures is measured again.
    return Measured(row, {} if failed else {"plddt": known}, lasting=not failed)


FLOOR = (
    "as many real chains of these lengths have more than 0 by chance: their value is in the JSON, "
    "as `…_js_floor`."
)
PROTEIN_METRICS = (
    Metric(
        name="plddt", compute=_plddt,
        requires=("residues", "folding"),
        columns=(
            Column(
                "pLDDT", "plddt", "{:.2f}",
                "Confidence of the folding model in its structure, 0 to 100, mean over a chain's "
                "atoms and then over chains. Higher is better, but repeats fold with confidence "
                "too: read it beside clusters and repeats.", "higher",
            ),
            Column(
                "pLDDT > 70", "plddt_above_70", "{:.1%}", "Share of chains with a pLDDT above 70.",
            ),
        ),
    ),
    Metric(
        name="clusters", compute=_clusters,
        requires=("residues",), depends_on=("count",),
        min_samples=2, prepare=find_mmseqs,
        columns=(
            Column(
                "cluster H", "cluster_entropy", "{:.3f}",
                "Entropy in nats of the shares of MMseqs2 clusters (30% identity, 80% coverage): "
                "ln of the number of chains where all differ, 0 where all are alike. Higher is "
                "more varied. Random chains have the highest: it says nothing of proteins.",
            ),
            Column(
                "cluster size", "cluster_size", "{:.2f}",
                "Chains per MMseqs2 cluster. 1 is the most varied.",
            ),
        ),
    ),
    Metric(
        name="repeats", compute=_repeats,
        requires=("residues",),
        columns=(
            Column(
                "commonest", "commonest_residue", "{:.1%}",
                "Share of a chain's commonest residue, mean over chains. Neither high nor low is "
                "good: it should be that of real chains.",
            ),
            Column(
                "3-mer H", "trimer_entropy", "{:.3f}",
                "Entropy of a chain's 3-mers in nats, mean over chains. Low means repeats; it "
                "should be that of real chains of this length.",
            ),
            Column(
                "run", "longest_run", "{:.2f}",
                "Residues of a chain's longest run of one letter, mean over chains. It should be "
                "that of real chains.",
            ),
            Column(
                "low complexity", "low_complexity", "{:.1%}",
                "Share of chains with a 3-mer entropy below 93% of the highest for their length. "
                "Real chains: about half a percent.",
            ),
        ),
    ),
    Metric(
        name="composition", compute=_composition,
        requires=("residues", "chains"), depends_on=("count",),
        columns=tuple(
            Column(
                title, f"{name}_js", "{:.4f}",
                f"Jensen-Shannon divergence in nats of the samples' {words} from those of the "
                f"reference's chains. Lower is better, down to a floor: {FLOOR}", "lower",
            )
            for title, name, words in (
                ("1-mer JS", "residue", "residues"),
                ("2-mer JS", "dimer", "2-mers"),
                ("3-mer JS", "trimer", "3-mers"),
            )
        ),
    ),
    Metric(
        name="novelty", compute=_novelty,
        requires=("residues", "chains"), of_reference=False, prepare=find_mmseqs,
        columns=(
            Column(
                "identity", "novelty_identity", "{:.1%}",
                "Best identity of a chain to one of the reference (MMseqs2, over the columns of an "
                "alignment that covers 80% of it), 0 without a hit, mean over chains. High means "
                "copies of known proteins.",
            ),
            Column(
                "no hit", "novelty_no_hit", "{:.1%}",
                "Share of chains that are like none of the reference's. Shuffled chains have no "
                "hit either: novelty alone is no merit.",
            ),
        ),
    ),
)  # fmt: skip
"""Metrics of proteins."""
