"""What all samples of a table are measured with, made from the samples and the models behind them.

It is the same in whatever order models are named, and for every part of a table: numbers that are
kept under it would else not be found again.
"""

from collections.abc import Sequence
from pathlib import Path

from didi_instruct.api.reference import Like, open_reference
from didi_instruct.data.readers import ReadOptions
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.evaluation.judges import Judge
from didi_instruct.evaluation.kept import content_key
from didi_instruct.evaluation.measuring import Begun, Folding, Reference, Yardstick
from didi_instruct.evaluation.rows import METRICS
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.hub.sources import ModelInfo, shared_ids, shared_tokenizer
from didi_instruct.proteins.chains import Chains, is_fasta, read_chains
from didi_instruct.proteins.folding import FoldSettings, Predictor
from didi_instruct.training.distributed import pick_device


def make_yardstick(
    sets: Sequence[SampleSet],
    models: Sequence[ModelInfo],
    *,
    seed: int,
    judge: Judge | None = None,
    reference: str | None = None,
    reading: ReadOptions | None = None,
    metrics: Sequence[str] = (),
    tokenizer: str | None = None,
    ar_start: Begun | None = None,
    folding: Folding | None = None,
    device: str | None = None,
) -> tuple[Yardstick, SampleSet | None]:
    """The yardstick of samples that belong into one table, and the text of its reference, if any.

    `tokenizer` reads the text of the reference where there is no model to do so.
    """
    text = None
    if reference is not None:
        text = open_reference(
            reference, _like(sets, models, tokenizer), reading or ReadOptions(), metrics
        )
    yardstick = Yardstick(
        judge=judge,
        reference=None if text is None else _as_reference(text),
        num_tokens=_vocabulary(models, [*sets, *([text] if text else [])]),
        seed=seed % (1 << 63),
        device=str(pick_device(device)),
        ar_start=ar_start,
        chains=_chains(reference, metrics),
        folding=folding,
    )
    return yardstick, text


def _like(sets: Sequence[SampleSet], models: Sequence[ModelInfo], tokenizer: str | None) -> Like:
    """What a reference must be like: text that each of the models could have written."""
    origin = sets[0].origin
    given = Tokenizer.load(tokenizer) if tokenizer and not models else None
    return Like(
        num=len(sets[0]),
        length=origin.length,
        until_eot=origin.until_eot,
        hash=origin.tokenizer,
        tokenizer=given or shared_tokenizer(models),
        num_tokens=shared_ids(models),
        residues=_one_length(sets),
        documents=any(s.origin.own_window for s in sets) or any(model.ends for model in models),
    )


def open_folding(source: str, cache: Path, device: str | None = None) -> Predictor:
    """A folding model that keeps its folds in a folder; on a GPU its language model is bfloat16."""
    chosen = pick_device(device)
    settings = FoldSettings(
        source=source, cache=cache, device=str(chosen), bf16=chosen.type == "cuda"
    )
    return Predictor(settings)


def _one_length(sets: Sequence[SampleSet]) -> int | None:
    """Tokens of every sample, where all were asked for at one length."""
    lengths = {int(number) for s in sets for number in s.lengths}
    drawn = any(s.origin.own_window for s in sets)
    return None if drawn or len(lengths) > 1 else lengths.pop()


def _chains(reference: str | None, metrics: Sequence[str]) -> Chains | None:
    """All real chains, for measures that compare with them."""
    if reference is None:
        return None
    needed = any(METRICS[name].chains for name in metrics)
    wanted = any(METRICS[name].residues for name in metrics) and is_fasta(reference)
    return read_chains(reference) if needed or wanted else None


def _as_reference(text: SampleSet) -> Reference:
    return Reference(text.origin.model, content_key(text), text.texts, text.tokens, text.lengths)


def _vocabulary(models: Sequence[ModelInfo], sets: Sequence[SampleSet]) -> int:
    """Ids that a token may have; what was read from a file may have more than the models."""
    known = (model.config.num_tokens for model in models)
    return max(*known, *(1 + int(s.tokens.max()) for s in sets), 1)
