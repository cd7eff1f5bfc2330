"""Every masked sampler with a random ESM: chains of given lengths, motifs, honest counts."""

import re
from dataclasses import replace

import pytest
import torch
from tests.models.masked_folders import ESM, esm
from tests.random_models import add_noise
from tests.sampling.enumeration import FALSE_ALARM, p_value

import didi_instruct as didi
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import Tokenizer, is_protein
from didi_instruct.errors import UserError
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import build_model
from didi_instruct.models.masked_lm import load_masked_lm
from didi_instruct.proteins.chains import as_fasta
from didi_instruct.sampling.generate import Request
from didi_instruct.sampling.registry import SAMPLERS
from didi_instruct.sampling.state import PAD

WORDS = ESM.split()
MASKED = [name for name, sampler in SAMPLERS.items() if sampler.kind == "mdlm"]
OPTIONS = {
    "rgas": {"h_start": 1.0, "h_end": 1.0, "split": 0.5, "candidates": 2},
    "blocks": {"block_length": 4},
    "dplm": {"guard": 0.3},
    "remasking": {"eta": 0.3},
}
CASES = [
    *((name, OPTIONS.get(name, {})) for name in MASKED),
    ("ancestral", {"order": "streams"}),
    ("rgas", {"order": "streams", **OPTIONS["rgas"]}),
    ("dplm", {}),
    ("dplm", {"draw": "argmax"}),
    ("blocks", {"block_length": 4, "inner": "confidence"}),
]
every_case = pytest.mark.parametrize(("sampler", "options"), CASES)
kinds = pytest.mark.parametrize("windows", [False, True], ids=["given lengths", "windows"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """2 layers of width 32, for chains of 1 to 18 residues."""
    path = tmp_path_factory.mktemp("esm")
    esm(path, hidden_size=32, intermediate_size=48, max_position_embeddings=20)
    return path


@pytest.fixture(scope="module")
def models(folder):
    """The model as it is loaded, and one whose texts have windows of their own; in float64."""
    torch.manual_seed(0)
    found = {}
    for windows in (False, True):
        loaded = load_masked_lm(folder)
        network, tokenizer = loaded.model.double(), Tokenizer.load(folder)
        if windows:
            law = tuple(range(loaded.config.length + 1))
            network.config = replace(loaded.config, end_id=tokenizer.eot_id, lengths=law)
        discriminator = Discriminator(network.without_head()).double()
        found[windows] = didi.Model(
            network,
            network.config,
            tokenizer if windows else loaded.tokenizer,
            discriminator,
        )
    return found


def steps_of(sampler):
    return None if sampler == "first-hitting" else 3


def counting(model):
    """Rows that its networks read, a backward pass as two more; and what takes the hooks away."""
    rows = [0.0]

    def read(module, arguments, named):
        x = arguments[0] if arguments else named["hidden_states"]
        rows[0] += len(x) * (3 if torch.is_grad_enabled() else 1)

    trunks = [model.network, model.discriminator.trunk]
    hooks = [
        trunk.network.esm.encoder.register_forward_pre_hook(read, with_kwargs=True)
        for trunk in trunks
    ]
    return rows, lambda: [hook.remove() for hook in hooks]


@kinds
@every_case
def test_chains_of_several_lengths_around_what_is_given(models, windows, sampler, options):
    """What is given stays, only residues are written, and passes are those that ran."""
    model, motif = models[windows], ("MK", "AY")
    request = Request(
        num=2, lengths="6,11,8", sampler=sampler, steps=steps_of(sampler), options=options,
        prompt=motif[0], suffix=motif[1], seed=5,
    )  # fmt: skip
    rows, stop = counting(model)
    done = model.request(request)
    stop()
    lengths = [6, 6, 11, 11, 8, 8]
    assert done.lengths == tuple(lengths)
    tokens, written = done.cut().tokens, done.cut().written
    assert tokens.shape == (6, 11)
    allowed = set(range(33)) - set(model.network.ids.banned)
    assert set(range(4, 24)) == allowed
    before, after = model.tokenizer.encode(list(motif))
    for row, mark, length in zip(tokens, written, lengths, strict=True):
        assert row[length:].tolist() == [PAD] * (11 - length)
        assert row[:2].tolist() == before
        assert row[length - 2 : length].tolist() == after
        assert mark.nonzero().squeeze(1).tolist() == list(range(2, length - 2))
        assert set(row[mark].tolist()) <= allowed
    chains = model.texts(done.tokens, done.written)
    assert [len(chain) for chain in chains] == lengths
    assert all(re.fullmatch("MK[A-Z]+AY", chain) for chain in chains)
    assert done.passes == pytest.approx(rows[0] / 6)
    nfe = {"first-hitting": 7, "blocks": 9}.get(sampler, 3)  # the longest writes 7, in 3 blocks
    if not options.get("guard"):
        assert done.nfe == nfe
        assert sampler == "rgas" or done.passes <= nfe
    else:
        assert nfe <= done.nfe <= 2 * nfe
    alone = model.request(replace(request, batch_size=1))
    assert torch.equal(alone.tokens, done.tokens)
    alike = model.sample(
        num=2, length=6, sampler=sampler, steps=steps_of(sampler), options=options,
        prompt=motif[0], suffix=motif[1], seed=5,
    )  # fmt: skip
    assert torch.equal(alike, tokens[:2, :6])


@every_case
def test_a_model_with_a_law_draws_lengths_of_its_own(models, sampler, options):
    """Nothing behind a text is written, and no end within it."""
    model = models[True]
    done = model.request(
        Request(num=5, sampler=sampler, steps=steps_of(sampler), options=options, seed=2)
    )
    tokens, written, end = done.tokens, done.written, model.config.end_id
    lengths = written.sum(1)
    assert len(lengths.unique()) > 2
    assert torch.equal(written, torch.arange(18) < lengths[:, None])
    assert bool((tokens[~written] == end).all())
    assert not torch.isin(tokens[written], model.network.banned).any()


@kinds
def test_motifs_are_kept_where_their_gaps_put_them(models, windows):
    """One length for all gaps, or one for each, drawn from a range."""
    model = models[windows]
    settings = {"steps": 2, "sampler": "dplm"}
    (chain,) = model.generate(infill="___MKTAY___", gap="6", **settings)
    assert (len(chain), chain[6:11]) == (17, "MKTAY")
    chains = model.generate(num=20, infill="___ MK ___ AY", gap="3,1-9", **settings)
    found = [re.fullmatch("[A-Z]{3}MK([A-Z]{1,9})AY", chain) for chain in chains]
    assert all(found)
    assert len({len(chain) for chain in chains}) > 3
    chosen = model.generate(num=3, infill="___ MK ___", gap="auto:1-4", **settings)
    assert all(re.fullmatch("[A-Z]{1,4}MK[A-Z]{1,4}", chain) for chain in chosen)


def test_lengths_of_a_range_are_uniform_and_belong_to_the_sample(models):
    """Chi-square over 3 .. 7, false alarm 1e-5; another number of samples has the same first."""
    model, settings = models[False], {"lengths": "3-7", "steps": 1, "seed": 3}
    tokens = model.sample(num=2000, batch_size=1000, **settings)
    lengths = (tokens != PAD).sum(1)
    assert p_value(lengths - 3, torch.full((5,), 0.2).double()) > FALSE_ALARM
    few = model.sample(num=5, **settings)
    assert torch.equal(few, tokens[:5, : few.shape[1]])
    drawn = model.draw(num=2, lengths=[4, 9], steps=2)
    assert (drawn.tokens != PAD).sum(1).tolist() == [4, 4, 9, 9]
    assert [len(chain) for chain in model.generate(lengths=[5, 5, 12], steps=2)] == [5, 5, 12]
    twins = model.generate(lengths=[12, 12], steps=2)
    assert twins[0] != twins[1], "each has noise of its own"


def small(kind):
    tokenizer = OracleLanguage.default().tokenizer
    config = ModelConfig(
        kind=kind, layers=1, hidden=32, heads=2, cond_dim=8, length=12,
        vocab_size=tokenizer.size + (kind == "ar"), schedule=ScheduleConfig(eps=1e-3),
    )  # fmt: skip
    return didi.Model(add_noise(build_model(config)), config, tokenizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": "0"}, "lengths is '0'"),
        ({"lengths": [4, 0]}, "lengths is '4,0'"),
        ({"lengths": []}, "lengths is ''"),
        ({"lengths": "5-3"}, "lengths is '5-3'"),
        ({"lengths": "long"}, "lengths is 'long'"),
        ({"lengths": "4,19"}, "length is 19: this model writes 1 to 18 tokens"),
        ({"lengths": "4-19"}, "length is 19: this model writes 1 to 18 tokens"),
        ({"lengths": "4", "length": 4}, "length and lengths"),
        ({"lengths": "4", "infill": "___M"}, "leave out lengths"),
        ({"lengths": "2,9", "prompt": "MK"}, "nothing is left to write"),
        ({"prompt": "MkT"}, "`k`, letter 2 of the given `MkT`, is no residue"),
        ({"infill": "___ MK ___ A-Y"}, "`-`, letter 2 of the given"),
        ({"suffix": "<mask>"}, "`<`, letter 1"),
        ({"infill": "___M___", "gap": "3,4,5"}, "has 3 gaps, the text 2"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(models, settings, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        models[False].sample(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["ar", "duo"])
def test_lengths_are_for_masked_models(kind):
    with pytest.raises(UserError, match=f"lengths are for masked models: give one of kind {kind}"):
        small(kind).sample(lengths="3,4")


def test_a_fasta_names_length_seed_and_number(models):
    chains = ["M" * 61, "KT"]
    lines = as_fasta(chains, seed=7).split("\n")
    assert lines == [
        ">L61_S7_0 length=61 seed=7 index=0", "M" * 60, "M", ">L2_S7_1 length=2 seed=7 index=1",
        "KT", "",
    ]  # fmt: skip
    assert is_protein(models[True].tokenizer.vocabulary)
    assert not is_protein(OracleLanguage.default().tokenizer.vocabulary)
    assert not is_protein(Tokenizer.load("bytes").vocabulary)
