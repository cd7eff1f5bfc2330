"""Networks that run in a blink, settings to run them, and ways to look at an iteration."""

import copy
import math

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from tests.random_models import randomise
from tests.sampling.enumeration import p_value

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.config.schema import parse
from didi_instruct.distillation import methods
from didi_instruct.distillation.run import MicroBatch, Teacher
from didi_instruct.models.discriminator import flat_name
from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import NEVER
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.draw import Noise
from didi_instruct.training.distributed import World


class Alone(World):
    """One process; its methods can be watched."""


ALONE = Alone(torch.device("cpu"))
STATE = {"grouping": "state", "score_steps": "last"}
PROMPT = {"prompt": 3, "data": {"source": "stream"}}
DUO = {"kind": "duo", "vocab_size": 5, "time_conditioning": True}
law = hypothesis_settings(deadline=None, derandomize=True, database=None, max_examples=60)
"""Of tests that hold for all inputs: the same inputs in every run."""


def small_network(seed=0, eps=1e-3, **changes):
    """2 layers x 16 hidden, 8 positions, 5 tokens and the mask."""
    settings = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "vocab_size": 6, "length": 8}
    schedule = ScheduleConfig(eps=eps)
    return randomise(DiT(ModelConfig(**(settings | changes), schedule=schedule)), seed).eval()


def pair(**changes):
    """A teacher and another student, as options of `make_task`."""
    return {"teacher": small_network(0, **changes), "student": small_network(1, **changes)}


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


# Texts with windows of their own

END, WINDOW = 0, 6
LENGTHS = (0, 10**12, 0, 10**12, 0, 10**12, 0)
"""Texts have 1, 3 or 5 tokens; others have a chance of 1e-12."""


class Documents:
    """Texts of 1, 3 or 5 tokens, which the first two of them tell, and ends behind: a TokenSource.

    `longest`: no text has more tokens.
    """

    num_tokens, num_sequences, fingerprint, tokenizer, length = 5, None, "documents", None, WINDOW

    def __init__(self, longest=WINDOW):
        self.longest = longest

    def rows(self, start, count):
        row, place = torch.arange(start, start + count)[:, None], torch.arange(WINDOW)
        text = 1 + (row * 7 + place * (1 + row % 3)) % 4
        return torch.where(place < (1 + 2 * (row % 3)).clamp(max=self.longest), text, END)

    ordered = rows


def windowed_network(seed, *, ends=True, **changes):
    """A small network that never writes an end, whether it knows of ends or not."""
    own = {"length": WINDOW, "end_id": END, "lengths": LENGTHS} if ends else {}
    found = small_network(seed, **(own | changes))
    with torch.no_grad():
        found.output_layer.linear.bias[END] = NEVER
    return found


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
        "train": {"steps": 6, "batch_size": 12, "ema": 0.9, "micro_batch": 1 << 16},
    }
    if method == "duo":
        values["data"] = {"source": "stream"}
    for name, change in changes.items():
        values[name] = values.get(name, {}) | change if isinstance(change, dict) else change
    return parse(DistillConfig, values, where="test")


def make_task(method, changes=None, *, teacher=None, student=None, law=None, world=None, **options):
    """A task of two different random networks; the options are those of `methods.make_task`.

    `law` (z (U, L), t (U,)) -> log-probabilities (U, L, V) teaches instead of the teacher.
    """
    config, shape = settings(method, changes or {}), {}
    if method == "duo":
        shape, options = DUO, {"data": Stream()} | options
    teacher = teacher or small_network(0, **shape)
    data = options.get("data")
    rows = None if data is None else data.length
    methods.check_fit(config, teacher, rows=rows)
    task = methods.make_task(
        config,
        Teacher(network=teacher, tokenizer=None, fingerprint="teacher"),
        student or small_network(1, **shape),
        world or Alone(torch.device("cpu")),
        **options,
    )
    if law is not None:
        exact, d = function_denoiser(law, teacher.config.num_tokens), task.distillation
        d.teacher_logits = d.teacher_log_probs = exact.logits
    return task


def maker(method):
    """`make_task` of a method from (its own section, other settings, options)."""

    def task_of(own=None, changes=None, **options):
        section = {method.replace("-", "_"): own or {}}
        return make_task(method, section | (changes or {}), **options)

    return task_of


def batch_of(task, step=0, turn=0):
    """A whole batch of an iteration as one pass."""
    noise = task.distillation.micro_batches(step, turn)[0].noise
    indices = torch.arange(task.config.train.batch_size)
    return MicroBatch(step, turn, indices, Noise(noise.seed, indices))


def networks_of(task):
    """Student and second network, by name."""
    return {name: part.network for name, part in task.parts.items()}


def weights(network):
    """A copy of all parameters by name."""
    return {flat_name(n): p.detach().clone() for n, p in network.named_parameters()}


def moved(before, network):
    """Names of the parameters that are no longer what they were."""
    return {n for n, p in weights(network).items() if not torch.equal(p, before[n])}


def run(task, steps):
    """The numbers of some iterations, as the loop needs them: 0-d and finite."""
    found = [task.step(step) for step in range(steps)]
    for name, value in (item for numbers in found for item in numbers.items()):
        assert value.ndim == 0, name
        assert value.isfinite(), name
    return found


def check(numbers, rel=1e-4, abs=1e-6, **expected):
    """Numbers of the log are these."""
    for name, value in expected.items():
        wanted = pytest.approx(torch.as_tensor(value).item(), rel=rel, abs=abs)
        assert numbers[name].item() == wanted, name


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


# What happens in an iteration


def spy(owner, name):
    """Arguments of all calls of a method from now on."""
    calls, method = [], getattr(owner, name)

    def seen(*given, **more):
        calls.append(given)
        return method(*given, **more)

    object.__setattr__(owner, name, seen)  # some are frozen
    return calls


def asked_of(owner, name):
    """Texts (U, L), times and positions (U, L) of all calls of a denoiser from now on."""
    calls, method = [], getattr(owner, name)

    def seen(reads, t, at):
        where = torch.zeros(reads.tokens.numel(), dtype=torch.bool).index_fill(0, at, True)
        calls.append((reads.tokens, t, where.view(reads.tokens.shape)))
        return method(reads, t, at)

    setattr(owner, name, seen)
    return calls


def steps_law(budgets, length):
    """Law of (step of a path, masks before it, masks that it reveals): as cells (K, ...), (K,).

    A random step of a random budget of equal steps, named by its time; each of `length` positions
    is masked before it or not, revealed by it or not, on its own.
    """
    cells = {}
    for n in budgets:
        for k in range(n):
            t = 1 - k / n
            for masked in range(length + 1):
                for revealed in range(masked + 1):
                    ways = math.comb(length, masked) * math.comb(masked, revealed)
                    chance = (1 / n) ** revealed * (t - 1 / n) ** (masked - revealed)
                    chance *= (1 - t) ** (length - masked) * ways / n / len(budgets)
                    cell = (round(24 * t), masked, revealed)
                    cells[cell] = cells.get(cell, 0.0) + chance
    return cells


def fits_path_law(t, masked, revealed, budgets):
    """p-value that states (U, L) at times (U,) and their reveals have the law of a path."""
    cells = {c: p for c, p in steps_law(budgets, masked.shape[1]).items() if p > 0}
    places = {cell: n for n, cell in enumerate(cells)}
    found = zip((24 * t).round().long().tolist(), masked.sum(1).tolist(),
                revealed.sum(1).tolist(), strict=True)  # fmt: skip
    assert not (revealed & ~masked).any()
    law = torch.tensor(list(cells.values()), dtype=torch.float64)
    return p_value(torch.tensor([places[cell] for cell in found]), law)
