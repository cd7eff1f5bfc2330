"""Datasets of the Hugging Face hub, record by record."""

from collections.abc import Iterator, Mapping
from typing import Any

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
