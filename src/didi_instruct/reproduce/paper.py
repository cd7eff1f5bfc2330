"""The paper's numbers, table by table, as printed; what it only draws is not here.

Perplexity is that of GPT-2 Large, entropy the mean unigram entropy of a text in nats; length 1024,
OpenWebText. The pictures of Figure 1, of the 424M models and of the RGAS landscape are not in the
source, so of those only what the text says is known. Names in comments are the tables' labels.
"""

from collections.abc import Mapping
from typing import NamedTuple

NFES = (8, 16, 32, 64, 128)
"""Columns of the tables of generation."""


class Cell(NamedTuple):
    """Quality of samples; None where the paper says nothing."""

    ppl: float | None
    entropy: float | None = None


class Printed(NamedTuple):
    """A row of a table by NFE, and the words that name it."""

    label: str
    cells: Mapping[int, Cell]


class Variety(NamedTuple):
    """MAUVE and Self-BLEU of one method at one budget, as shares."""

    mauve: float
    self_bleu: float


class Speed(NamedTuple):
    """A row of the table of latency."""

    nfe: int
    tokens_per_second: float
    seconds_per_1k: float


class Likelihood(NamedTuple):
    """A model of the zero-shot table and its perplexities, in the order of `CORPORA`."""

    family: str
    ppl: tuple[float, ...]


def _row(label: str, *numbers: float) -> Printed:
    """Perplexity and entropy by turns, one pair for each budget."""
    pairs = zip(NFES, numbers[::2], numbers[1::2], strict=True)
    return Printed(label, {nfe: Cell(ppl, entropy) for nfe, ppl, entropy in pairs})


# tab:cumulative:ablation, Table 1. Rows by the recipe that makes them.
CUMULATIVE: Mapping[str, Printed] = {
    "ablation-cumulative-0-baseline": _row(
        "Baseline (no tricks)",
        803.922, 5.85, 311.450, 5.76, 174.789, 5.70, 113.112, 5.61, 96.649, 5.59,
    ),
    "ablation-cumulative-1-score-decomposition": _row(
        "+ Score Decompose",
        667.830, 5.83, 289.720, 5.76, 165.809, 5.70, 105.880, 5.61, 89.350, 5.59,
    ),
    "ablation-cumulative-2-coupled-time": _row(
        "+ Coupled Time t",
        101.019, 5.16, 75.188, 5.46, 48.441, 5.35, 35.833, 5.37, 30.574, 5.33,
    ),
    "ablation-cumulative-3-omega": _row(
        "+ ω(t) Correction",
        94.955, 5.21, 75.607, 5.22, 31.651, 5.20, 25.271, 5.16, 20.980, 5.12,
    ),
    "ablation-cumulative-4-pi": _row(
        "+ π(t) Weighting",
        92.100, 5.15, 43.997, 5.17, 32.276, 5.21, 26.079, 5.21, 21.377, 5.13,
    ),
    "ablation-cumulative-5-regularisation": _row(
        "+ Regularization",
        88.274, 5.11, 43.980, 5.16, 28.444, 5.12, 21.946, 5.06, 18.325, 5.00,
    ),
    "ablation-cumulative-6-guidance": _row(
        "+ Guided Inference",
        62.236, 5.17, 38.188, 5.21, 24.971, 5.18, 21.905, 5.15, 18.446, 5.15,
    ),
}  # fmt: skip

# tab:leave_one_out_ablation_en, Table 2. Its last row is the last of Table 1, the row without
# guidance the one before.
LEAVE_ONE_OUT: Mapping[str, Printed] = {
    "ablation-without-score-decomposition": _row(
        "w/o Score Decompose",
        33584, 6.77, 28962, 6.77, 23134, 6.75, 14634, 6.64, 7983, 6.51,
    ),
    "ablation-without-coupled-time": _row(
        "w/o Coupled Time t",
        360.75, 5.42, 159.43, 5.43, 94.859, 5.45, 64.639, 5.35, 51.121, 5.39,
    ),
    "ablation-without-omega": _row(
        "w/o ω(t) Correction",
        82.489, 5.12, 41.034, 5.13, 30.313, 5.09, 25.125, 5.04, 18.806, 5.02,
    ),
    "ablation-without-pi": _row(
        "w/o π(t) Weighting",
        69.656, 5.22, 40.499, 5.17, 25.799, 5.15, 21.503, 5.16, 19.616, 5.14,
    ),
    "ablation-without-regularisation": _row(
        "w/o Regularization",
        84.594, 5.20, 30.994, 5.22, 23.603, 5.20, 19.609, 5.18, 17.499, 5.17,
    ),
    "ablation-without-guidance": _row(
        "w/o Guided Inference",
        88.274, 5.11, 43.980, 5.16, 28.444, 5.12, 21.946, 5.06, 18.325, 5.00,
    ),
    "ablation-all-tricks": _row(
        "Baseline (with all tricks)",
        62.236, 5.17, 38.188, 5.21, 24.971, 5.18, 21.905, 5.15, 18.446, 5.15,
    ),
}  # fmt: skip

# fig:ppl_sampling (Figure 1) and the text on generation results. Perplexities of the student are
# those of Table 1's last row, which the abstract quotes (62.2, 18.4); the text has its entropies.
# Of MDLM with few steps, SDTT and DUO the paper prints nothing.
GENERATION: Mapping[str, Printed] = {
    "gpt2": Printed("GPT-2 (AR, 162M)", {1024: Cell(37.50)}),
    "teacher": Printed("MDLM, the teacher (169M)", {1024: Cell(38.53, 5.22)}),
    "didi": Printed(
        "DiDi-Instruct (169M)",
        {**CUMULATIVE["ablation-cumulative-6-guidance"].cells, 1024: Cell(15.62)},
    ),
}

# appendix:sec:samples, above the texts. From 16 NFEs on these are the perplexities of the row
# without regularisation, not of all tricks; so is the 30.99 of the first page.
SAMPLES: Mapping[str, Printed] = {
    "teacher": Printed("MDLM, the teacher (169M)", {1024: Cell(40.48, 5.22)}),
    "didi": Printed(
        "DiDi-Instruct (169M)",
        {
            8: Cell(62.24, 5.17),
            16: Cell(30.99, 5.22),
            32: Cell(23.60, 5.20),
            64: Cell(19.61, 5.18),
            128: Cell(17.50, 5.17),
        },
    ),
}


def _variety(mauve: tuple[float, ...], self_bleu: tuple[float, ...]) -> Mapping[int, Variety]:
    """MAUVE as printed, in thousandths, and Self-BLEU, in hundredths."""
    pairs = zip(NFES, mauve, self_bleu, strict=True)
    return {nfe: Variety(m / 1000, b / 100) for nfe, m, b in pairs}


# tab:mauve_selfbleu; 1,024 samples. The text calls DiDi-Instruct's MAUVE the highest everywhere:
# at 16 NFEs MDLM's is.
DIVERSITY: Mapping[str, Mapping[int, Variety]] = {
    "teacher": _variety((4.77, 6.76, 6.46, 5.50, 5.97), (2.91, 4.58, 6.36, 7.97, 9.33)),
    "sdtt": _variety((5.60, 5.38, 5.70, 5.04, 5.96), (5.02, 7.98, 10.09, 12.49, 12.92)),
    "duo": _variety((5.75, 5.15, 5.99, 5.85, 6.05), (8.26, 9.28, 9.62, 8.84, 8.94)),
    "didi": _variety((5.84, 6.55, 6.54, 6.14, 6.31), (4.82, 4.64, 5.24, 6.25, 8.24)),
}

# tab:latency_full; one H100, bfloat16, batches of 16, length 1024, "at matched perplexity".
LATENCY: Mapping[str, Speed] = {
    "ar": Speed(1024, 179.042, 5.719),
    "teacher": Speed(512, 111.146, 9.213),
    "sdtt": Speed(64, 806.498, 1.269),
    "didi": Speed(16, 2366.604, 0.432),
}

# table:zeroshot:ppl; all but "Ours" and "DUO distilled" are taken from other papers.
CORPORA = ("ptb", "wikitext", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")
"""Columns of the zero-shot table, by the names that `didi eval` has for them."""
ZERO_SHOT: Mapping[str, Likelihood] = {
    "GPT2": Likelihood("AR", (82.05, 41.60, 51.25, 45.04, 52.09, 49.01, 41.73)),
    "SEDD": Likelihood("MDMs", (100.09, 40.62, 68.20, 50.92, 62.09, 44.53, 38.48)),
    "MDLM": Likelihood("MDMs", (95.26, 32.83, 67.01, 47.52, 61.15, 41.89, 37.37)),
    "SEDD uniform": Likelihood("USDMs", (105.51, 49.60, 82.62, 65.40, 82.64, 55.89, 50.86)),
    "UDLM": Likelihood("USDMs", (112.82, 39.42, 77.59, 53.57, 80.96, 50.98, 44.08)),
    "DUO base": Likelihood("USDMs", (89.35, 33.57, 73.86, 49.78, 67.81, 44.48, 40.39)),
    "DUO distilled": Likelihood("Distilled", (112.27, 42.53, 89.45, 61.17, 88.70, 56.17, 50.27)),
    "DiDi-Instruct": Likelihood("Distilled", (107.03, 35.20, 80.58, 53.62, 78.36, 47.56, 45.35)),
}

# fig:rgas_sensitivity; the picture's numbers are not in the source.
LANDSCAPE_NFE, LANDSCAPE_SAMPLES = 16, 16

# tab:fanova_results; shares of the variance of perplexity, main effects of h and M. Those of 16
# NFEs leave 4% to both together, those of 8 and 32 nothing.
ANOVA: Mapping[int, Mapping[str, float]] = {
    8: {"h": 0.927, "candidates": 0.073},
    16: {"h": 0.900, "candidates": 0.060},
    32: {"h": 0.637, "candidates": 0.363},
}
ANOVA_POINTS = 1000
ANOVA_SCALES = (20.0, 60.0)
ANOVA_CANDIDATES = (1, 32)

# fig:scaling_results and the two sections on the 424M models. One perplexity is printed, the
# student's at 16 NFE; those that follow from it by the percentages are rounded to a tenth, which is
# about what three digits of a percentage leave of them.
SCALING_GAIN: Mapping[int, float] = {
    8: 0.885, 16: 0.877, 32: 0.853, 64: 0.827, 128: 0.790, 1024: 0.642,
}  # fmt: skip
"""Share by which the student's perplexity lies below the teacher's at the same NFE."""
SCALING_BELOW_MOST: Mapping[int, float] = {16: 0.114, 64: 0.568, 128: 0.612, 1024: 0.642}
"""The same below the teacher's of 1,024 NFE."""
SCALING_PRINTED = 32.79


def _derived() -> tuple[dict[int, float], dict[int, float]]:
    """Perplexities of the 424M teacher and student that follow from the one that is printed."""
    most = SCALING_PRINTED / (1 - SCALING_BELOW_MOST[16])
    student = {nfe: most * (1 - below) for nfe, below in SCALING_BELOW_MOST.items()}
    teacher = {nfe: ppl / (1 - SCALING_GAIN[nfe]) for nfe, ppl in student.items() if nfe < 1024}
    rounded = [{n: round(p, 1) for n, p in found.items()} for found in (teacher, student)]
    return rounded[0] | {1024: round(most, 1)}, rounded[1] | {16: SCALING_PRINTED}


_TEACHER, _STUDENT = _derived()
SCALING: Mapping[str, Printed] = {
    "teacher": Printed(
        "MDLM, the teacher (424M)",
        {nfe: Cell(ppl) for nfe, ppl in _TEACHER.items()}
        | {
            16: Cell(_TEACHER[16], 5.75),
            512: Cell(None, 5.43),
            1024: Cell(_TEACHER[1024], 5.32),
        },
    ),
    "didi": Printed(
        "DiDi-Instruct (424M)",
        {nfe: Cell(_STUDENT.get(nfe)) for nfe in NFES}
        | {16: Cell(32.79, 5.52), 512: Cell(None, 5.43), 1024: Cell(_STUDENT[1024], 5.40)},
    ),
}

# tab:mmlu_sft: NLL and accuracy before and after fine-tuning.
MMLU: Mapping[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "teacher": ((9.879, 0.206), (2.814, 0.253)),
    "sdtt": ((9.773, 0.212), (2.844, 0.243)),
    "didi": ((9.960, 0.216), (2.815, 0.251)),
}

# tab:pubmed_sft: NLL and perplexity before and after fine-tuning.
PUBMED: Mapping[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "teacher": ((3.761, 42.983), (3.217, 24.944)),
    "sdtt": ((3.938, 51.336), (3.243, 25.602)),
    "duo": ((4.028, 56.174), (3.338, 27.734)),
    "didi": ((3.879, 47.563), (3.215, 24.894)),
}

# tab:mrpc_frozen: accuracy and F1 on the validation split.
MRPC: Mapping[str, tuple[float, float]] = {
    "teacher": (0.596, 0.722),
    "sdtt": (0.591, 0.720),
    "didi": (0.623, 0.733),
}

# tab:protein_diversity: entropy of MMseqs2 clusters (nats) by length, and their average size. With
# 40 chains a cell the entropy is ln 40 = 3.689 at most, printed as 3.68. The figure of pLDDT is not
# in the source.
PROTEIN_LENGTHS = (100, 200, 300, 400, 500)
PROTEIN_DIVERSITY: Mapping[str, Mapping[int, tuple[tuple[float, ...], float]]] = {
    "teacher": {
        32: ((3.68, 3.68, 3.55, 3.65, 3.68), 1.02),
        64: ((3.68, 3.51, 3.45, 3.68, 3.53), 1.07),
        128: ((3.68, 3.65, 3.50, 3.52, 3.61), 1.05),
        256: ((3.61, 3.42, 3.41, 3.19, 3.44), 1.19),
        512: ((3.58, 3.23, 3.02, 3.11, 2.97), 1.41),
    },
    "didi": {
        32: ((3.68, 3.52, 3.15, 3.58, 3.55), 1.11),
        64: ((3.68, 3.65, 3.45, 3.45, 3.54), 1.09),
        128: ((3.62, 3.20, 3.42, 3.45, 3.38), 1.21),
        256: ((3.61, 3.11, 3.41, 2.87, 3.07), 1.40),
        512: ((3.54, 3.11, 2.95, 2.77, 2.79), 1.53),
    },
}

# README of bytedance/dplm, not the paper: mean pLDDT of DPLM-150M after 500 iterations of its own
# decoder, by length.
DPLM_PLDDT: Mapping[int, float] = {100: 73.31, 200: 84.30, 300: 84.82, 400: 86.90, 500: 81.71}
