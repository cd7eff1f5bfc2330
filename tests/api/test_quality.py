"""Samples are drawn and measured once, and compared on equal terms."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.random_models import add_noise

import didi_instruct as didi
from didi_instruct.api import reference as references
from didi_instruct.api import studio as studios
from didi_instruct.api.plan import Plan, plan_of_baseline
from didi_instruct.api.quality import evaluate_quality
from didi_instruct.api.studio import Studio
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.evaluation.measuring import Yardstick
from didi_instruct.evaluation.rows import METRICS as KNOWN
from didi_instruct.evaluation.samples import read_samples, write_samples
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model

LANGUAGE = OracleLanguage.default()
PLAN = Plan(steps=(2, 4), num=24)
METRICS = ["ppl", "entropy", "path-kl", "self-bleu", "unique-4gram"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random denoiser that speaks the oracle's words."""
    torch.manual_seed(0)
    config = ModelConfig(
        layers=1, hidden=32, heads=2, cond_dim=16, vocab_size=65, length=32,
        schedule=ScheduleConfig(eps=0.0),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model") / "random"
    network = add_noise(build_model(config), 0.2)
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
    monkeypatch.setattr("didi_instruct.api.studio._draw", None)
    monkeypatch.setattr(OracleJudge, "score", None)
    again = run(model, tmp_path)
    assert again.rows == first.rows


def test_another_judge_or_seed_is_not_taken_for_the_same(model, tmp_path):
    run(model, tmp_path, metrics=["entropy"], judge=None)
    kept = sorted((tmp_path / "samples").iterdir())
    run(model, tmp_path, Plan(steps=(2,), num=24, seed=1), ["entropy"], judge=None)
    assert len(list((tmp_path / "samples").iterdir())) == len(kept) + 1

    class Strict(OracleJudge):
        def score(self, samples, progress=None, *, ending=False):
            scores = super().score(samples, progress, ending=ending)
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
    best = max(found.rows, key=lambda row: row["gap_closed"])
    assert best["gap_closed"] == best["gap_closed_best"] == pytest.approx(0.0)
    assert (best["path_kl_vs_baseline"], best["path_kl_vs_baseline_se"]) == (0, 0)
    assert {row["steps"] for row in found.baseline} == {2, 16}


def test_the_reference_is_measured_alike(model, tmp_path):
    found = run(model, tmp_path, reference="oracle")
    assert found.reference["num_samples"] == 24
    assert found.reference["ppl"] < min(row["ppl"] for row in found.rows)
    names = ("path_kl", "temperature", "nfe", "options", "batch_size", "device", "fingerprint")
    assert [found.reference[name] for name in names] == [None] * len(names)


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
        ("no json\n", "is not a file of samples"),
        ('{"format": "didi-samples", "version": 1}\nno json\n', "is damaged"),
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


def test_a_kept_comparison_needs_no_judge_and_is_the_same(model, tmp_path, monkeypatch):
    plan = Plan(steps=(2, 4), num=24, most_steps=16, temperatures=(0.8, 0.9))
    first = run(model, tmp_path, plan, against=model)
    inner = [row for row in first.rows if row["temperature"] == 0.9]
    assert all(row["vsf_ci95"] and row["path_kl_vs_baseline_ci95"] for row in inner)
    monkeypatch.setattr(OracleJudge, "score", None)
    assert run(model, tmp_path, plan, against=model).rows == first.rows


def test_the_judge_is_not_asked_again_for_another_measure(model, tmp_path, monkeypatch):
    run(model, tmp_path, metrics=["ppl", "entropy"])
    monkeypatch.setattr(OracleJudge, "score", None)
    row = run(model, tmp_path, metrics=["path-kl"]).rows[0]
    assert row["path_kl_ci95"][0] < row["path_kl"] < row["path_kl_ci95"][1]


def test_another_text_of_the_same_name_is_another_reference(model, tmp_path, monkeypatch):
    """The classifier's value is kept for the reference's content, not for what it is called."""
    asked = []

    def two_sample(a, b, *_, **settings):
        asked.append(b)
        return SimpleNamespace(auc=0.5, auc_ci95=(0.4, 0.6), held_out=4)

    monkeypatch.setattr("didi_instruct.evaluation.rows.two_sample", two_sample)
    plan = Plan(steps=(2,), num=64)
    for _ in range(2):
        run(model, tmp_path, plan, ["c2st"], reference="oracle", judge=None)
    assert len(asked) == 1
    held_out = references.held_out

    def shifted(*arguments):
        source = held_out(*arguments)
        return SimpleNamespace(
            ordered=lambda start, count: source.ordered(start + 1, count),
            tokenizer=source.tokenizer, num_tokens=source.num_tokens, length=source.length,
        )  # fmt: skip

    monkeypatch.setattr(references, "held_out", shifted)
    run(model, tmp_path, plan, ["c2st"], reference="oracle", judge=None)
    assert len(asked) == 2
    assert torch.equal(asked[0][1:], asked[1][:-1])


def test_files_of_one_model_and_setting_are_told_apart(model, tmp_path):
    """Equal in all that is said of them, down to the time of drawing."""
    run(model, tmp_path / "a", Plan(steps=(2,), num=24), ["entropy"], judge=None)
    one = next((tmp_path / "a" / "samples").iterdir())
    kept, other = read_samples(one), tmp_path / "other.jsonl"
    write_samples(other, replace(kept, tokens=kept.tokens[:, :1].expand(-1, 32)))
    found = evaluate_quality([], PLAN, ["entropy"], out=tmp_path / "b", samples=[one, other])
    assert [row["file"] for row in found.rows] == [str(one), str(other)]
    assert found.rows[0]["entropy"] > 0
    assert found.rows[1]["entropy"] == 0


def test_two_evaluations_may_share_a_folder(model, tmp_path, monkeypatch):
    """Both began before either wrote; neither loses what the other measured."""
    studio, yardstick = Studio(tmp_path), Yardstick()
    (samples,) = studio.draw(model, didi.load(model, device="cpu"), Plan(steps=(2,), num=24))
    entropy = KNOWN["entropy"]

    def meanwhile(measuring):
        Studio(tmp_path).measure(samples, ["self-bleu"], yardstick)
        return entropy.compute(measuring)

    monkeypatch.setitem(KNOWN, "entropy", replace(entropy, compute=meanwhile))
    first = studio.measure(samples, ["entropy"], yardstick)
    for name in ("entropy", "self-bleu"):
        monkeypatch.setitem(KNOWN, name, replace(KNOWN[name], compute=None))
    both = studio.measure(samples, ["entropy", "self-bleu"], yardstick)
    assert both.row["entropy"] == first.row["entropy"]
    assert both.row["self_bleu"] > 0


def test_a_damaged_number_is_measured_again(model, tmp_path):
    first = run(model, tmp_path).rows
    for path in (tmp_path / "measured").rglob("*.json"):
        path.write_text(path.read_text()[:-5])
    assert run(model, tmp_path).rows == first


def test_an_interruption_loses_the_row_at_work(model, tmp_path, monkeypatch):
    draw, drawn = studios._draw, []

    def second_is_interrupted(*arguments):
        drawn.append(arguments)
        if len(drawn) == 2:
            raise KeyboardInterrupt
        return draw(*arguments)

    monkeypatch.setattr(studios, "_draw", second_is_interrupted)
    plan = Plan(steps=(2, 4, 8), num=24)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, plan)
    assert [row["steps"] for row in run(model, tmp_path, plan).rows] == [2, 4, 8]
    assert len(drawn) == 4


def test_one_sample_makes_a_row_that_json_can_hold(model, tmp_path):
    plan = Plan(steps=(2,), num=1, most_steps=8, temperatures=(0.8,))
    found = run(model, tmp_path, plan, against=model)
    json.dumps([found.rows, found.baseline], allow_nan=False)
    assert found.rows[0]["ppl_ci95"] is found.rows[0]["vsf_ci95"] is None


def test_a_left_to_right_model_is_drawn_once_whatever_the_steps(tmp_path):
    torch.manual_seed(0)
    config = ModelConfig(kind="ar", layers=1, hidden=32, heads=2, vocab_size=65, length=32)
    save_model(tmp_path / "ar", build_model(config), config, tokenizer=LANGUAGE.tokenizer)
    found = run(str(tmp_path / "ar"), tmp_path / "out", metrics=["ppl", "entropy", "path-kl"])
    (row,) = found.rows
    assert (row["steps"], row["nfe"], row["sampler"]) == (32, 32, "autoregressive")
    assert row["path_kl"] > 0


def test_a_judge_of_texts_reads_the_tokens_that_count():
    """The whole window with its ends of text, or what comes before the first."""
    tokenizer = Tokenizer.load("bytes")
    end = tokenizer.eot_id
    tokens = torch.tensor([[97, 98, end, 99], [end, 97, 98, 99], [97, 98, 99, 100]])
    texts, lengths = studios.texts_of(tokenizer, tokens, until_eot=False)
    assert texts == (f"ab{tokenizer.eot}c", f"{tokenizer.eot}abc", "abcd")
    assert lengths.tolist() == [4, 4, 4]
    texts, lengths = studios.texts_of(tokenizer, tokens, until_eot=True)
    assert (texts, lengths.tolist()) == (("ab", "", "abcd"), [2, 0, 4])


def test_a_baseline_that_cannot_be_guided_is_sampled_plainly():
    plan = Plan(steps=(4, 8), most_steps=64, sampler="rgas", options={"h": 1.0})
    teacher = SimpleNamespace(config=SimpleNamespace(kind="mdlm"), discriminator=None)
    plain = plan_of_baseline(plan, teacher)
    assert (plain.steps, plain.sampler, plain.options) == ((4, 8, 64), None, {})
    teacher.discriminator = object()
    assert plan_of_baseline(plan, teacher).sampler == "rgas"


def test_other_settings_of_the_same_weights_are_another_model(model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    config["model"]["schedule"]["eps"] = 0.01
    (other / "config.json").write_text(json.dumps(config))
    assert studios.sampling_fingerprint(model) != studios.sampling_fingerprint(str(other))


def test_a_sweep_has_its_own_temperatures():
    with pytest.raises(UserError, match="leave out temperature and top_p"):
        Plan(steps=(2,), temperature=0.9, top_ps=(0.9,))
    assert len(list(Plan(steps=(2, 2, 4), top_ps=(0.9,)).requests())) == 4
    assert [r.steps for r in Plan(steps=(2, 4)).requests(counts_tokens=True)] == [None]
