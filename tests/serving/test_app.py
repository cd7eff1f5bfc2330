"""Every path of the API and every error, without a socket."""

import json

import pytest
from tests.golden import tiny

import didi_instruct as didi

pytest.importorskip("fastapi", reason="serving needs its extra")

from fastapi.testclient import TestClient
from tests.serving.servers import Parts

from didi_instruct.data.chat import ChatTemplate
from didi_instruct.serving.engine import Limits

NAMES = ["windows", "plain", "ar-ends", "duo"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ m.content }} {% endfor %}w9"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write_models(folder, NAMES)
    return {name: didi.load(folder / name) for name in NAMES}


@pytest.fixture(scope="module")
def parts(models):
    made = Parts(models, chat={"windows": ChatTemplate(TEMPLATE, {})})
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(parts):
    return TestClient(parts.app, raise_server_exceptions=False)


def post(client, path, **body):
    return client.post(path, json=body)


def complete(client, **body):
    answer = post(client, "/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client, path="/v1/completions", **body):
    """Events of a stream, which ends as it should."""
    answer = post(client, path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *found, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in found]


def error_of(answer, status, param=None, code=None):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    return error["message"]


@pytest.mark.parametrize("name", ["windows", "plain", "duo"])
@pytest.mark.parametrize("seed", range(3))
def test_a_completion_is_the_text_of_generate(client, models, name, seed):
    word = "w3" if name == "windows" else "Anna"
    given = {"prompt": f"{word} {word}", "steps": 4, "seed": seed, "temperature": 0.9}
    texts = models[name].generate(num=2, **given)
    whole = complete(client, model=name, n=2, echo=True, **given)
    assert [choice["text"] for choice in whole["choices"]] == texts
    plain = complete(client, model=name, n=2, **given)
    assert [given["prompt"] + c["text"] for c in plain["choices"]] == texts
    assert [c["index"] for c in plain["choices"]] == [0, 1]
    assert plain["object"] == "text_completion"
    assert plain["model"] == name
    assert plain["didi"]["nfe"] == 4


def test_the_first_model_is_meant_where_none_is_named(client):
    assert complete(client, steps=1)["model"] == "windows"


def test_prompts_are_continued_side_by_side(client, models):
    texts = models["plain"].generate(num=2, prompt=["Anna", "Boris"], steps=2, seed=5)
    found = complete(client, model="plain", prompt=["Anna", "Boris"], n=2, steps=2, seed=5)
    begins = ["Anna", "Anna", "Boris", "Boris"]
    assert [b + c["text"] for b, c in zip(begins, found["choices"], strict=True)] == texts


def test_max_tokens_counts_what_is_written(client, models):
    found = complete(client, model="plain", prompt="Anna greets", max_tokens=5, steps=2)
    assert len(found["choices"][0]["text"].split()) == 5
    assert found["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7, "passes": 2.0,
    }  # fmt: skip
    assert found["choices"][0]["finish_reason"] == "length"
    most = complete(client, model="plain", prompt="Anna greets", max_tokens=500, steps=2)
    assert most["usage"]["completion_tokens"] == models["plain"].config.length - 2
    answer = post(
        client, "/v1/completions", model="plain", prompt=["Anna", "Anna greets"], max_tokens=3
    )
    error_of(answer, 400, "max_tokens")


def test_usage_counts_texts_up_to_their_ends(client, models):
    for seed in range(5):
        found = complete(client, model="windows", steps=3, n=3, seed=seed)
        words = [len(choice["text"].split()) for choice in found["choices"]]
        assert found["usage"]["completion_tokens"] == sum(words)
        reasons = ["length" if n == tiny.WINDOW else "stop" for n in words]
        assert [choice["finish_reason"] for choice in found["choices"]] == reasons


def test_a_suffix_is_written_up_to(client, models):
    given = {"prompt": "Anna", "suffix": "Boris follows", "steps": 3, "seed": 2}
    (text,) = models["plain"].generate(**given)
    found = complete(client, model="plain", **given)
    assert "Anna" + found["choices"][0]["text"] + "Boris follows" == text


def test_stop_cuts_a_text(client):
    whole = complete(client, model="plain", steps=3, seed=1)["choices"][0]
    word = whole["text"].split()[4]
    cut = complete(client, model="plain", steps=3, seed=1, stop=["nowhere", word])["choices"][0]
    assert cut["text"] == whole["text"][: whole["text"].index(word)]
    assert (whole["finish_reason"], cut["finish_reason"]) == ("length", "stop")


def test_a_judge_tells_perplexities(client):
    found = complete(client, model="windows", steps=3, n=2, judge="windows")
    assert len(found["didi"]["perplexity"]) == 2
    assert all(p > 1 for p in found["didi"]["perplexity"])
    answer = post(client, "/v1/completions", model="windows", judge="plain")
    assert "other tokens" in error_of(answer, 400, "judge")


def test_a_stream_sends_each_text_when_it_is_whole(client):
    given = {"model": "plain", "steps": 2, "n": 2, "seed": 4}
    texts = [c["text"] for c in complete(client, **given)["choices"]]
    found = events(client, **given, stream_options={"include_usage": True})
    assert [e["choices"][0]["text"] for e in found[:-1]] == texts
    assert [e["choices"][0]["finish_reason"] for e in found[:-1]] == ["length"] * 2
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 64
    assert len({e["id"] for e in found}) == 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stop", [None, ["w1"], ["w1 w2", "5"]])
def test_a_left_to_right_model_streams_pieces_that_join_to_the_text(client, seed, stop):
    given = {"model": "ar-ends", "n": 2, "seed": seed, "prompt": "w3", "stop": stop}
    choices = complete(client, **given)["choices"]
    joined, reasons = ["", ""], [None, None]
    for found in events(client, **given):
        (choice,) = found["choices"]
        joined[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert joined == [choice["text"] for choice in choices]
    assert reasons == [choice["finish_reason"] for choice in choices]


@pytest.mark.parametrize("name", NAMES)
def test_diffusing_sends_every_canvas(client, name):
    steps = {} if name == "ar-ends" else {"steps": 3}
    word = "w3" if name in ("windows", "ar-ends") else "Anna"
    given = {"model": name, "prompt": word, "n": 2, "seed": 1, **steps}
    *canvases, last = events(client, diffusing=True, **given)
    assert [c["step"] for c in canvases] == list(range(len(canvases)))
    assert {c["object"] for c in canvases} == {"text_completion.canvas"}
    assert canvases[-1]["step"] == canvases[-1]["steps"]
    assert last["object"] == "text_completion"
    whole = complete(client, echo=True, **given)
    for index, choice in enumerate(whole["choices"]):
        first, final = (canvases[k]["choices"][index]["tokens"] for k in (0, -1))
        assert first == [word] + [None] * (len(first) - 1)
        assert [piece.strip() for piece in final if piece] == choice["text"].split()
    assert last["usage"] == whole["usage"]


def test_infilling_returns_the_whole_text(client, models):
    given = {"gap": "3", "steps": 2, "seed": 3}
    texts = models["windows"].generate(num=2, infill="w1 ___ w5", **given)
    found = post(client, "/v1/infill", model="windows", text="w1 ___ w5", n=2, **given).json()
    assert [choice["text"] for choice in found["choices"]] == texts
    assert {choice["finish_reason"] for choice in found["choices"]} == {"stop"}
    assert found["usage"]["completion_tokens"] == 6
    *canvases, _ = events(client, "/v1/infill", text="w1 ___ w5", diffusing=True, **given)
    assert canvases[0]["choices"][0]["tokens"] == ["w1", None, None, None, " w5"]


def test_models_tell_what_they_are(client):
    found = client.get("/v1/models").json()
    assert [entry["id"] for entry in found["data"]] == NAMES
    first = found["data"][0]
    assert first["role"] == "student"
    assert first["length"] == tiny.WINDOW
    assert "rgas" in first["samplers"]
    assert "rgas" not in found["data"][3]["samplers"]
    assert found["data"][2]["steps"] is None


def test_tokenize(client):
    found = post(client, "/tokenize", model="plain", text="Anna greets Boris").json()
    assert len(found["tokens"]) == 3
    assert [word.strip() for word in found["words"]] == ["Anna", "greets", "Boris"]


def test_a_conversation_needs_a_template(client):
    messages = [{"role": "user", "content": "w1 w2"}]
    path = "/v1/chat/completions"
    message = error_of(post(client, path, model="plain", messages=messages), 400, "messages")
    assert "no chat template" in message
    found = post(client, path, model="windows", messages=messages, steps=2, seed=1).json()
    plain = complete(client, model="windows", prompt="w1 w2 w9", steps=2, seed=1)
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"] == {
        "role": "assistant", "content": plain["choices"][0]["text"],
    }  # fmt: skip
    pieces = events(client, path, model="windows", messages=messages, steps=2, seed=1)
    joined = "".join(e["choices"][0]["delta"]["content"] for e in pieces)
    assert joined == plain["choices"][0]["text"]
    system = [{"role": "system", "content": "w1"}]
    assert "no system" in error_of(post(client, path, messages=system), 400, "messages")


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("completions", {"model": "gone"}, 404, "model", "model_not_found"),
        ("completions", {"judge": "gone"}, 404, "judge", "model_not_found"),
        ("completions", {"logprobs": 3}, 400, "logprobs", "unsupported"),
        ("completions", {"presence_penalty": 0.5}, 400, "presence_penalty", "unsupported"),
        ("completions", {"stepz": 3}, 400, "stepz", "unsupported"),
        ("completions", {"steps": 0}, 400, "steps", None),
        ("completions", {"steps": "4"}, 400, "steps", None),
        ("completions", {"n": 65}, 400, "n", None),
        ("completions", {"n": 9}, 400, "n", None),
        ("completions", {"temperature": -1}, 400, "temperature", None),
        ("completions", {"top_p": 0}, 400, "top_p", None),
        ("completions", {"prompt": [1, 2]}, 400, "prompt", None),
        ("completions", {"prompt": []}, 400, "prompt", None),
        ("completions", {"stop": ""}, 400, "stop", None),
        ("completions", {"sampler": "gone"}, 400, "sampler", None),
        ("completions", {"sampler": "autoregressive"}, 400, "sampler", None),
        ("completions", {"sampler": "first-hitting", "steps": 3}, 400, "steps", None),
        ("completions", {"sampler": "rgas", "options": {"h": 3}}, 400, None, None),
        ("completions", {"prompt": "unknown"}, 400, None, None),
        ("completions", {"model": "ar-ends", "suffix": "w1"}, 400, "suffix", None),
        ("completions", {"model": "duo", "sampler": "rgas"}, 400, "sampler", None),
        ("infill", {"text": "no gap"}, 400, "text", None),
        ("infill", {"text": "w1 ___", "gap": "many"}, 400, "gap", None),
        ("infill", {"text": "w1 ___", "gap": "9-4"}, 400, "gap", None),
        ("infill", {"model": "ar-ends", "text": "w1 ___"}, 400, "model", None),
        ("infill", {}, 400, "text", None),
        ("chat/completions", {"messages": []}, 400, "messages", None),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, path, body, status, param, code):
    for stream in (False, True):
        answer = post(client, f"/v1/{path}", stream=stream, **body)
        assert error_of(answer, status, param, code)


def test_canvases_are_for_streams(client):
    for path, body in (("completions", {}), ("infill", {"text": "w1 ___"})):
        error_of(post(client, f"/v1/{path}", diffusing=True, **body), 400, "diffusing")


def test_values_that_ask_for_nothing_are_no_error(client):
    complete(client, steps=1, logprobs=None, presence_penalty=0, best_of=1, user=None)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 5000,
     b'{"seed": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}', b'{"steps": 1e400}',
     b'{"model": "\\u0000"}', b'{"temperature": Infinity}', b'{"": 1}'],
)  # fmt: skip
def test_malformed_bodies_are_refused(client, content):
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"]


def test_other_paths_and_methods_have_errors_of_the_same_form(client):
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get("/v1/completions"), 405)
    answer = client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    error_of(answer, 400)


def test_the_page_is_sent_with_strict_headers(client):
    page = client.get("/")
    assert page.status_code == 200
    assert "didi" in page.text
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert client.get("/page/page.css").headers["content-type"].startswith("text/css")
    api = client.get("/health")
    assert api.json() == {"status": "ok"}
    assert "default-src 'none'" in api.headers["content-security-policy"]
    assert api.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in api.headers


def test_metrics_count_by_model(client):
    complete(client, model="plain", steps=3)
    text = client.get("/metrics").text
    assert 'didi_requests_total{model="plain",outcome="done"}' in text
    for name in ("passes", "pass_texts", "pass_tokens", "request_nfe", "first_canvas_seconds",
                 "last_canvas_seconds", "generation_tokens"):  # fmt: skip
        assert f"didi_{name}" in text
    assert "didi_requests_waiting 0.0" in text


def test_prompt_tokens_leave_out_what_fills_a_window(client):
    """What stands behind the end of a drawn length was not given: it fills the row."""

    def counted():
        lines = client.get("/metrics").text.splitlines()
        of = 'didi_prompt_tokens_total{model="windows"} '
        return sum(float(line.removeprefix(of)) for line in lines if line.startswith(of))

    before = counted()
    usage = complete(client, model="windows", prompt="w3 w2", n=4, steps=3)["usage"]
    assert usage["prompt_tokens"] == 2
    assert counted() - before == 4 * 2


def test_a_body_without_its_type_is_told_which_to_send(client):
    answer = client.post("/v1/completions", content=b'{"prompt": "Anna"}')
    assert "Content-Type: application/json" in error_of(answer, 400)


def test_a_key_guards_all_but_page_and_health(models):
    parts = Parts({"plain": models["plain"]}, key="secret")
    client = TestClient(parts.app)
    for path in ("/", "/health", "/ready"):
        assert client.get(path).status_code == 200
    for path in ("/v1/models", "/metrics"):
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            error_of(client.get(path, headers=given), 401, code="invalid_api_key")
        given = {"authorization": "Bearer secret"}
        assert client.get(path, headers=given).status_code == 200
    assert client.post("/tokenize", json={"text": "Anna"}).status_code == 401
    parts.close()


def test_a_key_from_a_file_may_end_with_a_line_end(models):
    parts = Parts({"plain": models["plain"]}, key="secret\n")
    answer = TestClient(parts.app).get("/v1/models", headers={"authorization": "Bearer secret"})
    assert answer.status_code == 200
    parts.close()


def test_limits_on_bodies_and_on_the_queue(models):
    parts = Parts({"plain": models["plain"]}, limits=Limits(queue=1), most_bytes=1000)
    client = TestClient(parts.app)
    error_of(client.post("/v1/completions", json={"prompt": "Anna " * 300}), 413)
    chunks = (b'{"prompt": "' + b"a" * 900, b"a" * 900)
    headers = {"content-type": "application/json"}
    error_of(client.post("/v1/completions", content=iter(chunks), headers=headers), 413)
    parts.engine._count = 1
    answer = client.post("/v1/completions", json={})
    assert "queue is full" in error_of(answer, 429, code="queue_full")
    assert int(answer.headers["retry-after"]) > 0
    parts.engine._count = 0
    assert client.post("/v1/completions", json={"steps": 1}).status_code == 200
    parts.close()
    error_of(client.post("/v1/completions", json={}), 503, code="stopping")
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200


def test_a_failing_model_says_nothing_of_its_inside(models, monkeypatch):
    parts = Parts({"plain": models["plain"]})
    client = TestClient(parts.app, raise_server_exceptions=False)

    def fail(*args):
        raise RuntimeError("secret path /weights")

    brings = parts.engine._brings["plain"]
    monkeypatch.setattr(brings.denoiser, "draw", fail)
    answer = post(client, "/v1/completions", steps=2)
    assert error_of(answer, 500, code="failed") == "The model failed on this request."
    monkeypatch.undo()
    assert post(client, "/v1/completions", steps=2).status_code == 200
    parts.close()


def test_the_log_has_no_prompts(client, caplog):
    with caplog.at_level("INFO", logger="didi_instruct.serving"):
        complete(client, model="plain", prompt="Anna greets", steps=1)
        client.get("/health?prompt=Anna")
    lines = [record.getMessage() for record in caplog.records]
    assert any("POST /v1/completions 200" in line for line in lines)
    assert any("GET /health 200" in line for line in lines)
    assert not any("Anna" in line for line in lines)
