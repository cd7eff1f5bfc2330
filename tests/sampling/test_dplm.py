"""DPLM's decoder against the same written as loops over texts, steps and positions."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from didi_instruct.process.masking import with_code
from didi_instruct.sampling.dplm import dplm
from didi_instruct.sampling.draw import DrawOptions, Purpose, law_of, uniforms
from didi_instruct.sampling.state import PAD, Canvas, State

from .enumeration import all_states, assert_follows
from .toys import (
    MASK,
    TINY,
    L,
    Toy,
    V,
    blank,
    canvases,
    law,
    random_function,
    some_rows,
    start,
    toy_of,
)

OPTIONS = [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}]


def proposal(logits, canvas, b, i, stream, options):
    """Token and score at one position of one text, token by token."""
    p = law_of(logits, DrawOptions(**options | {"temperature": 1.0}))
    if options.get("temperature", 1.0) != 1.0 and options["temperature"] > 0:
        p = law_of(logits, DrawOptions(**options))
    temperature, noisy = options.get("temperature", 1.0), []
    numbers = uniforms(3, canvas.samples[b, None], (*canvas.stream, *stream), V)[0].tolist()
    for v in range(V):
        if temperature == 0:
            noisy.append(float(logits[v]))
        elif p[v] == -math.inf:
            noisy.append(-math.inf)
        else:
            noisy.append(float(logits[v]) - temperature * math.log(-math.log(numbers[v])))
    best = max(range(V), key=lambda v: noisy[v])
    total = math.log(sum(math.exp(x - noisy[best]) for x in noisy))
    return best, -total


def by_hand(function, canvas, steps, options, *, greedy=False, guard=None):
    """Texts, the masks after each step of each text, and the passes each text took."""
    if greedy:
        options = options | {"temperature": 0.0}
    anew = options | {
        "temperature": options.get("temperature", 1.0) or 1.0,
        "top_p": min(0.95, options.get("top_p", 1.0)),
    }
    texts, masks, passes = [], [], []
    for b, row in enumerate(canvas.tokens.tolist()):
        text, places = list(row), [i for i in range(L) if row[i] == MASK]
        masks.append([])
        passes.append(0)
        for n in range(steps):
            masked = [i for i in places if text[i] == MASK]
            if masked:
                coin = uniforms(3, canvas.samples[b, None], (*canvas.stream, Purpose.CODE, n), 1)
                code = int(coin * canvas.masks)

                def ask(text, code=code, b=b):
                    passes[b] += 1
                    z = torch.tensor([text])
                    share = text.count(MASK) / (L - text.count(PAD))
                    return function(with_code(z, MASK, code), torch.tensor([share]).float())[0]

                logits, scores = ask(text), {}
                whole = list(text)
                for i in places:
                    token, scores[i] = proposal(
                        logits[i], canvas, b, i, (Purpose.TOKEN, n, i), options
                    )
                    if i in masked:
                        whole[i] = token
                counts = Counter(whole[i] for i in places)
                again = [i for i in places if guard and counts[whole[i]] > guard * len(places)]
                if again:
                    logits = ask([MASK if i in again else whole[i] for i in range(L)])
                for i in again:
                    stream = (Purpose.TOKEN, n, i, 1)
                    whole[i], scores[i] = proposal(logits[i], canvas, b, i, stream, anew)
                left = math.floor(len(places) * (1 - (n + 1) / steps) + 1e-9)
                lowest = sorted(places, key=lambda i: (scores[i], i))[:left]
                text = [MASK if i in lowest else whole[i] for i in range(L)]
            masks[b].append(text.count(MASK))
        texts.append(text)
    return torch.tensor(texts), masks, passes


@law
@given(
    canvases(masks=(1, 1, 3)), st.sampled_from([1, 2, 5, 6, 20]), st.sampled_from(OPTIONS),
    st.booleans(), st.sampled_from([None, None, 0.2, 0.5]),
)  # fmt: skip
def test_it_is_that_by_hand(canvas, steps, options, greedy, guard):
    """Tokens, what is masked after each step, and what it costs."""
    seen, toy = [], Toy(every=True)
    state = State(canvas, DrawOptions(seed=3, **options), seen.append)
    draw = "argmax" if greedy else "sample"
    result = dplm(toy, state, steps=steps, draw=draw, guard=guard)
    tokens, masks, passes = by_hand(
        random_function(), canvas, steps, options, greedy=greedy, guard=guard
    )
    assert torch.equal(result.tokens, tokens)
    found = torch.stack([(step.tokens == MASK).sum(1) for step in seen], 1)
    assert found.tolist() == masks
    own = [sum(count > 0 for count in [1, *each[:-1]]) for each in masks]  # steps with masks
    extra = [
        p - o if text.eq(MASK).any() else 0
        for p, o, text in zip(passes, own, canvas.tokens, strict=True)
    ]
    assert result.nfe == steps + max(extra)
    assert result.passes == pytest.approx(toy.inputs / len(tokens))
    # Texts that are alike are read once in the first step.
    assert result.passes <= sum(passes) / len(passes) + 1e-9
    assert result.passes >= (sum(passes) - len(passes) + 1) / len(passes) - 1e-9
    assert result.log_prob is None


def test_one_step_draws_the_product_of_the_denoisers_laws():
    """Gumbel-max is an exact draw; false alarm 1e-5."""
    result = dplm(toy_of(), start(Canvas.blank(20_000, 4, 3), seed=1), steps=1)
    p = TINY.denoiser(torch.full((1, 4), 3)).exp()[0]
    texts = all_states(3, 4)
    product = torch.stack([p[i, texts[:, i]] for i in range(4)]).prod(0)
    assert_follows(result.tokens, product, 3)
    assert (result.nfe, result.passes) == (1, pytest.approx(1 / 20_000))


def test_a_temperature_is_that_of_the_drawn_law():
    """False alarm 1e-5."""
    result = dplm(toy_of(), start(Canvas.blank(20_000, 4, 3), seed=2, temperature=0.5), steps=1)
    p = law_of(TINY.denoiser(torch.full((1, 4), 3)), DrawOptions(temperature=0.5)).exp()[0]
    texts = all_states(3, 4)
    product = torch.stack([p[i, texts[:, i]] for i in range(4)]).prod(0)
    assert_follows(result.tokens, product, 3)


def test_masks_fall_in_a_line_and_more_steps_than_tokens_revise():
    """With T > N positions are masked again that had a token; at the end none is masked."""
    seen, steps = [], 24
    result = dplm(Toy(every=True), blank(8, L, MASK, seen.append, seed=4), steps=steps)
    masks = [(step.tokens == MASK).sum(1).tolist() for step in seen]
    assert masks == [[L * (steps - s) // steps] * 8 for s in range(1, steps + 1)]
    revised = sum(
        int(((a.tokens != MASK) & (b.tokens == MASK)).sum()) for a, b in itertools.pairwise(seen)
    )
    assert revised > 8
    # 20 steps find a mask, the last 4 none.
    assert result.nfe == steps
    assert result.passes == pytest.approx((1 + 8 * 20) / 8)


def only(token):
    """A denoiser that is all but certain of one token while anything else is visible."""

    def function(z, t):
        logits = torch.zeros(*z.shape, V, dtype=torch.float64)
        logits[..., token] = 3.0
        return logits

    return function


def test_the_guard_draws_again_what_repeats_and_says_what_that_costs():
    """One pass more for a text with a token above the share; given tokens neither count nor go."""
    tokens = torch.tensor([[2, 2, 2, MASK, MASK, MASK], [MASK, 2, PAD, PAD, PAD, PAD]])
    canvas, toy = Canvas(tokens, MASK, torch.arange(2)), Toy(only(2), every=True)
    result = dplm(toy, start(canvas), steps=1, guard=0.99)
    # A single position is always all of its text; three are rarely alike after the second draw.
    assert result.nfe == 2
    first, second = (z for z, _ in toy.asked)
    assert torch.equal(first, tokens)
    plain = dplm(Toy(only(2), every=True), start(canvas), steps=1)
    alike = len(plain.tokens[0, 3:].unique()) == 1
    assert len(second) == 1 + alike
    assert result.passes == pytest.approx((2 + 1 + alike) / 2)
    assert plain.nfe == plain.passes == 1
    assert torch.equal(result.tokens[~canvas.open], tokens[~canvas.open])


def test_the_guard_of_greedy_proposals_samples():
    """Else it would write the same again."""
    toy, run = Toy(only(2), every=True), {"steps": 1, "draw": "argmax"}
    assert bool((dplm(toy, blank(50, L, MASK), **run).tokens == 2).all())
    guarded = dplm(toy, blank(50, L, MASK), **run, guard=0.25)
    share = float((guarded.tokens == 2).double().mean())
    # p(2) is 0.834 and top-p 0.95 leaves out one of the others: 0.869; 300 draws, 4 sigma.
    assert 0.79 < share < 0.95
    assert guarded.nfe == 2


@law
@given(canvases(), st.sampled_from([2, 9]), st.data())
def test_a_guarded_text_does_not_depend_on_its_batch(canvas, steps, data):
    result = dplm(Toy(every=True), start(canvas), steps=steps, guard=0.3)
    row = data.draw(st.integers(0, len(canvas.tokens) - 1))
    alone = dplm(
        Toy(every=True), start(some_rows(canvas, torch.tensor([row]))), steps=steps, guard=0.3
    )
    assert torch.equal(alone.tokens[0], result.tokens[row])
