"""MMLU: multiple-choice questions of 57 subjects, scored by the likelihood of a letter."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from didi_instruct.errors import UserError
from didi_instruct.tasks.baselines import untrained_of
from didi_instruct.tasks.encoding import Encoded, encode_pairs, fit
from didi_instruct.tasks.mmlu_data import (
    LETTERS,
    Mmlu,
    Question,
    hashed,
    read_mmlu,
    split_by_hash,
    with_shots,
)
from didi_instruct.tasks.scoring import TOKENS, Scorer, shares
from didi_instruct.tasks.statistics import against_chance, compare_all, mean_interval, wilson
from didi_instruct.tasks.task import (
    Column,
    NamedModel,
    Progress,
    Row,
    Task,
    TaskReport,
    merged,
)

CHANCE = 1 / len(LETTERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class MmluOptions:
    """Options of the task `mmlu`."""

    split: Literal["test", "validation"] = "test"
    """Questions to answer."""
    shots: int = 0
    """Answered questions of the same subject before each, the first ones of dev."""
    sft_share: float | None = None
    """Share of the test questions that `didi finetune` may have learnt (its `answers.share`), cut
    off by a hash of their text; the others are scored."""
    limit: int | None = None
    """Questions at most: those with the smallest hashes."""
    permute: bool = False
    """Ask four times, the choices rotated so that each has each letter once, and average."""
    draws: int = 4
    """Draws for the likelihood of the answer's text; 0 leaves it out."""
    seed: int = 0
    """Of the draws and of the untrained network."""
    batch_tokens: int = TOKENS
    """Tokens of a forward pass."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        if not 0 <= self.shots <= 5:
            raise UserError(f"shots is {self.shots}: use 0 to 5, as many as dev has.")
        if self.sft_share is not None and not 0 < self.sft_share < 1:
            raise UserError(f"sft_share is {self.sft_share}: use more than 0 and less than 1.")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit is {self.limit}: use 1 or more.")
        if self.draws < 0 or self.seed < 0 or self.batch_tokens < 1:
            raise UserError("draws and seed are 0 or more, batch_tokens 1 or more.")


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a model, by question."""

    right: NDArray[np.float64]  # (N,) 1 or 0; a share where choices tie
    nll: NDArray[np.float64]  # (N,) of the letter, over the vocabulary
    nll_choices: NDArray[np.float64]  # (N,) of the right choice among the four
    letters: NDArray[np.float64]  # (4,) share of each letter among those predicted
    truncated: int  # prompts that lost shots or tokens
    cut: int  # those of them that lost tokens of the question too
    exact: bool  # whether the letters are one token each
    seconds: float


def evaluate(
    models: Sequence[NamedModel], data: Path, options: MmluOptions, progress: Progress
) -> TaskReport:
    """Score models, an untrained network, chance and the most frequent letter."""
    for entry in models:
        _check_unseen(entry, options)
    splits = read_mmlu(data)
    questions, learnt = _choose(splits, options, data)
    shots = _shots(splits.dev, questions, options.shots, data)
    untrained = untrained_of(models, options.seed)
    rows, subjects, remarks = [], [], []
    right: dict[str, NDArray[np.float64]] = {}
    for number, entry in enumerate([*models, *untrained]):
        found = _answer(entry, questions, shots, options, progress)
        row = _row(entry.name, found, questions, options)
        row |= _text_nll(entry, questions, options, progress)
        row["baseline"] = "untrained" if number >= len(models) else None
        rows.append(row)
        subjects += _by_subject(entry.name, questions, found.right)
        right[entry.name] = found.right
        remarks += [(entry.name, remark) for remark in _remarks(row, found)]
    notes = [*merged(remarks, len(rows)), *against_chance(rows, CHANCE)]
    rows.append(_chance_row(len(questions), options.split))
    always = _most_frequent(learnt or questions)
    name = f"always {LETTERS[always]}"
    right[name] = np.array([question.answer == always for question in questions], np.float64)
    rows.append(_majority_row(name, right[name], options.split))
    baselines = [*(entry.name for entry in untrained), name]
    compared, said = compare_all(right, options.seed, baselines)
    return TaskReport(
        task="mmlu",
        rows=rows,
        notes=notes,
        differences=said,
        tables={"subjects": subjects, "comparisons": compared},
        settings={**asdict(options), "questions": len(questions), "ln_4": math.log(4)},
    )


def _check_unseen(entry: NamedModel, options: MmluOptions) -> None:
    """Refuse to score a model on questions that it was fine-tuned on, directly or before."""
    learnt = max(_shares_learnt(entry.model.provenance), default=0.0)
    if options.split == "test" and learnt > (options.sft_share or 0.0):
        raise UserError(
            f"{entry.name} was fine-tuned on a share of the test questions (answers.share="
            f"{learnt:g}): score the others, with --sft-share {learnt:g}."
        )


def _shares_learnt(provenance: Mapping[str, Any]) -> Iterator[float]:
    """Shares of the test split in the recipes of a model and of those it was fine-tuned from."""
    recipe = provenance.get("recipe")
    if isinstance(recipe, dict) and recipe.get("task") == "mmlu":
        yield recipe["answers"]["share"] or 0.0
    for origin in provenance.values():
        if isinstance(origin, dict) and isinstance(origin.get("provenance"), dict):
            yield from _shares_learnt(origin["provenance"])


def _choose(
    splits: Mmlu, options: MmluOptions, data: Path
) -> tuple[list[Question], list[Question]]:
    """Questions to score, and those that tell which letter is frequent."""
    questions = splits.test if options.split == "test" else splits.validation
    if not questions:
        raise UserError(f"{data}: has no split {options.split}: leave out the option `split`.")
    learnt = [*splits.dev, *splits.train]
    if options.sft_share is not None:
        if options.split != "test":
            raise UserError(f"{data}: sft_share cuts a part off test alone: leave it out.")
        taken, questions = split_by_hash(questions, options.sft_share)
        learnt += taken
    if options.limit is not None:
        questions = sorted(questions, key=hashed)[: options.limit]
    if not questions:
        raise UserError(f"{data}: sft_share leaves no question to score: use a smaller share.")
    return questions, learnt


def _shots(
    dev: Sequence[Question], questions: Sequence[Question], count: int, data: Path
) -> dict[str, list[Question]]:
    """The first questions of dev of each subject."""
    shots: dict[str, list[Question]] = {question.subject: [] for question in questions}
    for question in dev:
        if len(shots.get(question.subject, range(count))) < count:
            shots[question.subject].append(question)
    short = next((subject for subject, found in shots.items() if len(found) < count), None)
    if short is not None:
        raise UserError(
            f"{data}: dev has {len(shots[short])} questions of `{short}`, but shots is {count}: "
            "use fewer, or add its dev file."
        )
    return shots


def _answer(
    entry: NamedModel,
    questions: Sequence[Question],
    shots: dict[str, list[Question]],
    options: MmluOptions,
    progress: Progress,
) -> Answers:
    """Score the letters of every question, or of its four rotations."""
    begun = time.perf_counter()
    turns = range(4) if options.permute else range(1)
    orders = [[(place + turn) % 4 for place in range(4)] for turn in turns]
    pairs, dropped, cut = [], 0, 0
    for order in orders:
        encoded, fewer, shortened = _encode(entry, questions, shots, order)
        pairs += encoded
        dropped, cut = dropped + fewer, cut + shortened
    scorer = Scorer(
        entry.model, draws=options.draws, seed=options.seed, batch_tokens=options.batch_tokens
    )
    found = scorer.choices(
        pairs,
        [question.text for _ in orders for question in questions],
        _stage(progress, f"{entry.name}: letters", len(pairs)),
    )
    log_p = torch.stack(found).view(len(orders), len(questions), 4)  # by letter
    answers = torch.tensor([question.answer for question in questions])
    by_choice = torch.empty_like(log_p)
    for turn, order in enumerate(orders):
        by_choice[turn][:, order] = log_p[turn]
    among = by_choice.log_softmax(-1).logsumexp(0) - math.log(len(orders))
    gold = answers[:, None]
    return Answers(
        right=shares(among).gather(1, gold).squeeze(1).numpy(),
        nll=-by_choice.gather(2, gold.expand(len(orders), -1, 1)).mean(0).squeeze(1).numpy(),
        nll_choices=-among.gather(1, gold).squeeze(1).numpy(),
        letters=shares(log_p).mean((0, 1)).numpy(),
        truncated=dropped,
        cut=cut,
        exact=all(len(choice.answer) == 1 for choices in pairs for choice in choices),
        seconds=time.perf_counter() - begun,
    )


def _encode(
    entry: NamedModel,
    questions: Sequence[Question],
    shots: dict[str, list[Question]],
    order: Sequence[int],
) -> tuple[list[list[Encoded]], int, int]:
    """Tokens of the four letters behind each prompt, and how many prompts lost shots or tokens.

    A prompt that is longer than the window loses its first shots, then tokens on the left.
    """
    length, where = entry.model.config.length, [question.where for question in questions]
    letters = encode_pairs(entry, [("Answer:", f" {letter}") for letter in LETTERS], 4 * where[:1])
    longest = max(len(letter.answer) for letter in letters)

    def encode(chosen: Sequence[int], fewer: int) -> list[Encoded]:
        asked = [(questions[i], shots[questions[i].subject][fewer:]) for i in chosen]
        pairs = [(with_shots(question, kept, order), f" {LETTERS[0]}") for question, kept in asked]
        return encode_pairs(entry, pairs, [where[i] for i in chosen])

    first = encode(range(len(questions)), 0)
    over = [i for i, pair in enumerate(first) if len(pair.prompt) + longest > length]
    truncated = len(over)
    for fewer in range(1, max(map(len, shots.values())) + 1):
        for i, pair in zip(over, encode(over, fewer), strict=True):
            first[i] = pair
        over = [i for i in over if len(first[i].prompt) + longest > length]
    result = []
    for question, pair in zip(questions, first, strict=True):
        if pair.answer != letters[0].answer:
            raise UserError(
                f"{question.where}: behind this prompt the tokenizer of {entry.name} reads ` A` as "
                "other tokens than behind `Answer:`: take a model whose tokens end with words."
            )
        choices = [Encoded(pair.prompt, letter.answer) for letter in letters]
        result.append([fit(choice, length, question.where) for choice in choices])
    return result, truncated, len(over)


def _text_nll(
    entry: NamedModel, questions: Sequence[Question], options: MmluOptions, progress: Progress
) -> Row:
    """Likelihood of the right answer's text behind the question alone, without its choices."""
    asked = [question for question in questions if question.choices[question.answer].strip()]
    if options.draws == 0 or not asked:
        return {"nll_text": None, "nll_text_per_token": None}
    texts = [
        (f"Question: {q.text.strip()}\nAnswer:", f" {q.choices[q.answer].strip()}") for q in asked
    ]
    where, length = [question.where for question in asked], entry.model.config.length
    encoded = encode_pairs(entry, texts, where)
    pairs = [fit(pair, length, place) for pair, place in zip(encoded, where, strict=True)]
    scorer = Scorer(
        entry.model, draws=options.draws, seed=options.seed, batch_tokens=options.batch_tokens
    )
    stage = _stage(progress, f"{entry.name}: texts", len(pairs))
    nats = -scorer.answers(pairs, [question.text for question in asked], stage).numpy()
    tokens = sum(len(pair.answer) for pair in pairs)
    return {
        "nll_text": float(nats.mean()),
        "nll_text_ci95": mean_interval(nats),
        "nll_text_per_token": float(nats.sum() / tokens),
        "nll_text_exact": scorer.exact,
        "nll_text_num": len(asked),
        "nll_text_truncated": sum(
            a.prompt != b.prompt for a, b in zip(encoded, pairs, strict=True)
        ),
    }


def _stage(progress: Progress, name: str, total: int) -> Callable[[int], None]:
    return lambda done: progress(name, done, total)


def _row(name: str, found: Answers, questions: Sequence[Question], options: MmluOptions) -> Row:
    num, asked = len(questions), len(questions) * (4 if options.permute else 1)
    return {
        "model": name,
        "split": options.split,
        "num": num,
        "shots": options.shots,
        "accuracy": float(found.right.mean()),
        "accuracy_ci95": wilson(float(found.right.sum()), num),
        "nll": float(found.nll.mean()),
        "nll_ci95": mean_interval(found.nll),
        "nll_choices": float(found.nll_choices.mean()),
        "nll_choices_ci95": mean_interval(found.nll_choices),
        "letters": dict(zip(LETTERS, found.letters.tolist(), strict=True)),
        "one_token_letters": found.exact,
        "prompts": asked,
        "truncated": found.truncated,
        "questions_cut": found.cut,
        "questions_per_second": num / found.seconds,
    }


def _remarks(row: Row, found: Answers) -> list[str]:
    """Sentences on one model's answers, without its name."""
    remarks = []
    if found.truncated:
        remarks.append(
            f"{found.truncated} of {row['prompts']} prompts did not fit the window: "
            f"{found.truncated - found.cut} lost shots, {found.cut} the beginning of the question."
        )
    if texts_cut := row.get("nll_text_truncated"):
        remarks.append(
            f"for the NLL of text {texts_cut} of {row['nll_text_num']} prompts lost their "
            "beginning."
        )
    if not found.exact:
        remarks.append("the tokenizer cuts letters into several tokens; they are scored so.")
    if bool(((found.right > 0) & (found.right < 1)).any()):
        remarks.append("some choices tie, and share the answer.")
    return remarks


def _by_subject(name: str, questions: Sequence[Question], right: NDArray[Any]) -> list[Row]:
    subjects = np.array([question.subject for question in questions])
    rows = []
    for subject in sorted(set(subjects.tolist())):
        own = right[subjects == subject]
        rows.append(
            {
                "model": name,
                "subject": subject,
                "num": len(own),
                "accuracy": float(own.mean()),
                "accuracy_ci95": wilson(float(own.sum()), len(own)),
            }
        )
    return rows


def _chance_row(num: int, split: str) -> Row:
    row: Row = {"model": "chance", "split": split, "num": num, "accuracy": CHANCE}
    return row | {"nll_choices": math.log(len(LETTERS)), "baseline": "chance"}


def _most_frequent(questions: Sequence[Question]) -> int:
    """The letter that is right most often, as an index."""
    counts = Counter(question.answer for question in questions)
    return max(range(len(LETTERS)), key=lambda index: (counts[index], -index))


def _majority_row(name: str, right: NDArray[np.float64], split: str) -> Row:
    return {
        "model": name,
        "split": split,
        "num": len(right),
        "accuracy": float(right.mean()),
        "accuracy_ci95": wilson(float(right.sum()), len(right)),
        "baseline": "majority",
    }


TASK = Task(
    name="mmlu",
    help="multiple choice of 57 subjects, by the likelihood of a letter",
    options=MmluOptions,
    evaluate=evaluate,
    columns=(
        Column("accuracy", "accuracy", "percent"),
        Column("nll_choices", "NLL of 4"),
        Column("nll", "NLL of all"),
        Column("nll_text", "NLL of text"),
        Column("letters", "letters A–D", "shares"),
        Column("truncated", "cut", "count"),
        Column("questions_per_second", "per second"),
    ),
)
