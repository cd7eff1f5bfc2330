"""The model card: README.md of a saved model, for its readers and for the hub.

It says what the configuration and the public part of the provenance say, and claims nothing else:
a licence is named only where somebody gave one. The words are in `model_card.md.j2`.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from didi_instruct.data.files import write_atomic
from didi_instruct.errors import UserError
from didi_instruct.hub.privacy import publishable, without_paths
from didi_instruct.models.checkpoint import LoadedModel, read_json
from didi_instruct.models.dit import parameters_of
from didi_instruct.models.quantised import Storage
from didi_instruct.sampling.registry import USUAL_STEPS

README = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md.j2")
MARK = (
    "<!-- Written by didi, which replaces this file on the next save unless this line is gone. -->"
)

_KINDS = {
    "mdlm": "masked diffusion",
    "duo": "uniform-state diffusion",
    "ar": "left to right",
}
_METHODS = {
    "didi": "DiDi-Instruct",
    "token-matching": "token-level matching",
    "mixture": "mixture steps",
}
_STORED = {
    "float32": "float32",
    "bfloat16": "bfloat16, used as float32",
    "int8": "8 bits with a scale per row (vectors float32), used as float32",
}
_TRAINING_NUMBERS = (
    (
        "quick_evaluation",
        ("teacher", "student"),
        "Of the quick evaluation at the end of training; a name ends with the number of steps.",
    ),
    (
        "held_out",
        ("before", "after"),
        "Of held-out data before and after training, under the same noise; `valid_ci95` is half of "
        "a 95% interval.",
    ),
)
"""Numbers in the provenance: key, columns, caption."""
_SETTINGS = {
    "model": "model",
    "sampler": "sampler",
    "steps": "steps",
    "temperature": "temperature",
    "top_p": "top-p",
}
_MEASURES = {
    "nelbo": "NELBO, nats per token",
    "nelbo_ppl": "NELBO perplexity",
    "ppl": "judge's perplexity",
    "entropy": "unigram entropy, nats",
    "mean_length": "tokens of a text",
    "path_kl": "path KL, nats per text",
    "gap_closed": "gap closed",
    "vsf": "vsF",
    "mauve": "MAUVE",
    "self_bleu": "Self-BLEU",
    "self_bleu_words": "Self-BLEU of words",
    "unique_4gram": "unique 4-grams",
    "c2st_auc": "two-sample AUC",
}
"""Columns of an evaluation by their key in a row; those that no row has are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardOptions:
    """Content of a card that the model's files do not have."""

    license: str | None = None
    """By the hub's name."""
    numbers: Mapping[str, Any] | None = None
    """An evaluation, as `didi eval --json` writes it."""
    about: str | None = None
    """A few words, of the data for example."""

    def __post_init__(self) -> None:
        """Refuse a licence that the hub would refuse."""
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            raise UserError(
                f"license is {self.license!r}: use the hub's short name (mit, apache-2.0, "
                "cc-by-4.0, other)."
            )


@dataclass(frozen=True, slots=True)
class _Table:
    caption: str
    header: Sequence[str]
    rule: str
    rows: Sequence[Sequence[str]]


class _Known:
    """Public provenance of any form, looked up by path."""

    def __init__(self, provenance: Mapping[str, Any]) -> None:
        self._values = publishable(provenance)

    def __call__(self, *path: str) -> Any:
        value: Any = self._values
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def method(self) -> str | None:
        method = self("recipe", "method")
        return None if method is None else _METHODS.get(str(method), str(method))

    @property
    def budgets(self) -> list[int]:
        """Numbers of steps that a student was trained for."""
        found = self("recipe", str(self("recipe", "method")).replace("-", "_"), "budgets")
        return sorted(n for n in found if type(n) is int) if isinstance(found, list) else []


def read_numbers(path: Path) -> dict[str, Any]:
    """Read what `didi eval --json` wrote."""
    value = read_json(path)
    content = value if isinstance(value, dict) else {}
    tables = content.get("rows"), content.get("baseline") or []
    if not tables[0] or not all(
        isinstance(table, list) and all(isinstance(row, dict) for row in table) for table in tables
    ):
        raise UserError(f"{path} holds no rows: give a file that `didi eval --json` wrote.")
    return content


def is_written_by_didi(readme: Path) -> bool:
    """True for a card that may be replaced: nobody took its mark away."""
    return MARK in readme.read_text(encoding="utf-8", errors="replace")


def write_card(folder: Path, text: str) -> None:
    """Write README.md, unless there is one that somebody else wrote."""
    path = folder / README
    if not path.exists() or is_written_by_didi(path):
        write_atomic(path, text.encode())


def model_card(
    name: str, model: LoadedModel, options: CardOptions, storage: Storage | None = None
) -> str:
    """Return the card as Markdown, with the front matter that the hub reads.

    `name` is what `didi.load` finds the model by: a folder, or a name on the hub.
    """
    from huggingface_hub import ModelCard, ModelCardData

    name, config, known = without_paths(name), model.config, _Known(model.provenance)
    kind, hub, recipe = _KINDS[config.kind], known("foreign", "hub"), known("recipe")
    tags = ["didi-instruct", kind.replace(" ", "-")]
    card = ModelCard.from_template(
        ModelCardData(
            library_name="didi-instruct",
            pipeline_tag="text-generation",
            tags=tags + (["distillation", "few-step"] if known.method else []),
            license=options.license,
            base_model=str(hub) if hub else None,
        ),
        template_path=str(TEMPLATE),
        mark=MARK,
        name=name,
        typed=shlex.quote(name),
        quoted=json.dumps(name, ensure_ascii=False),
        kind=kind,
        config=config,
        parameters=parameters_of(model.model),
        discriminator_parameters=parameters_of(model.discriminator) if model.discriminator else 0,
        tokens=model.tokenizer.size if model.tokenizer else 0,
        usual_lengths=_usual_lengths(config.lengths),
        stored=_STORED[storage] if storage else None,
        known=known,
        steps=max(known.budgets, default=USUAL_STEPS),
        about=" ".join((options.about or "").split()),
        recipe=_as_yaml(recipe) if isinstance(recipe, Mapping) else None,
        foreign=isinstance(known("foreign"), Mapping),
        notes=notes if isinstance(notes := known("foreign", "notes"), list) else [],
        numbers=list(_numbers(known, options.numbers)),
        cell=_cell,
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def _usual_lengths(counts: Sequence[int]) -> tuple[int, int] | None:
    """Ends of the middle nine tenths of the lengths that training texts had."""
    total, seen = sum(counts), list(accumulate(counts))
    if not total:
        return None
    low, high = (next(n for n, m in enumerate(seen) if m >= p * total) for p in (0.05, 0.95))
    return low, high


def _numbers(known: _Known, evaluation: Mapping[str, Any] | None) -> Iterator[_Table]:
    """Tables of an evaluation, or of what was measured during training."""
    if evaluation is not None:
        yield _of_evaluation(evaluation)
        return
    for key, heading, caption in _TRAINING_NUMBERS:
        found = {who: known(key, who) for who in heading}
        columns = {who: n for who, n in found.items() if isinstance(n, Mapping) and n}
        names = dict.fromkeys(n for numbers in columns.values() for n in numbers)
        rows = [
            [f"`{_cell(name)}`", *(_with_error(numbers, name) for numbers in columns.values())]
            for name in names
            if not name.endswith("_se")
        ]
        if columns:
            yield _Table(caption, ["", *columns], "---|", rows)


def _of_evaluation(evaluation: Mapping[str, Any]) -> _Table:
    """A row for each of the model and of its baseline."""
    rows = without_paths([*evaluation["rows"], *(evaluation.get("baseline") or [])])
    columns = {key: name for key, name in _SETTINGS.items() if _differs(key, rows)}
    columns |= {k: name for k, name in _MEASURES.items() if any(_is_number(r.get(k)) for r in rows)}
    found = [row.get("num_samples") or row.get("num_sequences") for row in rows]
    counts = sorted({count for count in found if isinstance(count, int)})
    caption = f"{', '.join(map(str, counts))} texts per row" if counts else "Measured"
    if judge := evaluation.get("judge"):
        caption += f", judged by `{_cell(without_paths(str(judge)))}`"
    cells = [[_measured(row, key) for key in columns] for row in rows]
    return _Table(f"{caption}; ± is half of a 95% interval.", [*columns.values()], "--:|", cells)


def _differs(key: str, rows: list[dict[str, Any]]) -> bool:
    """True if a setting tells rows apart; the number of steps is told anyway."""
    values = {str(row.get(key)) for row in rows}
    return len(values) > 1 or (key == "steps" and values != {"None"})


def _measured(row: Mapping[str, Any], key: str) -> str:
    value, interval = row.get(key), row.get(f"{key}_ci95")
    if value is None:
        return "–"
    if key in _SETTINGS or not _is_number(value):
        return _cell(value)
    ends = interval if isinstance(interval, (list, tuple)) else []
    if len(ends) == 2 and all(map(_is_number, ends)):
        return f"{value:.4g} ± {(ends[1] - ends[0]) / 2:.2g}"
    return f"{value:.4g}"


def _with_error(numbers: Mapping[str, Any], name: str) -> str:
    """A number with its standard error (`NAME_se`), if there is one."""
    value, error = numbers.get(name), numbers.get(f"{name}_se")
    if not _is_number(value):
        return "–"
    return f"{value:.4g} ± {error:.2g}" if _is_number(error) else f"{value:.4g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    """One line that breaks no table and opens no tag."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def _as_yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text.rstrip()
