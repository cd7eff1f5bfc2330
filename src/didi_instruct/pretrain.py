"""Pretraining from a recipe to a folder that `didi.load` opens."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.config.train import PretrainConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.tokenizer import amino_ids, is_protein
from didi_instruct.errors import UserError
from didi_instruct.evaluation.quick_eval import held_out_likelihood
from didi_instruct.models.masked_lm import new_esm
from didi_instruct.seeding import mix
from didi_instruct.training.loop import Loop
from didi_instruct.training.pretrain_task import PretrainTask
from didi_instruct.training.reporting import Reporter
from didi_instruct.training.run_data import PrepareBar, open_run_data, with_lengths
from didi_instruct.training.run_dir import Run, RunResult, open_run, provenance


def pretrain(
    recipe: str | Path | Mapping[str, Any] | PretrainConfig,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
    data_progress: PrepareBar = nullcontext,
) -> RunResult:
    """Train the model of a recipe in the folder `out`; under torchrun, every process calls this."""
    config = load_recipe(PretrainConfig, recipe, overrides)
    # A shape that no model can have is refused before a corpus is tokenised for it.
    vocab_size = config.model.vocab_size
    config.model.resolve(2 if vocab_size is None else max(1, vocab_size - 1))
    with open_run(out, config, resume=resume, device=device, reporter=reporter) as run:
        if run.is_complete:
            return RunResult(**run.end())
        length = config.model.row_length
        data, valid = open_run_data(run, config.data, length=length, progress=data_progress)
        model, network = _model_for(run, config, data), None
        if config.model.family == "esm":
            torch.manual_seed(mix(config.train.seed, "init"))
            network = new_esm(model, data.tokenizer)
        task = PretrainTask(
            config,
            model,
            data,
            run.world,
            network=network,
            curriculum=config.curriculum,
            pass_tokens=config.train.pass_tokens,
        )
        evaluate = held_out_likelihood(task, valid) if valid is not None else None
        loop = Loop(
            task, config.train, run.folder, run.world, reporter=run.reporter, evaluate=evaluate
        )
        notes = []
        if data.length < model.length:
            notes.append(
                f"The data has rows of {data.length} tokens and model.length is {model.length}: "
                "longer texts will be new to the model."
            )
        outcome = loop.run(run.begin(loop, notes))
        if outcome.signal is None:
            task.write_model(run.folder, provenance(config, step=outcome.step))
            run.world.wait()
        return RunResult(**run.end(outcome))


def _model_for(run: Run, config: PretrainConfig, data: TokenSource) -> ModelConfig:
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
    return with_lengths(run, model, data, end_id)
