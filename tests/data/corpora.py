"""Small corpora, and their preparation."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from didi_instruct.data.files import sha256_file
from didi_instruct.data.prepare import PrepareResult, PrepareSettings, prepare

EOT = 256  # of the tokenizer `bytes`
STORIES = [f"Story {i}: " + f"the cat saw {i} birds and ½ a dög. " * (1 + i % 5) for i in range(60)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(src: Path, out: Path, report: Any = None, **options: Any) -> PrepareResult:
    settings: dict[str, Any] = {"tokenizer": "bytes", "length": 32, **options}
    return prepare(PrepareSettings(src=str(src), out=out, **settings), report)


def rows_of(folder: Path, split: str) -> list[list[int]]:
    """Read a split's rows, and check its files, without the code under test."""
    manifest = json.loads((folder / "manifest.json").read_text())
    dtype = {"uint16": "<u2", "uint32": "<u4"}[manifest["dtype"]]
    rows: list[list[int]] = []
    for shard in manifest["splits"][split]["shards"]:
        array = np.fromfile(folder / shard["file"], dtype).reshape(-1, manifest["length"])
        assert len(array) == shard["rows"]
        assert sha256_file(folder / shard["file"]) == shard["sha256"]
        rows += array.tolist()
    return rows


def content_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def prepared_plainly(
    texts: list[str], length: int, rows: str = "stream", long: str = "drop"
) -> tuple[list[list[int]], int, int]:
    """Rows of bytes in the shortest code: (rows, dropped tokens, documents that do not fit)."""
    documents = [list(text.encode()) for text in texts]
    if rows == "stream":
        tokens = [token for ids in documents for token in [*ids, EOT]]
        full = len(tokens) // length
        found = [tokens[i * length : (i + 1) * length] for i in range(full)]
        return found, len(tokens) - full * length, 0
    found = []
    for ids in documents:
        if len(ids) >= length and long != "split":
            ids = ids[:length] if long == "cut" else []
        ids = ids + [EOT] * (-len(ids) % length)
        found += [ids[i : i + length] for i in range(0, len(ids), length)]
    return found, 0, sum(len(ids) >= length for ids in documents)
