"""Timing: in turns, without the first time, medians; and beside the quality of the same."""

from dataclasses import replace

import pytest
import torch

from didi_instruct.benchmarking import timing
from didi_instruct.benchmarking.timing import time_cases
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.model import Model
from didi_instruct.reproduce import latency
from didi_instruct.reproduce.experiments import ITEMS
from didi_instruct.reproduce.latency import latency_rows, time_settings, untimed
from didi_instruct.reproduce.measure import Setting, Terms, measure
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale

from .kit import measuring_jobs, table_of
from .small_models import LANGUAGE, config_of, save

MEMORY = RuntimeError("CUDA out of memory.\nTried to allocate 20.00 GiB")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    ar = save(folder / "ar", config_of("ar"))
    teacher = save(folder / "teacher", config_of())
    return [
        Setting(method="AR", source=ar, more={"role": "ar"}),
        Setting(method="MDLM", source=teacher, steps=4),
    ]


class Watched:
    """A model that notes who draws with which seed, on a clock that drawing alone moves."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.drawn, self.left = 0.0, [], iter(seconds)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        real = Model.sample

        def sample(model, **wish):
            self.drawn.append((model.config.kind, wish["seed"]))
            passed = next(self.left)
            if isinstance(passed, Exception):
                raise passed
            self.now += passed
            return real(model, **wish)

        monkeypatch.setattr(Model, "sample", sample)


def test_all_take_turns_and_the_first_time_does_not_count(settings, monkeypatch):
    """Every round has a seed of its own, the same for all."""
    watched = Watched(monkeypatch, [99, 50, 1, 4, 3, 4, 2, 7])
    rows = time_settings(settings, batch=2, rounds=3, device="cpu")
    turns = [(kind, seed) for seed in (0, 1, 2) for kind in ("ar", "mdlm")]
    assert watched.drawn == [("ar", 0), ("mdlm", 0), *turns]
    assert [row["seconds_range"] for row in rows] == [[1, 3], [4, 7]]


def test_models_that_compile_draw_every_batch_before_any_is_timed(settings, monkeypatch):
    """As on a GPU, where a batch may bring shapes that are captured anew."""
    watched = Watched(monkeypatch, [99, 50, 99, 50, 1, 4, 3, 4])
    monkeypatch.setattr(latency, "pick_device", lambda _: torch.device("cuda"))

    def on_a_cpu(cases, rounds, place, **settings):
        assert settings == {"warm_up": rounds, "measure_held": False}
        return time_cases(cases, rounds, torch.device("cpu"), **settings)

    monkeypatch.setattr(latency, "time_cases", on_a_cpu)
    rows = time_settings(settings, batch=2, rounds=2, device="cpu")
    turns = [(kind, seed) for seed in (0, 1) for kind in ("ar", "mdlm")]
    assert watched.drawn == [*turns, *turns]
    assert [row["seconds_range"] for row in rows] == [[1, 3], [4, 4]]


def test_numbers_of_a_row_follow_from_its_seconds(settings, monkeypatch):
    """By hand: medians of 2 and 4 s for a batch of 4 texts of 32 tokens."""
    Watched(monkeypatch, [99, 99, 2, 4, 3, 4, 1, 4])
    ar, mdlm = time_settings(settings, batch=4, rounds=3, device="cpu")
    assert (ar["seconds_median"], mdlm["seconds_median"]) == (2, 4)
    assert ar["seconds_range"] == [1, 3]
    assert (ar["seconds_per_sample"], mdlm["seconds_per_sample"]) == (0.5, 1)
    assert (ar["tokens_per_second"], mdlm["tokens_per_second"]) == (64, 32)
    assert (ar["seconds_per_1k"], mdlm["seconds_per_1k"]) == (16, 32)
    assert (ar["ratio_to_first"], mdlm["ratio_to_first"]) == (1, 0.5)
    assert (ar["role"], mdlm["steps"], mdlm["rounds"]) == ("ar", 4, 3)
    assert untimed([ar, mdlm]) == []


@pytest.mark.parametrize("passed", [[MEMORY, 9, 4, 4], [9, 9, 2, 4, MEMORY, 4]])
def test_a_setting_that_does_not_fit_is_told_and_the_others_are_timed(
    settings, monkeypatch, passed
):
    """Whether it fails at once or in a later round; a table then says so."""
    Watched(monkeypatch, passed)
    ar, mdlm = time_settings(settings, batch=4, rounds=2, device="cpu")
    assert (ar["tokens_per_second"], ar["ratio_to_first"]) == (None, None)
    assert (mdlm["tokens_per_second"], mdlm["ratio_to_first"]) == (32, None)
    told = "AR at 32 NFE was not timed: CUDA out of memory."
    assert untimed([ar | {"nfe": 32}, mdlm | {"nfe": 4}]) == [told]
    scale = find_scale("toy", Given())
    (job,) = measuring_jobs(ITEMS["latency"], scale)
    rows = [ar | {"nfe": 32}, mdlm | {"nfe": 4, "role": "teacher"}]
    table = table_of(ITEMS["latency"], scale, {job.key: rows})
    assert told in table.notes
    assert [row["ratio_to_ar"] for row in table.rows] == [None, None]


def test_networks_of_one_shape_that_are_sampled_alike_share_a_timing(
    settings, monkeypatch, tmp_path
):
    """AR, the teacher and its student as one, streams, and by confidence each for itself."""
    other = save(tmp_path / "student", config_of(), seed=1)
    teacher = settings[1].source
    asked = [
        *settings,
        Setting(method="student", source=other, steps=4),
        Setting(method="streams", source=other, steps=4, options={"order": "streams"}),
        Setting(method="confidence", source=teacher, steps=4, sampler="confidence"),
        Setting(method="confidence too", source=other, steps=4, sampler="confidence"),
        Setting(method="cooler", source=other, steps=4, temperature=0.9),
    ]
    watched = Watched(monkeypatch, [99] * 6 + [1, 2, 3, 4, 5, 6])
    rows = time_settings(asked, batch=2, rounds=1, device="cpu")
    assert [row["seconds_median"] for row in rows] == [1, 2, 2, 3, 4, 5, 6]
    assert [row["method"] for row in rows] == [setting.method for setting in asked]
    assert next(watched.left, None) is None, "each way was drawn once to warm up and once timed"


def test_a_model_that_is_its_order_shares_with_one_that_is_told_to(settings, monkeypatch, tmp_path):
    """And not with one of random order, whose settings are the same otherwise."""
    streams = save(tmp_path / "streams", replace(config_of(), order="streams"))
    asked = [
        settings[1],
        Setting(method="told", source=settings[1].source, steps=4, options={"order": "streams"}),
        Setting(method="own", source=streams, steps=4),
    ]
    Watched(monkeypatch, [99, 99, 1, 2])
    rows = time_settings(asked, batch=2, rounds=1, device="cpu")
    assert [row["seconds_median"] for row in rows] == [1, 2, 2]


def test_what_follows_the_end_of_a_text_counts_for_nobody(tmp_path, monkeypatch):
    """Windows of 8 tokens whose texts end after 3 and 5: of 16 tokens, 8 are text.

    Weights decide where these end, so that two such models are timed apart.
    """
    words = Tokenizer.load("bytes")
    config = config_of("duo", vocab_size=258, length=8)
    sources = [save(tmp_path / str(n), config, tokenizer=words, seed=n) for n in (0, 1)]
    rows = torch.full((2, 8), 65)
    rows[0, 3:], rows[1, 5] = words.eot_id, words.eot_id
    drawn = []
    monkeypatch.setattr(Model, "sample", lambda model, **wish: drawn.append(model) or rows)
    asked = [Setting(method=source, source=source, steps=2) for source in sources]
    ticks = iter(range(99))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    found = time_settings(asked, batch=2, rounds=1, device="cpu", until_eot=True)
    assert [row["tokens_per_second"] for row in found] == [8, 8]
    assert len(drawn) == 4, "both warm up, both are timed"
    found = time_settings(asked, batch=2, rounds=1, device="cpu")
    assert [row["tokens_per_second"] for row in found] == [16, 16], "whole windows are text"


def test_where_nothing_runs_there_is_no_result(settings, monkeypatch):
    Watched(monkeypatch, [MEMORY, MEMORY])
    with pytest.raises(RuntimeError, match="no setting ran: CUDA out of memory"):
        time_settings(settings, batch=4, rounds=2, device="cpu")


def test_more_steps_take_longer(settings):
    """Eight times the steps take at least half as long again, on a busy machine too."""
    few, many = settings[1], Setting(method="more", source=settings[1].source, steps=32)
    rows = time_settings([few, many], batch=2, rounds=3, device="cpu")
    assert rows[1]["seconds_median"] > 1.5 * rows[0]["seconds_median"]


def test_quality_is_that_of_the_same_settings(settings, tmp_path):
    terms = Terms(out=tmp_path, judge=OracleJudge(LANGUAGE), num=6, device="cpu", seed=3)
    rows = latency_rows(settings, terms, batch=2, rounds=1)
    for row, other in zip(rows, measure(settings, terms).rows, strict=True):
        for name in ("ppl", "entropy", "nfe", "passes", "num_samples", "seed"):
            assert row[name] == other[name]
        assert row["tokens_per_second"] > 0
    assert [row["nfe"] for row in rows] == [32, 4]


def test_nothing_to_time_is_refused(settings):
    with pytest.raises(UserError, match="name a model"):
        time_settings([])
    with pytest.raises(UserError, match="rounds"):
        time_settings(settings, rounds=0, device="cpu")
