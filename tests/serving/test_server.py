"""The server behind a socket: OpenAI's client, clients that leave, signals, hostile bodies."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest
from tests.golden import tiny

import didi_instruct as didi

pytest.importorskip("uvicorn", reason="serving needs its extra")

import uvicorn
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from tests.serving.servers import Parts, listening

from didi_instruct.serving.run import StoppingServer

NAMES = ["windows", "plain", "ar-ends"]
PATIENCE = 60  # seconds until a test that hangs fails


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny")
    tiny.write_models(made, NAMES)
    return made


@pytest.fixture(scope="module")
def models(folder):
    return {name: didi.load(folder / name) for name in NAMES}


@pytest.fixture(scope="module")
def parts(models):
    made = Parts(models)
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(parts):
    with listening(parts.app) as (url, _):
        yield url


@pytest.fixture
def openai(address):
    package = pytest.importorskip("openai", reason="needs OpenAI's client: pip install openai")
    return package.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_openais_client_reads_completions(openai, models):
    found = openai.completions.create(
        model="plain", prompt="Anna", max_tokens=6, n=2, seed=4, temperature=0.8,
        extra_body={"steps": 3},
    )  # fmt: skip
    texts = models["plain"].generate(
        num=2, prompt="Anna", length=7, seed=4, temperature=0.8, steps=3
    )
    assert ["Anna" + choice.text for choice in found.choices] == texts
    assert found.usage.completion_tokens == 12
    assert [model.id for model in openai.models.list()] == NAMES


@pytest.mark.parametrize("name", ["plain", "ar-ends"])
def test_openais_client_reads_streams(openai, name):
    prompt = "Anna" if name == "plain" else "w3"
    given = {"model": name, "prompt": prompt, "seed": 4}
    whole = openai.completions.create(**given).choices[0].text
    pieces = openai.completions.create(**given, stream=True, stream_options={"include_usage": True})
    seen = list(pieces)
    assert "".join(piece.choices[0].text for piece in seen if piece.choices) == whole
    assert seen[-1].usage.total_tokens > 0


def test_openais_client_knows_the_errors(openai):
    import openai as package

    with pytest.raises(package.BadRequestError, match="logprobs"):
        openai.completions.create(model="plain", prompt="Anna", logprobs=2)
    with pytest.raises(package.NotFoundError, match="no such model"):
        openai.completions.create(model="gone", prompt="Anna")
    with pytest.raises(package.BadRequestError, match="chat template"):
        openai.chat.completions.create(
            model="plain", messages=[{"role": "user", "content": "Anna"}]
        )


def send(address, body, path="/v1/completions"):
    """Send a request; return the connection, whose answer nobody has read."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def wait_until(condition):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < PATIENCE
        time.sleep(0.01)


def outcomes(parts, outcome):
    sample = parts.metrics.requests.labels("plain", outcome)
    return sample._value.get()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_costing(address, parts, monkeypatch, stream):
    """A request of 1000 slow steps is over soon after its client has gone."""
    brings, calls = parts.engine._brings["plain"], []
    own = brings.denoiser.draw

    def slow(*args):
        calls.append(1)
        time.sleep(0.01)
        return own(*args)

    monkeypatch.setattr(brings.denoiser, "draw", slow)
    before = outcomes(parts, "cancelled")
    body = {"model": "plain", "steps": 1000, "sampler": "remasking", "stream": stream}
    connection = send(address, body | ({"diffusing": True} if stream else {}))
    wait_until(lambda: len(calls) > 3)
    if stream:
        assert connection.getresponse().read(100)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_until(lambda: outcomes(parts, "cancelled") == before + 1)
    assert len(calls) < 900
    wait_until(lambda: parts.engine.waiting == 0)


def test_a_slow_reader_delays_nobody(address, parts):
    """Its canvases wait in a bounded queue while others are served."""
    slow = send(address, {"model": "plain", "steps": 1000, "sampler": "remasking", "n": 8,
                          "stream": True, "diffusing": True})  # fmt: skip
    slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for seed in range(5):
        connection = send(address, {"model": "plain", "steps": 2, "seed": seed})
        assert connection.getresponse().status == 200
    slow.close()
    wait_until(lambda: parts.engine.waiting == 0)


def test_many_clients_get_their_own_texts(address, models):
    """40 at once, whole and streamed: nothing lost, nothing mixed up."""
    found = {}

    def ask(seed):
        body = {"model": "plain", "steps": 1 + seed % 5, "seed": seed, "stream": seed % 2 == 1}
        answer = send(address, body).getresponse().read().decode()
        if seed % 2:
            answer = answer.split("\n\n")[0].removeprefix("data: ")
        found[seed] = json.loads(answer)["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for seed in range(40):
        assert [found[seed]] == models["plain"].generate(steps=1 + seed % 5, seed=seed)


def test_sigterm_finishes_what_runs(folder):
    """The command answers what it has, refuses nobody half-way, and exits with 0."""
    command = [sys.executable, "-m", "didi_instruct", "serve", str(folder / "plain"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        address = next(word for word in process.stdout.readline().split() if "http" in word)
        body = {"steps": 1000, "sampler": "remasking", "n": 4}
        connections = [send(address, body | {"seed": seed}) for seed in range(3)]
        streamed = send(address, body | {"stream": True, "diffusing": True})
        first = streamed.getresponse()
        assert first.readline().startswith(b"data:")
        process.send_signal(signal.SIGTERM)
        assert first.read().endswith(b"data: [DONE]\n\n")
        answers = [connection.getresponse() for connection in connections]
        assert all(answer.status in (200, 503) for answer in answers)
        assert all(json.loads(answer.read()) for answer in answers)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.stdout.close()


def test_what_outlives_the_grace_is_told_so(models, monkeypatch):
    """A request of seconds, a grace of 0.2 s: its client gets an answer that says so."""
    parts = Parts({"plain": models["plain"]})
    denoiser = parts.engine._brings["plain"].denoiser
    draw = denoiser.draw
    monkeypatch.setattr(denoiser, "draw", lambda *args: time.sleep(0.2) or draw(*args))
    config = uvicorn.Config(parts.app, port=0, log_level="error", timeout_graceful_shutdown=30)
    server = StoppingServer(config, parts.engine, 0.2)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    connection = send(f"http://127.0.0.1:{port}", {"steps": 1000})
    wait_until(lambda: parts.engine.waiting)
    server.should_exit = True
    answer = connection.getresponse()
    assert answer.status == 503
    assert json.loads(answer.read())["error"]["code"] == "stopping"
    thread.join(PATIENCE)
    assert not thread.is_alive()


VALUES = [None, True, -1, 0, 1, 3, 2**70, 1.5, -1e300, "", "Anna", "w1 ___ w2", "\x00", "é" * 50,
          "nan", [], [1], ["Anna", 2], [[]], {}, {"a": 1}, {"order": "streams"}]  # fmt: skip
FIELDS = ["model", "prompt", "suffix", "max_tokens", "n", "seed", "temperature", "top_p", "top_k",
          "stop", "stream", "diffusing", "steps", "sampler", "options", "judge", "echo", "text",
          "gap", "messages", "stream_options", "logprobs", "odd"]  # fmt: skip
SAMPLERS = ["ancestral", "rgas", "confidence", "remasking", "blocks", "first-hitting", "dimo"]
OPTIONS = ["grid", "order", "eta", "strategy", "threshold", "block_length", "inner", "random",
           "noise", "h_start", "candidates", "split", "clamp", "greedy_tail"]  # fmt: skip


def hostile(rng):
    """A path and a body: any fields, any values, sometimes damaged."""
    path = rng.choice(["completions", "infill", "chat/completions"])
    body = {name: rng.choice(VALUES) for name in rng.sample(FIELDS, rng.randint(0, 6))}
    if rng.random() < 0.5:
        body |= {"sampler": rng.choice(SAMPLERS), "model": rng.choice(["plain", "windows"])}
        scalars = [value for value in VALUES if not isinstance(value, dict)]
        body["options"] = {rng.choice(OPTIONS): rng.choice(scalars)}
    if path == "infill":
        body.setdefault("text", "w1 ___")
    if rng.random() < 0.5:
        body["steps"] = rng.choice([1, 2])
    content = json.dumps(body).encode()
    if rng.random() < 0.2:
        place = rng.randrange(len(content))
        content = content[:place] + rng.randbytes(rng.randint(0, 3)) + content[place + 1 :]
    return f"/v1/{path}", content


@pytest.mark.parametrize("seed", range(4))
def test_hostile_bodies_never_break_the_server(parts, seed):
    """4 x 500 random bodies: an answer or an error that the client can mend, never a 5xx."""
    rng, client = random.Random(seed), TestClient(parts.app, raise_server_exceptions=False)
    for _ in range(500):
        path, content = hostile(rng)
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), (path, content, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]


def test_the_openapi_schema_is_kept(parts):
    """Schemathesis: 60 requests of each path, made from the schema, get what it promises."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    schema = schemathesis.openapi.from_asgi("/openapi.json", parts.app)
    for found in schema.get_all_operations():
        check_operation(found.ok())


def check_operation(operation):
    """No 5xx, and no status that the schema does not name."""

    @given(case=operation.as_strategy())
    @settings(
        max_examples=60, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def check(case):
        response = case.call()
        assert response.status_code < 500, response.text
        assert str(response.status_code) in operation.definition.raw["responses"]

    check()
