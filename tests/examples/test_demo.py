"""The demo's numbers are what it says they are."""

import importlib
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import didi_instruct as didi
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.hub import sources
from didi_instruct.models.dit import build_model

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = Tokenizer.from_words([*(f"w{n}" for n in range(30)), "<|endoftext|>"])
CONFIG = ModelConfig(
    layers=1, hidden=32, heads=2, cond_dim=8, vocab_size=32, length=12, end_id=30,
    lengths=(0, 0, 0, 0, 5, 3, 1, 0, 0, 1, 0, 0, 0), schedule=ScheduleConfig(eps=0.0),
)  # fmt: skip

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not here")


@pytest.fixture
def stories(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo_stories")


def ignorant(masks=1):
    """A model of independent tokens, each of one law: every sampler draws its law exactly."""
    torch.manual_seed(0)
    config = replace(CONFIG, masks=masks, vocab_size=31 + masks)
    network = build_model(config)
    with torch.no_grad():
        for parameter in network.output_layer.parameters():
            parameter.zero_()
        network.output_layer.linear.bias[:31] = torch.linspace(-4, 4, 31)
    return didi.Model(network, config, WORDS)


@pytest.mark.parametrize("masks", [1, 3])
def test_a_sampler_that_is_exact_has_no_path_kl(stories, masks):
    """Mean over 100 texts within 5 standard errors of 0: a false alarm in 2 million."""
    model = ignorant(masks)
    row = stories.measure("x", model, model, steps=2, stories=100, draws=8)
    assert abs(row.path_kl) < 5 * row.path_kl_error
    assert row.path_kl_error < 2
    law = torch.linspace(-4, 4, 31).softmax(0)
    entropy = -(law * law.log()).sum().item()
    lengths = torch.tensor([5.0, 3.0, 1.0, 1.0]) / 10
    told = -(lengths * lengths.log()).sum().item() / (lengths @ torch.tensor([4.0, 5, 6, 9])).item()
    assert abs(row.nats - entropy - told) < 5 * row.nats_error
    assert len(row.texts) == 100
    assert row.seconds > 0


def test_a_student_of_another_law_is_found_out(stories):
    """Uniform tokens cost the judge KL(uniform ‖ law) each; path KL is their sum over a text.

    100 texts, 5 standard errors: a false alarm in 2 million.
    """
    student, teacher = ignorant(), ignorant()
    with torch.no_grad():
        student.network.output_layer.linear.bias.zero_()
    row = stories.measure("x", student, teacher, steps=2, stories=100, draws=8)
    law = torch.linspace(-4, 4, 31).softmax(0)
    divergence = -math.log(31) - law.log().mean().item()
    length = (4 * 5 + 5 * 3 + 6 + 9) / 10
    assert abs(row.path_kl - divergence * length) < 5 * row.path_kl_error
    assert row.path_kl > 3 * row.path_kl_error


def test_many_codes_are_not_waited_for(stories):
    row = stories.measure("x", ignorant(16), ignorant(), steps=2, stories=2, draws=1)
    assert row.path_kl is None
    assert row.cells()[-1] == "–"


def test_student_and_teacher_are_told_of(stories, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "root", lambda: tmp_path)
    for part in ("student", "teacher"):
        ignorant().save(tmp_path / "stories" / part)
    page = io.StringIO()
    rows = stories.tell(Console(file=page, width=120), 2, 3, 5)
    assert [(row.name, row.steps) for row in rows] == [
        ("student", 3), ("teacher", 3), ("teacher", 5),
    ]  # fmt: skip
    assert all(row.texts[0].split()[0] in page.getvalue() for row in rows)
    text = "\n".join(stories.as_markdown(rows, 2))
    assert text.count("\n| teacher |") == 2
    assert f"> {rows[0].texts[0]}" in text
