"""Denoisers from causal LMs: attention made bidirectional, and a mask added to the vocabulary.

What comes out is no denoiser yet: it has to learn to predict masks from both sides (`didi
finetune`). Its outputs stay those for the next position, which is what the network knows.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from didi_instruct.errors import UserError
from didi_instruct.models.causal_lm import CAUSAL, FOREIGN, never_written
from didi_instruct.models.checkpoint import CONFIG, LoadedModel, read_object
from didi_instruct.models.masked_lm import FoundMaskedLM, model_config, open_weights, tokenizer_of
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.models.native import build_network, silence
from didi_instruct.models.tensor_files import shown_value

LENGTH = 1024
"""Tokens of a text, where nobody says and positions reach so far."""


def load_bidirectional(
    folder: Path, dtype: torch.dtype | None = None, length: int | None = None
) -> LoadedModel:
    """Read a causal LM of `transformers` as a denoiser of texts of up to `length` tokens."""
    settings = _settings(folder)
    model_type = settings["model_type"]
    config = model_config(folder / CONFIG, CAUSAL[model_type], settings)
    longest, wanted = config.length, length or min(config.length, LENGTH)
    if wanted > longest:
        raise UserError(
            f"{folder} has positions for {longest} tokens: a length of {wanted} is too long."
        )
    found = FoundMaskedLM(folder, model_type, "", config, settings)
    weights, tokenizer = open_weights(found), tokenizer_of(folder)
    mask = config.num_tokens  # a row of the network's embedding that comes behind all others
    if tokenizer.size > mask:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.size} ids and the network {mask}: fetch both "
            "again."
        )
    network: Any = build_network(folder, settings, weights, dtype)
    with silence(), torch.no_grad():
        network.resize_token_embeddings(mask + 1, mean_resizing=False)
        for part in (network.get_input_embeddings(), network.get_output_embeddings()):
            part.weight[mask] = part.weight[:mask].mean(0, dtype=torch.float32)
    config = replace(config, vocab_size=mask + 2, length=wanted)
    ids = never_written(folder, settings, mask + 1, tokenizer, mask)
    model = MaskedLM(network, config, ids, replace(CAUSAL[model_type], shifted=True)).eval()
    notes = ["A causal LM, whose attention was made bidirectional."]
    origin = {"source": str(folder), "layout": "causal-lm", "weights": "only", "notes": notes}
    return LoadedModel(model, config, tokenizer, None, {"foreign": origin})


def _settings(folder: Path) -> dict[str, Any]:
    """config.json of a causal LM whose attention can be made bidirectional."""
    settings = read_object(folder / CONFIG) if folder.is_dir() else {}
    model_type = settings.get("model_type")
    if model_type in FOREIGN:
        raise UserError(f"{folder} is bidirectional already: leave out `bidirectional`.")
    if model_type not in CAUSAL:
        raise UserError(
            f"{folder}: bidirectional=true is for causal LMs of transformers whose config.json has "
            f"`model_type` {' or '.join(CAUSAL)}, and it has {shown_value(model_type)}."
        )
    odd = next((n for n in ("auto_map", "use_sliding_window") if settings.get(n)), None)
    if odd is not None:
        what = {"auto_map": "code of its own, which is never run"}.get(odd, "a sliding window")
        raise UserError(f"{folder / CONFIG}: `{odd}` asks for {what}: use another model.")
    return {"tie_word_embeddings": False, **settings}
