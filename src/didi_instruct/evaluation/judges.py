"""Judges: -log p of samples under another language model, one of ours, or the oracle language.

A judge of texts reads them with its own tokenizer, so it can be asked about any sampler. A judge of
tokens has an opinion on sequences of its own tokens alone.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.evaluation.causal_judge import Beyond, Bos, CausalJudge
from didi_instruct.evaluation.scores import Judge, Scores, digest
from didi_instruct.evaluation.token_judges import ARJudge, DiffusionJudge, OracleJudge
from didi_instruct.models.checkpoint import MODEL, is_ours, load_model, read_manifest
from didi_instruct.training.distributed import pick_device
from didi_instruct.training.objectives import make_objective

__all__ = [
    "ARJudge",
    "CausalJudge",
    "DiffusionJudge",
    "Judge",
    "OracleJudge",
    "Scores",
    "open_judge",
]


def usual_batch(device: torch.device) -> int:
    """Texts that a judge reads at once: a GPU has to be given enough to do, and few launches."""
    return 64 if device.type == "cuda" else 16


def open_judge(
    source: str | Path,
    *,
    device: str | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    bos: Bos = "auto",
    temperature: float = 1.0,
    collapse_spaces: bool = False,
    end: str | int | None = None,
    beyond: Beyond = "cut",
    draws: int = 8,
    seed: int = 0,
    trust_remote_code: bool = False,
    name: str | None = None,
) -> Judge:
    """Return the judge that `source` names; a model of ours may have a better name than its folder.

    `oracle`, a directory written by didi (left-to-right or diffusion), or whatever `CausalJudge`
    reads. `batch_size` texts are read at once, as many as fit in any case: by default what suits
    the device. `draws` and `seed` are for the noise of a diffusion model's bound.
    """
    chosen, folder = pick_device(device), Path(source)
    batch_size = usual_batch(chosen) if batch_size is None else batch_size
    if str(source) != "oracle" and not is_ours(folder):
        return CausalJudge(
            source,
            device=chosen,
            batch_size=batch_size,
            max_length=max_length,
            bos=bos,
            temperature=temperature,
            collapse_spaces=collapse_spaces,
            end=end,
            beyond=beyond,
            trust_remote_code=trust_remote_code,
        )
    if (max_length, bos, collapse_spaces, end, beyond) != (None, "auto", False, None, "cut"):
        raise UserError(
            "max_length, bos, collapse_spaces, end and beyond are for judges of texts; "
            f"{source} judges tokens."
        )
    is_causal = str(source) != "oracle" and read_manifest(folder).model.kind == "ar"
    if temperature != 1 and not is_causal:
        raise UserError(f"The judge {source} has no logits to divide: leave its temperature at 1.")
    if str(source) == "oracle":
        return OracleJudge(OracleLanguage.default().to(chosen))
    manifest, loaded = read_manifest(folder), load_model(folder, device=chosen)
    common: dict[str, Any] = {
        "name": name or str(source),
        "fingerprint": digest(manifest.files[MODEL].sha256, asdict(loaded.config)),
        "tokenizer": loaded.tokenizer.hash if loaded.tokenizer else None,
        "batch_size": batch_size,
        "device": chosen,
    }
    if is_causal:
        return ARJudge(loaded.model, loaded.config, temperature=temperature, **common)
    objective = make_objective(loaded.config)
    return DiffusionJudge(
        lambda batch: objective.loss(loaded.model, batch),
        loaded.config,
        draws=draws,
        seed=seed,
        **common,
    )
