"""Texts and models that one judge can read together: told before anything is trained."""

from pathlib import Path

from didi_instruct.data.manifest import Manifest, is_prepared
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.readers import ReadOptions, read_pieces
from didi_instruct.data.sources import Meter, find_sources
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.hub.sources import find_shipped
from didi_instruct.models.checkpoint import is_ours
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.scales import words_of


def check_together(scale: Scale) -> None:
    """Refuse a teacher, texts and a judge whose tokenizers differ, and texts that cannot be read.

    What is trained here has the teacher's tokenizer; prepared texts have one of their own.
    """
    if scale.is_of_proteins:  # whose residues are letters in every tokenizer
        return
    teacher = scale.teacher if isinstance(scale.teacher, str) else None
    own = _hash(teacher) if teacher else None
    if teacher and own is None:
        raise UserError(
            f"--teacher {teacher}: has no tokenizer.json here, and all models of a table need one "
            "tokenizer: give a folder that has it."
        )
    if scale.name == "toy":
        if own not in (None, OracleLanguage.default().tokenizer.hash):
            raise UserError(
                f"--teacher {teacher}: does not speak the oracle language of --scale toy: leave it "
                "out, or use --scale small with --data."
            )
        return
    words = _words_of_text(scale.data) if scale.data else None
    if words and own not in (None, words):
        raise UserError(
            f"--data {scale.data}: was prepared with another tokenizer than the teacher's "
            f"({teacher}): prepare it with `didi data prepare --tokenizer {words_of(str(teacher))}`"
            ", or give the text itself."
        )
    _check_judge(scale, own or words)


def _words_of_text(data: str) -> str | None:
    """Hash of the tokenizer of prepared texts; of others there must be one, and None is told."""
    if is_prepared(Path(data)):
        return Manifest.read(Path(data)).tokenizer.hash
    if data.startswith("hf:"):
        return None
    sources = find_sources(data)
    if len(sources) == 1 and sources[0].kind == "text":
        raise UserError(
            f"--data {data}: a plain text file is one text as a whole: give .jsonl, a folder of "
            "files, or what `didi data prepare --rows document --documents line` makes of it."
        )
    for source in sources:
        if any(True for _ in read_pieces(source, ReadOptions(), Meter())):
            return None
    raise UserError(f"--data {data}: holds no text: give a file or folder that does.")


def _check_judge(scale: Scale, words: str | None) -> None:
    """A judge of ours reads tokens; a causal LM reads texts, whatever they were made of."""
    judge = scale.judge
    if not isinstance(judge, str) or not is_ours(find_shipped(judge) or Path(judge)):
        return
    if words not in (None, _hash(judge)):
        raise UserError(
            f"--judge {judge}: has another tokenizer than the models it would judge: give one of "
            "the same tokenizer or a causal LM of texts, or leave it out."
        )


def _hash(source: str) -> str | None:
    words = words_of(source)
    return Tokenizer.load(Path(words)).hash if words else None
