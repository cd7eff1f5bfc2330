"""`didi serve` over a long time: memory, and requests that are no requests.

    python benchmarks/serve_soak.py [SOURCE] [--minutes 21] [--rate 0.5] [--malformed 10000]

Starts a server, asks for texts at a fixed rate and sends damaged bodies beside them: wrong types
and sizes, unknown names, cut and flipped bytes, deep nesting, other content types. Prints resident
memory every half minute, and at the end a count of statuses; a status of 500 or more, or a request
without an answer, is shown with its body.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

PROMPTS = ("Tim had", "Once upon a time", "The dog", "")
JUNK: list[Any] = [
    None, -1, 0, 1e30, 1e308, float("nan"), "", "x" * 5000, [], {}, [[[]]], True, "\0", 10**40,
    "___", {"a": {"b": [1]}},
]  # fmt: skip
NAMES = ("foo", "logprobs", "echo", "best_of", "__class__", "options", "stop", "gap")
TYPES = (*["application/json"] * 6, "text/plain", "application/xml", "multipart/form-data")


def body(rng: random.Random, source: str, seed: int) -> dict[str, Any]:
    """A request that a server answers."""
    return {
        "model": source, "prompt": rng.choice(PROMPTS), "seed": seed, "n": 1,
        "max_tokens": rng.choice((32, 64, 128, 200)), "steps": rng.choice((4, 8, 16)),
        "temperature": 1.0, "top_p": 1.0, "stream": False,
    }  # fmt: skip


def damaged(rng: random.Random, source: str) -> tuple[str, bytes]:
    """A path, and bytes for it; a few of them are requests all the same."""
    path = rng.choice(("completions", "completions", "infill", "chat/completions"))
    given = body(rng, source, 1)
    if path == "infill":
        given["text"] = given.pop("prompt") + " ___."
    whole, kind = json.dumps(given).encode(), rng.randrange(8)
    if kind == 0:
        given |= {name: rng.choice(JUNK) for name in rng.choices(list(given), k=2)}
    elif kind == 1:
        given[rng.choice(NAMES)] = rng.choice(JUNK)
    elif kind == 2:
        given["options"] = {rng.choice(("order", "grid", "x")): rng.choice(JUNK)}
    elif kind == 3:
        return path, whole[: rng.randrange(1, 80)]
    elif kind == 4:
        return path, rng.randbytes(rng.randrange(200))
    elif kind == 5:
        flipped = bytearray(whole)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return path, bytes(flipped)
    elif kind == 6:
        return path, b"[" * rng.randrange(1, 5000)
    else:
        return path, json.dumps(rng.choice([None, 0, "a", [], [{}]])).encode()
    return path, json.dumps(given).encode()


class Soak:
    """A load on a server, and what it answered."""

    def __init__(self, client: httpx.AsyncClient, source: str) -> None:
        self.client, self.source, self.rng = client, source, random.Random(0)
        self.texts, self.refusals = Counter[int](), Counter[int]()
        self.faults: list[str] = []

    async def text(self, seed: int) -> None:
        """Ask for a text."""
        await self._send("completions", json.dumps(body(self.rng, self.source, seed)).encode(), "")

    async def nonsense(self) -> None:
        """Send a damaged body."""
        await self._send(*damaged(self.rng, self.source), self.rng.choice(TYPES))

    async def _send(self, path: str, content: bytes, kind: str) -> None:
        headers = {"content-type": kind or "application/json"}
        try:
            answer = await self.client.post(f"/v1/{path}", content=content, headers=headers)
        except httpx.HTTPError as error:
            self.faults.append(f"{path}: {error!r}: {content[:100]!r}")
            return
        (self.refusals if kind else self.texts)[answer.status_code] += 1
        if answer.status_code >= 500 or (not kind and answer.status_code != 200):
            self.faults.append(f"{path}: {answer.status_code}: {content[:100]!r}")

    async def run(self, seconds: float, rate: float, malformed: int, server: int) -> None:
        """Keep the load up for so long."""
        began, asked, sent, told = time.monotonic(), 0, 0, 0
        tasks: set[asyncio.Task[None]] = set()
        while (passed := time.monotonic() - began) < seconds:
            if passed >= told:
                print(f"{passed:5.0f} s  {memory(server):7.1f} MiB", flush=True)
                told += 30
            due = [self.text(asked + i) for i in range(int(passed * rate) - asked)]
            asked += len(due)
            wanted = min(malformed, int(malformed * passed / (0.9 * seconds)))
            due += [self.nonsense() for _ in range(min(100, wanted - sent))]
            sent += min(100, max(0, wanted - sent))
            for each in due:
                task = asyncio.create_task(each)
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.2)
        await asyncio.gather(*tasks)


def memory(process: int) -> float:
    """Resident memory in MiB (Linux)."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


async def load(options: argparse.Namespace, port: int, server: int) -> Soak:
    """Wait for the server, and load it."""
    address = f"http://127.0.0.1:{port}"
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        for _ in range(120):
            with suppress(httpx.HTTPError):
                if (await client.get("/ready")).status_code == 200:
                    break
            await asyncio.sleep(1)
        soak = Soak(client, options.source)
        await soak.run(60 * options.minutes, options.rate, options.malformed, server)
        return soak


def main() -> None:
    """Run the load, and tell what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", nargs="?", default="stories")
    parser.add_argument("--minutes", type=float, default=21.0)
    parser.add_argument("--rate", type=float, default=0.5, help="texts a second")
    parser.add_argument("--malformed", type=int, default=10_000)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "didi_instruct", "serve", options.source, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            soak = asyncio.run(load(options, port, server.pid))
        finally:
            server.terminate()
    print(f"texts by status: {dict(soak.texts)}; damaged requests: {dict(soak.refusals)}")
    print(f"{len(soak.faults)} faults", *soak.faults[:10], sep="\n  ")


if __name__ == "__main__":
    main()
