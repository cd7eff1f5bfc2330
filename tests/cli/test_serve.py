"""`didi serve`: what it serves, and what it refuses before it listens."""

import socket
import sys

import pytest
from tests.random_models import save_random
from typer.testing import CliRunner

from didi_instruct.cli.main import app
from didi_instruct.errors import MissingExtraError, UserError

pytest.importorskip("fastapi", reason="serving needs its extra")

from didi_instruct.serving import run
from didi_instruct.serving.run import ServeSettings, open_models, serve, usual_sources


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("model") / "one")


def test_alone_it_serves_the_shipped_student_and_its_teacher():
    assert usual_sources(None, ()) == ["stories", "stories/teacher"]
    assert usual_sources(None, ["other"]) == ["stories", "other"]
    assert usual_sources("mine", ()) == ["mine"]
    served = open_models(usual_sources(None, ()), device="cpu")
    assert [one.role for one in served] == ["student", "teacher"]


def test_settings_reach_the_server(folder, monkeypatch):
    seen = {}
    monkeypatch.setattr(run, "serve", lambda served, settings, listening: seen.update(
        names=[one.name for one in served], settings=settings))  # fmt: skip
    monkeypatch.setenv("DIDI_API_KEY", "secret")
    given = ["--port", "1234", "--queue", "7", "--timeout", "9", "--batch-tokens", "640"]
    result = CliRunner().invoke(app, ["serve", str(folder), *given, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert seen["names"] == [str(folder)]
    assert seen["settings"] == ServeSettings(
        port=1234, queue=7, seconds=9, positions=640, api_key="secret"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"port": 70000}, "port is 70000"), ({"api_key": " "}, "key is empty"),
     ({"api_key": "schlüssel"}, "key is not ASCII"), ({"positions": 0}, "positions is 0"),
     ({"grace": 0}, "grace is 0"), ({"most_texts": -1}, "most_texts is -1")],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong, said):
    with pytest.raises(UserError, match=said):
        ServeSettings(**wrong)


def test_an_empty_key_never_opens_the_server(folder, monkeypatch):
    monkeypatch.setattr(run, "serve", lambda *args, **kwargs: pytest.fail("it was served"))
    monkeypatch.delenv("DIDI_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["serve", str(folder), "--api-key", "", "--device", "cpu"])
    assert isinstance(result.exception, UserError)
    assert "The API key is empty" in str(result.exception)


def test_a_model_given_twice_is_refused(folder):
    with pytest.raises(UserError, match="given twice"):
        open_models([str(folder), str(folder)])


def test_a_port_in_use_is_refused(folder):
    served = open_models([str(folder)], device="cpu")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port} cannot be listened on"):
            serve(served, ServeSettings(port=port))


def test_without_its_extra_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = CliRunner().invoke(app, ["serve"])
    assert isinstance(result.exception, MissingExtraError)
    assert "didi-instruct[serve]" in str(result.exception)
