import math

import pytest
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.evaluation import probes
from didi_instruct.evaluation.probes import Split, ar_kl
from didi_instruct.evaluation.quick import path_gaps
from didi_instruct.evaluation.stats import mean_and_error
from didi_instruct.models.ar import ARModel
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.state import Canvas, State

SAMPLES = 2048
SMALL = {"hidden": 64, "steps": 150, "batch_size": 32, "lr": 3e-3}
TINY = {"layers": 1, "hidden": 16, "heads": 2, "steps": 20, "batch_size": 32, "lr": 3e-3}


@pytest.fixture(scope="module")
def language():
    """64 words, L = 16."""
    return OracleLanguage.default(sentences=2)


def draw(language, steps):
    """Samples of the exact denoiser in too few steps."""
    canvas = Canvas.blank(SAMPLES, language.length, language.mask_id)
    denoiser, state = function_denoiser(language.denoiser, 64), State(canvas, DrawOptions(seed=3))
    return ancestral(denoiser, LogLinear(0.0), state, steps=steps)


def random_tokens(count=300, length=6, num_tokens=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_tokens, (count, length), generator=generator)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_a_model_that_knows_the_language_makes_the_bound_tighter():
    """Independent words, of which few samples are at hand; the start learned from many others.

    From nothing the bound is at least 0.1 nats lower; with the start it is near the exact KL, and
    below it but for |z| < 4 (6e-5).
    """
    language = OracleLanguage.tiny()
    texts = torch.cartesian_prod(*[torch.arange(3)] * 4)
    log_q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()[texts].sum(1)
    exact = (log_q.exp() * (log_q - language.log_prob(texts))).sum().item()
    rows = torch.multinomial(log_q.exp(), 9000, replacement=True, generator=generator(2))
    many, few = texts[rows[:8000]], texts[rows[8000:]]
    config = ModelConfig(
        kind="ar", layers=1, hidden=16, heads=2, vocab_size=4, length=4, learned_positions=True
    )
    torch.manual_seed(0)
    start = ARModel(config)
    split = Split.draw(len(many), 0)
    learner = probes.Learner(1, 16, 2, 200, 64, 1e-2, 0)
    probes.fit(start, lambda r: -start.log_prob(many[r]) / 4, split, learner, 4096, None)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    nats = -language.log_prob(few)
    begun = ar_kl(few, nats, 3, **TINY | {"steps": 5, "lr": None}, start=start)
    fresh = ar_kl(few, nats, 3, **TINY | {"steps": 5, "lr": None})
    assert exact - 4 * begun.se - 0.05 < begun.kl_lower < exact + 4 * begun.se
    assert fresh.kl_lower < begun.kl_lower - 0.1
    assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())
    with pytest.raises(UserError, match="knows 3 tokens and 4 positions"):
        ar_kl(random_tokens(), torch.ones(300), 5, **TINY, start=start)


def test_the_bound_reaches_the_enumerated_kl_where_the_law_is_easy_to_learn():
    """Independent words against a language of 81 texts; |z| < 4 (6e-5), and 0.05 nats to learn."""
    language = OracleLanguage.tiny()
    texts = torch.cartesian_prod(*[torch.arange(3)] * 4)
    weights = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    log_q = weights.log()[texts].sum(1)
    exact = (log_q.exp() * (log_q - language.log_prob(texts))).sum().item()
    entropy = -(log_q.exp() * log_q).sum().item()

    rows = torch.multinomial(log_q.exp(), 8000, replacement=True, generator=generator(1))
    samples = texts[rows]
    nats = -language.log_prob(samples)
    result = ar_kl(samples, nats, 3, **TINY | {"steps": 300, "lr": 1e-2})
    assert exact - 4 * result.se - 0.05 < result.kl_lower < exact + 4 * result.se
    assert result.cross_entropy == pytest.approx(entropy, abs=0.1)
    assert result.kl_lower == pytest.approx(result.judge_nats - result.cross_entropy)
    assert (result.train, result.valid, result.held_out) == (5600, 800, 1600)


def test_true_samples_of_the_language_show_no_distance(language):
    """KL is 0, so the bound is not above 0 by 4 standard errors (3e-5 false alarms)."""
    samples = language.sample(SAMPLES, generator(5))
    result = ar_kl(samples, -language.log_prob(samples), language.num_tokens, **SMALL)
    assert result.kl_lower < 4 * result.se
    assert result.cross_entropy > language.entropy()[0] - 4 * result.se


def test_independent_words_show_all_of_their_distance(language):
    """One step of the exact denoiser draws every slot from its marginal: there path KL = KL.

    Both are estimated, the bound from a fifth of the samples: |z| < 4 (6e-5), 1 nat to learn.
    """
    samples = draw(language, steps=1)
    exact, error = mean_and_error(path_gaps(samples, language.log_prob))
    nats = -language.log_prob(samples.tokens)
    result = ar_kl(samples.tokens, nats, language.num_tokens, **SMALL | {"steps": 100})
    error = math.hypot(result.se, error)
    assert exact - 4 * error - 1 < result.kl_lower < exact + 4 * error


def test_two_steps_lie_between_nothing_and_the_path_kl(language):
    """Significantly: 4 standard errors on both sides."""
    samples = draw(language, steps=2)
    upper, error = mean_and_error(path_gaps(samples, language.log_prob))
    nats = -language.log_prob(samples.tokens)
    result = ar_kl(samples.tokens, nats, language.num_tokens, **SMALL | {"steps": 100})
    assert 4 * result.se < result.kl_lower
    assert result.kl_lower + 4 * result.se < upper - 4 * error


def test_noise_cannot_be_learned_from_the_samples_it_is_measured_on():
    """A model that had seen them would fall below L log V; this one stays there, |z| < 4.

    What it learns by heart of the others makes it worse, so it stops, and goes back.
    """
    samples, seen = random_tokens(count=120, length=8, num_tokens=20), []
    uniform = torch.full((120,), 8 * math.log(20))
    result = ar_kl(
        samples, uniform, 20, **TINY | {"hidden": 64, "steps": 400, "lr": 1e-2},
        progress=seen.append,
    )  # fmt: skip
    assert -4 * result.se < result.cross_entropy - 8 * math.log(20) < 2
    assert result.best_step < 100
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) < 400


def test_the_judge_is_asked_about_the_held_out_samples_alone():
    """A judge that knows the number of each row: the reported mean is that of the held-out."""
    samples = random_tokens()
    result = ar_kl(samples, torch.arange(300.0), 5, **TINY, seed=9)
    held_out = Split.draw(300, seed=9).held_out.double()
    assert result.judge_nats == pytest.approx(held_out.mean().item())
    assert result.held_out == 60


def test_the_seed_decides_and_the_global_stream_is_left_alone():
    samples, nats = random_tokens(), torch.zeros(300)
    state = torch.get_rng_state()
    first = ar_kl(samples, nats, 5, **TINY, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    assert ar_kl(samples, nats, 5, **TINY, seed=1) == first
    assert ar_kl(samples, nats, 5, **TINY, seed=2).cross_entropy != first.cross_entropy
    torch.set_rng_state(state)


def test_small_passes_change_the_memory_not_the_result(monkeypatch):
    samples, nats = random_tokens(), torch.zeros(300)
    whole = ar_kl(samples, nats, 5, **TINY)
    monkeypatch.setattr(probes, "LOGITS_AT_ONCE", 5 * 6 * 5)
    parts = ar_kl(samples, nats, 5, **TINY)
    assert parts.cross_entropy == pytest.approx(whole.cross_entropy, abs=1e-3)


def test_collapsed_samples_have_no_entropy():
    samples = torch.tensor([[3, 1, 2]]).expand(200, 3)
    result = ar_kl(samples, torch.full((200,), 7.0), 5, **TINY | {"steps": 100, "lr": 1e-2})
    assert result.cross_entropy < 0.05
    assert result.kl_lower == pytest.approx(7, abs=0.05)
    assert result.se < 1e-6


def test_bad_input_is_refused_with_the_remedy():
    samples, nats = random_tokens(), torch.zeros(300)
    with pytest.raises(UserError, match="are 10, too few .* draw 64 or more"):
        ar_kl(samples[:10], nats[:10], 5, **TINY)
    for bad in (-1, 5):
        masked = samples.clone()
        masked[7, 2] = bad
        with pytest.raises(UserError, match="ids outside 0 to 4: masks and padding"):
            ar_kl(masked, nats, 5, **TINY)
    for bad in (math.nan, math.inf):
        nats[3] = bad
        with pytest.raises(UserError, match="no finite -log p"):
            ar_kl(samples, nats, 5, **TINY)
    nats = torch.zeros(300)
    with pytest.raises(UserError, match="steps is 0: use 1 or more"):
        ar_kl(samples, nats, 5, **TINY | {"steps": 0})
    with pytest.raises(ValueError, match=r"300 samples, but the judge's nats are \(300, 1\)"):
        ar_kl(samples, nats[:, None], 5, **TINY)
    with pytest.raises(ValueError, match=r"\(N, L\) token ids, not torch.float32"):
        ar_kl(samples.float(), nats, 5, **TINY)


def test_a_training_that_explodes_says_so():
    samples, nats = random_tokens(), torch.zeros(300)
    with pytest.raises(TrainingError, match="use a lr below"):
        ar_kl(samples, nats, 5, **TINY | {"lr": 1e30})


def ended_texts(count, seed=0):
    """Texts of 1 to 4 coin tosses, all lengths equally likely, then their end (2)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, (count, 6), generator=generator)
    lengths = torch.randint(1, 5, (count,), generator=generator)
    return torch.where(torch.arange(6) < lengths[:, None], tokens, 2), lengths + 1


def test_what_follows_an_end_costs_nothing_and_teaches_nothing():
    """Whatever it is, the bound is the same: to the last digit."""
    samples, counts = ended_texts(200)
    nats = torch.full((200,), 7.0)
    noise = torch.randint(3, samples.shape, generator=torch.Generator().manual_seed(1))
    other = torch.where(torch.arange(6) < counts[:, None], samples, noise)
    found = [ar_kl(table, nats, 3, counts=counts, **TINY) for table in (samples, other)]
    assert found[0] == found[1]
    assert ar_kl(other, nats, 3, **TINY).cross_entropy > found[0].cross_entropy
    whole = torch.full_like(counts, 6)
    assert ar_kl(samples, nats, 3, counts=whole, **TINY) == ar_kl(samples, nats, 3, **TINY)
    with pytest.raises(ValueError, match="200 rows, but counts are"):
        ar_kl(samples, nats, 3, counts=counts[:5], **TINY)


def test_the_entropy_of_texts_with_their_ends_is_learnt():
    """Log 4 for the length and log 2 for each of 2.5 tosses; |z| < 4 (6e-5), 0.08 nats to learn."""
    samples, counts = ended_texts(3000)
    nats = math.log(4) + (counts - 1).double() * math.log(2)
    result = ar_kl(samples, nats, 3, counts=counts, **TINY | {"steps": 300, "lr": 1e-2})
    assert -0.08 < result.kl_lower < 4 * result.se
    error = 1.118 * math.log(2) / math.sqrt(result.held_out)
    assert abs(result.judge_nats - math.log(4) - 2.5 * math.log(2)) < 4 * error
