"""Pretraining from a recipe to a folder that `didi.load` opens."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from didi_instruct import __version__
from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import PretrainConfig
from didi_instruct.data.alphabet import amino_ids, is_protein
from didi_instruct.data.dataset import TokenSource
from didi_instruct.errors import UserError
from didi_instruct.evaluation.quick_eval import held_out_likelihood
from didi_instruct.models.masked_lm import new_esm
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.seeding import mix
from didi_instruct.training.distributed import World, open_world
from didi_instruct.training.loop import Loop, Outcome
from didi_instruct.training.pretrain_task import PretrainTask
from didi_instruct.training.reporting import Reporter
from didi_instruct.training.run_data import PrepareBar, open_data_together, with_lengths
from didi_instruct.training.run_dir import (
    check_folder,
    check_held,
    configure,
    nothing_to_do,
    only_run,
    start_of,
)


@dataclass(frozen=True, slots=True)
class PretrainResult:
    """Where a run stands when it returns."""

    folder: Path
    outcome: Outcome
    is_main: bool
    """Whether this is the process that reports."""
    new: bool = True
    """Whether something was trained; False where a resumed run had finished."""

    @property
    def finished(self) -> bool:
        """Whether all steps are done and the model is in `folder`."""
        return self.outcome.signal is None


def pretrain(
    recipe: str | Mapping[str, Any] | PretrainConfig,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
    data_progress: PrepareBar = nullcontext,
) -> PretrainResult:
    """Train what the recipe says in the folder `out`; under torchrun, every process calls this."""
    folder = Path(out)
    config = configure(PretrainConfig, recipe, overrides)
    check_folder(folder, config, resume, verb="didi pretrain RECIPE")
    # A shape that no model can have is refused before a corpus is tokenised for it.
    vocab_size = config.model.vocab_size
    config.model.resolve(2 if vocab_size is None else max(1, vocab_size - 1))
    with open_world(device) as world, only_run(folder, world):
        changes = check_held(folder, config, resume, world, verb="didi pretrain RECIPE")
        shown = reporter if world.is_main and reporter else Reporter()
        if nothing_to_do(folder, config.iterations, resume, shown.say):
            outcome = Outcome(config.iterations, None, None)
            return PretrainResult(folder, outcome, world.is_main, new=False)
        length, seed = config.model.row_length, config.train.seed
        data, valid = open_data_together(
            config.data, folder, world, data_progress, length=length, seed=seed
        )
        model = _model_of(config, data)
        task = PretrainTask(
            config,
            model,
            data,
            world,
            network=_network(config, model, data),
            curriculum=config.curriculum,
            pass_tokens=config.train.pass_tokens,
        )
        evaluate = held_out_likelihood(task, valid) if valid is not None else None
        loop = Loop(task, config.train, folder, world, reporter=shown, evaluate=evaluate)
        start = start_of(loop, config, changes, resume)
        for note in _notes(config, task.model_config, data, world):
            shown.say(note)
        outcome = loop.run(start)
        if outcome.signal is None:
            task.write_model(folder, _provenance(config, outcome))
            world.wait()
    return PretrainResult(folder, outcome, world.is_main)


def _model_of(config: PretrainConfig, data: TokenSource) -> ModelConfig:
    """The model for some data; where each text has its own window, with the law of lengths."""
    model = config.model.resolve(data.num_tokens)
    proteins = is_protein(data.tokenizer.vocabulary)
    if config.model.family == "esm":
        if not proteins:
            raise UserError(
                "model.family esm is for proteins: use data.tokenizer=esm, or leave it out."
            )
        model = replace(model, cond_dim=1)  # it knows no time
    if proteins and not config.model.own_window:
        raise UserError(
            "The data are proteins, which are apart from each other: set model.own_window=true and "
            "data.rows=document."
        )
    if not config.model.own_window:
        return model
    end_id = data.tokenizer.eot_id
    if end_id is None or data.num_sequences is None:
        raise UserError(
            "model.own_window needs texts that end in an end-of-text token: use data.source with "
            "data.rows=document, or leave it out."
        )
    if proteins:
        drawn = amino_ids(data.tokenizer.vocabulary) | ({end_id} if model.kind == "ar" else set())
        model = replace(model, banned=tuple(sorted(set(range(model.num_tokens)) - drawn)))
    return with_lengths(model, data, end_id)


def _network(config: PretrainConfig, model: ModelConfig, data: TokenSource) -> MaskedLM | None:
    """A fresh network of another family than ours; None: ours."""
    if config.model.family == "dit":
        return None
    torch.manual_seed(mix(config.train.seed, "init"))
    return new_esm(model, data.tokenizer)


def _notes(
    config: PretrainConfig, model: ModelConfig, data: TokenSource, world: World
) -> Iterator[str]:
    """Say what has no effect here."""
    train = config.train
    if data.length < model.length:
        yield (
            f"The data has rows of {data.length} tokens and model.length is {model.length}: "
            "longer texts will be new to the model."
        )
    if train.strategy == "fsdp" and world.size == 1:
        yield "train.strategy=fsdp shards over processes, and there is one: it has no effect."
    elif train.checkpoints == "sharded" and train.strategy == "ddp":
        yield "train.checkpoints=sharded goes with train.strategy=fsdp: it has no effect."


def _provenance(config: PretrainConfig, outcome: Outcome) -> dict[str, Any]:
    return {
        "recipe": asdict(config),
        "step": outcome.step,
        "didi_instruct": __version__,
        "torch": torch.__version__,
    }
