"""The Hugging Face hub: records of its datasets, and what loading from it needs."""

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from didi_instruct.errors import MissingExtraError, UserError, first_line


def stream_of(
    dataset: str,
    split: str,
    *,
    place: str,
    feature: str,
    what: str = "it",
    or_else: str = "",
    where: Mapping[str, str] | None = None,
) -> Iterator[tuple[dict[str, Any], str]]:
    """Records as they arrive, each with its place for messages: `place`, and its number.

    `feature` is what needs the library. Where loading `what` fails, `or_else` ends the message.
    `where` is what else finds the records: a configuration, a folder, a revision.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(feature, "data") from error

    try:
        records = datasets.load_dataset(dataset, split=split, streaming=True, **(where or {}))
        for number, record in enumerate(records, 1):
            yield record, f"{place} (record {number})"
    except Exception as error:  # a network and a repository can fail in any way
        raise UserError(
            f"{place}: loading {what} from Hugging Face failed ({first_line(error)}){or_else}."
        ) from error


def require_network() -> None:
    """Fail at once where the hub's name cannot be looked up, not after a minute of retries."""
    from huggingface_hub.constants import ENDPOINT

    host = urlsplit(ENDPOINT).hostname
    if host is None or getproxies().get("https"):
        return  # a proxy looks names up itself
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise ConnectionError("no network: its name cannot be looked up") from None


@contextmanager
def quiet(logger: str) -> Iterator[None]:
    """Keep a library's retries out of the terminal: the error that ends them says it all."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
