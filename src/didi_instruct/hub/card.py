"""The model card: README.md of a saved model, for its readers and for the hub.

It says what the configuration and the provenance say. What they do not, it does not: a licence is
named only where somebody gave one.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.files import write_atomic
from didi_instruct.errors import UserError
from didi_instruct.hub.card_numbers import table
from didi_instruct.hub.private import publishable, without_paths
from didi_instruct.models.quantised import Storage
from didi_instruct.sampling.registry import USUAL_STEPS

README = "README.md"
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
_KEPT_NUMBERS = (
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
"""Numbers in the provenance: key, columns, and what they are."""
_OWN_WINDOW = {
    "mdlm": "Each text has a window of its own: its length is drawn first, as often as the "
    "training texts had it, then all of the text is written, and nothing after its end. `length` "
    "(`--length`) sets the length instead.",
    "ar": "Each text has a window of its own, from its first word to its end-of-text.",
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a card is about."""

    name: str
    """What `didi.load` finds it by: a folder, or a name on the hub."""
    config: ModelConfig
    parameters: int
    discriminator_parameters: int | None = None
    tokens: int | None = None
    """Of its tokenizer, if it has one."""
    license: str | None = None
    """By the hub's name."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    storage: Storage | None = None
    """How the weights are kept in the file, if not as they are used."""
    numbers: Mapping[str, Any] | None = None
    """What `didi eval --json` wrote of it."""
    about: str | None = None
    """Words of whoever saves it: what it learned from, what it is good for."""

    def __post_init__(self) -> None:
        """Refuse a licence that the hub would refuse."""
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            raise UserError(
                f"license is {self.license!r}: use the hub's short name (mit, apache-2.0, "
                "cc-by-4.0, other)."
            )

    def look_up(self, *path: str) -> Any:
        """Return a value of the provenance, None where it is silent."""
        value: Any = self.provenance
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def is_ours(readme: Path) -> bool:
    """Whether a card was written by didi, and by nobody else."""
    return MARK in readme.read_text(encoding="utf-8", errors="replace")


def write_card(folder: Path, subject: Subject) -> bool:
    """Write README.md, unless there is one that somebody else wrote; return whether it was."""
    path = folder / README
    if path.exists() and not is_ours(path):
        return False
    write_atomic(path, card(subject).encode())
    return True


def card(subject: Subject) -> str:
    """Return the card as Markdown, with the front matter that the hub reads."""
    public = publishable(subject.provenance)
    subject = replace(subject, name=without_paths(subject.name), provenance=public)
    matter = yaml.safe_dump(front_matter(subject), sort_keys=False, allow_unicode=True)
    lines = ["---", matter.rstrip(), "---", MARK, "", f"# {subject.name}", ""]
    for part in (_summary, _architecture, _use, _training, _foreign, _numbers, _licence):
        lines += [*part(subject), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def front_matter(subject: Subject) -> dict[str, Any]:
    """Return what the hub sorts models by; only what is known."""
    tags = ["didi-instruct", _KINDS[subject.config.kind].replace(" ", "-")]
    if _method(subject):
        tags += ["distillation", "few-step"]
    matter: dict[str, Any] = {
        "library_name": "didi-instruct",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    if subject.license is not None:
        matter["license"] = subject.license
    if subject.look_up("foreign", "hub"):
        matter["base_model"] = str(subject.look_up("foreign", "hub"))
    return matter


def _method(subject: Subject) -> str | None:
    method = subject.look_up("recipe", "method")
    return None if method is None else _METHODS.get(str(method), str(method))


def _base(subject: Subject) -> str | None:
    """The model that it was fine-tuned from."""
    source = subject.look_up("finetuned_from", "source")
    return None if source is None else str(source)


def _budgets(subject: Subject) -> list[int]:
    """Numbers of steps that a student was trained for, as its method's settings say."""
    method = str(subject.look_up("recipe", "method")).replace("-", "_")
    found = subject.look_up("recipe", method, "budgets")
    if not isinstance(found, (list, tuple)):
        return []
    return sorted(n for n in found if type(n) is int)


def _summary(subject: Subject) -> Iterator[str]:
    size = f"{subject.parameters:,} parameters"
    made = "" if _method(subject) is None else f", distilled by {_method(subject)}"
    if _base(subject) is not None:
        made = f", fine-tuned from `{_cell(_base(subject))}`"
    budgets = _budgets(subject)
    steps = f" for texts in {_either(budgets)} steps" if budgets else ""
    yield f"A language model of {_KINDS[subject.config.kind]} with {size}{made}{steps}."
    if subject.about is not None:
        yield from ("", " ".join(subject.about.split()))
    if subject.config.end_id is not None:
        yield from ("", _OWN_WINDOW[subject.config.kind])


def _either(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _architecture(subject: Subject) -> Iterator[str]:
    config = subject.config
    extra = {"mdlm": ", the mask included", "ar": ", the start symbol included"}
    critic, tokens = subject.discriminator_parameters, subject.tokens
    rows = {
        "kind": f"`{config.kind}` ({_KINDS[config.kind]})",
        "layers × hidden × heads": f"{config.layers} × {config.hidden} × {config.heads}",
        "parameters": f"{subject.parameters:,}",
        "vocabulary": f"{config.vocab_size:,}{extra.get(config.kind, '')}",
        "mask id": "none" if config.mask_id is None else f"{config.mask_id:,}",
        **({"masks (codes of a step)": f"{config.masks:,}"} if config.masks > 1 else {}),
        "longest text": f"{config.length:,} tokens",
        **({"usual text": _usual(config)} if any(config.lengths) else {}),
        "sees the time": "yes" if config.time_conditioning else "no",
        "noise schedule": f"{config.schedule.name}, ε {config.schedule.eps:g}",
        "discriminator": "none" if critic is None else f"{critic:,} parameters",
        "tokenizer": "none" if tokens is None else f"{tokens:,} tokens, in `tokenizer.json`",
        **({"weights in the file": _STORED[subject.storage]} if subject.storage else {}),
    }
    if config.kind == "ar":
        for name in ("sees the time", "noise schedule", "mask id"):
            del rows[name]
    yield from ("## Architecture", "", "| | |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in rows.items())


def _usual(config: ModelConfig) -> str:
    """The middle nine tenths of the lengths that training texts had."""
    total, seen = sum(config.lengths), 0
    ends: list[int] = []
    for length, count in enumerate(config.lengths):
        seen += count
        while len(ends) < 2 and seen >= (0.05, 0.95)[len(ends)] * total:
            ends.append(length)
    return f"{ends[0]:,} to {ends[1]:,} tokens (nine in ten training texts)"


def _use(subject: Subject) -> Iterator[str]:
    name, steps = shlex.quote(subject.name), max(_budgets(subject), default=USUAL_STEPS)
    yield from ("## Use", "", "With `didi-instruct` installed:", "", "```bash")
    yield f"didi info {name}"
    if subject.tokens is not None:
        yield f"didi generate {name} --steps {steps} --num 4"
    yield from ("```", "", "```python", "import didi_instruct as didi", "")
    yield f"model = didi.load({json.dumps(subject.name, ensure_ascii=False)})"
    call = "sample" if subject.tokens is None else "generate"
    yield from (f"print(model.{call}(num=4, steps={steps}, seed=0))", "```")


def _training(subject: Subject) -> Iterator[str]:
    yield from ("## Training", "")
    recipe = subject.look_up("recipe")
    facts = {
        "data": subject.look_up("recipe", "data", "source"),
        "task": subject.look_up("recipe", "task"),
        "method": _method(subject),
        "steps of sampling it was trained for": ", ".join(map(str, _budgets(subject))) or None,
        "steps": subject.look_up("step"),
        "batch": subject.look_up("recipe", "train", "batch_size"),
        "learning rate": subject.look_up("recipe", "optim", "lr"),
        "seed": subject.look_up("recipe", "train", "seed"),
        "fine-tuned from": _base(subject),
        "(SHA-256 of its weights)": subject.look_up("finetuned_from", "sha256"),
        "teacher (SHA-256 of its weights)": subject.look_up("teacher"),
        "reproduces": subject.look_up("reproduces"),
        "didi-instruct": subject.look_up("didi_instruct"),
        "torch": subject.look_up("torch"),
    }
    known = {name: value for name, value in facts.items() if value is not None}
    if not known:
        yield "The files say nothing about how it was trained, or on what."
        return
    yield from ("| | |", "|---|---|")
    yield from (f"| {name} | {_cell(value)} |" for name, value in known.items())
    if isinstance(recipe, Mapping):
        settings = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).rstrip()
        yield from ("", "<details><summary>The recipe</summary>", "", "```yaml", settings, "```")
        yield from ("", "</details>")


def _foreign(subject: Subject) -> Iterator[str]:
    source = subject.look_up("foreign")
    if not isinstance(source, Mapping):
        return
    name = _cell(source.get("source"))
    yield from ("## Where the weights come from", "")
    layout, weights = source.get("layout"), source.get("weights")
    yield f"Read from `{name}` (layout `{layout}`, weights `{weights}`)."
    notes = source.get("notes")
    yield ""
    yield from (f"- {_cell(note)}" for note in (notes if isinstance(notes, list) else []))


def _numbers(subject: Subject) -> Iterator[str]:
    if subject.numbers is not None:
        yield from ("## Numbers", "", *table(subject.numbers))
        return
    for key, heading, about in _KEPT_NUMBERS:
        found = {who: subject.look_up(key, who) for who in heading}
        columns = {who: n for who, n in found.items() if isinstance(n, Mapping) and n}
        if columns:
            yield from ("## Numbers", "", about, "")
            yield from _columns(columns)


def _columns(columns: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A table of numbers by name, standard errors (`NAME_se`) beside what they belong to."""
    names = dict.fromkeys(n for numbers in columns.values() for n in numbers)
    yield f"| | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for name in names:
        if not name.endswith("_se"):
            cells = (_number(numbers, name) for numbers in columns.values())
            yield f"| `{name}` | {' | '.join(cells)} |"


def _licence(subject: Subject) -> Iterator[str]:
    yield from ("## Licence", "")
    if subject.license is not None:
        yield f"`{subject.license}`"
    else:
        yield "Unknown: ask who published the weights and the data before you use them."


def _number(numbers: Mapping[str, Any], name: str) -> str:
    value, error = numbers.get(name), numbers.get(f"{name}_se")
    if not isinstance(value, (int, float)):
        return "–"
    return f"{value:.4g} ± {error:.2g}" if isinstance(error, (int, float)) else f"{value:.4g}"


def _cell(value: Any) -> str:
    """One line that breaks no table and opens no tag."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
