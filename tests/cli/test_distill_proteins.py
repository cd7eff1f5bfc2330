"""The recipes `protein-*` on a tiny DPLM: from the command line to students of both layouts."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.models.masked_folders import dplm

import didi_instruct as didi_package
from didi_instruct.process.masking import before_end

RESIDUES = set("ACDEFGHIKLMNPQRSTVWY")
SHORT = {
    "lengths": "6-24",
    "optim.lr": 1e-3,  # the recipes' own rates are for long runs, as is their average
    "optim.warmup": 0,
    "discriminator.lr_warmup": 0,
    "train.ema": 0,
    "train.steps": 4,
    "train.eval_every": 2,
    "train.save_every": 2,
    "train.log_every": 1,
    "watch.samples": 6,
    "reference.rows": 24,
    "reference.steps": 3,
}
OWN = {
    "didi": {"discriminator.warmup": 2, "discriminator.trainable_blocks": "null"},
    "token-matching": {"token_matching.warmup": 2},
    "sdtt": {"sdtt.iterations": 2},
    "dimo": {"dimo.warmup": 2},
    "mixture": {"mixture.codes": 3},
}
MOVED = 1e-6


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dplm") / "teacher"
    dplm(folder)
    return folder


@pytest.fixture
def distilled(didi, teacher, tmp_path):
    """Folder of a student that a recipe made; settings in the form of --set."""

    def make(method, changes=None, out="student"):
        settings = SHORT | OWN[method] | (changes or {})
        flags = [part for k, v in settings.items() for part in ("--set", f"{k}={v}")]
        command = ["distill", f"protein-{method}", "--teacher", str(teacher)]
        code, _, err = didi(*command, "--out", str(tmp_path / out), "--device", "cpu", *flags)
        assert code == 0, err
        return tmp_path / out

    return make


@pytest.mark.parametrize("method", OWN)
def test_a_student_learns_writes_and_goes_to_transformers(method, distilled, didi, tmp_path):
    """Each part has moved; texts have lengths of the law; its logits are those of transformers."""
    folder = distilled(method)
    student = didi_package.load(folder, device="cpu")
    start = dict(_teacher_weights(folder))
    own = dict(student.network.named_parameters())
    still = {n for n, w in start.items() if (own[n] - w).abs().max() < MOVED}
    assert not still
    assert student.config.end_id == 2
    drawn = student.sample(num=40, steps=2, sampler="ancestral", seed=1)
    count = before_end(drawn, 2).sum(1)
    assert set(count.tolist()) <= set(range(6, 25))
    assert len(set(count.tolist())) > 8
    texts = student.generate(num=3, steps=2, seed=1, sampler="ancestral")
    assert [len(text) for text in texts] == count[:3].tolist()
    assert set("".join(texts)) <= RESIDUES
    back = tmp_path / "back"
    flags = ["--no-discriminator"] if method == "didi" else []
    code, _, err = didi("convert", str(folder), str(back), "--to", "esm", *flags)
    if method == "mixture":
        assert code == 2
        assert "has one mask, and the model 3" in err
        return
    assert code == 0, err
    theirs = transformers.EsmForMaskedLM.from_pretrained(back).eval()
    text = torch.tensor([[5, 33, 20, 33, 33, 9, 2, 2], [33, 7, 33, 11, 12, 33, 33, 4]])
    with torch.no_grad():
        ours = student.network(text)[..., 4:24]
        for row, size in ((0, 6), (1, 8)):
            ids = text[row, :size].masked_fill(text[row, :size] == 33, 32)
            framed = torch.cat([torch.tensor([0]), ids, torch.tensor([2])])
            logits = theirs(input_ids=framed[None]).logits[0, 1:-1, 4:24]
            torch.testing.assert_close(ours[row, :size], logits, atol=2e-5, rtol=1e-5)
    again = didi_package.load(back, device="cpu")
    assert again.generate(num=3, steps=2, seed=1, sampler="ancestral") == texts


def _teacher_weights(folder):
    """Parameters of the teacher by the student's names."""
    recorded = json.loads((folder / "config.json").read_text())["provenance"]["teacher_source"]
    return didi_package.load(recorded, device="cpu").network.named_parameters()


def test_a_discriminator_lies_beside_its_student_and_guides_it(distilled, tmp_path):
    """Its trunk is the teacher's with what it has learnt; saving the model again keeps it."""
    folder = distilled("didi")
    model = didi_package.load(folder, device="cpu")
    saved = load_file(folder / "discriminator.safetensors")
    loaded = model.discriminator.state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())
    for name, weight in _teacher_weights(folder):
        if "lm_head" not in name:
            assert (saved[name] - weight).abs().max() > MOVED, name
    guided, plain = (model.sample(num=8, steps=4, seed=0, sampler=s) for s in ("rgas", "ancestral"))
    assert not torch.equal(guided, plain)
    model.save(tmp_path / "again")
    again = didi_package.load(tmp_path / "again", device="cpu").discriminator
    text = guided[:, :6]
    assert torch.equal(again(text), model.discriminator(text))
    content = json.loads((folder / "config.json").read_text())
    del content["discriminator"], content["files"]["discriminator.safetensors"]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(didi_package.errors.UserError, match="discriminator that is not there"):
        didi_package.load(folder)


def test_without_training_embeddings_come_back_to_the_bit(didi, teacher, tmp_path):
    """DPLM's folder to our layout and to ESM's: all parameters; the vocabulary byte by byte."""
    assert didi("convert", str(teacher), str(tmp_path / "ours"), "--to", "didi")[0] == 0
    assert didi("convert", str(tmp_path / "ours"), str(tmp_path / "esm"), "--to", "esm")[0] == 0
    there, back = (load_file(path / "model.safetensors") for path in (teacher, tmp_path / "esm"))
    unused = {n for n in there if "inv_freq" in n or "position_embeddings" in n}
    kept = there.keys() - unused
    assert back.keys() - {"esm.rotary_embeddings.inv_freq"} == kept
    assert all(torch.equal(there[name], back[name]) for name in kept)
    assert (tmp_path / "esm" / "vocab.txt").read_bytes() == (teacher / "vocab.txt").read_bytes()
    settings = json.loads((tmp_path / "esm" / "config.json").read_text())
    assert settings["dplm_type"] == "dplm_esm"
    assert "didi" not in settings, "it has no law of lengths"
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "esm")
    assert words("MKV")["input_ids"] == [0, 20, 15, 7, 2]
    assert words.mask_token_id == 32


@pytest.mark.parametrize("method", ["didi", "sdtt", "mixture"])
def test_proteins_of_a_fasta_are_texts_of_their_own_lengths(method, distilled, tmp_path):
    """Their law is counted from the training part. An X is given, never learnt: losses stay small.

    A target of probability 0 would cost more than 10,000 nats.
    """
    random = np.random.default_rng(0)
    sizes = random.integers(4, 30, 60)
    chains = ["".join(random.choice(list("ACDEFGHIKLMNPQRSTVWYX"), size)) for size in sizes]
    lines = [f">p{n}\n{chain}\n" for n, chain in enumerate(chains)]
    (tmp_path / "some.fasta").write_text("".join(lines))
    data = {"lengths": "data", "data.source": tmp_path / "some.fasta", "data.valid": 10}
    folder = distilled(method, data | {"reference.source": "data"})
    counts = np.bincount(sizes[:50], minlength=33)
    model = didi_package.load(folder, device="cpu")
    assert model.config.lengths == tuple(counts.tolist())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert all(abs(entry.get("loss", 0)) < 10 for entry in log)
    assert 0 < log[-1]["valid_nats_per_token"] < 10
    assert model.config.banned == tuple(n for n in range(33) if not 4 <= n < 24)
