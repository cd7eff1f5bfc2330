"""Results that are kept with the code: whole, small, and of no machine in particular."""

import importlib.util
import json
import tarfile
from pathlib import Path

import pytest

from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.running import finished, folder_of

ROOT = Path(__file__).parents[2] / "experiments"
KEPT = sorted((ROOT / "kept").glob("*.tar.xz"))
JOB = Job(name="way", does="module:way", options={"x": 1})


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kept_results", ROOT / "kept_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(out, job, result):
    told = {
        "name": job.name, "key": job.key, "does": job.does, "seconds": 2.0,
        "provenance": {"a": "b"}, "inputs": {"judge": "/somewhere/judge"}, "result": result,
    }  # fmt: skip
    folder_of(job, out).mkdir(parents=True)
    (folder_of(job, out) / "done.json").write_text(json.dumps(told))


def test_results_come_out_as_they_went_in_but_for_rounding(script, tmp_path):
    rows = [{"ppl": 1.23456789, "values": {"nats": [1.23456789, None], "tokens": [3.0, 4.0]}}]
    write(tmp_path / "a", JOB, rows)
    other = Job(name="speed", does="module:speeds")
    write(tmp_path / "a", other, [{"tokens_per_second": 1.23456789}])
    training = Job(name="t", does="pretrain", recipe="oracle-teacher")
    write(tmp_path / "a", training, {"steps": 3})
    (tmp_path / "a" / "paces.json").write_text('{"k": 1.5}')
    script.pack(tmp_path / "a", tmp_path / "kept.tar.xz")
    script.unpack(tmp_path / "kept.tar.xz", tmp_path / "b")

    found = finished(JOB, tmp_path / "b")
    values = {"nats": [1.2346, None], "tokens": [3.0, 4.0]}
    assert (found.seconds, found.provenance) == (2.0, {"a": "b"})
    assert found.result == [{"ppl": 1.23456789, "values": values}]
    assert finished(other, tmp_path / "b").result == [{"tokens_per_second": 1.23456789}]
    assert not folder_of(training, tmp_path / "b").exists(), "nothing without its weights"
    assert json.loads((tmp_path / "b" / "paces.json").read_text()) == {"k": 1.5}
    assert "somewhere" not in (folder_of(JOB, tmp_path / "b") / "done.json").read_text()

    mine = folder_of(JOB, tmp_path / "b") / "done.json"
    mine.write_text("newer")
    (tmp_path / "b" / "paces.json").write_text('{"other": 2.5}')
    script.unpack(tmp_path / "kept.tar.xz", tmp_path / "b")
    assert mine.read_text() == "newer", "what is there stays"
    both = json.loads((tmp_path / "b" / "paces.json").read_text())
    assert both == {"k": 1.5, "other": 2.5}


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_kept_results_are_rows_with_the_numbers_of_their_samples(path):
    assert path.stat().st_size < 8 << 20
    with tarfile.open(path, "r:xz") as archive:
        names = archive.getnames()
        content = {name: archive.extractfile(name).read().decode() for name in names}
    assert "paces.json" in names
    for name, text in content.items():
        assert not any(place in text for place in ('"/', "/home/", "/tmp/", "/work/")), name
    ways = [json.loads(text) for name, text in content.items() if "/baselines-" in name]
    assert ways
    for told in ways:
        for row in told["result"]:
            assert {"nats", "tokens", "entropy"} <= set(row["values"])
            assert {len(each) for each in row["values"].values()} == {row["num_samples"]}
            mean = sum(row["values"]["entropy"]) / row["num_samples"]
            assert mean == pytest.approx(row["entropy"], abs=1e-4)
