"""Networks whose code comes with their weights (LLaDA, Dream): built only for those who trust it.

`from_pretrained` is not used: the code of such models was often written for an older
`transformers`, whose loading asked less of a class. Here its class is built without memory for the
parameters, and the tensors of the files are put in; code and weights must fit to the last name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from didi_instruct.errors import UserError
from didi_instruct.models.masked_families import FoundMaskedLM
from didi_instruct.models.tensor_files import first_few, shown

_OLD_SETTINGS = {"use_cache": False, "use_return_dict": True, "output_attentions": False}
"""What old code reads from a configuration and new ones may lack."""


def refuse_code(found: FoundMaskedLM) -> None:
    """Say why a folder with code of its own is not loaded, and what would load it."""
    code = (
        ", ".join(sorted(shown(path.name) for path in found.path.glob("*.py"))) or "config.auto_map"
    )
    raise UserError(
        f"{found.path} brings code of its own ({code}), which would run with your rights: read "
        "it, and if you trust it, load it in Python with trust_remote_code=True, or with `didi "
        "generate --trust-remote-code`."
    )


def build_remote(found: FoundMaskedLM, weights: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Run the folder's code to build its network, and fill it with the weights."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = _reference(found)
    try:
        config = transformers.AutoConfig.from_pretrained(
            found.path, trust_remote_code=True, local_files_only=True
        )
        for name, value in _OLD_SETTINGS.items():
            if not hasattr(config, name):
                setattr(config, name, value)
        build: Any = get_class_from_dynamic_module(reference, found.path, local_files_only=True)
        with _parameters_on_meta():
            network: nn.Module = build(config)
    except Exception as error:  # it is anybody's code
        reason = shown(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)
        raise UserError(
            f"{found.path}: its own code fails with transformers {transformers.__version__} "
            f"({reason}). Install the version that its config.json names."
        ) from error
    _fill(found, network, weights, dtype)
    return network.eval()


def _reference(found: FoundMaskedLM) -> str:
    code = found.settings["auto_map"]
    names = ("AutoModelForMaskedLM", "AutoModel")
    reference = next((code[n] for n in names if n in code), None) if isinstance(code, dict) else ""
    if not isinstance(reference, str) or not reference or "--" in reference:
        named = shown(str(reference or "no AutoModel"))
        raise UserError(
            f"{found.path}: its code is not in the folder ({named}). Fetch it, and name it as "
            "`AutoModel` in auto_map of config.json."
        )
    return reference


def _fill(
    found: FoundMaskedLM, network: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype
) -> None:
    expected = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    given = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
    odd = [n for n, t in given.items() if expected.get(n) != tuple(t.shape)]
    if odd:
        raise UserError(f"{found.path}: its code has no place for {first_few(odd)}.")
    network.load_state_dict(given, strict=False, assign=True)
    tie: Any = getattr(network, "tie_weights", None)
    if tie is not None and any(p.is_meta for p in network.parameters()):
        tie()  # an output layer that shares the embedding is not in the file
    missing = [name for name, p in network.named_parameters() if p.is_meta]
    if missing:
        raise UserError(f"{found.path} lacks {len(missing)} tensors ({', '.join(missing[:3])}).")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Give new parameters no memory; buffers stay real, since no file has to have them."""
    module_class: Any = nn.Module
    register = module_class.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    module_class.register_parameter = on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register
