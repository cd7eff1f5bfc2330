import json
import lzma
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.random_models import add_noise
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation import causal_lm as module
from didi_instruct.evaluation import judges as opening
from didi_instruct.evaluation.causal_lm import causal_nats, default_batch
from didi_instruct.evaluation.judges import ARJudge, DiffusionJudge, JudgeConfig, OracleJudge
from didi_instruct.evaluation.measuring import Context, Measuring
from didi_instruct.evaluation.samples import Origin, SampleSet
from didi_instruct.evaluation.scores import Scores
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model
from didi_instruct.training.likelihood import nelbo_judge
from didi_instruct.training.objectives import make_objective

CORPUS = [
    "Once upon a time there was a little dog who liked to run in the park.",
    "The dog saw a cat, and the cat saw the dog. They ran and ran until the sun went down!",
    "A girl named Lily found a red ball. She was happy to share it with her friend Tom.",
]
TEXTS = (*CORPUS, "A dog.", "Tom ran.", "The red cat was happy and the little girl was, too.")
CONTEXT = 64


def open_judge(source, **settings):
    """`open_judge` on the CPU with settings by name."""
    settings.pop("device", None)
    return opening.open_judge(source, JudgeConfig(**settings), device="cpu")


def CausalJudge(source, **settings):
    """The judge with settings by name."""
    return module.CausalJudge(source, JudgeConfig(**settings))


def sample_set(texts=(), tokens=None, *, tokenizer=None, lengths=None):
    """Texts whose tokens do not matter, or tokens whose texts do not."""
    if tokens is None:
        tokens = torch.zeros(len(texts), 4, dtype=torch.long)
    texts = texts or ("",) * len(tokens)
    if lengths is None:
        lengths = torch.full((len(tokens),), tokens.shape[1])
    origin = Origin(
        model="a model", fingerprint="0", tokenizer=tokenizer, sampler="ancestral", steps=1, nfe=1,
        passes=1.0, disc_calls=0, temperature=1.0, top_p=1.0, seed=0, length=tokens.shape[1],
    )  # fmt: skip
    return SampleSet(origin, tokens, tuple(texts), None, torch.as_tensor(lengths))


def tiny_tokenizer(start):
    """A byte-level BPE; with `start` it puts <s> before a text by itself, as Llama's does."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if start:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>" if start else "</s>", eos_token="</s>"
    )


def tiny_model(kind, vocab_size):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocab_size, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4,
            initializer_range=0.3, bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=CONTEXT, hidden_size=32, num_hidden_layers=2,
        intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
        bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of each kind, as transformers saves it."""
    root = tmp_path_factory.mktemp("judges")
    for kind in ("gpt2", "llama"):
        tokenizer = tiny_tokenizer(start=kind == "llama")
        tokenizer.save_pretrained(root / kind)
        tiny_model(kind, len(tokenizer)).save_pretrained(root / kind)
    return {kind: root / kind for kind in ("gpt2", "llama")}


def copy(folder, to, *without):
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns(*without))
    return to


@torch.no_grad()
def by_hand(model, ids, *, scored_from=1, temperature=1.0):
    """-log p token by token, each from the tokens before it alone."""
    total = 0.0
    for place in range(scored_from, len(ids)):
        logits = model(torch.tensor([ids[:place]])).logits[0, -1].double() / temperature
        total -= logits.log_softmax(-1)[ids[place]].item()
    return total


def reference(folder):
    return (
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.AutoModelForCausalLM.from_pretrained(folder).eval(),
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_a_score_is_the_hand_computation_token_by_token(folders, kind, temperature):
    """The tokenizer's own special tokens: Llama's start a text, GPT-2 has none."""
    tokenizer, model = reference(folders[kind])
    scores = CausalJudge(folders[kind], temperature=temperature).score(sample_set(TEXTS))
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    hand = [by_hand(model, row, temperature=temperature) for row in rows]
    assert scores.nats.tolist() == pytest.approx(hand, rel=1e-5)
    assert scores.tokens.tolist() == [len(row) - 1 for row in rows]
    assert scores.perplexity() == pytest.approx(math.exp(sum(hand) / scores.tokens.sum().item()))
    assert (scores.nats.dtype, scores.cut) == (torch.float64, 0)
    assert (rows[0][0] == 0) == (kind == "llama")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_score_is_transformers_own_loss(folders, kind):
    tokenizer, model = reference(folders[kind])
    scores = CausalJudge(folders[kind]).score(sample_set(TEXTS))
    for text, nats, tokens in zip(TEXTS, scores.nats, scores.tokens, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            loss = model(ids, labels=ids).loss
        assert nats.item() == pytest.approx(loss.item() * tokens.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_batch_and_order_change_nothing(folders, kind, monkeypatch):
    """Neither of scores nor of features: no text sees the padding, or another text."""
    alone = CausalJudge(folders[kind], batch_size=1)
    whole = CausalJudge(folders[kind], batch_size=8)
    expected, features = alone.score(sample_set(TEXTS)).nats, alone.features(TEXTS)
    backwards = whole.score(sample_set(TEXTS[::-1])).nats.flip(0)
    torch.testing.assert_close(backwards, expected, rtol=1e-6, atol=0)
    np.testing.assert_allclose(whole.features(TEXTS[::-1])[::-1], features, rtol=1e-4, atol=1e-5)

    # Two rows of logits at most, and the softmax of seven tokens at a time.
    longest = max(len(ids) for ids in whole._encode(TEXTS))
    vocabulary = len(whole.tokenizer)
    monkeypatch.setattr(module, "LOGITS_BYTES", 2 * 4 * vocabulary * (longest + 1))
    monkeypatch.setattr(module, "SOFTMAX_ENTRIES", 7 * vocabulary)
    sizes = []
    whole.model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    in_parts = whole.score(sample_set(TEXTS)).nats
    torch.testing.assert_close(in_parts, expected, rtol=1e-6, atol=0)
    assert max(sizes) < len(TEXTS)
    assert sizes[0] <= 2


def test_features_are_the_last_hidden_state_at_the_last_token(folders):
    tokenizer, model = reference(folders["llama"])
    found = CausalJudge(folders["llama"]).features(TEXTS, max_tokens=9)
    assert (found.shape, found.dtype) == ((len(TEXTS), 32), np.float32)
    for text, vector in zip(TEXTS, found, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :10]
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states[-1]
        np.testing.assert_allclose(vector, hidden[0, -1], rtol=1e-4, atol=1e-5)
    long = CausalJudge(folders["llama"]).features([" ".join(TEXTS)])
    assert np.isfinite(long).all()
    with pytest.raises(UserError, match="Text 1 has no tokens"):
        CausalJudge(folders["gpt2"]).features(["A dog.", ""])


def test_features_are_those_that_mauve_takes_itself(folders):
    library = pytest.importorskip("mauve.utils", reason="mauve-text is not installed")
    tokenizer, model = reference(folders["gpt2"])
    tokens = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
    expected = library.featurize_tokens_from_model(model.transformer, tokens, batch_size=4)
    found = CausalJudge(folders["gpt2"], batch_size=3).features(TEXTS)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_long_text_is_cut_to_the_context_and_counted(folders, kind):
    tokenizer, model = reference(folders[kind])
    long = " ".join(TEXTS)
    ids = tokenizer(long, add_special_tokens=False)["input_ids"]
    assert len(ids) > CONTEXT + 1
    start = tokenizer("", add_special_tokens=True)["input_ids"]
    for limit in (None, 10):
        judge = CausalJudge(folders[kind], max_length=limit)
        scores = judge.score(sample_set([long, "A dog."]))
        row = start + ids[: limit or CONTEXT]
        assert scores.nats[0].item() == pytest.approx(by_hand(model, row), rel=1e-5)
        assert scores.tokens[0] == len(row) - 1
        assert scores.cut == 1
    with pytest.raises(UserError, match=f"max_length is 65, but .* reads {CONTEXT} tokens"):
        CausalJudge(folders[kind], max_length=CONTEXT + 1)


def test_start_tokens(folders):
    """`always` and `never` override the tokenizer's habit; without one, one token less counts."""
    tokenizer, model = reference(folders["gpt2"])
    ids = tokenizer(TEXTS[0])["input_ids"]
    samples = sample_set(TEXTS[:1])
    plain, started = (CausalJudge(folders["gpt2"], bos=bos) for bos in ("auto", "always"))
    assert (plain.start, started.start) == (None, 1)
    assert plain.score(samples).tokens == len(ids) - 1
    assert started.score(samples).tokens == len(ids)
    assert started.score(samples).nats.item() == pytest.approx(by_hand(model, [1, *ids]), rel=1e-5)
    assert CausalJudge(folders["llama"]).start == 0
    assert CausalJudge(folders["llama"], bos="never").start is None
    with pytest.raises(UserError, match="use auto, always or never"):
        CausalJudge(folders["gpt2"], bos="sometimes")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_runs_of_spaces_are_one_space_where_that_is_asked_for(folders, kind):
    """And nothing else changes: line breaks stay, and a text without runs."""
    runs = ["The  dog saw   a cat. \n\n  Tom ran.", TEXTS[1]]
    single = ["The dog saw a cat. \n\n Tom ran.", TEXTS[1]]
    plain = CausalJudge(folders[kind])
    judge = CausalJudge(folders[kind], collapse_spaces=True)
    found, expected = judge.score(sample_set(runs)), plain.score(sample_set(single))
    assert found.tokens.equal(expected.tokens)
    torch.testing.assert_close(found.nats, expected.nats)
    np.testing.assert_allclose(judge.features(runs), plain.features(single))
    untouched = plain.score(sample_set(runs))
    assert untouched.tokens[0] > expected.tokens[0]
    assert (plain.name, judge.name) == (str(folders[kind]), f"{folders[kind]} (spaces collapsed)")


def test_empty_texts_count_nothing_and_all_empty_are_refused(folders):
    judge = CausalJudge(folders["llama"])
    scores = judge.score(sample_set(["", *TEXTS, ""]))
    assert scores.tokens[[0, -1]].tolist() == scores.nats[[0, -1]].tolist() == [0, 0]
    expected = judge.score(sample_set(TEXTS))
    assert scores.perplexity() == pytest.approx(expected.perplexity())
    assert all(map(math.isfinite, scores.interval()))
    with pytest.raises(UserError, match="All samples are empty"):
        Measuring(sample_set(["", ""]), Context(judge=judge)).scores()
    with pytest.raises(UserError, match="too short for this judge"):
        Measuring(sample_set(["a", ""]), Context(judge=CausalJudge(folders["gpt2"]))).scores()
    with pytest.raises(UserError, match="no texts"):
        judge.score(sample_set(tokens=torch.zeros(0, 4, dtype=torch.long)))


def test_progress_ends_at_all_samples(folders):
    seen = []
    samples = sample_set(["", *TEXTS])
    CausalJudge(folders["llama"], batch_size=2).score(samples, lambda *args: seen.append(args))
    assert seen == [(3, 7), (5, 7), (7, 7)]


def test_a_damaged_judge_is_named(folders, tmp_path):
    judge = CausalJudge(folders["gpt2"])
    with torch.no_grad():
        judge.model.transformer.ln_f.weight[0] = math.nan
    with pytest.raises(UserError, match="gpt2 answers with NaN"):
        judge.score(sample_set(TEXTS))
    judge.model.save_pretrained(tmp_path / "nan")
    judge.tokenizer.save_pretrained(tmp_path / "nan")
    with pytest.raises(UserError, match="nan answers with NaN"):
        CausalJudge(tmp_path / "nan").score(sample_set(TEXTS))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_judge_without_a_tokenizer_is_refused(folders, kind, tmp_path):
    bare = copy(folders[kind], tmp_path / "bare", "tokenizer*", "vocab*", "merges*")
    with pytest.raises(UserError, match=r"bare has no tokenizer .* put its tokenizer.json beside"):
        CausalJudge(bare)


def test_what_is_no_causal_model_is_refused(folders, tmp_path):
    pickled = copy(folders["gpt2"], tmp_path / "pickled", "*.safetensors")
    torch.save(tiny_model("gpt2", 320).state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match="not pickled"):
        CausalJudge(pickled)

    seer = copy(folders["gpt2"], tmp_path / "seer", "config.json", "*.safetensors")
    config = transformers.BertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, initializer_range=0.5,
    )  # fmt: skip
    transformers.BertLMHeadModel(config).save_pretrained(seer)
    with pytest.raises(UserError, match="seer looks at later tokens"):
        CausalJudge(seer)

    small = copy(folders["gpt2"], tmp_path / "small", "config.json", "*.safetensors")
    tiny_model("gpt2", 100).save_pretrained(small)
    with pytest.raises(UserError, match="do not belong together"):
        CausalJudge(small).score(sample_set(TEXTS))

    with pytest.raises(UserError, match="has no config.json"):
        CausalJudge(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        CausalJudge(str(tmp_path / "absent"))
    for settings in ({"batch_size": 0}, {"temperature": 0.0}, {"max_length": 1}):
        with pytest.raises(UserError, match="use "):
            CausalJudge(folders["gpt2"], **settings)


def test_a_judge_whose_weights_are_incomplete_is_refused(folders, tmp_path):
    """Transformers would fill the gap with random numbers."""
    from safetensors.torch import load_file, save_file

    part = copy(folders["llama"], tmp_path / "part", "*.safetensors")
    tensors = load_file(folders["llama"] / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"part is incomplete.*layers\.1\.mlp\.up_proj"):
        CausalJudge(part)


def test_a_fingerprint_tells_what_changes_a_score(folders, tmp_path):
    same = copy(folders["llama"], tmp_path / "same")
    (same / "notes.json").write_text("{}")
    judge = CausalJudge(folders["llama"])
    for twin in (
        CausalJudge(same, batch_size=3),
        CausalJudge(same, bos="always", max_length=CONTEXT),
    ):
        assert twin.fingerprint == judge.fingerprint
    other = copy(folders["llama"], tmp_path / "other")
    with torch.no_grad():
        judge.model.lm_head.weight[5, 5] += 1
    judge.model.save_pretrained(other)
    found = {
        judge.fingerprint,
        CausalJudge(other).fingerprint,
        *(
            CausalJudge(same, **settings).fingerprint
            for settings in (
                {"bos": "never"},
                {"temperature": 0.8},
                {"max_length": 10},
                {"collapse_spaces": True},
            )
        ),
    }
    assert len(found) == 6


def test_weights_that_differ_anywhere_are_another_judge(folders, tmp_path):
    """A file of 16 MiB, of which one number in a tensor off its beginning, middle and end moves."""
    big = copy(folders["llama"], tmp_path / "big")
    config = transformers.LlamaConfig.from_pretrained(big)
    config.hidden_size, config.intermediate_size = 256, 2304
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(big)
    size = (big / "model.safetensors").stat().st_size
    before = CausalJudge(big)
    content = bytearray((big / "model.safetensors").read_bytes())
    place = size // 4
    assert all(abs(place - other) > 3 << 20 for other in (0, size // 2, size))
    content[place] ^= 1
    (big / "model.safetensors").write_bytes(content)
    assert CausalJudge(big).fingerprint != before.fingerprint


def test_the_precision_is_part_of_a_judge(folders, monkeypatch):
    judge = CausalJudge(folders["gpt2"])
    load = module.load_causal
    monkeypatch.setattr(
        module, "load_causal", lambda source, _, trust: load(source, torch.bfloat16, trust)
    )
    assert CausalJudge(folders["gpt2"]).fingerprint != judge.fingerprint


def write_gguf(path, tokenizer, model):
    """A Llama as llama.cpp stores it: other names, and rotated pairs side by side."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    config, backend = model.config, json.loads(tokenizer.backend_tokenizer.to_str())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(backend["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if index < 2 else 1 for _, index in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            halves = tensor.unflatten(0, (-1, 2, config.head_dim // 2))
            tensor = halves.transpose(1, 2).flatten(0, 2)
        stored = names.get_name(name.removesuffix(".weight"))
        writer.add_tensor(f"{stored}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_scores_as_the_directory_it_was_made_from(folders, tmp_path, capfd):
    write_gguf(tmp_path / "tiny.gguf", *reference(folders["llama"]))
    capfd.readouterr()
    judge = open_judge(tmp_path / "tiny.gguf", bos="always")
    expected = CausalJudge(folders["llama"]).score(sample_set(TEXTS))
    found = judge.score(sample_set(TEXTS))
    assert capfd.readouterr() == ("", "")
    assert found.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(found.nats, expected.nats, rtol=1e-5, atol=0)
    assert judge.max_length == CONTEXT


def test_a_gguf_file_needs_an_extra(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no such file"):
        CausalJudge(tmp_path / "absent.gguf")
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "didi-instruct\[eval\]"'):
        CausalJudge(tmp_path / "some.gguf")


def test_a_hub_id_that_was_downloaded_needs_no_network(folders, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "0123abcd"
    copy(folders["llama"], snapshot)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    judge, local = open_judge("someone/tiny"), CausalJudge(folders["llama"])
    assert judge.fingerprint == local.fingerprint
    assert judge.score(sample_set(TEXTS)).nats.equal(local.score(sample_set(TEXTS)).nats)


def test_perplexity_averages_over_tokens_not_samples():
    scores = Scores(torch.tensor([2.0, 30.0], dtype=torch.float64), torch.tensor([1, 10]))
    assert scores.perplexity() == pytest.approx(math.exp(32 / 11))
    assert Scores(torch.tensor([1e5]), torch.tensor([1])).perplexity() == math.inf


def test_the_interval_resamples_samples():
    """Ratio of sums, so its width is that of the delta method; one sample has no interval."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 50, (400,), generator=generator)
    nats = tokens * (2 + 0.5 * torch.randn(400, generator=generator, dtype=torch.float64))
    scores = Scores(nats, tokens)
    mean = (nats.sum() / tokens.sum()).item()
    residual = (nats - mean * tokens) / tokens.double().mean()
    half = 1.96 * residual.std().item() / 20
    low, high = map(math.log, scores.interval())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.15 * half)
    assert scores.interval(seed=1) != scores.interval(seed=0) == scores.interval()
    assert Scores(nats[:1], tokens[:1]).interval() == (0.0, math.inf)


def test_the_oracle_judges_exactly():
    language = OracleLanguage.default()
    tokens = language.sample(50, torch.Generator().manual_seed(1))
    samples = sample_set(tokens=tokens, tokenizer=language.tokenizer.hash)
    judge, seen = OracleJudge(language, batch_size=20), []
    scores = judge.score(samples, lambda *args: seen.append(args))
    torch.testing.assert_close(scores.nats, -language.log_prob(tokens))
    assert scores.tokens.tolist() == [32] * 50
    assert judge.exact
    assert seen[-1] == (50, 50)
    assert judge.fingerprint == open_judge("oracle").fingerprint
    assert judge.fingerprint != OracleJudge(OracleLanguage.default(eps=0.01)).fingerprint


def test_judges_of_tokens_refuse_what_is_not_their_tokens():
    language = OracleLanguage.tiny()
    judge, good = OracleJudge(language), torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(UserError, match="different tokenizers"):
        judge.score(sample_set(tokens=good, tokenizer="of another"))
    for tokens, fault in ((good + 3, "outside 0..2"), (good[:, :3], "have 4 tokens, not 3")):
        with pytest.raises(UserError, match=fault):
            judge.score(sample_set(tokens=tokens))
    with pytest.raises(UserError, match="reads 4: draw shorter"):
        judge.score(sample_set(tokens=torch.zeros(2, 5, dtype=torch.long)))
    with pytest.raises(UserError, match="without until_eot"):
        judge.score(sample_set(tokens=good, lengths=[4, 2]))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A left-to-right and a diffusion model of ours, with weights far from zero, as folders."""
    tokenizer = Tokenizer.from_words(["a", "b", "c"])
    found = {}
    for kind in ("ar", "mdlm"):
        torch.manual_seed(0)
        config = ModelConfig(
            kind=kind, layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=4, length=5
        )
        network = add_noise(build_model(config).eval(), 0.5)
        folder = tmp_path_factory.mktemp(kind)
        save_model(folder, network, config, tokenizer)
        found[kind] = folder, network, config
    return found, tokenizer.hash


ROWS = torch.cartesian_prod(*[torch.arange(3)] * 5)


def test_a_left_to_right_model_of_ours_judges_the_tokens_that_count(own):
    models, tokenizer = own
    folder, network, _ = models["ar"]
    judge = open_judge(folder, batch_size=7)
    assert isinstance(judge, ARJudge)
    assert judge.exact
    with torch.no_grad():
        whole, prefix = network.log_prob(ROWS), network.log_prob(ROWS[:, :2])
    scores = judge.score(sample_set(tokens=ROWS, tokenizer=tokenizer))
    torch.testing.assert_close(-scores.nats, whole.double(), rtol=1e-5, atol=1e-6)
    assert scores.nats.neg().exp().sum().item() == pytest.approx(1, abs=1e-5)

    lengths = torch.where(ROWS[:, 0] == 0, 5, 2)
    cut = judge.score(sample_set(tokens=ROWS, lengths=lengths))
    expected = torch.where(lengths == 5, whole, prefix).double()
    torch.testing.assert_close(-cut.nats, expected, rtol=1e-5, atol=1e-6)
    assert cut.tokens.equal(lengths)

    together = judge.score(sample_set(tokens=ROWS, lengths=(lengths + 1).clamp(max=5)))
    torch.testing.assert_close(cut.ended.nats, together.nats, rtol=1e-5, atol=1e-6)
    assert cut.ended.tokens.equal(together.tokens)

    warm = open_judge(folder, temperature=2.0)
    assert warm.fingerprint != judge.fingerprint
    total = warm.score(sample_set(tokens=ROWS)).nats.neg().exp().sum().item()
    assert total == pytest.approx(1, abs=1e-5)
    with pytest.raises(UserError, match="different tokenizers"):
        judge.score(sample_set(tokens=ROWS, tokenizer="of another"))


def test_a_diffusion_model_judges_by_its_bound(own):
    models, tokenizer = own
    folder, network, config = models["mdlm"]
    judge, seen = open_judge(folder, draws=3, seed=5, batch_size=64), []
    samples = sample_set(tokens=ROWS, tokenizer=tokenizer)
    scores = judge.score(samples, lambda *args: seen.append(args))
    objective = make_objective(config)
    expected = nelbo_judge(
        lambda batch: objective.loss(network, batch), config, draws=3, seed=5, batch_size=64
    )(ROWS)
    torch.testing.assert_close(scores.nats, -expected)
    assert scores.tokens.tolist() == [5] * len(ROWS)
    assert isinstance(judge, DiffusionJudge)
    assert not judge.exact
    assert seen[-1] == (len(ROWS), len(ROWS))
    prints = {
        open_judge(folder, draws=draws, seed=seed).fingerprint
        for draws, seed in ((3, 5), (3, 6), (4, 5))
    }
    assert len(prints) == 3
    assert judge.fingerprint in prints


def test_a_gpu_reads_more_texts_at_once(own):
    """What is asked for counts; what fits into memory in any case (batches above)."""
    folder, *_ = own[0]["ar"]
    assert open_judge(folder).batch_size == default_batch(torch.device("cpu")) == 16
    assert default_batch(torch.device("cuda")) == 64
    assert open_judge(folder, batch_size=3).batch_size == 3


def test_settings_that_a_judge_has_no_use_for_are_refused(own):
    models, _ = own
    for source in ("oracle", models["mdlm"][0]):
        with pytest.raises(UserError, match="leave its temperature at 1"):
            open_judge(source, temperature=0.8)
        with pytest.raises(UserError, match="for judges of texts"):
            open_judge(source, bos="never")
        with pytest.raises(UserError, match="for judges of texts"):
            open_judge(source, collapse_spaces=True)
    with pytest.raises(UserError, match="for judges of texts"):
        open_judge(models["ar"][0], max_length=3)


def test_a_run_that_has_not_finished_is_named_as_such(tmp_path):
    (tmp_path / "checkpoints" / "step-0000010").mkdir(parents=True)
    with pytest.raises(UserError, match="Training has not finished"):
        open_judge(tmp_path)


def test_rows_of_one_token_have_no_nats():
    def logits(ids, real):
        return torch.zeros(*ids.shape, 4)

    nats = causal_nats(logits, [[0], [], [1, 2], [3, 3, 3]], num_tokens=4)
    assert nats.total.tolist() == pytest.approx([0, 0, math.log(4), 2 * math.log(4)])
    assert nats.last.tolist() == pytest.approx([0, 0, math.log(4), math.log(4)])


SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_stories = pytest.mark.skipif(
    not (SHARED / "stories15m").is_dir(), reason="../shared/data/stories15m is not here"
)


def real_stories():
    with lzma.open(SHARED / "stories" / "real.txt.xz", "rt") as file:
        return [line.strip() for line in file]


@needs_stories
def test_the_source_of_stories_scores_each_from_its_start_token_up_to_its_context():
    """softmax(logits / 0.8) after <s>, 256 tokens at most: from the model itself, in one pass."""
    tokenizer, model = reference(SHARED / "stories15m")
    story = real_stories()[0]
    texts = [story[:200], " ".join([story] * 3)]
    judge = CausalJudge(SHARED / "stories15m", temperature=0.8)
    scores = judge.score(sample_set(texts))
    assert (judge.start, judge.max_length, scores.cut) == (1, 256, 1)
    for text, nats, tokens in zip(texts, scores.nats, scores.tokens, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])[:, :257]
        assert ids[0, 0] == 1
        with torch.no_grad():
            log_p = (model.float()(ids[:, :-1]).logits.double() / 0.8).log_softmax(-1)
        expected = -log_p[0].gather(1, ids[0, 1:, None]).sum().item()
        assert nats.item() == pytest.approx(expected, rel=1e-4)
        assert tokens == ids.shape[1] - 1
    assert scores.tokens[1] == 256


@needs_stories
def test_runs_of_spaces_cost_the_source_of_stories_dearly():
    """It never saw any. Perplexity of 24 real stories that have some: 5.98, and 4.81 without."""
    texts = [story for story in real_stories() if "  " in story][:8]
    plain, collapsed = (
        open_judge(SHARED / "stories15m", collapse_spaces=collapse)
        .score(sample_set(texts))
        .perplexity()
        for collapse in (False, True)
    )
    assert collapsed < 0.9 * plain


@pytest.mark.slow
@needs_stories
def test_the_source_of_stories_knows_its_own_temperature():
    """Texts drawn at temperature 0.8 are likelier under it than under any other (Gibbs)."""
    with lzma.open(SHARED / "stories" / "train-00.jsonl.xz", "rt") as file:
        stories = [json.loads(next(file)) for _ in range(40)]
    texts = [story["text"] for story in stories if story["complete"]][:12]
    nats = [
        CausalJudge(SHARED / "stories15m", temperature=t).score(sample_set(texts)).perplexity()
        for t in (0.6, 0.8, 1.0)
    ]
    assert nats[1] < min(nats[0], nats[2])
