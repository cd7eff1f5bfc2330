"""DiDi-Instruct with and without the gate that stops a saturated discriminator, by path KL.

    python experiments/discriminator_gate.py --data prepared --judge stories15m --out OUT

Students of `ablation-all-tricks`, each seed with `discriminator.saturation` 0.95 and 1 (no gate),
four at a time on one GPU. `--scale toy` needs neither data nor judge, to see that it runs.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from rivals import Told, scale_of

from didi_instruct.evaluation.curves import read_log
from didi_instruct.reproduce.asking import ALL_TRICKS
from didi_instruct.reproduce.grid import Grid
from didi_instruct.reproduce.measuring import quality_job
from didi_instruct.reproduce.running import RUN, folder_of

GATES = ("0.95", "1.0")
TOLD = ("ppl", "ppl_ci95", "entropy", "path_kl", "path_kl_ci95", "num_samples")


def main() -> None:
    """Train, measure, and print a line for each student and budget."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", default="small")
    parser.add_argument("--data")
    parser.add_argument("--judge")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=4)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    scale = scale_of(asked)
    steps = [nfe for nfe in scale.budgets if nfe > min(scale.budgets)]
    students, measures = {}, {}
    for gate in GATES:
        for seed in scale.seeds:
            usual = scale.ablated(ALL_TRICKS, seed)
            name = f"gate-{gate.replace('.', '')}-seed{seed}"
            overrides = (*usual.overrides, f"discriminator.saturation={gate}")
            student = students[gate, seed] = replace(usual, name=name, overrides=overrides)
            measures[gate, seed] = quality_job(
                scale, f"measure-{name}", student, steps=steps, seed=seed
            )
    grid = Grid(list(measures.values()), asked.out, board=Told())
    grid.run(["0"] * asked.at_once if scale.name != "toy" else ())
    found = []
    for (gate, seed), measure in measures.items():
        log = read_log(folder_of(students[gate, seed], asked.out) / RUN / "log.jsonl")
        waits = [round(record["disc_waits"], 2) for record in log if "disc_waits" in record]
        for row in grid.results.get(measure.key, ()):
            told = {name: row.get(name) for name in TOLD}
            found.append({"gate": gate, "seed": seed, "nfe": row["nfe"], **told, "waits": waits})
            print(json.dumps(found[-1]))
    (asked.out / "gate.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
