"""One job of a grid in a process of its own: `python -m didi_instruct.reproduce.worker JOB OUT`."""

import json
import sys
from pathlib import Path

from didi_instruct.reproduce.grid import explain
from didi_instruct.reproduce.processes import ERROR, JOB, from_plain
from didi_instruct.reproduce.running import StoppedError, run_job


def main(folder: Path, out: Path) -> int:
    """Run the job that a grid wrote into `folder`; what goes wrong is left there for it."""
    try:
        run_job(from_plain(json.loads((folder / JOB).read_text(encoding="utf-8"))), out)
    except StoppedError as stopped:
        return 128 + stopped.signal
    except Exception as error:
        (folder / ERROR).write_text(explain(error), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
