"""Features of texts from a network of which the last block alone learns, under a linear head.

The blocks below are frozen and in evaluation mode, so what they make of a text is computed once
and kept. Texts are clean (σ = 0). They are read in batches of one length, so without padding;
where the last block reads texts of several lengths, none attends to the padding of another.
"""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from didi_instruct.data.files import no_space_as_user_error, require_space
from didi_instruct.errors import UserError
from didi_instruct.models.network import Modulations, Network
from didi_instruct.models.tensor_files import read_headers, read_tensors, save_tensors
from didi_instruct.seeding import mix
from didi_instruct.transfer import sent

VERSION = 1
"""Raised where frozen states change, so that older files are not read."""
TOKENS_AT_ONCE = 1 << 14
"""Tokens of a batch of texts without gradients."""

Report = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


class Encoder(Protocol):
    """Parts of a network that features need; denoisers and left-to-right models have them.

    A block takes the state (B, L', d) as its first argument. L' may be more than L, where a network
    frames texts by tokens of its own, which `trunk` cuts off.
    """

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: (B, L) -> (B, L', d)."""

    def modulations(self, sigma: Tensor | float | None = None) -> Modulations | None:
        """Condition on σ, a number; None where the network knows no time."""

    def trunk(
        self, x: Tensor, mods: Modulations | None = None, attended: Tensor | None = None
    ) -> Tensor:
        """State after the last block: (B, L', d) -> (B, L, d), in float32; attended (B, L)."""


# Frozen blocks


class _ReachedError(Exception):
    """Carries the state out of a pass that goes no further."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


@torch.no_grad()
def states_below(network: nn.Module, tokens: Tensor) -> Tensor:
    """State of clean texts that the last block reads: (B, L) -> (B, L', d); it does not run."""

    def stop(block: nn.Module, arguments: tuple[Any, ...]) -> None:
        raise _ReachedError(arguments[0])

    encoder, last = cast("Encoder", network), _blocks(network)[-1]
    hook = last.register_forward_pre_hook(stop)
    try:
        encoder.trunk(encoder.embed(tokens), encoder.modulations(0.0))
    except _ReachedError as reached:
        return reached.state.float()
    finally:
        hook.remove()
    raise AssertionError("a trunk runs its last block")


class FrozenStates:
    """What the last block reads of each of N texts, one after the other.

    rows (sum of L', d) in float32; `lengths` are the L of each text, of which the first `counted`
    tokens are its own and the rest fill its window.
    """

    def __init__(self, rows: Tensor, lengths: Sequence[int], counted: Sequence[int]) -> None:
        self.rows, self.lengths, self.counted = rows, list(lengths), list(counted)
        self.frame = (len(rows) - sum(lengths)) // len(lengths)  # L' - L
        self._ends = [0, *accumulate(length + self.frame for length in lengths)]

    def batch(self, texts: Sequence[int], device: torch.device) -> "Batch":
        """Texts as one batch, padded to the longest of them."""
        parts = [self.rows[self._ends[i] : self._ends[i + 1]] for i in texts]
        states = sent(pad_sequence(parts, batch_first=True), device)
        lengths = torch.tensor([self.lengths[i] for i in texts])
        counted = torch.tensor([self.counted[i] for i in texts])
        positions = torch.arange(int(lengths.max()))
        attended = None
        if bool((lengths < len(positions)).any()):
            attended = sent(positions < lengths[:, None], device)
        return Batch(states, attended, sent(positions < counted[:, None], device))


@dataclass(frozen=True, slots=True)
class Batch:
    """What the last block reads of some texts."""

    states: Tensor  # (B, longest L', d), zero behind each text
    attended: Tensor | None  # (B, longest L); None: all
    counted: Tensor  # (B, longest L) tokens of the texts themselves


@dataclass(frozen=True, slots=True)
class FilledWindow:
    """Length that all texts of a model have, with the token that fills it."""

    length: int
    fill: int


def frozen_states(
    network: nn.Module,
    texts: Sequence[Sequence[int]],
    window: FilledWindow | None,
    path: Path | None,
    report: Report,
) -> FrozenStates:
    """States of token ids under a network, read from a file if it is there, and else written to it.

    The file's name has to tell apart all that the states depend on: `network_digest` and tokens.
    """
    counted = [len(text) for text in texts]
    if window is not None:
        texts = [[*text, *[window.fill] * (window.length - len(text))] for text in texts]
    rows = None if path is None else _read(path)
    if rows is None:
        rows = _computed(network, texts, report)
        if path is not None:
            with no_space_as_user_error(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                require_space(path.parent, rows.nbytes)
                save_tensors(path, {"states": rows})
    return FrozenStates(rows, [len(text) for text in texts], counted)


def network_digest(network: nn.Module) -> str:
    """SHA-256 of a network's weights, and of all else that its states and their fitting depend on.

    That is what shapes of weights do not tell: heads, the window that texts fill, dropout in the
    last block, and a masked LM's settings.
    """
    config, record = cast("Network", network).config, cast("Network", network).record
    told = (
        VERSION,
        config.kind,
        config.heads,
        config.length,
        config.dropout,
        config.time_conditioning,
        config.end_id,
        None if record is None else json.dumps(record.settings, sort_keys=True),
        None if record is None else (record.before, record.after),
    )
    digest = hashlib.sha256(repr(told).encode())
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = tensor.detach().cpu().contiguous().view(-1)
        digest.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()


def _computed(network: nn.Module, texts: Sequence[Sequence[int]], report: Report) -> Tensor:
    """Run the frozen blocks on batches of texts of one length; rows as in `FrozenStates`."""
    device, done = next(network.parameters()).device, 0
    rows, ends = torch.empty(0), [0]
    for batch in _equal_lengths(texts):
        tokens = torch.tensor([list(texts[i]) for i in batch])
        states = states_below(network, sent(tokens, device)).cpu()
        if not len(rows):
            frame = states.shape[1] - tokens.shape[1]
            ends = [0, *accumulate(len(text) + frame for text in texts)]
            rows = torch.empty(ends[-1], states.shape[2])
        for i, state in zip(batch, states, strict=True):
            rows[ends[i] : ends[i + 1]] = state
        done += len(batch)
        report(done, len(texts))
    return rows


def _equal_lengths(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices of texts of one length, batch by batch."""
    by_length: dict[int, list[int]] = {}
    for i, text in enumerate(texts):
        by_length.setdefault(len(text), []).append(i)
    for length, members in sorted(by_length.items()):
        size = max(1, TOKENS_AT_ONCE // length)
        for first in range(0, len(members), size):
            yield members[first : first + size]


def _read(path: Path) -> Tensor | None:
    """Rows of a file, memory-mapped; None where there is none, or none that can be read."""
    try:
        shape = read_headers(path)["states"][1]
        return dict(read_tensors(path, {"states": shape}))["states"]
    except (UserError, KeyError):
        return None


# The last block and its head


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How the last block and the head learn: AdamW at a constant rate."""

    steps: int
    batch_size: int
    lr: float
    weight_decay: float
    evaluations: int
    """On the dev texts, evenly spaced; the best is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Labels of all texts, and which texts each part has."""

    labels: list[int]
    train: list[int]
    dev: list[int]
    test: list[int]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Predictions of what was learnt with one seed."""

    probs: list[float]
    """Probability of label 1 of each text asked for."""
    step: int
    """The one whose weights were kept."""
    dev_accuracy: float
    """There, which is the highest of all evaluations."""


@contextmanager
def last_block_alone(network: nn.Module) -> Iterator[nn.Module]:
    """Put a copy of the last block, in float32, in place of all blocks, and back at the end.

    The copy is what learns. All else of the network, such as a final norm, is frozen.
    """
    blocks = _blocks(network)
    kept, learns = list(blocks), [(p, p.requires_grad) for p in network.parameters()]
    last = copy.deepcopy(blocks[-1]).float()
    network.requires_grad_(False)
    last.requires_grad_(True)
    del blocks[:]
    blocks.append(last)
    try:
        yield last
    finally:
        del blocks[:]
        blocks.extend(kept)
        for parameter, before in learns:
            parameter.requires_grad_(before)


def pooled(network: nn.Module, batch: Batch, mods: Modulations | None) -> Tensor:
    """Mean over a text's own tokens of its last states, (B, d), within `last_block_alone`.

    Each state is normalised first, without weights: a DiT's own final norm belongs to its output
    layer.
    """
    encoder, last = cast("Encoder", network), _blocks(network)[-1]
    hook = last.register_forward_pre_hook(lambda block, arguments: (batch.states, *arguments[1:]))
    try:
        hidden = encoder.trunk(batch.states, mods, batch.attended)
    finally:
        hook.remove()
    hidden = F.layer_norm(hidden, hidden.shape[-1:]).masked_fill(~batch.counted[..., None], 0.0)
    return hidden.sum(1) / batch.counted.sum(1, keepdim=True)


def fit_classifier(
    network: nn.Module,
    states: FrozenStates,
    parts: Parts,
    training: Training,
    seed: int,
    report: Report,
) -> Fitted:
    """Learn labels of the texts `train`, choose the step by `dev`, predict `test`."""
    device = next(network.parameters()).device
    with torch.no_grad():
        mods = cast("Encoder", network).modulations(0.0)
    devices = [device] if device.type == "cuda" else []
    with last_block_alone(network) as last, torch.random.fork_rng(devices):
        torch.manual_seed(mix(seed, "head and dropout"))
        head = nn.Linear(states.rows.shape[1], 2).to(device)
        learner = _Learner(network, last, head, mods, states, device)
        optimizer = torch.optim.AdamW(
            [*last.parameters(), *head.parameters()],
            lr=training.lr,
            weight_decay=training.weight_decay,
        )
        targets = torch.tensor(parts.labels)
        truth = targets[parts.dev]
        best, best_score, best_step = learner.weights(), (-1.0, -math.inf), 0
        every = max(1, training.steps // training.evaluations)
        for step, batch in enumerate(_batches(parts.train, training, seed), 1):
            optimizer.zero_grad()
            loss = F.cross_entropy(learner.logits(batch), sent(targets[batch], device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % every == 0 or step == training.steps:
                logits = learner.predict(parts.dev)
                right = (logits.argmax(1) == truth).double().mean().item()
                score = (right, -F.cross_entropy(logits, truth).item())
                if score > best_score:
                    best, best_score, best_step = learner.weights(), score, step
            report(step, training.steps)
        learner.load(best)
        probs = learner.predict(parts.test).softmax(1)[:, 1]
    return Fitted(probs.tolist(), best_step, best_score[0])


@dataclass(frozen=True, slots=True)
class _Learner:
    """A last block with its head, and the states it learns from."""

    network: nn.Module
    last: nn.Module
    head: nn.Linear
    mods: Modulations | None
    states: FrozenStates
    device: torch.device

    def logits(self, texts: Sequence[int]) -> Tensor:
        """Logits (B, 2) of a batch; dropout of the last block is on."""
        self.last.train()
        return self._logits(texts)

    @torch.no_grad()
    def predict(self, texts: Sequence[int]) -> Tensor:
        """Logits (N, 2) in float64 on the CPU, texts of similar lengths together."""
        self.last.eval()
        order = sorted(range(len(texts)), key=lambda i: self.states.lengths[texts[i]])
        longest = self.states.lengths[texts[order[-1]]]
        size = max(1, TOKENS_AT_ONCE // longest)
        parts = [order[first : first + size] for first in range(0, len(order), size)]
        found = torch.cat([self._logits([texts[i] for i in part]).double().cpu() for part in parts])
        return torch.empty_like(found).index_copy(0, torch.tensor(order), found)

    def _logits(self, texts: Sequence[int]) -> Tensor:
        batch = self.states.batch(texts, self.device)
        logits: Tensor = self.head(pooled(self.network, batch, self.mods))
        return logits

    def weights(self) -> list[Tensor]:
        """Copy what learns."""
        return [p.detach().clone() for p in (*self.last.parameters(), *self.head.parameters())]

    @torch.no_grad()
    def load(self, weights: Sequence[Tensor]) -> None:
        """Take weights back."""
        learned = (*self.last.parameters(), *self.head.parameters())
        for parameter, value in zip(learned, weights, strict=True):
            parameter.copy_(value)


def _batches(train: Sequence[int], training: Training, seed: int) -> Iterator[list[int]]:
    """Yield `steps` batches; every text is in one before any is in the next."""
    generator = np.random.default_rng(mix(seed, "order of texts"))
    left: list[int] = []
    for _ in range(training.steps):
        while len(left) < training.batch_size:
            left += [train[i] for i in generator.permutation(len(train))]
        batch, left = left[: training.batch_size], left[training.batch_size :]
        yield batch


def _blocks(network: nn.Module) -> nn.ModuleList:
    return cast("Network", network).blocks
