"""A masked LM of `transformers` as a denoiser of masked diffusion.

It predicts masked tokens from visible ones, which is all that masked diffusion without time
conditioning asks for. The wrapper translates at the border: our mask is the extra last id, a text
has no special tokens around it, and what is never text has probability 0.
"""

from typing import Any

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.foreign.special_ids import NEVER
from didi_instruct.models.masked_families import Family
from didi_instruct.models.masked_ids import SpecialIds


class MaskedLM(nn.Module):
    """Denoiser around `network`, a masked LM; ids of real tokens are its own.

    ESM's `token_dropout` is part of the network and stays as config.json says: it hides the mask's
    embedding and scales the visible ones by their share. ESM-2 was trained so, and DPLM's code uses
    the same embedding. A text of masks alone divides by no zero, since its frame is visible.
    """

    before: Tensor
    after: Tensor
    banned: Tensor

    def __init__(
        self, network: nn.Module, config: ModelConfig, ids: SpecialIds, family: Family
    ) -> None:
        super().__init__()
        self.network, self.config, self.ids, self.family = network, config, ids, family
        for name in ("before", "after", "banned"):
            values = torch.tensor(getattr(ids, name), dtype=torch.long)
            self.register_buffer(name, values, persistent=False)

    def condition(self, sigma: Tensor | float | None = None) -> Tensor:
        """Return one empty row: the network is not told the time."""
        return torch.empty(1, 0, device=self.banned.device)

    def trunk(
        self,
        tokens: Tensor,
        sigma: Tensor | float | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the last state at the text's positions, (B, L, d).

        Shapes as in `DiT.trunk`. Where the network cannot be taken apart, states are logits.
        """
        ids, attended = self._framed(tokens, attention_mask)
        states = self._states(ids, attended)
        first = len(self.before) - self.family.shifted
        if first < 0:  # nothing stands before the first position: it gets its own output
            states, first = torch.cat([states[:, :1], states], 1), 0
        return states[:, first : first + tokens.shape[1]]

    def head(
        self,
        hidden: Tensor,
        c: Tensor | None = None,
        num: int | None = None,
        align: int | None = None,
    ) -> Tensor:
        """Map states (..., d) to logits (..., num) of the real tokens.

        `c` and `align` are for our own networks: there is no time here, and no layer to pad.
        """
        logits = hidden
        for name in self.family.head:
            logits = getattr(self.network, name)(logits)
        return logits.index_fill(-1, self.banned, NEVER)[..., :num]

    def forward(
        self,
        tokens: Tensor,
        sigma: Tensor | float | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, L, V) over the real tokens; arguments as in `trunk`."""
        return self.head(self.trunk(tokens, sigma, attention_mask))

    def _framed(self, tokens: Tensor, attended: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Put the special tokens around each text, the last ones right after its last token."""
        text = tokens.masked_fill(tokens == self.config.vocab_size - 1, self.ids.mask)
        before = self.before.expand(len(tokens), -1)
        after = self.after.expand(len(tokens), -1)
        if attended is None:
            return torch.cat([before, text, after], 1), None
        text = text.masked_fill(~attended, self.ids.pad)
        ids = torch.cat([before, text, torch.full_like(after, self.ids.pad)], 1)
        seen = torch.cat(
            [before.new_ones(before.shape), attended.long(), after.new_zeros(after.shape)], 1
        )
        numbers = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        end = before.shape[1] + (attended * numbers).amax(1, keepdim=True)
        places = end + torch.arange(after.shape[1], device=tokens.device)
        return ids.scatter(1, places, after), seen.scatter(1, places, 1)

    def _states(self, ids: Tensor, attended: Tensor | None) -> Tensor:
        mask = attended
        if attended is not None and self.family.pairwise_mask:
            mask = attended[:, None, None].bool()
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self.family.base is None:
            logits: Tensor = self.network(**arguments).logits
            return logits
        states: Tensor = getattr(self.network, self.family.base)(**arguments)[0]
        return states
