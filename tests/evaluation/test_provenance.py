"""Provenance names versions and a commit, and no places."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

import didi_instruct
from didi_instruct.evaluation.provenance import commit, provenance, versions


def git(folder, *words):
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


def test_a_commit_is_named_only_where_git_keeps_the_package(tmp_path):
    try:
        git(tmp_path, "init")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("git is not there")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    git(tmp_path, *who, "commit", "--allow-empty", "-m", "x")
    assert commit(package) is None, "an installed package inside of another repository"
    git(tmp_path, "add", ".")
    git(tmp_path, *who, "commit", "-m", "y")
    head = subprocess.check_output(["git", "-C", tmp_path, "rev-parse", "HEAD"], text=True)
    assert commit(package) == head[:12]
    (package / "__init__.py").write_text("x = 1")
    assert commit(package) == f"{head[:12]}, with changes"
    assert commit(tmp_path / "nowhere") is None


def test_provenance_tells_versions_and_no_places():
    found = provenance()
    assert found["torch"] == torch.__version__
    assert found["didi-instruct"] == didi_instruct.__version__
    assert found["date"].endswith("UTC")
    assert versions().items() <= found.items(), "an evaluation's JSON names them alike"
    assert not any(re.search(r"(^|\s)/\w", value) for value in found.values())
    assert str(Path.home()) not in str(found)
