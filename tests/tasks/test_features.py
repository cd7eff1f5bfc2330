import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.models.masked_folders import FAMILIES
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.dit import build_model
from didi_instruct.models.masked_lm import load_masked_lm
from didi_instruct.tasks import features
from didi_instruct.tasks.features import (
    FilledWindow,
    Parts,
    Training,
    fit_classifier,
    frozen_states,
    last_block_alone,
    network_digest,
    pooled,
    states_below,
)

KINDS = ("mdlm", "learned positions", "duo", "ar", "one block", *FAMILIES)
TEXTS = [[7, 8, 9], [9, 6, 7, 8, 8, 10], [8], [10, 9, 8], [6, 6, 7, 9, 10]]


def quiet(done, total):
    pass


@pytest.fixture(params=KINDS)
def network(request, tmp_path):
    """A network of each kind whose weights are noise, in evaluation mode."""
    kind = request.param
    if kind in FAMILIES:
        FAMILIES[kind](tmp_path)
        return load_masked_lm(tmp_path).model.eval()
    return small(kind)


def small(kind="mdlm", seed=0):
    config = ModelConfig(
        kind=kind if kind in ("ar", "duo") else "mdlm",
        layers=1 if kind == "one block" else 3,
        hidden=16,
        heads=2,
        cond_dim=8,
        vocab_size=12,
        length=8,
        dropout=0.1,
        time_conditioning=kind == "duo",
        learned_positions=kind == "learned positions",
    )
    return randomise(build_model(config), seed).eval()


def alone(network, text):
    """Feature of one text by the whole trunk in one pass, as a definition has it."""
    tokens = torch.tensor([text])
    hidden = network.trunk(network.embed(tokens), network.modulations(0.0))
    assert hidden.shape[1] == len(text)
    return F.layer_norm(hidden, hidden.shape[-1:]).mean(1)


@torch.no_grad()
def test_a_feature_is_the_whole_trunk_s_whatever_batch_its_text_is_in(network):
    expected = torch.cat([alone(network, text) for text in TEXTS])
    states = frozen_states(network, TEXTS, None, None, quiet)
    mods = network.modulations(0.0)
    with last_block_alone(network):
        together = pooled(network, states.batch(range(5), torch.device("cpu")), mods)
        pair = pooled(network, states.batch([0, 3], torch.device("cpu")), mods)
    assert together == pytest.approx(expected, abs=1e-5)
    assert pair == pytest.approx(expected[[0, 3]], abs=1e-5)
    assert expected.std(0).min() > 1e-3  # texts differ
    assert torch.cat([alone(network, text) for text in TEXTS]).equal(expected)  # put back


def test_gradient_reaches_the_last_block_and_the_head_alone(network):
    before = copy.deepcopy(network.state_dict())
    states = frozen_states(network, TEXTS, None, None, quiet)
    head = torch.nn.Linear(states.rows.shape[1], 2)
    with last_block_alone(network) as last:
        batch = states.batch(range(5), torch.device("cpu"))
        F.cross_entropy(
            head(pooled(network, batch, network.modulations(0.0))), torch.tensor([0, 1, 0, 1, 1])
        ).backward()
        reached = {id(p) for p in network.parameters() if p.grad is not None}
        learning = [p for p in last.parameters() if p.grad is not None and p.grad.abs().max() > 0]
    assert reached == {id(p) for p in last.parameters() if p.grad is not None}
    # A key's bias shifts all scores of a query alike, which no softmax sees.
    assert len(learning) >= len([*last.parameters()]) - 2
    assert head.weight.grad.abs().max() > 0
    assert all(p.grad is None for p in network.parameters())
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_fitting_moves_neither_the_network_nor_the_random_numbers_of_others():
    network, parts = small(), Parts(labels=[0, 1, 0, 1, 1], train=[0, 1, 2], dev=[3], test=[4])
    states = frozen_states(network, TEXTS, None, None, quiet)
    before, digest = torch.random.get_rng_state(), network_digest(network)
    learn = [p.requires_grad for p in network.parameters()]
    training = Training(steps=4, batch_size=2, lr=0.1, weight_decay=0.01, evaluations=2)
    found = [fit_classifier(network, states, parts, training, seed, quiet) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert found[0].step in (2, 4)
    assert torch.random.get_rng_state().equal(before)
    assert network_digest(network) == digest
    assert [p.requires_grad for p in network.parameters()] == learn


def test_what_is_kept_is_the_best_step_on_the_dev_texts():
    """No step by itself is right on more dev texts, and what is kept is right on as many."""
    network, labels = small(), [0, 1, 0, 1, 1]
    parts = Parts(labels=labels, train=[0, 1, 2, 3], dev=[0, 2, 4], test=[0, 2, 4])
    states = frozen_states(network, TEXTS, None, None, quiet)

    def fitted(seed, steps, evaluations):
        """With `evaluations=1` the last step is kept."""
        training = Training(
            steps=steps, batch_size=2, lr=0.3, weight_decay=0.0, evaluations=evaluations
        )
        return fit_classifier(network, states, parts, training, seed, quiet)

    for seed in range(4):
        found = fitted(seed, 12, 12)
        right = [(p >= 0.5) == labels[i] for p, i in zip(found.probs, parts.test, strict=True)]
        assert found.dev_accuracy == pytest.approx(sum(right) / 3)
        alone = [fitted(seed, steps, 1) for steps in range(1, 13)]
        accuracies = [one.dev_accuracy for one in alone]
        assert found.dev_accuracy == max(accuracies) > min(accuracies)
        assert alone[found.step - 1].probs == found.probs


def test_texts_with_windows_of_their_own_are_read_with_what_fills_them():
    network = small()
    states = frozen_states(network, TEXTS, FilledWindow(8, 0), None, quiet)
    with torch.no_grad(), last_block_alone(network):
        found = pooled(network, states.batch([0], torch.device("cpu")), network.modulations(0.0))
    tokens = torch.tensor([[*TEXTS[0], *[0] * 5]])
    with torch.no_grad():
        hidden = network.trunk(network.embed(tokens), network.modulations())[:, :3]
    assert found == pytest.approx(F.layer_norm(hidden, hidden.shape[-1:]).mean(1), abs=1e-5)


def test_states_are_computed_once_and_a_damaged_file_is_made_again(tmp_path, monkeypatch):
    network, path = small(), tmp_path / "cache" / "states.safetensors"
    first = frozen_states(network, TEXTS, None, path, quiet)
    runs = []
    monkeypatch.setattr(features, "states_below", lambda *a: runs.append(a) or states_below(*a))
    again = frozen_states(network, TEXTS, None, path, quiet)
    assert not runs
    assert again.rows.equal(first.rows)
    path.write_bytes(path.read_bytes()[:100])
    assert frozen_states(network, TEXTS, None, path, quiet).rows.equal(first.rows)
    assert len(runs) == len({len(text) for text in TEXTS})


@pytest.mark.parametrize("where", ["states_below", "save_tensors"])
def test_ctrl_c_leaves_no_file(tmp_path, monkeypatch, where):
    def stop(*arguments):
        raise KeyboardInterrupt

    if where == "save_tensors":
        monkeypatch.setattr("didi_instruct.models.tensor_files.write_tensors", stop)
    else:
        monkeypatch.setattr(features, where, stop)
    with pytest.raises(KeyboardInterrupt):
        frozen_states(small(), TEXTS, None, tmp_path / "cache" / "states.safetensors", quiet)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_digest_tells_networks_apart():
    network = small()
    assert network_digest(network) == network_digest(copy.deepcopy(network))
    digests = {network_digest(small(kind)) for kind in KINDS[:5]}
    digests |= {network_digest(small(seed=1))}
    assert len(digests) == 6
    for change in ({"dropout": 0.2}, {"length": 9}, {"heads": 4}):
        network.config = replace(small().config, **change)
        digests.add(network_digest(network))
    assert len(digests) == 9


def test_a_digest_tells_how_a_masked_lm_frames_texts(tmp_path):
    FAMILIES["bert"](tmp_path)
    digests = set()
    for change in ({}, {"before": ()}, {"settings": {}}):
        network = load_masked_lm(tmp_path).model
        record = replace(network.record, **change)
        digests.add(network_digest(Recorded(network, record)))
    assert len(digests) == 3


class Recorded(torch.nn.Module):
    """A network with a record of its own."""

    def __init__(self, network, record):
        super().__init__()
        self.network, self.config, self.record = network, network.config, record
