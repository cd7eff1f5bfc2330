"""A masked LM of `transformers` as a network of masked diffusion.

It predicts masked tokens from visible ones, which is all that masked diffusion without time
conditioning asks for. The wrapper maps our mask, an extra last id, to the network's own, puts
special tokens around each text, and gives probability 0 to what is never text.
"""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.foreign.special_ids import NEVER
from didi_instruct.models.layers import upcast
from didi_instruct.models.network import Mixture, Modulations

ESM_MASKED = 0.15 * 0.8
"""Share of tokens that ESM saw as masks in training."""


_MASKS = ("[MASK]", "<mask>", "<|mask|>")
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_UNUSED = re.compile(r"\[unused\d+\]")

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
RARE_RESIDUES = "OU"
"""Pyrrolysine and selenocysteine. The other letters of protein vocabularies mean `any` (X), `one of
two` (B, J, Z) or a gap (`.`, `-`): they are notation, not residues."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Parts of a `…ForMaskedLM`, by the names of its attributes."""

    trunk: str
    """The transformer, without output layer."""
    head: tuple[str, ...]
    """Parts of the output layer, in order."""
    blocks: str = "encoder.layer"
    """Layers of the trunk."""
    unused: tuple[str, ...] = ()
    """Parts of the trunk that have no effect on logits."""
    counts_from_padding: bool = False
    """Positions are numbered from the padding id + 1, as in fairseq's models."""
    embeds_apart: bool = False
    """The trunk's `inputs_embeds` bypass its `embeddings`: neither positions nor norm are added."""


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Special ids of the network."""

    mask: int
    pad: int
    before: tuple[int, ...]
    """Special tokens before a text."""
    after: tuple[int, ...]
    banned: tuple[int, ...]
    """Never written: special tokens, rows without a token and, of proteins, what is no residue."""


class MaskedLM(nn.Module):
    """Denoiser around `network`, a masked LM; ids of real tokens are its own.

    ESM's `token_dropout` stays as config.json says. With it, embeddings of masks are zero, and
    visible ones are scaled by (1 - 0.12) / (1 - share of masks in the framed text). ESM-2 and DPLM
    were trained so. The frame is always visible, so a text of masks alone divides by no zero.
    """

    splits: bool = False
    before: Tensor
    after: Tensor
    banned: Tensor

    def __init__(
        self, network: nn.Module, config: ModelConfig, ids: SpecialIds, family: Family
    ) -> None:
        super().__init__()
        self.network = network
        self.config, self.ids, self.family, self.align = config, ids, family, 1
        settings: Any = network.config
        self.padding: int = settings.pad_token_id
        self.hides_masks = bool(family.embeds_apart and settings.token_dropout)
        for name in ("before", "after", "banned"):
            values = torch.tensor(getattr(ids, name), dtype=torch.long)
            self.register_buffer(name, values, persistent=False)
        for name in family.unused:
            _freeze(self._trunk.get_submodule(name))

    @property
    def blocks(self) -> nn.ModuleList:
        """Layers of the transformer."""
        return cast("nn.ModuleList", self._trunk.get_submodule(self.family.blocks))

    @property
    def vectors(self) -> Tensor:
        """(vocab_size, d) word embeddings, the mask's last; zero where ESM hides masks."""
        words, mask = self._words.weight, self.ids.mask
        own = words[mask : mask + 1]
        if self.hides_masks:
            own = torch.zeros_like(own)
        return torch.cat([words[:mask], own, words[mask + 1 :], own])

    def embed(
        self, tokens: Tensor, attended: Tensor | None = None, mixture: Mixture | None = None
    ) -> Tensor:
        """Embed the framed text: (B, L) -> (B, L + frame, d). A mixture counts as visible."""
        ids = self._framed(tokens, attended)
        x: Tensor = self._words(ids)
        hidden = ids == self.ids.mask
        if mixture is not None:
            assert mixture.at is not None, "soft tokens stand in place of some tokens, not of all"
            row, column = mixture.at // tokens.shape[1], mixture.at % tokens.shape[1]
            at = row * ids.shape[1] + len(self.before) + column
            x = x.flatten(0, 1).index_copy(0, at, mixture.vectors.to(x.dtype)).view_as(x)
            hidden = hidden.flatten().index_fill(0, at, False).view_as(hidden)
        if not self.family.embeds_apart:
            return x
        seen = self._seen(attended)
        if self.hides_masks:
            x = x.masked_fill(hidden[..., None], 0.0)
            share = hidden.sum(-1).float() / (ids.shape[1] if seen is None else seen.sum(-1))
            x = (x * (1 - ESM_MASKED) / (1 - share)[:, None, None]).to(x.dtype)
        positions = self._positions(seen)
        embedded: Tensor = self._trunk.embeddings(
            inputs_embeds=x, attention_mask=seen, position_ids=positions
        )
        return embedded

    def modulations(self, sigma: Tensor | float | None = None) -> Modulations | None:
        """None: the network is not told the time."""
        return None

    def constants(self) -> Modulations | None:
        """None: there are no modulations."""
        return None

    def trunk(
        self,
        x: Tensor,
        mods: Modulations | None = None,
        attended: Tensor | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """State at the text's positions: embeddings (B, L + frame, d) -> (B, L, d), float32."""
        assert start == 0, "its blocks are not run in parts"
        assert stop is None, "its blocks are not run in parts"
        seen = self._seen(attended)
        positions = None
        if self.family.counts_from_padding and not self.family.embeds_apart:
            positions = self._positions(seen)
        arguments = {} if positions is None else {"position_ids": positions}
        states = self._trunk(inputs_embeds=x, attention_mask=seen, **arguments)[0]
        return upcast(states[:, len(self.before) : x.shape[1] - len(self.after)])

    def head(self, hidden: Tensor, mods: Modulations | None = None) -> Tensor:
        """Logits (..., V) of the real tokens from states (..., d); banned ids at `NEVER`."""
        network: Any = self.network
        logits = hidden.to(network.get_output_embeddings().weight.dtype)
        for name in self.family.head:
            logits = getattr(network, name)(logits)
        logits = logits.index_fill(-1, self.banned, NEVER)
        extra = -logits.shape[-1] % self.align
        return F.pad(logits, (0, extra), value=NEVER) if extra else logits

    def forward(
        self, tokens: Tensor, sigma: Tensor | float | None = None, attended: Tensor | None = None
    ) -> Tensor:
        """Logits (B, L, V); attended (B, L), None: all."""
        hidden = self.trunk(self.embed(tokens, attended), None, attended)
        return self.head(hidden)[..., : self.config.num_tokens]

    def without_head(self) -> "MaskedLM":
        """Copy of the trunk alone, for a network with another head."""
        twin = copy.deepcopy(self)
        for name in self.family.head:
            setattr(twin.network, name, None)
        for name in self.family.unused:
            setattr(twin._trunk, name, None)
        return twin

    @property
    def _trunk(self) -> Any:
        return getattr(self.network, self.family.trunk)

    @property
    def _words(self) -> Any:
        return self._trunk.get_input_embeddings()

    def _framed(self, tokens: Tensor, attended: Tensor | None) -> Tensor:
        """Ids (B, L + frame) with special tokens around each text."""
        text = tokens.masked_fill(tokens == self.config.vocab_size - 1, self.ids.mask)
        before, after = (part.expand(len(tokens), -1) for part in (self.before, self.after))
        if attended is None:
            return torch.cat([before, text, after], 1)
        text = text.masked_fill(~attended, self.ids.pad)
        ids = torch.cat([before, text, torch.full_like(after, self.ids.pad)], 1)
        return ids.scatter(1, self._ends(attended), after)

    def _seen(self, attended: Tensor | None) -> Tensor | None:
        """Attention mask (B, L + frame) of the framed text; None: all."""
        if attended is None:
            return None
        seen = F.pad(attended.long(), (len(self.before), 0), value=1)
        seen = F.pad(seen, (0, len(self.after)))
        return seen.scatter(1, self._ends(attended), 1)

    def _ends(self, attended: Tensor) -> Tensor:
        """Positions (B, ·) of the closing special tokens, right after each text's last token."""
        numbers = torch.arange(1, attended.shape[1] + 1, device=attended.device)
        end = (attended * numbers).amax(1, keepdim=True) + len(self.before)
        return end + torch.arange(len(self.after), device=attended.device)

    def _positions(self, seen: Tensor | None) -> Tensor | None:
        """Numbers of the positions as fairseq counts them; None: one after the other."""
        if seen is None:
            return None
        return seen.cumsum(1) * seen + self.padding


def _freeze(part: nn.Module) -> None:
    """Make buffers of parameters: they are kept and saved, and no gradient is expected of them."""
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())


def special_ids(
    folder: Path, settings: Mapping[str, Any], size: int, tokenizer: Tokenizer
) -> SpecialIds:
    """Derive special ids of a network with `size` ids from its config.json and tokenizer."""
    known = tokenizer.vocabulary
    names = _special_tokens(folder)
    mask = settings.get("mask_token_id")
    if type(mask) is not int:
        mask = next((known[w] for w in (names.get("mask", ""), *_MASKS) if w in known), None)
    if mask is None or mask not in known.values() or mask >= size:
        raise UserError(
            f"{folder}: no token is known to be its mask. Name it as `mask_token` in "
            "tokenizer_config.json."
        )
    before, after = tokenizer.frame(next(w for w, index in known.items() if index == mask))
    if not before and not after:  # a tokenizer.json that was saved without its last step
        before, after = ([known[w]] if (w := names.get(n)) in known else [] for n in ("cls", "sep"))
    unknown = set(range(size)) - set(known.values())
    named = {known[word] for word in names.values() if word in known}
    banned = {mask, *before, *after, *tokenizer.special_ids, *unknown, *named, *_no_text(known)}
    pad = settings.get("pad_token_id")
    if type(pad) is not int or not 0 <= pad < size:
        pad = known.get(names.get("pad", ""), mask)
    return SpecialIds(mask, pad, tuple(before), tuple(after), tuple(sorted(banned)))


def _no_text(vocabulary: Mapping[str, int]) -> set[int]:
    """Ids of place holders and, in a vocabulary of residues, of all other letters."""
    spare = {index for word, index in vocabulary.items() if _UNUSED.fullmatch(word)}
    letters = {word for word in vocabulary if len(word) == 1}
    pieces = [word for word in vocabulary if len(word) > 1 and word[0] not in "<["]
    if set(RESIDUES) <= letters and not pieces:
        spare |= {vocabulary[letter] for letter in letters - set(RESIDUES + RARE_RESIDUES)}
    return spare


def _special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by their roles, as the tokenizer's settings name them."""
    names = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_json(folder / file)
        for name in _SPECIAL:
            word = content.get(f"{name}_token")
            word = word.get("content") if isinstance(word, dict) else word
            if isinstance(word, str):
                names[name] = word
    return names


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}. Fetch it again.") from error
    return content if isinstance(content, dict) else {}
