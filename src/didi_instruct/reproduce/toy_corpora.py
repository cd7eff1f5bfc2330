"""Stand-ins for the zero-shot corpora at toy scale: tiny texts in the files' own forms.

There is no corpus of real text in the package, so sentences of the oracle language are written the
way each corpus is handed around (tokenised, with headings, as records). They go through the same
readers, detokenisers and packing as the real ones; their perplexities mean nothing.
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from didi_instruct.data.files import write_atomic
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distill import distill
from didi_instruct.pretrain import pretrain
from didi_instruct.reproduce.running import StoppedError

SAYS = (
    "At toy scale there is no corpus: the seven are sentences of the oracle language, written in "
    "each corpus's form, under models of letters that were trained for seconds."
)
MODEL = (
    "model.length=64", "model.hidden=64", "model.learned_positions=false", "data.tokenizer=bytes",
    "train.batch_size=16", "train.eval_sequences=16", "optim.warmup=10",
)  # fmt: skip
STUDENT = (
    "train.batch_size=16", "train.eval_every=0", "train.eval_sequences=16", "train.ema=0.9",
    "watch.budgets=[]", "reference.rows=128", "reference.steps=16", "discriminator.warmup=5",
    "discriminator.chance=0",  # in so few steps it is always at chance, and the student would wait
)  # fmt: skip


def sentences(num: int, seed: int = 0) -> list[str]:
    """Sentences of the oracle language, without the brackets around them."""
    language = OracleLanguage.default()
    tokens = language.sample(-(-num // 4), torch.Generator().manual_seed(seed))
    words = (line.split() for line in language.tokenizer.decode_batch(tokens.tolist()))
    per = language.slots
    found = [" ".join(w[i + 1 : i + per - 1]) for w in words for i in range(0, len(w), per)]
    return found[:num]


def write_text(path: Path, num: int = 2000) -> None:
    """Text to learn from: a paragraph of a few sentences on each line."""
    found = sentences(num)
    lines = [". ".join(found[i : i + 4]) + "." for i in range(0, num, 4)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def write_corpora(folder: Path, num: int = 64) -> None:
    """The seven files, `num` documents each, no two of the same sentences."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, form) in enumerate(FORMS.items()):
        texts = sentences(num, seed=1 + number)
        write_atomic(folder / name, form(texts).encode())


def _lines(form: str) -> Callable[[Sequence[str]], str]:
    return lambda texts: "".join(form.format(text) for text in texts)


def _records(field: str) -> Callable[[Sequence[str]], str]:
    return lambda texts: "".join(json.dumps({field: f"{text}."}) + "\n" for text in texts)


def _rows(texts: Sequence[str]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows(("1", text.split()[0].title(), f"{text}.") for text in texts)
    return file.getvalue()


FORMS: dict[str, Callable[[Sequence[str]], str]] = {
    "ptb.test.txt": lambda texts: _lines(" {} <unk> N \n")([text.lower() for text in texts]),
    "wikitext.test.raw": _lines(" = A title = \n\n {} , well @-@ known . \n"),
    "lm1b.test.txt": _lines("{} .\n"),
    "lambada.test.jsonl": _records("text"),
    "ag_news.test.csv": _rows,
    "pubmed.jsonl": _records("text"),
    "arxiv.jsonl": _records("abstract"),
}
"""By the name of the file, what stands in it."""


def toy_models(folder: Path, *, steps: int = 120, device: str | None = None) -> dict[str, str]:
    """A teacher of letters and a student of it, trained here; what is finished stays."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    teacher, student = folder / "teacher", folder / "student"
    data = (f"data.source={text}", "data.documents=line")
    trained = pretrain(
        "oracle-teacher",
        out=teacher,
        overrides=[*MODEL, *data, f"train.steps={steps}"],
        resume=teacher.exists(),
        device=device,
    )
    if trained.outcome.signal is not None:
        raise StoppedError(trained.outcome.signal)
    distilled = distill(
        "oracle-didi",
        teacher=teacher,
        out=student,
        overrides=[*STUDENT, *data, f"train.steps={max(6, steps // 6)}"],
        resume=student.exists(),
        device=device,
    )
    if distilled.outcome.signal is not None:
        raise StoppedError(distilled.outcome.signal)
    return {"teacher": str(teacher), "student": str(student)}
