"""Networks of `transformers` from settings and files of weights, of which nothing is run.

config.json may ask for any amount of memory, or name kernels to fetch. So such settings are left
out, and a network is built on the meta device and compared with the headers of the weights before a
number is read.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from didi_instruct.data.hub import quiet
from didi_instruct.errors import UserError
from didi_instruct.models.causal_lm import CAUSAL, make_bidirectional
from didi_instruct.models.checkpoint import CONFIG
from didi_instruct.models.foreign.places import weight_files
from didi_instruct.models.foreign.stores import Header, open_store
from didi_instruct.models.tensor_files import first_few, shown

# Settings that fetch or run something, or that are decided here.
_NOT_THE_NETWORK = {
    "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "_attn_implementation_autoset", "experts_implementation", "_experts_implementation",
    "quantization_config", "compression_config", "transformers_weights", "fusion_config",
    "kernel_config", "use_kernels", "distributed_config", "dtype", "torch_dtype",
    "chunk_size_feed_forward",
}  # fmt: skip

_TURNS = 5, 2  # the first version whose causal LMs heed `is_causal=False`
_TIED = "lm_head.weight"  # equal to the embedding, where both are tied
_DPLM = "model.net."  # before the names in checkpoints of DPLM's training
# Tensors of other tasks than predicting tokens, and tables: files have them or not.
_OTHER = re.compile(r"(^|\.)(pooler|seq_relationship|contact_head|position_ids|inv_freq)(\.|$)")


class WeightFiles:
    """Weights of a folder by the names that `transformers` knows; numbers are read on demand.

    `rename` gives them those names, where a family has its own.
    """

    def __init__(self, folder: Path, rename: Callable[[str], str] = str) -> None:
        self.stores = [open_store(path) for path in weight_files(folder)]
        dplm = any(name.startswith(_DPLM) for store in self.stores for name in store.headers)
        self._prefix, self._rename = _DPLM if dplm else "", rename
        self.headers: dict[str, Header] = {
            self._known(name): header
            for store in self.stores
            for name, header in store.headers.items()
            if name.startswith(self._prefix)
        }

    def _known(self, name: str) -> str:
        return self._rename(name.removeprefix(self._prefix))

    def read(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read all weights, memory-mapped; `dtype` casts all but rotary frequencies."""
        weights = {}
        for store in self.stores:
            names = [name for name in store.headers if name.startswith(self._prefix)]
            for name, tensor in store.read(names):
                cast = tensor.is_floating_point() and not name.endswith("inv_freq")
                weights[self._known(name)] = tensor.to(dtype if cast else None)
        return weights


def load_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            'This model needs transformers, which is not here: pip install "transformers>=5.0".'
        ) from error
    return transformers


def require_bidirectional(model_type: str) -> None:
    """Refuse causal LMs where `transformers` would pass over `is_causal=False` without a word."""
    version = load_transformers().__version__
    if model_type in CAUSAL and tuple(map(int, version.split(".")[:2])) < _TURNS:
        raise UserError(
            f"transformers {version} cannot make the attention of a causal LM bidirectional: pip "
            f'install "transformers>={_TURNS[0]}.{_TURNS[1]}".'
        )


def build_network(
    folder: Path, settings: Mapping[str, Any], files: WeightFiles, dtype: torch.dtype | None
) -> nn.Module:
    """Build the network on the meta device, compare it with the headers, and read its weights.

    `settings` is config.json in the words of `transformers`. `dtype` casts the parameters; None
    keeps the type of the largest.
    """
    library, model_type = load_transformers(), str(settings["model_type"])
    require_bidirectional(model_type)
    problem = (
        f"{folder / CONFIG}: transformers {library.__version__} cannot build the network "
        "that it describes",
        "Fetch it again, or mend that setting.",
    )
    with explained(*problem):
        build, config = described(library, model_type, settings)
        with torch.device("meta"):
            shapes = build(config)
    _check_tensors(folder, shapes, files.headers)
    if model_type in CAUSAL:
        _check_names(folder, shapes, files.headers)
    weights = files.read(dtype)
    if config.tie_word_embeddings:  # what some files have twice
        weights.pop(_TIED, None)
    with explained(*problem), silence():
        largest = max((t for t in weights.values() if t.is_floating_point()), key=Tensor.numel)
        network: nn.Module
        network, report = build.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype or largest.dtype,
            output_loading_info=True,
            local_files_only=True,
        )
    _refuse_names(folder, build.__name__, report["missing_keys"], report["unexpected_keys"])
    return network


def described(library: Any, model_type: str, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """Class and settings of transformers for a config.json, without what it must not decide."""
    kind = library.CONFIG_MAPPING[model_type]
    causal = model_type in CAUSAL
    classes = library.MODEL_FOR_CAUSAL_LM_MAPPING if causal else library.MODEL_FOR_MASKED_LM_MAPPING
    build = classes[kind]
    config = kind.from_dict({n: v for n, v in settings.items() if n not in _NOT_THE_NETWORK})
    config._attn_implementation = "sdpa" if build._supports_sdpa else "eager"
    if causal:
        make_bidirectional(config)
    return build, config


def _check_tensors(folder: Path, network: nn.Module, headers: dict[str, Header]) -> None:
    """Refuse weights of other shapes or types than the network's.

    Names may be old ones, which `transformers` translates. So tensors are missed here only if
    there are not enough numbers for them, and memory could not be foreseen.
    """
    expected = {name: tuple(p.shape) for name, p in network.named_parameters()}
    there = [name for name in expected if name in headers]
    if wrong := [n for n in there if headers[n].shape != expected[n]]:
        shapes = first_few(wrong, lambda n: f"{n} {headers[n].shape} for {expected[n]}")
        raise UserError(
            f"{folder}: tensors do not have the shapes that config.json says ({shapes}). "
            "Fetch both again."
        )
    if packed := [n for n in there if not headers[n].is_weight]:
        # What would unpack them was left out of the settings.
        types = first_few(packed, lambda n: f"{n} {headers[n].dtype}")
        raise UserError(
            f"{folder}: tensors are not real numbers of 16 bits or more ({types}). Use the "
            "checkpoint that is not quantised."
        )
    missing = [name for name in expected if name not in headers]
    if sum(prod(expected[n]) for n in missing) > sum(prod(h.shape) for h in headers.values()):
        _refuse_names(folder, type(network).__name__, missing)


def _check_names(folder: Path, network: nn.Module, headers: dict[str, Header]) -> None:
    """Refuse missing and unknown tensors where no name is an old one."""
    missing = [name for name, _ in network.named_parameters() if name not in headers]
    unknown = [name for name in headers if name not in network.state_dict()]
    _refuse_names(folder, type(network).__name__, missing, unknown)


def _refuse_names(
    folder: Path, network: str, missing: Iterable[str], unknown: Iterable[str] = ()
) -> None:
    """Refuse tensors that are not there, or not the network's; those of other tasks do no harm."""
    if lacks := sorted(name for name in missing if not _OTHER.search(name)):
        raise UserError(
            f"{folder} lacks tensors of {network} ({first_few(lacks)}). A model without its "
            "output layer cannot write: use the checkpoint that was trained to predict masked "
            "tokens."
        )
    if more := sorted(name for name in unknown if not _OTHER.search(name)):
        raise UserError(f"{folder} has tensors that {network} does not know ({first_few(more)}).")


@contextmanager
def explained(problem: str, remedy: str) -> Iterator[None]:
    """Turn any exception of `transformers` into a `UserError` of one line."""
    try:
        yield
    except Exception as error:  # files in any state fail in any way
        reason = shown(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)
        raise UserError(f"{problem} ({reason}). {remedy}") from error


@contextmanager
def silence() -> Iterator[None]:
    """Keep the library's reports and progress bars off the terminal."""
    logging: Any = load_transformers().utils.logging
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet("transformers"):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
