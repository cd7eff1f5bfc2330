"""Keys of what is kept are those of every folder that was written before; values are whole."""

import json
import multiprocessing
import time
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from tests.evaluation.models import save

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.evaluation.cache import (
    config_values,
    content_key,
    digest,
    key,
    measure_key,
    model_key,
    once,
    samples_key,
)
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.evaluation.measuring import Context
from didi_instruct.evaluation.metrics import METRICS
from didi_instruct.evaluation.samples import Origin, SampleSet
from didi_instruct.sampling.generate import Request

WINDOWS = ModelConfig(
    layers=2, hidden=16, heads=2, cond_dim=8, vocab_size=26, length=4, end_id=24,
    lengths=(0, 1, 2, 0, 1), order="streams", schedule=ScheduleConfig(eps=0.0),
)  # fmt: skip


def test_keys_of_models():
    files = {"model.safetensors": "ab"}
    assert key(files, config_values(WINDOWS), None) == "9e00734c12cb8d6f1c25"
    both = files | {"discriminator.safetensors": "cd"}
    two = key(both, config_values(WINDOWS), config_values(ModelConfig()))
    assert two == "f3d3c17d79f94d7e92cc"
    weights = digest("ab", config_values(WINDOWS))
    assert weights == "551f9e89a659b86c"
    assert digest(weights, 8, 0) == "f9c301d91ebb2d22", "a diffusion judge"
    assert digest(weights, 1.0) == "739d01917d428a13", "a left-to-right judge"


def test_every_setting_of_a_model_is_in_its_key():
    """A setting that is added: put it into the key where it differs from its default."""
    assert config_values(WINDOWS).keys() == {field.name for field in fields(ModelConfig)}
    schedule = {field.name for field in fields(ScheduleConfig)}
    assert config_values(WINDOWS)["schedule"].keys() == schedule


def test_keys_of_samples():
    common = {"sampler": "ancestral", "device": "cpu"}
    plain = Request(num=256, steps=8)
    options = {"order": "random"}
    found = samples_key(
        "weights", "tokens", plain, options=options, has_path=True, until_eot=False, **common
    )
    assert found == "42102f87ce835b143f4a"
    other = Request(num=40, steps=4, length=100, temperature=0.9, top_p=0.95, seed=3, batch_size=32)
    options = {"h_start": 0.5}
    found = samples_key(
        "weights", "tokens", other, options=options, has_path=True, until_eot=True, **common
    )
    assert found == "7506eb63af419160e53c"


def test_keys_of_contents():
    samples = SampleSet(
        Origin.of_text("a text", "hash", 3),
        torch.tensor([[1, 2, 3], [3, 2, 1]]),
        ("a b c", "c b a"),
        None,
        torch.tensor([3, 2]),
    )
    assert content_key(samples) == "22e2876010486a02f3d2"
    origin = replace(
        samples.origin, sampler="ancestral", own_window=True, until_eot=True, tokenizer=None
    )
    log_prob = torch.tensor([-1.5, -2.25], dtype=torch.float64)
    assert content_key(replace(samples, origin=origin, log_prob=log_prob)) == "70497ce82cb86c1714d7"


@pytest.mark.parametrize(
    ("names", "full", "empty"),
    [
        ("ppl path-kl", "aba8e608242f0787226a", "a1b0ba6ee2db661471b8"),
        ("entropy unique-4gram self-bleu self-bleu-words clusters repeats",
         "9e26c58fc5649fcc9d0b", "a1b0ba6ee2db661471b8"),
        ("mauve", "e3df378e4c5df2d0e9f6", "a1b0ba6ee2db661471b8"),
        ("ar-kl", "a628aff253562a892fa6", "37abcaac2b216572262c"),
        ("c2st", "64f9a9965335771da4c5", "37abcaac2b216572262c"),
        ("plddt", "9709c604a6c44507e65c", "a1b0ba6ee2db661471b8"),
        ("composition novelty", "baf09ad65ceb081696e1", "a1b0ba6ee2db661471b8"),
    ],
)  # fmt: skip
def test_keys_of_metrics(names, full, empty):
    def named(name):
        return SimpleNamespace(fingerprint=name)

    context = Context(
        judge=named("judge"), reference=named("ref"), num_tokens=64, seed=7, start=named("start"),
        chains=named("chains"), folding=named("fold"),
    )  # fmt: skip
    for name in names.split():
        assert measure_key(*METRICS[name].dependencies(context)) == full, name
        assert measure_key(*METRICS[name].dependencies(Context())) == empty, name


def test_keys_of_judges():
    assert measure_key("judge") == "ef1aaa7c3aae483ce157"
    assert OracleJudge(OracleLanguage.default()).fingerprint == "6e6c5156788ea101"
    read = digest(None, 16, 1.0, False, 3, "cut", str(torch.float32).encode(), b"name/\x00")
    assert read == "f8a72a2f19f08d48", "a causal LM"


def test_rounded_weights_have_a_key_of_their_own(tmp_path):
    source = save(tmp_path / "model", OracleLanguage.default().tokenizer, 65)
    assert model_key(source, "bfloat16") == key(model_key(source), "bfloat16") != model_key(source)


def _slowly(path, made):
    """Make a value that others wait for."""

    def make():
        with made.open("a") as file:
            file.write("x")
        time.sleep(0.3)
        return {"numbers": list(range(1000))}

    once(path, make, write=lambda value: value, read=lambda value: value)


def test_processes_that_need_one_value_make_it_once(tmp_path):
    path, made = tmp_path / "kept" / "value.json", tmp_path / "made"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_slowly, args=(path, made)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert made.read_text() == "x"
    assert json.loads(path.read_text()) == {"numbers": list(range(1000))}
    assert [p.name for p in path.parent.iterdir()] == ["value.json"]


def test_a_value_that_does_not_last_is_not_kept(tmp_path):
    def kept(value, lasts):
        same = lambda x: x  # noqa: E731
        return once(
            tmp_path / "v.json", lambda: value, write=same, read=same, lasts=lambda _: lasts
        )

    assert (kept(1, False), kept(2, True), kept(3, True)) == (1, 2, 2)
    (tmp_path / "v.json").write_text("{")
    assert kept(4, True) == 4, "what is damaged is made again"
