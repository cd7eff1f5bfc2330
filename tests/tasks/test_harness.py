import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from tests.random_models import randomise, save_random

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.schema import parse
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.model import Model, load
from didi_instruct.models.dit import build_model
from didi_instruct.tasks import harness
from didi_instruct.tasks.harness import HarnessModel, HarnessOptions, Writing

WORDS = [*(f"w{n}" for n in range(8)), "<|endoftext|>"]
CONTEXT = "w1 w2 w3"
LENGTH = 8


def model(kind="mdlm", **changes):
    tokenizer = Tokenizer.from_words(WORDS)
    size = len(WORDS) + (kind != "duo")
    shape = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "vocab_size": size}
    config = ModelConfig(**{"kind": kind, "length": LENGTH, **shape} | changes)
    return Model(randomise(build_model(config)), config, tokenizer)


def answers(kind="mdlm", changes=None, **options):
    return HarnessModel(
        model(kind, **(changes or {})), HarnessOptions(pretrained="tiny", **options)
    )


@torch.no_grad()
def law(asked, tokens, place):
    """Log-probabilities of a masked model at one place of a row of tokens and masks."""
    logits = asked.entry.model.network(torch.tensor([tokens]), torch.zeros(1))
    return logits[0, place].double().log_softmax(-1)


@torch.no_grad()
def exact(asked, tokens):
    """Log-probability of tokens under a left-to-right model."""
    return float(asked.entry.model.network.log_prob(torch.tensor([tokens]).long()))


def test_one_token_is_exact_in_one_pass(monkeypatch):
    asked = answers()
    expected, reads = law(asked, [1, 2, 3, len(WORDS)], 3), []
    run = asked.scorer._batch
    monkeypatch.setattr(asked.scorer, "_batch", lambda rows: reads.append(len(rows)) or run(rows))
    found = asked.loglikelihood([(CONTEXT, f" {word}") for word in WORDS])
    assert [score for score, _ in found] == pytest.approx(expected.tolist(), abs=1e-5)
    assert [greedy for _, greedy in found] == [n == int(expected.argmax()) for n in range(9)]
    assert reads == [1]  # all words from one row


def test_several_tokens_have_the_bound_over_all_ways_to_mask():
    """Of two tokens: one masked, each as often as the other, or both; either count has weight ½."""
    asked, mask = answers(), len(WORDS)
    [(found, _)] = asked.loglikelihood([(CONTEXT, " w4 w5")])
    both = [law(asked, [1, 2, 3, mask, mask], place) for place in (3, 4)]
    one = law(asked, [1, 2, 3, mask, 5], 3)[4] + law(asked, [1, 2, 3, 4, mask], 4)[5]
    assert found == pytest.approx(float(one + both[0][4] + both[1][5]) / 2, abs=1e-5)


def test_a_left_to_right_model_is_exact():
    asked = answers("ar")
    [(found, _)] = asked.loglikelihood([(CONTEXT, " w4 w5 w6")])
    expected = exact(asked, [1, 2, 3, 4, 5, 6]) - exact(asked, [1, 2, 3])
    assert found == pytest.approx(expected, abs=1e-5)
    [(first, _)] = asked.loglikelihood([("", "w4 w5")])
    assert first == pytest.approx(exact(asked, [4, 5]), abs=1e-5)
    assert asked.loglikelihood([(CONTEXT, "")]) == [(0.0, True)]


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_what_is_written_greedily_is_greedy_and_nothing_else_is(kind):
    """An AR model's greedy answer is checked token by token."""
    asked = answers(kind, steps=2)
    [text] = asked.generate([(CONTEXT, {"max_gen_toks": 2})])
    if kind == "ar":
        tokens, network = [1, 2, 3], asked.entry.model.network
        for _ in range(2):
            read = torch.tensor([[len(WORDS), *tokens]])
            with torch.no_grad():
                tokens.append(int(network(read)[0, -1].argmax()))
        assert text == " ".join(WORDS[n] for n in tokens[3:]).split("<|endoftext|>")[0].strip()
    choices = [f" {first} {second}" for first in WORDS[:8] for second in WORDS[:8]]
    found = asked.loglikelihood([(CONTEXT, choice) for choice in choices])
    greedy = [choice.strip() for choice, (_, said) in zip(choices, found, strict=True) if said]
    assert greedy == ([text] if len(text.split()) == 2 else [])


def test_a_text_of_several_windows_is_scored_once_token_by_token():
    """20 tokens in windows of 8: 8, 8, and 4 after the 4 before them."""
    asked = answers("ar")
    tokens = [(3 * n + n // 4) % 8 for n in range(20)]
    [found] = asked.rolling([" ".join(WORDS[n] for n in tokens)])
    expected = exact(asked, tokens[:8]) + exact(asked, tokens[8:16])
    expected += exact(asked, tokens[12:]) - exact(asked, tokens[12:16])
    assert found == pytest.approx(expected, abs=1e-4)
    assert asked.rolling([""]) == [0.0]


def test_a_diffusion_model_s_text_has_the_bound():
    asked = answers()
    [found] = asked.rolling(["w1 w2"])
    [(expected, _)] = asked.loglikelihood([("", "w1 w2")])
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["mdlm", "ar"])
def test_a_greedy_text_does_not_depend_on_the_others(kind):
    asked = answers(kind, batch_tokens=16)
    prompts = ["w1", "w2 w3 w4 w5 w6 w7 w1 w2 w3 w4", "", "w7 w6 w5"]
    wish = {"max_gen_toks": 3, "until": ["<|endoftext|>"]}
    together = asked.generate([(prompt, wish) for prompt in prompts])
    assert together == [asked.generate([(prompt, wish)])[0] for prompt in prompts]
    assert all(len(text.split()) <= 3 for text in together)


def test_contexts_that_are_cut_are_told(caplog):
    """Two of three by their answers' room, one of two by that of what is written."""
    asked = answers()
    asked.loglikelihood([(" ".join(["w1"] * n), " w2") for n in (7, 8, 9)])
    assert "2 of 3 contexts are cut from the left, to fit the 8 tokens" in caplog.text
    asked.generate([(" ".join(["w1"] * n), {"max_gen_toks": 2}) for n in (6, 7)])
    assert "1 of 2 contexts are cut from the left" in caplog.text


def test_texts_are_cut_at_the_first_stop_string():
    assert Writing.of({"until": ["b", "cd"]}).cut("1 cd 2 b 3") == "1 "
    assert Writing.of({"until": "d"}).cut("abc") == "abc"
    asked = answers()
    [whole] = asked.generate([(CONTEXT, {"max_gen_toks": 4})])
    last = whole.split()[-1]
    [cut] = asked.generate([(CONTEXT, {"max_gen_toks": 4, "until": [last]})])
    assert cut == whole[: whole.index(last)]


def test_a_long_prompt_is_cut_before_half_of_the_window(monkeypatch):
    asked, seen = answers(), []
    monkeypatch.setattr(
        harness, "write", lambda m, prompts, counts, **_: seen.append((prompts, counts)) or [[0]]
    )
    for words, wanted in ((3, 2), (6, 5), (20, 5), (20, 3)):
        asked.generate([(" ".join(["w1"] * words), {"max_gen_toks": wanted})])
    sizes = [(len(prompts[0]), counts[0]) for prompts, counts in seen]
    assert sizes == [(3, 2), (4, 4), (4, 4), (5, 3)]


def test_wishes_of_tasks():
    assert Writing.of({"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert Writing.of({"do_sample": True, "temperature": 0.7}).temperature == 0.7
    assert Writing.of({"do_sample": True}).temperature == 1.0
    assert Writing.of({"max_new_tokens": 7}).count == 7
    assert Writing.of({}).count == harness.MAX_TOKENS
    with pytest.raises(UserError, match="`num_beams` is not supported"):
        Writing.of({"num_beams": 4})


def test_sampled_texts_differ_from_each_other_and_repeat_with_the_seed():
    wish = {"max_gen_toks": 5, "do_sample": True, "temperature": 3.0}
    texts = answers(seed=3).generate([(CONTEXT, wish)] * 6)
    assert len(set(texts)) > 3
    assert answers(seed=3).generate([(CONTEXT, wish)] * 6) == texts
    assert answers(seed=4).generate([(CONTEXT, wish)] * 6) != texts


def test_models_without_tokenizer_and_long_answers_are_refused():
    nameless = model()
    nameless.tokenizer = None
    with pytest.raises(UserError, match="tiny: brings no tokenizer"):
        HarnessModel(nameless, HarnessOptions(pretrained="tiny"))
    with pytest.raises(UserError, match="the answer has 9 tokens, and the model reads 8"):
        answers().loglikelihood([(CONTEXT, " w1" * 9)])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 2}, "--model_args: `pretrained` is missing"),
        ({"pretrained": "x", "steps": 0}, "steps, draws and batch_tokens are 1 or more"),
        ({"pretrained": "x", "steps": "few"}, "`steps` is 'few'"),
    ],
)
def test_model_args_are_checked(settings, words):
    with pytest.raises(UserError, match=words):
        parse(HarnessOptions, settings, where="--model_args")


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(MissingExtraError, match=r"didi-instruct\[tasks\]"):
        harness.register()


# With the library

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason='needs lm-eval: pip install "didi-instruct[tasks]"',
)

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
doc_to_target: {target}
target_delimiter: ""
metric_list:
  - metric: {metric}
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Folder of local task files: choices, a greedy text, and the likelihood of a text."""
    folder = tmp_path_factory.mktemp("tasks")
    prompts = ["w1 w2 w3", "w4 w5", "w6", "w7 w7 w1"]
    rows = [{"prompt": p, "choices": [" w1", " w2", " w3 w4"], "gold": n % 3}
            for n, p in enumerate(prompts)]  # fmt: skip
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, kind, target, metric, more in (
        ("tiny_choices", "multiple_choice", "gold", "acc", "doc_to_choice: choices\n"),
        ("tiny_next", "loglikelihood", '"{{choices[0]}}"', "acc", ""),
        ("tiny_text", "loglikelihood_rolling", '"{{prompt}}"', "bits_per_byte", ""),
        ("tiny_written", "generate_until", '"w1"', "exact_match",
         "generation_kwargs:\n  until: ['w2']\n  max_gen_toks: 3\n"),
    ):  # fmt: skip
        text = TASK.format(name=name, data=data, kind=kind, target=target, metric=metric) + more
        (folder / f"{name}.yaml").write_text(text)
    return folder, rows


def command(tasks, tmp_path, *arguments):
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}
    line = [sys.executable, "-m", "didi_instruct.tasks.harness", "--model", "didi"]
    line += ["--include_path", str(tasks), *map(str, arguments)]
    return subprocess.run(
        line, capture_output=True, text=True, env=os.environ | environment, check=False
    )


@needs_lm_eval
@pytest.mark.slow
def test_the_documented_command_runs_local_tasks(tasks, tmp_path):
    """All four kinds of requests give what `HarnessModel` gives."""
    folder, rows = tasks
    save_random(tmp_path / "model", tokenizer=Tokenizer.from_words(WORDS), vocab_size=10)
    done = command(
        folder,
        tmp_path,
        "--model_args",
        f"pretrained={tmp_path / 'model'},steps=2",
        "--tasks",
        "tiny_choices,tiny_next,tiny_text,tiny_written",
        "--output_path",
        tmp_path / "out",
        "--log_samples",
    )
    assert done.returncode == 0, done.stderr
    kept = {name: next((tmp_path / "out").rglob(f"samples_{name}_*.jsonl"))
            for name in ("tiny_choices", "tiny_next", "tiny_text", "tiny_written")}  # fmt: skip
    said = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name, path in kept.items()
    }
    asked = HarnessModel(load(tmp_path / "model"), HarnessOptions(pretrained="tiny", steps=2))
    for row, sample in zip(rows, said["tiny_choices"], strict=True):
        found = asked.loglikelihood([(row["prompt"], choice) for choice in row["choices"]])
        scores = [score for score, _ in found]
        logged = [float(response[0]) for response in sample["filtered_resps"]]
        assert logged == pytest.approx(scores, abs=1e-4)
        assert sample["acc"] == (scores.index(max(scores)) == row["gold"])
    for row, sample in zip(rows, said["tiny_next"], strict=True):
        [(_, greedy)] = asked.loglikelihood([(row["prompt"], row["choices"][0])])
        assert sample["acc"] == greedy
    totals = asked.rolling([row["prompt"] for row in rows])
    logged = [float(sample["filtered_resps"][0]) for sample in said["tiny_text"]]
    assert logged == pytest.approx(totals, abs=1e-4)
    wish = {"until": ["w2"], "max_gen_toks": 3}
    written = asked.generate([(row["prompt"], wish) for row in rows])
    assert [sample["filtered_resps"][0] for sample in said["tiny_written"]] == written


@needs_lm_eval
@pytest.mark.slow
def test_mistakes_are_told_in_one_line(tasks, monkeypatch, capsys):
    line = ["--model", "didi", "--model_args", "pretrained=stories,stepz=2"]
    line += ["--tasks", "tiny_next", "--include_path", str(tasks[0])]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *line])
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # which the library sets for good
    with pytest.raises(SystemExit) as stop:
        harness.main()
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    expected = "didi: --model_args: `stepz` is not a setting. Did you mean `steps`?"
    assert last == expected
