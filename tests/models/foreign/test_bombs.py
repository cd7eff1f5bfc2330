"""Small files that ask for much work: they are counted here, never timed."""

import struct

import pytest
import torch
from safetensors.torch import save_file

from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.models.foreign import pickles, reading
from didi_instruct.models.foreign.pickles import read_checkpoint
from didi_instruct.models.foreign.reading import recognise
from didi_instruct.models.foreign.stored import MAX_NUMBER, MAX_TEXT, Inert
from didi_instruct.models.foreign.stores import open_store

from .reference import lightning_file, prefixed, weights
from .test_pickles import archive, text


def whole(value):
    """Opcodes that push a whole number of any size."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def keys_of(path, *keys):
    """Keys of a dictionary as it is read, given the opcodes of each key."""
    data = b"\x80\x02}(" + b"".join(key + b"N" for key in keys) + b"u."
    return list(read_checkpoint(archive(path, data)).content)


def test_numbers_with_one_hash_do_not_collide(tmp_path):
    """Python hashes whole numbers modulo 2^61 - 1: multiples of it all have the hash 0."""
    numbers = [n * ((1 << 61) - 1) for n in range(1, 50)]
    assert {hash(n) for n in numbers} == {0}
    keys = keys_of(tmp_path / "x.pt", *map(whole, numbers))
    assert len({hash(key) for key in keys}) == len(numbers)


@pytest.mark.parametrize(
    ("opcodes", "kept"),
    [
        (whole(MAX_NUMBER - 1), True),
        (whole(1 - MAX_NUMBER), True),
        (whole(MAX_NUMBER), False),
        (whole(1 << 80_000), False),
        (text("a" * MAX_TEXT), True),
        (text("a" * (MAX_TEXT + 1)), False),
        (b"(" + text("a") * 8 + b"t", True),
        (b"(" + text("a") * 9 + b"t", False),
        (b"(" + whole(1) * 2 + b"t", False),
        (b"(" + text("a" * (MAX_TEXT + 1)) + b"t", False),
        (b"N", True),
        (b"\x88", True),
        (b"G" + struct.pack(">d", 2.5), True),
    ],
    ids=range(13),
)
def test_keys_that_cost_little_are_kept(tmp_path, opcodes, kept):
    """The others are hashed, or compared, once for each of the millions of times they are used."""
    (key,) = keys_of(tmp_path / "x.pt", opcodes)
    assert isinstance(key, Inert) != kept


@pytest.mark.parametrize(
    ("function", "member"),
    [
        ("collections OrderedDict", text("a") + b"N\x86"),
        ("builtins set", b"N"),
        ("__builtin__ frozenset", b"N"),
    ],
    ids=["dictionary", "set", "frozenset"],
)
def test_each_member_of_a_list_is_a_step(tmp_path, monkeypatch, function, member):
    """A list of 100 members made a dictionary 20 times is 2,000 steps, not 20."""
    module, name = function.split()
    made = b"\x80\x02](" + member * 100 + b"e\x85q\x010" + f"c{module}\n{name}\n".encode()
    path = archive(tmp_path / "x.pt", made + b"q\x020](" + b"h\x02h\x01R" * 20 + b"e.")
    assert len(read_checkpoint(path).content) == 20
    monkeypatch.setattr(pickles, "MAX_OPCODES", 1000)
    with pytest.raises(UserError, match="more than 1000 steps"):
        read_checkpoint(path)


def test_names_of_classes_are_cut(tmp_path):
    """They are compared whenever the class is used, and no class has such a name."""
    data = b"\x80\x04" + text("m" * 9999) + text("n" * 9999) + b"\x93)R."
    note = read_checkpoint(archive(tmp_path / "x.pt", data)).content
    assert (len(note.module), len(note.name)) == (MAX_TEXT, MAX_TEXT)


def test_more_averages_than_weights_are_refused_unnamed(tmp_path):
    path = lightning_file(tmp_path / "x.ckpt", {"backbone.a": torch.ones(2)})
    content = torch.load(path, weights_only=False)
    torch.save(content | {"ema": {"shadow_params": [None] * 66}}, path)
    with pytest.raises(UserError, match="`ema.shadow_params` has 66 entries for 1 weights"):
        open_store(path)
    torch.save(content | {"ema": {"shadow_params": [None] * 65}}, path)
    assert len(open_store(path).blocked) == 65


def test_more_networks_than_a_file_has_are_refused(tmp_path):
    """Each name is compared with each network's prefix."""
    path = tmp_path / "x.safetensors"
    names = [f"n{n}.vocab_embed.embedding" for n in range(17)]
    save_file({name: torch.ones(2, 2) for name in names}, path)
    with pytest.raises(UserError, match=r"holds 17 networks \(`n\d+.`, .* and 14 more\)"):
        recognise(path)
    save_file({name: torch.ones(2, 2) for name in names[1:]}, path)
    with pytest.raises(UserError, match="holds several networks"):
        recognise(path)


@pytest.mark.parametrize(("layers", "message"), [(1000, "missing"), (1025, "names 1025 layers")])
def test_blocks_by_name_alone_build_no_network(tmp_path, monkeypatch, layers, message):
    """What names in a file say is compared before a network of so many layers is built."""
    built = []
    build = reading._on_meta
    monkeypatch.setattr(
        reading, "_on_meta", lambda part: built.append(part.config.layers) or build(part)
    )
    state = prefixed("backbone.", weights())
    state |= {f"backbone.blocks.{n}.norm1.weight": torch.ones(32) for n in range(2, layers)}
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(UserError, match=message):
        recognise(tmp_path / "x.pt")
    assert sum(built) <= 1


@pytest.mark.parametrize("build", [DiT, ARModel, build_discriminator])
def test_one_layer_tells_the_shapes_of_all(build):
    config = ModelConfig(
        kind="ar" if build is ARModel else "mdlm", layers=3, hidden=32, heads=4, cond_dim=12,
        vocab_size=19, length=16,
    )  # fmt: skip
    part = reading._Part(None, {}, config, build)
    whole_network = {name: tuple(t.shape) for name, t in build(config).state_dict().items()}
    assert reading._expected(part) == whole_network


def test_a_width_that_no_model_has_is_refused(tmp_path):
    """A tensor without elements may have any shape, and a file need not hold one number of it."""
    state = prefixed("backbone.", weights())
    state["backbone.sigma_map.mlp.0.weight"] = torch.empty(1 << 40, 0)
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(UserError, match="which no model has"):
        recognise(tmp_path / "x.pt")
