"""Results of a folder of `didi reproduce` in one small file, to keep and to go on from elsewhere.

    python experiments/kept_results.py pack OUT experiments/kept/stories-baselines.tar.xz
    python experiments/kept_results.py unpack experiments/kept/stories-baselines.tar.xz OUT

What is packed is what tables are made of: what jobs found, with the numbers of each sample, and the
paces by which equal minutes became steps. No weights, no texts and no paths; numbers of samples are
rounded to 1e-4 nats, far below what 512 of them can tell. A job that is there is not run again, and
needs its models no more, so a table can be written, or gone on with, where none of them is.
"""

import argparse
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from didi_instruct.reproduce.baselines_compared import VALUES
from didi_instruct.reproduce.paces import KEPT as PACES
from didi_instruct.reproduce.running import DONE

DECIMALS = 4
WORTH = ("name", "key", "does", "seconds", "provenance", "result")
"""What of a finished job says more than its key does."""


def pack(out: Path, file: Path) -> None:
    """Everything that finished in a folder but trainings, which are nothing without weights."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:xz") as archive:
        if (out / PACES).exists():
            _add(archive, PACES, json.loads((out / PACES).read_text(encoding="utf-8")))
        for path in sorted(out.glob(f"jobs/*/{DONE}")):
            told = json.loads(path.read_text(encoding="utf-8"))
            if ":" in told["does"]:
                told = {name: told[name] for name in WORTH}
                told["result"] = _rounded(told["result"])
                _add(archive, f"jobs/{path.parent.name}/{DONE}", told)


def unpack(file: Path, out: Path) -> None:
    """Lay the results where `didi reproduce --out` looks for them; what is there stays."""
    paces = out / PACES
    before = json.loads(paces.read_text(encoding="utf-8")) if paces.exists() else {}
    with tarfile.open(file, "r:xz") as archive:
        for member in archive:
            if member.name == PACES or not (out / member.name).exists():
                archive.extract(member, out, filter="data")
    if before:
        kept = json.loads(paces.read_text(encoding="utf-8"))
        paces.write_text(json.dumps(kept | before, indent=1), encoding="utf-8")


def _rounded(result: Any) -> Any:
    """Rows with rounded numbers of their samples; other results as they are."""
    if not isinstance(result, list):
        return result
    return [
        row
        | {
            VALUES: {
                name: [None if v is None else round(v, DECIMALS) for v in each]
                for name, each in row[VALUES].items()
            }
        }
        if VALUES in row
        else row
        for row in result
    ]


def _add(archive: tarfile.TarFile, name: str, value: Any) -> None:
    content = json.dumps(value, separators=(",", ":")).encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def main() -> None:
    """Read what is asked for, and do it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    asked = parser.parse_args()
    {"pack": pack, "unpack": unpack}[asked.verb](asked.source, asked.target)


if __name__ == "__main__":
    main()
