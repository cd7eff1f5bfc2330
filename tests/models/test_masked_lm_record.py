"""Masked LMs in our own layout: the same network, and nothing that a file may ask for."""

import json

import pytest
import torch

from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import load_model, save_model
from didi_instruct.models.masked_lm import load_masked_lm

from . import masked_folders

FAMILIES = ["bert", "distilbert", "modernbert", "roberta", "mpnet", "esm"]


def saved(tmp_path, family, masks=1):
    """A loaded masked LM and the folder it was saved in."""
    getattr(masked_folders, family)(tmp_path / "theirs")
    loaded = load_masked_lm(tmp_path / "theirs")
    network = loaded.model
    if masks > 1:
        network = network.with_masks(torch.randn(masks - 1, network.config.hidden))
    save_model(tmp_path / "ours", network, network.config, loaded.tokenizer)
    return network, loaded, tmp_path / "ours"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("masks", [1, 3])
def test_logits_and_tokenizer_are_the_same_afterwards(tmp_path, family, masks):
    """Every parameter, bit by bit, where texts are padded too; texts have no end of their own."""
    network, loaded, folder = saved(tmp_path, family, masks)
    again = load_model(folder)
    assert again.config == network.config
    text = [n for n in range(network.config.vocab_size) if n not in network.banned]  # and masks
    tokens = torch.tensor(text)[torch.randint(len(text), (3, 6))]
    attended = torch.arange(6) < torch.tensor([[6], [2], [4]])
    with torch.no_grad():
        for seen in (None, attended):
            assert torch.equal(again.model(tokens, None, seen), network(tokens, None, seen))
    before, after = network.state_dict(), again.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert again.tokenizer.hash == loaded.tokenizer.hash
    assert again.tokenizer.eot_id is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("settings", "model_type"), "gpt2", "model_type` is 'gpt2'.*use one of bert"),
        (("settings", "intermediate_size"), 10**9, "shape|tensors"),
        (("mask",), 99, "a special id of `network` lies outside the vocabulary"),
        (("more",), 1, "`network.more` is not a setting"),
    ],
)
def test_a_record_that_was_altered_is_refused(tmp_path, path, value, message):
    """In one line, and before memory is taken for what it asks."""
    _, _, folder = saved(tmp_path, "bert")
    content = json.loads((folder / "config.json").read_text())
    *sections, last = ("network", *path)
    place = content
    for section in sections:
        place = place[section]
    place[last] = value
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
