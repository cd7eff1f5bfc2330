"""The experiment on sums with worked steps: its rule, and a run of all of it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "experiments/arithmetic.py"


@pytest.fixture(scope="module")
def arithmetic():
    spec = importlib.util.spec_from_file_location("arithmetic", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["arithmetic"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["arithmetic"]


def test_sums_are_right_by_the_rule_and_one_wrong_token_is_seen(arithmetic):
    for row in arithmetic.sums(50, 0):
        prompt, answer = row["prompt"], row["answer"]
        assert (len(prompt), len(answer)) == (arithmetic.WIDTH, arithmetic.LENGTH)
        assert set(prompt + answer) <= {*arithmetic.WORDS}
        assert arithmetic.is_right(prompt, answer)
        for place, token in enumerate(answer):
            other = "1" if token != "1" else "2"
            assert not arithmetic.is_right(prompt, answer[:place] + other + answer[place + 1 :])


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("001+002=003;003+003=006;004+006=010;", True),
        ("003+004=007;002+001=003;007+003=010;", True),
        ("001+002=003;003+004=007;007+003=010;", True),
        ("001+001=002;003+004=007;007+002=009;", False),  # a term twice, another never
        ("001+002=003;003+003=006;", False),  # a term is left over
        ("001+002=003;003+003=006;004+006=010;004+006=010;", False),
    ],
)
def test_the_rule_takes_any_order_and_no_other_terms(arithmetic, answer, right):
    assert arithmetic.is_right("001+002+003+004=", answer) == right


def test_the_llada_it_writes_is_read_as_one(arithmetic, tmp_path):
    """Its characters are its tokens, and its mask and ends are never among them."""
    import didi_instruct as didi

    arithmetic.write_llada(tmp_path / "random", arithmetic.TINY)
    model = didi.load(tmp_path / "random")
    row = next(arithmetic.sums(1, 0))
    [ids] = model.tokenizer.encode([row["prompt"] + row["answer"]])
    assert len(ids) == arithmetic.WIDTH + arithmetic.LENGTH == model.config.length
    assert model.tokenizer.decode(ids) == row["prompt"] + row["answer"]


@pytest.mark.slow
def test_all_parts_run_in_their_order(tmp_path):
    for part in ("teachers", "students", "table"):
        command = [sys.executable, str(FILE), part, "--tiny", "--out", str(tmp_path)]
        subprocess.run([*command, "--device", "cpu"], check=True, capture_output=True, cwd=ROOT)
    rows = json.loads((tmp_path / "table.json").read_text())
    assert {row["model"] for row in rows} == {"teacher", "didi-0", "sdtt-0"}
    assert {row["nfe"] for row in rows} >= {4, 8, 64}
