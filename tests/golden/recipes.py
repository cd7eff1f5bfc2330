"""Shipped recipes with every setting that they leave open."""

import hashlib
import json
from dataclasses import asdict

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.pretrain import PretrainConfig
from didi_instruct.config.recipes import load_recipe, recipe_names
from didi_instruct.errors import UserError


def hashes() -> dict[str, str]:
    """A hash of each recipe's settings by its name."""
    return {name: _hash(name) for name in recipe_names()}


def _hash(name: str) -> str:
    try:
        settings = asdict(load_recipe(PretrainConfig, name))
    except UserError:
        # Some leave it to their user to name the data.
        settings = asdict(load_recipe(DistillConfig, name, ["data.source=oracle"]))
    content = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
