"""One small model as a folder of each public layout."""

from didi_instruct.data.tokenizer import Tokenizer

from .reference import (
    VOCAB,
    critic_weights,
    hub_config,
    hub_folder,
    prefixed,
    sdtt_config,
    weights,
)

CORE = weights(2)
WORDS = Tokenizer.from_words([f"w{n}" for n in range(VOCAB - 1)])
DUO = hub_config(model_type="DUO", time_conditioning=None, pad_token_id=VOCAB - 1)
FOLDERS = {
    "mdlm-hub": lambda at: hub_folder(at, prefixed("backbone.", CORE), hub_config()),
    "duo-hub": lambda at: hub_folder(at, prefixed("backbone.", CORE), DUO),
    "sdtt-hub": lambda at: hub_folder(at, prefixed("backbone.", CORE), sdtt_config()),
    "didi-instruct": lambda at: hub_folder(at, CORE, hub_config(), critic_weights()),
}
