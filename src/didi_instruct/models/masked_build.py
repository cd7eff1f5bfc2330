"""The network of a masked LM, by the classes of `transformers` and a config.json of anybody's.

A config.json may ask for any amount of memory, and for code and kernels from elsewhere. So what
could fetch or run something is left out of it, and the network is built without memory and
compared with the headers of the weights before a number is read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from didi_instruct.data.tokenizer import quiet
from didi_instruct.errors import UserError
from didi_instruct.models.foreign.stores import Header
from didi_instruct.models.manifest import CONFIG
from didi_instruct.models.masked_families import FoundMaskedLM
from didi_instruct.models.tensor_files import first_few, shown

_BESIDE = re.compile(r"(^|\.)(pooler|seq_relationship|contact_head|position_ids|inv_freq)(\.|$)")
"""Tensors of other tasks than predicting tokens, and tables: files have them or not."""

_LEFT_OUT = {
    "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "_attn_implementation_autoset", "experts_implementation", "_experts_implementation",
    "quantization_config", "compression_config", "transformers_weights", "fusion_config",
    "kernel_config", "use_kernels", "distributed_config", "dtype", "torch_dtype",
    "chunk_size_feed_forward",
}  # fmt: skip
"""Settings that fetch or run something, or that are decided here: none of them is the network's."""


class Blueprint:
    """What `transformers` would build for a folder: settings, a class, and a network of shapes."""

    def __init__(self, found: FoundMaskedLM) -> None:
        import transformers

        self.found = found
        # Both are read by attribute: the typed package exports them lazily.
        configs: Any = transformers.CONFIG_MAPPING
        networks: Any = transformers.MODEL_FOR_MASKED_LM_MAPPING
        try:
            kind = configs[found.model_type]
            self.build: Any = networks[kind]
        except KeyError as error:
            raise UserError(
                f"{found.path}: transformers {transformers.__version__} has no masked LM of "
                f"model_type `{shown(found.model_type)}`. Install the version that config.json "
                "names."
            ) from error
        with _explained(found):
            self.config: Any = kind.from_dict(_harmless(found.settings))
            fast = getattr(self.build, "_supports_sdpa", False)
            self.config._attn_implementation = "sdpa" if fast else "eager"
            with torch.device("meta"):
                self.shapes: nn.Module = self.build(self.config)

    def check(self, headers: Mapping[str, Header]) -> None:
        """Refuse weights of other shapes; what is missing is told when they are read.

        Names may be old ones, which `transformers` translates; so tensors are missed here only if
        there are not enough numbers for them, and memory could not be foreseen.
        """
        expected = {name: tuple(p.shape) for name, p in self.shapes.named_parameters()}
        wrong = [n for n, s in expected.items() if n in headers and headers[n].shape != s]
        if wrong:
            shapes = first_few(wrong, lambda n: f"{n} {headers[n].shape} for {expected[n]}")
            raise UserError(
                f"{self.found.path}: tensors do not have the shapes that config.json says "
                f"({shapes}). Fetch both again."
            )
        packed = [n for n in expected if n in headers and not headers[n].is_weight]
        if packed:  # what would unpack them was left out of the settings
            types = first_few(packed, lambda n: f"{n} {headers[n].dtype}")
            raise UserError(
                f"{self.found.path}: tensors are not real numbers of 16 bits or more ({types}). "
                "Use the checkpoint that is not quantised."
            )
        missing = [name for name in expected if name not in headers]
        if sum(prod(expected[n]) for n in missing) > sum(prod(h.shape) for h in headers.values()):
            _refuse_missing(self.found, self.build.__name__, missing)

    def fill(self, weights: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
        """Build the network with its weights."""
        network: nn.Module
        with _explained(self.found):
            network, report = self.build.from_pretrained(
                None,
                config=self.config,
                state_dict=weights,
                dtype=dtype,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
                local_files_only=True,
            )
        _check(self.found, self.build.__name__, report)
        return network


def _harmless(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, also those of parts, without what fetches or runs something."""
    return {
        name: _harmless(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in _LEFT_OUT
    }


@contextmanager
def _explained(found: FoundMaskedLM) -> Iterator[None]:
    """Make one line of what `transformers` says to settings that nobody checked."""
    import transformers

    try:
        yield
    except Exception as error:  # settings in any state fail in any way
        reason = shown(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)
        raise UserError(
            f"{found.path / CONFIG}: transformers {transformers.__version__} cannot build the "
            f"network that it describes ({reason}). Fetch it again, or mend that setting."
        ) from error


def _check(found: FoundMaskedLM, name: str, report: dict[str, Any]) -> None:
    """Refuse weights that are not those of the network: it would write with random numbers."""
    _refuse_missing(found, name, report["missing_keys"])
    wrong = _first_few(key[0] for key in report["mismatched_keys"])
    if wrong:
        raise UserError(f"{found.path}: {wrong} do not have the shapes that config.json says.")
    unknown = _first_few(report["unexpected_keys"])
    if unknown:
        raise UserError(f"{found.path} has tensors that {name} does not know ({unknown}).")


def _refuse_missing(found: FoundMaskedLM, name: str, names: Iterable[str]) -> None:
    missing = _first_few(names)
    if missing:
        raise UserError(
            f"{found.path} lacks tensors of {name} ({missing}). A model without its output layer "
            "cannot write: use the checkpoint that was trained to predict masked tokens."
        )


def _first_few(names: Iterable[str]) -> str:
    return first_few(sorted(name for name in names if not _BESIDE.search(name)))


@contextmanager
def silence() -> Iterator[None]:
    """Keep the library's reports and bars off the terminal: what matters is checked here."""
    from transformers.utils import logging as library

    logging: Any = library
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet("transformers"):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
