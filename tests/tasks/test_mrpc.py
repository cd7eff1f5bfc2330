import json
import random

import numpy as np
import pytest
import torch
from tests.random_models import add_noise, save_random

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.model import Model
from didi_instruct.models.dit import build_model
from didi_instruct.tasks import features, mrpc
from didi_instruct.tasks.mrpc import MrpcOptions, evaluate
from didi_instruct.tasks.pairs import Pair
from didi_instruct.tasks.task import KEYS, NamedModel

WORDS = [f"w{n}" for n in range(8)]
HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


def quiet(stage, done, total):
    pass


def model(kind="mdlm", name="tiny", seed=0, length=12):
    tokenizer = Tokenizer.from_words([*WORDS, "<|endoftext|>"])
    size = tokenizer.size + (kind != "duo")
    shape = {"layers": 2, "hidden": 32, "heads": 2, "cond_dim": 16, "vocab_size": size}
    config = ModelConfig(kind=kind, length=length, **shape)
    torch.manual_seed(seed)
    return NamedModel(name, Model(add_noise(build_model(config)), config, tokenizer))


def write(folder, shuffle=False, train=800, test=300, positive=lambda n: n % 2):
    """Pairs of three words, a paraphrase iff they are the same words in any order."""
    chance, folder = random.Random(0), folder / "data"
    folder.mkdir()
    for name, count in (("train", train), ("test", test)):
        labels, pairs = [int(positive(n)) for n in range(count)], []
        for label in labels:
            first = second = chance.sample(WORDS, 3)
            while (sorted(second) == sorted(first)) != label or second is first:
                second = chance.sample(first if label else WORDS, 3)
            pairs.append((" ".join(first), " ".join(second)))
        if shuffle:
            chance.shuffle(labels)
        rows = zip(labels, pairs, strict=True)
        lines = [f"{m}\t{n}\t{n}\t{a}\t{b}\n" for n, (m, (a, b)) in enumerate(rows)]
        (folder / f"msr_paraphrase_{name}.txt").write_text(HEADER + "".join(lines))
    return folder


def options(tmp_path, **changes):
    given = {"steps": 500, "batch_size": 32, "lr": 3e-3, "seeds": 1, "evaluations": 5}
    return MrpcOptions(**given | {"cache": str(tmp_path / "cache")} | changes)


def test_a_planted_rule_is_learnt(tmp_path):
    """From half right to nine in ten; by chance a share of 300 has an error of 2.9 points."""
    report = evaluate([model()], write(tmp_path), options(tmp_path), quiet)
    found, untrained, majority = report.rows
    assert found["accuracy"] > 0.85
    assert found["f1"] > 0.85
    assert found["accuracy_ci95"][0] > majority["accuracy_ci95"][1]
    assert [row["baseline"] for row in report.rows] == [None, "untrained", "majority"]
    assert untrained["model"] == "untrained tiny"
    assert any(said.startswith("tiny is more accurate than always") for said in report.differences)
    assert report.as_json()["rows"][0]["task"] == "mrpc"


def test_shuffled_labels_are_not_learnt(tmp_path):
    """Half right within 4.4 errors of 2.9 points, 1e-5 of false alarms."""
    report = evaluate([model()], write(tmp_path, shuffle=True), options(tmp_path), quiet)
    assert abs(report.rows[0]["accuracy"] - 0.5) < 0.127


def test_majority_on_a_split_with_glue_s_counts(tmp_path):
    data = write(tmp_path, train=40, test=408, positive=lambda n: n < 279)
    report = evaluate([model()], data, options(tmp_path, steps=1), quiet)
    row = report.rows[-1]
    assert row["accuracy"] == pytest.approx(0.6838, abs=5e-5)
    assert row["f1"] == pytest.approx(0.8122, abs=5e-5)
    assert row["accuracy_ci95"] == pytest.approx([0.6371, 0.7270], abs=1e-3)


def test_a_second_run_computes_nothing(tmp_path, monkeypatch):
    data, settings = write(tmp_path, train=60, test=20), options(tmp_path, steps=3, seeds=2)
    first = evaluate([model()], data, settings, quiet)
    runs = []
    states, fit = features.states_below, mrpc.fit_classifier
    monkeypatch.setattr(features, "states_below", lambda *a: runs.append("frozen") or states(*a))
    monkeypatch.setattr(mrpc, "fit_classifier", lambda *a: runs.append("fit") or fit(*a))
    again = evaluate([model()], data, settings, quiet)
    assert again.rows == first.rows
    assert again.notes == first.notes
    assert again.differences == first.differences
    assert not runs
    evaluate([model()], data, options(tmp_path, steps=4, seeds=2), quiet)
    assert runs == ["fit"] * 4  # frozen states do not depend on steps
    evaluate([model(seed=1)], data, settings, quiet)
    assert runs.count("frozen") > 0
    nothing = options(tmp_path, steps=3, seeds=2, cache="")
    assert evaluate([model()], data, nothing, quiet).rows == first.rows


def test_ctrl_c_keeps_the_seeds_that_are_done(tmp_path):
    data, settings = write(tmp_path, train=60, test=20), options(tmp_path, steps=3, seeds=3)

    def stop(stage, done, total):
        if stage == "tiny: seed 1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate([model()], data, settings, stop)
    kept = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [name.split("-")[0] for name in kept] == ["mrpc", "states"]
    stages = []
    evaluate([model()], data, settings, lambda stage, *_: stages.append(stage))
    assert [s for s in dict.fromkeys(stages) if s.startswith("tiny")] == [
        "tiny: seed 1",
        "tiny: seed 2",
    ]


@pytest.mark.parametrize("kind", ["duo", "ar"])
def test_other_kinds_of_models(tmp_path, kind):
    data = write(tmp_path, train=60, test=20)
    report = evaluate([model(kind)], data, options(tmp_path, steps=3), quiet)
    assert report.rows[0]["num"] == 20
    assert np.isfinite(report.rows[0]["nll_choices"])


def test_models_are_compared_pair_by_pair(tmp_path):
    data = write(tmp_path, train=60, test=20)
    models = [model(), model(name="other", seed=1)]
    report = evaluate(models, data, options(tmp_path, steps=3, seeds=2), quiet)
    compared = [row["models"] for row in report.tables["comparisons"]]
    baselines = ["untrained tiny", mrpc.MAJORITY]
    assert compared == [["tiny", "other"], *([m, b] for m in ("tiny", "other") for b in baselines)]
    assert len(report.tables["seeds"]) == 6
    assert "over 2 seeds alone" in report.notes[0]


def test_dev_pairs_are_cut_by_text():
    """Their share is 0.3 within 4.4 errors of 0.0145; the order of sentences plays no part."""
    pairs = [Pair(f"a {n}", f"b {n}", 1) for n in range(1000)]
    chosen = [mrpc._is_dev(pair, 0.3) for pair in pairs]
    assert abs(sum(chosen) / 1000 - 0.3) < 0.064
    assert chosen == [mrpc._is_dev(Pair(p.second, p.first, 0), 0.3) for p in pairs]


@pytest.mark.parametrize(
    ("kind", "lengths", "kept"),
    [
        ("mdlm", (5, 6), (5, 6)),
        ("mdlm", (9, 9), (5, 6)),
        ("mdlm", (9, 2), (9, 2)),
        ("mdlm", (20, 2), (9, 2)),
        ("mdlm", (3, 20), (3, 8)),
        ("ar", (9, 9), (5, 5)),
    ],
)
def test_long_pairs_are_cut_at_the_longer_sentence(kind, lengths, kept):
    """A window of 12, one token between the sentences, one for an AR model's start."""
    pair = Pair(" ".join(["w1"] * lengths[0]), " ".join(["w2"] * lengths[1]), 1)
    [tokens], truncated = mrpc._encode(model(kind), [pair], None)
    assert tokens == [1] * kept[0] + [8] + [2] * kept[1]
    assert truncated == (kept != lengths)


def test_separators():
    tokenizer = Tokenizer.from_words([*WORDS, "[SEP]"])
    assert mrpc._separator(tokenizer, None) == [8]
    assert mrpc._separator(tokenizer.endless(), None) == [8]
    assert mrpc._separator(tokenizer, "w3 w4") == [3, 4]
    assert mrpc._separator(tokenizer, "") == []
    assert mrpc._separator(Tokenizer.load("bytes").endless(), None) == [10]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "dev"}, "split is `dev`: use validation or test"),
        ({"steps": 0}, "steps is 0"),
        ({"seeds": 40}, "seeds is 40: use 31 at most"),
        ({"dev_share": 1.0}, "between 0 and 1"),
        ({"lr": 0.0}, "lr is above 0"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_settings_outside_their_range_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        MrpcOptions(**changes)


def test_splits_that_are_not_there_are_refused(tmp_path):
    data = write(tmp_path, train=60, test=20)
    with pytest.raises(UserError, match="has no validation split, only train, test"):
        evaluate([model()], data, options(tmp_path, split="validation"), quiet)
    with pytest.raises(UserError, match="0 to choose by"):
        evaluate([model()], data, options(tmp_path, dev_share=1e-9), quiet)
    with pytest.raises(UserError, match="has no room for a pair"):
        evaluate([model(length=2)], data, options(tmp_path), quiet)


def test_weights_of_16_bits_are_refused(tmp_path):
    entry = model()
    entry.model.network.bfloat16()
    with pytest.raises(UserError, match="tiny: its weights are bfloat16.*use --dtype float32"):
        evaluate([entry], tmp_path, options(tmp_path), quiet)


def test_a_network_keeps_its_weights(tmp_path):
    entry = model()
    before = [p.detach().clone() for p in entry.model.network.parameters()]
    evaluate([entry], write(tmp_path, train=60, test=20), options(tmp_path, steps=3), quiet)
    after = list(entry.model.network.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_command_line_shows_the_baselines(tmp_path, didi):
    data = write(tmp_path, train=60, test=20)
    tokenizer = Tokenizer.from_words([*WORDS, "<|endoftext|>"])
    save_random(tmp_path / "model", tokenizer=tokenizer, vocab_size=10)
    settings = ("steps=3", "seeds=2", f"cache={tmp_path / 'cache'}")
    options = [word for pair in settings for word in ("--option", pair)]
    path = tmp_path / "rows.json"
    code, out, err = didi(
        "eval", tmp_path / "model", "--task", "mrpc", "--data", data, *options, "--json", path
    )
    assert code == 0, err
    for words in ("accuracy", "F1", mrpc.MAJORITY, f"untrained {tmp_path / 'model'}"):
        assert words in out
    rows = json.loads(path.read_text())["rows"]
    assert all({*KEYS, "baseline"} <= set(row) for row in rows)
    code, _, err = didi("eval", tmp_path / "model", "--task", "mrpc", "--data", data, "--shots", 2)
    assert code == 2
    assert "`shots` is not a setting" in err
