import copy
import itertools
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
import torch
import transformers
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from didi_instruct.data.tokenizer import AMINO_ACIDS, Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.model import Model
from didi_instruct.models.masked_lm import load_masked_lm, recognise_masked_lm
from didi_instruct.models.native import WeightFiles
from didi_instruct.models.network import Mixture, logits_at
from didi_instruct.training.likelihood import nats_of_texts
from didi_instruct.training.objectives import make_objective

from .masked_folders import BERT_WORDS, ESM, FAMILIES, bert, esm, roberta, write_tokenizer

LONGEST = {"esm1": 10}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """One family: the network of `transformers`, and the same loaded from its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    return FAMILIES[request.param](folder), load_masked_lm(folder), request.param


def open_ids(loaded):
    return [n for n in range(loaded.config.num_tokens) if n not in loaded.model.ids.banned]


def some_text(loaded, rows, length, seed=1):
    """Words that may be written, and masks."""
    known = torch.tensor([*open_ids(loaded), loaded.config.mask_id])
    generator = torch.Generator().manual_seed(seed)
    return known[torch.randint(len(known), (rows, length), generator=generator)]


def same_weights(network, other):
    for name, tensor in other.state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor), name


@torch.no_grad()
def direct(network, loaded, texts, lengths=None):
    """Logits of texts by `transformers` alone: our mask translated, special tokens around."""
    ids = loaded.model.ids
    rows = [[ids.mask if n == loaded.config.mask_id else n for n in row] for row in texts.tolist()]
    lengths = lengths or [len(row) for row in rows]
    framed = [[*ids.before, *row[:n], *ids.after] for row, n in zip(rows, lengths, strict=True)]
    longest = max(map(len, framed))
    given = torch.tensor([row + [ids.pad] * (longest - len(row)) for row in framed])
    seen = torch.tensor([[n < len(row) for n in range(longest)] for row in framed]).long()
    mask = None if len(set(lengths)) == 1 else seen
    return network(input_ids=given, attention_mask=mask).logits[:, len(ids.before) :]


def test_logits_are_the_library_s_at_the_text_s_positions(pair):
    network, loaded, _ = pair
    text, written = some_text(loaded, 4, loaded.config.length), open_ids(loaded)
    with torch.no_grad():
        ours = loaded.model(text)
    expected = direct(network, loaded, text)[:, : text.shape[1]]
    assert expected.std() > 0.1
    torch.testing.assert_close(ours[..., written], expected[..., written], atol=1e-6, rtol=0)
    assert ours.shape[-1] == loaded.config.num_tokens == loaded.config.mask_id


def test_padding_changes_nothing(pair):
    """A text has the same logits alone as in a batch with a longer one; its frame ends it."""
    network, loaded, name = pair
    lengths = [3, loaded.config.length, 1, loaded.config.length - 1]
    text, written = some_text(loaded, 4, loaded.config.length), open_ids(loaded)
    attended = torch.arange(text.shape[1]) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        ours = loaded.model(text, None, attended)
    if name != "esm" or transformers.__version__ > "5.1":  # where it forgot the mask when scaling
        together = direct(network, loaded, text, lengths)[:, : text.shape[1]]
        kept = ours[attended][:, written], together[attended][:, written]
        torch.testing.assert_close(*kept, atol=1e-6, rtol=0)
    for row, logits, n in zip(text, ours, lengths, strict=True):
        alone = direct(network, loaded, row[None, :n])[0, :n, written]
        torch.testing.assert_close(logits[:n, written], alone, atol=1e-5, rtol=0)


def test_what_fills_a_window_is_padding(pair):
    """Where texts have windows of their own, a text has the logits it has alone."""
    _, loaded, _ = pair
    end, lengths = loaded.model.ids.after[0], [3, loaded.config.length, 1]
    text, written = some_text(loaded, 3, loaded.config.length), open_ids(loaded)
    inside = torch.arange(text.shape[1]) < torch.tensor(lengths)[:, None]
    at = torch.tensor([2, text.shape[1] + 1])
    own = copy.copy(loaded.model)
    law = (1,) * (loaded.config.length + 1)
    own.config = replace(loaded.config, end_id=end, lengths=law)
    with torch.no_grad():
        filled = text.masked_fill(~inside, end)
        ours, chosen = own(filled), logits_at(own, filled, None, at)
        torch.testing.assert_close(ours, loaded.model(text, None, inside))
        torch.testing.assert_close(chosen, ours.flatten(0, 1)[at])
        for row, logits, n in zip(text, ours, lengths, strict=True):
            alone = loaded.model(row[None, :n])[0]
            torch.testing.assert_close(logits[:n, written], alone[:, written], atol=1e-5, rtol=0)


def test_the_length_is_all_that_positions_allow(pair):
    network, loaded, name = pair
    assert loaded.config.length == LONGEST.get(name, 12)
    assert recognise_masked_lm(loaded.provenance["foreign"]["source"]).config == loaded.config
    if hasattr(network.base_model.embeddings, "position_embeddings"):
        with pytest.raises((IndexError, RuntimeError)):
            loaded.model(some_text(loaded, 1, loaded.config.length + 1))


def test_samples_are_text_alone(pair):
    """Banned ids have probability 0 in double precision too, and entropies are finite."""
    _, loaded, _ = pair
    model, written = Model(loaded.model, loaded.config, loaded.tokenizer), open_ids(loaded)
    logits = loaded.model(torch.full((1, 4), loaded.config.mask_id)).double()
    p = logits.softmax(-1)
    assert (p[..., list(loaded.model.ids.banned)] == 0).all()
    assert (p[..., written] > 0).all()
    assert (p * logits.log_softmax(-1)).isfinite().all()
    for sampler in ("ancestral", "confidence"):
        drawn = model.sample(num=30, steps=4, length=10, sampler=sampler, seed=3)
        assert drawn.shape == (30, 10)
        assert set(drawn.unique().tolist()) <= set(written)
        assert len(drawn.unique()) > 3


def test_bound_is_the_sum_over_all_ways_to_mask(tmp_path):
    """For alpha_t = 1 - t a set S of k among L positions is masked with weight B(k, L - k + 1).

    4096 draws of the estimator against that sum, with a tolerance of 5 standard errors: a false
    alarm in less than one of 10^6 seeds.
    """
    network, loaded = bert(tmp_path), load_masked_lm(tmp_path)
    x = torch.tensor([7, 9, 7])
    total = 0.0
    for k in (1, 2, 3):
        weight = math.gamma(k) * math.gamma(4 - k) / math.gamma(4)
        for places in itertools.combinations(range(3), k):
            z = x.clone()
            z[list(places)] = loaded.config.mask_id
            logits = direct(network, loaded, z[None])[0].double()
            logits[:, list(loaded.model.ids.banned)] = -torch.inf
            log_p = logits.log_softmax(-1)
            total -= weight * sum(log_p[i, x[i]].item() for i in places)
    objective = make_objective(loaded.config)
    nats, counts = nats_of_texts(
        lambda batch: objective.loss(loaded.model, batch),
        loaded.config,
        lambda start, count: x.expand(count, -1),
        sequences=512,
        draws=8,
        batch_size=512,
    )
    drawn = nats / counts
    error = drawn.std().item() / math.sqrt(len(drawn))
    assert abs(drawn.mean().item() - total / 3) < 5 * error < 0.2 * total
    model = Model(loaded.model, loaded.config, loaded.tokenizer)
    assert model.nelbo(x.expand(512, -1), draws=8).item() == pytest.approx(drawn.mean().item())


@pytest.mark.parametrize("dropout", [True, False])
def test_esm_scales_what_is_visible(tmp_path, dropout):
    """By (1 - 0.12) / (1 - share of masks), where config.json says so; soft tokens are visible."""
    esm(tmp_path, token_dropout=dropout)
    loaded = load_masked_lm(tmp_path)
    model, mask = loaded.model, loaded.config.mask_id
    words = model.network.esm.embeddings.word_embeddings.weight
    text = torch.tensor([[5, mask, mask, mask, 7, 9]])
    attended = torch.tensor([[True] * 5 + [False]])
    soft = Mixture(torch.tensor([2]), torch.full((1, 16), 0.5))
    with torch.no_grad():
        x = model.embed(text, attended, soft)[0]
    factor = 0.88 / (1 - 2 / 7) if dropout else 1.0  # of <cls>, 5 tokens and <eos>
    shown = [words[0], words[5], words[32], torch.full((16,), 0.5), words[32], words[7], words[2]]
    for n, (vector, given) in enumerate(zip(x, shown, strict=False)):
        hidden = dropout and n in (2, 4)
        expected = torch.zeros(16) if hidden else factor * given
        torch.testing.assert_close(vector, expected, atol=1e-6, rtol=0)
    assert not x[7].any()  # padding
    assert (model.vectors[[32, 33]].abs().sum() == 0) == dropout
    assert loaded.model(torch.full((1, 12), mask)).isfinite().all()


@pytest.mark.parametrize(
    "text",
    ["MKTAYIAKQR", "MK TAY", "MKjjTA", "j", "MK<mask>A", "mkJJA.-X  B", "M\nK\tjA<null_1>", ""],
)
def test_esm_s_vocabulary_reads_like_the_library_s_tokenizer(tmp_path, text):
    (tmp_path / "vocab.txt").write_text("\n".join(ESM.split()))
    ours = Tokenizer.load(tmp_path)
    theirs = transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))
    ids = ours.encode([text])[0]
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    before, after = ours.frame("<mask>")
    assert [*before, *ids, *after] == theirs(text)["input_ids"]
    if set(text) <= set(ESM.split()):
        assert ours.decode(ids) == text


def test_what_is_written(tmp_path):
    """Of proteins the 20 amino acids; not [SEP], which must not pass for the end of a text."""
    esm(tmp_path / "esm")
    loaded = load_masked_lm(tmp_path / "esm")
    words = {index: word for word, index in loaded.tokenizer.vocabulary.items()}
    assert "".join(sorted(words[n] for n in open_ids(loaded))) == AMINO_ACIDS
    bert(tmp_path / "bert")
    own, loaded = Tokenizer.load(tmp_path / "bert"), load_masked_lm(tmp_path / "bert").tokenizer
    assert (own.eot, loaded.eot_id, loaded.hash) == ("[SEP]", None, own.hash)


@pytest.mark.parametrize("form", ["bin", "shards", "lightning"])
def test_other_files_of_weights(tmp_path, form):
    """Pickles are read without running them.

    DPLM's training writes names under `model.net.`, as an older transformers had them: with tables
    in each layer, and positions that are not used.
    """
    network = esm(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    if form == "bin":
        torch.save(weights, tmp_path / "pytorch_model.bin")
    elif form == "lightning":
        table = weights.pop("esm.rotary_embeddings.inv_freq")
        for layer in range(2):
            name = f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"
            weights[name] = table.clone()
        weights["esm.embeddings.position_embeddings.weight"] = torch.zeros(14, 16)
        weights["esm.embeddings.position_ids"] = torch.arange(14)[None]
        state = {f"model.net.{name}": t for name, t in weights.items()}
        torch.save({"state_dict": state, "hyper": Model}, tmp_path / "last.ckpt")
    else:
        names = {name: f"part-{n % 2}.safetensors" for n, name in enumerate(weights)}
        for file in set(names.values()):
            part = {n: t for n, t in weights.items() if names[n] == file}
            save_file(part, tmp_path / file)
        index = json.dumps({"weight_map": names})
        (tmp_path / "model.safetensors.index.json").write_text(index)
    same_weights(load_masked_lm(tmp_path).model.network, network)


def test_the_type_of_the_file_is_kept_unless_another_is_asked_for(tmp_path):
    bert(tmp_path).half().save_pretrained(tmp_path)
    kept, cast = load_masked_lm(tmp_path), load_masked_lm(tmp_path, dtype=torch.float64)
    assert {p.dtype for p in kept.model.parameters()} == {torch.float16}
    assert {p.dtype for p in cast.model.parameters()} == {torch.float64}
    text = some_text(cast, 1, 5)
    assert torch.equal(text, some_text(kept, 1, 5))
    torch.testing.assert_close(kept.model(text).double(), cast.model(text), atol=0.02, rtol=0)


def test_tokenizers_that_are_not_whole(tmp_path):
    """BERT's vocab.txt alone, as in old checkpoints; a tokenizer.json that forgot its last step."""
    bert(tmp_path)
    reference = load_masked_lm(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "post_processor": None}))
    names = {"mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": {"content": "[SEP]"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    assert load_masked_lm(tmp_path).model.ids == reference.model.ids
    for name in (path, tmp_path / "special_tokens_map.json"):
        name.unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(BERT_WORDS))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    loaded = load_masked_lm(tmp_path)
    assert loaded.model.ids == reference.model.ids
    assert loaded.tokenizer.encode(["w3 w1"]) == [[9, 7]]


def test_old_names_and_tensors_of_other_tasks(tmp_path):
    """As in the first checkpoints of BERT: norms have a gamma and a beta; poolers are left out."""
    network = bert(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in [name for name in weights if name.endswith(tuple(old))]:
        end = next(end for end in old if name.endswith(end))
        weights[name.removesuffix(end) + old[end]] = weights.pop(name)
    weights["bert.pooler.dense.weight"] = torch.zeros(16, 16)
    weights["cls.seq_relationship.bias"] = torch.zeros(2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    same_weights(load_masked_lm(tmp_path).model.network, network)


def rewrite(folder, **tensors):
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})


def change(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def error_of(folder):
    """The message of a refusal: one line that names the folder."""
    with pytest.raises(UserError) as error:
        load_masked_lm(folder)
    message = str(error.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


GPT2 = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2)
LARGER = [*BERT_WORDS, *(f"x{n}" for n in range(9))]
STRANGER = {"bert.adapter.weight": torch.zeros(2)}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda at, bert: bert.bert.save_pretrained(at), "lacks tensors of BertForMaskedLM"),
        (lambda at, _: rewrite(at, **STRANGER), "bert.adapter.weight"),
        (lambda at, _: save_file({}, at / "model.safetensors"), "the weights have (0, 0, 0)"),
        (lambda at, _: (at / "model.safetensors").unlink(), "should hold model.safetensors"),
        (lambda at, _: (at / "tokenizer.json").unlink(), "has no tokenizer: put"),
        (lambda at, _: write_tokenizer(at, LARGER), "the tokenizer has 24 ids and the network 17"),
        (lambda at, _: GPT2.save_pretrained(at), "not that of a masked LM"),
        (lambda at, _: (at / "config.json").write_text("["), "not that of a masked LM"),
    ],
)
def test_folders_that_are_no_masked_lm_are_refused_by_name(tmp_path, spoil, words):
    spoil(tmp_path, bert(tmp_path))
    assert words in error_of(tmp_path)


HUGE = 2 * 10**9


@pytest.mark.parametrize(
    ("build", "settings", "words"),
    [
        (bert, {"vocab_size": HUGE}, f"({HUGE}, 16, 2), and the weights have (17, 16, 2)"),
        (bert, {"hidden_size": 20000}, "(17, 20000, 2), and the weights have (17, 16, 2)"),
        (bert, {"num_hidden_layers": 10**5}, "(17, 16, 100000), and the weights have (17, 16, 2)"),
        (bert, {"num_hidden_layers": 1}, "(17, 16, 1), and the weights have (17, 16, 2)"),
        (bert, {"intermediate_size": 10**9}, "(24, 16) for (1000000000, 16)"),
        (bert, {"max_position_embeddings": HUGE}, "position_embeddings.weight (14, 16) for"),
        (bert, {"max_position_embeddings": None}, "`max_position_embeddings` is None"),
        (bert, {"max_position_embeddings": 1}, "`max_position_embeddings` is 1"),
        (bert, {"type_vocab_size": HUGE}, "token_type_embeddings.weight (2, 16) for"),
        (bert, {"hidden_act": "nope"}, "KeyError: 'nope'"),
        (bert, {"pad_token_id": 999}, "Padding_idx"),
        (bert, {"intermediate_size": -1}, "negative dimension"),
        (bert, {"num_attention_heads": 3}, "16 with 3 heads"),
        (roberta, {"pad_token_id": [1]}, "`pad_token_id` is [1]"),
        (roberta, {"pad_token_id": float("inf")}, "`pad_token_id` is inf"),
        (roberta, {"pad_token_id": True}, "`pad_token_id` is True"),
        (bert, {"auto_map": {"AutoModel": "code.A"}}, "brings code of its own, which is never run"),
        (
            bert,
            {"model_type": "sdar", "auto_map": {"AutoModel": "code.A"}},
            "never run, and its family `sdar` is not supported. Use one of bert, camembert,",
        ),
        (bert, {"model_type": "llada2_moe"}, "its family `llada2_moe` is not supported"),
        (bert, {"model_type": "deberta-v2"}, "its family `deberta-v2` is not supported"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_they_cost_memory(
    tmp_path, monkeypatch, build, settings, words
):
    """No weight is read, and no network is built but on the device that has no memory."""
    build(tmp_path)
    change(tmp_path, **settings)
    (tmp_path / "code.py").write_text("raise SystemExit")
    monkeypatch.setattr(WeightFiles, "read", pytest.fail)
    assert words in error_of(tmp_path)


def test_a_network_larger_than_its_file_is_not_built(tmp_path, monkeypatch):
    """Tensors under no name that is known could hide any size."""
    bert(tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {name: t for name, t in load_file(path).items() if "dense" not in name}
    save_file(kept, path, {"format": "pt"})
    change(tmp_path, intermediate_size=10**9)
    monkeypatch.setattr(WeightFiles, "read", pytest.fail)
    assert "lacks tensors of BertForMaskedLM (bert.encoder.layer.0." in error_of(tmp_path)


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    folders = [tmp_path_factory.mktemp("whole") for _ in range(2)]
    for folder, build in zip(folders, (esm, roberta), strict=True):
        build(folder)
    return [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_a_damaged_folder_is_refused_in_one_line(contents, data):
    """Or loads: a byte of a weight, say, is as good as another."""
    files = dict(data.draw(st.sampled_from(contents)))
    name = data.draw(st.sampled_from(sorted(files)))
    content = files[name]
    if name == "config.json" and data.draw(st.booleans()):
        changed = json.loads(content)
        setting = data.draw(st.sampled_from(sorted(changed)))
        changed[setting] = data.draw(st.sampled_from([None, True, -1, 10**30, "x", [0], {"a": 1}]))
        files[name] = json.dumps(changed).encode()
    else:
        at, byte = data.draw(st.integers(0, len(content) - 1)), data.draw(st.binary(max_size=1))
        rest = content[at + 1 :] if byte else b""  # altered, or cut off
        files[name] = content[:at] + byte + rest
    with tempfile.TemporaryDirectory() as folder:
        for file, damaged in files.items():
            (Path(folder) / file).write_bytes(damaged)
        message = ""
        try:
            load_masked_lm(folder)
        except UserError as error:
            message = str(error)
    assert message.isprintable()
    assert len(message) < 900


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tmp_path, dtype):
    """They are numbers of the right shapes, and not the weights."""
    name = "bert.encoder.layer.0.output.dense.weight"
    rewrite(tmp_path, **{name: bert(tmp_path).get_parameter(name).to(dtype)})
    assert f"({name} " in (message := error_of(tmp_path))
    assert "Use the checkpoint that is not quantised." in message


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_implementation": "somebody/kernels"},
        {"_attn_implementation": "somebody/kernels"},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"transformers_weights": "../other.safetensors"},
        {"dtype": "evil"},
        {"torch_dtype": "os"},
        {"chunk_size_feed_forward": 7},
        {"fusion_config": {"patch_embeddings": True}},
    ],
)
def test_settings_that_fetch_or_run_something_change_nothing(tmp_path, settings):
    network = bert(tmp_path)
    change(tmp_path, **settings)
    loaded = load_masked_lm(tmp_path)
    text = some_text(loaded, 1, 5)
    with torch.no_grad():
        ours = loaded.model(text)[0][:, open_ids(loaded)]
    expected = direct(network, loaded, text)[0, :5, open_ids(loaded)]
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)
    assert loaded.model.network.config._attn_implementation == "sdpa"


def test_recognition_says_what_it_is(tmp_path):
    """`architectures` may be anything; a DiT's settings are not a masked LM's."""
    esm(tmp_path)
    for value in (7, {"a": 1}, [None, ["y"]], "EsmForMaskedLM", ["EsmForDPLM"]):
        change(tmp_path, architectures=value)
        found = recognise_masked_lm(tmp_path)
        assert (found.layout, found.config.num_tokens) == ("esm", 33)
    assert "EsmForDPLM of the family esm: 2 layers, hidden 16, 33 tokens" in found.description
    change(tmp_path, model_type="unheard-of")
    assert recognise_masked_lm(tmp_path) is recognise_masked_lm(tmp_path / "nowhere") is None
    (tmp_path / "config.json").write_text('{"model_type": "mdlm", "n_blocks": 1, "cond_dim": 2}')
    assert recognise_masked_lm(tmp_path) is None


def test_without_transformers(tmp_path, monkeypatch):
    bert(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert recognise_masked_lm(tmp_path) is not None
    with pytest.raises(UserError, match='pip install "transformers'):
        load_masked_lm(tmp_path)
