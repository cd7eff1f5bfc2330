"""The corpora are found, read and refused by name, in a folder and on the hub."""

import gzip
import json
import lzma
import re
import sys
import types
from pathlib import Path

import pytest

from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation.corpora import (
    CORPORA,
    Documents,
    find_corpora,
    open_corpora,
)


def written(folder: Path) -> Path:
    """Write all seven corpora in small, some of them compressed."""
    (folder / "ptb.test.txt").write_text(" it was n't N \n \n yes \n")
    raw = b"\r\n\r\n = Title = \r\n\r\n A well @-@ known one . \r\n"
    (folder / "wikitext2.test.raw.xz").write_bytes(lzma.compress(raw))
    (folder / "wikitext2.test.tokens").write_text(" = <unk> = \n")
    (folder / "lm1b.test.txt.gz").write_bytes(gzip.compress(b"It rose .\nIt fell .\n"))
    (folder / "lambada_test.jsonl").write_text(json.dumps({"text": "“No,” he said"}) + "\n")
    (folder / "ag_news.test.csv").write_text('"3","A title","A ""quoted"" text\\here."\n')
    (folder / "pubmed.jsonl").write_text('{"pmid": "1", "text": "Two  spaces."}\n{"text": null}\n')
    (folder / "arxiv.jsonl").write_text('{"title": "Not this", "abstract": "We show $x$ ."}\n')
    (folder / "notes.md").write_text("not a corpus")
    return folder


TEXTS = {
    "ptb": ["it wasn't 1", "yes"],
    "wikitext": ["= Title =", "A well-known one."],
    "lm1b": ["It rose.", "It fell."],
    "lambada": ['\n"No," he said'],
    "ag_news": ['A title A "quoted" text\\here.'],
    "pubmed": ["Two spaces."],
    "arxiv": ["We show $x$ ."],
}


def test_every_corpus_is_found_and_read(tmp_path):
    found = find_corpora(written(tmp_path))
    assert list(found) == list(CORPORA) == list(TEXTS)
    assert found["wikitext"].name == "wikitext2.test.raw.xz"  # rather than the one with <unk>
    opened = open_corpora(TEXTS, tmp_path)
    assert opened["ptb"].source == str(tmp_path / "ptb.test.txt")
    for _ in range(2):  # they can be gone through twice, for two models
        assert {name: list(documents) for name, documents in opened.items()} == TEXTS


def test_a_corpus_is_found_by_itself(tmp_path):
    written(tmp_path)
    (tmp_path / "wikitext2.test.raw.xz").unlink()
    assert list(open_corpora(["wikitext"], tmp_path)["wikitext"]) == ["= <unk> ="]


def test_a_header_of_ag_news_is_not_a_document(tmp_path):
    file = tmp_path / "ag_news.test.csv"
    file.write_text("Class Index,Title,Description\n3,One,Two\n")
    assert list(Documents("ag_news", file)) == ["One Two"]


def test_what_cannot_be_found_is_named(tmp_path):
    with pytest.raises(UserError, match="`AGNews` is not a corpus. Did you mean `ag_news`"):
        open_corpora(["AGNews"])
    with pytest.raises(UserError, match="`xyz` is not a corpus. Known: ptb, wikitext, lm1b"):
        open_corpora(["xyz"])
    with pytest.raises(UserError, match="gone: no such folder"):
        find_corpora(tmp_path / "gone")
    with pytest.raises(UserError, match=r"none of the corpora: looked for ptb\*test\*\.txt.*\.xz"):
        find_corpora(tmp_path)
    (tmp_path / "ptb.test.txt").write_text("yes\n")
    message = r"no file of lm1b, arxiv: looked for lm1b\*test\*\.txt, arxiv\*\.jsonl \(or with .*"
    with pytest.raises(UserError, match=message + r"Add it, or choose: --corpora ptb\."):
        open_corpora(["ptb", "lm1b", "arxiv"], tmp_path)
    (tmp_path / "ptb.test.txt.gz").write_bytes(gzip.compress(b"yes\n"))  # the same file, packed
    assert find_corpora(tmp_path)["ptb"].name == "ptb.test.txt"
    (tmp_path / "ptb.char.test.txt").write_text("y e s\n")
    with pytest.raises(UserError, match=r"more than one file of ptb \(ptb.char.test.txt, ptb.test"):
        find_corpora(tmp_path)


@pytest.mark.parametrize(
    ("corpus", "file", "content", "message"),
    [
        ("ptb", "ptb.test.txt", " \n\n", r"^ptb.test.txt: has no text"),
        ("lambada", "l.jsonl", "", r"^l.jsonl: has no text"),
        (
            "lambada",
            "l.jsonl",
            '{"text": "a"}\n{"body": "a"}\n',
            r"^l.jsonl:2: has no field `text`, only `body`",
        ),
        ("lambada", "l.jsonl", "[1]\n", r"not a JSON object"),
        ("lambada", "l.jsonl", '{"text": 3}\n', r"`text` is int, not text"),
        ("lambada", "l.jsonl", '{"text": \n', r"^l.jsonl:1: not JSON"),
        ("ag_news", "a.csv", '"3","One"\n', r"row 1\): has 2 columns instead of 3 \(class, title"),
        ("ag_news", "a.csv", '"3","One" x,"Two"\n', r"row 1\): not CSV"),
        ("lm1b", "a.txt.xz", "not packed", r"a.txt.xz: cannot be decompressed"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, corpus, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message):
        list(Documents(corpus, tmp_path / file))


def test_the_hub_is_asked_for_the_fields_split(monkeypatch):
    asked = {}

    def load_dataset(path, split, streaming, **where):
        assert streaming
        asked.setdefault(path, []).append((split, where))
        if path == "fancyzhx/ag_news":
            raise ConnectionError("cannot reach the hub.\nmore")
        field = {"ptb-text-only/ptb_text_only": "sentence", "armanc/scientific_papers": "article"}
        texts = ["", " it 's a @-@ , " if "lambada" not in path else "“it”"]
        return iter({field.get(path, "text"): text} for text in texts)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    opened = open_corpora(name for name in CORPORA if name != "ag_news")
    assert {name: list(documents) for name, documents in opened.items()} == {
        "ptb": ["it's a @-@ ,"],
        "wikitext": ["it's a-,"],
        "lm1b": ["it's a @-@,"],
        "lambada": ['\n"it"'],
        "pubmed": ["it's a-,"],
        "arxiv": ["it's a-,"],
    }
    assert opened["wikitext"].source == "hf:Salesforce/wikitext"
    assert asked["Salesforce/wikitext"] == [("validation", {"name": "wikitext-103-raw-v1"})]
    copies = [{"data_dir": c, "revision": "refs/convert/parquet"} for c in ("pubmed", "arxiv")]
    assert asked["armanc/scientific_papers"] == [("validation", where) for where in copies]
    with pytest.raises(UserError, match=r"ag_news from.*\(cannot reach the hub\).*ag_news\*test"):
        list(Documents("ag_news"))


def test_hub_data_without_its_field_or_library_is_refused(monkeypatch):
    fake = types.SimpleNamespace(load_dataset=lambda *_, **__: iter([{"body": "a"}]))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(UserError, match=r"lambada_openai \(record 1\): has no field `text`"):
        list(Documents("lambada"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"didi-instruct\[data\]"):
        list(Documents("lambada"))


LOCAL = Path(__file__).parents[3] / "shared" / "data" / "zeroshot"
COUNTS = {
    "ptb": 3761,
    "wikitext": 2891,
    "lm1b": 12105,
    "lambada": 5153,
    "ag_news": 7600,
    "pubmed": 1000,
    "arxiv": 2000,
}
LEFTOVERS = {
    "ptb": r" n't| 's|<unk>|\\/|\$ 1|(?<!\S)N(?!\S)",
    "wikitext": r"@[-,.]@| '(?:s|t|re|ve|m|ll|d)\b| [.,;:!?](?: |$)|\( | \)|= =|^\s|\s$",
    "lm1b": r" '(?:s|t|re|ve|m|ll|d)\b| [.,;:!?](?: |$)|\( | \)|[$£] |http : ",
    "lambada": r"[“”]|\A[^\n]|\s\Z",
    "ag_news": r"\A\s*\Z",
    "pubmed": r"\s\s|\n",
    "arxiv": r"\s\s|\n",
}


@pytest.mark.parametrize("name", CORPORA)
def test_the_local_copies(name):
    if not LOCAL.is_dir():
        pytest.skip("the corpora at ../shared/data/zeroshot are not on this machine")
    documents = list(Documents(name, find_corpora(LOCAL)[name]))
    assert len(documents) == COUNTS[name]
    leftover = [text for text in documents if re.search(LEFTOVERS[name], text)]
    assert len(leftover) <= (name == "lm1b")  # one line of it has an apostrophe between spaces
