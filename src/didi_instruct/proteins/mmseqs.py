"""MMseqs2 as a program beside ours: found, run in a folder of its own, its failures explained."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from didi_instruct.errors import UserError

LONGEST = 32_000
"""Residues of a chain that MMseqs2 aligns with its usual settings."""
NO_KMER = "No k-mer could be extracted"
"""Error of MMseqs2 where all chains are masked as low complexity, or shorter than a k-mer."""


class MMseqsError(RuntimeError):
    """MMseqs2 ended with an error; the message is what it said last."""


def find_mmseqs() -> str:
    """Path of the program; refuse a machine without it."""
    found = shutil.which("mmseqs")
    if found is None:
        raise UserError("MMseqs2 is not installed: apt install mmseqs2 (or put mmseqs on PATH).")
    return found


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder, gone afterwards, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="didi-mmseqs-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def write_fasta(path: Path, sequences: Sequence[str]) -> None:
    """Write chains under their numbers; refuse those that are empty or too long."""
    for number, sequence in enumerate(sequences, 1):
        if not 0 < len(sequence) <= LONGEST:
            raise UserError(
                f"Chain {number} has {len(sequence)} residues: MMseqs2 compares chains of 1 to "
                f"{LONGEST}. Leave it out."
            )
    with path.open("w", encoding="ascii") as file:
        file.writelines(f">{number}\n{sequence}\n" for number, sequence in enumerate(sequences))


def run_mmseqs(folder: Path, *arguments: object) -> None:
    """Run it in `folder` on all cores that this process may use; Ctrl-C ends it and its children.

    It is quiet; its standard output is kept for the error.
    """
    command = [find_mmseqs(), *map(str, arguments), "--threads", str(_cores())]
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # its shell scripts have children, which end with it
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise MMseqsError(_explanation(output))


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _explanation(output: str) -> str:
    """Choose the line that says why: the first that is not about another part having died."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    known = [line for line in lines if NO_KMER in line]
    errors = [line for line in lines if "rror" in line and "died" not in line]
    return (known or errors or lines or ["it said nothing"])[0]
