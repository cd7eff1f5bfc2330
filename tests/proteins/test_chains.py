"""FASTA files read, chosen from and shuffled."""

import lzma
from collections import Counter

import pytest

from didi_instruct.errors import UserError
from didi_instruct.proteins.chains import (
    chains_of_length,
    is_fasta,
    read_chains,
    shuffling,
    some_chains,
)


def write(path, text):
    path.write_text(text)
    return str(path)


def test_chains_are_read_whatever_their_lines_and_compression(tmp_path):
    text = ">one x y\nMKV\nlag\n\n>two\nM K V X\n"
    plain = write(tmp_path / "a.fasta", text)
    (tmp_path / "b.fa.xz").write_bytes(lzma.compress(text.encode()))
    found = read_chains(plain)
    assert found.sequences == ("MKVLAG", "MKVX")
    assert found.usual == ["MKVLAG"]
    packed = read_chains(str(tmp_path / "b.fa.xz"))
    assert packed.fingerprint == found.fingerprint
    assert is_fasta(plain)
    assert is_fasta(str(tmp_path / "b.fa.xz"))
    assert not is_fasta(str(tmp_path))


def test_a_file_that_changed_is_read_again(tmp_path):
    path = write(tmp_path / "a.fasta", ">a\nMKV\n")
    assert read_chains(path) is read_chains(path)
    write(tmp_path / "a.fasta", ">a\nMKVLL\n")
    assert read_chains(path).sequences == ("MKVLL",)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.fasta", ">a\nMKV\nMK-V\n", "a.fasta:3: '-' is no residue"),
        ("a.fasta", ">a\nMK1\n", "a.fasta:2: '1' is no residue"),
        ("a.fasta", "MKV\n", r"a\.fasta:1: a sequence before the first"),
        ("a.fasta", "", "has no chain"),
        ("a.fasta", ">a\n>b\nMKV\n", "a.fasta:1: an empty chain"),
        ("a.txt", "MKV", "is no FASTA file"),
    ],
)
def test_what_is_no_chain_is_refused_by_line(tmp_path, name, text, message):
    path = write(tmp_path / name, text)
    with pytest.raises(UserError, match=message):
        read_chains(path)


def test_chains_for_a_length_are_the_nearest_and_cut_to_it(tmp_path):
    lines = {19: "A", 20: "C", 21: "D", 22: "E", 23: "F"}
    text = "".join(f">{n}\n{letter * n}\n" for n, letter in lines.items())
    chains = read_chains(write(tmp_path / "a.fasta", text + ">x\n" + "X" * 20 + "\n"))
    assert chains_of_length(chains, 20, 9) == ["C" * 20, "D" * 20, "E" * 20]
    assert chains_of_length(chains, 20, 2) == ["C" * 20, "D" * 20]
    assert chains_of_length(chains, 40, 2) == []
    assert sorted(some_chains(chains, 20, 9)) == ["A" * 19, "C" * 20]


def test_shuffling_is_seeded_and_keeps_residues():
    sequence = "MKVLAGGAV" * 5
    one, other = shuffling([45, 45])
    assert sorted(one) == list(range(45))
    assert list(one) != list(other)
    assert [list(order) for order in shuffling([45, 45])] == [list(one), list(other)]
    assert Counter(sequence[place] for place in one) == Counter(sequence)
