"""`didi bench --distill`: an iteration of DiDi-Instruct beside the plain way."""

from dataclasses import replace
from typing import TYPE_CHECKING

from didi_instruct.api.bench import about
from didi_instruct.api.bench_plan import BenchPlan, open_model
from didi_instruct.benchmarking.distillation import distill_case
from didi_instruct.benchmarking.report import Bench, make_rows
from didi_instruct.benchmarking.timing import Progress, time_cases
from didi_instruct.errors import UserError
from didi_instruct.models.dit import DiT
from didi_instruct.training.distributed import World

if TYPE_CHECKING:
    from didi_instruct.config.pretrain import Compile

OTHERWISE: "dict[str, Compile]" = {"on": "on"}
WARM_UP = 4
"""Iterations before the first timed one: shapes differ from one to the next, and compile."""


def bench_distillation(plan: BenchPlan, progress: Progress | None = None) -> Bench:
    """Time an iteration, against what is compiled otherwise, `plain`, not, and `naive`, dense.

    `on` launches the kernels of a pass one by one (`train.compile=on`).

    Weights are float32, as in training; passes run in bfloat16 if that is the plan's dtype.
    """
    if set(plan.against) - {*OTHERWISE, "plain", "naive"}:
        raise UserError("--distill compares with `on`, `plain` and `naive`: leave out the others.")
    if plan.steps is not None or plan.wanted_sampler is not None:
        raise UserError("--distill times iterations: leave out --steps, --guided and --sampler.")
    model = open_model(replace(plan, dtype="float32", fast=False))
    network, length = model.network, model.config.length
    if not isinstance(network, DiT) or model.config.kind != "mdlm" or model.config.masks > 1:
        raise UserError("--distill is for masked models of the DiT family with one mask.")
    if plan.length not in (None, length):
        raise UserError(f"--length is {plan.length}, but texts have {length} tokens: leave it out.")
    if plan.batch < 2:
        raise UserError("--batch is 1, but an advantage compares texts: use 2 or more.")
    world = World(model.device)
    cuda = world.device.type == "cuda"
    bf16 = cuda if plan.dtype is None else plan.dtype == "bfloat16"
    compiled = cuda if plan.fast is None else plan.fast
    rows: list[tuple[str, Compile]] = [
        (plan.row, ("auto" if cuda else "on") if compiled else "off"),
        *((name, OTHERWISE.get(name, "off")) for name in plan.against),
    ]
    cases = [
        distill_case(
            name,
            network,
            plan.batch,
            length,
            world,
            bf16=bf16,
            compile=own,
            naive=number > 0 and name == "naive",
        )
        for number, (name, own) in enumerate(rows)
    ]
    timings = time_cases(cases, plan.repeat, world.device, progress, warm_up=WARM_UP, busy=True)
    facts = {**about(plan, model), "dtype": "bfloat16" if bf16 else "float32", "fast": compiled}
    return Bench(plan.name, make_rows(cases, timings), facts)
