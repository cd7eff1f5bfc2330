"""A quick look at a few-step sampler: path KL and variety at some budgets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distillation.watch import unique_ngrams
from didi_instruct.evaluation.stats import Numbers, mean_and_error
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import Logits, LogitsDenoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.state import Canvas, Samples, State, join
from didi_instruct.training.likelihood import LogLikelihood

ROWS, LAW_ENTRIES = 256, 2**28
"""Samples drawn at a time, at most; and entries of their laws over the vocabulary in a step."""


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class QuickTest:
    """Settings of the draws and their judge: the same for all models of a run."""

    schedule: Schedule
    start: Tensor
    """(N, L) where the samples start: masks, what is given before them, the ends behind."""
    mask_id: int
    budgets: Sequence[int]
    judge: LogLikelihood | None
    """None: texts that continue a prompt have no judge here."""
    seed: int = 0
    also: Callable[[Tensor], Mapping[str, float]] | None = None
    """More that can be said of samples (N, L), by name."""
    exact: bool = True
    """The judge knows the likelihood, not a bound of it."""
    end_id: int | None = None
    """The id that fills windows behind their texts, where each has its own."""
    start_log_prob: Tensor | None = None
    """(N,) of drawing the starts, which a judge of whole texts counts too: of their lengths."""

    def draw(
        self,
        logits: Logits,
        steps: int,
        tick: Callable[[], None] = nothing,
        masks: int = 1,
        order: Order = "random",
    ) -> Samples:
        """Ancestral samples from a denoiser; `tick` is called between batches."""
        denoiser, parts = LogitsDenoiser(logits, self.mask_id), []
        entries = self.start.shape[1] * self.mask_id // steps
        size = max(1, min(ROWS, LAW_ENTRIES // max(1, entries)))
        for first in range(0, len(self.start), size):
            tick()
            tokens = self.start[first : first + size]
            indices = torch.arange(first, first + len(tokens), device=tokens.device)
            canvas = Canvas(tokens, self.mask_id, indices, masks=masks)
            state = State(canvas, DrawOptions(seed=self.seed))
            parts.append(ancestral(denoiser, self.schedule, state, steps=steps, order=order))
        return join(parts)

    def measure(
        self,
        logits: Logits,
        tag: str = "",
        tick: Callable[[], None] = nothing,
        masks: int = 1,
        order: Order = "random",
    ) -> dict[str, float]:
        """Numbers of a denoiser at every budget, by name.

        `masks` is how many it knows, `order` the one that it reveals positions in.
        """
        found: dict[str, float] = {}
        for steps in self.budgets:
            samples = self.draw(logits, steps, tick, masks, order)
            assert samples.log_prob is not None
            written = max(1, int((self.start == self.mask_id).sum()))
            if self.judge is not None:
                mean, error = mean_and_error(path_gaps(self._texts(samples), self.judge))
                found |= {f"path_kl_{steps}{tag}": mean, f"path_kl_{steps}{tag}_se": error}
            found[f"path_entropy_{steps}{tag}"] = -samples.log_prob.sum().item() / written
            visible = torch.ones_like(samples.tokens, dtype=torch.bool)
            if self.end_id is not None:
                visible = self.start != self.end_id
            found[f"unique_4gram_{steps}{tag}"] = unique_ngrams(samples.tokens, visible).item()
            if self.also is not None:
                more = self.also(samples.tokens)
                found |= {f"{name}_{steps}{tag}": value for name, value in more.items()}
        return found

    def _texts(self, samples: Samples) -> Samples:
        """Samples as a judge of texts sees them: their lengths were drawn too."""
        if self.start_log_prob is None:
            return samples
        assert samples.log_prob is not None
        return replace(samples, log_prob=samples.log_prob + self.start_log_prob)


def path_gaps(samples: Samples, judge: LogLikelihood) -> Numbers:
    """Log q(path) - log p(x) of each sample, whose mean is the path KL: (B,).

    An ancestral sampler knows the probability of its own draws. The order in which it reveals
    positions does not depend on the model, and given the order a sequence x has one path, so

        path entropy = -E sum log p(drawn token | state)  =  H(x | order)  <=  H(x)
        path KL      = E[-log p(x)] - path entropy        >=  KL(sampler || judge)

    with equality where the text does not depend on the order. A temperature that sharpens the
    samples lowers both terms: path KL falls only if the samples come closer to the judge's law. It
    is too high where the judge gives a lower bound.
    """
    assert samples.log_prob is not None, "this sampler does not know the probability of its path"
    gaps: Numbers = (samples.log_prob.double().cpu() - judge(samples.tokens).double().cpu()).numpy()
    return gaps


def oracle_judge(language: OracleLanguage) -> LogLikelihood:
    """Exact log-probabilities under the oracle language, wherever the samples are."""
    return lambda tokens: language.log_prob(tokens.to(language.device))


def oracle_facts(tokens: Tensor) -> dict[str, float]:
    """Share of broken sentences, and how varied what texts are about is, against true texts.

    The entropy of the latents is estimated from as many texts of the language itself, so that few
    samples understate both alike.
    """
    language = OracleLanguage.default()
    true = language.sample(len(tokens), torch.Generator().manual_seed(0))
    drawn = tokens.to(language.device)
    return {
        "mistakes": float(language.mistakes(drawn).any),
        "latent_share": language.latent_entropy(drawn) / language.latent_entropy(true),
    }
