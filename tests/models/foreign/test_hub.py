import huggingface_hub
import pytest
from huggingface_hub import constants

from didi_instruct.errors import UserError
from didi_instruct.models.foreign import hub
from didi_instruct.models.foreign.hub import fetch
from didi_instruct.models.foreign.reading import recognise

from .reference import hub_config, hub_folder, prefixed, weights

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache as the library lays it out; anything that would use the network fails the test."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "require_network", lambda: pytest.fail("the network was asked"))
    home = tmp_path / "models--someone--mdlm"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(REVISION)
    return home / "snapshots" / REVISION


def test_what_is_in_the_cache_needs_no_network(cache):
    hub_folder(cache, prefixed("backbone.", weights()), hub_config())
    assert fetch("someone/mdlm") == cache
    assert recognise(fetch("someone/mdlm")).layout == "mdlm-hub"


def test_without_network_one_line_says_so(cache, monkeypatch):
    def offline():
        raise ConnectionError("no network: its name cannot be looked up")

    monkeypatch.setattr(hub, "require_network", offline)
    for name in ("someone/other", "someone/mdlm"):  # the second has a cache without weights
        cache.mkdir(parents=True, exist_ok=True)
        with pytest.raises(UserError, match="not in the local cache.*no network.*local folder"):
            fetch(name)


def test_a_name_that_cannot_be_one(cache):
    with pytest.raises(UserError, match="no name on Hugging Face"):
        fetch("a/b/c")


@pytest.mark.parametrize(
    ("files", "pickled"),
    [(["model.safetensors", "old.ckpt", "code.py"], False), (["pytorch_model.bin"], True)],
)
def test_pickles_only_where_there_are_no_safetensors_and_never_code(
    cache, monkeypatch, files, pickled
):
    asked = {}

    def download(_, revision=None, local_files_only=False, allow_patterns=None):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        asked["patterns"] = allow_patterns
        return str(cache)

    monkeypatch.setattr(hub, "require_network", lambda: None)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch("someone/mdlm") == cache
    assert ("*.bin" in asked["patterns"]) == pickled
    assert not any("py" in pattern for pattern in asked["patterns"])
