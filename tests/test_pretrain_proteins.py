"""Teachers and judges of proteins: ESM's shape, a DiT and a left-to-right model from FASTA."""

import copy
import itertools
import math
import os
import random
import signal
import subprocess
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.random_models import randomise
from tests.training.small import STATE, Interrupted, logged
from tests.training.test_processes import TORCHRUN

import didi_instruct as didi
from didi_instruct.config.recipes import load_recipe
from didi_instruct.config.train import PretrainConfig
from didi_instruct.data.dataset import open_data
from didi_instruct.data.tokenizer import AMINO_ACIDS
from didi_instruct.errors import UserError
from didi_instruct.hub.export import convert
from didi_instruct.pretrain import pretrain
from didi_instruct.process.masking import before_end
from didi_instruct.training.objectives import make_objective

EOS, X = 2, 24
AMINO_IDS = set(range(4, 24))
TINY = {
    "layers": 1, "hidden": 16, "heads": 2, "length": 24, "own_window": True,
    "schedule": {"eps": 0.0},
}  # fmt: skip
FAMILIES = {
    "esm": {"family": "esm"},
    "dit": {"cond_dim": 8},
    "ar": {"kind": "ar"},
}


@pytest.fixture(scope="module")
def fasta(tmp_path_factory):
    """60 chains of 3 to 40 residues, some with letters that are no amino acids."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("fasta") / "chains.fasta"
    letters = AMINO_ACIDS + "X" * 3 + "BUZO"
    chains = ["".join(draw.choices(letters, k=draw.randint(3, 40))) for _ in range(60)]
    path.write_text("".join(f">{n}\n{chain}\n" for n, chain in enumerate(chains)))
    return path


def recipe(fasta, kind, **train):
    passes = {} if kind == "dit" else {"pass_tokens": 60}
    return {
        "model": TINY | FAMILIES[kind],
        "data": {
            "source": str(fasta), "tokenizer": "esm", "rows": "document", "long": "split",
            "valid": 12,
        },
        "optim": {"lr": 1e-2},
        "train": {"steps": 4, "batch_size": 8, "log_every": 1, "ema": 0.5, **passes, **train},
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(fasta, tmp_path_factory):
    """Folders of one trained model of each family."""
    home = tmp_path_factory.mktemp("proteins")
    for kind in FAMILIES:
        pretrain(recipe(fasta, kind), out=home / kind, device="cpu")
    return home


def random_model(folder):
    """A trained model whose weights became noise, so that all tokens would be drawn."""
    model = didi.load(folder, device="cpu")
    network = randomise(copy.deepcopy(model.network))  # tensors of a loaded one are its file's
    return didi.Model(network, model.config, model.tokenizer)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_20_amino_acids_are_drawn_and_nothing_else(runs, kind):
    """By a network of noise, in which no token is rare unless it is forbidden."""
    model = random_model(runs / kind)
    ends, steps = ({EOS}, {}) if kind == "ar" else (set(), {"steps": 3})
    tokens = model.sample(num=200, seed=1, **steps)
    text = tokens[before_end(tokens, EOS)]
    assert set(text.tolist()) == AMINO_IDS
    if kind == "ar":
        logits = model.network(tokens)
    else:
        logits = model.denoiser(torch.full((3, 24), model.config.mask_id), 0.9)
    p = logits.double().softmax(-1)
    allowed = sorted(AMINO_IDS | ends)
    assert torch.allclose(p[..., allowed].sum(-1), torch.ones(()).double())
    assert (p.sum((0, 1)) > 0).nonzero().flatten().tolist() == allowed
    assert all(set(chain) <= set(AMINO_ACIDS) for chain in model.generate(num=20, **steps))


@pytest.mark.parametrize("kind", ["esm", "dit"])
@pytest.mark.parametrize("text", ["MKV", "MXV", "UAB"])
def test_the_loss_is_the_bound_by_enumeration(runs, kind, text):
    """NELBO of a chain of three letters, summed over all sets of masked residues.

    With alpha_t = 1 - t a set of k of n residues is masked with probability t^k (1 - t)^(n - k),
    and its weight is 1 / t: the integral is B(k, n - k + 1). Other letters stay visible. The mean
    of 40,000 draws is compared at 5 standard errors: one false alarm in 1.7 million.
    """
    model = random_model(runs / kind)
    config, mask = model.config, model.config.mask_id
    ids = model.tokenizer.encode([text])[0]
    tokens = torch.full((1, config.length), EOS)
    tokens[0, :3] = torch.tensor(ids)
    free = [place for place in range(3) if ids[place] in AMINO_IDS]
    exact = 0.0
    model.network.requires_grad_(False)
    for k in range(1, len(free) + 1):
        weight = math.gamma(k) * math.gamma(len(free) - k + 1) / math.gamma(len(free) + 1)
        for places in itertools.combinations(free, k):
            z = tokens.clone()
            z[0, list(places)] = mask
            log_p = model.network(z).double().log_softmax(-1)
            exact -= weight * sum(float(log_p[0, place, ids[place]]) for place in places)
    objective, generator = make_objective(config), torch.Generator().manual_seed(0)
    batch = objective.corrupt(tokens.expand(40_000, -1), *objective.draw(40_000, generator))
    assert set(batch["targets"].tolist()) <= AMINO_IDS
    with torch.no_grad():
        states, inverse = batch["z"].unique(dim=0, return_inverse=True)
        log_p = model.network(states).double().log_softmax(-1)
    place = batch["rows"] % config.length
    nll = -log_p[inverse[batch["sequence"]], place, batch["targets"]]
    nats = torch.zeros(40_000).double().index_add(0, batch["sequence"], batch["weight"] * nll)
    nats *= config.length
    assert abs(nats.mean() - exact) < 5 * nats.std() / 200
    assert float(objective.loss(model.network, batch).sum()) == pytest.approx(
        float(nats.sum() / config.length), rel=1e-4
    )


def test_letters_that_are_given_cost_a_judge_nothing(runs):
    """As log p(MX) = log p(M) + log p(end | MX), where the X is read but not paid for."""
    model = random_model(runs / "ar")
    tokens = torch.full((1, 24), EOS)
    tokens[0, :2] = torch.tensor(model.tokenizer.encode(["MX"])[0])
    with torch.no_grad():
        start = torch.tensor([[model.config.mask_id]])
        log_p = model.network(torch.cat([start, tokens[:, :2]], 1)).log_softmax(-1)[0]
        found = model.network.log_prob(tokens, torch.tensor([3]))
    expected = log_p[0, tokens[0, 0]] + log_p[2, EOS]
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("kind", FAMILIES)
def test_held_out_chains_have_a_likelihood_per_residue(runs, kind):
    """Other letters do not count; nats of a fresh model are about those of 20 equal letters."""
    model = didi.load(runs / kind, device="cpu")
    rows = open_data(runs / kind / "data", "valid").ordered(0, 12)
    assert bool((rows == X).any())
    assert 2.5 < float(model.nelbo(rows, draws=64)) < 4.0


def test_a_saved_teacher_reads_windows_like_texts_alone(runs):
    """And like the library, into whose layout it is converted and from which it comes back."""
    model = didi.load(runs / "esm", device="cpu")
    assert model.config.end_id == EOS
    assert len(model.config.lengths) == 25
    texts = model.tokenizer.encode(["MKVXLA", "AC"])
    tokens = torch.full((2, 24), EOS)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)] = torch.tensor(ids)
    tokens[:, 1] = model.config.mask_id
    folder = convert(runs / "esm", runs / "library", "esm")
    theirs = transformers.EsmForMaskedLM.from_pretrained(folder).eval()
    assert theirs.config.token_dropout
    assert not theirs.config.hidden_dropout_prob
    assert theirs.lm_head.decoder.weight is theirs.esm.embeddings.word_embeddings.weight
    back = didi.load(folder, device="cpu")
    with torch.no_grad():
        found = model.network(tokens)
        for row, ids in enumerate(texts):
            alone = tokens[row : row + 1, : len(ids)]
            framed = torch.cat([torch.tensor([[0]]), alone, torch.tensor([[EOS]])], 1)
            expected = theirs(framed.where(framed < 33, 32)).logits[:, 1:-1]
            for logits in (found[row : row + 1, : len(ids)], back.network(alone)):
                torch.testing.assert_close(logits[..., 4:24], expected[..., 4:24])
    embeddings = theirs.esm.embeddings.word_embeddings.weight
    assert torch.equal(embeddings, model.network.network.esm.embeddings.word_embeddings.weight)


@pytest.mark.parametrize("kind", ["esm", "ar"])
def test_a_resumed_run_is_bit_exact(fasta, runs, tmp_path, kind):
    """With passes by length and dropout."""
    settings = recipe(fasta, kind)
    settings["model"] = settings["model"] | {"dropout": 0.1}
    pretrain(settings, out=tmp_path / "whole", device="cpu")
    stopped = pretrain(settings, out=tmp_path / "parts", reporter=Interrupted(2), device="cpu")
    assert (stopped.finished, stopped.outcome.signal) == (False, signal.SIGTERM)
    assert pretrain(settings, out=tmp_path / "parts", resume=True, device="cpu").finished
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")
    for file in (f"checkpoints/step-00000004/{STATE}", "model.safetensors"):
        whole, parts = load_file(tmp_path / "whole" / file), load_file(tmp_path / "parts" / file)
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_like_one(fasta, tmp_path, strategy):
    """Rows are dealt by length, and passes are exchanged at the same time: same losses."""
    settings = recipe(fasta, "esm", ema=0.0)
    pretrain(settings, out=tmp_path / "one", device="cpu")
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "didi_instruct", "pretrain"]
    command += [str(tmp_path / "one" / "recipe.yaml"), "--set", f"train.strategy={strategy}"]
    command += ["--out", str(tmp_path / "two"), "--device", "cpu"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert logged(tmp_path / "two") == pytest.approx(logged(tmp_path / "one"), rel=1e-4)


def test_passes_may_change_on_the_way(fasta, tmp_path):
    """They change no result but its rounding."""
    settings = recipe(fasta, "esm")
    pretrain(settings, out=tmp_path / "run", reporter=Interrupted(2), device="cpu")
    wide = recipe(fasta, "esm", pass_tokens=500)
    assert pretrain(wide, out=tmp_path / "run", resume=True, device="cpu").finished


BAD = {
    "a DiT reads": ({"family": "dit", "cond_dim": 8}, {}, {}),
    "train.pass_tokens is 20, less than the longest row": ({}, {}, {"pass_tokens": 20}),
    "train.pass_tokens is 0: use 1 or more": ({}, {}, {"pass_tokens": 0}),
    "both say how much": ({}, {}, {"micro_batch": 2}),
    "use model.kind=mdlm": ({"kind": "ar"}, {}, {}),
    "model.own_window=true, since": ({"own_window": False}, {}, {}),
    "model.cond_dim is set": ({"cond_dim": 8}, {}, {}),
    "model.family esm is for proteins": ({}, {"tokenizer": "bytes"}, {}),
    "The data are proteins, which are apart": (
        {"family": "dit", "own_window": False}, {}, {"pass_tokens": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_settings_are_refused(fasta, tmp_path, message):
    model, data, train = BAD[message]
    settings = recipe(fasta, "esm")
    settings["model"] |= model
    settings["data"] |= data
    settings["train"] |= train
    with pytest.raises(UserError, match=message) as caught:
        pretrain(settings, out=tmp_path / "run", device="cpu")
    assert "\n" not in str(caught.value)


def test_shipped_recipes_have_the_size_they_say():
    """10 to 30M parameters, windows of 512, alike in all but the network."""
    esm, dit, ar = (
        load_recipe(PretrainConfig, f"protein-{name}", ["data.source=a.fasta"])
        for name in ("teacher", "dit-teacher", "ar")
    )
    for config in (esm, dit, ar):
        assert (config.model.length, config.data.tokenizer, config.data.long) == (
            512,
            "esm",
            "split",
        )
        assert 10e6 < 12 * config.model.layers * config.model.hidden**2 < 30e6
    assert replace(dit, model=esm.model, train=esm.train) == esm
