"""Checkpoints from the Hugging Face hub: what is in the cache first, and never a line of code."""

from pathlib import Path

from didi_instruct.data.hub import quiet, require_network
from didi_instruct.errors import UserError, first_line
from didi_instruct.models.foreign.places import SUFFIXES

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model"]
"""Settings, weights and tokenizers; no Python."""

PICKLED = ["*.ckpt", "*.bin", "*.pt"]
"""Fetched only where a repository has no safetensors."""


def fetch(repo_id: str, revision: str | None = None) -> Path:
    """Return the folder of a repository's files, downloaded unless the cache has its weights."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(
            huggingface_hub.snapshot_download(repo_id, revision=revision, local_files_only=True)
        )
        if any(p.suffix in SUFFIXES for p in cached.rglob("*")):
            return cached
    except LocalEntryNotFoundError:
        pass
    except ValueError as error:  # a name that cannot be a repository's
        raise UserError(f"`{repo_id}` is no local path, and no name on Hugging Face.") from error
    return _download(repo_id, revision)


def _download(repo_id: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        with quiet("huggingface_hub"):
            require_network()
            files = huggingface_hub.list_repo_files(repo_id, revision=revision)
            safe = any(name.endswith(".safetensors") for name in files)
            patterns = PATTERNS if safe else PATTERNS + PICKLED
            return Path(
                huggingface_hub.snapshot_download(
                    repo_id, revision=revision, allow_patterns=patterns
                )
            )
    except RevisionNotFoundError as error:
        raise UserError(f"`{repo_id}` has no revision `{revision}` on Hugging Face.") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"`{repo_id}` is not on Hugging Face, or it is private: check the name, or log in "
            "with `hf auth login`."
        ) from error
    except Exception as error:  # a network and a server can fail in any way
        reason = first_line(error)
        raise UserError(
            f"`{repo_id}` is not in the local cache, and fetching it from Hugging Face failed "
            f"({reason}): try again with a network, or give a local folder."
        ) from error
