"""Which samples belong into one table, and what every row says."""

from dataclasses import replace

import pytest
import torch

from didi_instruct.errors import UserError
from didi_instruct.evaluation.describing import KEYS, check_comparable, complete, describe
from didi_instruct.evaluation.rows import METRICS
from didi_instruct.evaluation.samples import Origin, SampleSet


def samples(num=4, length=6, **settings):
    origin = Origin(
        model="m", fingerprint="f", tokenizer="t", sampler="ancestral", steps=4, nfe=4, passes=4.0,
        disc_calls=0, temperature=1.0, top_p=1.0, seed=0, length=length, **settings,
    )  # fmt: skip
    tokens = torch.zeros(num, length, dtype=torch.long)
    return SampleSet(origin, tokens, ("",) * num, None, torch.full((num,), length))


def test_tokens_lengths_and_ends_do_not_mix():
    one = samples()
    check_comparable([one, samples(5)], list(METRICS)[:2])
    other = replace(one, origin=replace(one.origin, tokenizer="u"))
    with pytest.raises(UserError, match="different tokenizers"):
        check_comparable([one, other])
    for other in (samples(length=5), samples(until_eot=True)):
        with pytest.raises(UserError, match="entropy grows with length"):
            check_comparable([one, other])


@pytest.mark.parametrize("metric", ["self-bleu", "unique-4gram", "mauve", "c2st"])
def test_numbers_that_depend_on_the_count_do_not_mix(metric):
    message = f"4 samples in one row and 5 in another.*the metric {metric} depends: .*--num"
    with pytest.raises(UserError, match=message):
        check_comparable([samples(4), samples(5)], ["entropy", metric])
    with pytest.raises(UserError, match=message):
        check_comparable([samples(4)], [metric], num=5)
    check_comparable([samples(4), samples(4)], [metric], num=4)
    check_comparable([samples(4), samples(5)], ["ppl", "entropy", "path-kl"], num=6)


def test_a_row_tells_settings_apart_and_has_every_key():
    options = {"grid": "cosine", "greedy_tail": False}
    row = describe(samples(options=options, batch_size=3, device="cpu"))
    names = ("fingerprint", "options", "batch_size", "device")
    assert [row[name] for name in names] == ["f", options, 3, "cpu"]
    full = complete({**row, "ppl": 2.0})
    assert full.keys() >= {*KEYS}
    assert (full["ppl"], full["mauve"], full["nfe"]) == (2.0, None, 4)
    assert "mauve" not in row
