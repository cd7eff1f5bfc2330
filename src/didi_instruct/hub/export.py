"""Models as folders and repositories: `Model.save`, `Model.push_to_hub`, `didi convert`."""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from didi_instruct.config.schema import nearest
from didi_instruct.data.files import no_space_as_user_error, require_space
from didi_instruct.data.hub import quiet, require_network
from didi_instruct.errors import UserError, first_line
from didi_instruct.hub.model_card import (
    README,
    CardOptions,
    is_written_by_didi,
    model_card,
    read_numbers,
    write_card,
)
from didi_instruct.hub.privacy import publishable
from didi_instruct.hub.sources import (
    AdapterFolder,
    DidiFolder,
    LoadOptions,
    MaskedLMFolder,
    Source,
    find_source,
    shipped_name,
)
from didi_instruct.models.ar import ARModel
from didi_instruct.models.checkpoint import CONFIG, MODEL, LoadedModel, read_manifest, save_model
from didi_instruct.models.dit import DiT
from didi_instruct.models.foreign.folders import new_folder, refuse_full
from didi_instruct.models.foreign.layouts import WeightSet
from didi_instruct.models.foreign.shapes import Family
from didi_instruct.models.foreign.writing import write_foreign
from didi_instruct.models.masked_lm_writing import save_masked_lm
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.models.native import WeightFiles
from didi_instruct.models.quantised import Storage, check_storage
from didi_instruct.models.tensor_files import save_tensors, shown, watching

Format = Literal["didi", "mdlm-hub", "didi-instruct", "duo-hub", "sdtt-hub", "esm"]
"""Layouts that can be written."""

_ESM_PARTS = ("esm.", "lm_head.")
_ESM_FILES = (
    CONFIG,
    "vocab.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
"""Files copied as they are, where they exist."""


def save(
    model: LoadedModel,
    folder: Path,
    name: str,
    options: CardOptions,
    storage: Storage | None = None,
) -> None:
    """Write a model in the layout that `didi.load` reads, with a card under that name.

    `storage` as in `save_model`.
    """
    refuse_other_networks(model)
    card = model_card(name, model, options, storage)
    save_model(
        folder,
        model.model,
        model.config,
        tokenizer=model.tokenizer,
        discriminator=model.discriminator,
        provenance=model.provenance,
        storage=storage,
    )
    write_card(folder, card)


def push(
    model: LoadedModel, repo_id: str, options: CardOptions, *, private: bool, token: str | None
) -> str:
    """Upload a model, saved for a moment; return the repository's address.

    What can be known to be wrong is refused before anything is written or sent. Of the provenance
    only what is public is sent, without paths. A card that someone wrote there stays as it is.
    """
    import huggingface_hub

    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id) is None:
        raise UserError(f"`{repo_id}` is no name on Hugging Face: give `owner/name`.")
    refuse_other_networks(model)
    if token is None and huggingface_hub.get_token() is None:
        raise UserError(
            f"{repo_id}: there is no token to write with: log in with `hf auth login`, or give "
            "`token`."
        )
    with _uploading(repo_id):
        require_network()
    public = replace(model, provenance=publishable(model.provenance))
    with tempfile.TemporaryDirectory() as folder:
        save(public, Path(folder), repo_id, options)
        with _uploading(repo_id), quiet("huggingface_hub"):
            api = huggingface_hub.HfApi(token=token)
            address = api.create_repo(repo_id, private=private, exist_ok=True)
            if api.file_exists(repo_id, README) and not is_written_by_didi(
                Path(api.hf_hub_download(repo_id, README))
            ):
                Path(folder, README).unlink()
            message = "Model written by didi"
            api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    return str(address)


def refuse_other_networks(model: LoadedModel) -> None:
    """Refuse a network that didi's layout cannot hold."""
    if not isinstance(getattr(model.model, "_orig_mod", model.model), (DiT, ARModel, MaskedLM)):
        raise UserError(
            "didi's layout holds DiTs, AR models and masked LMs of transformers, and this network "
            f"is a {type(model.model).__name__}: save it by its own means."
        )


@contextmanager
def _uploading(repo_id: str) -> Iterator[None]:
    """Make one line of what a network or a server can do."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:
        reason = first_line(error)
        remedy = "try again with a network, or save to a folder and run `hf upload` elsewhere"
        if isinstance(error, HfHubHTTPError):
            remedy = "check the name, and that the token may write there"
        raise UserError(f"{repo_id}: uploading failed ({reason}): {remedy}.") from error


def convert(
    source: str | Path,
    dest: str | Path,
    to: Format,
    *,
    weights: WeightSet = "ema",
    family: Family | None = None,
    tokenizer: str | Path | None = None,
    discriminator: bool = True,
    storage: str | None = None,
    license: str | None = None,
    numbers: str | Path | None = None,
    about: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the model of any SOURCE to the folder `dest`, number by number the same.

    What a format cannot hold is refused before anything is written. `discriminator=False` leaves
    one out; `progress` sees bytes written, of how many. Our own format alone knows a `storage` in
    fewer bytes (bfloat16, int8: what is written is then near, not the same), and a card with a
    `license`, the `numbers` of an evaluation (a file of `didi eval --json`) and words `about` it.
    """
    folder = _resolved(Path(dest))
    if to not in get_args(Format):
        raise UserError(f"`{to}` is not a format.{nearest(to, get_args(Format))}")
    of_ours = {"storage": storage, "license": license, "numbers": numbers, "about": about}
    for name, value in of_ours.items():
        if value is not None and to != "didi":
            raise UserError(f"`{to}` has no {name}: leave it out, or write --to didi.")
    stored = None if storage is None else check_storage(storage)
    measured = None if numbers is None else read_numbers(Path(numbers))
    card = CardOptions(license=license, numbers=measured, about=about)
    refuse_full(folder)
    options = LoadOptions(weights=weights, family=family, tokenizer=tokenizer)
    found = find_source(source)
    _refuse_format(found, to)
    with watching(progress):
        if to == "esm" and isinstance(found, MaskedLMFolder):
            options.refuse_choices(found.name)
            if tokenizer is not None:
                raise UserError(f"{found.name} has its own tokenizer: leave out `tokenizer`.")
            return _copy_esm(found, folder)
        loaded = found.load(LoadOptions() if to == "esm" else options)
        if to == "didi":
            critic = loaded.discriminator if discriminator else None
            _write_ours(replace(loaded, discriminator=critic), folder, card, stored)
            return folder
        _refuse_discriminator(loaded, to, discriminator)
        if to == "esm":
            return _write_esm(loaded, found.name, folder)
        return write_foreign(loaded, folder, to, discriminator)


def _resolved(folder: Path) -> Path:
    """Return the folder itself: `.` has no name, and a link is not what it leads to."""
    try:
        return folder.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{folder} leads nowhere ({error}): choose another folder.") from error


def _refuse_format(found: Source, to: str) -> None:
    """Refuse by names alone, before any weights are read."""
    if isinstance(found, MaskedLMFolder):
        if to not in ("esm", "didi"):
            raise UserError(
                f"{found.name} is a masked LM of `transformers`, which `{to}` cannot hold: it "
                "loads as it is; an ESM-2 model can be copied with --to esm."
            )
    elif to == "esm" and not (
        isinstance(found, AdapterFolder)
        or (isinstance(found, DidiFolder) and read_manifest(found.path).network is not None)
    ):
        raise UserError(
            f"{found.name} is a DiT, and `esm` holds ESM-2 models alone: use one of the others "
            f"({', '.join(f for f in get_args(Format) if f != 'esm')})."
        )


def _refuse_discriminator(loaded: LoadedModel, to: str, wanted: bool) -> None:
    if wanted and loaded.discriminator is not None and to != "didi-instruct":
        roomy = "didi" if to == "esm" else "didi-instruct"
        raise UserError(
            f"`{to}` has no place for the discriminator: leave it out with --no-discriminator "
            f"(in Python, discriminator=False), or use `{roomy}`."
        )


def _write_ours(
    model: LoadedModel, folder: Path, card: CardOptions, storage: Storage | None
) -> None:
    """Write our layout; what goes into the package is published, and says its name there."""
    name = shipped_name(folder)
    if name is not None:
        model = replace(model, provenance=publishable(model.provenance))
    save(model, folder, name or str(folder), card, storage)


def _write_esm(loaded: LoadedModel, name: str, folder: Path) -> Path:
    """Write an ESM-2 model of our layout as `transformers` has it."""
    assert isinstance(loaded.model, MaskedLM)
    _refuse_other_families(name, loaded.model.record.settings["model_type"])
    if loaded.tokenizer is None:
        raise UserError(f"{name} has no tokenizer, which the layout of transformers needs.")
    return save_masked_lm(loaded.model, loaded.tokenizer, folder)


def _copy_esm(source: MaskedLMFolder, folder: Path) -> Path:
    """Copy an ESM-2 model (DPLM) bit by bit.

    The weights never become a network, so that nothing is lost: no type, and no tensor that our own
    code has no use for. DPLM's training checkpoints have `model.net.` before every name.
    """
    name = source.name
    _refuse_other_families(name, source.found.model_type)
    weights = WeightFiles(source.path).read()
    tensors = {name: tensor for name, tensor in weights.items() if name.startswith(_ESM_PARTS)}
    if not all(any(name.startswith(part) for name in tensors) for part in _ESM_PARTS):
        raise UserError(f"{name} is no whole ESM-2 masked LM: it needs tensors `esm.`, `lm_head.`.")
    odd = next((n for n, t in tensors.items() if not _can_be_written(t)), None)
    if odd is not None:
        raise UserError(
            f"{name}: {shown(odd)} holds {tensors[odd].dtype}, which cannot be copied: cast the "
            "weights to float16 or wider first."
        )
    with no_space_as_user_error(folder):
        require_space(folder, sum(tensor.nbytes for tensor in tensors.values()))
        with new_folder(folder) as hidden:
            save_tensors(hidden / MODEL, tensors)
            for file in _ESM_FILES:
                if (source.path / file).is_file():
                    shutil.copyfile(source.path / file, hidden / file)
    return folder


def _refuse_other_families(name: str, family: Any) -> None:
    if family != "esm":
        raise UserError(f"{name} is `{family}`, and `esm` holds ESM-2 models alone.")


def _can_be_written(tensor: Tensor) -> bool:
    """True for whole numbers, and for real ones of 16 bits or more."""
    if tensor.is_floating_point():
        return tensor.itemsize > 1
    return not tensor.is_complex() and not tensor.is_quantized
