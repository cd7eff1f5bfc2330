"""Tiny models of every kind, and questions whose words they know."""

import torch
from tests.models.masked_folders import bert
from tests.random_models import randomise
from torch import nn

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.hub.sources import LoadOptions, load_source
from didi_instruct.model import Model
from didi_instruct.models.dit import build_model
from didi_instruct.tasks.mmlu_data import LETTERS, Question, with_shots

V = 5
"""Real tokens of the tiny models; a mask, a start or none comes on top."""
LENGTH = 9
NO_EPS = ScheduleConfig(eps=0.0)
SHAPE = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "length": LENGTH}
KINDS = {
    "masked": {"vocab_size": V + 1, "schedule": NO_EPS},
    "masks": {"vocab_size": V + 3, "masks": 3, "schedule": NO_EPS},
    "timed": {"vocab_size": V + 1, "time_conditioning": True},
    "windows": {
        "vocab_size": V + 1,
        "schedule": NO_EPS,
        "end_id": 0,
        "lengths": (0, *(1,) * LENGTH),
    },
    "duo": {"kind": "duo", "vocab_size": V, "time_conditioning": True},
    "ar": {"kind": "ar", "vocab_size": V + 1},
}


def tiny(kind, tmp_path=None, **changes):
    """A model whose weights are noise, all of which matter."""
    if kind == "bert":
        bert(tmp_path)
        loaded = load_source(tmp_path, LoadOptions(device="cpu"))
        return Model(loaded.model, loaded.config, loaded.tokenizer)
    config = ModelConfig(**SHAPE | KINDS[kind] | changes)
    return Model(randomise(build_model(config), seed=3), config)


class Table(nn.Module):
    """A masked network that knows prompts by heart: its logits for each are a row of a table.

    What it has never seen it answers with its last row.
    """

    splits, reads_fill = False, True

    def __init__(self, config, prompts, rows):
        super().__init__()
        self.config, self.align = config, 1
        self.places = {tuple(prompt): number for number, prompt in enumerate(prompts)}
        self.rows = nn.Parameter(rows)

    def constants(self):
        return None

    def attention(self, tokens, attended=None):
        return attended

    def modulations(self, sigma=None):
        return None

    def embed(self, tokens, attended=None, mixture=None):
        return tokens[..., None]

    def trunk(self, x, mods=None, attended=None, start=0, stop=None):
        tokens, out = x[..., 0].tolist(), torch.zeros(*x.shape[:2], self.rows.shape[1])
        mask = self.config.mask_id
        for number, row in enumerate(tokens):
            prompt = tuple(row[: row.index(mask)])
            out[number] = self.rows[self.places.get(prompt, len(self.rows) - 1)]
        return out

    def head(self, hidden, mods=None):
        return hidden


def questions_of(count, seed=0, subject="small_talk"):
    """Questions of made-up words, the answers spread over the letters."""
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randint(4, (count,), generator=generator).tolist()
    return [
        Question(subject, f"q{n} ?", tuple(f"c{n}.{m}" for m in range(4)), answer, f"made:{n}")
        for n, answer in enumerate(answers)
    ]


def word_tokenizer(texts):
    """A tokenizer of just the words that some texts have."""
    return Tokenizer.from_words(sorted({word for text in texts for word in text.split()}))


def texts_of(questions, shots=()):
    """All that MMLU shows of questions."""
    prompts = [with_shots(question, shots, range(4)) for question in questions]
    return [*prompts, *LETTERS, "Question:"]


def knowing(questions, orders=(range(4),), letter=None, length=64):
    """A model that knows the answers by heart, or always says one letter."""
    tokenizer = word_tokenizer(texts_of(questions))
    known = tokenizer.vocabulary
    config = ModelConfig(**SHAPE | {"vocab_size": tokenizer.size + 1, "length": length})
    asked = [(question, list(order)) for order in orders for question in questions]
    prompts = tokenizer.encode([with_shots(question, (), order) for question, order in asked])
    rows = torch.zeros(len(prompts) + 1, config.num_tokens)
    for number, (question, order) in enumerate(asked):
        right = LETTERS[order.index(question.answer)]
        rows[number, known[right if letter is None else letter]] = 20.0
    return Model(Table(config, prompts, rows), config, tokenizer)
