r"""Turn tokenised corpora back into text, by one table of rules per corpus, as the field does.

The models were trained on plain text, so `it was n't` and `500 @,@ 000` would cost them dearly.
SEDD, MDLM and DUO share one set of rules, and the published numbers depend on it. These tables
follow it, rule by rule, with a few repairs, which change the number of GPT-2 tokens by less than
0.1% on the test sets:

* A rule also holds at the ends of a text, and a second time changes nothing; the field's rule for
  quotes would then join what stands *between* two quotations. Single quotes are the exception: once
  joined, an opening one cannot be told from an apostrophe.
* PTB, WikiText and LM1B: every apostrophe joins (`'s 't 're 've 'll 'm 'd`, O'Neill, workers').
  The field names `'s` alone for PTB and WikiText, and no workers' for LM1B.
* LM1B: a full stop also joins a bracket, a quote or a number before it, not only a word.
* WikiText: `N` stays, which the field turns into 1 there too; only in PTB does it mean a number.

What may surprise, but is the field's: PTB's `N` becomes 1 and its `<unk>` becomes a question mark;
LAMBADA's texts begin with a line break, and its single curly quotes stay; AG News is left as it is,
with `\`, `#39;` and `&lt;` in it; the `@xmath` and `@xcite` of scientific papers stay.
"""

import re

Rules = tuple[tuple[re.Pattern[str], str], ...]
"""What to look for and what to put in its place, in this order."""


def detokenize(text: str, rules: Rules) -> str:
    """Apply each rule once, in order."""
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _rules(*pairs: tuple[str, str]) -> Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


# A quote that is a token of its own has white space (or an end) on both sides. A closing one may
# already have its comma.
_ALONE, _CLOSED = r"(?<!\S)", r"(?=[\s.,;:!?'\"]|\Z)"

_APOSTROPHES = _rules((r" '(?=\w)", "'"))  # it 's, don 't, O 'Neill
_POSSESSIVES = _rules((rf"(?<=s) '{_CLOSED}", "'"))  # workers ' rights
_PUNCTUATION = _rules((r" +(?=[.,;:!?](?:\s|\Z))", ""))
# Single quotes do not open behind an s: there they are taken for a possessive, as in the field.
_QUOTES = _rules(
    (rf"(?<!s ){_ALONE}' ((?:[^']|(?<=\w)'(?=\w))+) '{_CLOSED}", r"'\1'"),
    (rf"(?<=s) '{_CLOSED}", "'"),
    (rf'{_ALONE}" ([^"]+) "{_CLOSED}', r'"\1"'),
)
_BRACKETS = _rules((r"(?<=[(\[{]) +(?=\S)", ""), (r"(?<=\S) +(?=[)\]}])", ""))
_SEPARATORS = _rules((r" @([-,.])@ ", r"\1"))  # 500 @,@ 000
_HEADINGS_AND_DEGREES = _rules((r"(?<==) (?==)", ""), (r" ° ", "°"))  # = = a heading = =
_ADDRESSES = _rules((r"(https?) : / / ", r"\1://"))
_SLASHES = _rules((r" / ", "/"))
_MONEY = _rules((r"(?<=[$£]) ", ""))
_ENDS = _rules((r"\A\s+|\s+\Z", ""))

PTB: Rules = (
    *_APOSTROPHES,
    *_POSSESSIVES,
    *_rules(
        (r" (?=n't\b)", ""),  # was n't
        (r"\\/", "/"),
        (r"(?<!\S)N(?!\S)", "1"),  # every number
        (r"(?<=[$#]) (?=1)", ""),  # # is the pound sign
        (r"<unk>", "?"),
    ),
    *_ENDS,
)

WIKITEXT: Rules = (
    _SEPARATORS + _APOSTROPHES + _PUNCTUATION + _QUOTES + _BRACKETS + _HEADINGS_AND_DEGREES + _ENDS
)

LM1B: Rules = (
    _ADDRESSES + _APOSTROPHES + _PUNCTUATION + _SLASHES + _QUOTES + _BRACKETS + _MONEY + _ENDS
)

LAMBADA: Rules = _rules((r"[“”]", '"'), (r"\A\s*", "\n"), (r"\s+\Z", ""))

AG_NEWS: Rules = ()

SCIENTIFIC_PAPERS: Rules = (
    *_rules((r" *\n *", "\n")),
    *(_SEPARATORS + _ADDRESSES + _APOSTROPHES + _PUNCTUATION + _SLASHES + _QUOTES + _BRACKETS),
    *(_HEADINGS_AND_DEGREES + _MONEY + _ENDS),
)
"""The tokenised articles of the hub's `scientific_papers`: WikiText's rules and LM1B's."""

ABSTRACTS: Rules = _rules((r"\s+", " ")) + _ENDS
"""Abstracts as their authors wrote them: LaTeX in them would not survive LM1B's rule for `$`."""
