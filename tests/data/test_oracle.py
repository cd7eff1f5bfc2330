import itertools
import math

import pytest
import torch
from scipy.stats import chi2

from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.data.oracle_words import lexicon
from didi_instruct.errors import UserError


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def all_sequences(language, with_mask=False):
    ids = range(language.num_tokens + with_mask)
    return torch.tensor(list(itertools.product(ids, repeat=language.length)))


def latent_paths(language):
    """Yield (g, (s_1..s_n), its prior probability, by the definition)."""
    names, states = len(language.prior), range(len(language.initial))
    for g in range(names):
        for path in itertools.product(states, repeat=language.sentences):
            p = language.prior[g] * language.initial[path[0]]
            for before, after in itertools.pairwise(path):
                p = p * language.transition[before, after]
            yield g, path, p


def joint_with_latents(language, sequences):
    """P(x, g, s_1..s_n) by the definition, one slot at a time: {(g, path): (B,)}."""
    table = {}
    for g, path, p in latent_paths(language):
        p = p.expand(len(sequences))
        for k, j in itertools.product(range(language.sentences), range(language.slots)):
            p = p * language.emission[j, g, path[k]][sequences[:, k * language.slots + j]]
        table[g, path] = p
    return table


@pytest.fixture(scope="module")
def tiny():
    return OracleLanguage.tiny()


@pytest.fixture(scope="module")
def default():
    return OracleLanguage.default()


@pytest.fixture(scope="module")
def samples(default):
    return default.sample(20_000, seeded(1))


@pytest.fixture(scope="module")
def one_step(default):
    """Draw every token at once, each from its own exact marginal."""
    blank = torch.full((1, default.length), default.mask_id)
    marginals = default.denoiser(blank)[0].exp()
    return torch.multinomial(marginals, 2_000, replacement=True, generator=seeded(2)).T


@pytest.mark.parametrize("shape", [(3, 2, 2), (2, 3, 3), (4, 4, 1), (2, 1, 7)])
def test_probabilities_of_all_sequences_sum_to_one(shape):
    """Sum over V^L sequences of exp(log_prob) = 1, whatever the shape of the language."""
    language = OracleLanguage.tiny(*shape, seed=3)
    total = language.log_prob(all_sequences(language)).exp().sum()
    assert total.item() == pytest.approx(1, abs=1e-12)


def test_log_prob_is_the_sum_over_latents(tiny):
    """The forward pass equals the sum of the joint over every latent path."""
    sequences = all_sequences(tiny)
    expected = sum(joint_with_latents(tiny, sequences).values()).log()
    torch.testing.assert_close(tiny.log_prob(sequences), expected, rtol=0, atol=1e-12)


def test_masked_log_prob_is_the_marginal_of_the_visible_tokens(tiny):
    """log_prob(z) = log of the sum of p(x) over the x that agree with z, for all (V+1)^L states."""
    sequences, states = all_sequences(tiny), all_sequences(tiny, with_mask=True)
    agree = ((states[:, None] == sequences) | (states[:, None] == tiny.mask_id)).all(-1)
    expected = (agree.double() @ tiny.log_prob(sequences).exp()).log()
    torch.testing.assert_close(tiny.log_prob(states), expected, rtol=0, atol=1e-12)


def test_denoiser_is_bayes_rule_on_every_masked_state(tiny):
    """P(x^l = v | visible) from the enumerated joint, at each mask of all (V+1)^L states."""
    sequences, states = all_sequences(tiny), all_sequences(tiny, with_mask=True)
    masked = states == tiny.mask_id
    agree = ((states[:, None] == sequences) | masked[:, None]).all(-1)
    weight = agree * tiny.log_prob(sequences).exp()
    one_hot = torch.nn.functional.one_hot(sequences, tiny.num_tokens).double()
    expected = torch.einsum("zx,xlv->zlv", weight / weight.sum(-1, keepdim=True), one_hot)
    predicted = tiny.denoiser(states, torch.rand(len(states))).exp()
    torch.testing.assert_close(predicted[masked], expected[masked], rtol=0, atol=1e-12)
    torch.testing.assert_close(predicted.sum(-1), torch.ones_like(predicted[..., 0]))


def test_denoiser_at_visible_positions_is_a_second_draw(tiny):
    """At visible tokens: the slot's law under the posterior of the latents, by enumeration."""
    sequences = all_sequences(tiny)
    table = joint_with_latents(tiny, sequences)
    total = sum(table.values())
    expected = torch.zeros(len(sequences), tiny.length, tiny.num_tokens, dtype=torch.float64)
    for (g, path), p in table.items():
        law = torch.stack([tiny.emission[:, g, s] for s in path]).flatten(0, 1)
        expected += (p / total)[:, None, None] * law
    torch.testing.assert_close(tiny.denoiser(sequences).exp(), expected, rtol=0, atol=1e-12)


def test_latent_posterior_is_bayes_rule():
    """Posteriors of g, s_k and (s_k, s_{k+1}) against the enumerated joint."""
    language = OracleLanguage.tiny(num_tokens=2, slots=2, sentences=3, seed=5)
    sequences = all_sequences(language)
    got = language.latent_posterior(sequences)
    name, state, pair = (torch.zeros_like(part) for part in got)
    table = joint_with_latents(language, sequences)
    total = sum(table.values())
    for (g, path), p in table.items():
        name[:, g] += p / total
        for k, s in enumerate(path):
            state[:, k, s] += p / total
        for k, (before, after) in enumerate(itertools.pairwise(path)):
            pair[:, k, before, after] += p / total
    for mine, expected in zip(got, (name, state, pair), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def reveal(language, tokens, order):
    """Sum of the denoiser's log-probabilities as tokens are revealed one at a time: (B,)."""
    z = torch.full_like(tokens, language.mask_id)
    total = torch.zeros(len(tokens), dtype=torch.float64)
    for position in order:
        log_probs = language.denoiser(z)[:, position]
        total += log_probs.gather(-1, tokens[:, position, None])[:, 0]
        z[:, position] = tokens[:, position]
    return total


def test_chain_rule_in_every_order(tiny, default, samples):
    """Revealing token by token multiplies to log_prob: all 24 orders of tiny, some of default."""
    sequences = all_sequences(tiny)
    for order in itertools.permutations(range(tiny.length)):
        torch.testing.assert_close(reveal(tiny, sequences, order), tiny.log_prob(sequences))
    for seed in range(3):
        order = torch.randperm(default.length, generator=seeded(seed)).tolist()
        text = samples[:64]
        torch.testing.assert_close(reveal(default, text, order), default.log_prob(text))


def test_samples_follow_the_law(tiny):
    """Chi-square of 50,000 samples against all 81 probabilities; false alarms at 1e-4."""
    expected = 50_000 * tiny.log_prob(all_sequences(tiny)).exp()
    drawn = tiny.sample(50_000, seeded(7))
    digits = tiny.num_tokens ** torch.arange(tiny.length - 1, -1, -1)
    counts = torch.bincount((drawn * digits).sum(-1), minlength=len(expected))
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert statistic < chi2.isf(1e-4, len(expected) - 1)


def test_entropy_agrees_with_itself_and_with_enumeration(tiny, default):
    """Two Monte Carlo means of default, and one of tiny against the sum; within 4 errors (1e-4)."""
    (a, error_a), (b, error_b) = (default.entropy(8_000, seeded(s)) for s in (1, 2))
    assert abs(a - b) < 4 * math.hypot(error_a, error_b)
    assert error_a < 0.002 * a
    log_probs = tiny.log_prob(all_sequences(tiny))
    exact = -(log_probs.exp() * log_probs).sum().item()
    mean, error = tiny.entropy(8_000, seeded(3))
    assert abs(mean - exact) < 4 * error
    assert default.entropy(100) == default.entropy(100)


def test_default_tables_are_normalised_and_every_word_is_used(default, samples):
    """64 distinct words, each the likeliest of its class somewhere or seen; rows sum to 1."""
    assert (default.num_tokens, default.length, default.mask_id) == (64, 32, 64)
    assert len(set(default.words)) == 64
    for table in (default.prior, default.initial, default.transition, default.emission):
        torch.testing.assert_close(table.sum(-1), torch.ones_like(table[..., 0]))
    # Noise alone would show each word 20,000 * 32 * 0.005 / 64 = 50 times.
    assert torch.bincount(samples.flatten(), minlength=64).min() > 1_000
    torch.testing.assert_close(default.initial @ default.transition, default.initial)


def test_only_words_of_the_slot_are_likely(default):
    """Outside its own slot a word has probability eps / V, whatever the latents."""
    for v, word in enumerate(lexicon()):
        slot = default.grammar.slot[v]
        others = torch.arange(default.slots) != slot
        assert default.words[v] == word.text
        assert default.emission[others, :, :, v].max().item() == pytest.approx(0.005 / 64)
        assert default.emission[slot, :, :, v].max().item() > 0.02


def test_true_latent_entropy_is_that_of_the_enumerated_prior():
    """Closed form against -sum p log p over every latent path."""
    language = OracleLanguage.tiny(sentences=3, seed=9)
    p = torch.stack([p for _, _, p in latent_paths(language)])
    assert language.true_latent_entropy() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-12)


def test_latent_entropy_exposes_collapse(default, samples):
    """True samples give the true entropy (bias of 3 x 24^2 / 40,000 = 0.04 nats); collapse less."""
    truth = default.true_latent_entropy()
    assert default.latent_entropy(samples) == pytest.approx(truth, abs=0.1)
    name = default.latent_posterior(samples).name.argmax(-1)
    names = -(default.prior * default.prior.log()).sum().item()
    assert default.latent_entropy(samples[name == 0]) < truth - names + 0.1
    assert default.latent_entropy(samples[:1].expand(500, -1)) < 1


def test_mistakes_are_rare_in_the_language_and_common_in_one_step(default, samples, one_step):
    """A true sentence errs when noise hits one of 8 slots; independent words hardly ever agree."""
    true, independent = default.mistakes(samples), default.mistakes(one_step)
    assert 0.02 < true.any < 8 * 0.005
    assert max(true.name, true.topic, true.number, true.bracket) < 0.003
    assert min(independent.name, independent.topic) > 0.4
    assert min(independent.number, independent.bracket) > 0.4
    assert independent.any > 0.9
    entropy, _ = default.entropy(2_000)
    assert -default.log_prob(one_step).mean().item() > 2 * entropy


@pytest.mark.parametrize(
    ("position", "word", "kind"),
    [
        (5, "Hugo", "name"),
        (2, "loud", "topic"),
        (4, "greet", "number"),
        (7, "]", "bracket"),
        (6, "cat", "slot"),
    ],
)
def test_each_mistake_is_counted_once(default, position, word, kind):
    """One wrong word in one of four sentences: a quarter, of its own kind only."""
    right = torch.tensor(default.tokenizer.encode(["( this wild cat greets Anna today ) " * 4]))
    assert set(vars(default.mistakes(right)).values()) == {0.0}
    wrong = right.clone()
    wrong[0, 8 + position] = default.words.index(word)
    counted = vars(default.mistakes(wrong))
    assert {k: v for k, v in counted.items() if v} == {kind: 0.25, "any": 0.25}


def test_random_tables_have_no_grammar(tiny):
    """Asking a tiny language for its mistakes is an error, not a zero."""
    with pytest.raises(ValueError, match="grammar"):
        tiny.mistakes(all_sequences(tiny))


def test_long_sequences_do_not_underflow():
    """With 200 sentences p(x) is below 1e-600, and posteriors stay consistent with each other."""
    language = OracleLanguage.default(sentences=200)
    tokens = language.sample(2, seeded(0))
    tokens[1] = torch.randint(language.num_tokens, (language.length,), generator=seeded(1))
    assert (language.log_prob(tokens) < -1_400).all()
    assert language.log_prob(tokens).isfinite().all()
    assert language.denoiser(tokens).isfinite().all()
    _, state, pair = language.latent_posterior(tokens)
    torch.testing.assert_close(pair.sum(-1), state[:, :-1])
    torch.testing.assert_close(pair.sum(-2), state[:, 1:])


def test_impossible_tables_are_refused(tiny):
    """Zero probabilities (eps = 0) and tokens of the wrong length are errors."""
    with pytest.raises(ValueError, match="impossible"):
        OracleLanguage.default(eps=0)
    with pytest.raises(ValueError, match="tokens are"):
        tiny.log_prob(torch.zeros(2, 3, dtype=torch.long))


def test_tokenizer_reads_the_words_back(default, samples):
    """Decoding joins the words with spaces, and encoding undoes it."""
    text = " ".join(default.words[i] for i in samples[0].tolist())
    assert default.tokenizer.decode(samples[0].tolist()) == text
    assert default.tokenizer.encode([text]) == [samples[0].tolist()]
    assert default.tokenizer.size == default.num_tokens


def test_source_rows_are_a_pure_function_of_their_index(default):
    """Any slicing, any order, a fresh source: row i is always the same row."""
    source = OracleSource(default, seed=3)
    rows = source.rows(0, 6_000)
    assert rows.shape == (6_000, 32)
    fresh = OracleSource(default, seed=3)
    for start, count in [(5_990, 10), (1_000, 100), (0, 1), (1_023, 2), (1_024, 0), (2_048, 1_024)]:
        assert torch.equal(fresh.rows(start, count), rows[start : start + count])
        assert torch.equal(source.ordered(start, count), rows[start : start + count])
    rows[:] = 0
    assert source.rows(4_000, 5).any()


def test_source_streams_differ_and_follow_the_language(default, samples):
    """Seeds, splits and blocks share no block; the mean of -log_prob is the entropy (4 errors)."""
    sources = [
        OracleSource(default, seed=seed, split=split)
        for seed in (0, 1, 2**32, -1)
        for split in ("train", "valid")
    ]
    blocks = [s.rows(1_024 * k, 1_024) for s in sources for k in (0, 1)]
    for a, b in itertools.combinations(blocks, 2):
        assert not torch.equal(a, b)
    nats, reference = -default.log_prob(torch.cat(blocks)), -default.log_prob(samples)
    error = math.hypot(*((n.std() / len(n) ** 0.5).item() for n in (nats, reference)))
    assert abs(nats.mean() - reference.mean()).item() < 4 * error
    with pytest.raises(UserError, match="split"):
        OracleSource(default, split="test")


@pytest.mark.gpu
def test_device_does_not_change_the_numbers(default, samples):
    """Same samples from a CPU generator, same likelihood, denoiser and mistakes on the GPU."""
    there, text = default.to("cuda"), samples[:100]
    assert torch.equal(there.sample(20_000, seeded(1)).cpu(), samples)
    torch.testing.assert_close(there.log_prob(text.cuda()).cpu(), default.log_prob(text))
    torch.testing.assert_close(there.denoiser(text.cuda()).cpu(), default.denoiser(text))
    assert there.mistakes(text.cuda()) == default.mistakes(text)
