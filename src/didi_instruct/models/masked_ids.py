"""The special ids of a masked LM: its mask, what surrounds a text, and what no text contains."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.masked_families import FoundMaskedLM

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
RARE_RESIDUES = "OU"
"""Pyrrolysine and selenocysteine. The other letters of protein vocabularies mean `any` (X), `one of
two` (B, J, Z) or a gap (`.`, `-`): they are notation, not residues."""

_MASKS = ("[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>")
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_ENDS = ("cls", "sep")
_UNUSED = re.compile(r"\[unused\d+\]")


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids as the network knows them."""

    mask: int
    pad: int
    before: tuple[int, ...]
    """What stands before a text."""
    after: tuple[int, ...]
    banned: tuple[int, ...]
    """Never written: special tokens, rows without a token and, of proteins, what is no residue."""


def special_ids(found: FoundMaskedLM, tokenizer: Tokenizer) -> SpecialIds:
    """Derive them from the tokenizer and the settings beside it."""
    names = _special_names(found.path)
    mask = _mask(found, tokenizer, names)
    size, known = found.config.num_tokens, tokenizer.vocabulary
    banned = {mask, *(set(range(size)) - set(known.values()))}
    before: list[int] = []
    after: list[int] = []
    if found.family.frame == "tokenizer":
        word = next(w for w, index in known.items() if index == mask)
        before, after = tokenizer.frame(word)
        if not before and not after:  # a tokenizer.json that was saved without its last step
            before, after = ([known[w]] if (w := names.get(n)) in known else [] for n in _ENDS)
        banned |= {*before, *after, *tokenizer.special_ids}
        banned |= {known[w] for w in names.values() if w in known}
        banned |= _no_text(known)
    elif found.family.frame == "start" and names.get("bos") in known:
        before = [known[names["bos"]]]
        banned |= set(before)
    pad = found.settings.get("pad_token_id")
    if type(pad) is not int or not 0 <= pad < size:
        pad = known.get(names.get("pad", ""), mask)
    return SpecialIds(mask, pad, tuple(before), tuple(after), tuple(sorted(banned)))


def _mask(found: FoundMaskedLM, tokenizer: Tokenizer, names: dict[str, str]) -> int:
    said = found.settings.get("mask_token_id")
    known = tokenizer.vocabulary
    if type(said) is not int:
        said = next((known[w] for w in (names.get("mask", ""), *_MASKS) if w in known), None)
    if said is None or said not in known.values() or said >= found.config.num_tokens:
        raise UserError(
            f"{found.path}: no token is known to be its mask. Name it as `mask_token` in "
            "tokenizer_config.json."
        )
    return int(said)


def _no_text(vocabulary: dict[str, int]) -> set[int]:
    """Return the ids of place holders and, in a vocabulary of residues, of all other letters."""
    spare = {index for word, index in vocabulary.items() if _UNUSED.fullmatch(word)}
    letters = {word for word in vocabulary if len(word) == 1}
    pieces = [word for word in vocabulary if len(word) > 1 and word[0] not in "<["]
    if set(RESIDUES) <= letters and not pieces:
        spare |= {vocabulary[letter] for letter in letters - set(RESIDUES + RARE_RESIDUES)}
    return spare


def _special_names(folder: Path) -> dict[str, str]:
    """Return the words of the special tokens by what they are for, as files beside say."""
    names = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = _read(folder / file)
        for name in _NAMES:
            word = content.get(f"{name}_token")
            word = word.get("content") if isinstance(word, dict) else word
            if isinstance(word, str):
                names[name] = word
    return names


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}. Fetch it again.") from error
    return content if isinstance(content, dict) else {}
