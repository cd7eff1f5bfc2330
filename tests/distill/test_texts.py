"""The texts that a run compares with: a bank of the teacher's, and prompts of the data."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.random_models import save_random
from tests.runs import contents, entries

import didi_instruct as didi
from didi_instruct.data.dataset import open_data
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.distillation import auxiliary
from didi_instruct.distillation import didi as didi_module
from didi_instruct.errors import UserError
from didi_instruct.seeding import mix

from .small import recipe

# The bank


def test_a_bank_is_drawn_once_and_shared(run, tmp_path, draws):
    config = recipe(reference={"source": "bank", "bank": str(tmp_path / "bank")})
    run(config, "one")
    assert sum(draws) == 32
    bank = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "bank").iterdir()}
    run(config, "two")
    run(replace(config, reference=replace(config.reference, rows=8)), "three")
    assert sum(draws) == 32
    assert {
        p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "bank").iterdir()
    } == bank
    assert entries(tmp_path / "one") == entries(tmp_path / "two")
    assert entries(tmp_path / "one") != entries(tmp_path / "three")
    assert not (tmp_path / "two" / "bank").exists()


def test_a_bank_holds_the_teachers_samples(run, models, tmp_path):
    """Row i is what the teacher draws under the bank's seed and index i."""
    run(recipe(reference={"source": "bank", "steps": 4, "seed": 3}, train={"steps": 1}))
    rows = np.load(tmp_path / "run" / "bank" / "rows-00000.npy")
    teacher = didi.load(models / "teacher", device="cpu")
    drawn = teacher.sample(num=32, steps=4, seed=mix(3, "bank"), sampler="ancestral")
    assert np.array_equal(rows, drawn.numpy())


def test_a_bank_of_another_teacher_is_refused_before_anything_is_written(run, tmp_path, draws):
    config = recipe(reference={"source": "bank", "bank": str(tmp_path / "bank")})
    run(config, "mine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="holds samples of another teacher.*reference.bank"):
        run(config, "theirs", teacher="other")
    assert contents(tmp_path) == before
    assert not (tmp_path / "theirs").exists()
    assert sum(draws) == 32


# Prompts


@pytest.mark.parametrize("source", ["bank", "online", "data"])
def test_didi_continues_the_prompts_of_the_data(run, tmp_path, monkeypatch, source):
    """Bank rows, references and the student's texts begin with rows of the data, and go on anew."""
    seen, make_pair = [], didi_module.make_pair

    def watched(*given):
        seen.append(make_pair(*given))
        return seen[-1]

    monkeypatch.setattr(didi_module, "make_pair", watched)
    settings = {"prompt": 8, "data": {"source": "oracle"}, "train": {"eval_sequences": 8}}
    run(recipe(reference={"source": source}, didi={"group_size": 2}, **settings))
    data = OracleSource(OracleLanguage.default(), seed=0).rows(0, 32)
    if source == "bank":
        rows = torch.from_numpy(np.load(tmp_path / "run" / "bank" / "rows-00000.npy").astype(int))
        assert torch.equal(rows[:, :8], data[:, :8])
        assert not torch.equal(rows[:, 8:], data[:, 8:])
    prompts = {tuple(row) for row in data[:, :8].tolist()}
    texts = torch.cat([part.rollout.x for part in seen])
    assert len(texts) == 6 * 8
    assert {tuple(row) for row in texts[:, :8].tolist()} <= prompts
    for part in seen:
        assert not part.rollout.written[:, :8].any()
        assert part.rollout.written[:, 8:].all()
        given = part.real.z[:, :8].repeat_interleave(2, 0)
        assert torch.equal(part.rollout.x[:, :8], given)
        assert torch.equal(part.fake.z[:, :8], given)
    assert len({tuple(row) for row in texts.tolist()}) == len(texts)
    assert "path_entropy_2" in entries(tmp_path / "run")[-1]
    assert "path_kl_2" not in entries(tmp_path / "run")[-1]


def test_token_matching_continues_the_prompts_of_the_data(run, monkeypatch):
    texts, draw = [], auxiliary.draw_step

    def watched(*given, **options):
        drawn = draw(*given, **options)
        texts.append(drawn.x)
        return drawn

    monkeypatch.setattr(auxiliary, "draw_step", watched)
    matching = {"contexts": 2, "aux_steps": 2}
    run(recipe("token-matching", prompt=8, data={"source": "oracle"}, token_matching=matching))
    # A prompt for each state, two contexts of each; every one is used once.
    data = OracleSource(OracleLanguage.default(), seed=0).rows(0, 6 * 2 * 4)
    assert torch.equal(torch.cat(texts)[:, :8], data[:, :8].repeat_interleave(2, 0))
    assert not torch.equal(torch.cat(texts)[:, 8:], data[:, 8:].repeat_interleave(2, 0))


def test_text_is_read_with_the_teachers_tokenizer_and_needed_once(run, tmp_path):
    """A resumed run has its tokens: it does not ask for the corpus again."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("all work and no play makes jack a dull boy\n" * 200)
    tokenizer = Tokenizer.load("bytes")
    teacher = save_random(tmp_path / "bytes", vocab_size=tokenizer.size + 1, tokenizer=tokenizer)
    data = {"source": str(corpus), "documents": "line", "valid": 20}
    config = recipe(prompt=4, data=data, reference={"source": "bank"}, train={"steps": 3})
    result = run(config, teacher=teacher)
    rows = np.load(tmp_path / "run" / "bank" / "rows-00000.npy")
    tokens = open_data(tmp_path / "run" / "data", seed=0)
    assert np.array_equal(rows[:, :4], tokens.rows(0, len(rows))[:, :4].numpy())
    assert "no play makes jack" in tokenizer.decode(tokens.ordered(0, 4).flatten().tolist())
    assert result.student["valid_nats_per_token"] > 0
    corpus.unlink()
    longer = replace(config, train=replace(config.train, steps=6))
    assert run(longer, teacher=teacher, resume=True).outcome.step == 6
