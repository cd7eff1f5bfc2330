"""Records of an evaluation: a row, a measured value, a metric and what it is computed from.

Where no number can be given it is null and `…_note` says why; a number from a single sample has no
interval. Nothing here is NaN or infinite, which JSON cannot hold.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.data.files import write_atomic
from didi_instruct.errors import UserError
from didi_instruct.evaluation.cache import measure_key, once
from didi_instruct.evaluation.provenance import versions
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.scores import Judge, Scores
from didi_instruct.evaluation.stats import Interval, bootstrap
from didi_instruct.evaluation.table import Column
from didi_instruct.models.ar import ARModel
from didi_instruct.proteins.chains import Chains

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and of how much."""
Requirement = Literal[
    "judge", "causal judge", "likelihood", "reference", "chains", "folding", "path", "residues"
]
"""A judge, and one with features or with the likelihood of texts; text to compare with, or all real
chains of a FASTA file; a folding model; log-probabilities of paths; samples that are chains."""
Dependency = Literal["count", "vocabulary", "start"]
"""The number of samples, the number of token ids, the model that a training starts from."""

KEYS = (
    "sampler", "steps", "nfe", "passes", "disc_calls", "temperature", "top_p", "num_samples",
    "length", "ppl", "ppl_ci95", "entropy", "entropy_ci95", "mauve", "self_bleu", "unique_4gram",
    "vsf", "path_entropy", "path_kl", "gap_closed", "ar_kl", "c2st_auc", "tokens_per_second",
    "seed",
)  # fmt: skip
"""Entries of every row of `didi eval --json`, null where they were not measured."""


def complete(row: Row) -> Row:
    """Add the entries that every row has."""
    return row | dict.fromkeys(key for key in KEYS if key not in row)


class Folding(Protocol):
    """A folding model that knows how confident it is."""

    @property
    def fingerprint(self) -> str:
        """Hash of its weights and of the settings that its folds depend on."""

    def plddt(
        self, sequences: Sequence[str], progress: Callable[[int, int], None]
    ) -> Sequence[float | None]:
        """Mean pLDDT of each chain, 0 to 100; None for one that could not be folded."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Real text, or samples of a teacher with all its steps: what samples are compared with."""

    name: str
    fingerprint: str
    texts: tuple[str, ...]
    tokens: Tensor
    """(M, L), in the model's own tokens."""
    lengths: Tensor
    """(M,) tokens that count, from the first."""


@dataclass(frozen=True, slots=True)
class Start:
    """A left-to-right model that knows the language of the samples, and has not seen them."""

    network: ARModel
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Judge, reference and settings of metrics, the same for all rows of a table."""

    judge: Judge | None = None
    reference: Reference | None = None
    num_tokens: int = 0
    seed: int = 0
    """Of the intervals, and of the networks that are trained to measure."""
    device: str = "cpu"
    start: Start | None = None
    """Where the training of the AR-entropy bound starts."""
    chains: Chains | None = None
    """All real chains of the reference."""
    folding: Folding | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Entries of a row, and the numbers of each sample behind them."""

    row: Row
    values: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """(N,) each: `nats` and `tokens` of the judge, `entropy`, `path_gap`; to compare rows with."""
    lasting: bool = True
    """False where another attempt may find more, as after a lack of memory: not kept on disk."""

    def __or__(self, other: "Measured") -> "Measured":
        """Both together."""
        both = self.lasting and other.lasting
        return Measured(self.row | other.row, self.values | other.values, both)


class Measuring:
    """A set of samples in its context; the judge is asked once, and its scores kept in a folder."""

    def __init__(
        self,
        samples: SampleSet,
        context: Context,
        *,
        folder: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.samples, self.context, self.folder = samples, context, folder
        self.tell = progress or (lambda done, total: None)
        self._asked: Scores | None = None
        self._scores: dict[str, Scores] = {}

    @property
    def judge(self) -> Judge:
        """The judge of a metric that requires one."""
        assert self.context.judge is not None
        return self.context.judge

    @property
    def reference(self) -> Reference:
        """The reference of a metric that requires one."""
        assert self.context.reference is not None
        return self.context.reference

    @property
    def chains(self) -> Chains:
        """Real chains, of a metric that requires them."""
        assert self.context.chains is not None
        return self.context.chains

    @property
    def ends_early(self) -> bool:
        """True if some text ends before its window."""
        return bool((self.samples.lengths < self.samples.tokens.shape[1]).any())

    def scores(self, *, ended: bool = False) -> Scores:
        """Scores of the texts; with `ended`, those of texts with the tokens that end them.

        A text that may end anywhere has a probability only together with its end.
        """
        judge, name = self.judge, "texts"
        if ended and self.ends_early and judge.ends != "included":
            if judge.ends == "unknown":
                raise UserError(
                    f"The judge {judge.name} has no token that ends a text: name one with "
                    "--judge-end."
                )
            name = "ending"
        if name not in self._scores:
            if self.folder is None:
                self._scores[name] = self._ask(name)
            else:
                self._scores[name] = once(
                    self.folder / f"judge-{name}-{measure_key(judge.fingerprint)}.json",
                    lambda: self._ask(name),
                    write=_scores_to_json,
                    read=_scores_of_json,
                )
        return self._scores[name]

    def _ask(self, name: str) -> Scores:
        if self._asked is None:
            self._asked = self.judge.score(self.samples, self.tell)
        found = self._asked if name == "texts" else self._asked.ended
        assert found is not None
        if int(found.tokens.sum()) == 0:
            raise UserError(
                "All samples are empty, or too short for this judge: nothing can be scored."
            )
        return found

    def interval(self, values: Tensor | NDArray[np.float64]) -> Interval | None:
        """95% bootstrap interval of a mean over samples."""
        return mean_interval(values, self.context.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A metric of samples: one entry of `METRICS`."""

    name: str
    compute: Callable[[Measuring], Measured]
    requires: tuple[Requirement, ...] = ()
    """Its value is kept under the judge, the reference, the chains and the folding model that it
    requires."""
    depends_on: tuple[Dependency, ...] = ()
    """Else its value does not depend on these."""
    min_samples: int = 1
    min_reference: int = 1
    """Texts that the reference has to have."""
    columns: tuple[Column, ...] = ()
    of_samplers: bool = False
    """It measures a sampler, not its texts: text that nobody sampled has none."""
    of_reference: bool = True
    """It says something of the real text that samples are compared with."""
    prepare: Callable[[], object] | None = None
    """Refuses a machine without the programs or packages that it needs."""

    @property
    def fields(self) -> list[str]:
        """Entries of a row that are its numbers."""
        return [column.field for column in self.columns]

    def dependencies(self, context: Context) -> list[Any]:
        """Plain values that its value depends on beside the samples."""
        judge, reference = context.judge, context.reference
        extra = [
            part.fingerprint
            for part, counts in (
                (context.start, "start" in self.depends_on),
                (context.chains, "chains" in self.requires),
                (context.folding, "folding" in self.requires),
            )
            if part is not None and counts
        ]
        return [
            judge.fingerprint if judge and "judge" in self.requires else None,
            reference.fingerprint if reference and "reference" in self.requires else None,
            context.seed,
            context.num_tokens if "vocabulary" in self.depends_on else None,
            *extra,
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Numbers of samples, row by row, and of what they are compared with."""

    rows: list[Row]
    model: str = ""
    """Names of the models, or of the files of samples."""
    baseline: list[Row] = field(default_factory=list)
    """Rows of the model that the others are compared with."""
    reference: Row = field(default_factory=dict)
    """The same metrics of the reference text; empty without one."""
    controls: tuple[Row, ...] = ()
    """Rows that no sampler wrote: real chains, shuffled ones, those of a file."""
    judge: str | None = None
    samples: tuple[SampleSet, ...] = ()
    """Those behind the rows, the baseline's last."""
    measured: tuple[Measured, ...] = ()
    """Numbers of each sample behind the rows."""

    def write(self, path: Path) -> None:
        """Write JSON, with the versions of the code behind the numbers."""
        value = {
            "model": self.model,
            "judge": self.judge,
            "rows": [complete(row) for row in (*self.rows, *self.controls)],
            "baseline": [complete(row) for row in self.baseline],
            "reference": self.reference,
            "versions": versions(),
        }
        write_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def plain(value: Any) -> Any:
    """The value as JSON can hold it: None for a number, or an interval, that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        inner = [plain(part) for part in value]
        return None if None in inner else inner
    return value


def mean_interval(values: Tensor | NDArray[np.float64], seed: int) -> Interval | None:
    """95% bootstrap interval of a mean over samples; one sample has none, infinity neither."""
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2 or not np.isfinite(numbers).all():
        return None
    return list(bootstrap(numbers, seed=seed))


def nothing(name: str, note: str) -> Measured:
    """No number, and why."""
    return Measured({name: None, f"{name}_ci95": None, f"{name}_note": note})


def measured_to_json(found: Measured) -> Any:
    """A measured value as a file keeps it."""
    values = {name: _finite(numbers.tolist()) for name, numbers in found.values.items()}
    return {"row": found.row, "values": values}


def measured_of_json(content: Any) -> Measured:
    """The inverse of `measured_to_json`."""
    values = {name: _infinite(found).numpy() for name, found in content["values"].items()}
    return Measured(dict(content["row"]), values)


def _scores_to_json(scores: Scores) -> Any:
    nats, tokens = _finite(scores.nats.tolist()), scores.tokens.tolist()
    return {"nats": nats, "tokens": tokens, "cut": scores.cut}


def _scores_of_json(content: Any) -> Scores:
    return Scores(_infinite(content["nats"]), torch.tensor(content["tokens"]), content["cut"])


def _finite(numbers: Sequence[float]) -> list[float | None]:
    """JSON has no infinity, which is the only number of a sample that is not finite."""
    return [number if math.isfinite(number) else None for number in numbers]


def _infinite(numbers: Sequence[float | None]) -> Tensor:
    found = [math.inf if number is None else number for number in numbers]
    return torch.tensor(found, dtype=torch.float64)
