"""Masked LMs of `transformers` in didi's own layout: trained ones, and trunks of discriminators."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.models.masked_lm import (
    FAMILIES,
    described,
    explained,
    load_transformers,
    silence,
)
from didi_instruct.models.masked_network import MaskedLM, SpecialIds
from didi_instruct.models.network import NetworkRecord
from didi_instruct.models.tensor_files import shown_value

_NETWORK = "network."  # before the names of the network's tensors
_REMEDY = "Fetch it again, or mend `network.settings`."


@dataclass(frozen=True)
class RecordedMaskedLM:
    """A masked LM as a config.json of ours describes it."""

    path: Path
    """config.json, for errors."""
    record: NetworkRecord

    def __post_init__(self) -> None:
        """Refuse families that are not known."""
        if self._model_type not in FAMILIES:
            raise UserError(
                f"{self.path}: `network.settings.model_type` is {shown_value(self._model_type)}: "
                f"use one of {', '.join(FAMILIES)}."
            )

    def build_trunk(self, config: ModelConfig) -> MaskedLM:
        """Build the network without head and weights; within `torch.device("meta")`."""
        return self.build(config).drop_head()

    def load_trunk(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], device: torch.device | str
    ) -> MaskedLM:
        """Build the network without head, with the tensors of a discriminator's file."""
        with torch.device("meta"):
            whole = self.build(config).state_dict()
        dtype = next(t.dtype for n, t in tensors.items() if n.startswith(_NETWORK))
        # A head for the builder, which would else draw one.
        head = {n: torch.zeros(t.shape, dtype=dtype) for n, t in whole.items() if n not in tensors}
        return self.load(config, {**tensors, **head}, device).drop_head()

    def build(self, config: ModelConfig) -> MaskedLM:
        """Build the network without weights; within `torch.device("meta")`."""
        with self._explained:
            build, settings = described(load_transformers(), self._model_type, self._settings)
            network = build(settings)
        model = self._wrapped(network, config)
        if config.masks > 1:
            model.codes = nn.Parameter(torch.empty(config.masks, config.hidden))
        return model

    def load(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], device: torch.device | str
    ) -> MaskedLM:
        """Build the network with the tensors of a file, whose names and shapes were checked."""
        weights = {
            name.removeprefix(_NETWORK): tensor
            for name, tensor in tensors.items()
            if name.startswith(_NETWORK)
        }
        largest = max((t for t in weights.values() if t.is_floating_point()), key=Tensor.numel)
        with self._explained, silence():
            build, settings = described(load_transformers(), self._model_type, self._settings)
            network = build.from_pretrained(
                None,
                config=settings,
                state_dict=weights,
                dtype=largest.dtype,
                local_files_only=True,
            )
        model = self._wrapped(network, config)
        if "codes" in tensors:
            model.codes = nn.Parameter(tensors["codes"])
        return model.to(device).eval()

    @property
    def _settings(self) -> dict[str, object]:
        return self.record.settings

    @property
    def _model_type(self) -> str:
        return str(self._settings.get("model_type"))

    @property
    def _explained(self) -> AbstractContextManager[None]:
        return explained(f"{self.path}: transformers cannot build its network", _REMEDY)

    def _wrapped(self, network: nn.Module, config: ModelConfig) -> MaskedLM:
        record = self.record
        known = (record.mask, record.pad, *record.before, *record.after, *record.banned)
        if not all(0 <= index < config.num_tokens for index in known):
            raise UserError(
                f"{self.path}: a special id of `network` lies outside the vocabulary of "
                f"{config.num_tokens}. {_REMEDY}"
            )
        ids = SpecialIds(record.mask, record.pad, record.before, record.after, record.banned)
        return MaskedLM(network, config, ids, FAMILIES[self._model_type])
