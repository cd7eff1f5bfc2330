"""A masked LM of `transformers` as a network of masked diffusion.

It predicts masked tokens from visible ones, which is all that masked diffusion without time
conditioning asks for. So does a causal LM whose attention is bidirectional (`causal_lm.py`), for
the same position or for the next one. The wrapper maps our masks, extra last ids, to the network's
own, puts special tokens around each text, and gives probability 0 to what is never text.
"""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer, amino_ids, is_protein
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import read_object
from didi_instruct.models.foreign.special_ids import BANNED
from didi_instruct.models.layers import upcast
from didi_instruct.models.network import Mixture, Modulations, NetworkRecord, all_logits
from didi_instruct.process.masking import before_end

ESM_MASKED = 0.15 * 0.8  # share of tokens that ESM saw as masks in training

_MASKS = ("[MASK]", "<mask>", "<|mask|>")
_UNUSED = re.compile(r"\[unused\d+\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Parts of a `…ForMaskedLM` or `…ForCausalLM`, by the names of its attributes."""

    trunk: str  # the transformer, without output layer
    head: tuple[str, ...]  # parts of the output layer, in order
    blocks: str = "encoder.layer"  # layers of the trunk
    unused: tuple[str, ...] = ()  # parts of the trunk that have no effect on logits
    counts_from_padding: bool = False  # positions start at the padding id + 1, as in fairseq
    embeds_apart: bool = False  # `inputs_embeds` lack the positions and norm of `embeddings`
    ends: bool = False  # its texts end with a token, and do not fill their window
    shifted: bool = False  # its outputs are for the next position, as those of a causal LM


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Special ids of the network."""

    mask: int
    pad: int
    before: tuple[int, ...]  # special tokens before a text
    after: tuple[int, ...]
    banned: tuple[int, ...]  # never written: special tokens, unused rows, notation of proteins


class MaskedLM(nn.Module):
    """Denoiser around `network`, a masked LM; ids of real tokens are its own.

    ESM's `token_dropout` stays as config.json says. With it, embeddings of masks are zero, and
    visible ones are scaled by (1 - 0.12) / (1 - share of masks in the framed text). ESM-2 and DPLM
    were trained so. The frame is always visible, so a text of masks alone divides by no zero.
    """

    splits: bool = False
    reads_fill: bool = False
    network: Any
    codes: nn.Parameter | None  # (masks, d), added to the embeddings of several masks
    before: Tensor
    after: Tensor
    banned: Tensor

    def __init__(
        self, network: nn.Module, config: ModelConfig, ids: SpecialIds, family: Family
    ) -> None:
        super().__init__()
        self.network = network
        self.config, self.ids, self.family, self.align = config, ids, family, 1
        self.padding: int = self.network.config.pad_token_id
        self.hides_masks = bool(family.embeds_apart and self.network.config.token_dropout)
        self.register_parameter("codes", None)
        for name in ("before", "after", "banned"):
            values = torch.tensor(getattr(ids, name), dtype=torch.long)
            self.register_buffer(name, values, persistent=False)
        for name in family.unused:
            _freeze(self._trunk.get_submodule(name))

    @property
    def record(self) -> NetworkRecord:
        settings = json.loads(self.network.config.to_json_string(use_diff=False))
        ids = self.ids
        return NetworkRecord(
            settings=settings,
            mask=ids.mask,
            pad=ids.pad,
            before=ids.before,
            after=ids.after,
            banned=ids.banned,
            shifted=self.family.shifted,
        )

    @property
    def blocks(self) -> nn.ModuleList:
        return self._trunk.get_submodule(self.family.blocks)

    @property
    def vectors(self) -> Tensor:
        """(vocab_size, d) word embeddings, the masks' last; zero where ESM hides masks."""
        words, mask = self._words.weight, self.ids.mask
        own = words[mask : mask + 1]
        if self.hides_masks:
            own = torch.zeros_like(own)
        masks = own if self.codes is None else own + self.codes
        return torch.cat([words[:mask], own, words[mask + 1 :], masks])

    def embed(
        self, tokens: Tensor, attended: Tensor | None = None, mixture: Mixture | None = None
    ) -> Tensor:
        """Embed the framed text: (B, L) -> (B, L + frame, d). A mixture counts as visible."""
        attended = self.attention(tokens, attended)
        ids, start = self._framed(tokens, attended), len(self.before)
        x: Tensor = self._words(ids)
        hidden = ids == self.ids.mask
        if self.hides_masks:
            x = x.masked_fill(hidden[..., None], 0.0)
        if self.codes is not None:
            code = F.pad(tokens - self.config.num_tokens, (start, len(self.after)))
            # What is no mask takes the last row, which is 0.
            x = x + F.pad(self.codes, (0, 0, 0, 1))[code.masked_fill(~hidden, -1)]
        if mixture is not None:
            assert mixture.at is not None, "soft tokens stand in place of some tokens, not of all"
            row, column = mixture.at // tokens.shape[1], mixture.at % tokens.shape[1]
            at = row * ids.shape[1] + start + column
            x = x.flatten(0, 1).index_copy(0, at, mixture.vectors.to(x.dtype)).view_as(x)
            hidden = hidden.flatten().index_fill(0, at, False).view_as(hidden)
        if not self.family.embeds_apart:
            return x
        seen = self._seen(attended)
        if self.hides_masks:
            share = hidden.sum(-1).float() / (ids.shape[1] if seen is None else seen.sum(-1))
            x = (x * (1 - ESM_MASKED) / (1 - share)[:, None, None]).to(x.dtype)
        positions = self._positions(seen)
        return self._trunk.embeddings(inputs_embeds=x, attention_mask=seen, position_ids=positions)

    def attention(self, tokens: Tensor, attended: Tensor | None = None) -> Tensor | None:
        """Mask out the ends that fill a window: to a masked LM they are padding."""
        if self.config.end_id is None:
            return attended
        text = before_end(tokens, self.config.end_id)
        return text if attended is None else text & attended

    def modulations(self, sigma: Tensor | float | None = None) -> Modulations | None:
        return None

    def constants(self) -> Modulations | None:
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
        assert (start, stop) == (0, None), "its blocks are not run in parts"
        seen, arguments = self._seen(attended), {}
        if self.family.counts_from_padding and not self.family.embeds_apart and seen is not None:
            arguments = {"position_ids": self._positions(seen)}
        states = self._trunk(inputs_embeds=x, attention_mask=seen, **arguments)[0]
        if self.family.shifted:  # nothing comes before the first position, so it keeps its own
            states = torch.cat([states[:, :1], states[:, :-1]], 1)
        return upcast(states[:, len(self.before) : x.shape[1] - len(self.after)])

    def head(self, hidden: Tensor, mods: Modulations | None = None) -> Tensor:
        logits = hidden.to(self.network.get_output_embeddings().weight.dtype)
        for name in self.family.head:
            logits = getattr(self.network, name)(logits)
        # In place: a large vocabulary's logits are the most that a pass holds, and no copy is kept.
        logits.index_fill_(-1, self.banned, BANNED)
        extra = -logits.shape[-1] % self.align
        return F.pad(logits, (0, extra), value=BANNED) if extra else logits

    def forward(
        self, tokens: Tensor, sigma: Tensor | float | None = None, attended: Tensor | None = None
    ) -> Tensor:
        return all_logits(self, tokens, sigma, attended)

    def without_head(self) -> "MaskedLM":
        return copy.deepcopy(self).drop_head()

    def drop_head(self) -> "MaskedLM":
        """Drop what a discriminator has no use for, in place."""
        for name in self.family.head:
            setattr(self.network, name, None)
        for name in self.family.unused:
            setattr(self._trunk, name, None)
        return self

    def with_masks(self, offsets: Tensor) -> "MaskedLM":
        return copy.deepcopy(self).add_masks(offsets)

    def add_masks(self, offsets: Tensor) -> "MaskedLM":
        """Add masks as `with_masks` does, in place."""
        masks = self.config.masks + len(offsets)
        self.config = replace(self.config, masks=masks, vocab_size=self.config.num_tokens + masks)
        known = torch.zeros_like(offsets[:1]) if self.codes is None else self.codes.detach()
        self.codes = nn.Parameter(torch.cat([known, known[-1:] + offsets]))
        return self

    @property
    def _trunk(self) -> Any:
        return getattr(self.network, self.family.trunk)

    @property
    def _words(self) -> Any:
        return self._trunk.get_input_embeddings()

    def _framed(self, tokens: Tensor, attended: Tensor | None) -> Tensor:
        """Ids (B, L + frame) with special tokens around each text."""
        text = tokens.masked_fill(tokens >= self.config.num_tokens, self.ids.mask)
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
        """Positions (B, n) of the closing special tokens, right after each text's last token."""
        numbers = torch.arange(1, attended.shape[1] + 1, device=attended.device)
        end = (attended * numbers).amax(1, keepdim=True) + len(self.before)
        return end + torch.arange(len(self.after), device=attended.device)

    def _positions(self, seen: Tensor | None) -> Tensor | None:
        """Position numbers from the padding id + 1, or None where all positions are seen."""
        return None if seen is None else seen.cumsum(1) * seen + self.padding


def _freeze(part: nn.Module) -> None:
    """Turn parameters into buffers: kept and saved, but not trained."""
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())


def special_ids(
    folder: Path, settings: Mapping[str, Any], size: int, tokenizer: Tokenizer
) -> SpecialIds:
    """Derive special ids of a network with `size` ids from its config.json and tokenizer."""
    known, names = tokenizer.vocabulary, special_tokens(folder)
    mask = settings.get("mask_token_id")
    if type(mask) is not int:
        words = (names.get("mask_token", ""), *_MASKS)
        mask = next((known[word] for word in words if word in known), None)
    if mask is None or mask not in known.values():
        raise UserError(
            f"{folder}: no token is known to be its mask. Name it as `mask_token` in "
            "tokenizer_config.json."
        )
    before, after = tokenizer.frame(next(w for w, index in known.items() if index == mask))
    if not before and not after:  # a tokenizer.json that was saved without its last step
        cls, sep = (known.get(names.get(name, "")) for name in ("cls_token", "sep_token"))
        before, after = ([] if index is None else [index] for index in (cls, sep))
    banned = {mask, *before, *after, *tokenizer.special_ids, *_no_text(known)}
    banned |= {known[word] for word in names.values() if word in known}
    banned |= set(range(size)) - set(known.values())
    pad = settings.get("pad_token_id")
    if type(pad) is not int or not 0 <= pad < size:
        pad = known.get(names.get("pad_token", ""), mask)
    return SpecialIds(mask, pad, tuple(before), tuple(after), tuple(sorted(banned)))


def _no_text(vocabulary: Mapping[str, int]) -> set[int]:
    """Ids of place holders and, in a vocabulary of residues, of all but the 20 amino acids."""
    spare = {index for word, index in vocabulary.items() if _UNUSED.fullmatch(word)}
    if is_protein(vocabulary):
        spare |= {n for word, n in vocabulary.items() if len(word) == 1} - amino_ids(vocabulary)
    return spare


def special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens as the tokenizer's settings name them: `mask_token`, `cls_token`, ..."""
    names = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, word in read_object(folder / file).items():
            word = word.get("content") if isinstance(word, dict) else word
            if name.endswith("_token") and isinstance(word, str):
                names[name] = word
    return names
