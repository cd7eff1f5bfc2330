"""Samples are drawn and measured once, and compared on equal terms."""

import json

import pytest
import torch

import didi_instruct as didi
from didi_instruct.api.quality import Plan, Studio, compare, evaluate_quality
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.evaluation.samples import read_samples
from didi_instruct.models.build import build_model
from didi_instruct.models.checkpoint import save_model

LANGUAGE = OracleLanguage.default()
PLAN = Plan(steps=(2, 4), num=24)
METRICS = ["ppl", "entropy", "path-kl", "self-bleu", "unique-4gram"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random denoiser that speaks the oracle's words."""
    from didi_instruct.config.model import ModelConfig, ScheduleConfig

    torch.manual_seed(0)
    config = ModelConfig(
        layers=1, hidden=32, heads=2, cond_dim=16, vocab_size=65, length=32,
        schedule=ScheduleConfig(eps=0.0),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model") / "random"
    network = build_model(config)
    for parameter in network.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    save_model(folder, network, config, tokenizer=LANGUAGE.tokenizer)
    return str(folder)


def run(model, out, plan=PLAN, metrics=METRICS, **options):
    judge = options.pop("judge", OracleJudge(LANGUAGE))
    return evaluate_quality([model], plan, metrics, out=out, judge=judge, device="cpu", **options)


def test_a_row_says_what_was_measured_and_of_what(model, tmp_path):
    found = run(model, tmp_path)
    assert [row["steps"] for row in found.rows] == [2, 4]
    row = found.rows[1]
    tokens = didi.load(model, device="cpu").sample(num=24, steps=4, seed=0)
    nats = -LANGUAGE.log_prob(tokens)
    assert row["ppl"] == pytest.approx((nats.sum() / tokens.numel()).exp().item())
    assert row["entropy"] == pytest.approx(unigram_entropy(tokens).mean().item())
    assert row["entropy_ci95"][0] < row["entropy"] < row["entropy_ci95"][1]
    assert row["path_kl"] == pytest.approx(nats.mean().item() - row["path_entropy"])
    assert (row["num_samples"], row["seed"], row["nfe"], row["length"]) == (24, 0, 4, 32)
    assert found.judge == "oracle"


def test_nothing_is_drawn_or_measured_twice(model, tmp_path, monkeypatch):
    first = run(model, tmp_path)
    monkeypatch.setattr("didi_instruct.api.quality._draw", None)
    monkeypatch.setattr(OracleJudge, "score", None)
    again = run(model, tmp_path)
    assert again.rows == first.rows


def test_another_judge_or_seed_is_not_taken_for_the_same(model, tmp_path):
    run(model, tmp_path, metrics=["entropy"], judge=None)
    kept = sorted((tmp_path / "samples").iterdir())
    run(model, tmp_path, Plan(steps=(2,), num=24, seed=1), ["entropy"], judge=None)
    assert len(list((tmp_path / "samples").iterdir())) == len(kept) + 1

    class Strict(OracleJudge):
        def score(self, samples, progress=None):
            scores = super().score(samples, progress)
            return type(scores)(2 * scores.nats, scores.tokens)

    strict = Strict(LANGUAGE)
    strict.fingerprint = "another"
    mild = run(model, tmp_path, metrics=["ppl", "entropy"]).rows[0]["ppl"]
    harsh = run(model, tmp_path, metrics=["ppl", "entropy"], judge=strict).rows[0]["ppl"]
    assert harsh == pytest.approx(mild**2)


def test_saved_samples_give_the_same_numbers(model, tmp_path):
    found = run(model, tmp_path / "a")
    files = sorted((tmp_path / "a" / "samples").iterdir())
    again = evaluate_quality(
        [], PLAN, METRICS, out=tmp_path / "b", judge=OracleJudge(LANGUAGE), samples=files
    )
    key = ("steps", "ppl", "entropy", "path_kl", "self_bleu", "unique_4gram")
    pick = lambda rows: sorted(tuple(row[k] for k in key) for row in rows)  # noqa: E731
    assert pick(again.rows) == pick(found.rows)
    assert read_samples(files[0]).origin.model == model


def test_a_model_is_on_its_own_frontier_and_closes_no_gap(model, tmp_path):
    plan = Plan(steps=(2,), num=24, most_steps=16, temperatures=(0.8,))
    found = run(model, tmp_path, plan, against=model)
    assert [row["vsf"] for row in found.rows] == pytest.approx([1.0, 1.0])
    best = max(row["gap_closed"] for row in found.rows)
    assert best == pytest.approx(0.0)
    assert {row["steps"] for row in found.baseline} == {2, 16}


def test_what_the_baseline_does_not_reach_is_not_made_up():
    few = {"ppl": 10.0, "entropy": 3.0, "nfe": 4, "steps": 4, "passes": 4.0, "path_kl": 9.0}
    row = few | {"temperature": 1.0, "top_p": 1.0}
    far = row | {"entropy": 5.0}
    result = compare([far], [row], most_steps=64)[0]
    assert result["vsf"] is None
    assert "above all that the baseline reaches" in result["vsf_note"]
    assert result["gap_closed"] is None


def test_the_reference_is_measured_alike(model, tmp_path):
    found = run(model, tmp_path, reference="oracle")
    assert found.reference["num_samples"] == 24
    assert found.reference["ppl"] < min(row["ppl"] for row in found.rows)
    assert "path_kl" not in found.reference


@pytest.mark.parametrize(
    ("metrics", "options", "message"),
    [
        (["pll"], {}, "`pll` is not a metric. Did you mean `ppl`?"),
        ([], {}, "No metric is named"),
        (["ppl"], {}, "Perplexity alone proves nothing: add the metric entropy"),
        (["ppl", "entropy"], {"judge": None}, "needs a judge: add --judge"),
        (["mauve"], {}, "compares with text: add --reference"),
        (["mauve"], {"reference": "oracle"}, "features of a causal language model"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, tmp_path, metrics, options, message):
    with pytest.raises(UserError, match=message):
        run(model, tmp_path, metrics=metrics, **options)


def test_nothing_to_evaluate(tmp_path):
    with pytest.raises(UserError, match="name a model, or saved samples"):
        evaluate_quality([], PLAN, ["entropy"], out=tmp_path)


def test_tables_do_not_mix_lengths_or_tokenizers(model, tmp_path):
    run(model, tmp_path / "a", metrics=["entropy"])
    run(model, tmp_path / "b", Plan(steps=(2,), num=24, length=16), ["entropy"], judge=None)
    files = [next((tmp_path / name / "samples").iterdir()) for name in "ab"]
    with pytest.raises(UserError, match="entropy grows with length"):
        evaluate_quality([], PLAN, ["entropy"], out=tmp_path / "c", samples=files)
    lines = files[0].read_text().splitlines()
    head = json.loads(lines[0]) | {"tokenizer": "other"}
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([json.dumps(head), *lines[1:]]) + "\n")
    with pytest.raises(UserError, match="have different tokenizers"):
        evaluate_quality([], PLAN, ["entropy"], out=tmp_path / "c", samples=[files[0], other])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a file of samples"),
        ("[1]\n", "is not a file of samples"),
        ('{"format": "didi-samples", "version": 9}\n', "newer version"),
        ('{"format": "didi-samples", "version": 1, "odd": 1}\n', "`odd` is not known"),
        ("no json\n", "is damaged"),
    ],
)
def test_a_damaged_file_of_samples_is_refused(tmp_path, content, message):
    path = tmp_path / "samples.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_samples(path)


def test_studio_keeps_one_file_per_setting(model, tmp_path):
    studio = Studio(tmp_path)
    sets = studio.draw(model, didi.load(model, device="cpu"), PLAN)
    assert len(list((tmp_path / "samples").iterdir())) == len(sets) == 2
