"""Prompts to be continued: rows that end with room for an answer.

All answers of a distillation begin at one position, so prompts stand on the right of their part of
a row, and padding on their left. Networks whose positions are relative compute the same for it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.methods import PromptsConfig
from didi_instruct.data.chat import ChatTemplate, find_chat_template
from didi_instruct.data.dataset import shuffled
from didi_instruct.data.readers import read_records
from didi_instruct.data.sources import Meter, find_sources, readable
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.causal_lm import CAUSAL
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.sampling.state import PAD
from didi_instruct.tasks.encoding import Encoded, encode_rows
from didi_instruct.tasks.prompts import Example, text_of

AT_ONCE = 1024
"""Prompts that are encoded together."""


class PromptRows:
    """Rows (count, P + A): prompts of up to P tokens, right-aligned, and A tokens: a `TokenSource`.

    Row i of the stream depends on (seed, i) alone. The last A tokens are an answer and ends of
    text behind it or, where there are no answers, some token that is written over.
    """

    def __init__(
        self, rows: list[Encoded], tokenizer: Tokenizer, length: int, *, fill: int, seed: int = 0
    ) -> None:
        """`length` is A; `fill` follows answers that are shorter."""
        self.tokenizer, self.seed, self.num_tokens = tokenizer, seed, tokenizer.size
        self.num_sequences = len(rows)
        self._after, self._fill = length, fill
        self._counts = np.array([[len(row.prompt), len(row.answer)] for row in rows], np.int64)
        self._starts = np.concatenate([[0], self._counts.sum(1).cumsum()])
        self._tokens = np.array([t for row in rows for t in (*row.prompt, *row.answer)], np.int32)
        self.length = int(self._counts[:, 0].max()) + length
        parts = (self._tokens.tobytes(), self._counts.tobytes(), f"{length}/{fill}/{seed}".encode())
        self.fingerprint = hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"PromptRows({self.num_sequences} prompts, rows of {self.length} tokens)"

    def rows(self, start: int, count: int) -> torch.Tensor:
        """Return rows start .. start + count - 1 of the shuffled stream, (count, length), int64."""
        return self._gather(shuffled(start, count, self.num_sequences, self.seed))

    def ordered(self, start: int, count: int) -> torch.Tensor:
        """Return rows in the order of the file, for evaluation; fewer at its end."""
        return self._gather(np.arange(start, min(start + count, self.num_sequences)))

    def _gather(self, indices: np.ndarray) -> torch.Tensor:
        found = np.full((len(indices), self.length), PAD, np.int64)
        middle = self.length - self._after
        found[:, middle:] = self._fill
        for row, index in enumerate(indices):
            prompt, answer = self._counts[index]
            begin = self._starts[index]
            tokens = self._tokens[begin : begin + prompt + answer]
            found[row, middle - prompt : middle + answer] = tokens
        return torch.from_numpy(found)


def open_prompts(
    config: DistillConfig, teacher: LoadedModel, folder: str, say: Callable[[str], None]
) -> PromptRows | None:
    """Prompts of a run in the tokens of its teacher, whose chat template is in a folder, if any.

    None where the run continues no prompts.
    """
    if not config.prompts.source:
        if config.prompts.longest:
            raise UserError("The recipe distils answers: name prompts with prompts.source=...")
        return None
    template = find_chat_template(folder) if config.prompts.chat else None
    rows, notes = read_prompts(
        config.prompts,
        teacher,
        folder,
        answers=config.reads_data,
        seed=config.train.seed,
        template=template,
    )
    for note in notes:
        say(note)
    return rows


def read_prompts(
    config: PromptsConfig,
    loaded: LoadedModel,
    source: str,
    *,
    answers: bool,
    seed: int,
    template: ChatTemplate | None = None,
) -> tuple[PromptRows, list[str]]:
    """Read and encode prompts for a teacher; also sentences to tell about them.

    With `answers`, each row has one. A `template` writes prompts as messages of a user.
    """
    tokenizer, model = loaded.tokenizer, loaded.config
    if tokenizer is None:
        raise UserError(f"{source} brings no tokenizer: name the one it was trained with.")
    _check_positions(loaded, source)
    room = model.length - config.length
    if room < 1:
        raise UserError(
            f"prompts.length is {config.length}, but {source} reads {model.length} tokens: no room "
            "would be left for a prompt."
        )
    longest = room if config.longest is None else min(room, config.longest)
    examples = _read(str(config.source), answers, template)
    # What a template ends with belongs to the prompt, white space too.
    encoded = list(_encode(examples, tokenizer, joint=answers and template is None))
    if any(not row.prompt for row in encoded):
        raise UserError(f"{config.source}: the tokenizer leaves nothing of a prompt: reword it.")
    kept = [r for r in encoded if len(r.prompt) <= longest and len(r.answer) <= config.length]
    notes = []
    if left := len(encoded) - len(kept):
        notes.append(
            f"{left:,} of {len(encoded):,} prompts are left out: of more than {longest} tokens, or "
            f"with an answer of more than {config.length}."
        )
    if not kept:
        raise UserError(f"{config.source}: no prompt fits: raise prompts.longest or shorten them.")
    shorter = answers and any(len(row.answer) < config.length for row in kept)
    if shorter and (tokenizer.eot_id is None or tokenizer.eot_id in model.banned):
        raise UserError(
            f"{config.source}: answers have less than prompts.length ({config.length}) tokens, and "
            f"{source} has no end of text to fill up with: use reference.source=bank."
        )
    fill = tokenizer.eot_id if shorter else None
    if fill is None:  # some token that may be written
        fill = next(i for i in range(model.num_tokens) if i not in set(model.banned))
    return PromptRows(kept, tokenizer, config.length, fill=fill, seed=seed), notes


def _check_positions(loaded: LoadedModel, source: str) -> None:
    """Refuse networks that would compute something else behind padding."""
    network: Any = loaded.model
    record, model = network.record, loaded.config
    relative = not model.learned_positions
    if record is not None:
        relative = record.settings["model_type"] in CAUSAL
    if not relative or model.end_id is not None:
        raise UserError(
            f"prompts.source is set, but {source} counts positions from the start of a text, or "
            "its texts have windows of their own: use LLaDA, Dream or another of their shapes, or "
            "a DiT without learned positions."
        )


def _read(path: str, answers: bool, template: ChatTemplate | None) -> Iterator[Example]:
    """Prompts of .jsonl files; where there is a template, as messages."""
    sources = [source for source in find_sources(path) if source.kind == "jsonl"]
    empty = True
    for source in sources:
        with readable(source):
            for where, record in read_records(source, Meter()):
                prompt, empty = text_of(record, "prompt", where), False
                if template is not None:
                    prompt = template.prompt([{"role": "user", "content": prompt}])
                answer = text_of(record, "answer", where) if answers else ""
                yield Example(prompt, answer, where)
    if empty:
        raise UserError(f'{path}: has no prompts; write one a line, as {{"prompt": "2 + 2 ="}}.')


def _encode(examples: Iterable[Example], tokenizer: Tokenizer, *, joint: bool) -> Iterator[Encoded]:
    """Encode prompts and answers, jointly as in fine-tuning or each on its own."""
    left = iter(examples)
    while batch := list(islice(left, AT_ONCE)):
        if joint:
            where = [one.where for one in batch]
            yield from encode_rows([(one.prompt, one.answer) for one in batch], where, tokenizer)
        else:
            prompts = tokenizer.encode([one.prompt for one in batch])
            answers = tokenizer.encode([one.answer for one in batch])
            yield from map(Encoded, prompts, answers)
