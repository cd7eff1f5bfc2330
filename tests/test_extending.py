"""The examples of docs/extending.md run as printed."""

import copy
import re
from pathlib import Path

import pytest
import torch
from tests.random_models import save_random

import didi_instruct as didi
from didi_instruct.config.distill import DiscriminatorConfig, DistillConfig, StudentOptimConfig
from didi_instruct.config.methods import ReferenceConfig, TokenMatchingConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import TrainConfig
from didi_instruct.distillation.methods import METHODS, make_task
from didi_instruct.distillation.run import Teacher
from didi_instruct.evaluation.config import EvalConfig
from didi_instruct.evaluation.metrics import METRICS
from didi_instruct.evaluation.report.summary import Summary
from didi_instruct.models.network import Mixture
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import make_denoiser
from didi_instruct.sampling.registry import SAMPLERS
from didi_instruct.sampling.state import Canvas, State
from didi_instruct.tasks.registry import TASKS, evaluate_task
from didi_instruct.training.distributed import World

TEXT = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
ALONE = World(torch.device("cpu"))
MODEL = ModelConfig(layers=2, hidden=16, heads=2, cond_dim=8, vocab_size=12, length=10)


def example(name):
    """Names that an example defines."""
    (code,) = re.findall(rf"```python {name}\n(.*?)```", TEXT, flags=re.DOTALL)
    found = {}
    exec(compile(code, f"docs/extending.md: {name}", "exec"), found)
    return found


@pytest.fixture(autouse=True)
def _registries():
    """Entries of an example are gone after its test."""
    kept = dict(SAMPLERS), dict(METHODS), dict(TASKS), dict(METRICS)
    yield
    for registry, before in zip((SAMPLERS, METHODS, TASKS, METRICS), kept, strict=True):
        registry.clear()
        registry.update(before)


def distilled(method, network, steps=4):
    """A student after some iterations, its teacher, and the log."""
    config = DistillConfig(
        method=method,
        discriminator=DiscriminatorConfig(trainable_blocks=1, warmup=0),
        token_matching=TokenMatchingConfig(warmup=0),
        reference=ReferenceConfig(source="online", steps=4),
        optim=StudentOptimConfig(lr=1e-3),
        train=TrainConfig(steps=steps, batch_size=8, ema=0.0),
    )
    teacher = Teacher(network=network, tokenizer=None, fingerprint="")
    task = make_task(config, teacher, copy.deepcopy(network), ALONE)
    return task, [{k: float(v) for k, v in task.step(n).items()} for n in range(steps)]


def test_a_sampler_is_a_function_and_an_entry():
    example("sampler")
    model, seen = didi.load("stories"), []
    samples = model.draw(
        2, sampler="left-to-right", steps=8, length=24, seed=1, callback=seen.append
    )
    assert (samples.nfe, len(seen)) == (8, 8)
    for step in seen:
        written = (step.tokens != model.mask_symbol)[:, :24]
        assert (written.int().diff(dim=1) <= 0).all(), "from left to right"
    assert samples.log_prob.isfinite().all()


def test_a_method_is_a_file_and_an_entry():
    example("method")
    network = example("network")["ConvNetwork"](MODEL)
    task, log = distilled("imitation", network, steps=60)
    first, last = (sum(entry["loss"] for entry in part) for part in (log[:20], log[-20:]))
    assert last < first
    assert "student/model/output.weight" in task.tensors()


def test_a_family_of_networks_is_one_wrapper():
    """It meets the protocol, is sampled, and is teacher, student and discriminator."""
    torch.manual_seed(0)
    network = example("network")["ConvNetwork"](MODEL).eval()
    tokens = torch.randint(12, (3, 10))
    hard = network(tokens)
    at = torch.tensor([4, 17])
    soft = Mixture(at, network.vectors[tokens.flatten()[at]])
    assert torch.equal(network.head(network.trunk(network.embed(tokens, mixture=soft))), hard)
    schedule = make_schedule(MODEL.schedule)
    state = State(Canvas.blank(4, 10, 11))
    drawn = ancestral(make_denoiser(network, schedule), schedule, state, steps=5)
    assert (drawn.tokens < 11).all()
    for method in ("didi", "sdtt", "token-matching"):
        _, log = distilled(method, network)
        assert all(torch.tensor(list(entry.values())).isfinite().all() for entry in log)


def test_a_task(tmp_path):
    """The last word of a line of two, by the network itself."""
    example("task")
    save_random(tmp_path / "model")
    model = didi.load(tmp_path / "model", device="cpu")
    first, second = model.tokenizer.decode([3]), model.tokenizer.decode([5])
    (tmp_path / "lines.txt").write_text(f"{first} {second}\n")
    report = evaluate_task("last-word", [str(tmp_path / "model")], tmp_path / "lines.txt", {})
    law = model.denoiser(torch.tensor([[3, model.mask_id]]), 1.0)[0, 1].log_softmax(-1)
    assert report.rows[0]["nll"] == pytest.approx(-float(law[5]), abs=1e-5)


def test_a_metric_is_measured_and_shown(tmp_path):
    example("metric")
    model = str(save_random(tmp_path / "model", length=1))  # 64 words, so 96 texts repeat some
    config = EvalConfig(metrics=("duplicates",), steps=(1,), num=96)
    found = didi.evaluate(model, config, out=tmp_path / "out")
    (samples,) = found.samples
    alone = sum(samples.texts.count(text) == 1 for text in samples.texts)
    (row,) = found.rows
    assert 0 < row["duplicates"] == pytest.approx(1 - alone / 96)
    assert "copies" in Summary(found, "").meanings
