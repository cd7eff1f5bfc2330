"""Times cases for one version of the package: a case per line in, pairs of seconds out.

The first of a pair is what a clock says, the second what the processor worked: where others use
the machine too, the first tells more of them than of us.

`compare_speed.py` starts one with the version's source first on `PYTHONPATH`.
"""

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.golden import cases, measuring, tiny

import didi_instruct as didi

ITERATIONS = {"distil": 4, "pretrain": 11}
"""Of a timed run; the first is not counted, since what is done once is done there."""
WORDS = [f"w{n}" for n in range(1023)]
SIZE = {"layers": 4, "hidden": 128, "heads": 4, "cond_dim": 32, "length": 64}
SMALL = {**tiny.SHAPE, **SIZE, "vocab_size": len(WORDS) + 2, "learned_positions": True}
"""A model whose iteration takes some tenths of a second."""
BATCH = 8


Pair = tuple[float, float]


def now() -> Pair:
    """Seconds of the clock, and of work of this process."""
    return time.perf_counter(), time.process_time()


def between(before: Pair, after: Pair) -> Pair:
    """Seconds that have passed."""
    return after[0] - before[0], after[1] - before[1]


class Worker:
    """Times cases with the models of `home`; runs are made in `room`."""

    def __init__(self, home: Path, room: Path) -> None:
        self.home, self.room = home, room

    def answer(self, case: dict[str, Any]) -> list[Pair]:
        """Seconds of a case."""
        if "prepare" in case:
            return self.prepare()
        if "method" in case:
            return self.distilled(case["method"])
        if "pretrain" in case:
            return self.pretrained(case["pretrain"])
        return self.sampled(case)

    def prepare(self) -> list[Pair]:
        """Write models and texts, unless another version has."""
        if not self.home.exists():
            tiny.write_models(self.home, ["plain", "codes", "ar"])
            didi.load("stories", device="cpu").save(self.home / "stories")
            tiny.add_discriminator(self.home / "stories")
            end = WORDS.index("w0")
            words = [*WORDS, tiny.END]
            small = self.home / "small"
            tiny.write_model(small, SMALL, [29], guided=False, words=words, end=tiny.END)
            lines = (
                " ".join(f"w{(end + row * 7 + n * (1 + row % 5)) % 1023}" for n in range(200))
                for row in range(400)
            )
            (self.home / "words.txt").write_text("\n".join(lines) + "\n")
        return []

    def sampled(self, case: dict[str, Any]) -> list[Pair]:
        """Seconds of each drawing, with seeds of its own."""
        model, found = measuring.opened(self.home / case.get("model", "stories")), []
        for seed in range(case.get("times", 1)):
            started = now()
            if "draw" in case:
                model.draw(**case["draw"], seed=seed)
            else:
                model.generate(**case["generate"], seed=seed)
            found.append(between(started, now()))
        return found

    def distilled(self, method: str) -> list[Pair]:
        """Seconds of iterations of a distillation."""
        bank = {"source": "bank", "bank": str(self.room / "bank"), "steps": 2, "rows": 64}
        matching = {"warmup": 0, "budgets": [4, 8], "contexts": 2, "completion": 1.0, "anchor": 0.5}
        recipe = cases.recipe(
            method,
            steps=ITERATIONS["distil"],
            reference=bank,
            train=self._train,
            token_matching=matching,
        )
        return self._run(recipe, teacher=self.home / "small")

    def pretrained(self, kind: str) -> list[Pair]:
        """Seconds of pretraining steps."""
        data = {
            "source": str(self.home / "words.txt"), "tokenizer": str(self.home / "small"),
            "documents": "line", "valid": 4,
        }  # fmt: skip
        model = SIZE | {"kind": kind}
        train = cases.recipe("didi")["train"] | self._train | {"steps": ITERATIONS["pretrain"]}
        recipe = {"model": model, "data": data, "optim": {"lr": 1e-3}, "train": train}
        return self._run(recipe)

    @property
    def _train(self) -> dict[str, Any]:
        return {"batch_size": BATCH, "log_every": 1000, "save_every": 1000, "eval_sequences": 4}

    def _run(self, recipe: dict[str, Any], **teacher: Path) -> list[Pair]:
        """Seconds of each iteration but the first."""
        out: Any = self.room / "run"
        ended: list[Pair] = []
        reporter = mock.Mock(tick=lambda step: ended.append(now()))  # it shows nothing
        start: Any = didi.distill if teacher else didi.pretrain
        try:
            with measuring.no_pictures():
                start(recipe, out=out, device="cpu", reporter=reporter, **teacher)
        finally:
            shutil.rmtree(out, ignore_errors=True)
        return [between(*pair) for pair in itertools.pairwise(ended)]


def main() -> None:
    """Answer cases until there are no more."""
    parser = argparse.ArgumentParser()
    for name in ("source", "home", "room"):
        parser.add_argument(name, type=Path)
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    measuring.check_version(options.source)
    torch.set_num_threads(options.threads)
    options.room.mkdir(parents=True, exist_ok=True)
    worker = Worker(options.home, options.room)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for line in sys.stdin:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
