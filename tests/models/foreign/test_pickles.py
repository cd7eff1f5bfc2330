import argparse
import io
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch

from didi_instruct.errors import UserError
from didi_instruct.models.foreign.pickles import read_checkpoint
from didi_instruct.models.foreign.reading import load_foreign
from didi_instruct.models.foreign.stored import Inert, StoredTensor

from .reference import lightning_file, prefixed, weights


def text(value):
    """Opcodes that push a text."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value):
    """Opcodes that push a whole number."""
    return b"\x8a" + bytes([8]) + struct.pack("<q", value)


def command(canary):
    return f"touch {canary}"


def python(canary):
    return f"open({canary!r}, 'w').close() or 0"


LAZY = b"cbuiltins\nmap\n(cbuiltins\neval\n(%sltR"
ROUTES = {
    "reduce": lambda c: b"cos\nsystem\n(" + text(command(c)) + b"tR.",
    "nested": lambda c: b"}" + text("a") + b"](cbuiltins\neval\n(" + text(python(c)) + b"tRes.",
    "stack global": lambda c: (
        b"\x80\x04" + text("os") + text("system") + b"\x93(" + text(command(c)) + b"tR."
    ),
    "inst": lambda c: b"(" + text(command(c)) + b"ios\nsystem\n.",
    "obj": lambda c: b"(cos\nsystem\n" + text(command(c)) + b"o.",
    "newobj": lambda c: b"\x80\x02cbuiltins\nbytes\n(" + LAZY % text(python(c)) + b"t\x81.",
    "newobj_ex": lambda c: b"\x80\x04cbuiltins\nbytes\n(" + LAZY % text(python(c)) + b"t}\x92.",
    "build": lambda c: (
        b"cargparse\nNamespace\n)R}"
        + text("__setstate__")
        + b"cos\nsystem\nsb"
        + text(command(c))
        + b"b."
    ),
    "persistent id": lambda c: (
        b"(" + text("storage") + b"cos\nsystem\n(" + text(command(c)) + b"tR" + b"tQ."
    ),
    "extension": lambda c: b"\x80\x02\x82\xf0(" + text(command(c)) + b"tR.",
}
"""Ways in which a pickle can run a command, as opcodes."""


def archive(path, data, storages=(), **more):
    """A file as torch lays it out, around any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in {"data.pkl": data, "byteorder": b"little", **more}.items():
            file.writestr(f"archive/{name}", content)
        for key, content in enumerate(storages):
            file.writestr(f"archive/data/{key}", content)
    return path


def test_hostile_pickles_do_nothing(tmp_path):
    """Each of them creates a file when it is unpickled, and none when it is read here."""
    harmed = {name: tmp_path / f"harmed-{n}" for n, name in enumerate(ROUTES)}
    spared = {name: tmp_path / f"spared-{n}" for n, name in enumerate(ROUTES)}
    sources = {name: make(str(harmed[name])) for name, make in ROUTES.items()}
    code = (
        "import copyreg, pickle, sys\n"
        "copyreg.add_extension('posix', 'system', 240)\n"
        "for data in pickle.load(sys.stdin.buffer):\n"
        "    try: pickle.loads(data)\n"
        "    except Exception: pass\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(list(sources.values())), check=True
    )
    assert [name for name, path in harmed.items() if not path.exists()] == []

    for name, make in ROUTES.items():
        path = archive(tmp_path / "x.ckpt", make(str(spared[name])))
        if name in ("persistent id", "extension"):
            assert "is refused" in error_of(path)
        else:
            content = read_checkpoint(path).content
            while isinstance(content, dict | list):
                content = next(iter(content.values() if isinstance(content, dict) else content))
            assert isinstance(content, Inert)
            assert content.called
        assert not spared[name].exists(), name


class Hostile:
    """Pickles as a call of os.system."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        import os

        return os.system, (command(self.canary),)


def test_hostile_objects_beside_and_in_place_of_weights(tmp_path):
    """Beside the weights they are inert; where a weight should be, the file is refused."""
    canary = tmp_path / "canary"
    state = prefixed("backbone.", weights())
    path = lightning_file(tmp_path / "a.ckpt", state, hyper_parameters=Hostile(canary))
    notes = load_foreign(path).provenance["foreign"]["notes"]
    assert "Pickled objects, not run: posix.system." in notes
    state["backbone.blocks.1.norm2.weight"] = Hostile(canary)
    lightning_file(path, state)
    with pytest.raises(UserError, match=r"norm2.weight is an object of `posix.system`, .* not run"):
        load_foreign(path)
    torch.save({"state_dict": Hostile(canary)}, path)
    with pytest.raises(UserError, match=r"`state_dict` is an object of `posix.system`"):
        load_foreign(path)
    torch.save(Hostile(canary), path)
    with pytest.raises(UserError, match="not named weights"):
        load_foreign(path)
    assert not canary.exists()
    torch.load(path, weights_only=False)
    assert canary.exists()


def tensor_pickle(*, key="0", numel=4, offset=0, shape=(4,), stride=(1,), kind="FloatStorage"):
    def numbers(values):
        return b"(" + b"".join(number(v) for v in values) + b"t"

    pid = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu")
    pid += number(numel) + b"tQ"
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + number(offset)
    return b"\x80\x02" + rebuilt + numbers(shape) + numbers(stride) + b"\x89}tR."


STORAGE = torch.arange(4.0).numpy().tobytes()


def test_a_tensor_made_by_hand_is_read(tmp_path):
    """So that the refusals below are for what they change."""
    checkpoint = read_checkpoint(archive(tmp_path / "x.pt", tensor_pickle(), [STORAGE]))
    assert torch.equal(checkpoint.content.read(checkpoint.archive), torch.arange(4.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": "9"}, "storage '9' is not in the file"),
        ({"numel": 5}, "storage '0' is said to be larger"),
        ({"numel": 1 << 62}, "storage '0' is said to be larger"),
        ({"numel": -1}, "storage '0' is said to be larger"),
        ({"offset": -1}, "negative or absurd"),
        ({"offset": 1}, "reaches outside its storage"),
        ({"shape": (2, 3), "stride": (3, 1)}, "reaches outside its storage"),
        ({"shape": (2,), "stride": (4,)}, "reaches outside its storage"),
        ({"shape": (2,), "stride": (-1,)}, "negative or absurd"),
        ({"shape": (1 << 40,), "stride": (0,), "offset": 4}, "reaches outside its storage"),
        ({"shape": (1 << 47, 1 << 47, 0), "stride": (1, 1, 1)}, "no elements and the absurd"),
        ({"shape": (1 << 60,), "stride": (0,)}, "negative or absurd"),
        ({"shape": (2, 2), "stride": (1,)}, "malformed shape"),
        ({"shape": (1,) * 65, "stride": (1,) * 65}, "negative or absurd"),
    ],
)
def test_tensors_that_reach_outside_are_refused(tmp_path, change, message):
    path = archive(tmp_path / "x.pt", tensor_pickle(**change), [STORAGE])
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged"),
        (b"\x80\x02}", "damaged"),
        (b"\xff.", "damaged"),
        (b"R.", "damaged"),
        (b"0.", "damaged"),
        (b"h\x05.", "damaged"),
        (b"]K\x01K\x02s.", "damaged"),
        (b"K\x01)R.", "damaged"),
        (b"\x80\x04cos\nsystem\nK\x01\x93.", "damaged"),
        (b"I" + b"9" * 9999 + b"\n.", "damaged"),
        (b"Pabc\n.", "uses PERSID"),
        (b"\x80\x05\x97.", "uses NEXT_BUFFER"),
        (b"\x82\x01.", "uses EXT1"),
        (text("x") + b"Q.", "persistent id that is no storage"),
        (b"(" + text("storage") + b"K\x01K\x01K\x01K\x01tQ.", "malformed storage"),
        (b"ccollections\nOrderedDict\n(](K\x01etR.", "damaged"),
    ],
)
def test_damaged_pickles_are_refused(tmp_path, data, message):
    with pytest.raises(UserError, match=message):
        read_checkpoint(archive(tmp_path / "x.pt", data))


def test_bombs_fizzle(tmp_path):
    """A list of itself, a key that takes 2^60 steps to hash, a million levels: no time, no harm."""
    doubled = b"]" + b"q\x00" + b"h\x00a" * 5 + b"."
    assert len(read_checkpoint(archive(tmp_path / "a.pt", doubled)).content) == 5
    key = b"}K\x01" + b"2\x86" * 60 + b"K\x01s."
    assert len(read_checkpoint(archive(tmp_path / "b.pt", key)).content) == 1
    deep = b"]" * 500_000 + b"a" * 499_999 + b"."
    assert len(read_checkpoint(archive(tmp_path / "c.pt", deep)).content) == 1
    tuples = b")" + b"\x85" * 500_000 + b"."
    assert len(read_checkpoint(archive(tmp_path / "d.pt", tuples)).content) == 1


def test_too_many_steps_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("didi_instruct.models.foreign.pickles.MAX_OPCODES", 100)
    monkeypatch.setattr("didi_instruct.models.foreign.archive.MAX_PICKLE", 1000)
    with pytest.raises(UserError, match="more than 100 steps"):
        read_checkpoint(archive(tmp_path / "a.pt", b"K\x01" * 200 + b"."))
    with pytest.raises(UserError, match="more than any checkpoint needs"):
        read_checkpoint(archive(tmp_path / "b.pt", b"K\x01" * 2000 + b"."))


def tensors():
    """A tensor of every type and form that a checkpoint may hold."""
    base = torch.arange(24.0).view(4, 6)
    state = torch.nn.Parameter(torch.ones(3))
    state.note = "an attribute"
    out = {
        "transposed": base.t(),
        "slice": base[1:3, ::2],
        "shared": base,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "with state": state,
        "buffer": torch.nn.parameter.Buffer(torch.ones(2)),
    }
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    whole = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16)
    for dtype in (*floats, *whole, torch.bool):
        out[str(dtype)] = torch.tensor([[0, 1, 2], [3, 100, 7]]).to(dtype)
    return out


def test_tensors_are_those_that_torch_reads(tmp_path):
    torch.save(tensors(), tmp_path / "x.pt")
    checkpoint = read_checkpoint(tmp_path / "x.pt")
    for name, value in torch.load(tmp_path / "x.pt", weights_only=False).items():
        assert isinstance(checkpoint.content[name], StoredTensor), name
        ours = checkpoint.content[name].read(checkpoint.archive)
        assert ours.dtype == value.dtype, name
        assert torch.equal(ours, value), name
        assert ours.stride() == value.stride() or 0 in value.shape, name


def test_containers_are_those_that_pickle_reads(tmp_path):
    """All protocols; what is neither container nor number is a note with its name."""
    plain = {
        "numbers": [1, -5, 1 << 80, 2.5, True, False, None],
        "texts": ("a", "é" * 300, b"bytes", ""),
        "set": {1, 2},
        "frozen": frozenset({("a", "b")}),
        "ordered": OrderedDict(b=1, a=2),
        3: {"nested": [[], {}, ()]},
    }
    for protocol in range(2, 6):
        data = pickle.dumps(plain, protocol=protocol)
        content = read_checkpoint(archive(tmp_path / "x.pt", data)).content
        if protocol == 2:  # where bytes are a call
            content["texts"] = plain["texts"]
        assert content == plain
    data = pickle.dumps([argparse.Namespace(a=1)])
    checkpoint = read_checkpoint(archive(tmp_path / "x.pt", data))
    assert [str(i) for i in checkpoint.content] == ["argparse.Namespace"]
    assert checkpoint.untouched == ("argparse.Namespace",)


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path):
    torch.save({"a": torch.zeros(5000)}, tmp_path / "x.pt")
    before = (tmp_path / "x.pt").read_bytes()
    checkpoint = read_checkpoint(tmp_path / "x.pt")
    checkpoint.content["a"].read(checkpoint.archive).fill_(7)
    assert (tmp_path / "x.pt").read_bytes() == before
    assert checkpoint.content["a"].read(checkpoint.archive).sum() == 0


def test_a_storage_at_an_odd_place_is_copied(tmp_path):
    for name in ("x.pt", "xy.pt", "xyz.pt"):
        archived = archive(tmp_path / name, tensor_pickle(), [STORAGE], **{name: b"1" * len(name)})
        checkpoint = read_checkpoint(archived)
        values = checkpoint.content.read(checkpoint.archive)
        assert torch.equal(values, torch.arange(4.0))
        assert values.data_ptr() % 4 == 0


def error_of(path):
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_torch_does_not_write(tmp_path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"N." + b"\0" * 100_000)
    assert "compressed" in error_of(path)
    with zipfile.ZipFile(path, "w") as file:
        for content in (b"N.", b"K\x01."):
            file.writestr("archive/data.pkl", content)
    assert "two entries" in error_of(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/model.json", b"{}")
    assert "without data.pkl" in error_of(path)
    archive(path, b"N.", **{"constants.pkl": b"N."})
    assert "TorchScript" in error_of(path)
    archive(path, b"N.", byteorder=b"big")
    assert "big-endian" in error_of(path)
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert "before version 1.6" in error_of(path)
    torch.save({"a": torch.ones(300)}, path)
    path.write_bytes(path.read_bytes()[:-500])
    assert "truncated" in error_of(path)
    assert "cannot be read" in error_of(tmp_path)


def directory_entry(data, name):
    """Where the central directory speaks of a file: the start of its fixed-size record."""
    return data.rindex(name.encode()) - 46


@pytest.mark.parametrize("claim", ["overlap", "outside", "larger"])
def test_entries_that_lie_about_their_place(tmp_path, claim):
    """A file's directory is patched: an entry inside another one, or reaching outside."""
    path = archive(tmp_path / "x.pt", tensor_pickle(), [STORAGE, STORAGE])
    data = bytearray(path.read_bytes())
    first, second = (directory_entry(data, f"archive/data/{n}") for n in (0, 1))
    if claim == "overlap":
        data[second + 42 : second + 46] = data[first + 42 : first + 46]
    elif claim == "outside":
        data[second + 42 : second + 46] = struct.pack("<I", len(data) + 100)
    else:
        data[second + 20 : second + 28] = struct.pack("<II", 1 << 20, 1 << 20)
    path.write_bytes(data)
    assert "is not as torch writes checkpoints" in error_of(path)


def test_nothing_is_imported(tmp_path):
    """Naming a module does not load it."""
    path = archive(tmp_path / "x.pt", b"cantigravity\nfly\n)R.")
    assert str(read_checkpoint(path).content) == "antigravity.fly"
    assert "antigravity" not in sys.modules
    buffer = io.BytesIO(pickle.dumps(OrderedDict(a=1)))
    assert read_checkpoint(archive(path, buffer.getvalue())).content == {"a": 1}
