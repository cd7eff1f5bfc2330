"""The engine without HTTP: texts of `Model.generate`, whatever runs beside them."""

import itertools
import random
import threading
import time

import pytest
import torch
from tests.golden import tiny

import didi_instruct as didi
from didi_instruct.errors import UserError
from didi_instruct.sampling.generate import Request

pytest.importorskip("greenlet", reason="serving needs its extra")

from didi_instruct.serving.engine import BatchEngine, Limits
from didi_instruct.serving.jobs import ExpiredError, FullError, RefusedError

NAMES = ["plain", "timed", "streams", "windows", "codes", "coded-windows", "duo", "ar", "ar-ends"]
MASKED_LMS = ["bert", "esm"]
EXACT = [name for name in NAMES if name not in ("timed", "duo")]
"""Models whose passes are the same bits in any company: packed, or never joined. The others' linear
layers round otherwise where they have fewer than four rows (a time of each text, say)."""
SAMPLERS = ["ancestral", "rgas", "confidence", "entropy", "margin", "remasking", "blocks"]
SAMPLERS += ["first-hitting", "dimo"]
PATIENCE = 120  # seconds until a test that hangs fails


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "models"
    folder.mkdir()
    tiny.write_all(folder)
    return {name: didi.load(folder / name) for name in [*NAMES, *MASKED_LMS]}


@pytest.fixture
def start(request):
    """Start engines, and stop them after the test."""

    def make(*args, **kwargs):
        engine = BatchEngine(*args, **kwargs)
        request.addfinalizer(lambda: engine.close(0))
        return engine

    return make


def random_request(rng, model):
    """Any settings that a model of its kind may be asked for."""
    config = model.config
    wish = {"num": rng.choice([1, 1, 1, 2, 3]), "seed": rng.randrange(1000)}
    wish |= rng.choice([{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 3}, {"temperature": 0}])
    if config.kind == "mdlm":
        wish |= random_sampler(rng, model)
    if wish.get("sampler") != "first-hitting" and config.kind != "ar":
        wish["steps"] = rng.choice([1, 2, 3, 5, 8])
    return Request(**wish, **random_givens(rng, model))


def random_sampler(rng, model):
    """A sampler of masked models, and options."""
    sampler = rng.choice(SAMPLERS)
    if sampler == "rgas" and model.discriminator is not None:
        options = {"h_start": 2.0, "h_end": 3.0, "split": rng.choice([0.0, 0.5, 1.0])}
    elif sampler == "blocks":
        options = {"block_length": 8, "inner": rng.choice(["ancestral", "confidence"])}
    elif sampler in ("ancestral", "remasking"):
        options = {"greedy_tail": rng.random() < 0.3}
    else:
        options = {}
    if (sampler == "rgas" and not options) or (sampler == "dimo" and model.config.masks > 1):
        sampler = "ancestral"
    return {"sampler": sampler, "options": options}


def random_givens(rng, model):
    """What is given: nothing, prompts, a length, or a text with a gap."""
    kind = model.config.kind
    word = "w1" if "w1" in model.tokenizer else "every"
    choices = [{}, {"length": rng.choice([5, 9, 12])}]
    choices += [{"lengths": [5, 9]}, {"lengths": "4-12"}] if kind == "mdlm" else []
    if word in model.tokenizer:
        choices += [{"prompt": f"{word} {word}"}, {"prompt": [word, f"{word} {word}"]}]
        gap = rng.choice(["3", "2-4"] if kind == "duo" else ["3", "2-4", "auto:2-5"])
        choices += [{}] if kind == "ar" else [{"infill": f"{word} ___ {word}", "gap": gap}]
    return rng.choice(choices)


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_gives_the_texts_of_each_request_alone(models, start, seed):
    """400 random requests for eleven models, in bursts, under budgets that force them apart."""
    rng = random.Random(seed)
    engine = start(models, Limits(positions=rng.choice([16, 64, 512])))
    jobs = []
    for _ in range(100):
        name = rng.choice(list(models))
        request = random_request(rng, models[name])
        watch = rng.choice([None, lambda canvas: None])
        jobs.append((name, request, engine.submit(name, request, watch=watch)))
        if rng.random() < 0.1:
            time.sleep(0.02)
    for name, request, job in jobs:
        done, alone = job.future.result(PATIENCE), models[name].request(request)
        alone = alone.cut()
        assert done.tokens == alone.tokens.tolist(), (name, request)
        assert done.texts == models[name].texts(alone.tokens, alone.written)
        assert done.nfe == alone.nfe
        assert done.passes == pytest.approx(alone.passes)
        if alone.log_prob is not None:
            rounding = 0 if name in EXACT else 1e-3
            assert done.log_prob == pytest.approx(alone.log_prob.tolist(), abs=rounding)


class Recorder:
    """Keeps what an engine tells."""

    def __init__(self):
        self.passes, self.ends = [], []

    def passed(self, name, requests, texts, tokens, seconds):
        self.passes.append((name, requests, texts, tokens))

    def began(self, name, seconds):
        pass

    def ended(self, name, outcome, seconds, done):
        self.ends.append(outcome)


class Gate:
    """A denoiser that counts passes, waits where it is told to, and fails where it is told to."""

    def __init__(self, own):
        self.own, self.num_tokens, self.compiled = own, own.num_tokens, own.compiled
        self.open = threading.Event()
        self.open.set()
        self.calls, self.most, self.bad, self.error = 0, None, None, RuntimeError("a fault")

    def check(self, reads):
        self.open.wait(PATIENCE)
        self.calls += 1
        if self.most is not None and len(reads) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        if self.bad is not None and bool((reads.tokens == self.bad).any()):
            raise self.error

    def logits(self, reads, t, at):
        self.check(reads)
        return self.own.logits(reads, t, at)

    def logits_in_parts(self, reads, t, at):
        yield self.logits(reads, t, at)

    def draw(self, reads, step, options):
        self.check(reads)
        return self.own.draw(reads, step, options)


@pytest.fixture
def gated(models, start):
    """An engine whose denoiser of `plain` is a gate, and what it tells."""

    def make(**limits):
        recorder = Recorder()
        engine = start({"plain": models["plain"]}, Limits(**limits), recorder)
        brings = engine._brings["plain"]
        gate = Gate(brings.denoiser)
        object.__setattr__(brings, "denoiser", gate)
        return engine, gate, recorder

    return make


def test_requests_that_wait_share_passes(gated):
    """Eight requests of four steps take four passes together, and the first one's alone."""
    engine, gate, recorder = gated(positions=8 * 32)
    gate.open.clear()
    jobs = [engine.submit("plain", Request(steps=4, seed=i)) for i in range(9)]
    gate.open.set()
    for job in jobs:
        job.future.result(PATIENCE)
    assert sum(requests for _, requests, _, _ in recorder.passes) == 9 * 4
    assert max(requests for _, requests, _, _ in recorder.passes) == 8
    assert len(recorder.passes) <= 4 + 4 + 4
    assert sum(tokens for *_, tokens in recorder.passes) == 9 * 32
    assert recorder.ends == ["done"] * 9


def test_a_cancelled_request_costs_nothing_more(gated):
    engine, gate, recorder = gated()
    gate.open.clear()
    job = engine.submit("plain", Request(steps=30))
    while not job.begun:
        time.sleep(0.001)
    assert job.future.cancel()
    gate.open.set()
    assert engine.submit("plain", Request(steps=2)).future.result(PATIENCE).nfe == 2
    assert gate.calls <= 2 + 2
    assert sorted(recorder.ends) == ["cancelled", "done"]
    assert engine.waiting == 0


def test_a_request_cancelled_while_it_waits_is_never_begun(gated):
    engine, gate, _ = gated(positions=32)
    gate.open.clear()
    first = engine.submit("plain", Request(steps=2))
    second = engine.submit("plain", Request(steps=2))
    second.future.cancel()
    gate.open.set()
    first.future.result(PATIENCE)
    engine.submit("plain", Request(steps=1)).future.result(PATIENCE)
    assert not second.begun


def test_a_long_request_starves_nobody_and_is_not_starved(gated):
    """Room for one text a pass: short ones overtake the long one until it is due."""
    engine, gate, _ = gated(positions=32)
    gate.open.clear()
    order = []

    def submit(name, steps, seed):
        job = engine.submit("plain", Request(steps=steps, seed=seed))
        job.future.add_done_callback(lambda _: order.append(name))
        return job

    jobs = [submit("long", 30, 0)]
    jobs += [submit(f"short {i}", 2, i) for i in range(40)]
    gate.open.set()
    for job in jobs:
        job.future.result(PATIENCE)
    place = order.index("long")
    # Due at 30 passes; shorts are due at 2 since they all came at the start.
    assert place == 40
    assert order[:40] == [f"short {i}" for i in range(40)]
    # Shorts that come one after the other overtake it only until the clock shows 30.
    order.clear()
    long = submit("long", 30, 0)
    for i in range(40):
        submit(f"short {i}", 2, i).future.result(PATIENCE)
    long.future.result(PATIENCE)
    assert 0 < order.index("long") <= 20


def test_an_error_is_told_to_its_request_alone(gated, models):
    engine, gate, recorder = gated()
    gate.open.clear()
    gate.bad = models["plain"].tokenizer.encode(["Boris"])[0][0]
    good = [Request(steps=3, seed=i, prompt="Anna", top_k=1) for i in range(3)]
    jobs = [engine.submit("plain", r) for r in good]
    bad = engine.submit("plain", Request(steps=3, prompt="Boris"))
    refused = engine.submit("plain", Request(steps=3, prompt="unknown"))
    gate.open.set()
    with pytest.raises(RuntimeError, match="a fault"):
        bad.future.result(PATIENCE)
    with pytest.raises(UserError, match="vocabulary has no `unknown`"):
        refused.future.result(PATIENCE)
    for request, job in zip(good, jobs, strict=True):
        own = models["plain"].request(request).tokens
        assert gate.bad not in own.flatten().tolist(), "choose another seed: it writes the word"
        assert job.future.result(PATIENCE).tokens == own.tolist()
    assert {"failed", "refused"} <= set(recorder.ends)


def test_out_of_memory_splits_a_pass_and_fails_only_what_cannot_fit(gated, models):
    engine, gate, _ = gated()
    gate.open.clear()
    requests = [Request(steps=3, seed=i, num=n) for i, n in enumerate([1, 2, 5, 1])]
    jobs = [engine.submit("plain", request) for request in requests]
    gate.most = 2
    gate.open.set()
    for request, job in zip(requests, jobs, strict=True):
        own = models["plain"].request(request)
        assert job.future.result(PATIENCE).tokens == own.tokens.tolist()
    gate.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        engine.submit("plain", Request(steps=3)).future.result(PATIENCE)
    gate.most = None
    assert engine.submit("plain", Request(steps=3)).future.result(PATIENCE).nfe == 3


def test_limits_on_the_queue_and_on_time(gated):
    engine, gate, recorder = gated(queue=3)
    gate.open.clear()
    jobs = [engine.submit("plain", Request(steps=2), seconds=0.01 + 100 * i) for i in range(3)]
    with pytest.raises(FullError):
        engine.submit("plain", Request())
    time.sleep(0.05)
    gate.open.set()
    with pytest.raises(ExpiredError):
        jobs[0].future.result(PATIENCE)
    for job in jobs[1:]:
        job.future.result(PATIENCE)
    engine.submit("plain", Request(steps=1)).future.result(PATIENCE)
    assert sorted(recorder.ends) == ["done", "done", "done", "expired"]


def test_closing_finishes_what_is_there(gated):
    engine, gate, _ = gated()
    gate.open.clear()
    jobs = [engine.submit("plain", Request(steps=2, seed=i)) for i in range(3)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    while engine.ready:
        time.sleep(0.001)
    with pytest.raises(RefusedError):
        engine.submit("plain", Request())
    gate.open.set()
    closing.join(PATIENCE)
    assert all(job.future.result(0).nfe == 2 for job in jobs)


def test_closing_gives_up_what_takes_too_long(gated):
    engine, _, _ = gated()
    slow = engine.submit("plain", Request(steps=30), watch=lambda canvas: time.sleep(0.05))
    while not slow.begun:
        time.sleep(0.001)
    engine.close(0.01)
    with pytest.raises(RefusedError):
        slow.future.result(PATIENCE)


@pytest.mark.parametrize("name", ["plain", "windows", "codes", "duo", "ar"])
def test_canvases_go_from_what_is_given_to_the_text(models, start, name):
    engine, seen = start(models), []
    steps = {} if name == "ar" else {"steps": 4}
    word = "w1" if name == "windows" else "every"
    request = Request(num=2, seed=3, prompt=word, **steps)
    done = engine.submit(name, request, watch=seen.append).future.result(PATIENCE)
    given = models[name].tokenizer.encode([word])[0]
    free = [None] * (models[name].config.length - len(given))
    assert [canvas.step for canvas in seen] == list(range(len(seen)))
    if name != "windows":
        assert seen[0].tokens == [given + free] * 2
    ends = {tiny.END_ID} if name == "windows" else set()  # which fill a window, left out here
    texts = [[token for token in row if token not in ends] for row in done.tokens]
    assert [[t for t in row if t not in ends] for row in seen[-1].tokens] == texts
    assert seen[-1].steps == len(seen) - 1
    assert seen[-1].passes == pytest.approx(done.passes)
    if name != "duo":  # what is written stays
        for before, after in itertools.pairwise(seen):
            for old, new in zip(before.tokens, after.tokens, strict=True):
                assert all(a is None or a == b for a, b in zip(old, new, strict=True))


def test_a_judge_measures_whole_texts(models, start):
    engine = start(models)
    request = Request(num=2, steps=4, seed=1)
    for judge in ("timed", "ar"):
        done = engine.submit("plain", request, judge=judge).future.result(PATIENCE)
        rows = models["plain"].sample(num=2, steps=4, seed=1)
        own = [float(models[judge].nelbo(row[None])) for row in rows]
        assert done.nats == pytest.approx(own)
