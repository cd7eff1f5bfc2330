"""Masked LMs as folders that `transformers` reads: weights, settings, tokenizer."""

import json
from dataclasses import asdict
from pathlib import Path

from didi_instruct.data.files import write_atomic
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import CONFIG, read_object
from didi_instruct.models.foreign.folders import new_folder
from didi_instruct.models.masked_lm import OWN, OwnSettings, silence
from didi_instruct.models.masked_network import MaskedLM

_ESM_SPECIAL = {
    "cls_token": "<cls>",
    "eos_token": "<eos>",
    "mask_token": "<mask>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


def save_masked_lm(model: MaskedLM, tokenizer: Tokenizer, folder: str | Path) -> Path:
    """Write a folder that `load_masked_lm` and `transformers` read: new, or empty.

    How texts end, the law of their lengths and the order of a student stand in config.json under a
    key of our own, which transformers keeps and leaves alone.
    """
    if model.config.masks > 1:
        raise UserError(
            f"{folder}: a folder of transformers has one mask, and the model {model.config.masks} "
            "(mixture steps)."
        )
    with new_folder(Path(folder)) as hidden, silence():
        for name, content in _tokenizer_files(tokenizer, model.record.settings).items():
            write_atomic(hidden / name, content)
        # Else transformers undoes renamings that never were: ESM's norms would get old names.
        model.network.save_pretrained(hidden, save_original_format=False)
        own = OwnSettings.of(model.config)
        if own != OwnSettings():
            settings = read_object(hidden / CONFIG) | {OWN: asdict(own)}
            write_atomic(hidden / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())
    return Path(folder)


def _tokenizer_files(tokenizer: Tokenizer, settings: dict[str, object]) -> dict[str, bytes]:
    """Files of a tokenizer by name: of ESM's vocabulary those of public ESM-2 and DPLM folders."""
    words = sorted(tokenizer.vocabulary, key=tokenizer.vocabulary.__getitem__)
    numbered = [tokenizer.vocabulary[word] for word in words] == list(range(len(words)))
    if (
        settings.get("model_type") != "esm"
        or not numbered
        or not {*_ESM_SPECIAL.values()} <= {*words}
    ):
        return tokenizer.files()
    named = {"tokenizer_class": "EsmTokenizer", **_ESM_SPECIAL}
    return {
        "vocab.txt": "\n".join(words).encode(),
        "special_tokens_map.json": (json.dumps(_ESM_SPECIAL, indent=2) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(named, indent=2) + "\n").encode(),
    }
