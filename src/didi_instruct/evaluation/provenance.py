"""Provenance of numbers: versions, commit, machine, date; no path and no name of a person."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from didi_instruct import __version__

PACKAGE = Path(__file__).parent.parent
CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = ("numpy", "transformers", "mauve-text")
"""Other packages on which numbers may depend, where they are installed."""


def provenance() -> dict[str, str]:
    """Facts that a reader needs to make the numbers again; unknown ones are left out."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "CPU": f"{_cpu()}, {cores or 1} cores",
    }
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(i) for i in range(devices)]
    if names:
        found["GPU"] = ", ".join(f"{names.count(n)} × {n}" for n in dict.fromkeys(names))
    return found


def versions() -> dict[str, str]:
    """Versions of the code, by package; read, not imported, which would take seconds."""
    found = {
        "didi-instruct": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _installed(name) for name in PACKAGES},
    }
    return {name: value for name, value in found.items() if value}


def commit(folder: Path = PACKAGE) -> str | None:
    """Commit of the working copy that holds `folder`; None where git does not keep its files.

    An installed package may lie inside of somebody else's repository, which says nothing of it.
    """
    if _git(folder, "ls-files", "--error-unmatch", "--", "__init__.py") is None:
        return None
    name = _git(folder, "rev-parse", "--short=12", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{name}, with changes" if name and changed else name


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str | None:
    # Other git commands may hold the index: asking must neither wait for it nor rewrite it.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, env=environment, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
