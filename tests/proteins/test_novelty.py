"""Identity to a training file, of chains for which it is known."""

import random
import shutil

import pytest

from didi_instruct.data.tokenizer import AMINO_ACIDS
from didi_instruct.errors import UserError
from didi_instruct.proteins.chains import read_chains
from didi_instruct.proteins.novelty import novelty

needs_mmseqs = pytest.mark.skipif(
    shutil.which("mmseqs") is None, reason="MMseqs2 is not installed (apt install mmseqs2)"
)


def training(tmp_path, sequences):
    path = tmp_path / "a.fasta"
    path.write_text("".join(f">{n}\n{s}\n" for n, s in enumerate(sequences)))
    return read_chains(str(path))


@needs_mmseqs
def test_identity_of_known_relatives(tmp_path):
    draw = random.Random(0)
    known = ["".join(draw.choices(AMINO_ACIDS, k=150)) for _ in range(8)]
    places = set(draw.sample(range(150), 45))
    other = dict(zip(AMINO_ACIDS, AMINO_ACIDS[7:] + AMINO_ACIDS[:7], strict=True))
    changed = "".join(other[c] if i in places else c for i, c in enumerate(known[0]))
    repeat = "A" * 150
    strangers = ["".join(draw.choices(AMINO_ACIDS, k=150)) for _ in range(3)]
    fragment = known[2][:60] + strangers[0][:90]  # its hit covers 40%
    chains = [known[1], changed, repeat, fragment, *strangers]
    found = novelty(chains, training(tmp_path, [*known, repeat]))
    assert found.identity[0] == 1
    assert found.identity[1] == pytest.approx(0.7, abs=0.02)
    assert found.identity[2] == 1  # masked, but there word for word
    assert found.identity[3:].tolist() == [0] * 4
    assert found.hit.tolist() == [True] * 3 + [False] * 4
    assert found.copy.tolist() == [True, False, True] + [False] * 4


def test_no_chains_are_refused(tmp_path):
    with pytest.raises(UserError, match="no chains to search"):
        novelty([], training(tmp_path, ["MKV"]))
