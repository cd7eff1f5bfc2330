"""`didi convert` and `didi info` of foreign checkpoints, as people meet them."""

import json

import pytest
import torch
import transformers
from tests.models import masked_folders
from tests.models.foreign.folders import WORDS
from tests.models.foreign.reference import (
    VOCAB,
    critic_weights,
    hub_config,
    hub_folder,
    lightning_file,
    prefixed,
    weights,
)


@pytest.fixture
def released(tmp_path):
    folder = hub_folder(tmp_path / "released", weights(), hub_config(), critic_weights())
    WORDS.save(folder)
    return folder


def test_converted_and_used(didi, released, tmp_path):
    ours = tmp_path / "ours"
    code, out, err = didi("convert", released, ours, "--to", "didi")
    assert code == 0, err
    assert f"Wrote {ours} (didi):" in out
    for name in ("model.safetensors", "discriminator.safetensors", "config.json", "README.md"):
        assert f"{name:26} {(ours / name).stat().st_size:>14,} bytes" in out
    assert "Writing: " in err
    texts = [didi("generate", source, "--steps", 4, "--seed", 3)[1] for source in (released, ours)]
    assert texts[0] == texts[1]
    assert len(texts[0].split()) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "esm"], "holds ESM-2 models alone"),
        (["--to", "mdlm-hubb"], "Did you mean `mdlm-hub`?"),
        (["--to", "mdlm-hub"], "--no-discriminator"),
        (["--to", "didi", "--weights", "best"], "use `ema`"),
        (["--to", "didi", "--storage", "int4"], "use one of float32, bfloat16, int8"),
        (["--to", "mdlm-hub", "--storage", "int8"], "`mdlm-hub` has no storage"),
        (["--to", "didi-instruct", "--license", "mit"], "`didi-instruct` has no license"),
        (["--to", "didi", "--license", "my own"], "use the hub's short name"),
        (["--to", "didi", "--numbers", "nowhere.json"], "nowhere.json cannot be read"),
        (["--to", "didi", "--family", "gpt"], "`gpt` is not a family"),
        ([], "--to"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(didi, released, tmp_path, arguments, message):
    code, _, err = didi("convert", released, tmp_path / "dest", *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "dest").exists()


def test_half_of_the_size(didi, released, tmp_path):
    """And it writes all the same; the card has the licence."""
    small, plain = tmp_path / "small", tmp_path / "plain"
    assert didi("convert", released, plain, "--to", "didi")[0] == 0
    flags = ["--to", "didi", "--storage", "bfloat16", "--license", "mit"]
    code, _, err = didi("convert", released, small, *flags)
    assert code == 0, err
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (plain, small)]
    assert sizes[1] < 0.6 * sizes[0]
    assert "license: mit" in (small / "README.md").read_text()
    code, out, err = didi("generate", small, "--steps", 4)
    assert code == 0, err
    assert len(out.split()) == 16


def test_info_of_a_release_by_its_headers(didi, released, monkeypatch):
    monkeypatch.setattr("didi_instruct.models.foreign.reading._load", pytest.fail)
    code, out, _ = didi("info", released, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["parameters"] == sum(
        t.numel() for name, t in weights().items() if not name.endswith("inv_freq")
    )
    assert facts["discriminator_parameters"] == sum(
        t.numel()
        for name, t in critic_weights().items()
        if not name.endswith(("inv_freq", "weight_u", "weight_v"))
    )
    assert (facts["architecture"], facts["layout"]) == ("mdlm", "didi-instruct")
    assert (facts["vocab_size"], facts["mask_id"], facts["length"]) == (VOCAB, VOCAB - 1, 16)
    assert facts["trainable_parameters"] == facts["parameters"]
    assert facts["dtype"] == "F32"
    code, out, _ = didi("info", released)
    assert code == 0
    assert "didi-instruct: mdlm (2 × 32 × 4), vocabulary 19, with a discriminator" in out


def test_info_of_a_training_run_notes_what_was_assumed(didi, tmp_path):
    path = lightning_file(tmp_path / "last.ckpt", prefixed("backbone.", weights()), weights(3))
    code, out, _ = didi("info", path, "--json", "--family", "duo")
    facts = json.loads(out)
    assert code == 0
    assert (facts["layout"], facts["architecture"], facts["mask_id"]) == ("lightning", "duo", None)
    assert facts["weights"] == ["ema", "raw"]
    assert facts["discriminator_parameters"] is None
    assert any("longest text" in note for note in facts["notes"])


def test_info_of_an_unknown_file_lists_what_it_holds(didi, tmp_path):
    state = {f"layers.{n}.weight": torch.ones(2, 3) for n in range(5)}
    state |= {"gate": torch.zeros((), dtype=torch.int64), "recipe": torch.nn.Identity()}
    torch.save({"state_dict": state}, tmp_path / "odd.ckpt")
    code, out, err = didi("info", tmp_path / "odd.ckpt")
    assert code == 0, err
    assert "layers.N.weight  5 × (2 × 3) float32" in out
    assert "gate  (a number) int64" in out
    assert "torch.nn.modules.linear.Identity" in out
    assert "no network of the DiT family" in out
    facts = json.loads(didi("info", tmp_path / "odd.ckpt", "--json")[1])
    assert facts["parameters"] == 31
    assert facts["layout"] is None


def test_info_prints_foreign_words_on_a_line_each(didi, tmp_path):
    """Names cannot steer the terminal, fill it, or break the encoding of its output."""
    names = [
        f"{chr(97 + n // 26)}{chr(97 + n % 26)}\x1b[2J\nroot#\ud800{'x' * 200}" for n in range(50)
    ]
    state = {name: torch.ones(2) for name in names}
    state |= {name + "!": torch.nn.Identity() for name in names}
    torch.save({"state_dict": state}, tmp_path / "odd.ckpt")
    code, out, err = didi("info", tmp_path / "odd.ckpt")
    assert code == 0, err
    assert "\x1b" not in out
    out.encode()
    assert all(len(line) < 200 for line in out.splitlines() if not line.startswith("notes"))
    assert not any(line.startswith("root#") for line in out.splitlines())
    assert out.count("and 10 more (--json)") == 2
    assert "mask id" not in out
    facts = json.loads(didi("info", tmp_path / "odd.ckpt", "--json")[1])
    assert len(facts["not_tensors"]) == len(facts["tensors"]) == 50
    assert max(len(tensor["name"]) for tensor in facts["tensors"]) == 80
    assert facts["mask_id"] is None


@pytest.mark.parametrize("shards", [False, True])
def test_info_of_a_causal_lm_says_what_it_is_for(didi, tmp_path, shards):
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        vocab_size=9, tie_word_embeddings=False,
    )  # fmt: skip
    network = transformers.LlamaForCausalLM(config)
    network.save_pretrained(tmp_path, max_shard_size="1KB" if shards else "1GB")
    code, out, err = didi("info", tmp_path)
    assert code == 0, err
    assert "A causal language model: use it as --judge in didi eval." in out
    assert (tmp_path / "model.safetensors").exists() != shards
    assert f"{sum(p.numel() for p in network.parameters()):,}" in out
    assert not any(line.endswith(" -") for line in out.splitlines())


def test_info_tells_a_few_facts_of_the_provenance(didi, released, tmp_path):
    ours = tmp_path / "ours"
    assert didi("convert", released, ours, "--to", "didi")[0] == 0
    path = ours / "config.json"
    settings = json.loads(path.read_text())
    settings["provenance"] |= {"step": 7, "teacher": "ab\x1b[2J", "recipe": {"method": "didi"}}
    path.write_text(json.dumps(settings))
    code, out, err = didi("info", ours)
    assert code == 0, err
    lines = [line.removeprefix("provenance").strip() for line in out.splitlines()]
    expected = {
        f"source {released}",
        "step 7",
        "teacher ab\N{REPLACEMENT CHARACTER}[2J",
        "method didi",
    }
    assert {*expected, "the rest: --json"} <= set(lines)


def test_info_of_a_damaged_release_says_what_to_mend(didi, released):
    config = json.loads((released / "config.json").read_text())
    (released / "config.json").write_text(json.dumps(config | {"hidden_dim": 64}))
    code, _, err = didi("info", released)
    assert code == 2
    assert "another model's" in err


@pytest.mark.parametrize("family", ["esm", "bert", "distilbert", "modernbert", "roberta"])
def test_info_of_a_masked_lm_counts_like_transformers(didi, tmp_path, family):
    network = masked_folders.FAMILIES[family](tmp_path / "hf")
    code, out, err = didi("info", tmp_path / "hf", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["parameters"] == sum(p.numel() for p in network.parameters())
    assert facts["architecture"] == family
    assert facts["mask_id"] == network.config.vocab_size == facts["vocab_size"] - 1
    assert facts["layout"] == ("esm" if family == "esm" else "masked-lm")
    assert facts["discriminator_parameters"] is None


def test_info_counts_tied_weights_once_in_a_pickle_too(didi, tmp_path):
    network = masked_folders.esm(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(network.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    facts = json.loads(didi("info", tmp_path / "hf", "--json")[1])
    assert facts["parameters"] == sum(p.numel() for p in network.parameters())
