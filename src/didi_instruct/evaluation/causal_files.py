"""Causal language models of `transformers` from disk, hub or GGUF file, or why they cannot be."""

import hashlib
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import MissingExtraError, UserError, first_line
from didi_instruct.models.checkpoint import CONFIG


def load_causal(
    source: str | Path, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[list[Path], Any, Any]:
    """Return the files that tell the model from others, its tokenizer, and itself."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UserError(
            f"The judge {source} is read with transformers, which is missing or broken "
            f"({first_line(error)}): pip install --upgrade transformers."
        ) from error
    where, gguf = _locate(source, trust_remote_code)
    options = {"trust_remote_code": trust_remote_code, **gguf}
    try:
        tokenizer = _from_pretrained(AutoTokenizer, where, options)
        special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
        if special.issuperset(tokenizer.get_vocab().values()):  # made up by transformers
            raise ValueError("there are no files of one")
    except Exception as error:  # files of every age and origin can fail in any way
        raise UserError(
            f"The judge {source} has no tokenizer that can be read ({first_line(error)}): put its "
            "tokenizer.json beside its weights."
        ) from error
    options |= {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    try:
        model, found = _from_pretrained(AutoModelForCausalLM, where, options)
    except Exception as error:
        raise UserError(
            f"The judge {source} cannot be loaded ({first_line(error)}). It must be a causal "
            "language model of transformers with its weights in safetensors, not pickled."
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"The judge {source} is incomplete: its weights lack `{missing[0]}`.")
    return [Path(source)] if gguf else _telling_files(where), tokenizer, model


def _locate(source: str | Path, trust_remote_code: bool) -> tuple[str, dict[str, str]]:
    """Directory or hub id, and the name of the file in it where that is GGUF."""
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{path}: no such file.")
        if find_spec("gguf") is None or find_spec("accelerate") is None:
            raise MissingExtraError("A judge in a GGUF file", "eval")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise UserError(f"{path} is not a model folder: it has no {CONFIG}.")
    elif str(source).startswith((".", "/", "~")):
        raise UserError(f"{source}: no such folder.")
    elif not trust_remote_code:
        Tokenizer.load(str(source))  # which says at once, and clearly, if there is no network
    return str(source), {}


def _telling_files(where: str) -> list[Path]:
    """Files of a directory, or of a hub id that was loaded, on which its scores depend."""
    from transformers.utils.hub import cached_file

    folder = Path(str(cached_file(where, CONFIG, local_files_only=True))).parent
    names = (CONFIG, "tokenizer", "vocab", "merges")
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix == ".safetensors" or path.name.startswith(names)
    ]


def _from_pretrained(kind: Any, where: str, options: dict[str, Any]) -> Any:
    """Load without a word, and without a network where everything is here."""
    with redirect_stderr(StringIO()):
        try:
            return kind.from_pretrained(where, local_files_only=True, **options)
        except (OSError, ValueError):
            if Path(where).is_dir():
                raise
            return kind.from_pretrained(where, **options)


@torch.no_grad()
def require_causal(name: str, model: Any) -> None:
    """Refuse a model that sees the tokens it should predict: it would call anything probable."""
    ids = torch.zeros(2, 4, dtype=torch.long, device=model.device)
    ids[1, -1] = 1
    one, other = model(ids, use_cache=False).logits[:, :-1].float()
    if float((one - other).abs().max()) > 0.01 * float(one.abs().max()):
        raise UserError(f"The judge {name} looks at later tokens: it is not a causal model.")


def file_hash(path: Path) -> bytes:
    """Hash of a file's name and of all of its content: weights may differ anywhere."""
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").digest()
    return path.name.encode() + b"/" + content
