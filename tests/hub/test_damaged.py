"""Damaged model folders: one line for the user, whatever is asked of them."""

import json
import random
import shutil

import pytest
from tests.adapters.test_files import saved
from tests.models import causal_folders, masked_folders
from tests.models.foreign.folders import FOLDERS, WORDS

import didi_instruct as didi
from didi_instruct.errors import UserError
from didi_instruct.hub.export import convert
from didi_instruct.hub.info import describe_source
from didi_instruct.hub.sources import find_source, peek_models

ODD = [None, True, 0, -1, 3.5, 10**12, 1e300, "", "x", "\u202e\x1b[31m", "../../x", [], [1], {}]
COUNT = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of each form."""
    home = tmp_path_factory.mktemp("models")
    for name, write in FOLDERS.items():
        WORDS.save(write(home / name))
    for name, write in (("esm", masked_folders.esm), ("llada", causal_folders.llada)):
        (home / name).mkdir()
        write(home / name)
    convert(home / "didi-instruct", home / "ours", "didi", storage="int8")
    convert(home / "esm", home / "ours-esm", "didi")
    saved(home / "adapters", home / "llada")
    return sorted(home.iterdir())


def places(value, place=()):
    """Paths to all values of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*place, key)
        if isinstance(inner, (dict, list)):
            yield from places(inner, (*place, key))


def damage(folder, chance):
    """Damage one file; return what was done to it."""
    file = chance.choice(files := sorted(p for p in folder.iterdir() if p.is_file()))
    data, kind = file.read_bytes(), chance.choice(["cut", "flip", "gone", "swap", "folder", "json"])
    if kind == "json":
        file = chance.choice(sorted(folder.glob("*.json")))
        content = inner = json.loads(file.read_text())
        *above, last = chance.choice([*places(content)])
        for key in above:
            inner = inner[key]
        inner[last] = chance.choice(ODD)
        file.write_text(json.dumps(content))
    elif kind == "cut":
        file.write_bytes(data[: chance.randrange(len(data))])
    elif kind == "flip":
        damaged = bytearray(data)
        for _ in range(chance.choice([1, 20])):
            damaged[chance.randrange(min(len(data), 2000))] ^= 1 << chance.randrange(8)
        file.write_bytes(bytes(damaged))
    elif kind == "swap":
        file.write_bytes(chance.choice(files).read_bytes())
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
    return kind, file.name


@pytest.mark.parametrize("seed", range(COUNT))
def test_a_damaged_folder_loads_or_says_in_one_line_why_not(models, tmp_path, seed):
    chance = random.Random(seed)
    source = chance.choice(models)
    shutil.copytree(source, tmp_path / source.name)
    folder = str(tmp_path / source.name)
    what = damage(tmp_path / source.name, chance)
    asked = {
        "info": lambda: describe_source(folder),
        "peek": lambda: peek_models([folder]),
        "hash": lambda: find_source(folder).fingerprint(),
        "load": lambda: didi.load(folder, device="cpu").sample(num=1, steps=1, length=4),
    }
    said = {name: refusal(ask) for name, ask in asked.items()}
    assert all("\n" not in text and len(text) < 1500 for text in said.values()), (what, said)


def refusal(ask):
    """Return what a user is told; anything but a `UserError` is a failure."""
    try:
        ask()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "source",
    ["a" * 300, "a/" * 3000, "~nobody-here/x", "~\0", "a\0b", "a\nb/c", "", "a/b@", "\ud800"],
)
def test_a_source_that_can_be_no_name_is_refused_in_one_line(source):
    said = refusal(lambda: find_source(source))
    assert said
    assert "\n" not in said
    assert len(said) < 1500
