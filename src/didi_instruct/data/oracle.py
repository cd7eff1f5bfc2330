"""A language whose likelihood is known exactly, to measure what a sampler really does.

A sequence has one global latent g (the name that comes back) and a Markov chain of sentence states
s_1 .. s_n (topic, number, bracket). Given them every slot is independent of the others:

    p(x) = sum_g p(g) sum_{s_1..s_n} prod_k p(s_k | s_{k-1}) prod_{k,j} p(x^{k,j} | j, g, s_k)

So words agree across long distances, words drawn together without seeing each other clash, and yet
likelihood, Bayes-optimal denoiser and posterior of the latents cost one forward-backward pass.

Everything is float64. A masked token (`mask_id` = V) is summed over: it brings no evidence.

A learner of it needs absolute positions. With rotary ones alone a fully masked input looks the same
at every place, and not knowing which slot is which costs the first word of the default language
2.04 nats, 5.6% of its entropy.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from didi_instruct.data.oracle_words import (
    Grammar,
    Mistakes,
    count_mistakes,
    default_tables,
)
from didi_instruct.errors import UserError

if TYPE_CHECKING:
    from didi_instruct.data.tokenizer import Tokenizer

CHUNK = 1024
"""Sequences scored at a time where a method may be given very many."""


class LatentPosterior(NamedTuple):
    """Posterior of the latents of a batch of sequences."""

    name: Tensor
    """p(g | x): (B, G)."""
    state: Tensor
    """p(s_k | x): (B, n, S)."""
    pair: Tensor
    """p(s_k, s_{k+1} | x): (B, n - 1, S, S)."""


@dataclass(frozen=True, eq=False)
class OracleLanguage:
    """Global latent, chain of sentence states, independent slots given both; all tables float64."""

    words: tuple[str, ...]
    """The V words, in the order of their ids."""
    prior: Tensor
    """p(g): (G,)."""
    initial: Tensor
    """p(s_1): (S,)."""
    transition: Tensor
    """p(s_{k+1} | s_k), a row per s_k: (S, S)."""
    emission: Tensor
    """p(word | slot, g, s), nowhere zero: (slots, G, S, V)."""
    sentences: int
    """n, the number of sentences in a sequence."""
    grammar: Grammar | None = None
    """Which words agree with which, where the language has a grammar to break."""

    def __post_init__(self) -> None:
        _, names, states, num_tokens = self.emission.shape
        shapes = [tuple(t.shape) for t in (self.prior, self.initial, self.transition)]
        if shapes != [(names,), (states,), (states, states)] or len(self.words) != num_tokens:
            raise ValueError(
                f"oracle tables disagree: emission {tuple(self.emission.shape)} against {shapes}"
            )
        for table in (self.prior, self.initial, self.transition, self.emission):
            if table.dtype != torch.float64 or not torch.allclose(
                table.sum(-1), torch.ones((), dtype=torch.float64, device=table.device)
            ):
                raise ValueError("oracle tables are float64 and every row of them sums to 1")
        if self.sentences < 1 or not bool((self.emission > 0).all()):
            raise ValueError("an oracle language has a sentence, and no word is impossible")

    @classmethod
    def default(cls, sentences: int = 4, eps: float = 0.005) -> OracleLanguage:
        """Build the 64-word language, where a fraction `eps` of the words is drawn from all 64."""
        return cls(**vars(default_tables(eps)), sentences=sentences)

    @classmethod
    def tiny(
        cls, num_tokens: int = 3, slots: int = 2, sentences: int = 2, seed: int = 0
    ) -> OracleLanguage:
        """Draw random tables (2 names, 3 states), small enough to enumerate all V^L sequences."""
        generator = torch.Generator().manual_seed(seed)

        def table(*shape: int) -> Tensor:
            # Cubed uniforms are peaked enough for positions to depend strongly on each other.
            weights = 0.02 + torch.rand(shape, generator=generator, dtype=torch.float64) ** 3
            return weights / weights.sum(-1, keepdim=True)

        return cls(
            words=tuple(f"w{v}" for v in range(num_tokens)),
            prior=table(2),
            initial=table(3),
            transition=table(3, 3),
            emission=table(slots, 2, 3, num_tokens),
            sentences=sentences,
        )

    @property
    def num_tokens(self) -> int:
        """V, the number of real tokens."""
        return self.emission.shape[-1]

    @property
    def mask_id(self) -> int:
        """The id after the last real token."""
        return self.num_tokens

    @property
    def slots(self) -> int:
        """Words in a sentence."""
        return self.emission.shape[0]

    @property
    def length(self) -> int:
        """L = sentences x slots."""
        return self.sentences * self.slots

    @property
    def device(self) -> torch.device:
        """Device of the tables, on which tokens must be too."""
        return self.emission.device

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The words as a tokenizer, so that samples can be read."""
        from didi_instruct.data.tokenizer import Tokenizer

        return Tokenizer.from_words(list(self.words))

    def to(self, device: torch.device | str) -> OracleLanguage:
        """Copy the language to another device."""
        return replace(
            self,
            prior=self.prior.to(device),
            initial=self.initial.to(device),
            transition=self.transition.to(device),
            emission=self.emission.to(device),
            grammar=self.grammar and self.grammar.to(device),
        )

    # Sampling

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Exact samples: (count, L). The generator may live on another device than the tables."""
        shape = (count, 1 + self.sentences + self.length)
        uniforms = torch.rand(
            shape, generator=generator, dtype=torch.float64, device=generator.device
        )
        return self.sample_from(uniforms)

    def sample_from(self, uniforms: Tensor) -> Tensor:
        """Inverse-CDF sampling, a pure function of uniforms in [0, 1): (B, 1 + n + L) -> (B, L)."""
        uniforms = uniforms.to(self.device)
        u_name, u_states, u_words = torch.split(uniforms, [1, self.sentences, self.length], dim=1)
        name = _invert(_cdf(self.prior), u_name)
        states = [_invert(_cdf(self.initial), u_states[:, 0])]
        step = _cdf(self.transition)
        for k in range(1, self.sentences):
            states.append(_invert(step[states[-1]], u_states[:, k]))
        state = torch.stack(states, dim=1)
        u_slots = u_words.reshape(-1, self.sentences, self.slots).unbind(-1)
        words = [
            _invert(table[name, state], u)
            for table, u in zip(_cdf(self.emission), u_slots, strict=True)
        ]
        return torch.stack(words, dim=-1).flatten(1)

    # Exact inference

    def log_prob(self, tokens: Tensor) -> Tensor:
        """Exact log p(x); where tokens are masked, the log-probability of the visible ones.

        Shape: (B, L) -> (B,).
        """
        return self._forward(self._evidence(tokens))[:, -1].flatten(1).logsumexp(-1)

    def denoiser(self, z: Tensor, t: Tensor | float | None = None) -> Tensor:
        """Bayes-optimal denoiser, as normalised log-probabilities: (B, L) -> (B, L, V).

        At a masked position: log p(x^l | visible tokens), exactly; `t` says nothing more about x
        once z is seen, and is ignored. At a visible position, where samplers copy the token: the
        law of a *second* draw of that slot, under the posterior of the latents given all visible
        tokens, its own among them. That is finite, where the true answer would be a one-hot.
        """
        evidence = self._evidence(z)
        joint = self._forward(evidence) + self._backward(evidence)
        posterior = joint.flatten(2).softmax(-1)
        table = self.emission.permute(1, 2, 0, 3).flatten(0, 1).flatten(1)
        return (posterior @ table).log().reshape(-1, self.length, self.num_tokens)

    def latent_posterior(self, tokens: Tensor) -> LatentPosterior:
        """Posterior of the latents given the visible tokens, (B, L)."""
        evidence = self._evidence(tokens)
        forward, backward = self._forward(evidence), self._backward(evidence)
        joint = (forward + backward).flatten(2).softmax(-1).reshape(evidence.shape)

        # p(s, s' | x) is a sum over g of left(g, s) * transition(s, s') * right(g, s'). Each factor
        # is scaled by its own largest entry per g, so that long sequences do not underflow.
        left, right = forward[:, :-1], (evidence + backward)[:, 1:]
        top_left, top_right = left.amax(-1, keepdim=True), right.amax(-1, keepdim=True)
        weight = (top_left + top_right).softmax(2)
        outer = torch.einsum(
            "bkgs,bkgt->bkst", weight * (left - top_left).exp(), (right - top_right).exp()
        )
        pair = outer * self.transition
        pair = pair / pair.sum((-2, -1), keepdim=True)
        return LatentPosterior(name=joint[:, 0].sum(-1), state=joint.sum(2), pair=pair)

    @cached_property
    def _log_emission(self) -> Tensor:
        """Log-evidence of a token, a row of zeros for the mask: (slots, V + 1, G, S)."""
        table = self.emission.log().permute(0, 3, 1, 2)
        return torch.cat([table, torch.zeros_like(table[:, :1])], dim=1)

    def _evidence(self, tokens: Tensor) -> Tensor:
        """Log p(visible words of sentence k | g, s): (B, L) -> (B, n, G, S)."""
        if tokens.ndim != 2 or tokens.shape[1] != self.length:
            raise ValueError(f"tokens are (B, {self.length}) here, not {tuple(tokens.shape)}")
        by_slot = tokens.reshape(-1, self.sentences, self.slots).unbind(-1)
        evidence = self._log_emission[0][by_slot[0]]
        for table, ids in zip(self._log_emission[1:], by_slot[1:], strict=True):
            evidence += table[ids]
        return evidence

    def _forward(self, evidence: Tensor) -> Tensor:
        """Log p(g, s_k, visible words of sentences 1..k): (B, n, G, S)."""
        start = self.prior.log()[:, None] + self.initial.log()
        messages = [start + evidence[:, 0]]
        for k in range(1, self.sentences):
            messages.append(_log_matmul(messages[-1], self.transition) + evidence[:, k])
        return torch.stack(messages, dim=1)

    def _backward(self, evidence: Tensor) -> Tensor:
        """Log p(visible words of sentences k+1..n | g, s_k): (B, n, G, S)."""
        messages = [torch.zeros_like(evidence[:, 0])]
        for k in range(self.sentences - 1, 0, -1):
            messages.append(_log_matmul(messages[-1] + evidence[:, k], self.transition.T))
        return torch.stack(messages[::-1], dim=1)

    # Measures

    def entropy(
        self, samples: int = 20_000, generator: torch.Generator | None = None
    ) -> tuple[float, float]:
        """Entropy in nats per sequence, a mean of exact log_prob over samples: (mean, its error).

        Without a generator the same samples are drawn every time.
        """
        generator = generator or torch.Generator().manual_seed(0)
        tokens = self.sample(samples, generator)
        nats = -torch.cat([self.log_prob(chunk) for chunk in torch.split(tokens, CHUNK)])
        return nats.mean().item(), nats.std().item() / samples**0.5

    def latent_entropy(self, tokens: Tensor) -> float:
        """Entropy in nats of the latents behind a set of samples, by their exact posteriors.

        The posteriors are averaged over the samples and read as one chain,
        H(g) + H(s_1) + sum_k [H(s_k, s_{k+1}) - H(s_k)]. True samples give `true_latent_entropy`,
        less a finite-sample bias of about (n - 1) S^2 / 2B nats; a collapsed set gives far less.
        """
        sums = [
            [part.sum(0) for part in self.latent_posterior(chunk)]
            for chunk in torch.split(tokens, CHUNK)
        ]
        name, state, pair = (
            torch.stack(parts).sum(0) / len(tokens) for parts in zip(*sums, strict=True)
        )
        return _chain_entropy(name, state, pair)

    def true_latent_entropy(self) -> float:
        """Entropy of the latents of the language itself, from its prior, in nats."""
        states, pairs = [self.initial], []
        for _ in range(self.sentences - 1):
            pairs.append(states[-1][:, None] * self.transition)
            states.append(pairs[-1].sum(0))
        pair = torch.stack(pairs) if pairs else self.transition.new_empty(0, *self.transition.shape)
        return _chain_entropy(self.prior, torch.stack(states), pair)

    def mistakes(self, tokens: Tensor) -> Mistakes:
        """Count broken agreements, in a language with a grammar; tokens (B, L)."""
        if self.grammar is None:
            raise ValueError("a language of random tables has no grammar, hence no mistakes")
        return count_mistakes(self.grammar, tokens.reshape(-1, self.sentences, self.slots))


class OracleSource:
    """An endless TokenSource of oracle sequences: row i is a function of (split, seed, i) alone.

    Rows are drawn in blocks. A block's uniforms come from Philox, under a 128-bit hash of where it
    stands: torch's CPU generator keeps only 32 bits of its seed, few enough for two blocks of a
    long run, or one of training and one of validation, to coincide.
    """

    BLOCK = 1024
    CACHED_BLOCKS = 4

    def __init__(self, language: OracleLanguage, *, split: str = "train", seed: int = 0) -> None:
        if split not in ("train", "valid"):
            raise UserError(f"split is {split!r}, but an oracle source has `train` and `valid`.")
        self.language = language.to("cpu")
        self.split = split
        self.seed = seed
        self.length = language.length
        self.num_tokens = language.num_tokens
        self.num_sequences: int | None = None
        self._blocks: OrderedDict[int, Tensor] = OrderedDict()

    @property
    def tokenizer(self) -> Tokenizer:
        """The words of the language."""
        return self.language.tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the language's tables, the split and the seed."""
        language = self.language
        tables = (language.prior, language.initial, language.transition, language.emission)
        digest = hashlib.sha256(f"{self.split}/{self.seed}/{language.sentences}".encode())
        for table in tables:
            digest.update(table.numpy().tobytes())
        return digest.hexdigest()[:16]

    def rows(self, start: int, count: int) -> Tensor:
        """Rows start .. start + count - 1: (count, L)."""
        if start < 0 or count < 0:
            raise ValueError(f"rows({start}, {count}): neither can be negative")
        parts = [torch.empty(0, self.length, dtype=torch.long)]
        for index in range(start // self.BLOCK, -(-(start + count) // self.BLOCK)):
            first = index * self.BLOCK
            parts.append(self._block(index)[max(start - first, 0) : start + count - first])
        return torch.cat(parts)

    ordered = rows

    def _block(self, index: int) -> Tensor:
        block = self._blocks.get(index)
        if block is None:
            address = f"oracle/{self.split}/{self.seed}/{index}".encode()
            key = int.from_bytes(hashlib.sha256(address).digest()[:16], "little")
            stream = np.random.Generator(np.random.Philox(key=key))
            width = 1 + self.language.sentences + self.length
            block = self.language.sample_from(torch.from_numpy(stream.random((self.BLOCK, width))))
            self._blocks[index] = block
            if len(self._blocks) > self.CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return block


def _cdf(probabilities: Tensor) -> Tensor:
    """Cumulative sums over the last axis that end in exactly 1."""
    sums = probabilities.cumsum(-1)
    return sums / sums[..., -1:]


def _invert(cdf: Tensor, uniforms: Tensor) -> Tensor:
    """Find the first index whose cumulative probability exceeds u: (..., K), (...) -> (...)."""
    return (cdf <= uniforms[..., None]).sum(-1)


def _log_matmul(log_left: Tensor, right: Tensor) -> Tensor:
    """log(exp(log_left) @ right), safe from underflow: (..., S), (S, T) -> (..., T)."""
    top = log_left.amax(-1, keepdim=True)
    return ((log_left - top).exp() @ right).log() + top


def _entropy(probabilities: Tensor) -> float:
    """Entropy of one distribution, whatever its shape, in nats."""
    return float(-torch.special.xlogy(probabilities, probabilities).sum())


def _chain_entropy(name: Tensor, state: Tensor, pair: Tensor) -> float:
    """H(g) + H(s_1) + sum_k H(s_{k+1} | s_k): name (G,), state (n, S), pair (n - 1, S, S)."""
    moves = sum(_entropy(p) - _entropy(p.sum(-1)) for p in pair)
    return _entropy(name) + _entropy(state[0]) + moves
