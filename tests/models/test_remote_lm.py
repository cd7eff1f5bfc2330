import json

import pytest
import torch
import transformers.dynamic_module_utils
from safetensors.torch import save_file

from didi_instruct.api.model import Model
from didi_instruct.errors import UserError
from didi_instruct.models.masked_lm import load_masked_lm, recognise_masked_lm
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.chain import PAD
from didi_instruct.sampling.network import NetworkDenoiser

from .masked_folders import write_tokenizer

V, D = 13, 6
WORDS = ["<|endoftext|>", *(f"w{n}" for n in range(9)), "<|mdm_mask|>"]
"""Ids 11 and 12 have no token; end-of-text is text: these models write the end of theirs."""

CODE = """
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

Path(os.environ["CANARY"]).write_text("the code ran")


class Config(PretrainedConfig):
    model_type = "MODEL_TYPE"


class CLASS(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def tie_weights(self):
        if self.config.tied:
            self.out.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None):
        assert self.config.use_cache is False
        x = self.embed(input_ids) * self.scale
        mask = torch.ones(input_ids.shape) if attention_mask is None else attention_mask
        assert attention_mask is None or attention_mask.dim() == RANK
        mask = mask.reshape(len(input_ids), -1, 1).to(x)
        return SimpleNamespace(logits=self.out(x + (x * mask).sum(1, keepdim=True)))
"""


@pytest.fixture(autouse=True)
def canary(tmp_path, monkeypatch):
    """The file that the folder's code writes when it runs."""
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    return tmp_path / "canary"


def weights(tied=False):
    generator = torch.Generator().manual_seed(2)
    names = ["embed.weight"] if tied else ["embed.weight", "out.weight"]
    return {name: torch.randn(V, D, generator=generator) for name in names}


def folder_of(tmp_path, model_type, name, tied=False, **settings):
    folder = tmp_path / f"{model_type}-{tied}"
    folder.mkdir()
    rank = {"Dream": 4}.get(model_type, 2)
    code = CODE.replace("MODEL_TYPE", model_type).replace("CLASS", name)
    (folder / "modeling.py").write_text(code.replace("RANK", str(rank)))
    config = {
        "model_type": model_type,
        "architectures": [name],
        "auto_map": {"AutoConfig": "modeling.Config", "AutoModel": f"modeling.{name}"},
        "hidden_size": D,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "vocab_size": V,
        "max_position_embeddings": 5000,
        "mask_token_id": 10,
        "pad_token_id": 0,
        "tied": tied,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(tied), folder / "model.safetensors")
    write_tokenizer(folder, WORDS)
    return folder


def llada(tmp_path, **settings):
    return folder_of(tmp_path, "llada", "LLaDAModelLM", **settings)


def dream(tmp_path, start=None):
    folder = folder_of(tmp_path, "Dream", "DreamModel")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": start}))
    return folder


def formula(ids, tied=False):
    """Logits of the fake network for one text, written again."""
    given = weights(tied)
    x = 2 * given["embed.weight"][ids]
    return (x + x.sum(0)) @ given["embed.weight" if tied else "out.weight"].T


def test_code_runs_only_for_those_who_trust_it(tmp_path, canary):
    folder = llada(tmp_path)
    assert recognise_masked_lm(folder).needs_code
    with pytest.raises(
        UserError, match=r"modeling\.py.*Python with trust.*`didi generate --trust-"
    ):
        load_masked_lm(folder)
    assert not canary.exists()
    load_masked_lm(folder, trust_remote_code=True)
    assert canary.exists()


@pytest.mark.parametrize("tied", [False, True])
def test_llada_s_text_stands_alone(tmp_path, tied):
    loaded = load_masked_lm(llada(tmp_path, tied=tied), trust_remote_code=True)
    assert loaded.config.length == 5000
    assert loaded.model.ids.banned == (10, 11, 12)
    text = torch.tensor([3, V, 1, 0])
    expected = formula([3, 10, 1, 0], tied)
    with torch.no_grad():
        logits = loaded.model(text[None])[0]
    torch.testing.assert_close(logits[:, :10], expected[:, :10], atol=1e-5, rtol=0)
    assert loaded.tokenizer.eot_id == 0


@pytest.mark.parametrize("start", [None, "w8"])
def test_dream_predicts_a_position_from_the_one_before(tmp_path, start):
    """With a start symbol it predicts the first token too; without, that has its own output."""
    loaded = load_masked_lm(dream(tmp_path, start), trust_remote_code=True)
    before = [] if start is None else [9]
    assert loaded.model.ids.before == tuple(before)
    assert loaded.config.length == 2048 - len(before)
    outputs = formula([*before, 3, 10, 1, 10])
    expected = outputs[:4] if start else torch.cat([outputs[:1], outputs[:3]])
    with torch.no_grad():
        logits = loaded.model(torch.tensor([[3, V, 1, V]]))[0]
    torch.testing.assert_close(logits[:, :9], expected[:, :9], atol=1e-5, rtol=0)


@pytest.mark.parametrize("build", [llada, dream])
def test_padding_changes_nothing(tmp_path, build):
    loaded = load_masked_lm(build(tmp_path), trust_remote_code=True)
    denoiser = NetworkDenoiser(loaded.model, make_schedule(loaded.config.schedule))
    short, long = [3, V, 2], [1, V, V, 4, 5]
    both = torch.tensor([[*short, PAD, PAD], long])
    time = torch.tensor([0.5, 0.5])
    together = denoiser(both, time)
    alone = denoiser(torch.tensor([short]), time[:1])
    torch.testing.assert_close(together[:1, :3], alone, atol=1e-5, rtol=0)


def test_samples_leave_out_the_mask_alone(tmp_path):
    loaded = load_masked_lm(llada(tmp_path), trust_remote_code=True)
    model = Model(loaded.model, loaded.config, loaded.tokenizer)
    drawn = model.sample(num=40, steps=3, length=8, temperature=40.0, seed=1)
    assert set(drawn.unique().tolist()) == set(range(10))


def test_dream_s_tokenizer_is_qwen_s(tmp_path):
    """Its files are a vocabulary and merges under a class that only its own code knows."""
    folder = dream(tmp_path)
    (folder / "tokenizer.json").unlink()
    letters = ["<|endoftext|>", *"abcdefgh", "<|beginoftext|>", "<|mask|>"]
    ids = {letter: n for n, letter in enumerate(letters)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {str(n): {"content": letters[n], "special": True} for n in (0, 9, 10)}
    config = {"tokenizer_class": "DreamTokenizer", "bos_token": "<|beginoftext|>"}
    config |= {"mask_token": "<|mask|>", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_masked_lm(folder, trust_remote_code=True)
    assert loaded.tokenizer.encode(["bad<|mask|>"]) == [[2, 1, 4, 10]]
    assert loaded.model.ids.before == (9,)
    assert loaded.model.ids.banned == (9, 10, 11, 12)
    assert loaded.tokenizer.eot == "<|endoftext|>"


def lacking(folder):
    save_file({"embed.weight": torch.zeros(V, D)}, folder / "model.safetensors")


def strange(folder):
    save_file({**weights(), "more": torch.zeros(1)}, folder / "model.safetensors")


def broken(folder):
    (folder / "modeling.py").write_text("raise RuntimeError('not\\nmine')")


def elsewhere(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "somebody/somewhere--modeling.LLaDAModelLM"
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lacking, r"lacks 1 tensors \(out.weight\)"),
        (strange, "no place for more"),
        (broken, "RuntimeError: not mine"),
        (elsewhere, "not in the folder .somebody/somewhere"),
    ],
)
def test_code_and_weights_must_fit(tmp_path, spoil, words):
    folder = llada(tmp_path)
    spoil(folder)
    with pytest.raises(UserError, match=words) as error:
        load_masked_lm(folder, trust_remote_code=True)
    assert "\n" not in str(error.value)
