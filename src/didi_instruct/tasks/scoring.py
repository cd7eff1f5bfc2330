"""Log-probabilities of answers given prompts, for every kind of model.

The prompt is never noise. Nothing follows the answer, except where texts have windows of their own
(`config.end_id`): there ends fill the window, as in training, so such a masked model knows the
length of the answer. Rows of a batch are padded on the right; padding is never attended.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.model import Model
from didi_instruct.process import uniform
from didi_instruct.process.masking import with_code
from didi_instruct.sampling.denoiser import make_denoiser
from didi_instruct.sampling.state import Reads
from didi_instruct.seeding import mix
from didi_instruct.tasks.encoding import Encoded

if TYPE_CHECKING:
    from didi_instruct.models.ar import ARModel
    from didi_instruct.models.network import Network

TOKENS = 8192
"""Tokens of a batch, padding included."""
LOGITS = 2**27
"""Most logits that a batch computes."""
AT_ONCE = 256
"""Questions whose rows are held at a time."""
MARGIN = 2.0**-24
"""Distance of times from 0 and 1."""
TIE = 1e-6
"""Log-probabilities that differ by less are equal."""


@dataclass(frozen=True, slots=True)
class Read:
    """A row for the network, and the tokens whose log-probabilities are read from it."""

    tokens: list[int]
    at: list[int]
    """Positions, rising; several tokens may be asked for at one."""
    ids: list[int]
    t: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one forward pass."""

    reads: Reads
    t: Tensor  # (B,)
    at: Tensor  # (R,) flat positions, rising
    ids: Tensor  # (R,)
    row: Tensor  # (R,)
    noisy: Tensor  # (R,) what the rows have at `at`


@dataclass(frozen=True, slots=True)
class Method:
    """A way to ask a kind of model: rows for a prompt and some ids, values from their logits."""

    reads: Callable[[list[int], list[int], np.random.Generator], list[Read]]
    values: Callable[[Batch], Tensor]


def subsets(
    n: int, draws: int, generator: np.random.Generator
) -> Iterator[tuple[list[int], float]]:
    """Sets of masked positions among n, with weights, for the bound of an answer's likelihood.

    -log p(a) <= E_k E_S (n / k) sum_{i in S} -log p(a_i | a outside S), k uniform on 1..n, S
    uniform among the sets of k positions. Where there are no more than `draws` sets all are given:
    the bound itself, with S weighing 1 / (k C(n, k)). Else k is stratified: draw d of D takes
    k = 1 + floor(n (d + u) / D), and S are the positions of the k smallest of n uniform numbers.
    """
    if n < 31 and 2**n - 1 <= draws:
        for k in range(1, n + 1):
            for chosen in combinations(range(n), k):
                yield list(chosen), 1 / (k * math.comb(n, k))
        return
    strata = generator.random(draws)
    # A column for each position: answers of other lengths share those they have.
    numbers = generator.random((n, draws))
    for d in range(draws):
        k = min(n, 1 + math.floor(n * (d + strata[d]) / draws))
        yield sorted(numbers[:, d].argsort()[:k].tolist()), n / k / draws


class Scorer:
    """Log-probabilities of answers under a model.

    Noise is a function of seed and question, so it is common to the choices of a question and to
    all models.
    """

    def __init__(
        self, model: Model, *, draws: int = 8, seed: int = 0, batch_tokens: int = TOKENS
    ) -> None:
        self.model, self.seed, self.batch_tokens = model, seed, batch_tokens
        self.exact = model.config.kind == "ar"
        """True where answers of several tokens have their probability, and not a lower bound."""
        make = {"mdlm": _masked, "duo": _uniform_state, "ar": _left_to_right}[model.config.kind]
        self._one, self._many = make(model, draws)

    def choices(
        self,
        questions: Sequence[Sequence[Encoded]],
        keys: Sequence[str],
        progress: Callable[[int], None] | None = None,
    ) -> list[Tensor]:
        """Log-probability of each choice of each question, float64, by question.

        Choices of one token behind the same prompt share a pass, which gives a masked and an AR
        model's p(choice | prompt) exactly. A uniform-state model's is the probability that its
        denoiser gives at t = 1 to the one noisy position, averaged over the draws of its noise. The
        other questions are scored as `answers`. `keys` name questions for the noise.
        """
        result: list[Tensor] = [torch.empty(0)] * len(questions)
        short = [i for i, choices in enumerate(questions) if _one_token(choices)]
        rest = sorted(set(range(len(questions))) - set(short))
        asked = [
            (questions[i][0].prompt, [choice.answer[0] for choice in questions[i]], keys[i])
            for i in short
        ]
        found = self._run(self._one, asked, progress)
        for i, parts in zip(short, found, strict=True):
            result[i] = torch.stack([v for v, _ in parts]).logsumexp(0) - math.log(len(parts))
        flat = [choice for i in rest for choice in questions[i]]
        names = [keys[i] for i in rest for _ in questions[i]]

        def report(done: int) -> None:
            if progress is not None:
                progress(len(short) + done * len(rest) // len(flat))

        scored = self.answers(flat, names, report)
        parted = torch.split(scored, [len(questions[i]) for i in rest])
        for i, values in zip(rest, parted, strict=True):
            result[i] = values
        return result

    def answers(
        self,
        pairs: Sequence[Encoded],
        keys: Sequence[str],
        progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Log-probability of each answer given its prompt, (N,) float64, in nats.

        Exact for an AR model. For a masked model the bound of `subsets`, exact for one token; where
        it sees the time, k of n masked tokens stand for alpha_t = 1 - k / n. For a uniform-state
        model DUO's NELBO over the answer's positions, with stratified times.
        """
        queries = [(pair.prompt, pair.answer, key) for pair, key in zip(pairs, keys, strict=True)]
        found = self._run(self._many, queries, progress)
        sums = [sum(weight * values.sum() for values, weight in parts) for parts in found]
        return torch.tensor([float(total) for total in sums], dtype=torch.float64)

    @torch.no_grad()
    def _run(
        self,
        method: Method,
        queries: Sequence[tuple[list[int], list[int], str]],
        progress: Callable[[int], None] | None,
    ) -> list[list[tuple[Tensor, float]]]:
        """Values and weight of each row of each query (prompt, ids, key)."""
        found: list[list[tuple[Tensor, float]]] = [[] for _ in queries]
        order = sorted(range(len(queries)), key=lambda i: len(queries[i][0]) + len(queries[i][1]))
        for first in range(0, len(order), AT_ONCE):
            owned = [
                (i, read)
                for i in order[first : first + AT_ONCE]
                for read in method.reads(*queries[i][:2], self._noise(queries[i][2]))
            ]
            done = 0
            for rows in self._batches(owned):
                batch = self._batch([read for _, read in rows])
                values = method.values(batch).double().cpu()
                if not bool(values.isfinite().all()):
                    raise UserError("The model's logits are not numbers: its weights are damaged.")
                parts = torch.split(values, [len(read.ids) for _, read in rows])
                for (i, read), part in zip(rows, parts, strict=True):
                    found[i].append((part, read.weight))
                done += len(rows)
                if progress is not None:
                    chunk = min(AT_ONCE, len(order) - first)
                    progress(first + chunk * done // len(owned))
        return found

    def _noise(self, key: str) -> np.random.Generator:
        return np.random.default_rng(mix(self.seed, "answer", key))

    def _batches(self, owned: Iterable[tuple[int, Read]]) -> Iterator[list[tuple[int, Read]]]:
        """Cut rows into batches of neighbours in length."""
        most = max(1, LOGITS // self.model.config.num_tokens)
        rows: list[tuple[int, Read]] = []
        width = asked = 0
        for row in sorted(owned, key=lambda row: len(row[1].tokens)):
            width, asked = self._width(len(row[1].tokens)), asked + len(row[1].ids)
            if rows and ((len(rows) + 1) * width > self.batch_tokens or asked > most):
                yield rows
                rows, asked = [], len(row[1].ids)
            rows.append(row)
        if rows:
            yield rows

    def _width(self, longest: int) -> int:
        config = self.model.config
        return config.length if config.kind == "mdlm" and config.end_id is not None else longest

    def _batch(self, rows: Sequence[Read]) -> Batch:
        """Pad rows on the right, unattended; where texts have their own windows, with ends."""
        config, device = self.model.config, self.model.device
        lengths = torch.tensor([len(read.tokens) for read in rows])
        width = self._width(int(lengths.max()))
        ends = config.kind == "mdlm" and config.end_id is not None
        fill = config.end_id if ends and config.end_id is not None else 0
        tokens = torch.tensor([r.tokens + [fill] * (width - len(r.tokens)) for r in rows])
        attended = None
        if not ends and bool((lengths < width).any()):
            attended = (torch.arange(width) < lengths[:, None]).to(device)
        counts = torch.tensor([len(read.ids) for read in rows])
        row = torch.arange(len(rows)).repeat_interleave(counts)
        at = row * width + torch.tensor([place for read in rows for place in read.at])
        ids = torch.tensor([token for read in rows for token in read.ids])
        t = torch.tensor([read.t for read in rows])
        return Batch(
            Reads(tokens.to(device), attended),
            *(part.to(device) for part in (t, at, ids, row, tokens.flatten()[at])),
        )


def shares(log_p: Tensor) -> Tensor:
    """1 for the likeliest choice (last axis) and 0 for others; an equal share each where some tie.

    Choices tie that differ by rounding.
    """
    best = log_p >= log_p.amax(-1, keepdim=True) - TIE
    return best / best.sum(-1, keepdim=True).double()


def _one_token(choices: Sequence[Encoded]) -> bool:
    """True where one position behind one prompt tells all choices."""
    first = choices[0].prompt
    return all(len(choice.answer) == 1 and choice.prompt == first for choice in choices)


def _distinct(at: Tensor) -> tuple[Tensor, Tensor]:
    """Rising positions without repetition, and which of them each of `at` is."""
    places, which = torch.unique_consecutive(at, return_inverse=True)
    return places, which


def _log_probs(logits: Tensor, which: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of token `ids` (R,) by row `which` (R,) of the logits."""
    logits = logits.float() if logits.dtype != torch.float64 else logits
    return logits[which, ids] - logits.logsumexp(-1)[which]


def _masked(model: Model, draws: int) -> tuple[Method, Method]:
    """Ask a masked model; with several masks, for the mean of its laws."""
    config, schedule = model.config, model.schedule
    mask_id, masks = config.vocab_size - config.masks, config.masks
    denoiser = make_denoiser(
        cast("Network", model.network), schedule, accelerate=model.is_accelerated
    )

    def one(prompt: list[int], ids: list[int], noise: np.random.Generator) -> list[Read]:
        return [Read([*prompt, mask_id], [len(prompt)] * len(ids), ids, 1.0)]

    def many(prompt: list[int], ids: list[int], noise: np.random.Generator) -> list[Read]:
        reads = []
        for chosen, weight in subsets(len(ids), max(1, draws), noise):
            tokens = [*prompt, *ids]
            for place in chosen:
                tokens[len(prompt) + place] = mask_id
            share = torch.tensor(1 - len(chosen) / len(ids), dtype=torch.float64)
            at, hidden = [len(prompt) + place for place in chosen], [ids[p] for p in chosen]
            reads.append(Read(tokens, at, hidden, float(schedule.time(share)), weight))
        return reads

    def values(batch: Batch) -> Tensor:
        at, which = _distinct(batch.at)
        each = []
        for code in range(masks):
            z = with_code(batch.reads.tokens, mask_id, code)
            logits = denoiser.logits(Reads(z, batch.reads.attended), batch.t, at)
            each.append(_log_probs(logits, which, batch.ids))
        return torch.stack(each).logsumexp(0) - math.log(masks)

    return Method(one, values), Method(many, values)


def _left_to_right(model: Model, draws: int) -> tuple[Method, Method]:
    """Ask an AR model: exact, a pass for each answer, or for all those of one token."""
    network, start = cast("ARModel", model.network), model.config.vocab_size - 1

    def one(prompt: list[int], ids: list[int], noise: np.random.Generator) -> list[Read]:
        return [Read([start, *prompt], [len(prompt)] * len(ids), ids, 0.0)]

    def many(prompt: list[int], ids: list[int], noise: np.random.Generator) -> list[Read]:
        at = range(len(prompt), len(prompt) + len(ids))
        return [Read([start, *prompt, *ids[:-1]], list(at), ids, 0.0)]

    def values(batch: Batch) -> Tensor:
        at, which = _distinct(batch.at)
        return _log_probs(network(batch.reads.tokens, at=at), which, batch.ids)  # causal

    return Method(one, values), Method(many, values)


def _uniform_state(model: Model, draws: int) -> tuple[Method, Method]:
    """Ask a uniform-state model."""
    size, schedule, draws = model.config.num_tokens, model.schedule, max(1, draws)
    denoiser = make_denoiser(
        cast("Network", model.network), schedule, accelerate=model.is_accelerated
    )

    def one(prompt: list[int], ids: list[int], noise: np.random.Generator) -> list[Read]:
        at = [len(prompt)] * len(ids)
        return [Read([*prompt, int(u * size)], at, ids, 1.0) for u in noise.random(draws)]

    def many(prompt: list[int], ids: list[int], noise: np.random.Generator) -> list[Read]:
        at, reads = list(range(len(prompt), len(prompt) + len(ids))), []
        strata, numbers = noise.random(draws), noise.random((len(ids), draws, 2))
        for d in range(draws):
            t = min(max((d + strata[d]) / draws, MARGIN), 1 - MARGIN)
            alpha = float(schedule.alpha(torch.tensor(t, dtype=torch.float64)))
            replaced = [
                token if stay < alpha else int(other * size)
                for token, (stay, other) in zip(ids, numbers[:, d], strict=True)
            ]
            reads.append(Read([*prompt, *replaced], at, ids, t, 1 / draws))
        return reads

    def values(batch: Batch) -> Tensor:
        at, which = _distinct(batch.at)
        return _log_probs(denoiser.logits(batch.reads, batch.t, at), which, batch.ids)

    def minus_cost(batch: Batch) -> Tensor:
        t = batch.t[batch.row]
        logits = denoiser.logits(batch.reads, batch.t, batch.at).float()
        levels = schedule.alpha(t), schedule.alpha_prime(t)
        return -uniform.nelbo_integrand(logits, batch.ids, batch.noisy, *levels)

    return Method(one, values), Method(many, minus_cost)
