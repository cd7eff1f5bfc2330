"""Models, data, sampling and judge of one reproduction scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.errors import UserError
from didi_instruct.reproduce.jobs import DATA, Job
from didi_instruct.reproduce.methods import COMMON, METHODS

if TYPE_CHECKING:
    from didi_instruct.reproduce.protein_scales import Proteins

ScaleName = Literal["toy", "small", "paper"]
NAMES: tuple[ScaleName, ...] = get_args(ScaleName)
EARLY, LATE = (2, 5), "didi.pi=[5,2]"
"""The paper's law of τ for few steps, and its law for 32 and more."""


class Training(NamedTuple):
    """A recipe with what a scale changes of it."""

    recipe: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Given:
    """Sources and options that the user gives."""

    data: str | None = None
    judge: str | None = None
    teacher: str | None = None
    corpora: str | None = None
    tasks: str | None = None
    """Folder of the downstream tasks' files."""
    proteins: bool = False
    """True if items on proteins are asked for, whose data and teacher are others."""
    folding: str | None = None
    """Model that folds proteins."""
    seeds: int | None = None
    mauve: bool = True
    """Measure MAUVE, where the judge can."""
    judge_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the judge: temperature, collapse_spaces, end, beyond."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Everything that experiments need to build their jobs."""

    name: ScaleName
    says: str
    """Description, with what may be compared with the paper."""
    teacher: Job | str
    judge: Job | str
    judge_name: str
    judge_options: Mapping[str, Any] = field(default_factory=dict)
    data: str | None
    """Text to compare with and to hold out."""
    text: tuple[str, ...] = ()
    """Settings that name the text that a student may learn from."""
    models: Mapping[str, Training]
    """Other models by role."""
    ablation: tuple[str, ...]
    """Overrides of the ablation recipes."""
    among_rivals: tuple[str, ...] = ()
    """Further overrides of DiDi-Instruct among the baselines, where the others are tuned too."""
    late_from: int | None = None
    """NFE from which a student of the other law of τ is used; None: one student for all."""
    budgets: tuple[int, ...]
    beyond: tuple[int, ...] = ()
    large_beyond: tuple[int, ...] = ()
    """Further NFE of the student in the tables of generation, and of both larger models."""
    few: tuple[int, ...] = ()
    """More budgets of the baselines' students, some of which learn to take one step or two."""
    costly: tuple[int, ...] = ()
    """More budgets of the plain teacher among the baselines, whose passes are about those of N
    guided steps: 4.5 N, less 3.5 for the first, which all texts share; none where one is near."""
    most_steps: int
    samples: int
    seeds: tuple[int, ...]
    until_eot: bool = False
    mauve: bool = True
    """Measure MAUVE, where the judge can."""
    minutes: float | None = None
    """That every student of the baselines trains, where that was asked for."""
    made_by: str = ""
    """Command that makes its tables, where that is not `didi reproduce`."""
    left_out: tuple[str, ...] = ()
    """Models of the baselines that the user does not want."""
    causal_judge: bool = False
    """True if the judge is a causal LM, whose features MAUVE compares."""
    corpora: str | None = None
    """Folder of the zero-shot corpora; None: the hub."""
    apart: tuple[str, ...] = ()
    """Items that `all` leaves out, since they alone cost as much as the others: name them."""
    reader: Job | str | None = None
    """Teacher of the zero-shot table, where it is another: corpora are streams of text, which a
    model of one text a window cannot read."""
    sequences: int = 1024
    """Rows of a text of which likelihood is measured."""
    readers: "Scale | None" = None
    """The scale whose models read streams of text, for tasks; None: this one's do."""
    corpus: Job | None = None
    """Writes the text that models learn from, where it is made."""
    tasks: Mapping[str, Job | str] = field(default_factory=dict)
    """Files of the downstream tasks by the name of their item."""
    finetuning: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Overrides of the fine-tuning recipes, by task."""
    task_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of the tasks where they are not the defaults."""
    proteins: "Proteins | None" = None
    """Models and data of the items on proteins."""
    batch_size: int = 64
    """Samples that are drawn together."""
    parts: int = 1
    """Jobs that share the settings of a large table, for several GPUs or processes on one."""
    scales_h: tuple[float, ...] = ()
    candidates: tuple[int, ...] = ()
    """h and M of the RGAS landscape."""
    anova_points: int = 0
    anova_h: tuple[float, float] = (20.0, 60.0)
    anova_candidates: tuple[int, int] = (1, 32)
    """Ranges of the functional ANOVA; the paper's by default."""
    guided_budgets: tuple[int, ...] = (8, 16, 32)
    """NFE of landscape and ANOVA."""
    guided_samples: int = 16
    """Samples of each point of landscape and ANOVA; the paper has 16."""
    temperatures: tuple[float, ...] = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
    top_ps: tuple[float, ...] = (0.98, 0.95, 0.9, 0.8)
    """Of the sweep of the baselines, everyone's alike."""
    guidance: Mapping[str, Any] = field(default_factory=dict)
    """Options of RGAS beside its own."""
    latency: Mapping[str, int] = field(default_factory=dict)
    """NFE of each model in the table of latency."""
    latency_batch: int = 16

    @property
    def is_of_proteins(self) -> bool:
        """True if its models are those of the experiments on proteins alone."""
        return self.proteins is not None and self.teacher == self.proteins.teacher

    @property
    def measures_mauve(self) -> bool:
        """True if MAUVE is wanted and the judge can measure it."""
        return self.mauve and self.causal_judge

    @property
    def seed_list(self) -> str:
        """Seeds as text, separated by commas."""
        return ", ".join(map(str, self.seeds))

    def drawing(self, seed: int, num: int | None = None) -> dict[str, Any]:
        """Options of every job that draws and judges."""
        return {
            "num": num or self.samples,
            "seed": seed,
            "batch_size": self.batch_size,
            "until_eot": self.until_eot,
            "judging": dict(self.judge_options),
        }

    @property
    def rivals(self) -> list[str]:
        """Models of the baselines by role, beside the teacher and DiDi-Instruct."""
        return [role for role in self.models if METHODS[role].compared]

    def with_rivals(self, roles: Sequence[str]) -> "Scale":
        """Keep these models of the baselines alone, and those that they start from."""
        unknown = [role for role in roles if role not in self.rivals]
        if unknown or not roles:
            raise UserError(
                f"--rivals {','.join(unknown)}: at scale {self.name} there are "
                f"{', '.join(self.rivals)}."
            )
        wanted = {*roles, *(start for role in roles for start in METHODS[role].starts_from)}
        left_out = tuple(role for role in self.rivals if role not in wanted)
        models = {role: of for role, of in self.models.items() if role not in left_out}
        return replace(self, models=models, left_out=left_out)

    def has(self, role: str) -> bool:
        """True if the scale has a model of that role."""
        return role in COMMON or role in self.models

    @property
    def law(self) -> str:
        """Note on the law of τ of the paper's students at this scale."""
        if self.late_from is None:
            return (
                "One law of τ (Beta(2, 5)) for all budgets; the paper prefers Beta(5, 2) from 32 "
                "NFE on."
            )
        return (
            f"From {self.late_from} NFE on, rows with a law of τ use Beta(5, 2), as in the paper."
        )

    def model(self, role: str, seed: int = 0, nfe: int | None = None) -> Job:
        """A trained model by role; students have seeds, what they learn from has one.

        The larger student's law of τ is that for `nfe` steps.
        """
        training, method = self.models[role], METHODS[role]
        if not method.distilled:
            return Job(
                name=role,
                does="pretrain",
                recipe=training.recipe,
                overrides=training.overrides,
                inputs={} if self.corpus is None else {DATA: self.corpus},
            )
        start = next((start for start in method.starts_from if self.has(start)), None)
        teacher = self.teacher if start is None else self.model(start, seed)
        if self._is_late(training, nfe):
            training, role = _late(training), f"{role}-late"
        return self._student(f"{role}-seed{seed}", training, teacher, seed)

    def ablated(
        self, recipe: str, seed: int, nfe: int | None = None, teacher: Job | str | None = None
    ) -> Job:
        """A student of an ablation recipe; the law of τ is that for `nfe` steps."""
        training, name = Training(recipe, self.ablation), recipe
        if self._is_late(training, nfe):
            training, name = _late(training), f"{recipe}-late"
        of = self.teacher if teacher is None else teacher
        return self._student(f"{name}-seed{seed}", training, of, seed)

    def rival(self, recipe: str, seed: int, nfe: int | None = None) -> Job:
        """The student of an ablation recipe that stands among the baselines."""
        tuned = replace(self, ablation=(*self.ablation, *self.among_rivals))
        job = tuned.ablated(recipe, seed, nfe)
        return replace(job, name=job.name.replace(recipe, "didi"))

    def _student(self, name: str, training: Training, teacher: Job | str, seed: int) -> Job:
        text = {} if self.corpus is None else {DATA: self.corpus}
        return Job(
            name=name,
            does="distill",
            recipe=training.recipe,
            overrides=(*training.overrides, f"train.seed={seed}"),
            inputs={"teacher": teacher, **text},
        )

    def _is_late(self, training: Training, nfe: int | None) -> bool:
        """True if `nfe` calls for the late law of τ and the recipe has the early one."""
        if self.late_from is None or nfe is None or nfe < self.late_from:
            return False
        return load_recipe(DistillConfig, training.recipe).didi.pi == EARLY


def role_of(job: Job) -> str:
    """Role of a model that a scale has made a job of, whose name may end in a seed."""
    return job.name.rpartition("-seed")[0] or job.name


def _late(training: Training) -> Training:
    return Training(training.recipe, (*training.overrides, LATE))
