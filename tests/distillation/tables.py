"""A language small enough to enumerate: all its texts, all partly masked states, exact laws."""

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from tests.sampling.enumeration import all_states, independent_step
from torch import Tensor, nn

from didi_instruct.models.network import Modulations
from didi_instruct.sampling.ancestral import plain
from didi_instruct.sampling.denoiser import LogitsDenoiser

V, L = 3, 3
MASK = V
TEXTS, STATES = all_states(V, L), all_states(V + 1, L)
MASKED = STATES == MASK
CONSISTENT = ((TEXTS[:, None] == STATES) | MASKED).all(-1).double()
"""(27, 64): 1 where a text may have become a state."""


def text_index(x):
    """Place of texts (..., L) in TEXTS."""
    return (x * V ** torch.arange(L - 1, -1, -1)).sum(-1)


def state_index(z):
    """Place of states (..., L) in STATES."""
    return (z * (V + 1) ** torch.arange(L - 1, -1, -1)).sum(-1)


class TableNetwork(nn.Module):
    """A network with a free parameter for every logit of every state; remembers what it is asked.

    With `late`, its logits at time 1, those at times between are mixed.
    """

    def __init__(self, logits, late=None):
        super().__init__()
        self.logits = nn.Parameter(logits.clone())
        self.late, self.calls = late, []
        self.config = SimpleNamespace(num_tokens=V)

    def embed(self, tokens, attended=None, mixture=None):
        return tokens

    def attention(self, tokens, attended=None):
        return attended

    def modulations(self, sigma=None):
        return Modulations(sigma)

    def trunk(self, tokens, mods, attended=None):
        now, t = self.logits[state_index(tokens)], (1 - torch.exp(-mods.c))[:, None, None]
        return now if self.late is None else now.lerp(self.late[state_index(tokens)], t.double())

    def head(self, hidden, mods=None):
        return hidden

    @torch.no_grad()
    def law(self, z, t):
        """Log-probabilities (U, L, V) at states (U, L) and times (U,)."""
        return self.trunk(z, Modulations(-torch.log1p(-t.clamp(max=1 - 2**-40)))).log_softmax(-1)

    def log_probs(self, reads, t, at):
        """A denoiser at some positions."""
        where = torch.zeros(reads.tokens.numel(), dtype=torch.bool).index_fill(0, at, True)
        self.calls.append((reads.tokens.clone(), t.clone(), where.view(reads.tokens.shape)))
        return self.law(reads.tokens, t).flatten(0, 1)[at]

    @property
    def draw(self):
        """Draws from it, as rollouts ask for them."""
        return plain(LogitsDenoiser(self.log_probs, V))


def random_logits(seed, scale=1.0):
    """Logits of a student without any structure, (64, L, V)."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(len(STATES), L, V, generator=generator, dtype=torch.float64)


def table(seed=0):
    """A network with a random law for each state, position and time."""
    return TableNetwork(random_logits(seed, 2.0), random_logits(seed + 100, 2.0))


def correlated_law(seed=0, scale=1.5):
    """A law of texts (27,) in which every token depends on every other."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(len(TEXTS), generator=generator, dtype=torch.float64)).softmax(0)


def factorised_law(seed=0):
    """A law of texts (27,) whose tokens are independent."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(L, V, generator=generator, dtype=torch.float64).softmax(-1)
    return p[torch.arange(L), TEXTS].prod(-1)


def conditionals(text_law):
    """Log p(x^l | visible tokens) of a law of texts, for every state and position: (64, L, V)."""
    joint = CONSISTENT.T * text_law
    tokens = nn.functional.one_hot(TEXTS, V).double()
    counts = torch.einsum("zx,xlv->zlv", joint, tokens)
    return (counts / counts.sum(-1, keepdim=True)).log()


def noise_kernel(alpha):
    """Q_t(z | x) for every text and state: alpha (T,) -> (T, 27, 64)."""
    masks = MASKED.sum(-1)
    return CONSISTENT * (alpha[:, None] ** (L - masks) * (1 - alpha[:, None]) ** masks)[:, None]


def corrupted(text_law, alpha):
    """Marginal q(z, t) of a law of texts (27,): alpha (T,) -> (T, 64)."""
    return torch.einsum("x,txz->tz", text_law, noise_kernel(alpha))


def reveal_step(mass, log_p, chance):
    """Law of the states after each mask was, with a chance, replaced by a token from p.

    Shapes: mass (64,), log_p (64, L, V) -> (64,).
    """
    drawn = nn.functional.pad(chance * log_p.exp(), (0, 1))
    stay = nn.functional.one_hot(STATES, V + 1).double()
    return independent_step(mass, torch.where(MASKED[..., None], drawn + (1 - chance) * stay, stay))


def only(z):
    """Law that is at one state (L,)."""
    return nn.functional.one_hot(state_index(z), len(STATES)).double()


def all_masked():
    """Law of the states (64,) before the first step."""
    return MASKED.all(-1).double()


def texts_of(mass):
    """Law of the texts (27,) of one of states in which nothing is masked any more."""
    torch.testing.assert_close(mass[~MASKED.any(1)].sum(), torch.ones((), dtype=torch.float64))
    return mass[state_index(TEXTS)]


def sampled_law(log_p, chances):
    """Law of the texts (27,) of a sampler that reveals masks with these chances, then all."""
    mass = all_masked()
    for chance in (*chances, 1.0):
        mass = reveal_step(mass, log_p, chance)
    return mass[state_index(TEXTS)]


def walked_law(network, start, times, chances):
    """Law of the states after steps from a start (L,): taken at `times`, with chances to reveal."""
    mass = only(start)
    for t, chance in zip(times, chances, strict=True):
        mass = reveal_step(mass, network.law(STATES, torch.full((64,), t).double()), chance)
    return mass


# A step of token-matching: a state, what it reveals, what of that is shown

VISIBLE, LEFT, SHOWN, HIDDEN = range(4)
"""What may happen to a position: not masked, left masked, revealed and kept, or hidden again."""


@dataclass(frozen=True)
class Outcomes:
    """Everything that may happen to a state and C contexts drawn from it."""

    role: Tensor
    """(U, L)."""
    z: Tensor
    """(U, L)."""
    context: Tensor
    """(U, C, L)."""

    @classmethod
    def enumerate(cls, contexts=1):
        options = [(VISIBLE, v, (v,) * contexts) for v in range(V)]
        options += [(LEFT, MASK, (MASK,) * contexts), (HIDDEN, MASK, (MASK,) * contexts)]
        options += [(SHOWN, MASK, s) for s in itertools.product(range(V), repeat=contexts)]
        role, z, context = (torch.tensor(column) for column in zip(*options, strict=True))
        pick = torch.cartesian_prod(*[torch.arange(len(options))] * L)
        return cls(role[pick], z[pick], context[pick].transpose(1, 2))

    def tokens_chance(self, log_p):
        """Chance of the shown tokens of all contexts given the state, log_p (64, L, V): (U,)."""
        u, c, position = (self.role == SHOWN)[:, None].expand_as(self.context).nonzero().unbind(1)
        token = self.context[u, c, position]
        chance = log_p[state_index(self.z)[u], position, token]
        return torch.zeros(len(self.z), dtype=log_p.dtype).index_add(0, u, chance).exp()

    def keys(self):
        """A number (U,) that tells each outcome from all others."""
        columns = [self.role, self.z, *self.context.unbind(1)]
        digits = torch.cat(columns, 1).long()
        return (digits * 4 ** torch.arange(digits.shape[1])).sum(1)


@dataclass(frozen=True)
class Law:
    """Law of (z, revealed set, shown set), whatever the tokens."""

    states: Tensor
    """(S, 64) of the state at each step of the walk, the step's chance included."""
    reveal: tuple
    """Chance of each step to reveal a mask; None reveals exactly one."""

    def __call__(self, outcomes):
        role = outcomes.role
        shown = (role == SHOWN).sum(1)
        revealed = shown + (role == HIDDEN).sum(1)
        left, new = (role == LEFT).sum(1).double(), revealed.double()
        total = torch.zeros(len(role), dtype=torch.float64)
        for mass, chance in zip(self.states, self.reveal, strict=True):
            if chance is None:
                sets = (new == 1) / (left + new).clamp(min=1)
            else:
                sets = chance**new * (1 - chance) ** left
            total += mass[state_index(outcomes.z)] * sets
        # A share u ~ U(0, 1) is shown: ∫ u^s (1 - u)^(n - s) du = 1 / ((n + 1) binomial(n, s)).
        sets = [[max(1, (n + 1) * math.comb(n, s)) for s in range(L + 1)] for n in range(L + 1)]
        return total / torch.tensor(sets, dtype=torch.float64)[revealed, shown]


def first_step(chance):
    """The step from all masks."""
    return Law(all_masked()[None], (chance,))


def any_step(log_p, budget):
    """A random step of the student's walk in equal steps."""
    masses, chances = [all_masked()], [1 / (budget - k) for k in range(budget)]
    for chance in chances[:-1]:
        masses.append(reveal_step(masses[-1], log_p, chance))
    return Law(torch.stack(masses) / budget, tuple(chances))


def one_token():
    """Any state with a mask is as likely, and one of its masks is revealed."""
    return Law((MASKED.any(1).double() / MASKED.any(1).sum())[None], (None,))
