"""Samples are drawn and measured once, and compared on equal terms."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.evaluation import models
from tests.evaluation.models import save

import didi_instruct as didi
from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation import drawing
from didi_instruct.evaluation import evaluate as module
from didi_instruct.evaluation import metrics as registry
from didi_instruct.evaluation import reference as references
from didi_instruct.evaluation.cache import model_key
from didi_instruct.evaluation.config import EvalConfig, Variant, baseline_config
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.evaluation.measuring import Context
from didi_instruct.evaluation.metrics import METRICS as KNOWN
from didi_instruct.evaluation.metrics import measure_row
from didi_instruct.evaluation.samples import read_samples, texts_of, write_samples
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model

LANGUAGE = OracleLanguage.default()
PLAIN = {"steps": (2, 4), "num": 24}
METRICS = ("ppl", "entropy", "path-kl", "self-bleu", "unique-4gram")
LETTERS = Tokenizer.load("bytes")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random denoiser that speaks the oracle's words."""
    return save(tmp_path_factory.mktemp("model") / "random", LANGUAGE.tokenizer, 65)


ORACLE = OracleJudge(LANGUAGE)


def run(model, out, metrics=METRICS, judge=ORACLE, **settings):
    return models.run(model, out, metrics=metrics, judge=judge, **PLAIN | settings)


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
    monkeypatch.setattr(drawing, "_draw", None)
    monkeypatch.setattr(OracleJudge, "score", None)
    again = run(model, tmp_path)
    assert again.rows == first.rows


def test_another_judge_or_seed_is_not_taken_for_the_same(model, tmp_path):
    run(model, tmp_path, metrics=("entropy",), judge=None)
    kept = sorted((tmp_path / "samples").iterdir())
    run(model, tmp_path, ("entropy",), None, steps=(2,), seed=1)
    assert len(list((tmp_path / "samples").iterdir())) == len(kept) + 1

    class Strict(OracleJudge):
        def score(self, samples, progress=None):
            scores = super().score(samples, progress)
            return type(scores)(2 * scores.nats, scores.tokens)

    strict = Strict(LANGUAGE)
    strict.fingerprint = "another"
    mild = run(model, tmp_path, metrics=("ppl", "entropy")).rows[0]["ppl"]
    harsh = run(model, tmp_path, metrics=("ppl", "entropy"), judge=strict).rows[0]["ppl"]
    assert harsh == pytest.approx(mild**2)


def test_saved_samples_give_the_same_numbers(model, tmp_path):
    found = run(model, tmp_path / "a")
    files = sorted((tmp_path / "a" / "samples").iterdir())
    again = run([], tmp_path / "b", samples=files)
    key = ("steps", "ppl", "entropy", "path_kl", "self_bleu", "unique_4gram")
    pick = lambda rows: sorted(tuple(row[k] for k in key) for row in rows)  # noqa: E731
    assert pick(again.rows) == pick(found.rows)
    assert read_samples(files[0]).origin.model == model


def test_a_model_is_on_its_own_frontier_and_closes_no_gap(model, tmp_path):
    found = run(model, tmp_path, steps=(2,), most_steps=16, temperatures=(0.8,), baseline=model)
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
        (("pll",), {}, "`pll` is not a metric. Did you mean `ppl`?"),
        ((), {}, "No metric is named"),
        (("ppl",), {}, "Perplexity alone proves nothing: add the metric entropy"),
        (("ppl", "entropy"), {"judge": None}, "needs a judge: add --judge"),
        (("mauve",), {}, "compares with text: add --reference"),
        (("mauve",), {"reference": "oracle"}, "features of a causal language model"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, tmp_path, metrics, options, message):
    with pytest.raises(UserError, match=message):
        run(model, tmp_path, metrics=metrics, **options)


def test_nothing_to_evaluate(tmp_path):
    with pytest.raises(UserError, match="name a model, or saved samples"):
        run([], tmp_path)


def test_tables_do_not_mix_lengths_or_tokenizers(model, tmp_path):
    run(model, tmp_path / "a", metrics=("entropy",))
    run(model, tmp_path / "b", ("entropy",), None, steps=(2,), length=16)
    files = [next((tmp_path / name / "samples").iterdir()) for name in "ab"]
    with pytest.raises(UserError, match="entropy grows with length"):
        run([], tmp_path / "c", ("entropy",), samples=files)
    lines = files[0].read_text().splitlines()
    head = json.loads(lines[0]) | {"tokenizer": "other"}
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([json.dumps(head), *lines[1:]]) + "\n")
    with pytest.raises(UserError, match="have different tokenizers"):
        run([], tmp_path / "c", ("entropy",), samples=[files[0], other])


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "8"}, "`steps` is '8'"),
        ({"temperature": float("nan")}, "`temperature` is nan"),
        ({"options": 1}, "`options` is 1"),
        ({"until_eot": 1}, "`until_eot` is 1"),
        ({"seconds": []}, r"`seconds` is \[\]"),
        ({"tokens": [[0]] * 32}, "`tokens` are not ids"),
        ({"tokens": [-1] * 32}, "`tokens` are not ids"),
        ({"tokens": [{}] * 32}, "is damaged"),
        ({"length": 33}, "a `length` is not one of the window's"),
        ({"log_prob": float("inf")}, "`log_prob` is not a finite number"),
    ],
)
def test_a_file_of_samples_with_other_values_is_refused(model, tmp_path, change, message):
    run(model, tmp_path, ("entropy",), None, steps=(2,), num=2)
    (path,) = (tmp_path / "samples").iterdir()
    head, row, _ = map(json.loads, path.read_text().splitlines())
    if {*change} & {"tokens", "length", "log_prob"} and "steps" not in change:
        row |= change
    else:
        head |= change
    path.write_text(f"{json.dumps(head)}\n{json.dumps(row)}\n")
    with pytest.raises(UserError, match=message):
        read_samples(path)


def test_a_kept_comparison_needs_no_judge_and_is_the_same(model, tmp_path, monkeypatch):
    asked = {"most_steps": 16, "temperatures": (0.8, 0.9), "baseline": model}
    first = run(model, tmp_path, **asked)
    inner = [row for row in first.rows if row["temperature"] == 0.9]
    assert all(row["vsf_ci95"] and row["path_kl_vs_baseline_ci95"] for row in inner)
    monkeypatch.setattr(OracleJudge, "score", None)
    assert run(model, tmp_path, **asked).rows == first.rows


def test_the_judge_is_not_asked_again_for_another_measure(model, tmp_path, monkeypatch):
    run(model, tmp_path, metrics=("ppl", "entropy"))
    monkeypatch.setattr(OracleJudge, "score", None)
    row = run(model, tmp_path, metrics=("path-kl",)).rows[0]
    assert row["path_kl_ci95"][0] < row["path_kl"] < row["path_kl_ci95"][1]


def test_another_text_of_the_same_name_is_another_reference(model, tmp_path, monkeypatch):
    """The classifier's value is kept for the reference's content, not for what it is called."""
    asked = []

    def two_sample(a, b, *_, **settings):
        asked.append(b)
        return SimpleNamespace(auc=0.5, auc_ci95=(0.4, 0.6), held_out=4)

    monkeypatch.setattr(registry, "two_sample", two_sample)
    what = {"metrics": ("c2st",), "judge": None, "steps": (2,), "num": 64, "reference": "oracle"}
    for _ in range(2):
        run(model, tmp_path, **what)
    assert len(asked) == 1
    held_out = references.held_out

    def shifted(*arguments):
        source = held_out(*arguments)
        return SimpleNamespace(
            ordered=lambda start, count: source.ordered(start + 1, count),
            tokenizer=source.tokenizer, num_tokens=source.num_tokens, length=source.length,
        )  # fmt: skip

    monkeypatch.setattr(references, "held_out", shifted)
    run(model, tmp_path, **what)
    assert len(asked) == 2
    assert torch.equal(asked[0][1:], asked[1][:-1])


def test_files_of_one_model_and_setting_are_told_apart(model, tmp_path):
    """Equal in all that is said of them, down to the time of drawing."""
    run(model, tmp_path / "a", ("entropy",), None, steps=(2,))
    one = next((tmp_path / "a" / "samples").iterdir())
    kept, other = read_samples(one), tmp_path / "other.jsonl"
    write_samples(other, replace(kept, tokens=kept.tokens[:, :1].expand(-1, 32)))
    found = run([], tmp_path / "b", ("entropy",), None, samples=[one, other])
    assert [row["file"] for row in found.rows] == [str(one), str(other)]
    assert found.rows[0]["entropy"] > 0
    assert found.rows[1]["entropy"] == 0


def test_two_evaluations_may_share_a_folder(model, tmp_path, monkeypatch):
    """Both began before either wrote; neither loses what the other measured."""
    (samples,) = run(model, tmp_path, ("entropy",), None, steps=(2,)).samples
    entropy, folder = KNOWN["entropy"], tmp_path / "numbers"

    def measured(*names):
        return measure_row(samples, names, Context(), folder=folder).row

    def meanwhile(measuring):
        measured("self-bleu")
        return entropy.compute(measuring)

    monkeypatch.setitem(KNOWN, "entropy", replace(entropy, compute=meanwhile))
    first = measured("entropy")
    for name in ("entropy", "self-bleu"):
        monkeypatch.setitem(KNOWN, name, replace(KNOWN[name], compute=None))
    both = measured("entropy", "self-bleu")
    assert both["entropy"] == first["entropy"]
    assert both["self_bleu"] > 0


def test_a_damaged_number_is_measured_again(model, tmp_path):
    first = run(model, tmp_path).rows
    for path in (tmp_path / "measured").rglob("*.json"):
        path.write_text(path.read_text()[:-5])
    assert run(model, tmp_path).rows == first


def test_an_interruption_loses_the_row_at_work(model, tmp_path, monkeypatch):
    draw, drawn = drawing._draw, []

    def second_is_interrupted(*arguments):
        drawn.append(arguments)
        if len(drawn) == 2:
            raise KeyboardInterrupt
        return draw(*arguments)

    monkeypatch.setattr(drawing, "_draw", second_is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, steps=(2, 4, 8))
    assert [row["steps"] for row in run(model, tmp_path, steps=(2, 4, 8)).rows] == [2, 4, 8]
    assert len(drawn) == 4


def test_one_sample_makes_a_row_that_json_can_hold(model, tmp_path):
    asked = {"steps": (2,), "num": 1, "most_steps": 8, "temperatures": (0.8,)}
    found = run(model, tmp_path, **asked, baseline=model)
    json.dumps([found.rows, found.baseline], allow_nan=False)
    assert found.rows[0]["ppl_ci95"] is found.rows[0]["vsf_ci95"] is None


def test_a_left_to_right_model_is_drawn_once_whatever_the_steps(tmp_path):
    torch.manual_seed(0)
    config = ModelConfig(kind="ar", layers=1, hidden=32, heads=2, vocab_size=65, length=32)
    save_model(tmp_path / "ar", build_model(config), config, tokenizer=LANGUAGE.tokenizer)
    found = run(str(tmp_path / "ar"), tmp_path / "out", metrics=("ppl", "entropy", "path-kl"))
    (row,) = found.rows
    assert (row["steps"], row["nfe"], row["sampler"]) == (32, 32, "autoregressive")
    assert row["path_kl"] > 0


def test_a_judge_of_texts_reads_the_tokens_that_count():
    """The whole window with its ends of text, or what comes before the first."""
    tokenizer = Tokenizer.load("bytes")
    end = tokenizer.eot_id
    tokens = torch.tensor([[97, 98, end, 99], [end, 97, 98, 99], [97, 98, 99, 100]])
    texts, lengths = texts_of(tokenizer, tokens, until_eot=False)
    assert texts == (f"ab{tokenizer.eot}c", f"{tokenizer.eot}abc", "abcd")
    assert lengths.tolist() == [4, 4, 4]
    texts, lengths = texts_of(tokenizer, tokens, until_eot=True)
    assert (texts, lengths.tolist()) == (("ab", "", "abcd"), [2, 0, 4])


def test_a_baseline_that_cannot_be_guided_is_sampled_plainly():
    config = EvalConfig(steps=(4, 8), most_steps=64, sampler="rgas", options={"h": 1.0})
    teacher = SimpleNamespace(config=SimpleNamespace(kind="mdlm"), discriminator=None)
    plain = baseline_config(config, teacher)
    assert (plain.steps, plain.sampler, plain.options) == ((4, 8, 64), None, {})
    teacher.discriminator = object()
    assert baseline_config(config, teacher).sampler == "rgas"


def test_other_settings_of_the_same_weights_are_another_model(model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    config["model"]["schedule"]["eps"] = 0.01
    (other / "config.json").write_text(json.dumps(config))
    assert model_key(model) != model_key(str(other))


def test_a_sweep_has_its_own_temperatures():
    with pytest.raises(UserError, match="leave out temperature and top_p"):
        EvalConfig(temperature=0.9, top_ps=(0.9,))
    assert len(list(EvalConfig(steps=(2, 2, 4), top_ps=(0.9,)).requests("mdlm"))) == 4
    assert [request.steps for request in EvalConfig(steps=(2, 4)).requests("ar")] == [None]


def test_variants_of_a_model_are_rows_in_their_order(model, tmp_path, monkeypatch):
    """Each is sampled and measured in its own way; a model is loaded once."""
    other = save(tmp_path / "other", LANGUAGE.tokenizer, 65, masks=1)
    config = EvalConfig(metrics=("ppl", "entropy"), steps=(2,), num=4, device="cpu")
    ways = [
        Variant(model, replace(config, steps=(4,), temperature=0.5)),
        Variant(other, replace(config, metrics=("entropy",), sampler="confidence")),
        Variant(model, config),
    ]
    loaded, load = [], module.load
    monkeypatch.setattr(
        module, "load", lambda s, **settings: (loaded.append(s.name), load(s, **settings))[1]
    )
    found = didi.evaluate(ways, config, out=tmp_path / "out", judge="oracle")
    assert [(r["model"], r["steps"], r["sampler"], r["temperature"]) for r in found.rows] == [
        (model, 4, "ancestral", 0.5), (other, 2, "confidence", 1), (model, 2, "ancestral", 1)
    ]  # fmt: skip
    assert [row["ppl"] is None for row in found.rows] == [False, True, False]
    assert loaded == [model, other]
    plain = run(model, tmp_path / "out", ("ppl", "entropy"), num=4, steps=(2,)).rows[0]
    assert plain == found.rows[2]


def test_sources_may_be_paths(model, tmp_path):
    config = EvalConfig(metrics=("entropy",), steps=(2,), num=4, device="cpu")
    by_name = didi.evaluate(model, config, out=tmp_path / "out", baseline=model)
    by_path = didi.evaluate(Path(model), config, out=tmp_path / "out", baseline=Path(model))
    assert by_path.rows == by_name.rows
    assert by_path.baseline == by_name.baseline


def test_a_variant_is_refused_before_anything_is_drawn(model, tmp_path):
    config = EvalConfig(metrics=("entropy",), steps=(2,), num=4, device="cpu")
    ways = [model, Variant(model, replace(config, metrics=("c2st",)))]
    with pytest.raises(UserError, match="c2st compares with text"):
        didi.evaluate(ways, config, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Models of equal words, one of which has room for more; and a text of three windows."""
    folder = tmp_path_factory.mktemp("shelf")
    for name, size in (("tight", 258), ("wide", 300)):
        save(folder / name, LETTERS, size)
    (folder / "text.txt").write_text("".join(chr(97 + n % 26) for n in range(32 * 3)))
    return folder


def contexts(monkeypatch):
    """Contexts that rows are measured in, by name of the row."""
    seen, measure = {}, module.measure_row

    def spied(samples, metrics, context, **settings):
        seen[samples.origin.model] = context
        return measure(samples, metrics, context, **settings)

    monkeypatch.setattr(module, "measure_row", spied)
    return seen


def test_neither_the_order_nor_a_part_of_the_rows_changes_the_context(shelf, tmp_path, monkeypatch):
    """Numbers that are kept under it would else not be found again."""
    tight, wide, text = (str(shelf / name) for name in ("tight", "wide", "text.txt"))
    seen, asked = contexts(monkeypatch), {"steps": (2,), "num": 3, "seed": (1 << 64) - 1}
    for order in ([tight, wide], [wide, tight]):
        models.run(order, tmp_path, reference=text, **asked)
    models.run(tight, tmp_path, reference=text, beside=(wide,), **asked)
    for context in seen.values():
        assert context.num_tokens == 299
        assert "".join(context.reference.texts) == (shelf / "text.txt").read_text()
        assert context.seed == (1 << 63) - 1, "as torch takes them"
    assert len({context.reference.fingerprint for context in seen.values()}) == 1


def test_every_token_has_its_place_those_of_files_too(shelf, tmp_path, monkeypatch):
    """A network that learns to measure has a row for each id: of models, samples and reference."""
    tight, other = str(shelf / "tight"), tmp_path / "other.jsonl"
    (ours,) = models.run(tight, tmp_path, steps=(2,), num=3).samples
    tokens = ours.tokens.clone()
    tokens[0, 0] = 400
    write_samples(other, replace(ours, tokens=tokens))
    seen = contexts(monkeypatch)
    models.run(tight, tmp_path, steps=(2,), num=3)
    assert seen[tight].num_tokens == 257
    models.run(tight, tmp_path, steps=(2,), num=3, samples=[other])
    assert seen[tight].num_tokens == 401
    models.run(tight, tmp_path, steps=(2,), num=3, reference=str(other))
    assert seen[tight].num_tokens == 401


def test_a_reference_has_no_tokens_that_one_of_the_models_does_not_know(
    shelf, tmp_path, monkeypatch
):
    """Models without words of their own: only the number of ids tells."""
    sources = [save(tmp_path / name, None, size) for name, size in (("few", 101), ("many", 300))]
    settings = PrepareSettings(
        src=str(shelf / "text.txt"), tokenizer="bytes", length=32, valid=0, out=tmp_path / "data"
    )
    prepare(settings)
    monkeypatch.setattr(module, "load", None)
    for order in (sources, sources[::-1]):
        with pytest.raises(UserError, match="has 257 token ids, but the model knows 100"):
            models.run(order, tmp_path, reference=str(tmp_path / "data"))
