import pytest

from didi_instruct.data.dataset import excerpt, open_data
from didi_instruct.data.manifest import Layout, Manifest
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.data.readers import ReadOptions
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {i} of the corpus\n" for i in range(500)))
    return path


LAYOUTS = {
    "stream": (32, Layout()),
    "document": (22, Layout("document")),  # three digits are too many
    "document, cut": (22, Layout("document", "cut")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_rows_are_the_first_of_the_prepared_data(corpus, tmp_path, name):
    length, layout = LAYOUTS[name]
    settings = PrepareSettings(
        src=str(corpus),
        tokenizer="bytes",
        length=length,
        out=tmp_path / "data",
        valid=0,
        documents="line",
        rows=layout.rows,
        long=layout.long,
    )
    prepare(settings)
    whole = open_data(tmp_path / "data")
    layout = Manifest.read(tmp_path / "data").layout
    options = ReadOptions(documents="line")
    part = excerpt(str(corpus), whole.tokenizer, length, 40, options, layout)
    assert part.num_sequences == 40
    assert (part.ordered(0, 40) == whole.ordered(0, 40)).all()


def test_it_ends_with_the_corpus_and_refuses_less_than_a_row(corpus):
    tokenizer = Tokenizer.load("bytes")
    assert excerpt(str(corpus), tokenizer, 32, 10**6).num_sequences < 500
    with pytest.raises(UserError, match="do not fill one row"):
        excerpt(str(corpus), tokenizer, 10**6, 1)
    with pytest.raises(UserError, match="no end-of-text"):
        excerpt(str(corpus), OracleLanguage.default().tokenizer, 32, 1)
    with pytest.raises(UserError, match="no document fits a row of 32"):
        excerpt(str(corpus), tokenizer, 32, 1, layout=Layout("document"))


def test_it_is_a_stream_unless_it_is_told_otherwise(corpus):
    tokenizer = Tokenizer.load("bytes")
    first = excerpt(str(corpus), tokenizer, 32, 1, ReadOptions(documents="line")).ordered(0, 1)
    assert tokenizer.decode(first[0]) == "line 0 of the corpus<|endoftext|>line 1 of t"
