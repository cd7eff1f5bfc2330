"""Fine-tuning: any model goes on training, on text or on prompts with answers."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from didi_instruct import __version__
from didi_instruct.adapters.files import save_adapters
from didi_instruct.adapters.lora import adapt
from didi_instruct.config.finetune import FinetuneConfig
from didi_instruct.errors import UserError
from didi_instruct.evaluation.quick_eval import held_out_likelihood
from didi_instruct.hub.sources import LoadOptions, find_source, load_source
from didi_instruct.models.bidirectional import load_bidirectional
from didi_instruct.models.checkpoint import LoadedModel, read_manifest
from didi_instruct.tasks.finetune_data import FinetuneData, held_out_answers, open_finetune_data
from didi_instruct.training.distributed import World, open_world
from didi_instruct.training.loop import Evaluate, Loop, Outcome
from didi_instruct.training.pretrain_task import PretrainTask, Save
from didi_instruct.training.reporting import Reporter
from didi_instruct.training.run_data import PrepareBar
from didi_instruct.training.run_dir import (
    check_folder,
    check_held,
    configure,
    nothing_to_do,
    only_run,
    start_of,
)

KEPT = ("foreign", "padding")
"""Facts about a model's layout that its fine-tuned form shares."""


@dataclass(frozen=True, slots=True)
class FinetuneResult:
    """Where a run stands when it returns."""

    folder: Path
    outcome: Outcome
    is_main: bool
    """True in the process that reports."""
    source: str
    """The model that was fine-tuned."""
    new: bool = True
    """False where a resumed run had finished, so that nothing was trained."""
    held_out: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Held-out numbers, `before` and `after`, under the same noise; a resumed run keeps both."""

    @property
    def finished(self) -> bool:
        """True if all steps are done and the model is in `folder`."""
        return self.outcome.signal is None


def finetune(
    recipe: str | Mapping[str, Any] | FinetuneConfig,
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
    """Go on training `model` (any SOURCE) as the recipe says, in `out`; under torchrun, all call.

    It starts from the averaged weights, and the data is read with its tokenizer; `tokenizer` is for
    a foreign model that brings none.
    """
    if not isinstance(model, (str, Path)):
        raise UserError(f"model is a {type(model).__name__}: give its folder or name.")
    folder, source = Path(out), str(model)
    config = configure(FinetuneConfig, recipe, overrides)
    verb = f"didi finetune RECIPE --model {source}"
    check_folder(folder, config, resume, verb=verb)
    loaded = _open_model(source, tokenizer, config)
    with open_world(device) as world, only_run(folder, world):
        changes = check_held(folder, config, resume, world, verb=verb)
        shown = reporter if world.is_main and reporter else Reporter()
        if nothing_to_do(folder, config.iterations, resume, shown.say):
            outcome = Outcome(config.iterations, None, None)
            known = read_manifest(folder).provenance.get("held_out", {})
            return FinetuneResult(folder, outcome, world.is_main, source, False, known)
        data = open_finetune_data(config, loaded, source, folder, world, data_progress)
        task = _make_task(config, loaded, source, data, world)
        evaluate = _evaluator(task, data)
        loop = Loop(task, config.train, folder, world, reporter=shown, evaluate=evaluate)
        start = start_of(loop, config, changes, resume)
        for note in _notes(config, loaded, source, data, world):
            shown.say(note)
        before = None
        if evaluate is not None and start == 0:
            shown.say("Measuring held-out data before the first step")
            before = evaluate(0, lambda: None)
            shown.measured(0, before)
        outcome = loop.run(start, before)
        found = _held_out(folder / "log.jsonl") if world.is_main else {}
        if outcome.signal is None:
            task.write_model(folder, {"step": outcome.step, "held_out": found})
            world.wait()
    return FinetuneResult(folder, outcome, world.is_main, source, held_out=found)


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
    config: FinetuneConfig, loaded: LoadedModel, source: str, data: FinetuneData, world: World
) -> PretrainTask:
    """The task of a run: a copy of the model, its objective, and where it comes from."""
    mark, network = find_source(source).fingerprint(), cast("Any", loaded.model)
    save: Save | None = None
    if config.lora.rank:
        given = {"source": source, "fingerprint": mark}
        network = adapt(network, config.lora, seed=config.train.seed, **given)

        def save(folder: Path, state: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
            save_adapters(folder, network, state, facts)

    else:
        network = copy.deepcopy(network)  # tensors of a loaded model are views of its file
    network.config = data.model
    network.requires_grad_(True)
    origin = {"source": source, "sha256": mark, "provenance": loaded.provenance}
    provenance = {
        "recipe": asdict(config),
        "finetuned_from": origin,
        "didi_instruct": __version__,
        "torch": torch.__version__,
        **{name: loaded.provenance[name] for name in KEPT if name in loaded.provenance},
    }
    return PretrainTask(
        config,
        data.model,
        data.rows,
        world,
        network=network,
        objective=data.objective,
        identity={"model": mark},
        provenance=provenance,
        save=save,
    )


def _evaluator(task: PretrainTask, data: FinetuneData) -> Evaluate | None:
    """Held-out numbers of the averaged model, under the same noise each time."""
    if data.valid is None:
        return None
    if data.measured is None:
        return held_out_likelihood(task, data.valid)
    return held_out_answers(task, data.valid, data.measured)


def _notes(
    config: FinetuneConfig, loaded: LoadedModel, source: str, data: FinetuneData, world: World
) -> Iterator[str]:
    """Say what was done to the data, and what has no effect here."""
    train = config.train
    yield from data.notes
    if loaded.discriminator is not None:
        yield f"The discriminator of {source} is left out: it knows the model as it was."
    if data.valid is None:
        yield "Nothing is held out (data.valid): no evaluations."
    if train.strategy == "fsdp" and world.size == 1:
        yield "train.strategy=fsdp shards over processes, and there is one: it has no effect."
    elif train.checkpoints == "sharded" and train.strategy == "ddp":
        yield "train.checkpoints=sharded goes with train.strategy=fsdp: it has no effect."


def _held_out(log: Path) -> dict[str, dict[str, float]]:
    """Held-out numbers of a log: those before the first step, and the last ones."""
    found = []
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        numbers = {name: value for name, value in entry.items() if name.startswith("valid_")}
        if numbers:
            found.append(numbers)
    return {"before": found[0], "after": found[-1]} if found else {}
