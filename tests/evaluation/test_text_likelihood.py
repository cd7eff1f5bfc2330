"""Documents become rows of tokens, and rows a perplexity."""

import math
from collections import Counter

import pytest
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.text_likelihood import pack
from didi_instruct.training.likelihood import likelihood


def test_documents_are_joined_by_end_of_text_and_the_tail_is_dropped():
    tokenizer = Tokenizer.load("bytes")
    whole = pack("ptb", ["abc", "de", "f"], tokenizer, length=4)
    assert whole.data.ordered(0, 9).tolist() == [[*b"abc", 256], [*b"de", 256, *b"f"]]
    assert whole.documents == 3
    first = pack("ptb", ["abc", "de", "f"], tokenizer, length=4, rows=1)
    assert (first.data.num_sequences, first.documents) == (1, 1)


def test_the_fingerprint_is_that_of_the_rows():
    """Not of the corpus's name, nor of text that no row holds."""
    tokenizer = Tokenizer.load("bytes")
    same, other, longer, fewer = (
        pack(name, texts, tokenizer, length, rows).data.fingerprint
        for name, texts, length, rows in (
            ("lm1b", ["abc", "de", "f", "gh"], 4, 2),
            ("ptb", ["abc", "de", "g"], 4, None),
            ("ptb", ["abc", "de", "f"], 8, None),
            ("ptb", ["abc", "de", "f"], 4, 1),
        )
    )
    assert same == pack("ptb", ["abc", "de", "f"], tokenizer, 4).data.fingerprint
    assert len({same, other, longer, fewer}) == 4


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
    for texts in (["it was", "cold again"], ["We prove it."] * 40):
        corpus = pack("ptb", texts, Tokenizer.load("bytes"), 8)
        count = corpus.data.num_sequences
        found = likelihood(unigram_loss, config, corpus.data.ordered, sequences=count, batch_size=3)
        stream = b"".join(text.encode() + b"\xff" for text in texts)  # stands for end-of-text
        stream = stream[: len(stream) // 8 * 8]
        counts = Counter(256 if byte == 255 else byte for byte in stream)
        nats = -sum(n * math.log((k + 1) / (257 * 258 / 2)) for k, n in counts.items())
        assert found.nats_per_token == pytest.approx(nats / len(stream), rel=1e-12)
        assert found.ppl == pytest.approx(math.exp(nats / len(stream)), rel=1e-12)
        assert found.ppl_ci95[0] < found.ppl < found.ppl_ci95[1]
        assert (count * 8, corpus.documents) == (len(stream), len(texts))
