"""A server with canned diffusions, which speaks to the page as `didi serve` does.

A text is a function of (model, seed, sample, settings). Words in the prompt or the text make
trouble: BUSY, REFUSED, STRANGER (the judge is), LOST (the connection breaks after two canvases),
INSIDE (an error event), SLOW (steps take 0.2 s), SKIP (the last half of the steps is).
"""

import json
import math
import random
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from didi_instruct.serving.page import HEADERS, page_files

TALE = """a the dog cat girl boy bird tree sun sea ran sang saw found loved wanted was big small
red happy sad very little and then but so his her they it friend ball park home day mom said smiled
laughed together went up down under over again"""
WORDS = TALE.split()
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
END = "<|endoftext|>"
PERPLEXITIES = [10.0, 40.0, 20.0, 20.0, 20.0, 20.0]  # of the samples


def model(name: str, kind: str, role: str, **more: object) -> dict[str, object]:
    """One entry of `/v1/models`."""
    samplers = ["autoregressive"] if kind == "ar" else ["ancestral", "confidence"]
    known = {"object": "model", "created": 0, "owned_by": "didi-instruct", "mask": "░"}
    known |= {"id": name, "kind": kind, "role": role, "length": 64, "samplers": samplers}
    return known | {"steps": 8, "proteins": False} | more


TEXT_MODELS = [
    model("stories", "mdlm", "student"),
    model("stories/teacher", "mdlm", "teacher"),
    model("stories-ar", "ar", "ar"),
]
PROTEIN_MODELS = [model("proteins", "mdlm", "student", proteins=True)]


def pieces_of(text: str, proteins: bool) -> list[str]:
    """Cut a text into tokens: words with the space before them, or letters."""
    if proteins:
        return list(text)
    words = text.split(" ")
    return [w if i == 0 else " " + w for i, w in enumerate(words) if w or i] if text else []


@dataclass
class Diffusion:
    """Canvases of one request, sample by sample."""

    given: list[list[str | None]]
    final: list[list[str]]
    steps: int
    order: list[list[int]] = field(default_factory=list)

    def rows(self, step: int) -> list[list[str | None]]:
        """Return the canvases after a step: a share of the masks is written, in a random order."""
        rows = []
        for given, final, order in zip(self.given, self.final, self.order, strict=True):
            shown = set(order[: math.ceil(len(order) * step / self.steps)])
            rows.append([final[i] if i in shown else piece for i, piece in enumerate(given)])
        return rows


def diffusion(entry: dict, body: dict) -> Diffusion:
    """Draw what a request will be answered with."""
    proteins = bool(entry["proteins"])
    found = Diffusion([], [], body.get("steps") or 16)
    for sample in range(body.get("n", 1)):
        key = json.dumps(
            [entry["id"], body["seed"], sample, body.get("steps"), body["temperature"]]
        )
        rng = random.Random(key)
        given = canvas(entry, body, proteins)
        masked = [i for i, piece in enumerate(given) if piece is None]
        draw = [rng.choice(RESIDUES) if proteins else " " + rng.choice(WORDS) for _ in given]
        final = [new if old is None else old for old, new in zip(given, draw, strict=True)]
        if "text" not in body and not proteins and len(masked) > 6:
            final[-5] = END
            given[-2:], final[-2:] = [END] * 2, [END] * 2  # of a text with a window of its own
            masked = masked[:-2]
        if entry["kind"] == "ar":
            found.steps = len(masked)
        else:
            rng.shuffle(masked)
        found.given.append(given)
        found.final.append(final)
        found.order.append(masked)
    return found


def canvas(entry: dict, body: dict, proteins: bool) -> list[str | None]:
    """Return the given pieces and masks."""
    if "text" not in body:
        given: list[str | None] = list(pieces_of(body["prompt"], proteins))
        length = min(body.get("max_tokens", entry["length"]) + len(given), entry["length"])
        return given + [None] * (length - len(given))
    before, after = body["text"].split("___")
    gap = 3 if body["gap"] == "auto" else int(body["gap"])
    rest = pieces_of(after.lstrip(" "), proteins)
    if rest and after.startswith(" "):
        rest[0] = " " + rest[0]
    return [*pieces_of(before.rstrip(" "), proteins), *[None] * gap, *rest]


class Handler(BaseHTTPRequestHandler):
    """Answers of the stub."""

    protocol_version = "HTTP/1.1"
    server: "Stub"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def send(self, status: int, content: bytes, media_type: str, **headers: str) -> None:
        """Send a whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def send_json(self, status: int, answer: object, **headers: str) -> None:
        """Send JSON."""
        self.send(status, json.dumps(answer).encode(), "application/json", **headers)

    def send_error_json(self, status: int, message: str, param: str | None = None, **more: str):
        """Send an error in OpenAI's shape."""
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
        self.send_json(status, {"error": error}, **more)

    def refused_key(self) -> bool:
        """Tell a client without the key so."""
        key = self.server.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.send_error_json(401, "Give the API key.")
        return True

    def do_GET(self) -> None:
        """Send a file of the page, or the list of models."""
        path = self.path.partition("?")[0].lstrip("/")
        self.server.asked.append(path)
        if path == "v1/models":
            if not self.refused_key():
                self.send_json(200, {"object": "list", "data": self.server.models})
            return
        file = page_files().get(path)
        if file is None:
            self.send_error_json(404, "Nothing here.")
            return
        self.send(200, file.content, file.media_type, **dict(HEADERS))

    def do_POST(self) -> None:
        """Answer a request for a text, or for tokens."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused_key():
            return
        self.server.bodies.append((self.path, body))
        entry = next(m for m in self.server.models if m["id"] == body["model"])
        wish = body.get("prompt", "") + body.get("text", "")
        if self.path == "/tokenize":
            words = pieces_of(body["text"].removeprefix(" "), bool(entry["proteins"]))
            self.send_json(200, {"tokens": list(range(len(words))), "words": words})
        elif "STRANGER" in wish and "judge" in body:
            self.send_error_json(400, "stories/teacher cannot judge it.", "judge")
        elif "BUSY" in wish:
            self.send_error_json(429, "The queue is full.", Retry_After="7")
        elif "REFUSED" in wish:
            self.send_error_json(400, "steps is 8: use 1 to 4.", "steps")
        else:
            self.stream(entry, body, wish)

    def event(self, data: object) -> None:
        """Send one event, its lines ended as sse-starlette ends them."""
        text = data if isinstance(data, str) else json.dumps(data)
        content = f"data: {text}\r\n\r\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def stream(self, entry: dict, body: dict, wish: str) -> None:
        """Send canvases, the completion and the end."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if self.canvases(entry, body, wish):
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.server.left.append(body["model"])
        self.close_connection = True

    def canvases(self, entry: dict, body: dict, wish: str) -> bool:
        """Send canvases and the completion; false: the connection is to break, as wished."""
        found = diffusion(entry, body)
        began = time.monotonic()
        for step in range(found.steps + 1):
            if "SKIP" in wish and step > found.steps // 2:
                break
            if "LOST" in wish and step == 2:
                time.sleep(0.2)  # what a browser has not read when a connection breaks is lost
                return False
            if "INSIDE" in wish and step == 2:
                self.event({"error": {"message": "out of memory", "type": "server_error"}})
                return True
            rows = [{"index": i, "tokens": row} for i, row in enumerate(found.rows(step))]
            event = {"object": "text_completion.canvas", "id": "c", "step": step}
            event |= {"steps": found.steps, "passes": step, "seconds": time.monotonic() - began}
            self.event(event | {"choices": rows})
            time.sleep(0.2 if "SLOW" in wish else self.server.pause)
        written = sum(map(len, found.order))
        self.event(
            {
                "object": "text_completion", "id": "c", "model": entry["id"],
                "choices": [
                    {"index": i, "text": "".join(row), "finish_reason": "stop"}
                    for i, row in enumerate(found.final)
                ],
                "usage": {"completion_tokens": written, "passes": found.steps},
                "didi": {
                    "steps": found.steps, "passes": found.steps,
                    "seconds": time.monotonic() - began,
                    "perplexity": PERPLEXITIES[: len(found.final)] if "judge" in body else None,
                },
            }
        )  # fmt: skip
        self.event("[DONE]")
        return True


class Stub(ThreadingHTTPServer):
    """The server, which remembers what it was asked."""

    daemon_threads = True

    def __init__(self, models=TEXT_MODELS, *, pause: float = 0.003, api_key: str | None = None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.models, self.pause, self.api_key = models, pause, api_key
        self.asked: list[str] = []
        self.bodies: list[tuple[str, dict]] = []
        self.left: list[str] = []  # models whose client went away before the end
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def __enter__(self) -> "Stub":
        """Begin to serve."""
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()
        self.thread.join()
