"""The 64 words of the default oracle language: their classes, their odds and their agreements.

A sentence fills eight slots, `[ every sleepy cat greets Anna quietly ]`. A word belongs to one slot
and may demand something of the latents: a name, a topic, a number or a kind of bracket. Two words
that demand different values of the same latent clash, and that is what `count_mistakes` counts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS = ("open", "determiner", "adjective", "noun", "verb", "name", "adverb", "close")
LATENTS = ("name", "topic", "number", "bracket")

NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Grace", "Hugo")
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))
DETERMINERS = (("this", "every"), ("these", "many"))
VERBS = (("greets", "follows", "helps", "ignores"), ("greet", "follow", "help", "ignore"))
ADVERBS = (
    *("quietly", "often", "today", "again", "slowly"),
    *("gladly", "outside", "twice", "somehow", "anyway"),
)
ADJECTIVES = (
    ("wild", "sleepy", "furry"),
    ("salty", "stormy", "sunken"),
    ("sweet", "spicy", "buttery"),
    ("loud", "jazzy", "tuneful"),
)
NOUNS = (
    (("cat", "horse"), ("cats", "horses")),
    (("boat", "sailor"), ("boats", "sailors")),
    (("cook", "pie"), ("cooks", "pies")),
    (("singer", "drum"), ("singers", "drums")),
)

ZIPF_EXPONENT = 1.0
TOPIC_STAY = 0.7
NUMBER_ODDS = (0.6, 0.4)
BRACKET_ODDS = (0.5, 0.3, 0.2)


@dataclass(frozen=True)
class Word:
    """One word: its slot, its weight inside its class, and the latent values it demands."""

    text: str
    slot: str
    weight: float
    name: int | None = None
    topic: int | None = None
    number: int | None = None
    bracket: int | None = None


def zipf(count: int) -> Tensor:
    """Probabilities proportional to 1 / rank^a, the most frequent first: (count,) float64."""
    weights = torch.arange(1, count + 1, dtype=torch.float64) ** -ZIPF_EXPONENT
    return weights / weights.sum()


def lexicon() -> tuple[Word, ...]:
    """Every word of the default language, in the order of its token ids."""
    words: list[Word] = []

    def add(slot: str, texts: tuple[str, ...], **demands: int) -> None:
        odds = zipf(len(texts)).tolist()
        words.extend(Word(t, slot, p, **demands) for t, p in zip(texts, odds, strict=True))

    for kind, (opening, closing) in enumerate(BRACKETS):
        add("open", (opening,), bracket=kind)
        add("close", (closing,), bracket=kind)
    for index, name in enumerate(NAMES):
        add("name", (name,), name=index)
    for number in range(2):
        add("determiner", DETERMINERS[number], number=number)
        add("verb", VERBS[number], number=number)
    for topic in range(len(NOUNS)):
        add("adjective", ADJECTIVES[topic], topic=topic)
        for number in range(2):
            add("noun", NOUNS[topic][number], topic=topic, number=number)
    add("adverb", ADVERBS)
    return tuple(words)


@dataclass(frozen=True)
class Tables:
    """The default language as numbers; `OracleLanguage` says what each one means."""

    words: tuple[str, ...]
    prior: Tensor
    initial: Tensor
    transition: Tensor
    emission: Tensor
    grammar: Grammar


@dataclass(frozen=True)
class Grammar:
    """Requirements of each word: its slot, and a value of each latent or -1; tensors of (V,)."""

    slot: Tensor
    demands: dict[str, Tensor]

    def to(self, device: torch.device | str) -> Grammar:
        """Copy the tables to another device."""
        demands = {latent: values.to(device) for latent, values in self.demands.items()}
        return Grammar(self.slot.to(device), demands)


@dataclass(frozen=True)
class Mistakes:
    """Fractions of sentences in which something is wrong; a sentence may count in several."""

    name: float
    """The name is not the one most used in the sequence."""
    topic: float
    """Adjective and noun belong to different topics."""
    number: float
    """Determiner, noun and verb are not all singular or all plural."""
    bracket: float
    """The closing bracket does not match the opening one."""
    slot: float
    """Some word stands where no word of its class belongs."""
    any: float
    """At least one of the above."""


def default_tables(eps: float) -> Tables:
    """Build the tables: name is the global latent, (topic, number, bracket) the state."""
    entries = lexicon()
    slot = torch.tensor([SLOTS.index(w.slot) for w in entries])
    demands = {
        latent: torch.tensor([-1 if (d := getattr(w, latent)) is None else d for w in entries])
        for latent in LATENTS
    }
    topics = len(NOUNS)
    states = torch.tensor(list(itertools.product(range(topics), range(2), range(len(BRACKETS)))))

    topic_move = torch.full((topics, topics), (1 - TOPIC_STAY) / (topics - 1), dtype=torch.float64)
    topic_move.fill_diagonal_(TOPIC_STAY)
    fresh = torch.outer(torch.tensor(NUMBER_ODDS).double(), torch.tensor(BRACKET_ODDS).double())
    fresh = (fresh / fresh.sum()).reshape(-1)
    initial = (torch.full((topics, 1), 1 / topics, dtype=torch.float64) * fresh).reshape(-1)
    per_topic = (topic_move[:, :, None] * fresh).reshape(topics, -1)
    transition = per_topic[states[:, 0]]

    allowed = {
        latent: (demands[latent] < 0) | (demands[latent] == states[:, i, None])
        for i, latent in enumerate(LATENTS[1:])
    }
    named = (demands["name"] < 0) | (demands["name"] == torch.arange(len(NAMES))[:, None])
    in_state = allowed["topic"] & allowed["number"] & allowed["bracket"]
    in_slot = slot == torch.arange(len(SLOTS))[:, None]
    weight = torch.tensor([w.weight for w in entries], dtype=torch.float64)
    base = weight * (in_slot[:, None, None] & named[:, None] & in_state)
    base = base / base.sum(-1, keepdim=True)
    return Tables(
        words=tuple(w.text for w in entries),
        prior=zipf(len(NAMES)),
        initial=initial,
        transition=transition,
        emission=(1 - eps) * base + eps / len(entries),
        grammar=Grammar(slot, demands),
    )


def count_mistakes(grammar: Grammar, tokens: Tensor) -> Mistakes:
    """Count broken agreements among words that stand in a slot of their own class.

    A word in the wrong slot is one mistake (`slot`) and is left out of the agreements.
    Shape: tokens (B, n, slots), without masks.
    """
    own_slot = grammar.slot[tokens] == torch.arange(tokens.shape[-1], device=tokens.device)

    def clash(latent: str) -> Tensor:
        values = grammar.demands[latent][tokens].masked_fill(~own_slot, -1)
        lowest = values.masked_fill(values < 0, len(grammar.slot)).amin(-1)
        return values.amax(-1) > lowest

    names = grammar.demands["name"][tokens].masked_fill(~own_slot, -1).amax(-1)
    votes = torch.nn.functional.one_hot(names + 1, len(NAMES) + 1)[..., 1:].sum(1)
    broken = {latent: clash(latent) for latent in LATENTS[1:]}
    broken["name"] = (names >= 0) & (names != votes.argmax(-1, keepdim=True))
    broken["slot"] = ~own_slot.all(-1)
    broken["any"] = torch.stack(list(broken.values())).any(0)
    return Mistakes(**{kind: where.double().mean().item() for kind, where in broken.items()})
