"""Entropy of clusters in closed form, and MMseqs2 calibrated on chains whose answer is known."""

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from didi_instruct.data.tokenizer import AMINO_ACIDS
from didi_instruct.errors import UserError
from didi_instruct.proteins import clusters, mmseqs
from didi_instruct.proteins.clusters import cluster, entropy, entropy_interval, joined
from didi_instruct.proteins.mmseqs import NO_KMER, MMseqsError

needs_mmseqs = pytest.mark.skipif(
    shutil.which("mmseqs") is None, reason="MMseqs2 is not installed (apt install mmseqs2)"
)
REPEAT = "LAGVSER"


def random_chains(num, length=200, seed=0):
    draw = random.Random(seed)
    return ["".join(draw.choices(AMINO_ACIDS, k=length)) for _ in range(num)]


def noisy(chain, num, share, seed=1):
    draw = random.Random(seed)
    return [
        "".join(draw.choice(AMINO_ACIDS) if draw.random() < share else c for c in chain)
        for _ in range(num)
    ]


@pytest.mark.parametrize(
    ("labels", "value"),
    [
        ([0] * 40, 0),
        (list(range(40)), math.log(40)),
        ([0, 0, 1, 1], math.log(2)),
        ([5, 5, 5, 7], math.log(4) - 0.75 * math.log(3)),
    ],
)
def test_entropy_of_given_clusters(labels, value):
    assert entropy(labels) == pytest.approx(value, abs=1e-12)


def test_the_interval_is_the_jackknife():
    labels = [0, 0, 0, 1, 1, 2]
    without = [entropy(labels[:i] + labels[i + 1 :]) for i in range(6)]
    mean = sum(without) / 6
    half = 1.96 * math.sqrt(5 / 6 * sum((v - mean) ** 2 for v in without))
    low, high = entropy_interval(labels)
    assert low == pytest.approx(entropy(labels) - half)
    assert high == pytest.approx(min(math.log(6), entropy(labels) + half))
    assert entropy_interval(list(range(9))) is None  # each changes it equally
    assert entropy_interval([0, 1]) is None


def test_two_clusterings_are_joined_where_either_says_so():
    found = joined([0, 0, 2, 3, 4], [1, 2, 4], [7, 7, 8])  # 0-1 of the first, 1-2 of the second
    assert found[0] == found[1] == found[2]
    assert len({found[0], found[3], found[4]}) == 3


def test_low_complexity_is_clustered_again_and_a_failure_too(monkeypatch):
    runs = []

    def pretend(sequences, *options):
        runs.append((len(sequences), bool(options)))
        if not options and fails:
            raise MMseqsError(f"{NO_KMER} for the database")
        return (0,) * len(sequences) if options else tuple(range(len(sequences)))

    monkeypatch.setattr(clusters, "easy_cluster", pretend)
    usual, low = random_chains(3), ["AC" * 60] * 2
    fails = False
    assert cluster(usual).note is None
    found = cluster([*usual, *low])
    assert len(set(found.labels)) == 4
    assert (len(set(found.plain)), found.low_complexity, found.note) == (5, 2, clusters.JOINED)
    fails = True
    found = cluster([*usual, *low])
    assert (len(set(found.labels)), found.plain, found.note) == (1, None, clusters.ALONE)
    assert runs == [(3, False), (5, False), (2, True), (5, False), (5, True)]


@needs_mmseqs
def test_random_chains_all_differ_and_identical_ones_are_one():
    chains = random_chains(40)
    found = cluster(chains)
    assert entropy(found.labels) == pytest.approx(math.log(40))
    assert found.note is None
    assert entropy(cluster(chains[:1] * 40).labels) == 0


@needs_mmseqs
@pytest.mark.parametrize("share", [0.0, 0.2, 0.4])
def test_noisy_copies_of_a_repeat_are_not_called_diverse(share):
    found = cluster(noisy((REPEAT * 29)[:200], 40, share))
    assert len(set(found.labels)) <= 2
    assert entropy(found.labels) < 0.3
    assert found.note is not None


@needs_mmseqs
def test_noisy_copies_of_a_letter_are_one_though_the_first_run_differs():
    found = cluster(noisy("A" * 200, 40, 0.2))
    assert entropy(found.labels) == 0
    assert found.plain is None or len(set(found.plain)) > 1


@needs_mmseqs
def test_mutated_copies_of_a_parent_are_one_cluster():
    assert entropy(cluster(noisy(random_chains(1)[0], 20, 0.2)).labels) == 0


@pytest.mark.parametrize("chains", [[], ["MKV"]])
def test_fewer_than_two_chains_have_no_clusters(chains):
    with pytest.raises(UserError, match="2 or more chains"):
        cluster(chains)


def test_its_absence_is_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="apt install mmseqs2"):
        cluster(random_chains(2))


def test_chains_that_it_cannot_compare_are_named(tmp_path):
    with pytest.raises(UserError, match="Chain 2 has 0 residues"):
        mmseqs.write_fasta(tmp_path / "a", ["MKV", ""])
    with pytest.raises(UserError, match="Chain 1 has 40000 residues"):
        mmseqs.write_fasta(tmp_path / "a", ["A" * 40_000])


def test_a_failure_says_why_and_interruption_leaves_nothing(tmp_path, monkeypatch):
    program = tmp_path / "mmseqs"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program.write_text(
        "#!/bin/sh\necho Input in use\necho Error: disk is full\necho Error: died\nexit 1\n"
    )
    program.chmod(0o755)
    with pytest.raises(MMseqsError, match="Error: disk is full"):
        mmseqs.run_mmseqs(tmp_path, "easy-cluster")
    code = (
        "import sys; from didi_instruct.proteins.clusters import easy_cluster\n"
        "easy_cluster(['MKV', 'MKL'])"
    )
    program.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=-3) as process:
        child = tmp_path / "child"
        while process.poll() is None and not (child.exists() and child.read_text().strip()):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    assert not list(tmp_path.glob("didi-mmseqs-*"))
    assert _gone(int(child.read_text()))


def _gone(process):
    """Whether a process has ended, waiting a little for it to be told."""
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True)
        if state.stdout.strip().startswith(b"Z"):
            return True
        time.sleep(0.05)
    return False
