"""Models that come with the package: found by name, wherever one stands."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

import didi_instruct as didi
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.hub import sources
from didi_instruct.hub.export import convert
from didi_instruct.hub.sources import DidiFolder, find_source
from didi_instruct.models.dit import build_model
from didi_instruct.models.foreign import hub

WORDS = Tokenizer.from_words([*(f"w{n}" for n in range(70)), "<|endoftext|>"])
CONFIG = ModelConfig(
    layers=1, hidden=64, heads=2, cond_dim=8, vocab_size=72, length=12, learned_positions=True,
    end_id=70, lengths=(0, 0, 0, 0, 5, 3, 1, 0, 0, 1, 0, 0, 0), schedule=ScheduleConfig(eps=0.0),
)  # fmt: skip
ALL = 24 * 2**20
"""Bytes that may be shipped."""


def make(seed, **provenance):
    torch.manual_seed(seed)
    return didi.Model(build_model(CONFIG), CONFIG, WORDS, provenance=provenance)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package without its models, and a folder to stand in; there is no network."""
    root = tmp_path / "package" / "shipped"
    monkeypatch.setattr(sources, "root", lambda: root)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(hub, "require_network", pytest.fail)
    return root


@pytest.fixture
def both(package):
    make(1).save(package / "stories" / "student")
    make(2).save(package / "stories" / "teacher")
    return package


@pytest.mark.parametrize("name", ["stories", "stories/teacher"])
def test_an_installation_without_its_models_says_so_in_one_line(package, name):
    with pytest.raises(UserError, match=f"`{name}` ships with didi, .* install didi again") as told:
        didi.load(name)
    assert "\n" not in str(told.value)
    with pytest.raises(UserError, match=f"^{name}: no such file or folder"):
        didi.load(Path(name))
    assert sources.shipped() == {}


def test_what_is_shipped_is_what_is_there(both):
    assert list(sources.shipped()) == ["stories", "stories/teacher"]
    (both / "stories" / "notes").mkdir()
    shutil.rmtree(both / "stories" / "teacher")
    assert list(sources.shipped()) == ["stories"]
    with pytest.raises(UserError, match="`stories/teacher` ships with didi, but is not in"):
        didi.load("stories/teacher")
    with pytest.raises(UserError, match=r"no model that ships with didi \(stories\)"):
        didi.load("storis")


def test_names_lead_to_their_folders(both):
    for name, part in (("stories", "student"), ("stories/teacher", "teacher")):
        origin, folder = find_source(name), both / "stories" / part
        assert origin == DidiFolder(name, folder)
        assert find_source(name).fingerprint() == find_source(folder).fingerprint()
    texts = [didi.load(s).generate(num=3, steps=4, seed=1) for s in ("stories", "stories/teacher")]
    assert texts == [make(n).generate(num=3, steps=4, seed=1) for n in (1, 2)]


def test_a_name_means_the_same_beside_other_folders(both, tmp_path):
    """A folder of texts called `stories` changes nothing; written as a path it is that folder."""
    here = tmp_path / "here" / "stories"
    here.mkdir()
    (here / "one.txt").write_text("once")
    assert find_source("stories").path == both / "stories" / "student"
    for path in ("./stories", here):
        with pytest.raises(UserError, match="holds no model"):
            find_source(path)


def test_a_model_of_that_name_here_is_asked_about(both, tmp_path):
    here = tmp_path / "here" / "stories" / "teacher"
    make(3).save(here)
    with pytest.raises(UserError, match=r"write \./stories/teacher for the folder") as caught:
        didi.load("stories/teacher")
    spelled = str(caught.value).rpartition("for the folder, ")[2].removesuffix(" for the other.")
    assert find_source(spelled).path == both / "stories" / "teacher"  # what it says can be written
    assert find_source("./stories/teacher").path.resolve() == here
    assert find_source(here).path == here
    assert find_source("stories").path == both / "stories" / "student"


def test_where_nothing_is_shipped_a_folder_has_the_name(package, tmp_path):
    make(3).save(tmp_path / "here" / "stories")
    assert find_source("stories").path.resolve() == tmp_path / "here" / "stories"


def test_what_goes_into_the_package_is_public_and_knows_its_name(package, tmp_path):
    """The way to ship: one conversion. No path of a disk goes along, and the card is complete."""
    recipe = {"data": {"source": "/home/ann/texts"}, "method": "mixture"}
    recipe["mixture"] = {"budgets": [4, 8]}
    make(1, recipe=recipe, host="lab7").save(tmp_path / "run")
    row = {"model": "/home/ann/run", "sampler": "ancestral", "steps": 8, "num_samples": 64}
    row |= {"ppl": 5.125, "ppl_ci95": [5.0, 5.25], "mauve": None}
    numbers = {"judge": "/home/ann/judge", "rows": [row], "baseline": [row | {"steps": 16}]}
    (tmp_path / "eval.json").write_text(json.dumps(numbers))
    dest = package / "stories" / "student"
    convert(
        tmp_path / "run", dest, "didi", storage="int8", license="mit",
        numbers=tmp_path / "eval.json", about="Of stories\nthat a model wrote.",
    )  # fmt: skip
    settings, card = (dest / "config.json").read_text(), (dest / "README.md").read_text()
    assert "/home/ann" not in settings + card
    assert "lab7" not in settings
    assert json.loads(settings)["storage"] == "int8"
    for line in (
        "# stories", "license: mit", "Of stories that a model wrote.",
        "didi generate stories --steps 8 --num 4",
        "| steps | judge's perplexity |", "| 8 | 5.125 ± 0.12 |", "| 16 | 5.125 ± 0.12 |",
        "64 texts per row, judged by `judge`; ± is half of a 95% interval.",
        "| weights in the file | 8 bits with a scale per row (vectors float32), used as float32 |",
        "| usual text | 4 to 9 tokens (nine in ten training texts) |",
        "| steps of sampling it was trained for | 4, 8 |",
    ):  # fmt: skip
        assert f"{line}\n" in card, line
    assert "distilled by mixture steps for texts in 4 or 8 steps." in card
    assert "Each text has a window of its own" in card
    assert didi.load("stories").provenance["recipe"]["data"]["source"] == "texts"


def test_a_file_without_numbers_is_refused_before_anything_is_written(tmp_path):
    make(1).save(tmp_path / "run")
    (tmp_path / "odd.json").write_text('{"rows": []}')
    with pytest.raises(UserError, match="holds no rows: give a file that `didi eval --json`"):
        convert(tmp_path / "run", tmp_path / "dest", "didi", numbers=tmp_path / "odd.json")
    assert not (tmp_path / "dest").exists()


def test_what_is_shipped_is_small_and_opens_at_once(tmp_path, monkeypatch):
    """Two networks with their tokenizers in a second; the best of three, others may be busy."""
    monkeypatch.chdir(tmp_path)
    files = [path for path in sources.root().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= ALL
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        models = [didi.load(name, device="cpu") for name in ("stories", "stories/teacher")]
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1
    assert models[0].tokenizer.hash == models[1].tokenizer.hash
    for folder in sources.shipped().values():
        assert (folder / "README.md").is_file()
    assert len(models[0].generate(num=1, steps=8, seed=0)[0].split()) > 10
