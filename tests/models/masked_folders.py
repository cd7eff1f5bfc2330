"""Tiny masked LMs with random weights, in folders as `transformers` writes them."""

import json
import os

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [f"w{n}" for n in range(9)]
SPARE = 2
"""Rows of the vocabulary that no token has."""
ESM = (
    "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>"
)
SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
BERT_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", *WORDS]
ROBERTA_WORDS = ["<s>", "<pad>", "</s>", "<unk>", *WORDS, "<mask>"]


def _vocab(words):
    return {"vocab_size": len(words) + SPARE}


def bert(folder):
    config = transformers.BertConfig(**SIZE, **_vocab(BERT_WORDS), max_position_embeddings=14)
    return _text(folder, transformers.BertForMaskedLM(config), BERT_WORDS, "[CLS]", "[SEP]")


def distilbert(folder):
    config = transformers.DistilBertConfig(
        **DISTIL, **_vocab(BERT_WORDS), max_position_embeddings=14
    )
    return _text(folder, transformers.DistilBertForMaskedLM(config), BERT_WORDS, "[CLS]", "[SEP]")


def modernbert(folder):
    config = transformers.ModernBertConfig(
        **SIZE, **_vocab(BERT_WORDS), max_position_embeddings=14, local_attention=4,
        pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return _text(folder, transformers.ModernBertForMaskedLM(config), BERT_WORDS, "[CLS]", "[SEP]")


def roberta(folder, kind="Roberta"):
    config = getattr(transformers, f"{kind}Config")(
        **SIZE, **_vocab(ROBERTA_WORDS), max_position_embeddings=16,
        pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    network = getattr(transformers, f"{kind}ForMaskedLM")(config)
    return _text(folder, network, ROBERTA_WORDS, "<s>", "</s>")


def xlm_roberta(folder):
    return roberta(folder, "XLMRoberta")


def camembert(folder):
    return roberta(folder, "Camembert")


def mpnet(folder):
    config = transformers.MPNetConfig(
        **SIZE, **_vocab(ROBERTA_WORDS), max_position_embeddings=16, pad_token_id=1
    )
    return _text(folder, transformers.MPNetForMaskedLM(config), ROBERTA_WORDS, "<s>", "</s>")


def esm(folder, **changes):
    settings = {
        **SIZE, "vocab_size": 33, "max_position_embeddings": 14, "mask_token_id": 32,
        "pad_token_id": 1, "position_embedding_type": "rotary", "token_dropout": True, **changes,
    }  # fmt: skip
    config = transformers.EsmConfig(**settings)
    network = _filled(transformers.EsmForMaskedLM(config))
    network.save_pretrained(folder, save_original_format=False)  # names as in public files
    (folder / "vocab.txt").write_text("\n".join(ESM.split()))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
    return network


def dplm(folder, **changes):
    """As DPLM's weights lie in public: frequencies per layer, a table without use, other class."""
    folder.mkdir(exist_ok=True)
    given = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 34}
    network = esm(folder, hidden_dropout_prob=0.1, **given, **changes)
    tensors, width = load_file(folder / "model.safetensors"), 32 // SIZE["num_attention_heads"]
    for layer in range(SIZE["num_hidden_layers"]):
        name = f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"
        tensors[name] = 1 / 10_000 ** (torch.arange(0, width, 2) / width)
    tensors["esm.embeddings.position_embeddings.weight"] = torch.zeros(34, 32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"architectures": ["EsmForDPLM"], "dplm_type": "dplm_esm"}
    settings["transformers_version"] = "4.39.3"
    (folder / "config.json").write_text(json.dumps(settings))
    return network


def esm1(folder):
    return esm(folder, position_embedding_type="absolute", token_dropout=False)


FAMILIES = {
    "bert": bert, "roberta": roberta, "xlm-roberta": xlm_roberta, "camembert": camembert,
    "esm": esm, "esm1": esm1, "modernbert": modernbert, "distilbert": distilbert, "mpnet": mpnet,
}  # fmt: skip


def _filled(network):
    """Random weights of a size at which every logit depends visibly on the text."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" not in name.lower():
                parameter.normal_(0, 0.3, generator=generator)
    return network.eval()


def _text(folder, network, words, start, end):
    _filled(network).save_pretrained(folder)
    write_tokenizer(folder, words, start, end)
    return network


def write_tokenizer(folder, words, start=None, end=None):
    """Words between spaces; special ones in brackets."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([w for w in words if w[0] in "<[" and "unused" not in w])
    if start is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{start} $A {end}", special_tokens=[(w, words.index(w)) for w in (start, end)]
        )
    backend.save(os.fspath(folder / "tokenizer.json"))
    mask = next((w for w in words if "mask" in w.lower()), None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": mask}))
