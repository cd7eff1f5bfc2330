"""A model as a folder with its card, and as a repository on the Hugging Face hub."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from didi_instruct.data.tokenizer import quiet, require_network
from didi_instruct.errors import UserError, first_line
from didi_instruct.hub.card import README, Subject, is_ours, write_card
from didi_instruct.hub.private import publishable
from didi_instruct.models.ar import ARModel
from didi_instruct.models.checkpoint import LoadedModel, save_model
from didi_instruct.models.dit import DiT
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.models.quantised import Storage


def save(
    model: LoadedModel,
    folder: Path,
    name: str,
    license: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    numbers: Mapping[str, Any] | None = None,
    about: str | None = None,
) -> None:
    """Write a model in the layout that `didi.load` reads, with a card under that name.

    `storage` as in `save_model`. For the card: `numbers` of an evaluation (`didi eval --json`), and
    words `about` the model.
    """
    refuse(model.model)
    critic = model.discriminator
    told = dict(model.provenance if provenance is None else provenance)
    subject = Subject(
        name=name,
        config=model.config,
        parameters=_count(model.model),
        discriminator_parameters=None if critic is None else _count(critic),
        tokens=None if model.tokenizer is None else model.tokenizer.size,
        license=license,
        provenance=told,
        storage=storage,
        numbers=numbers,
        about=about,
    )
    save_model(
        folder,
        model.model,
        model.config,
        tokenizer=model.tokenizer,
        discriminator=critic,
        provenance=told,
        storage=storage,
    )
    write_card(folder, subject)


def push(
    model: LoadedModel, repo_id: str, private: bool, token: str | None, license: str | None = None
) -> str:
    """Upload a model, saved for a moment; return the repository's address.

    What can be known to be wrong is refused before anything is written or sent. Of the provenance
    only what is public is sent, without paths. A card that someone wrote there stays as it is.
    """
    import huggingface_hub

    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id) is None:
        raise UserError(f"`{repo_id}` is no name on Hugging Face: give `owner/name`.")
    refuse(model.model)
    if token is None and huggingface_hub.get_token() is None:
        raise UserError(
            f"{repo_id}: there is no token to write with: log in with `hf auth login`, or give "
            "`token`."
        )
    with _explained(repo_id):
        require_network()
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder), repo_id, license, publishable(model.provenance))
        with _explained(repo_id), quiet("huggingface_hub"):
            api = huggingface_hub.HfApi(token=token)
            address = api.create_repo(repo_id, private=private, exist_ok=True)
            if _has_words(api, repo_id):
                Path(folder, README).unlink()
            message = "Model written by didi"
            api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    return str(address)


def _has_words(api: Any, repo_id: str) -> bool:
    """Whether the hub has a card of this model that somebody wrote by hand."""
    if not api.file_exists(repo_id, README):
        return False
    return not is_ours(Path(api.hf_hub_download(repo_id, README)))


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
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


def refuse(network: nn.Module) -> None:
    """Refuse what our layout cannot hold."""
    if not isinstance(getattr(network, "_orig_mod", network), (DiT, ARModel, MaskedLM)):
        raise UserError(
            "didi's layout holds DiTs, AR models and masked LMs of transformers, and this network "
            f"is a {type(network).__name__}: save it by its own means."
        )


def _count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
