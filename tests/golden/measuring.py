"""Numbers of a drawing or of a run, as JSON, by what the package promises its users alone.

A drawing or a run is itself JSON, so that a process with another version of the package can be
asked for it.
"""

import functools
import hashlib
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

import didi_instruct as didi
from didi_instruct.errors import UserError

from .tiny import MASK

CLOCKS = {"iterations_per_second", "tokens_per_second"}
"""Numbers of a log that a clock measured."""
UNSTABLE = "variety_at_start"
"""In names of tensors: a value that may be measured in another way, or not be there at all."""

Case = Mapping[str, Any]
Numbers = dict[str, Any]


def check_version(source: Path) -> None:
    """End the process unless the package that was imported lies in the folder `source`."""
    found = Path(didi.__file__).resolve()
    if not found.is_relative_to(source.resolve()):
        sys.exit(f"{found} is not of {source}: another version was imported")


@functools.cache
def opened(folder: Path) -> didi.Model:
    """Open a model on the CPU, once in a process."""
    return didi.load(folder, device="cpu")


def answer(case: Case, home: Path, out: Path, *, resume: bool = False) -> Numbers:
    """Numbers of a case with models of `home`, or the words in which a user was refused.

    A run is made, or resumed, in the folder `out`, which is removed.
    """
    try:
        if "recipe" in case:
            run(case, home, out, resume=resume)
            return run_numbers(case, home, out)
        model = opened(home / case["model"])
        if "generate" in case:
            return {"texts": model.generate(**case["generate"])}
        return drawn(model, case) if "draw" in case else judged(model, case)
    except UserError as error:
        return {"refused": str(error)}
    finally:
        shutil.rmtree(out, ignore_errors=True)


# Drawing


def drawn(model: didi.Model, case: Case, watcher: "Watcher | None" = None) -> Numbers:
    """Numbers of `Model.draw`; `watched` adds those of every step, as a watcher does."""
    settings = dict(case["draw"])
    if case.get("watched") and watcher is None:
        watcher = Watcher()
    if "tokens" in settings:
        tokens = torch.tensor(settings["tokens"])
        settings["tokens"] = tokens.masked_fill(tokens == MASK, model.mask_symbol)
    samples = model.draw(callback=watcher, **settings)
    found = {
        "tokens": digest(samples.tokens),
        "nfe": samples.nfe,
        "passes": round(samples.passes, 9),
        "disc_calls": samples.disc_calls,
        "log_prob": None if samples.log_prob is None else samples.log_prob.tolist(),
    }
    if watcher is not None:
        found |= {"steps": watcher.steps, "confidence": watcher.confidence}
    return found


def judged(model: didi.Model, case: Case) -> Numbers:
    """Logits of `Model.denoiser`, in short, and the bound of `Model.nelbo`."""
    tokens = torch.tensor(case["judge"])
    found: Numbers = {"nelbo": float(model.nelbo(tokens, seed=3, draws=2))}
    if model.config.kind != "ar":
        noisy = tokens.clone()
        noisy[:, ::2] = model.mask_symbol if model.config.kind == "mdlm" else 1
        logits = model.denoiser(noisy, torch.linspace(0.2, 0.9, len(tokens)))
        found["logits"] = [list(logits.shape), *projections(logits, seed=5)]
    return found


class Watcher:
    """Sees the steps of a drawing as a callback does."""

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []
        self.confidence: list[float] = []
        self.states: list[tuple[int, Tensor, Tensor]] = []

    def __call__(self, step: Any) -> None:
        """Take down one step."""
        self.states.append((step.index, step.tokens.clone(), step.revealed.clone()))
        marks = [digest(step.tokens)[:12], digest(step.revealed)[:12]]
        self.steps.append([step.index, step.steps, round(float(step.time), 9), *marks])
        self.confidence.append(float(step.confidence.double().sum()))

    def rows_met(self) -> bool:
        """True where rows that a step read were equal by chance, after a batch's first reading."""
        read = False
        for n, (index, _, revealed) in enumerate(self.states):
            active = revealed.any(1)
            read = read and index > 0
            if read and int(active.sum()) > 1:
                before = self.states[n - 1][1][active]
                if bool((before == before[:1]).all()):
                    return True
            read = read or bool(active.any())
        return False


# Runs


@contextmanager
def no_pictures() -> Iterator[None]:
    """Runs draw no curves and write no boards, which takes longer than the runs."""
    missing = dict.fromkeys(["matplotlib.backends.backend_agg", "torch.utils.tensorboard"])
    with mock.patch.dict(sys.modules, missing):  # type: ignore[arg-type]
        yield


def run(
    case: Case, home: Path, out: Path, *, stop_after: int | None = None, resume: bool = False
) -> None:
    """Distil or pretrain as a case says, with models and texts of the folder `home`.

    `@/` in a recipe is that folder. The signal to stop comes when step `stop_after` is logged.
    """

    def advance(step: int, values: Mapping[str, Any]) -> None:
        if step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    recipe = json.loads(json.dumps(case["recipe"]).replace("@/", f"{home}/"))
    settings: Any = {"out": out, "device": "cpu", "resume": resume}
    settings["reporter"] = mock.Mock(advance=advance)  # it shows nothing
    with no_pictures():
        if "teacher" in case:
            didi.distill(recipe, teacher=home / case["teacher"], **settings)
        else:
            didi.pretrain(recipe, **settings)


def run_numbers(case: Case, home: Path, out: Path) -> Numbers:
    """Log, product and state of a finished run in `out`."""
    state = weights(sorted(out.glob("checkpoints/step-*/state-*.safetensors"))[-1])
    before = {}
    if "teacher" in case:
        student = case["recipe"].get("student")
        start = Path(student.replace("@", str(home))) if student else home / case["teacher"]
        before = load_file(start / "model.safetensors")
    found: Numbers = {
        "log": entries(out),
        "model": changes(load_file(out / "model.safetensors"), before),
        "state": {
            "names": hashlib.sha256("\n".join(sorted(state)).encode()).hexdigest()[:16],
            "norm": norm(state.values()),
        },
    }
    if (out / "discriminator.safetensors").exists():
        trunk = {n: t for n, t in before.items() if not n.startswith("output_layer")}
        found["discriminator"] = changes(load_file(out / "discriminator.safetensors"), trunk)
    return found


def entries(out: Path) -> list[dict[str, float]]:
    """The log of a run without what a clock measured."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines]


def weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a file, without unstable ones."""
    return {name: t for name, t in load_file(path).items() if UNSTABLE not in name}


def changes(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Of every tensor: norm and projection of what training changed, and the norm of the whole.

    A tensor that `before` lacks, or has in another shape, counts as changed from 0.
    """
    found = {}
    for n, (name, tensor) in enumerate(sorted(after.items())):
        start = before.get(name)
        same = start is not None and start.shape == tensor.shape
        change = tensor.double() - (start.double() if same else 0.0)  # type: ignore[union-attr]
        found[name] = [*projections(change, seed=n), short(float(tensor.double().norm()))]
    return found


def projections(tensor: Tensor, seed: int) -> list[float]:
    """Norm of a tensor and its product with a fixed random one."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(tensor.numel(), generator=generator, dtype=torch.float64)
    flat = tensor.double().flatten()
    return [short(float(flat.norm())), short(float(flat @ direction))]


def norm(tensors: Any) -> float:
    """Norm of many tensors as one."""
    return short(math.sqrt(math.fsum(float(t.double().square().sum()) for t in tensors)))


def short(value: float) -> float:
    """A number with 10 significant digits."""
    return float(f"{value:.10g}")


def digest(tensor: Tensor) -> str:
    """SHA-256 of whole numbers and their shape."""
    content = tensor.long().contiguous().numpy().tobytes()
    return hashlib.sha256(str(tuple(tensor.shape)).encode() + content).hexdigest()
