"""Files of the downstream tasks: those of a folder that the user gives, and toy ones.

The package holds no data of the tasks. At toy scale questions ask which word begins or ends a
sentence of the oracle language, pairs are paraphrases where one is the other without its end, and
the corpus is sentences: all go through the readers of the real files, and none of the numbers can
be set against the paper's.
"""

import csv
import io
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from didi_instruct.data.files import write_atomic
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.sources import find_sources
from didi_instruct.errors import UserError
from didi_instruct.reproduce.jobs import Context, Job
from didi_instruct.reproduce.running import RUN
from didi_instruct.tasks.mmlu_data import COLUMNS, LETTERS, Question, prompt_of


def sentences(num: int, seed: int = 0) -> list[str]:
    """Sentences of the oracle language, without the brackets around them."""
    language = OracleLanguage.default()
    tokens = language.sample(-(-num // 4), torch.Generator().manual_seed(seed))
    words = (line.split() for line in language.tokenizer.decode_batch(tokens.tolist()))
    per = language.slots
    found = [" ".join(w[i + 1 : i + per - 1]) for w in words for i in range(0, len(w), per)]
    return found[:num]


NAMES = ("mmlu", "pubmed", "mrpc")
"""Items of downstream tasks, and what the folder of each is called."""
SHARE = 0.5
"""Of MMLU's test questions to learn from, where there is no training split."""
SAYS = (
    "At toy scale the files of the tasks are made of sentences of the oracle language, and models "
    "are trained for seconds: the table shows that all of it runs."
)
QUESTIONS, PAIRS, DOCUMENTS = 96, 120, 160


def find_tasks(folder: str | None) -> dict[str, str]:
    """The files of each task: DIR/mmlu, DIR/mrpc, and DIR/pubmed or DIR/pubmed.jsonl."""
    if folder is None:
        return {}
    found = {}
    for name in NAMES:
        paths = sorted(p for p in Path(folder).glob(f"{name}*") if p.name.split(".")[0] == name)
        if len(paths) > 1:
            names = " and ".join(path.name for path in paths)
            raise UserError(f"--tasks {folder}: {names} are both files of {name}: leave one.")
        if paths:
            found[name] = str(paths[0])
    if not found:
        raise UserError(
            f"--tasks {folder}: has no mmlu/, mrpc/ or pubmed.jsonl, the files of the tasks."
        )
    return found


def learning_share(tasks: Mapping[str, str]) -> tuple[str, ...]:
    """Overrides that cut a part of MMLU's test split to learn from, where it has no other."""
    if "mmlu" not in tasks or _has_train(tasks["mmlu"]):
        return ()
    return (f"answers.share={SHARE}",)


def scored_share(tasks: Mapping[str, str]) -> dict[str, float]:
    """Options that score the other part."""
    return {"sft_share": SHARE} if learning_share(tasks) else {}


def _has_train(folder: str) -> bool:
    return any("auxiliary_train" in source.name for source in find_sources(folder))


def printed_split(tasks: Mapping[str, str]) -> dict[str, str]:
    """The option that reports MRPC on the split that the paper prints, where the files have it."""
    has = "mrpc" in tasks and any("validation" in s.name for s in find_sources(tasks["mrpc"]))
    return {"split": "validation"} if has else {}


# Toy files


def toy_data(name: str) -> Job:
    """The job that writes the data `name`: text, mmlu, pubmed or mrpc."""
    return Job(name=f"toy-{name}", does="write_task_files", options={"data": name})


def write(context: Context, *, data: str) -> dict[str, int]:
    """Write the files of one task; return how many records there are."""
    folder = context.folder / RUN
    folder.mkdir(parents=True, exist_ok=True)
    return {"records": WRITERS[data](folder)}


def _text(folder: Path) -> int:
    """Sentences and answered questions to pretrain on, a document on each line."""
    found = sentences(4000)
    lines = [". ".join(found[i : i + 4]) + "." for i in range(0, len(found), 4)]
    lines += [
        f"{prompt_of(question)} {LETTERS[question.answer]}".replace("\n", " ")
        for question in questions(400, seed=7)
    ]
    random.Random(0).shuffle(lines)
    write_atomic(folder / "text.txt", ("\n".join(lines) + "\n").encode())
    return len(lines)


def _pubmed(folder: Path) -> int:
    found = sentences(4 * DOCUMENTS, seed=2)
    texts = [". ".join(found[i : i + 4]) + "." for i in range(0, len(found), 4)]
    records = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    write_atomic(folder / "pubmed.jsonl", records.encode())
    return len(texts)


def _mmlu(folder: Path) -> int:
    asked = questions(QUESTIONS + 10, seed=3)
    for split, part in (("dev", asked[:10]), ("test", asked[10:])):
        for subject in ("first_words", "last_words"):
            rows = [q for q in part if q.subject == subject]
            file = io.StringIO()
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows([q.text, *q.choices, q.answer] for q in rows)
            path = folder / split / f"{subject}_{split}.csv"
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, file.getvalue().encode())
    return len(asked)


def questions(num: int, seed: int) -> list[Question]:
    """Questions on the first or the last word of a sentence, by turns."""
    rng, found = random.Random(seed), sentences(num, seed=seed)
    words = sorted({word for sentence in found for word in sentence.split()})
    asked = []
    for number, sentence in enumerate(found):
        subject = ("first_words", "last_words")[number % 2]
        true = sentence.split()[0 if subject == "first_words" else -1]
        others = rng.sample([word for word in words if word != true], 3)
        answer = rng.randrange(len(LETTERS))
        choices = (*others[:answer], true, *others[answer:])
        asked.append(Question(subject, sentence, choices, answer, ""))
    return asked


def _mrpc(folder: Path) -> int:
    rng, found = random.Random(4), sentences(3 * PAIRS, seed=4)
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    rows = []
    for number in range(PAIRS):
        first, other = found[2 * number : 2 * number + 2]
        same = rng.random() < 2 / 3  # as in MRPC
        second = " ".join(first.split()[:-1]) if same else other
        rows.append(f"{int(same)}\t{2 * number}\t{2 * number + 1}\t{first}\t{second}\n")
    for split, part in (("train", rows[: -PAIRS // 3]), ("test", rows[-PAIRS // 3 :])):
        path = folder / f"msr_paraphrase_{split}.txt"
        write_atomic(path, ("\ufeff" + header + "".join(part)).encode())
    return len(rows)


WRITERS: dict[str, Callable[[Path], int]] = {
    "text": _text, "pubmed": _pubmed, "mmlu": _mmlu, "mrpc": _mrpc,
}  # fmt: skip
