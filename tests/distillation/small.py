"""Problems small enough to enumerate, networks that run in a blink, and settings to run them."""

import copy
from types import SimpleNamespace

import torch
from tests.random_models import randomise
from tests.sampling.enumeration import all_states, independent_step, index

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.config.parse import parse
from didi_instruct.distillation import methods
from didi_instruct.distillation.run import MicroBatch, Teacher
from didi_instruct.models.discriminator import flat_name
from didi_instruct.models.dit import DiT
from didi_instruct.models.network import Modulations
from didi_instruct.training.distributed import World

ALONE = World(torch.device("cpu"))


class Table:
    """A denoiser with a random law for each state, position and time; remembers its calls.

    It has what `score_path` asks of a network: the trunk gives logits, the head passes them on.
    """

    def __init__(self, num_tokens=3, length=3, seed=0):
        self.num_tokens, self.length, self.mask_id = num_tokens, length, num_tokens
        self.config = SimpleNamespace(num_tokens=num_tokens)
        generator = torch.Generator().manual_seed(seed)
        shape = ((num_tokens + 1) ** length, length, num_tokens)
        self.now, self.then = (
            2 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        self.calls = []

    def __call__(self, z, t):
        place, t = index(z, self.num_tokens + 1), t.double()[:, None, None]
        return ((1 - t) * self.now[place] + t * self.then[place]).log_softmax(-1)

    def log_probs(self, z, t, where):
        self.calls.append((z.clone(), t.clone(), where.clone()))
        return self(z, t)[where]

    def embed(self, tokens, attended=None, mixture=None):
        return tokens

    def modulations(self, sigma=None):
        return Modulations(sigma)

    def trunk(self, tokens, mods, attended=None):
        return self(tokens, 1 - torch.exp(-mods.c))

    def head(self, hidden, mods=None):
        return hidden


def law_of(table, start, times, chances):
    """Law over all (V + 1)^L states after steps from the state `start` (L,).

    Step n is taken at times[n], and reveals a mask with probability chances[n].
    """
    V, L = table.num_tokens, table.length
    z = all_states(V + 1, L)
    mass = torch.zeros(len(z), dtype=torch.float64)
    mass[index(start[None], V + 1)] = 1.0
    stay = torch.nn.functional.one_hot(z, V + 1).double()
    for t, chance in zip(times, chances, strict=True):
        p = torch.nn.functional.pad(table(z, torch.full((len(z),), t)).exp(), (0, 1))
        laws = torch.where((z == V)[..., None], chance * p + (1 - chance) * stay, stay)
        mass = independent_step(mass, laws)
    return mass


def small_network(seed=0, eps=1e-3, **changes):
    """2 layers x 16 hidden, 8 positions, 5 tokens and the mask."""
    settings = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "vocab_size": 6, "length": 8}
    schedule = ScheduleConfig(eps=eps)
    return randomise(DiT(ModelConfig(**(settings | changes), schedule=schedule)), seed).eval()


class Stream:
    """Text in which each token follows from its row and position: a TokenSource."""

    num_tokens, num_sequences, fingerprint, tokenizer = 5, None, "stream", None

    def __init__(self, length=8):
        self.length = length
        self.asked = []

    def rows(self, start, count):
        self.asked.append(range(start, start + count))
        row = torch.arange(start, start + count)[:, None]
        return (row * 7 + torch.arange(self.length) * (1 + row % 4)) % 5

    ordered = rows


def settings(method, changes):
    """A recipe of few texts in which both networks always learn, with some settings changed."""
    values = {
        "method": method,
        "reference": {"source": "online", "steps": 2},
        "discriminator": {"lr": 1e-3, "trainable_blocks": 1, "chance": 0.0, "saturation": 1.0},
        "token_matching": {"warmup": 0, "aux_lr": 1e-3, "aux_steps": 1, "budgets": [2, 4]},
        "dimo": {"warmup": 0, "aux_lr": 1e-3, "random": 0.4, "noise": 0.3},
        "mixture": {"codes": 3, "budgets": [2, 4], "learning": 2},
        "sdtt": {"steps": 16, "iterations": 2},
        "duo": {"steps": 8, "iterations": 2},
        "optim": {"lr": 1e-3},
        "train": {"steps": 6, "batch_size": 12, "ema": 0.9},
    }
    if method == "duo":
        values["data"] = {"source": "stream"}
    for name, change in changes.items():
        values[name] = values.get(name, {}) | change if isinstance(change, dict) else change
    return parse(DistillConfig, values, where="test")


def make_task(
    method, changes=None, *, teacher=None, student=None, log_probs=None, world=None, **options
):
    """A task of two different random networks; the options are those of `methods.make_task`."""
    config, shape = settings(method, changes or {}), {}
    if method == "duo":
        shape = {"kind": "duo", "vocab_size": 5, "time_conditioning": True}
        options = {"data": Stream()} | options
    teacher = teacher or small_network(0, **shape)
    data = options.get("data")
    rows = None if data is None else data.length
    methods.check_fit(config, teacher.config, rows=rows)
    return methods.make_task(
        config,
        Teacher(network=teacher, tokenizer=None, fingerprint="teacher", log_probs=log_probs),
        student or small_network(1, **shape),
        world or ALONE,
        **options,
    )


def batch_of(task, step=0, turn=0):
    """A whole batch of an iteration as one pass."""
    d, indices = task.distillation, torch.arange(task.config.train.batch_size)
    return MicroBatch(step, turn, indices, d.noise(step, turn, indices), True, True)


def networks_of(task):
    """Student and second network, by name."""
    return {name: part.network for name, part in task.parts.items()}


def weights(network):
    """A copy of all parameters by name."""
    return {flat_name(n): p.detach().clone() for n, p in network.named_parameters()}


def moved(before, network):
    """Names of the parameters that are no longer what they were."""
    return {n for n, p in weights(network).items() if not torch.equal(p, before[n])}


def check_numbers(numbers):
    """What the loop needs: 0-d and finite."""
    for name, value in numbers.items():
        assert value.ndim == 0, name
        assert value.isfinite(), name


def run(task, steps):
    """The numbers of some iterations."""
    found = [task.step(step) for step in range(steps)]
    for numbers in found:
        check_numbers(numbers)
    return found


def largest_difference(networks, others):
    """How far apart any two entries of the parameters of networks are, pair by pair."""
    return max(
        float((weights(one)[name] - value).abs().max())
        for one, another in zip(networks, others, strict=True)
        for name, value in weights(another).items()
    )


def gradient_norm(loss, network):
    """Norm of the gradient with respect to all parameters."""
    gradients = torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)
    return torch.stack([g.norm() for g in gradients if g is not None]).norm()


def twin(network):
    """A copy that can be differentiated on its own."""
    return copy.deepcopy(network).requires_grad_(True)
