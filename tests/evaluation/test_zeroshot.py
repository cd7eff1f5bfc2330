import gzip
import json
import lzma
import math
import re
import sys
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation import detokenise as rules
from didi_instruct.evaluation.detokenise import detokenise
from didi_instruct.evaluation.zeroshot import (
    CORPORA,
    Documents,
    find_corpora,
    load_corpus,
    open_corpora,
    pack,
    read_corpus,
    zero_shot,
)

# Every line is made up; the left side is in the form of its corpus.
LINES: dict[str, list[tuple[str, str]]] = {
    "PTB": [
        (" the bank 's shares did n't rise ", "the bank's shares didn't rise"),
        ("we ca n't say they 're late", "we can't say they're late"),
        ("the brokers ' fees", "the brokers' fees"),
        ("the fees of the brokers '", "the fees of the brokers'"),
        ("a cable\\/phone firm", "a cable/phone firm"),
        ("N or N N of $ N million", "1 or 1 1 of $1 million"),
        ("it fell to N", "it fell to 1"),
        ("a bid of # N billion by u.n.", "a bid of #1 billion by u.n."),
        ("<unk> paid $ <unk> in N", "? paid $ ? in 1"),
    ],
    "WIKITEXT": [
        (" = = Early years = = ", "== Early years =="),
        (" = = = 1990 – 1995 = = = ", "=== 1990 – 1995 ==="),
        (" = A title = ", "= A title ="),
        ("a well @-@ known 12 @,@ 500 @.@ 5 tonnes", "a well-known 12,500.5 tonnes"),
        ("He came , saw ; and left : why ? Ah ! Yes . ", "He came, saw; and left: why? Ah! Yes."),
        ("It 's Xi 'an , isn 't it", "It's Xi'an, isn't it"),
        ("the ships ' guns", "the ships' guns"),
        ('he sang " One Day " , twice', 'he sang "One Day", twice'),
        ('" One " and " Two "', '"One" and "Two"'),
        ("an ' old ' or ' new ' ship", "an 'old' or 'new' ship"),
        ("\" ' Yes ' , it 's said \"", "\"'Yes', it's said\""),
        ("a town ( pop. 10 ( 2001 ) ) [ sic ] { a }", "a town (pop. 10 (2001)) [sic] {a}"),
        ("at 30 ° N", "at 30°N"),
        ("the N / A group of 5 % and $ 3", "the N / A group of 5 % and $ 3"),
    ],
    "LM1B": [
        (
            "See http : / / www.example.org or https : / / b.org .",
            "See http://www.example.org or https://b.org.",
        ),
        ("Ann O 'Hara doesn 't think it 's so .", "Ann O'Hara doesn't think it's so."),
        ("What ? No ! Yes , maybe ; at 8 : 30 .", "What? No! Yes, maybe; at 8: 30."),
        ("It rose 4 % . It fell ( twice ) .", "It rose 4 %. It fell (twice)."),
        ("a singer / writer / actor", "a singer/writer/actor"),
        ('" It is cold , " she said , " and wet . "', '"It is cold," she said, "and wet."'),
        ("the ' yes ' vote of the workers ' union", "the 'yes' vote of the workers' union"),
        ("[ he ] paid $ 5 or £ 3", "[he] paid $5 or £3"),
        ("he waited ... and left -- alone", "he waited ... and left -- alone"),
        (' " An open quotation .', '" An open quotation.'),
    ],
    "LAMBADA": [
        ("“Go,” she said.\n\n“I won’t.” He left ", '\n"Go," she said.\n\n"I won’t." He left'),
        ("\n\tAnd  then", "\nAnd  then"),
    ],
    "AG_NEWS": [
        ("Oil at #36;40\\a barrel &lt;b&gt;  up ", "Oil at #36;40\\a barrel &lt;b&gt;  up "),
    ],
    "SCIENTIFIC_PAPERS": [
        (
            "we show @xmath0 , see @xcite . \n it ' s known",
            "we show @xmath0, see @xcite.\nit ' s known",
        ),
        ("so @-@ called", "so-called"),
        ("at http : / / a.org", "at http://a.org"),
        ("cohen 's kappa", "cohen's kappa"),
        ("and / or", "and/or"),
        ("the ' a ' and ' b ' of the cells ' walls", "the 'a' and 'b' of the cells' walls"),
        ('the " one " and " two " sets', 'the "one" and "two" sets'),
        ("set ( a , b )", "set (a, b)"),
        ("= = methods = = at 5 ° c , for $ 10", "== methods == at 5°c, for $10"),
        (" a line ", "a line"),
    ],
    "ABSTRACTS": [
        ("  We show\n that  $x$ is $ y $, \t so . ", "We show that $x$ is $ y $, so ."),
    ],
}
EACH = [pytest.param(name, *pair) for name, pairs in LINES.items() for pair in pairs]


@pytest.mark.parametrize(("name", "tokenised", "text"), EACH)
def test_a_line_is_detokenised(name, tokenised, text):
    assert detokenise(tokenised, getattr(rules, name)) == text


@pytest.mark.parametrize("name", LINES)
def test_every_rule_is_needed(name):
    """Without any one of its rules, a table fails on a line above: no rule goes untested."""
    table = getattr(rules, name)
    for k in range(len(table)):
        without = table[:k] + table[k + 1 :]
        assert any(detokenise(a, without) != b for a, b in LINES[name]), table[k]


def characters(text: str) -> str:
    """A text without what detokenising may change: white space and the marks it replaces."""
    return re.sub(r"\s|@(?=[-,.]@)|(?<=@[-,.])@|\\(?=/)", "", re.sub(r"[“”]", '"', text))


@pytest.mark.parametrize(("name", "tokenised", "text"), EACH)
def test_only_white_space_and_marks_change(name, tokenised, text):
    expected = characters(tokenised)
    if name == "PTB":
        expected = expected.replace("N", "1").replace("<unk>", "?")
    assert characters(text) == expected


@pytest.mark.parametrize(("name", "tokenised", "text"), EACH)
def test_detokenising_again_changes_nothing(name, tokenised, text):
    """Except behind single quotes: an opening one then looks like an apostrophe."""
    if not re.search(r"(?<!\w)'\w", text):
        assert detokenise(text, getattr(rules, name)) == text


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
    for _ in range(2):  # they can be gone through twice, for two models
        assert {name: list(documents) for name, documents in opened.items()} == TEXTS


def test_a_corpus_is_found_by_itself(tmp_path):
    written(tmp_path)
    (tmp_path / "wikitext2.test.raw.xz").unlink()
    assert list(open_corpora(["wikitext"], tmp_path)["wikitext"]) == ["= <unk> ="]


def test_a_header_of_ag_news_is_not_a_document(tmp_path):
    file = tmp_path / "ag_news.test.csv"
    file.write_text("Class Index,Title,Description\n3,One,Two\n")
    assert list(read_corpus("ag_news", file)) == ["One Two"]


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
    with pytest.raises(UserError, match=r"no file of arxiv: looked for arxiv\*\.jsonl \(or with"):
        open_corpora(["ptb", "arxiv"], tmp_path)
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
            r"record 2.*no field `text`, only `body`",
        ),
        ("lambada", "l.jsonl", "[1]\n", r"no field `text`, only no fields at all"),
        ("lambada", "l.jsonl", '{"text": 3}\n', r"`text` is int, not text"),
        ("lambada", "l.jsonl", '{"text": \n', r"record 1\): not JSON"),
        ("ag_news", "a.csv", '"3","One"\n', r"row 1\): has 2 columns instead of 3 \(class, title"),
        ("ag_news", "a.csv", '"3","One" x,"Two"\n', r"row 1\): not CSV"),
        ("lm1b", "a.txt.xz", "not packed", r"a.txt.xz: cannot be decompressed"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, corpus, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message):
        list(read_corpus(corpus, tmp_path / file))


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
    assert asked["Salesforce/wikitext"] == [("validation", {"name": "wikitext-103-raw-v1"})]
    copies = [{"data_dir": c, "revision": "refs/convert/parquet"} for c in ("pubmed", "arxiv")]
    assert asked["armanc/scientific_papers"] == [("validation", where) for where in copies]
    with pytest.raises(UserError, match=r"ag_news from.*\(cannot reach the hub\).*ag_news\*test"):
        list(load_corpus("ag_news"))


def test_hub_data_without_its_field_or_library_is_refused(monkeypatch):
    fake = types.SimpleNamespace(load_dataset=lambda *_, **__: iter([{"body": "a"}]))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(UserError, match=r"lambada_openai \(record 1\): has no field `text`"):
        list(load_corpus("lambada"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"didi-instruct\[data\]"):
        list(load_corpus("lambada"))


def test_documents_are_joined_by_end_of_text_and_the_tail_is_dropped():
    tokenizer = Tokenizer.load("bytes")
    data, documents = pack("ptb", ["abc", "de", "f"], tokenizer, length=4)
    assert data.ordered(0, 9).tolist() == [[*b"abc", 256], [*b"de", 256, *b"f"]]
    assert documents == 3
    data, documents = pack("ptb", ["abc", "de", "f"], tokenizer, length=4, rows=1)
    assert (data.num_sequences, documents) == (1, 1)


def test_no_more_documents_are_read_than_needed():
    read = []
    texts = (read.append(k) or "abc" for k in range(10_000))
    pack("lm1b", texts, Tokenizer.load("bytes"), length=4, rows=2)
    assert len(read) == 64


def test_too_little_text_or_no_end_of_text_is_refused():
    with pytest.raises(UserError, match="ptb: its 1 documents have 4 tokens.*one row of 8"):
        pack("ptb", ["abc"], Tokenizer.load("bytes"), length=8)
    with pytest.raises(UserError, match="ptb: its 0 documents"):
        pack("ptb", [], Tokenizer.load("bytes"), length=8)
    with pytest.raises(UserError, match="no end-of-text"):
        pack("ptb", ["a"], Tokenizer.from_words(["a", "b"]), length=8)


def unigram_loss(batch):
    """Nats per token if token k has probability (k + 1) / normaliser."""
    log_p = torch.arange(1, 258).double().log() - math.log(257 * 258 / 2)
    return -log_p[batch["x"]].mean(-1)


def test_perplexity_is_that_of_the_counts():
    """A unigram model: the perplexity follows from how often each byte is in the text."""
    config = ModelConfig(kind="ar", vocab_size=258, length=8)
    corpora = {"ptb": ["it was", "cold again"], "arxiv": ["We prove it."] * 40}
    seen = []
    table = zero_shot(
        unigram_loss,
        config,
        Tokenizer.load("bytes"),
        corpora,
        batch_size=3,
        progress=lambda *state: seen.append(state),
    )
    for row, texts in zip(table, corpora.values(), strict=True):
        stream = b"".join(text.encode() + b"\xff" for text in texts)  # stands for end-of-text
        stream = stream[: len(stream) // 8 * 8]
        counts = Counter(256 if byte == 255 else byte for byte in stream)
        nats = -sum(n * math.log((k + 1) / (257 * 258 / 2)) for k, n in counts.items())
        assert row.nats_per_token == pytest.approx(nats / len(stream), rel=1e-12)
        assert row.perplexity == pytest.approx(math.exp(nats / len(stream)), rel=1e-12)
        assert row.ci95[0] < row.perplexity < row.ci95[1]
        assert (row.tokens, row.sequences) == (len(stream), len(stream) // 8)
        assert not row.bound
    assert [(row.corpus, row.documents) for row in table] == [("ptb", 2), ("arxiv", 40)]
    assert (seen[0], seen[-1]) == (("ptb", 2, 2), ("arxiv", 65, 65))


def test_rows_are_limited_and_the_setting_is_in_the_row():
    config = ModelConfig(vocab_size=258, length=8)

    def loss(batch):
        zeros = torch.zeros(len(batch["z"]), dtype=torch.float64)
        return zeros.index_add(0, batch["sequence"], batch["weight"].double())

    row, again, other = (
        zero_shot(loss, config, Tokenizer.load("bytes"), {"ptb": ["a b c d e"] * 99}, **settings)[0]
        for settings in (
            {"sequences": 5, "draws": 3, "seed": 2, "batch_size": 2},
            {"sequences": 5, "draws": 3, "seed": 2},
            {"sequences": 5, "draws": 3, "seed": 3},
        )
    )
    assert row == again
    assert row.nats_per_token != other.nats_per_token
    assert (row.sequences, row.tokens, row.documents) == (5, 40, 4)
    assert (row.draws, row.seed, row.bound) == (3, 2, True)


def test_a_model_that_cannot_measure_is_refused():
    config = ModelConfig(kind="ar", vocab_size=258, length=8)
    tokenizer, corpora = Tokenizer.load("bytes"), {"ptb": ["abcdefgh"] * 9}
    with pytest.raises(UserError, match="ptb: the model's loss is not a number"):
        zero_shot(
            lambda batch: torch.full((len(batch["x"]),), math.nan), config, tokenizer, corpora
        )
    with pytest.raises(UserError, match="257 token ids, but the model knows 63"):
        zero_shot(unigram_loss, replace(config, vocab_size=64), tokenizer, corpora)
    with pytest.raises(UserError, match="1 or more"):
        zero_shot(unigram_loss, config, tokenizer, corpora, sequences=0)


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
