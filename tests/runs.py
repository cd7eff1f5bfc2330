"""What a run has written: its log, its files, its weights."""

import importlib
import json

import torch
from safetensors.torch import load_file

distilling = importlib.import_module("didi_instruct.distill")
"""The module; `didi_instruct.distill` is its function."""
SPEEDS = {"iterations_per_second", "tokens_per_second"}
STATE = "state-00000-of-00001.safetensors"


def entries(folder):
    """The log without what a clock measured."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in SPEEDS} for line in lines]


def contents(folder):
    """Every file of a folder, with its bytes."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def same_tensors(one, another):
    one, another = load_file(one), load_file(another)
    return one.keys() == another.keys() and all(torch.equal(one[n], another[n]) for n in one)
