"""Keys and files of what was drawn and measured.

A key is a hash of plain values that are written out here, one by one: a field that a class gains, a
module that moves or a name that is reworded invalidates nothing. What changes a number has to
change a key: raise a version, or add a value where it differs from its default.

A file is written whole or not at all. Processes that share a folder wait for one another where they
need the same file, and read it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.files import exclusive, no_space_as_user_error, write_atomic
from didi_instruct.evaluation.samples import VERSION as SAMPLES_VERSION
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.hub.sources import AdapterFolder, DidiFolder, Source, find_source
from didi_instruct.models.checkpoint import read_manifest
from didi_instruct.sampling.generate import Request

MEASURES_VERSION = 5
"""Raised where a measure changes, so that old numbers are taken again."""

T = TypeVar("T")


def key(*parts: Any) -> str:
    """Short hash of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def digest(*parts: object) -> str:
    """Hash of values by their representation, bytes as they are."""
    total = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()[:16]


def config_values(config: ModelConfig) -> dict[str, Any]:
    """A model's settings as keys have them; `digest` depends on their order."""
    return {
        "kind": config.kind,
        "layers": config.layers,
        "hidden": config.hidden,
        "heads": config.heads,
        "cond_dim": config.cond_dim,
        "vocab_size": config.vocab_size,
        "masks": config.masks,
        "length": config.length,
        "dropout": config.dropout,
        "time_conditioning": config.time_conditioning,
        "learned_positions": config.learned_positions,
        "end_id": config.end_id,
        "lengths": config.lengths,
        "banned": config.banned,
        "order": config.order,
        "schedule": {"name": config.schedule.name, "eps": config.schedule.eps},
    }


def model_key(source: str | Source, dtype: str | None = None) -> str:
    """Key of all that samples of a SOURCE depend on: weights, settings, tokenizer, discriminator.

    `dtype` is what its weights are rounded to, if they are.
    """
    found = find_source(source)
    if isinstance(found, DidiFolder | AdapterFolder):
        manifest = read_manifest(found.path)
        other = manifest.discriminator and config_values(manifest.discriminator)
        name = key(found.digests(), config_values(manifest.model), other)
    else:
        name = key(found.digests())  # its settings are in a file too
    return name if dtype is None else key(name, dtype)


def samples_key(
    model: str,
    tokenizer: str | None,
    request: Request,
    *,
    sampler: str,
    options: Mapping[str, Any],
    device: str,
    has_path: bool,
    until_eot: bool,
) -> str:
    """Key of samples: of the model, its tokenizer, and the settings that they are drawn with.

    The batch size changes no token, but the cost of the tokens, which is kept with them.
    """
    settings = {
        "num": request.num,
        "steps": request.steps,
        "length": request.length,
        "sampler": sampler,
        "options": options,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "batch_size": request.batch_size,
        "device": device,  # GPUs round otherwise
        "measure_path": has_path,
        # Evaluations give no text and restrict nothing else.
        **dict.fromkeys(("lengths", "prompt", "suffix", "infill", "gap", "tokens", "top_k")),
    }
    return key(SAMPLES_VERSION, model, tokenizer, settings, until_eot)


def content_key(samples: SampleSet) -> str:
    """Key of what is measured; two files of one model and setting may differ in it."""
    log_prob = [] if samples.log_prob is None else samples.log_prob.tolist()
    tables = (samples.tokens.tolist(), samples.lengths.tolist(), log_prob, samples.texts)
    origin = samples.origin
    return key(*tables, origin.tokenizer, origin.sampler, origin.until_eot, origin.ends_with_text)


def measure_key(*values: Any) -> str:
    """Key of a number or of a judge's scores, by all that it depends on beside the samples."""
    return key(MEASURES_VERSION, *values)


def once(
    path: Path,
    make: Callable[[], T],
    *,
    write: Callable[[T], Any],
    read: Callable[[Any], T],
    lasts: Callable[[T], bool] = lambda _: True,
) -> T:
    """Read the JSON value of a file, made and written now if it is missing or damaged.

    A value that does not last is returned, not written.
    """
    value = _read(path, read)
    if value is not None:
        return value
    with no_space_as_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(path):
        value = _read(path, read)  # another process may have made it meanwhile
        if value is None:
            value = make()
            if lasts(value):
                with no_space_as_user_error(path):
                    write_atomic(path, json.dumps(write(value), allow_nan=False).encode())
    return value


def _read(path: Path, read: Callable[[Any], T]) -> T | None:
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
