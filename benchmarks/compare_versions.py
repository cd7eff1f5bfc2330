"""Two versions of the package on the same random settings: equal, or where they differ.

    python benchmarks/compare_versions.py --old SRC --new SRC [--samplers 2000]
        [--distillations 200] [--pretrainings 40] [--seed 0] [--jobs 2] [--json FILE]
        [--only distillation-17]

SRC is the folder that holds `didi_instruct`. Tiny models draw and learn with settings of every
kind, in one process per version; each setting is a function of the seed and its number, so that
`--only` asks for one again. Runs of every method are also begun by one version and ended by the
other. The exit code is 0 where nothing differs.

Equal means: tokens, steps, `nfe`, `disc_calls`, and what is refused (in whatever words); numbers
but for rounding, see `tolerance`. Where `passes` alone differs it is told apart: how often texts
that have become equal by chance are read is no promise. So is an error of the old version that is
no refusal, where the new one has none.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import random_settings  # noqa: E402
from tests.golden import comparing, tiny  # noqa: E402

Json = dict[str, Any]
KINDS = ("drawing", "distillation", "pretraining")
SIDES = ("old", "new")


def tolerance(path: str) -> tuple[float, float]:
    """Largest relative difference of a number, and the size that it counts as at least."""
    if path.startswith(("log_prob", "confidence")):
        return 1e-6, 1.0
    if path.startswith("steps"):
        return 1e-7, 1.0
    if path.startswith("passes"):
        return 1e-9, 1.0
    if path.startswith("log["):
        return 1e-5, 0.1
    if path.startswith(("model", "discriminator")):
        # Norm and projection of what training changed, then the norm of the tensor. Adam divides
        # small gradients by their own size, so rounding shows more than in losses.
        return (1e-5 if path.endswith("[2]") else 1e-3), 1e-2
    if path.startswith("state"):
        return 1e-5, 1.0
    return 0.0, 1.0


def group_of(path: str) -> str | None:
    """The group that a number belongs to."""
    if path.startswith(("log_prob", "confidence")):
        return "log_prob"
    if path.startswith("log["):
        name = path.split(".")[-1]
        if name.endswith("grad_norm"):
            return "gradient norms"
        return "losses" if name.endswith("loss") else "other numbers of logs"
    if path.startswith(("model", "discriminator", "state")):
        return "weights"
    return None


@dataclass
class Tally:
    """Outcome of the settings of one kind."""

    compared: int = 0
    equal: int = 0
    refused: int = 0  # of the equal ones
    failed: dict[str, str] = field(default_factory=dict)
    """Of the equal ones: both versions raised this error, which is not one of wrong settings."""
    mended: dict[str, str] = field(default_factory=dict)
    """Settings with which the old version alone raised such an error."""
    passes: list[str] = field(default_factory=list)  # settings in which `passes` alone differs
    differing: dict[str, list[str]] = field(default_factory=dict)  # in what, by setting
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Largest relative difference of a group of numbers, and its setting."""

    def add(self, name: str, old: Json, new: Json) -> None:
        """Compare two answers."""
        self.compared += 1
        if not {"failed", "refused"} & {*old, *new}:
            self._add_numbers(name, old, new)
        elif "failed" in old and "failed" not in new:
            self.mended[name] = _short(old)
        elif old.get("failed") != new.get("failed") or ("refused" in old) != ("refused" in new):
            self.differing[name] = [f"old: {_short(old)}", f"new: {_short(new)}"]
        else:
            self.equal += 1
            self.refused += "refused" in old
            if "failed" in old:
                self.failed[name] = _short(old)

    def _add_numbers(self, name: str, old: Json, new: Json) -> None:
        for path, one, two, apart in comparing.differences(old, new, lambda _: (0.0, 1.0)):
            if (group := group_of(path)) is not None:
                size = tolerance(path)[1]
                scaled = comparing.distance(one, two, size) if apart != float("inf") else apart
                if scaled > self.worst.get(group, (0.0, ""))[0]:
                    self.worst[group] = scaled, name
        found = list(comparing.differences(old, new, tolerance))
        if not found:
            self.equal += 1
        elif all(path == "passes" for path, *_ in found):
            self.passes.append(name)
        else:
            self.differing[name] = [f"{path}: {one} / {two}" for path, one, two, _ in found]


def _short(answer: Json) -> str:
    text = json.dumps({k: answer[k] for k in ("refused", "failed", "why") if k in answer})
    return text if text != "{}" else "gave an answer"


class Comparison:
    """Settings, the two versions, and the room in which they answer."""

    def __init__(self, sources: dict[str, Path], jobs: int, room: Path) -> None:
        self.sources, self.jobs, self.room = sources, jobs, room
        self.home = tiny.write_all(room / "home")
        self._batches = 0

    def ask(self, tasks: dict[str, Sequence[Json]]) -> dict[str, dict[str, Json]]:
        """Answers of the versions to the tasks of each, by the tasks' ids."""
        shards = max(1, self.jobs // len(SIDES))
        self._batches += 1
        work = [(side, n, tasks[side][n::shards]) for n in range(shards) for side in SIDES]
        with ThreadPoolExecutor(self.jobs) as pool:
            parts = list(pool.map(lambda part: (part[0], self._ask_one(*part)), work))
        found: dict[str, dict[str, Json]] = {side: {} for side in SIDES}
        for side, part in parts:
            found[side] |= part
        return found

    def _ask_one(self, side: str, shard: int, tasks: Sequence[Json]) -> dict[str, Json]:
        name = f"{side}-{self._batches}-{shard}"
        files = [self.room / f"{name}.{end}" for end in ("tasks", "answers")]
        files[0].write_text("".join(json.dumps(task) + "\n" for task in tasks))
        source = self.sources[side]
        paths = os.pathsep.join(map(str, (source, ROOT)))
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        where = [source, self.home, self.room / f"{name}.room", *files]
        command = [sys.executable, "-m", "benchmarks.version_worker", *map(str, where)]
        done = subprocess.run(command, env=environment, cwd=self.room, capture_output=True)
        lines = files[1].read_text().splitlines() if files[1].exists() else []
        answers = [json.loads(line) for line in lines]
        if done.returncode or len(answers) != len(tasks):
            at = tasks[len(answers)]["id"] if len(answers) < len(tasks) else "the end"
            sys.exit(f"The {side} version broke down at {at}:\n{done.stderr.decode()[-2000:]}")
        return {answer["id"]: answer["found"] for answer in answers}


def same_settings(comparison: Comparison, seed: int, names: Sequence[str]) -> dict[str, Tally]:
    """Ask both versions for the same settings, named by kind and number."""
    cases = {name: random_settings.setting(seed, name) for name in names}
    tasks = [{"id": name, "do": "run", "case": case} for name, case in cases.items()]
    found = comparison.ask(dict.fromkeys(SIDES, tasks))
    tallies: dict[str, Tally] = {}
    for name in names:
        tally = tallies.setdefault(name.rsplit("-", 1)[0], Tally())
        tally.add(name, found["old"][name], found["new"][name])
    return tallies


def broken_runs(comparison: Comparison) -> Tally:
    """Begin runs with one version and end them with the other: as if one had made them whole."""
    cases = {method: random_settings.unbroken(method) for method in random_settings.METHODS}

    def out(side: str, method: str) -> str:
        return str(comparison.room / f"begun-{side}-{method}")

    first = {
        side: [
            task
            for method, case in cases.items()
            for task in (
                {"id": f"{method} whole", "do": "run", "case": case},
                {"id": f"{method} begun", "do": "begin", "case": case, "out": out(side, method)},
            )
        ]
        for side in SIDES
    }
    whole = comparison.ask(first)
    other = {"old": "new", "new": "old"}
    second = {
        side: [
            {"id": method, "do": "end", "case": case, "out": out(other[side], method)}
            for method, case in cases.items()
        ]
        for side in SIDES
    }
    ended, tally = comparison.ask(second), Tally()
    for method in cases:
        for side in SIDES:
            began = whole[other[side]][f"{method} begun"]
            name = f"{method}, begun by the {other[side]} version, ended by the {side} one"
            if began:
                tally.compared += 1
                tally.differing[name] = [f"could not be begun: {_short(began)}"]
                continue
            tally.add(name, whole["old"][f"{method} whole"], ended[side][method])
    return tally


def report(title: str, tally: Tally) -> Iterator[str]:
    """Lines that tell what was found."""
    yield (
        f"{title}: {tally.compared} compared, {tally.equal} equal (of them {tally.refused} "
        f"refused and {len(tally.failed)} failed in both), {len(tally.passes)} differ in passes "
        f"alone, {len(tally.mended)} failed in the old version alone, {len(tally.differing)} differ"
    )
    for group, (apart, name) in sorted(tally.worst.items()):
        yield f"  worst relative difference of {group}: {apart:.3g} ({name})"
    for name, why in tally.failed.items():
        yield f"  failed in both: {name}, {why}"
    for name, why in tally.mended.items():
        yield f"  failed in the old version alone: {name}, {why}"
    for name in tally.passes:
        yield f"  passes alone: {name}"


def main() -> None:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--samplers", type=int, default=2000)
    parser.add_argument("--distillations", type=int, default=200)
    parser.add_argument("--pretrainings", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write what was found to a file")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these settings alone")
    options = parser.parse_args()
    counts = zip(
        KINDS, (options.samplers, options.distillations, options.pretrainings), strict=True
    )
    names = options.only or [f"{kind}-{n}" for kind, count in counts for n in range(count)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        sources = {"old": options.old.resolve(), "new": options.new.resolve()}
        comparison = Comparison(sources, options.jobs, Path(temporary))
        tallies = same_settings(comparison, options.seed, names)
        if not options.only:
            tallies["broken run"] = broken_runs(comparison)
    for title, tally in tallies.items():
        print("\n".join(report(title, tally)))
    for tally in tallies.values():
        for name, lines in tally.differing.items():
            print(f"\n{name} (seed {options.seed}) differs:")
            print("\n".join(f"  {line}"[:300] for line in lines[:12]))
            if name in names:
                print(f"  setting: {json.dumps(random_settings.setting(options.seed, name))}")
    print(f"\n{time.monotonic() - started:.0f} s")
    if options.json is not None:
        found = {title: vars(tally) for title, tally in tallies.items()}
        options.json.write_text(json.dumps({"seed": options.seed, **found}, indent=1) + "\n")
    sys.exit(any(tally.differing for tally in tallies.values()))


if __name__ == "__main__":
    main()
