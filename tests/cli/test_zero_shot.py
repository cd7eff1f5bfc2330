"""`didi eval --metrics zero-shot`: seven corpora, kept one by one, refused before any work."""

import gzip
import json
import lzma
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.models.foreign.reference import hub_config, hub_folder, prefixed
from tests.random_models import add_noise

import didi_instruct as library
from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.evaluation import text_likelihood as module
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model

NAMES = ["ptb", "wikitext", "lm1b", "lambada", "ag_news", "pubmed", "arxiv"]
SMALL = ["--metrics", "zero-shot", "--sequences", 6, "--draws", 2, "--out", "out"]


def save(folder, tokenizer, vocab_size, *, seed=0, kind="mdlm", damaged=False, length=16):
    torch.manual_seed(seed)
    config = ModelConfig(
        kind=kind, layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=vocab_size, length=length
    )
    network = add_noise(build_model(config), 0.2)
    if damaged:
        for parameter in network.parameters():
            parameter.data.fill_(float("nan"))
    save_model(folder, network, config, tokenizer=tokenizer)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to stand in: models, and each corpus in the form in which it is handed around."""
    letters = Tokenizer.load("bytes")
    save(tmp_path / "one", letters, 258)
    save(tmp_path / "two", letters, 258, seed=1)
    save(tmp_path / "ar", letters, 258, kind="ar")
    save(tmp_path / "damaged", letters, 258, damaged=True)
    save(tmp_path / "words", OracleLanguage.default().tokenizer, 65)
    save(tmp_path / "bare", None, 65)
    data = tmp_path / "data"
    data.mkdir()
    (data / "ptb.test.txt").write_text(" the bank did n't say N \n" * 9)
    raw = b" = Title = \r\n\r\n A well @-@ known one . \r\n" * 9
    (data / "wikitext2.test.raw.xz").write_bytes(lzma.compress(raw))
    (data / "lm1b.test.txt.gz").write_bytes(gzip.compress(b"It rose .\nIt fell .\n" * 9))
    (data / "lambada_test.jsonl").write_text((json.dumps({"text": "“No,” he said"}) + "\n") * 2)
    (data / "ag_news.test.csv").write_text('"3","A title","A ""quoted"" text."\n' * 9)
    (data / "pubmed.jsonl").write_text('{"pmid": "1", "text": "Two  spaces here."}\n' * 9)
    (data / "arxiv.jsonl").write_text('{"title": "No", "abstract": "We show $x$ ."}\n' * 9)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "ptb.test.txt").write_text("a line of it\n" * 9)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_corpus_has_its_row(didi, place):
    """PTB's number is that of its rows, cut by hand."""
    code, out, err = didi("eval", "one", *SMALL, "--data", "data", "--json", "report.json")
    assert code == 0, err
    report = json.loads((place / "report.json").read_text())
    assert {"model", "judge", "rows", "reference", "versions"} <= report.keys()
    assert [row["corpus"] for row in report["rows"]] == NAMES
    for row in report["rows"]:
        low, high = row["nelbo_ppl_ci95"] or (0, float("inf"))
        assert low < row["nelbo_ppl"] < high
        assert row["tokens"] == 16 * row["num_sequences"] <= 16 * 6
        assert (row["bound"], row["draws"], row["seed"], row["model"]) == (True, 2, 0, "one")
        line = next(line for line in out.splitlines() if f" {row['corpus']} " in line)
        assert f"≤ {row['nelbo_ppl']:.2f}" in line
        assert line.split()[-2] == str(row["tokens"])
    ptb, lambada = report["rows"][0], report["rows"][3]
    assert ptb["source"] == "data/ptb.test.txt"
    assert (lambada["num_sequences"], lambada["nelbo_ppl_ci95"]) == (1, None)

    stream = [token for _ in range(9) for token in [*b"the bank didn't say 1", 256]]
    tokens = torch.tensor(stream[:96]).view(6, 16)
    expected = library.load("one", device="cpu").nelbo(tokens, draws=2, seed=0).item()
    assert ptb["nelbo"] == pytest.approx(expected, rel=1e-6)
    assert "At most 6 rows of a corpus; numbers in out" in out
    assert "one on arxiv" in err


def test_models_of_one_tokenizer_share_a_table(didi, place):
    code, out, err = didi(
        "eval", "one", "ar", *SMALL, "--data", "data", "--corpora", "pubmed,ptb", "--json", "r.json"
    )
    assert code == 0, err
    found = json.loads((place / "r.json").read_text())["rows"]
    keys = [(row["model"], row["corpus"], row["bound"], row["draws"]) for row in found]
    assert keys == [
        ("one", "pubmed", True, 2),
        ("one", "ptb", True, 2),
        ("ar", "pubmed", False, 1),
        ("ar", "ptb", False, 1),
    ]
    assert [line.count("≤") for line in out.splitlines()[1:5]] == [1, 1, 0, 0]


def test_rows_of_other_lengths_are_told_apart(didi, place):
    """The longer context is measured in longer rows, and said not to compare."""
    save(place / "long", Tokenizer.load("bytes"), 258, length=24)
    ask = [*SMALL, "--data", "data", "--corpora", "ptb", "--json", "r.json"]
    code, out, err = didi("eval", "one", "long", *ask)
    assert code == 0, err
    lines = out.splitlines()
    place_of_length = lines[0].split().index("length") - len(lines[0].split())
    assert [line.split()[place_of_length] for line in lines[1:3]] == ["16", "24"]
    assert lines[3].startswith("Perplexities at different lengths do not compare")
    assert [row["length"] for row in json.loads((place / "r.json").read_text())["rows"]] == [16, 24]
    assert "different lengths" not in didi("eval", "one", "two", *ask)[1]


def test_what_an_older_version_measured_is_measured_again(didi, place, monkeypatch):
    command = ["eval", "one", *SMALL, "--data", "data", "--corpora", "ptb"]
    for version in (1, 2, 2):
        monkeypatch.setattr(module, "VERSION", version)
        assert didi(*command)[0] == 0
    assert len(list((place / "out" / "zero-shot").iterdir())) == 2


def test_a_foreign_checkpoint_is_measured_with_a_tokenizer(didi, place):
    """The same weights, in the public layout without their tokenizer, cost the same."""
    library.load("one", device="cpu")
    core = load_file(place / "one" / "model.safetensors")
    config = hub_config(hidden_dim=16, cond_dim=8, n_blocks=1, n_heads=2, model_length=16)
    hub_folder(place / "hub", prefixed("backbone.", core), config | {"vocab_size": 258})
    ask = [*SMALL, "--data", "data", "--corpora", "ptb", "--json", "r.json"]
    code, _, err = didi("eval", "hub", *ask)
    assert code == 2
    assert "hub has no tokenizer to read text with: name it with --tokenizer" in err
    code, _, err = didi("eval", "hub", *ask, "--tokenizer", "bytes")
    assert code == 0, err
    assert didi("eval", "one", *ask[:-1], "ours.json")[0] == 0
    theirs, ours = (json.loads((place / n).read_text())["rows"][0] for n in ("r.json", "ours.json"))
    assert theirs["nelbo"] == pytest.approx(ours["nelbo"], rel=1e-6)
    assert theirs["mauve"] is ours["mauve"] is None


def test_an_interrupted_measurement_goes_on(didi, place, monkeypatch):
    """Ctrl-C in the third corpus; then a text changes: only what is missing is measured."""
    measure, asked, stop_at = module.likelihood_row, [], [3]

    def counted(source, model, rows, *args, **settings):
        asked.append(repr(rows).split("(")[1].split(",")[0])
        if len(asked) in stop_at:
            raise KeyboardInterrupt
        return measure(source, model, rows, *args, **settings)

    monkeypatch.setattr(module, "likelihood_row", counted)
    command = ["eval", "one", *SMALL, "--data", "data"]
    code, out, err = didi(*command)
    assert (code, out) == (130, "")
    assert "the same command goes on" in err
    asked.clear()
    stop_at.clear()
    code, first, err = didi(*command)
    assert code == 0, err
    assert asked == NAMES[2:]
    asked.clear()
    assert didi(*command) == (0, first, "Reading: 14%\n")
    assert asked == []
    (place / "data" / "arxiv.jsonl").write_text('{"abstract": "Another text."}\n' * 9)
    assert didi(*command)[0] == 0
    assert asked == ["arxiv"]
    for change in (["--draws", 3], ["--seed", 1], ["--sequences", 5]):
        asked.clear()
        assert didi(*command, *change)[0] == 0
        assert asked == [name for name in NAMES if name != "lambada" or change[0] != "--sequences"]
    asked.clear()
    assert didi("eval", "two", *command[2:])[0] == 0
    assert asked == NAMES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "measures models: name one or more"),
        (["gone", "--data", "data"], "`gone` is no file or folder here"),
        (["one", "--data", "gone"], "gone: no such folder of corpora"),
        (["one", "--data", "one"], "one: has none of the corpora: looked for ptb*test*.txt"),
        (["one", "--data", "some"], "no file of wikitext, lm1b, lambada, ag_news, pubmed, arxiv"),
        (["one", "--data", "some", "--corpora", "ptb,arxiv"], "looked for arxiv*.jsonl"),
        (["one", "--data", "some", "--corpora", "ptb,arxiv"], "choose: --corpora ptb."),
        (["one", "--data", "data", "--corpora", "ptb,ag-news"], "Did you mean `ag_news`?"),
        (["one", "--data", "data", "--corpora", ","], "--corpora names no corpus"),
        (["one", "--data", "broken", "--corpora", "ptb,lambada"], "lambada_test.jsonl:1: not JSON"),
        (["one", "--data", "broken", "--corpora", "ptb,arxiv"], "do not fill one row of 16"),
        (["one", "--data", "data", "--sequences", 0], "1 or more"),
        (["one", "words", "--data", "data"], "one and words have different tokenizers"),
        (["one", "bare", "--data", "data"], "one and bare have different tokenizers"),
        (["bare", "--data", "data"], "bare has no tokenizer to read text with"),
        (["words", "--data", "data"], "no end-of-text token"),
        (["one", "--data", "data", "--json", "gone/r.json"], "in a folder that exists"),
        (["one"], 'not from --data FOLDER, needs an optional part: pip install "didi-instruct['),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    didi, place, monkeypatch, arguments, message
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(module, "load", None)
    broken = place / "broken"
    broken.mkdir()
    (broken / "ptb.test.txt").write_text("a line of it\n" * 9)
    (broken / "lambada_test.jsonl").write_text("{\n")
    (broken / "arxiv.jsonl").write_text('{"abstract": "Short."}\n')
    code, out, err = didi("eval", *SMALL, *arguments)
    assert (code, out) == (2, ""), err
    assert message in err
    lines = [line for line in err.strip().splitlines() if not line.startswith("Reading: ")]
    assert len(lines) == 1
    assert not (place / "out").exists()


def test_the_hub_stands_in_where_there_is_no_folder(didi, place, monkeypatch):
    def load_dataset(path, split, streaming, **where):
        if path == "EleutherAI/lambada_openai":
            raise ConnectionError("no network")
        return iter([{"sentence": "it is n't so", "text": "it is"}] * 20)

    monkeypatch.setitem(
        sys.modules, "datasets", type("datasets", (), {"load_dataset": staticmethod(load_dataset)})
    )
    command = ["eval", "one", *SMALL, "--json", "r.json", "--corpora"]
    code, _, err = didi(*command, "ptb")
    assert code == 0, err
    row = json.loads((place / "r.json").read_text())["rows"][0]
    assert row["source"] == "hf:ptb-text-only/ptb_text_only"
    code, _, err = didi(*command, "lambada")
    assert code == 2
    assert "(no network): try again, or give a folder with lambada*test*.jsonl" in err


def test_damaged_weights_are_named_and_nothing_is_kept(didi, place):
    code, _, err = didi("eval", "damaged", *SMALL, "--data", "data")
    assert code == 2
    assert "damaged: its loss is not a number here" in err.splitlines()[-1]
    assert not list(place.glob("out/**/*.json"))
