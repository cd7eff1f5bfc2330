"""Files of samples: what is written comes back, also from an older version."""

import json

import pytest
import torch

from didi_instruct.errors import UserError
from didi_instruct.evaluation.samples import (
    VERSION,
    Origin,
    SampleSet,
    is_sample_file,
    read_samples,
    write_samples,
)

ORIGIN = Origin(
    model="m", fingerprint="f", tokenizer="t", sampler="rgas", steps=4, nfe=4, passes=4.5,
    disc_calls=2, temperature=0.9, top_p=0.8, seed=3, length=2, until_eot=True, seconds=1.5,
    options={"grid": [1.0, 0.5, 0.0], "h_start": 1.0, "last": None}, batch_size=7,
    device="cuda (a card)", own_window=True,
)  # fmt: skip
NEW = ("options", "batch_size", "device")


@pytest.fixture
def path(tmp_path):
    log_prob = torch.tensor([-1.5, -0.1], dtype=torch.float64)
    tokens, lengths = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 1])
    write_samples(tmp_path / "s.jsonl", SampleSet(ORIGIN, tokens, ("é", "b"), log_prob, lengths))
    return tmp_path / "s.jsonl"


def test_samples_come_back(path):
    found = read_samples(path)
    assert found.origin == ORIGIN
    assert (found.tokens.tolist(), found.texts) == ([[1, 2], [3, 4]], ("é", "b"))
    assert (found.log_prob.tolist(), found.lengths.tolist()) == ([-1.5, -0.1], [2, 1])


def test_an_older_file_does_not_know_how_it_was_drawn(path):
    head, *rest = path.read_text().splitlines()
    before = {k: v for k, v in json.loads(head).items() if k != "own_window"} | {"version": 2}
    path.write_text("\n".join([json.dumps(before), *rest]) + "\n")
    found = read_samples(path)
    assert (found.origin.own_window, found.origin.batch_size) == (False, 7)
    old = {k: v for k, v in before.items() if k not in NEW} | {"version": 1}
    path.write_text("\n".join([json.dumps(old), *rest]) + "\n")
    found = read_samples(path)
    assert [getattr(found.origin, name) for name in NEW] == [None] * 3
    assert (found.origin.seconds, found.texts) == (1.5, ("é", "b"))
    for version in (0, VERSION + 1, "2", None):
        path.write_text("\n".join([json.dumps(old | {"version": version}), *rest]) + "\n")
        with pytest.raises(UserError, match="newer version"):
            read_samples(path)


@pytest.mark.parametrize(
    "content", [b"", b"[1]\n", b'{"text": "a"}\n', b"\xff\xfe", b"plain text\n", b"9" * 99_999]
)
def test_other_files_are_not_taken_for_samples(path, content):
    assert is_sample_file(path)
    path.write_bytes(content)
    assert not is_sample_file(path)
    assert not is_sample_file(path.parent)
    assert not is_sample_file(path.parent / "gone")
