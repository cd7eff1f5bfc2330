"""What headers tell of a model is what it is once it is loaded."""

import pytest
from tests.models import masked_folders
from tests.models.foreign.folders import CORE, WORDS
from tests.models.foreign.reference import (
    critic_weights,
    hub_config,
    hub_folder,
    prefixed,
    weights,
)

import didi_instruct as didi
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.cache import model_key
from didi_instruct.hub.sources import peek_models


def masked_lm(family):
    return lambda folder: getattr(masked_folders, family)(folder)


def frameless(folder):
    """Nothing stands around a text, where two tokens are usual: it may be two longer."""
    masked_folders.bert(folder)
    masked_folders.write_tokenizer(folder, masked_folders.BERT_WORDS)


def release(folder):
    hub_folder(folder, CORE, hub_config(), critic_weights())
    WORDS.save(folder)


def ours(folder):
    release(folder.parent / "release")
    didi.load(folder.parent / "release", device="cpu").save(folder)


def without_words(folder):
    hub_folder(folder, prefixed("backbone.", CORE), hub_config())


def with_words_too_many(folder):
    without_words(folder)
    Tokenizer.load("bytes").save(folder)


MAKE = {
    "ours": ours,
    "frameless": frameless,
    "release": release,
    "without-words": without_words,
    "with-words-too-many": with_words_too_many,
    **{name: masked_lm(name) for name in ("bert", "roberta", "modernbert", "distilbert", "esm")},
}


@pytest.mark.parametrize("name", MAKE)
def test_what_is_seen_is_what_is_loaded(tmp_path, name):
    folder = tmp_path / name
    MAKE[name](folder)
    (seen,) = peek_models([str(folder)])
    model = didi.load(folder, device="cpu")
    assert seen.config == model.config
    if model.tokenizer is None:
        assert seen.tokenizer is seen.tokenizer_hash is None
    else:
        assert seen.tokenizer_hash == model.tokenizer.hash
        assert seen.tokenizer.eot_id == model.tokenizer.eot_id


def test_a_tokenizer_is_for_models_that_bring_none(tmp_path):
    without_words(tmp_path / "bare")
    release(tmp_path / "whole")
    WORDS.save(tmp_path / "words")
    bare, whole, words = (str(tmp_path / name) for name in ("bare", "whole", "words"))
    found = peek_models([bare, whole, bare], words)
    assert [(model.source, model.given) for model in found] == [(bare, words), (whole, None)]
    assert found[0].tokenizer_hash == found[1].tokenizer_hash == WORDS.hash
    with pytest.raises(UserError, match="have different tokenizers"):
        peek_models([bare, whole])
    with pytest.raises(UserError, match="has its own tokenizer: leave out --tokenizer"):
        peek_models([whole], words)
    with pytest.raises(UserError, match="has 18 tokens, and the tokenizer `bytes` 257"):
        peek_models([bare], "bytes")


def test_fingerprints_of_foreign_models_tell_weights_and_settings_apart(tmp_path):
    folder = tmp_path / "release"
    release(folder)
    found = [model_key(str(folder))]
    assert model_key(str(folder)) == found[0]
    hub_folder(folder, CORE, hub_config(time_conditioning=True), critic_weights())
    found.append(model_key(str(folder)))
    hub_folder(folder, CORE, hub_config(time_conditioning=True), critic_weights(8))
    found.append(model_key(str(folder)))
    hub_folder(folder, weights(3), hub_config(time_conditioning=True), critic_weights(8))
    found.append(model_key(str(folder)))
    assert len(set(found)) == 4


def test_code_is_refused_before_anything_is_drawn(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "sdar", "architectures": ["SDARForCausalLM"], "vocab_size": 7,'
        '"hidden_size": 4, "auto_map": {"AutoModel": "c.M"}}'
    )
    with pytest.raises(UserError, match="brings code of its own"):
        peek_models([str(tmp_path)])
