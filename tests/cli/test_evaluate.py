"""`didi eval` as people meet it: table, JSON, saved samples, Ctrl-C, one-line errors."""

import json
import math
import sys

import numpy as np
import pytest
import torch
import transformers
from tests.models import masked_folders
from tests.models.foreign.reference import VOCAB, hub_config, hub_folder, prefixed, weights
from tests.random_models import add_noise
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

import didi_instruct as library
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.evaluation import evaluate as evaluation
from didi_instruct.evaluation import metrics
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.evaluation.judges import CausalJudge, JudgeConfig, OracleJudge
from didi_instruct.evaluation.samples import read_samples
from didi_instruct.model import Model
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model

CONTRACT = {
    "sampler", "steps", "nfe", "passes", "disc_calls", "temperature", "top_p", "num_samples",
    "length", "ppl", "ppl_ci95", "entropy", "entropy_ci95", "mauve", "self_bleu", "unique_4gram",
    "vsf", "path_entropy", "path_kl", "gap_closed", "ar_kl", "c2st_auc", "tokens_per_second",
    "seed",
}  # fmt: skip
FEW = ["--steps", "2,4", "--num", "24", "--out", "out"]


def save(folder, tokenizer, vocab_size, damaged=False, **changes):
    """A random denoiser with weights far from zero."""
    torch.manual_seed(0)
    config = ModelConfig(
        layers=1, hidden=32, heads=2, cond_dim=16, vocab_size=vocab_size, length=32,
        schedule=ScheduleConfig(eps=0.0), **changes,
    )  # fmt: skip
    network = add_noise(build_model(config), 0.2)
    if damaged:
        for parameter in network.parameters():
            parameter.data.fill_(float("nan"))
    save_model(folder, network, config, tokenizer=tokenizer)


def save_judge(folder, positions=256):
    """A random causal language model that reads letters."""
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(letters), n_positions=positions, n_embd=32, n_layer=1, n_head=2,
        initializer_range=0.3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Models by name, and a judge."""
    folder = tmp_path_factory.mktemp("eval")
    words = OracleLanguage.default().tokenizer
    save(folder / "words", words, 65)
    save(folder / "bytes", Tokenizer.load("bytes"), 258)
    save(folder / "damaged", words, 65, damaged=True)
    save(folder / "bare", None, 65)
    save(folder / "texts", Tokenizer.load("bytes"), 258, end_id=256, lengths=(0, *[9] * 32))
    save_judge(folder / "judge")
    return folder


@pytest.fixture
def place(shelf, tmp_path, monkeypatch):
    """A folder to stand in, with the shelf's models, and short trainings."""
    for model in shelf.iterdir():
        (tmp_path / model.name).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "AR_STEPS", 2)
    monkeypatch.setattr(metrics, "TEST_STEPS", 2)
    return tmp_path


def strict(path):
    """JSON as other languages read it: they know no NaN and no Infinity."""

    def refuse(constant):
        raise AssertionError(f"{path} holds {constant}")

    return json.loads(path.read_text(), parse_constant=refuse)


def forbid_drawing(monkeypatch):
    monkeypatch.setattr(Model, "request", None)


def test_table_and_json_hold_every_number_of_the_contract(didi, place):
    code, out, err = didi(
        "eval", "words", "--steps", 2, "--num", 64, "--against", "words", "--most-steps", 4,
        "--metrics", "ppl,entropy,self-bleu,unique-4gram,path-kl,ar-kl,c2st", "--judge", "oracle",
        "--reference", "oracle", "--json", "report.json",
    )  # fmt: skip
    assert code == 0, err
    report = strict(place / "report.json")
    assert {"model", "judge", "rows", "reference", "versions"} <= report.keys()
    assert (report["model"], report["judge"]) == ("words", "oracle")
    row = report["rows"][0]
    for one in (*report["rows"], *report["baseline"], report["reference"]):
        assert one.keys() >= CONTRACT
        assert one["mauve"] is None
    assert [one["gap_closed"] for one in report["baseline"]] == [None, None]
    assert report["versions"]["numpy"] == np.__version__
    assert report["versions"]["transformers"] == transformers.__version__
    assert row["gap_closed"] == pytest.approx(0)
    assert row["vsf"] == pytest.approx(1)
    assert row["ppl_ci95"][0] < row["ppl"] < row["ppl_ci95"][1]
    _, titles, first = out.splitlines()[:3]
    for title in ("steps", "ppl", "entropy", "path KL", "AR KL ≥", "AUC", "Self-BLEU", "4-grams"):
        assert title in titles
    assert f"{row['ppl']:.2f}" in first
    assert f"{row['path_kl']:.3f}" in first
    assert "64 samples per row; samples and numbers in evals/words" in out
    assert out.endswith("Wrote report.json\n")


def test_a_short_judge_leaves_perplexity_and_no_gap(didi, place):
    """32 words are more than 12 letters, which is all that this judge reads."""
    save_judge(place / "short", positions=12)
    code, _, err = didi(
        "eval", "words", *FEW, "--metrics", "ppl,entropy,path-kl", "--judge", "short",
        "--against", "words", "--most-steps", 8, "--json", "report.json",
    )  # fmt: skip
    assert code == 0, err
    for row in strict(place / "report.json")["rows"]:
        assert row["ppl"] > 1
        assert row["judge_cut"] == 24
        names = ("path_kl", "path_kl_ci95", "gap_closed", "path_kl_vs_baseline")
        assert [row[name] for name in names] == [None] * 4
        assert "the context of 12 tokens of the judge short" in row["path_kl_note"]


def test_progress_names_models_and_counts_rows(didi, place):
    code, _, err = didi("eval", "words", *FEW, "--against", "words")
    assert code == 0
    stages = [line.partition(":")[0] for line in err.splitlines()]
    assert stages == ["Drawing words", "Drawing words, the baseline", "Measuring 4 rows"]


def test_a_file_of_samples_is_a_reference(didi, place, monkeypatch):
    """Teacher with all its steps, then the few of a student; no model is opened."""
    for name, steps in (("teacher", 32), ("student", 2)):
        code, _, err = didi("eval", "words", "--steps", steps, "--num", 64, "--out", name)
        assert code == 0, err
        (path,) = (place / name / "samples").iterdir()
        path.rename(place / f"{name}.jsonl")
    forbid_drawing(monkeypatch)
    monkeypatch.setattr(evaluation, "load", None)
    code, out, err = didi(
        "eval", "--samples", "student.jsonl", "--reference", "teacher.jsonl", "--out", "both",
        "--metrics", "entropy,self-bleu,c2st", "--json", "report.json",
    )  # fmt: skip
    assert code == 0, err
    report = strict(place / "report.json")
    assert 0 <= report["rows"][0]["c2st_auc"] <= 1
    assert (report["reference"]["model"], report["reference"]["nfe"]) == ("teacher.jsonl", 32)
    assert "teacher.jsonl" in out
    again = ["eval", "--samples", "student.jsonl", "--metrics", "entropy", "--out", "both"]
    (place / "text.txt").write_text("w1 w2 " * 99)
    code, _, err = didi(*again, "--reference", "text.txt")
    assert (code, err.count("\n")) == (2, 1)
    assert "text.txt is text, and there is no tokenizer to read it with: name it with --tok" in err


@pytest.mark.parametrize("kind", ["hub", "esm"])
def test_foreign_models_are_measured_like_ours(didi, place, kind):
    """Rows are those of what the library draws from the same source."""
    if kind == "esm":
        masked_folders.esm(place / "foreign")
        flags = []
    else:
        hub_folder(place / "foreign", prefixed("backbone.", weights(2)), hub_config())
        Tokenizer.from_words([f"w{n}" for n in range(VOCAB - 1)]).save(place / "words18")
        flags = ["--tokenizer", "words18"]
    ask = ["--steps", 4, "--num", 6, "--metrics", "entropy,unique-4gram", "--json", "r.json"]
    code, _, err = didi("eval", "foreign", *ask, *flags)
    assert code == 0, err
    row = strict(place / "r.json")["rows"][0]
    tokens = library.load("foreign", device="cpu").sample(num=6, steps=4, seed=0)
    assert row["entropy"] == pytest.approx(unigram_entropy(tokens).mean().item())
    assert row["length"] == tokens.shape[1]
    (path,) = (place / "evals" / "foreign" / "samples").iterdir()
    texts = read_samples(path).texts
    assert all(texts) == bool(flags or kind == "esm")
    if flags:
        assert texts[0].split() == [f"w{n}" for n in tokens[0].tolist()]


def test_text_that_a_model_never_writes_has_no_likelihood(didi, place):
    """X stands for any residue: ESM reads it, and does not write it."""
    masked_folders.esm(place / "esm")
    tokenizer = Tokenizer.load(place / "esm")
    ask = ["eval", "esm", "--metrics", "nelbo", "--draws", 1, "--json", "r.json", "--data"]
    for name, residues in (("good", "MKV"), ("odd", "MKX")):
        (place / f"{name}.fasta").write_text(f">one\n{residues * 81}\n")
        settings = PrepareSettings(
            src=str(place / f"{name}.fasta"), tokenizer=str(place / "esm"), length=8,
            out=place / name, valid=0,
        )  # fmt: skip
        prepare(settings)
    code, _, err = didi(*ask, "good")
    assert code == 0, err
    assert 0 < strict(place / "r.json")["rows"][0]["nelbo"] < 30
    code, _, err = didi(*ask, "odd")
    assert (code, err.count("\n")) == (2, 1)
    assert "80 of 240 tokens of the text are such as" in err
    assert f"esm never writes (`X`, id {tokenizer.vocabulary['X']}), so it has no likeli" in err


def test_mauve_comes_with_a_causal_judge(didi, place):
    pytest.importorskip("mauve", reason="mauve-text is not installed")
    code, _, err = didi(
        "eval", "words", *FEW, "--metrics", "mauve,ppl,entropy", "--judge", "judge",
        "--reference", "oracle", "--json", "report.json",
    )  # fmt: skip
    assert code == 0, err
    report = strict(place / "report.json")
    assert all(0 < row["mauve"] <= 1 for row in report["rows"])
    assert report["judge"] == "judge"


def test_saved_samples_are_measured_without_the_model(didi, place, monkeypatch):
    ask = ["--metrics", "ppl,entropy,path-kl", "--judge", "oracle"]
    assert didi("eval", "words", *FEW, *ask, "--json", "a.json")[0] == 0
    forbid_drawing(monkeypatch)
    files = sorted((place / "out" / "samples").iterdir())
    flags = [part for file in files for part in ("--samples", file)]
    code, out, err = didi("eval", *flags, *ask, "--out", "again", "--json", "b.json")
    assert code == 0, err
    assert "24 samples per row" in out
    key = ("steps", "ppl", "entropy", "path_kl")
    first, second = (
        sorted(tuple(row[k] for k in key) for row in strict(place / name)["rows"])
        for name in ("a.json", "b.json")
    )
    assert first == second


def test_an_interrupted_evaluation_goes_on(didi, place, monkeypatch):
    """Ctrl-C while the second row is judged: the second start draws nothing, judges one row."""
    score, calls = OracleJudge.score, []

    def interrupted(self, samples, progress=None, *, ending=False):
        calls.append(samples.origin.steps)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(self, samples, progress)

    monkeypatch.setattr(OracleJudge, "score", interrupted)
    command = ["eval", "words", *FEW, "--metrics", "ppl,entropy", "--judge", "oracle"]
    code, _, err = didi(*command)
    assert code == 130
    assert "the same command goes on" in err
    forbid_drawing(monkeypatch)
    code, out, err = didi(*command)
    assert code == 0, err
    assert calls == [2, 4, 4]
    assert len(out.splitlines()) == 6, "finding, table, folder, report"


def copies(place, didi, number=70):
    """A file in which one sample stands many times."""
    assert didi("eval", "words", *FEW, "--metrics", "entropy")[0] == 0
    head, sample = next((place / "out" / "samples").iterdir()).read_text().splitlines()[:2]
    (place / "same.jsonl").write_text("\n".join([head, *[sample] * number]) + "\n")


def test_identical_samples_give_numbers_not_nan(didi, place, monkeypatch):
    monkeypatch.setattr(metrics, "TEST_STEPS", 8)
    copies(place, didi)
    code, _, err = didi(
        "eval", "words", "--samples", "same.jsonl", "--num", 70, "--steps", 2,
        "--metrics", "ppl,entropy,self-bleu,unique-4gram,path-kl,ar-kl,c2st", "--judge", "oracle",
        "--reference", "oracle", "--json", "same.json",
    )  # fmt: skip
    assert code == 0, err
    row = strict(place / "same.json")["rows"][0]
    assert row["num_samples"] == 70
    assert row["self_bleu"] == pytest.approx(1)
    assert row["unique_4gram"] == pytest.approx(1 / 70, rel=0.2)
    assert row["entropy"] == pytest.approx(row["entropy_ci95"][0])
    assert row["ppl"] == pytest.approx(row["ppl_ci95"][1])
    assert row["c2st_auc"] > 0.9


def test_identical_samples_and_mauve(didi, place):
    """A number, or one line that says why there is none."""
    pytest.importorskip("mauve", reason="mauve-text is not installed")
    copies(place, didi)
    code, _, err = didi(
        "eval", "words", "--samples", "same.jsonl", "--num", 70, "--steps", 2, "--metrics", "mauve",
        "--judge", "judge", "--reference", "oracle", "--json", "same.json",
    )  # fmt: skip
    assert code == 0, err
    row = strict(place / "same.json")["rows"][0]
    assert row["file"] == "same.jsonl"
    assert row["mauve"] < 0.5


def test_one_sample_has_no_interval(didi, place):
    code, _, err = didi("eval", "words", "--num", 1, "--steps", 2, "--json", "one.json")
    assert code == 0, err
    row = strict(place / "one.json")["rows"][0]
    assert (row["num_samples"], row["entropy_ci95"], row["self_bleu"]) == (1, None, None)


def test_damaged_weights_are_named(didi, place):
    for ask in (["--num", 4], ["--metrics", "nelbo", "--data", "oracle"]):
        code, _, err = didi("eval", "damaged", *ask)
        assert code == 2
        assert "weights are damaged" in err.splitlines()[-1]


JUDGED = ["--metrics", "ppl,entropy", "--judge"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a model, or saved samples with --samples FILE"),
        (["gone"], "`gone` is no file or folder here"),
        (["words", "--metrics", "self-blue"], "not a metric. Did you mean `self-bleu`?"),
        (["words", "--metrics", "zero_shot"], "not a metric. Did you mean `zero-shot`?"),
        (["words", "--metrics", ","], "No metric is named"),
        (["words", "--metrics", "nelbo,entropy"], "ask for it alone"),
        (["words", "--against", "words", "--most-steps", "2"], "use more than all of them"),
        (["words", "--metrics", "ppl,entropy"], "needs a judge: add --judge"),
        (["words", "--metrics", "path-kl"], "needs a judge: add --judge"),
        (["words", "--metrics", "c2st"], "compares with text: add --reference"),
        (["words", "--metrics", "mauve", "--judge", "judge"], "add --reference"),
        (
            ["words", "--metrics", "mauve", "--judge", "oracle", "--reference", "oracle"],
            "features of a causal language model",
        ),
        (["words", "--metrics", "ar-kl", "--judge", "words"], "knows the likelihood of texts"),
        (["words", "--metrics", "entropy", "--ar-start", "words"], "add it to --metrics"),
        (
            ["words", "--metrics", "ar-kl", "--judge", "oracle", "--ar-start", "words"],
            "words is no left-to-right model of didi",
        ),
        (["words", "--metrics", "ar-kl", "--judge", "oracle", "--num", 63], "needs 64 samples"),
        (["words", "--metrics", "c2st", "--reference", "oracle", "--num", 9], "needs 64 samples"),
        (["words", *JUDGED, "./gone"], "./gone: no such folder"),
        (["words", *JUDGED, "."], "has no config.json"),
        (["words", *JUDGED, "bytes"], "have different tokenizers"),
        (["words", *JUDGED, "mute"], "mute has no tokenizer that can be read"),
        (["words", *JUDGED, "oracle", "--judge-temperature", 0.8], "leave its temperature at 1"),
        (["words", *JUDGED, "judge", "--judge-temperature", 0], "temperature is 0.0: use more"),
        (["words", *JUDGED, "oracle", "--judge-collapse-spaces"], "for judges of texts"),
        (["words", *JUDGED, "oracle", "--judge-end", 1], "for judges of texts"),
        (["words", *JUDGED, "judge", "--judge-end", "the"], "no token `the` to end a text with"),
        (["words", *JUDGED, "judge", "--judge-beyond", "x"], "beyond is 'x': use cut or uniform"),
        (["texts", "--metrics", "path-kl", "--judge", "judge"], "name one with --judge-end"),
        (["texts", *JUDGED, "bytes"], "judge bytes (upper bound) knows the probability of whole"),
        (["texts", "bytes"], "texts writes texts that end and bytes whole windows: add --until"),
        (["words", "--num", 0], "num is 0: use a whole number, 1 or more"),
        (["words", "--num", "x"], "--num"),
        (["words", "--length", 33], "--length 33: words writes 1 to 32 tokens"),
        (["words", "--steps", "8,x"], "--steps 8,x: whole numbers"),
        (["words", "--steps", 0], "--steps 0: whole numbers"),
        (["words", "--temperature", -1], "--temperature"),
        (["words", "--top-p", 1.5], "--top-p"),
        (["words", "--seed", -1], "--seed"),
        (["words", "--sampler", "ancestrall"], "Did you mean `ancestral`?"),
        (["words", "--tokenizer", "bytes"], "words has its own tokenizer: leave out --tokenizer"),
        (["bare", "--tokenizer", "bytes"], "bare has 64 tokens, and the tokenizer `bytes` 257"),
        (
            ["bytes", "--metrics", "c2st", "--reference", "good.txt"],
            "good.txt has 37 texts of 32 tokens, and the metric c2st needs 64: give more",
        ),
        (["words", "--option", "gird=1"], "Did you mean `grid`?"),
        (["words", "--batch-size", 0], "--batch-size are 1 or more"),
        (["words", "--against", "gone"], "`gone` is no file or folder here"),
        (["words", "--most-steps", 64], "name it with --against"),
        (["words", "bytes"], "words and bytes have different tokenizers"),
        (["words", "--against", "bytes"], "words and bytes have different tokenizers"),
        (["bytes", "--metrics", "c2st", "--reference", "gone.txt"], "gone.txt: no such file"),
        (["bytes", "--metrics", "c2st", "--reference", "bad.txt"], "bad.txt"),
        (["words", "--metrics", "c2st", "--reference", "good.txt"], "no end-of-text token"),
        (["words", "--data", "oracle"], "--data is for the metrics nelbo and zero-shot"),
        (["words", "--corpora", "ptb"], "--corpora is for the metric zero-shot"),
        (["words", "--json", "gone/report.json"], "give a file in a folder that exists"),
        (["words", "--json", "words"], "give a file in a folder that exists"),
        (["words", "--out", "good.txt"], "good.txt: is a file"),
        (["--samples", "gone.jsonl"], "gone.jsonl: no such file"),
        (["--samples", "empty.jsonl"], "is not a file of samples"),
        (["--samples", "head.jsonl"], "head.jsonl is damaged"),
        (["--samples", "bad.txt"], "bad.txt: cannot be read"),
        (["words", "--device", "cuda:77x"], "not a device"),
        (["words", "--dtype", "int3"], "not a dtype"),
        (["words", "--dtype", "float8"], "float8 was removed: use bfloat16"),
        (["--samples", "head.jsonl", "--dtype", "bfloat16"], "drawn already"),
        (["words", "--dtype", "bfloat16", "--metrics", "zero-shot"], "leave it out"),
        (["words", "--frobnicate"], "frobnicate"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_drawn(
    didi, place, shelf, monkeypatch, arguments, message
):
    forbid_drawing(monkeypatch)
    (place / "mute").mkdir()
    for name in ("config.json", "model.safetensors"):
        (place / "mute" / name).symlink_to(shelf / "judge" / name)
    (place / "good.txt").write_text("Some words.\n" * 99)
    (place / "bad.txt").write_bytes(b"\xff\xfe\xff" * 999)
    (place / "empty.jsonl").write_text("")
    (place / "head.jsonl").write_text('{"format": "didi-samples", "version": 1}\n')
    before = set(place.rglob("*"))
    code, out, err = didi("eval", *arguments)
    assert code == 2, err
    assert message in err
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err + out
    assert set(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("module", "metric", "message"),
    [
        ("mauve", "mauve", 'The metric mauve needs an optional part: pip install "didi-instruct['),
        ("transformers", "ppl,entropy", "transformers, which is missing"),
    ],
)
def test_a_missing_package_is_named(didi, place, monkeypatch, module, metric, message):
    forbid_drawing(monkeypatch)
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = didi(
        "eval", "words", "--metrics", metric, "--judge", "judge", "--reference", "oracle"
    )
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert message in err


def test_a_setting_of_the_judge_is_in_its_name(didi, place):
    """Perplexities at another temperature, or of other spaces, do not compare."""
    code, _, err = didi(
        "eval", "words", *FEW, *JUDGED, "judge", "--judge-temperature", 0.8,
        "--judge-collapse-spaces", "--json", "report.json",
    )  # fmt: skip
    assert code == 0, err
    judge = strict(place / "report.json")["judge"]
    assert judge == "judge (temperature 0.8, spaces collapsed)"


def test_texts_that_end_have_a_path_kl_whatever_the_judge_reads(didi, place):
    """12 letters are read; the others, and the end of longer texts, cost the log of 256 each."""
    save_judge(place / "short", positions=12)
    code, out, err = didi(
        "eval", "texts", *FEW, "--metrics", "ppl,entropy,path-kl", "--judge", "short",
        "--judge-end", "a", "--judge-beyond", "uniform", "--json", "report.json",
    )  # fmt: skip
    assert code == 0, err
    report = strict(place / "report.json")
    assert report["judge"] == "short (end a, uniform after 12 tokens)"
    judge = CausalJudge("short", JudgeConfig(end="a"))
    for path in (place / "out" / "samples").iterdir():
        drawn = read_samples(path)
        row = next(r for r in report["rows"] if r["steps"] == drawn.origin.steps)
        assert (row["judge_cut"], row["entropy_of"], row["length"]) == (0, "text", 32)
        assert row["mean_length"] == pytest.approx(drawn.lengths.double().mean().item())
        letters = [len(text.encode()) for text in drawn.texts]
        ends = (drawn.lengths < 32).tolist()
        unread = [max(0, n + end - 12) for n, end in zip(letters, ends, strict=True)]
        nats = judge.score(drawn).ended.nats + torch.tensor(unread) * math.log(256)
        assert row["path_kl"] == pytest.approx((nats + drawn.log_prob).mean().item())
    _, titles, first = out.splitlines()[:3]
    assert "length" in titles
    assert f"{report['rows'][0]['mean_length']:.1f}" in first
    assert "up to 32 tokens each" in (place / "out" / "report.md").read_text()
