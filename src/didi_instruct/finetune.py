"""Fine-tuning: any model goes on training, on text or on prompts with answers."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from didi_instruct.adapters.files import save_adapters
from didi_instruct.adapters.lora import adapt
from didi_instruct.config.finetune import FinetuneConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.errors import UserError
from didi_instruct.evaluation.quick_eval import held_out_likelihood
from didi_instruct.hub.sources import LoadOptions, find_source, load_source
from didi_instruct.models.bidirectional import load_bidirectional
from didi_instruct.models.checkpoint import LoadedModel, read_manifest
from didi_instruct.tasks.finetune_data import FinetuneData, held_out_answers, open_finetune_data
from didi_instruct.training.distributed import shard_frozen, shards
from didi_instruct.training.loop import Evaluate, Loop
from didi_instruct.training.pretrain_task import PretrainTask, Save
from didi_instruct.training.reporting import Reporter
from didi_instruct.training.run_data import PrepareBar
from didi_instruct.training.run_dir import Run, RunResult, open_run, provenance

KEPT = ("foreign", "padding")
"""Facts about a model's layout that its fine-tuned form shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneResult(RunResult):
    """State of a fine-tuning when it returns."""

    source: str
    """The model that was fine-tuned."""
    held_out: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Held-out numbers, `before` and `after`, under the same noise; a resumed run keeps both."""


def finetune(
    recipe: str | Path | Mapping[str, Any] | FinetuneConfig,
    *,
    model: str | Path,
    out: str | Path,
    overrides: Sequence[str] = (),
    tokenizer: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
    data_progress: PrepareBar = nullcontext,
) -> FinetuneResult:
    """Go on training `model` (any SOURCE) as a recipe says, in `out`; under torchrun, all call.

    It starts from the averaged weights, and the data is read with its tokenizer; `tokenizer` is for
    a foreign model that brings none.
    """
    if not isinstance(model, (str, Path)):
        raise UserError(f"model is a {type(model).__name__}: give its folder or name.")
    source, config = str(model), load_recipe(FinetuneConfig, recipe, overrides)
    with open_run(out, config, resume=resume, device=device, reporter=reporter) as run:
        if run.is_complete:
            known = read_manifest(run.folder).provenance.get("held_out", {})
            return FinetuneResult(**run.end(), source=source, held_out=known)
        loaded = _open_model(source, tokenizer, config)
        data = open_finetune_data(run, config, loaded, source, data_progress)
        task = _make_task(run, config, loaded, source, data)
        evaluate = _evaluation(task, data)
        loop = Loop(
            task, config.train, run.folder, run.world, reporter=run.reporter, evaluate=evaluate
        )
        start, before = run.begin(loop, _notes(loaded, source, data)), None
        if evaluate is not None and start == 0:
            run.reporter.say("Measuring held-out data before the first step")
            before = evaluate(0, lambda: None)
            run.reporter.measured(0, before)
        outcome = loop.run(start, before)
        found = _held_out(run.folder / "log.jsonl") if run.world.is_main else {}
        if outcome.signal is None:
            task.write_model(run.folder, {"step": outcome.step, "held_out": found})
            run.world.wait()
        return FinetuneResult(**run.end(outcome), source=source, held_out=found)


def _open_model(source: str, tokenizer: str | Path | None, config: FinetuneConfig) -> LoadedModel:
    """The networks of a model, with its tokenizer; weights that learn are in float32."""
    if config.bidirectional:
        if tokenizer is not None:
            raise UserError(f"{source} has its own tokenizer: leave out `tokenizer`.")
        return load_bidirectional(find_source(source).path, torch.float32, config.data.length)
    dtype = None if config.lora.rank else torch.float32
    loaded = load_source(source, LoadOptions(dtype=dtype, tokenizer=tokenizer))
    if loaded.tokenizer is None:
        raise UserError(f"{source} brings no tokenizer: name the one it was trained with.")
    return loaded


def _make_task(
    run: Run, config: FinetuneConfig, loaded: LoadedModel, source: str, data: FinetuneData
) -> PretrainTask:
    """The task of a run: a copy of the model, its objective, and where it comes from."""
    mark, network = find_source(source).fingerprint(), cast("Any", loaded.model)
    save: Save | None = None
    settings = config
    if config.lora.rank:
        if shards(config.train, run.world):
            shard_frozen(network, run.world)
        # Adapters are small: each process has them whole.
        settings = replace(config, train=replace(config.train, strategy="ddp"))
        given = {"source": source, "fingerprint": mark}
        network = adapt(network, config.lora, seed=config.train.seed, **given)

        def save(folder: Path, state: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
            save_adapters(folder, network, state, facts)

    else:
        network = copy.deepcopy(network)  # tensors of a loaded model are views of its file
    network.config = data.model
    network.requires_grad_(True)
    known = loaded.provenance
    origin = {"source": source, "sha256": mark, "provenance": known}
    kept = {name: known[name] for name in KEPT if name in known}
    return PretrainTask(
        settings,
        data.model,
        data.rows,
        run.world,
        network=network,
        objective=data.objective,
        identity={"model": mark},
        provenance=provenance(config, finetuned_from=origin) | kept,
        save=save,
    )


def _evaluation(task: PretrainTask, data: FinetuneData) -> Evaluate | None:
    """Held-out numbers of the averaged model, under the same noise each time."""
    if data.valid is None:
        return None
    if data.measured is None:
        return held_out_likelihood(task, data.valid)
    return held_out_answers(task, data.valid, data.measured)


def _notes(loaded: LoadedModel, source: str, data: FinetuneData) -> Iterator[str]:
    yield from data.notes
    if loaded.discriminator is not None:
        yield f"The discriminator of {source} is left out: it knows the model as it was."
    if data.valid is None:
        yield "Nothing is held out (data.valid): no evaluations."


def _held_out(log: Path) -> dict[str, dict[str, float]]:
    """Held-out numbers of a log: those before the first step, and the last ones."""
    lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    found = [{k: v for k, v in line.items() if k.startswith("valid_")} for line in lines]
    found = [numbers for numbers in found if numbers]
    return {"before": found[0], "after": found[-1]} if found else {}
