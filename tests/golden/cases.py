"""The drawings and runs whose numbers are kept.

Every case of a drawing is for settings in which rows never meet: whether texts that have become
equal by chance are read once or twice is nobody's promise, and would show in `passes`.
"""

from typing import Any

import numpy as np

from .tiny import END_ID, MASK, MASKED_LMS, PAD, shape_of

Json = dict[str, Any]


def canvas(name: str, kind: str, rows: int = 5, *, length: int | None = None, seed: int = 0) -> Any:
    """Rows of given tokens, masks and padding for a model.

    Kinds: `prompt` and `suffix` (a third is given), `gaps` (half is given, anywhere), `same` (one
    prompt for all), `padding` (prompts in rows of several lengths), `mixed` (gaps in rows of
    several lengths), `full` (one row has nothing to write), `front` (padding comes first).
    """
    random = np.random.default_rng([17, seed])
    first, last, longest = language(name)
    length = length or min(longest, 20)
    text = random.integers(first, last, (rows, length))
    if name.endswith("windows"):
        text[text == END_ID] = 0
    place = np.arange(length)[None].repeat(rows, 0)
    given = place < max(1, length // 3)
    if kind == "suffix":
        given = place >= length - length // 3
    elif kind in ("gaps", "mixed", "full"):
        given = random.random((rows, length)) < 0.5
    elif kind == "same":
        text[:] = text[:1]
    table = np.where(given, text, MASK)
    if kind == "full":
        table[0] = text[0]
    if kind in ("padding", "mixed"):
        lengths = length - random.permutation(rows) % (length // 2)
        table[place >= lengths[:, None]] = PAD
    if kind == "front":
        table[place < 2 + np.arange(rows)[:, None] % 3] = PAD
    return table.tolist()


def language(name: str) -> tuple[int, int, int]:
    """First token of a text, the one behind the last, and the longest text."""
    if name in MASKED_LMS:
        return *MASKED_LMS[name], 12
    shape = shape_of(name)
    extra = 0 if shape["kind"] == "duo" else shape["masks"]
    return 0, shape["vocab_size"] - extra, shape["length"]


def drawings() -> dict[str, Json]:
    """Cases of `Model.draw` by name."""
    cases: dict[str, Json] = {}

    def add(name: str, model: str, *, watched: bool = False, num: int = 6, **settings: Any) -> None:
        if "tokens" in settings:
            num = settings.pop("each", 1)
        draw = {"num": num, "seed": len(cases), **settings}
        assert name not in cases, name
        cases[name] = {"model": model, "draw": draw} | ({"watched": True} if watched else {})

    _of_ancestral(add)
    _of_guided(add)
    _of_others(add)
    _of_codes(add)
    _of_kinds(add)
    return cases


MASKED = ("plain", "timed", "cosine", "streams", "windows")


def _of_ancestral(add: Any) -> None:
    for model in MASKED:
        add(f"ancestral {model} blank", model, steps=8, watched=True)
        for kind in ("prompt", "gaps", "padding", "mixed"):
            add(f"ancestral {model} {kind}", model, steps=6, tokens=canvas(model, kind))
    add("ancestral short", "plain", steps=8, length=13)
    add("ancestral short window", "windows", steps=5, length=9)
    add("ancestral one step", "plain", steps=1)
    add("ancestral usual steps", "plain", num=3)
    add("ancestral batches", "plain", steps=6, num=7, batch_size=3)
    add("ancestral batches of windows", "windows", steps=6, num=7, batch_size=3)
    add("ancestral prompts in batches", "timed", steps=5, each=3, batch_size=4,
        tokens=canvas("timed", "prompt", 3))  # fmt: skip
    add("ancestral same prompt", "plain", steps=6, tokens=canvas("plain", "same"))
    add("ancestral suffix", "plain", steps=6, tokens=canvas("plain", "suffix"))
    add("ancestral front", "plain", steps=6, tokens=canvas("plain", "front"))
    add("ancestral nothing to write", "plain", steps=6, tokens=canvas("plain", "full"))
    add("ancestral cosine grid", "plain", steps=8, options={"grid": "cosine"})
    add("ancestral own grid", "plain", steps=4, options={"grid": [1.0, 0.9, 0.5, 0.2, 0.0]})
    for model in ("plain", "streams"):
        for order in ("random", "streams"):
            add(f"ancestral {model} in order {order}", model, steps=8, options={"order": order})
    add("ancestral streams with gaps", "plain", steps=5, options={"order": "streams"},
        tokens=canvas("plain", "mixed"))  # fmt: skip
    add("ancestral random with a grid", "streams", steps=6,
        options={"order": "random", "grid": "cosine"})  # fmt: skip
    add("ancestral greedy tail", "plain", steps=6, options={"greedy_tail": True})
    for name, law in LAWS.items():
        add(f"ancestral {name}", "plain", steps=6, **law)
        add(f"ancestral timed {name}", "timed", steps=6, tokens=canvas("timed", "gaps"), **law)


LAWS: dict[str, Json] = {
    "cold": {"temperature": 0.7},
    "hot": {"temperature": 1.5},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 7},
    "all three": {"temperature": 0.9, "top_p": 0.9, "top_k": 20},
}


def _of_guided(add: Any) -> None:
    for model in ("plain", "timed", "streams", "windows"):
        add(f"rgas {model} blank", model, steps=6, sampler="rgas", watched=True)
        for kind in ("gaps", "mixed"):
            add(f"rgas {model} {kind}", model, steps=6, sampler="rgas", tokens=canvas(model, kind))
    settings: dict[str, Json] = {
        "tilts": {"split": 1.0, "candidates": 1},
        "tilts gently": {"split": 1.0, "candidates": 1, "h_start": 0.5, "h_end": 2.0},
        "pushes away": {"split": 1.0, "candidates": 1, "h_start": -5.0, "h_end": -5.0},
        "begins without tilt": {"split": 0.6, "h_start": 0.0, "h_end": 10.0},
        "clamps": {"split": 0.5, "candidates": 1, "clamp": 0.01},
        "ranks": {"split": 0.0, "candidates": 3},
        "ranks best": {"split": 0.0, "candidates": 3, "select": "best"},
        "ranks means": {"split": 0.3, "candidates": 2, "score": "mean"},
        "best mean": {"split": 0.3, "candidates": 3, "score": "mean", "select": "best"},
        "neither": {"h_start": 0.0, "h_end": 0.0, "candidates": 1},
        "cosine grid": {"grid": "cosine"},
        "streams": {"order": "streams", "split": 0.5},
        "random": {"order": "random", "candidates": 2},
    }
    for name, options in settings.items():
        model = "streams" if name == "random" else "plain"
        add(f"rgas {name}", model, steps=6, sampler="rgas", options=options)
    for name, law in LAWS.items():
        add(f"rgas {name} law", "timed", steps=5, sampler="rgas", **law)
    add("rgas batches", "plain", steps=4, num=5, batch_size=2, sampler="rgas")
    add("rgas short", "plain", steps=4, length=11, sampler="rgas")
    add("rgas codes", "codes", steps=4, sampler="rgas")
    add("rgas codes tilts", "codes", steps=4, sampler="rgas", options=settings["tilts"])
    add("rgas coded windows", "coded-windows", steps=4, sampler="rgas")
    add("rgas codes neither", "codes", steps=4, sampler="rgas", options=settings["neither"])


def _of_others(add: Any) -> None:
    for sampler in ("confidence", "entropy", "margin"):
        add(f"{sampler} blank", "plain", steps=6, sampler=sampler, watched=True)
        add(f"{sampler} windows", "windows", steps=6, sampler=sampler)
        add(f"{sampler} mixed", "timed", steps=6, sampler=sampler, tokens=canvas("timed", "mixed"))
        threshold = {"confidence": 0.1, "entropy": 2.5, "margin": 0.03}[sampler]
        add(f"{sampler} threshold", "plain", sampler=sampler, options={"threshold": threshold})
        add(f"{sampler} law", "plain", steps=6, sampler=sampler, **LAWS["all three"])
        add(f"{sampler} batches", "cosine", steps=4, num=5, batch_size=2, sampler=sampler)
    for eta in (0.0, 0.05, 0.3):
        for strategy in ("cap", "rescale"):
            options = {"eta": eta, "strategy": strategy}
            add(f"remasking {eta} {strategy}", "plain", steps=8, sampler="remasking",
                options=options, watched=eta > 0.1)  # fmt: skip
    add("remasking gaps", "timed", steps=8, sampler="remasking", options={"eta": 0.2},
        tokens=canvas("timed", "mixed"))  # fmt: skip
    add("remasking windows", "windows", steps=6, sampler="remasking", options={"eta": 0.2})
    add("remasking cosine", "cosine", steps=6, sampler="remasking",
        options={"eta": 0.2, "grid": "cosine", "greedy_tail": True})  # fmt: skip
    for inner in ("ancestral", "confidence", "entropy", "margin"):
        options = {"block_length": 8, "inner": inner}
        add(f"blocks {inner}", "plain", steps=4, sampler="blocks", options=options, watched=True)
        add(f"blocks {inner} mixed", "timed", steps=3, sampler="blocks",
            options=options | {"block_length": 7}, tokens=canvas("timed", "mixed"))  # fmt: skip
    add("blocks windows", "windows", steps=3, sampler="blocks", options={"block_length": 5})
    add("blocks streams", "streams", steps=3, sampler="blocks", options={"block_length": 12})
    add("blocks one", "plain", steps=5, sampler="blocks")
    for model in ("plain", "timed", "windows"):
        add(f"first-hitting {model}", model, sampler="first-hitting", num=4, watched=True)
    add("first-hitting mixed", "cosine", sampler="first-hitting", tokens=canvas("cosine", "mixed"))
    add("first-hitting cold", "plain", sampler="first-hitting", num=3, **LAWS["cold"])
    for model in ("plain", "timed", "windows", "streams"):
        add(f"dimo {model}", model, steps=4, sampler="dimo", watched=True)
    add("dimo one step", "plain", steps=1, sampler="dimo")
    add("dimo start", "timed", steps=3, sampler="dimo", options={"random": 0.1, "noise": 0.5})
    add("dimo grid", "plain", steps=4, sampler="dimo", options={"random": 0, "grid": "cosine"})
    add("dimo mixed", "timed", steps=3, sampler="dimo", tokens=canvas("timed", "mixed"))
    add("dimo law", "plain", steps=3, num=5, batch_size=2, sampler="dimo", **LAWS["all three"])


def _of_codes(add: Any) -> None:
    for model in ("codes", "coded-windows"):
        for measured in (True, False):
            word = "measured" if measured else "unmeasured"
            settings = {"steps": 4, "measure_path": measured}
            add(f"{model} {word}", model, watched=measured, **settings)
            add(f"{model} {word} mixed", model, tokens=canvas(model, "mixed"), **settings)
        add(f"{model} tail", model, steps=4, options={"greedy_tail": True})
        add(f"{model} law", model, steps=4, **LAWS["all three"])
        add(f"{model} batches", model, steps=4, num=5, batch_size=2)
        add(f"{model} confidence", model, steps=4, sampler="confidence")
        add(f"{model} blocks", model, steps=2, sampler="blocks", options={"block_length": 8})
        add(f"{model} remasking", model, steps=4, sampler="remasking", options={"eta": 0.0})
    add("codes first-hitting", "codes", sampler="first-hitting", num=3, length=10)
    add("codes in streams", "codes", steps=5, options={"order": "streams"})
    add("codes refuse dimo", "codes", steps=2, sampler="dimo")


def _of_kinds(add: Any) -> None:
    add("duo blank", "duo", steps=6, watched=True)
    add("duo tail", "duo", steps=4, options={"grid": "cosine", "greedy_tail": True})
    add("duo law", "duo", steps=4, **LAWS["all three"])
    for kind in ("prompt", "mixed"):
        add(f"duo {kind}", "duo", steps=4, tokens=canvas("duo", kind))
    add("duo batches", "duo", steps=3, num=5, batch_size=2, length=9)
    for model in ("ar", "ar-ends"):
        add(f"{model} blank", model, watched=True)
        add(f"{model} law", model, **LAWS["all three"])
        for kind in ("prompt", "same", "padding"):
            add(f"{model} {kind}", model, tokens=canvas(model, kind))
        add(f"{model} batches", model, num=5, batch_size=2, length=12)
    add("ar refuses gaps", "ar", tokens=canvas("ar", "gaps"))
    add("ar refuses steps", "ar", steps=4)
    add("plain refuses a length", "plain", length=33)
    add("plain refuses a sampler", "plain", sampler="uniform-state")
    for model in MASKED_LMS:
        add(f"{model} blank", model, steps=5, watched=True)
        for kind in ("prompt", "mixed"):
            add(f"{model} {kind}", model, steps=4, tokens=canvas(model, kind))
        add(f"{model} confidence", model, steps=4, sampler="confidence", length=9)
        add(f"{model} blocks", model, steps=2, sampler="blocks", options={"block_length": 5})
        add(f"{model} first-hitting", model, sampler="first-hitting", num=3)


def writings() -> dict[str, Json]:
    """Cases of `Model.generate` by name."""
    words, ends = {"prompt": "Anna greets"}, {"prompt": "w1 w2 w3"}
    asked: dict[str, tuple[str, Json]] = {
        "blank": ("plain", {}),
        "a prompt": ("plain", words),
        "two prompts": ("plain", {"prompt": ["Anna greets this", "Boris"], "batch_size": 3}),
        "a suffix": ("plain", {**words, "suffix": "outside twice"}),
        "gaps": ("timed", {"infill": "Anna ___ this ___ boat today ( )", "gap": "auto:1-6"}),
        "gaps of a length": ("plain", {"infill": "Anna ___ boat", "gap": "4-9"}),
        "gaps with codes": ("codes", {"infill": "Anna ___ this cat ( )", "gap": "auto:2-5"}),
        "windows": ("windows", {}),
        "windows with a prompt": ("windows", ends),
        "windows of a length": ("windows", {**ends, "length": 9}),
        "gaps in windows": ("windows", {"infill": "w1 ___ w5 w7 w9", "gap": "auto:1-5"}),
        "guided gaps": ("windows", {"infill": "w1 ___ w5", "gap": "3", "sampler": "rgas"}),
        "coded windows": ("coded-windows", ends),
        "duo": ("duo", {**words, "length": 12}),
        "a duo's gap": ("duo", {"infill": "Anna ___ boat", "gap": "5"}),
        "from left to right": ("ar-ends", {**ends, "steps": None}),
        "BERT": ("bert", {"infill": "w1 ___ w3 w4", "gap": "auto:1-4"}),
        "ESM": ("esm", {"prompt": "MK", "length": 10}),
    }
    return {
        name: {"model": model, "generate": {"num": 3, "steps": 4, "seed": 40 + n, **settings}}
        for n, (name, (model, settings)) in enumerate(asked.items())
    }


def judgements() -> dict[str, Json]:
    """Cases of `Model.nelbo` and `Model.denoiser` by name."""
    names = ("plain", "timed", "cosine", "windows", "codes", "duo", "ar", "ar-ends", *MASKED_LMS)
    cases = {}
    for n, name in enumerate(names):
        first, last, longest = language(name)
        last = min(last, END_ID) if "windows" in name or "ends" in name else last
        random = np.random.default_rng([19, n])
        text = random.integers(first, last, (4, longest))
        if name in ("windows", "ar-ends"):
            ends = random.integers(4, longest, (4, 1))
            text = np.where(np.arange(longest) < ends, text, END_ID)
        cases[name] = {"model": name, "judge": text.tolist()}
    return cases


# Runs


def recipe(method: str, *, steps: int = 3, **changes: Any) -> Json:
    """Settings of a distillation of a blink in which all networks learn, some of them changed."""
    values: Json = {
        "method": method,
        "reference": {"source": "online", "steps": 2, "rows": 16},
        "discriminator": {"lr": 1e-3, "trainable_blocks": 1, "chance": 0.0, "saturation": 1.0},
        "token_matching": {"warmup": 0, "aux_lr": 1e-3, "aux_steps": 1, "budgets": [2, 4]},
        "mixture": {"codes": 3, "budgets": [2, 4]},
        "sdtt": {"steps": 8, "iterations": None},
        "dimo": {"aux_lr": 1e-3},
        "duo": {"steps": 8, "iterations": None},
        "optim": {"lr": 1e-3, "eps": 1e-6, "schedule": "linear"},
        "train": {
            "steps": steps, "batch_size": 8, "ema": 0.9, "log_every": 1, "save_every": 100,
            "eval_sequences": 8, "seed": 5,
        },
        "watch": {"budgets": [], "samples": 4, "min_entropy": 0.0},
    }  # fmt: skip
    for name, change in changes.items():
        values[name] = (
            values[name] | change if isinstance(change, dict) and name in values else change
        )
    return values


LINES = {
    "source": "@/lines.txt", "tokenizer": "@/windows", "documents": "line", "rows": "document",
    "valid": 8,
}  # fmt: skip
"""Texts that have windows of their own."""
WORDS = {"source": "oracle"}


def distillations() -> dict[str, Json]:
    """Cases of `didi_instruct.distill` by name."""
    bank, data = {"source": "bank"}, {"source": "data"}
    streams = {"order": "streams", "didi": {"rollout_steps": 3, "score_steps": "last"}}
    windows = {"data": LINES}
    state = {"grouping": "state", "group_size": 4, "score_steps": "last", "rollout_steps": 2}
    bare = {"score_decomposition": False, "coupled_time": False, "regularisation": False}
    listed: dict[str, tuple[str, str, Json]] = {
        "didi": ("didi", "plain", {"reference": bank, "watch": {"budgets": [2]}}),
        "didi online": ("didi", "timed", {}),
        "didi data": ("didi", "plain", {"reference": data, "data": WORDS}),
        "didi bare": ("didi", "plain", {"didi": bare}),
        "didi weighted": ("didi", "plain", {
            "didi": {"omega": "schedule", "pi": [2, 5], "importance_weighting": True}}),
        "didi tau": ("didi", "timed", {"didi": {"grouping": "tau", "group_size": 2,
            "baseline": "leave-one-out", "scale": "batch", "rollout_steps": 2}}),
        "didi state": ("didi", "plain", {"didi": state | {"scale": "none", "log_prob": "sum"}}),
        "didi kl": ("didi", "cosine", {"didi": {"kl": "jeffreys", "kl_weight": 0.5}}),
        "didi prompt": ("didi", "plain", {
            "prompt": 4, "data": WORDS, "didi": {"group_size": 4}, "reference": bank}),
        "didi streams": ("didi", "plain", streams | {"reference": bank}),
        "didi windows": ("didi", "windows", windows | {"reference": bank}),
        "didi discriminator": ("didi", "plain", {"discriminator": {
            "trainable_blocks": None, "steps": 2, "positions": "masked", "label_smoothing": 0.0}}),
        "didi gates": ("didi", "plain", {"discriminator": {"chance": 0.5, "saturation": 0.52}}),
        "didi warm-up": ("didi", "plain", {"discriminator": {"warmup": 1}}),
        "didi parts": ("didi", "plain", {"train": {"micro_batch": 4, "log_every": 2}}),
        "didi other student": ("didi", "plain", {"student": "@/other", "train": {"ema": 0.0}}),
        "token-matching": ("token-matching", "plain", {"watch": {"budgets": [2]}}),
        "token-matching anchored": ("token-matching", "timed", {
            "token_matching": {"anchor": 1.0, "kl": "backward", "ratio_clip": 0.5}}),
        "token-matching completed": ("token-matching", "plain", {
            "token_matching": {"contexts": 2, "completion": 1.0, "anchor": 0.5}}),
        "token-matching streams": ("token-matching", "streams", {
            "order": "streams", "token_matching": {"contexts": 4, "completion": 0.5}}),
        "token-matching windows": ("token-matching", "windows", windows),
        "token-matching prompt": ("token-matching", "plain", {"prompt": 5, "data": WORDS}),
        "token-matching warm-up": ("token-matching", "plain", {
            "token_matching": {"warmup": 1, "aux_steps": 2}}),
        "mixture": ("mixture", "plain", {"reference": bank, "watch": {"budgets": [2]}}),
        "mixture streams": ("mixture", "plain", {
            "order": "streams", "mixture": {"random": 0.5, "learning": 3}}),
        "mixture windows": ("mixture", "windows", windows | {"reference": data}),
        "mixture grown": ("mixture", "plain", {"student": "@/codes", "mixture": {"codes": 6}}),
        "sdtt": ("sdtt", "plain", {"reference": bank, "watch": {"budgets": [2]}}),
        "sdtt published": ("sdtt", "timed", {"sdtt": {"grid": "published", "divergence": "tv"}}),
        "sdtt forward": ("sdtt", "plain", {
            "sdtt": {"divergence": "forward", "iterations": 3}, "train": {"ema": 0.0}}),
        "sdtt windows": ("sdtt", "windows", windows | {
            "reference": data, "sdtt": {"divergence": "mse"}}),
        "dimo": ("dimo", "plain", {"watch": {"budgets": [1]}}),
        "dimo steps": ("dimo", "timed", {"dimo": {
            "budgets": [1, 3], "beta": 0.5, "remask": "uniform", "aux_steps": 2}}),
        "dimo windows": ("dimo", "windows", windows | {"dimo": {"random": 0.1, "noise": 0.3}}),
        "duo": ("duo", "duo", {"data": WORDS, "watch": {"budgets": [2]}}),
        "duo gaussian": ("duo", "duo", {
            "data": WORDS, "duo": {"clock": "gaussian", "kl": "jeffreys", "target": "student"}}),
        "duo forward": ("duo", "duo", {"data": WORDS, "duo": {"kl": "forward", "iterations": 3}}),
    }  # fmt: skip
    return {
        name: {"teacher": teacher, "recipe": recipe(method, **changes)}
        for name, (method, teacher, changes) in listed.items()
    }


def pretrainings() -> dict[str, Json]:
    """Cases of `didi_instruct.pretrain` by name."""
    size = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "length": 32}
    listed: dict[str, tuple[Json, Json]] = {
        "mdlm": ({"learned_positions": True}, {"data": WORDS}),
        "mdlm timed": ({"time_conditioning": True}, {"data": WORDS}),
        "mdlm windows": ({"own_window": True, "length": 16}, {"data": LINES}),
        "ar": ({"kind": "ar"}, {"data": WORDS}),
        "ar windows": ({"kind": "ar", "own_window": True, "length": 16}, {"data": LINES}),
        "duo": ({"kind": "duo"}, {"data": WORDS}),
        "duo curriculum": ({"kind": "duo"}, {
            "data": WORDS,
            "curriculum": {"steps": 2, "temperature": [1e-2, 1e-3], "tokens": 4}}),
    }  # fmt: skip
    train = recipe("didi")["train"]
    optim = {"lr": 1e-3, "eps": 1e-6, "schedule": "linear", "warmup": 1}
    return {
        name: {"recipe": {"model": size | model, "train": train, "optim": optim, **changes}}
        for name, (model, changes) in listed.items()
    }


RESUMPTIONS = [
    ("distillations", "didi", 1),
    ("distillations", "didi warm-up", 1),
    ("distillations", "didi gates", 1),
    ("distillations", "token-matching completed", 1),
    ("distillations", "token-matching warm-up", 1),
    ("distillations", "mixture", 1),
    ("distillations", "sdtt", 2),
    ("distillations", "dimo", 1),
    ("distillations", "duo", 1),
    ("pretrainings", "mdlm windows", 1),
    ("pretrainings", "duo curriculum", 2),
]
"""Runs to break, and the iteration that is the last to be logged before: one of each method.

The signal comes while that iteration is logged, so the next one still ends; where it is the last,
the evaluation behind it is cut off.
"""


def every() -> dict[str, dict[str, Json]]:
    """All cases by kind and name."""
    return {
        "drawings": drawings(),
        "writings": writings(),
        "judgements": judgements(),
        "distillations": distillations(),
        "pretrainings": pretrainings(),
    }
