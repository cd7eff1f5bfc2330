"""What a measure is given and what it returns: samples, a yardstick, a row with 95% intervals.

Where nothing can be said the number is null and `…_note` tells why; a number that rests on one
sample has no interval. Nothing here is NaN or infinite, which JSON cannot hold.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.evaluation.judges import CausalJudge, DiffusionJudge, Judge, Scores
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.scores import ReadsOn, checked
from didi_instruct.evaluation.stats import Interval, bootstrap
from didi_instruct.evaluation.table import Column
from didi_instruct.models.ar import ARModel
from didi_instruct.proteins.chains import Chains

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""
Recall = Callable[[str, Callable[[], Scores]], Scores]
"""Returns the scores of that name, made now if they are not known yet."""


class Folding(Protocol):
    """A folding model that knows how confident it is."""

    @property
    def name(self) -> str:
        """The source as it was written."""

    @property
    def fingerprint(self) -> str:
        """Of its weights and of the settings that decide what comes out."""

    def plddt(
        self, sequences: Sequence[str], progress: Callable[[int, int], None]
    ) -> Sequence[float | None]:
        """Mean pLDDT of each chain, 0 to 100; None for one that could not be folded."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Real text, or a teacher with all its steps: what samples are compared with."""

    name: str
    fingerprint: str
    """Of its content."""
    texts: tuple[str, ...]
    tokens: Tensor
    """(M, L), in the model's own tokens."""
    lengths: Tensor
    """(M,) tokens that count, from the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Yardstick:
    """What samples are measured with; the same for all rows of a table."""

    judge: Judge | None = None
    reference: Reference | None = None
    num_tokens: int = 0
    seed: int = 0
    """Of the intervals, and of the networks that are trained to measure."""
    device: str = "cpu"
    ar_start: "Begun | None" = None
    """What the AR-entropy bound begins with, if not with nothing."""
    chains: Chains | None = None
    """All real chains of the reference."""
    folding: Folding | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """A left-to-right model that knows the language of the samples, and has not seen them."""

    network: ARModel
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers of a row, and those of each sample behind them."""

    row: Row
    values: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """(N,) each: `nats` and `tokens` of the judge, `entropy`, `path_gap`; to compare rows with."""
    lasting: bool = True
    """False where another try may find more, as where memory ran out: it is not kept on disk."""

    def __or__(self, other: "Measured") -> "Measured":
        """Both together."""
        both = self.lasting and other.lasting
        return Measured(self.row | other.row, self.values | other.values, both)


@dataclass(frozen=True, slots=True)
class Metric:
    """A measure, and what it needs."""

    compute: Callable[["Measuring"], Measured]
    judge: bool = False
    reference: bool = False
    per_judge: bool = False
    """Whether its value depends on the judge."""
    learns: bool = False
    """Whether it trains a network, whose size depends on the vocabulary."""
    counts: bool = False
    """Whether its value depends on how many texts there are."""
    path: bool = False
    """Whether it needs the log-probability of the samples' paths."""
    residues: bool = False
    """Whether it is of chains of residues."""
    chains: bool = False
    """Whether it compares with all real chains of a FASTA file."""
    folding: bool = False
    """Whether it needs a folding model."""
    of_real: bool = True
    """Whether it says anything of the real chains that samples are compared with."""
    prepare: Callable[[], object] | None = None
    """Refuses a machine that lacks what it needs."""
    min_samples: int = 1
    columns: tuple[Column, ...] = ()
    """Of tables, where they are not in `table.COLUMNS`."""


class Measuring:
    """One set of samples under one yardstick; the judge is asked once."""

    def __init__(
        self,
        samples: SampleSet,
        yardstick: Yardstick,
        progress: Progress | None = None,
        recall: Recall | None = None,
    ) -> None:
        self.samples, self.yardstick, self._progress = samples, yardstick, progress
        self._recall = recall or (lambda _, make: make())
        self._scores: dict[str, Scores] = {}
        self._both: tuple[Scores, Scores] | None = None
        """Texts without and with their ends, where a judge has read both at once."""

    def scores(self, ending: bool = False) -> Scores:
        """What the judge says of the texts; with `ending`, of their end-of-text as well.

        A text that may end anywhere has a probability only together with its end.
        """
        priced = isinstance(self.yardstick.judge, DiffusionJudge)  # the end always is, or never
        name = "ending" if ending and self.ends_early and not priced else "texts"
        if name not in self._scores:
            self._scores[name] = self._recall(name, lambda: self._ask(name == "ending"))
        return self._scores[name]

    def _ask(self, ending: bool) -> Scores:
        judge = self.yardstick.judge
        assert judge is not None

        def tell(done: int, total: int) -> None:
            self.tell("Judging", done, total)

        if not (self.ends_early and isinstance(judge, ReadsOn) and has_end(judge)):
            return judge.score(self.samples, tell, ending=ending)
        if self._both is None:
            self._both = judge.score_both(self.samples, tell)
        return checked(judge.name, self._both[ending])

    @property
    def ends_early(self) -> bool:
        """Whether some text ends before its window."""
        return bool((self.samples.lengths < self.samples.tokens.shape[1]).any())

    def tell(self, stage: str, done: int, total: int) -> None:
        """Report progress, if anyone listens."""
        if self._progress is not None:
            self._progress(stage, done, total)

    @property
    def reference(self) -> Reference:
        """What to compare with."""
        assert self.yardstick.reference is not None
        return self.yardstick.reference

    @property
    def chains(self) -> Chains:
        """Real chains to compare with."""
        assert self.yardstick.chains is not None
        return self.yardstick.chains

    def interval(self, values: Tensor | NDArray[np.float64]) -> Interval | None:
        """95% bootstrap interval of a mean over samples."""
        return mean_interval(values, self.yardstick.seed)


def plain(value: Any) -> Any:
    """The value as JSON can hold it: None for what is not finite, or has an end that is not."""
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


def has_end(judge: Judge) -> bool:
    """Whether a judge can price the end of a text: a causal LM may have no token for it."""
    return not (isinstance(judge, CausalJudge) and judge.end is None)
