"""Random settings of drawings and of runs, for `compare_versions.py`.

A setting is a function of the seed and its name, so that one of them can be asked for again. Most
of them make sense; some must be refused, and then every version has to refuse them.
"""

import random
from typing import Any

from tests.golden.cases import LINES, WORDS, canvas, language, recipe
from tests.golden.tiny import GUIDED, MASK, MASKED_LMS, PAD, shape_of

Json = dict[str, Any]

CANVASES = ("prompt", "suffix", "gaps", "same", "padding", "mixed", "full", "front")
MASKED = ("plain", "timed", "cosine", "streams", "windows", "codes", "coded-windows")
METHODS = ("didi", "token-matching", "mixture", "sdtt", "dimo", "duo")


def setting(seed: int, name: str) -> Json:
    """The case `KIND-NUMBER`; kinds are `drawing`, `distillation` and `pretraining`."""
    kind, number = name.rsplit("-", 1)
    make = {"drawing": drawing, "distillation": distillation, "pretraining": pretraining}[kind]
    return make(random.Random(f"{seed} {kind} {number}"), int(number))


# Drawings


def drawing(r: random.Random, number: int) -> Json:
    """A case of `Model.draw`."""
    model = r.choices(
        [*MASKED, *MASKED_LMS, "duo", "ar", "ar-ends"], [6, 5, 3, 4, 4, 3, 3, 1, 1, 3, 1, 1]
    )[0]
    kind = "mdlm" if model in MASKED_LMS else shape_of(model)["kind"]
    draw: Json = {"seed": r.randrange(1 << 31), "num": r.randint(1, 6)}
    draw |= _law(r) | _canvas(r, model)
    if r.random() < 0.3:
        draw["batch_size"] = r.randint(1, 4)
    if r.random() < 0.3:
        draw["measure_path"] = False
    counts = _mdlm(r, model, draw) if kind == "mdlm" else kind == "ar"
    if kind == "duo":
        draw["options"] = _some(r, grid=_grid(r, draw), greedy_tail=r.random() < 0.5)
    if not counts and r.random() < 0.95:
        draw.setdefault("steps", r.choice([1, 2, 3, 4, 5, 6, 8, 11, 16]))
    if counts:
        draw.pop("steps", None)
    if r.random() < 0.06:
        _spoil(r, draw)
    return {"model": model, "draw": draw} | ({"watched": True} if r.random() < 0.25 else {})


def _spoil(r: random.Random, draw: Json) -> None:
    """Make one setting wrong, or such as does not go with others."""
    options: list[Json] = [
        {"eta": 1.5}, {"eta": -0.1}, {"strategy": "other"}, {"candidates": 0}, {"split": 1.2},
        {"clamp": 0.0}, {"score": "other"}, {"select": "other"}, {"h_start": "nan"},
        {"block_length": 0}, {"inner": "rgas"}, {"grid": "other"}, {"grid": [1.0, 0.5]},
        {"order": "other"}, {"noise": 1.0}, {"threshold": 0.5}, {"greedy": True},
    ]  # fmt: skip
    settings: list[Json] = [
        {"steps": 5}, {"steps": 5}, {"steps": 0}, {"num": 0}, {"length": 40}, {"length": 0},
        {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": 0}, {"top_k": 200},
        {"batch_size": 0}, {"sampler": "other"}, {"sampler": "rgas"}, {"sampler": "dimo"},
        {"sampler": "uniform-state"}, {"sampler": "autoregressive"}, {"seed": -3},
        {"tokens": [[99]]}, {"tokens": [[PAD, PAD]]}, {"tokens": [[1, 2], [3, MASK]]},
        {"gap": "3"}, {"prompt": "Anna"},
    ]  # fmt: skip
    if r.random() < 0.4:
        draw["options"] = draw.get("options", {}) | r.choice(options)
    else:
        draw |= r.choice(settings)


def _law(r: random.Random) -> Json:
    law: Json = {}
    if r.random() < 0.3:
        law["temperature"] = r.choice([0.0, 0.5, 0.8, 1.3, round(r.uniform(0.3, 2.0), 3)])
    if r.random() < 0.25:
        law["top_p"] = round(r.uniform(0.3, 0.99), 3)
    if r.random() < 0.2:
        law["top_k"] = r.randint(1, 30)
    return law


def _canvas(r: random.Random, model: str) -> Json:
    longest = language(model)[2]
    if r.random() < 0.45:
        return {"length": r.randint(2, longest)} if r.random() < 0.5 else {}
    kinds = CANVASES
    if model in ("ar", "ar-ends"):
        kinds = ("prompt", "same", "padding", "gaps") if r.random() < 0.05 else CANVASES[:1]
        kinds = (*kinds, "same", "padding")
    length = r.randint(6, longest)
    table = canvas(
        model, r.choice(kinds), r.randint(1, 5), length=length, seed=r.randrange(1 << 20)
    )
    return {"tokens": table, "num": r.randint(1, 2)}


def _grid(r: random.Random, draw: Json) -> Any:
    name = r.choice([None, "uniform", "cosine", "own"])
    if name != "own":
        return name
    steps = draw["steps"] = r.randint(1, 6)
    inner = sorted((round(r.uniform(0.02, 0.98), 4) for _ in range(steps - 1)), reverse=True)
    return [1.0, *inner, 0.0]


def _some(r: random.Random, **options: Any) -> Json:
    """Options that are said, at random."""
    return {k: v for k, v in options.items() if v is not None and r.random() < 0.6}


def _mdlm(r: random.Random, model: str, draw: Json) -> bool:
    """Choose sampler and options; True where it counts tokens instead of steps."""
    names = [None, "ancestral", "confidence", "entropy", "margin", "blocks", "first-hitting"]
    names += ["remasking"] * 2 + (["dimo", "dimo"] if model not in MASKED_LMS else [])
    names += ["rgas"] * 5 if model in GUIDED or r.random() < 0.02 else []
    name = r.choice(names)
    order = r.choice(["random", "streams", None])
    counts = name == "first-hitting"
    options: Json = {}
    if name in ("ancestral", "rgas"):
        options = _some(r, order=order)
        if options.get("order", shape_order(model)) != "streams" or r.random() < 0.03:
            options |= _some(r, grid=_grid(r, draw))
    if name == "ancestral":
        options |= _some(r, greedy_tail=r.random() < 0.5)
    if name == "rgas":
        options |= _guidance(r)
    if name in ("confidence", "entropy", "margin") and r.random() < 0.3:
        most = 3.0 if name == "entropy" else 0.3
        options, counts = {"threshold": round(r.uniform(0.01, most), 3)}, True
    if name == "remasking":
        options = _some(
            r, strategy=r.choice(["cap", "rescale", "rescale"]), greedy_tail=r.random() < 0.3
        )
        options |= {"eta": r.choice([0.0, 0.05, 0.3, 0.7, 1.0]), **_some(r, grid=_grid(r, draw))}
    if name == "blocks":
        inner = r.choice(["ancestral", "confidence", "entropy", "margin"])
        options = {"block_length": r.randint(1, 16), "inner": inner}
    if name == "dimo":
        shares = {"random": round(r.uniform(0, 0.9), 3), "noise": round(r.uniform(0, 0.9), 3)}
        options = _some(r, **shares, grid=_grid(r, draw))
    draw |= ({"sampler": name} if name else {}) | ({"options": options} if options else {})
    return counts


def shape_order(model: str) -> str:
    """The order of a model that may be one of `transformers`."""
    return "random" if model in MASKED_LMS else shape_of(model)["order"]


def _guidance(r: random.Random) -> Json:
    h = [r.choice([0.0, 1.0, 30.0, -4.0, round(r.uniform(-10, 60), 2)]) for _ in range(2)]
    return _some(
        r,
        h_start=h[0],
        h_end=h[1],
        candidates=r.randint(1, 5),
        split=r.choice([0.0, 1.0, 0.5, round(r.random(), 3)]),
        score=r.choice(["sum", "mean"]),
        select=r.choice(["sample", "best"]),
        clamp=r.choice([0.01, 0.3, 1.0, 5.0]),
    )


# Runs


def distillation(r: random.Random, number: int, method: str | None = None) -> Json:
    """A case of `didi_instruct.distill`; methods take turns."""
    method = method or METHODS[number % len(METHODS)]
    teacher = r.choice(["plain", "timed", "cosine", "windows"])
    if method == "token-matching" and r.random() < 0.15:
        teacher = "streams"
    changes: Json = {}
    order = "random"
    if method in ("didi", "token-matching", "mixture"):
        order = r.choice(["random", "random", "streams"])
        order = "streams" if teacher == "streams" else order
        changes["order"] = order
    if method == "duo":
        teacher = "duo"
    prompt = 0 if method == "duo" or r.random() < 0.75 else r.randint(1, 9)
    source = r.choice(["bank", "online", "data"])
    reads = prompt or method == "duo" or source == "data" or r.random() < 0.2
    if reads and r.random() < 0.98:
        changes["data"] = LINES if teacher == "windows" else WORDS
    changes["prompt"] = prompt
    changes["reference"] = {"source": source, "steps": r.randint(1, 3), "seed": r.randrange(9)}
    section = {"token-matching": "token_matching"}.get(method, method)
    changes[section] = _SECTIONS[method](r, order)
    if method == "didi":
        changes["discriminator"] = _discriminator(r)
    if r.random() < 0.12 and method != "duo":
        changes["student"] = "@/other-windows" if teacher == "windows" else "@/other"
    group = _group(method, changes, prompt)
    changes["train"] = _train(r, group)
    changes["optim"] = _optim(r)
    if r.random() < 0.1:
        changes["watch"] = {"budgets": [r.randint(1, 3)]}
    return {"teacher": teacher, "recipe": recipe(method, **changes)}


def _group(method: str, changes: Json, prompt: int) -> int:
    if method == "token-matching":
        return int(changes["token_matching"]["contexts"])
    if method != "didi" or (changes["didi"]["grouping"] == "batch" and not prompt):
        return 1
    return int(changes["didi"]["group_size"])


def _train(r: random.Random, group: int) -> Json:
    batch = max(2, group) * r.choice([1, 2, 3])
    if r.random() < 0.02:
        batch += 1
    train = {"batch_size": batch, "seed": r.randrange(100), "ema": r.choice([0.0, 0.5, 0.9])}
    train["log_every"] = r.choice([1, 1, 2])
    train["micro_batch"] = r.choice([None, None, 1, 2, 4])
    if r.random() < 0.15:
        train["eval_every"] = 2
    return train


def _optim(r: random.Random) -> Json:
    return {
        "lr": r.choice([1e-4, 1e-3]),
        "schedule": r.choice(["cosine", "linear", "constant"]),
        "warmup": r.choice([0, 0, 2]),
        "clip": r.choice([0.0, 0.1, 1.0]),
        "weight_decay": r.choice([0.0, 0.05]),
        "final": r.choice([0.0, 0.2]),
    }


def _didi(r: random.Random, order: str) -> Json:
    decomposes = order == "streams" or r.random() < 0.85
    grouping = r.choice(["batch", "batch", "tau", "state"] if decomposes else ["batch", "tau"])
    last = decomposes and (order == "streams" or grouping == "state" or r.random() < 0.4)
    steps = r.randint(2, 4) if order == "streams" else r.randint(1, 3) if decomposes else 1
    if r.random() < 0.02:
        steps, last = 1, not last
    return {
        "pi": r.choice([[1, 1], [2, 5], [5, 2]]),
        "omega": r.choice(["constant", "schedule"]),
        "importance_weighting": r.random() < 0.3,
        "score_decomposition": decomposes,
        "coupled_time": r.random() < 0.7,
        "rollout_steps": steps,
        "score_steps": "last" if last else "all",
        "log_prob": r.choice(["mean", "sum"]),
        "grouping": grouping,
        "group_size": r.choice([2, 3, 4]),
        "baseline": r.choice(["mean", "leave-one-out"]),
        "scale": r.choice(["group", "batch", "none"]),
        "advantage_clip": r.choice([0.0, 1.0, 5.0]),
        "regularisation": r.random() < 0.8,
        "kl": r.choice(["forward", "backward", "jeffreys"]),
        "kl_weight": r.choice([0.0, 0.05, 1.0]),
        "entropy_weight": r.choice([0.0, 0.0005, 0.1]),
    }


def _discriminator(r: random.Random) -> Json:
    return {
        "trainable_blocks": r.choice([0, 1, 2, None, None]),
        "label_smoothing": r.choice([0.0, 0.1]),
        "positions": r.choice(["all", "masked"]),
        "steps": r.choice([1, 1, 2]),
        "warmup": r.choice([0, 0, 1]),
        "chance": r.choice([0.0, 0.0, 0.52]),
        "saturation": r.choice([1.0, 1.0, 0.95]),
    }


def _token_matching(r: random.Random, order: str) -> Json:
    contexts = r.randint(1, 3)
    return {
        "budgets": r.choice([[4], [2, 4], [1, 3, 8]]),
        "contexts": contexts,
        "aux_steps": r.choice([1, 2]),
        "warmup": r.choice([0, 0, 1]),
        "ratio_clip": r.choice([0.0, 0.3, 5.0]),
        "anchor": r.choice([0.0, 0.5]),
        "kl": r.choice(["forward", "backward", "jeffreys"]),
        "completion": r.choice([0.0, 1.0]) if contexts > 1 or r.random() < 0.02 else 0.0,
    }


def _mixture(r: random.Random, order: str) -> Json:
    return {
        "codes": r.randint(1, 4),
        "budgets": r.choice([[4], [2, 4], [1, 3, 8]]),
        "random": r.choice([0.0, 0.0, 0.5, 1.0]),
        "learning": r.randint(1, 3),
        "spread": r.choice([0.0, 1.0, 3.0]),
    }


def _sdtt(r: random.Random, order: str) -> Json:
    return {
        "steps": r.choice([4, 8, 16]),
        "iterations": r.choice([None, None, 1, 3, 3]),
        "divergence": r.choice(["backward", "forward", "mse", "tv"]),
        "grid": r.choice(["even", "published"]),
    }


def _dimo(r: random.Random, order: str) -> Json:
    return {
        "random": r.choice([0.0, 0.1, 0.4, 0.8]),
        "noise": r.choice([0.0, 0.1, 0.5]),
        "budgets": r.choice([[1], [1, 2], [3]]),
        "beta": r.choice([0.0, 1.0, -0.2, 0.3]),
        "remask": r.choice(["arccos", "uniform"]),
        "aux_steps": r.choice([1, 2]),
        "warmup": r.choice([0, 0, 1]),
    }


def _duo(r: random.Random, order: str) -> Json:
    return {
        "steps": r.choice([4, 8, 64]),
        "iterations": r.choice([None, None, 1, 3]),
        "target": r.choice(["average", "student"]),
        "kl": r.choice(["forward", "backward", "jeffreys"]),
        "clock": r.choice(["schedule", "gaussian"]),
        "gamma": r.choice([[-4.0, -1.0], [-3.0, 0.5]]),
    }


_SECTIONS = {
    "didi": _didi,
    "token-matching": _token_matching,
    "mixture": _mixture,
    "sdtt": _sdtt,
    "dimo": _dimo,
    "duo": _duo,
}


def pretraining(r: random.Random, number: int) -> Json:
    """A case of `didi_instruct.pretrain`; kinds take turns."""
    kind = ("mdlm", "ar", "duo")[number % 3]
    model: Json = {"kind": kind, "layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "length": 32}
    model["learned_positions"] = r.random() < 0.5
    model["schedule"] = {"name": r.choice(["log-linear", "cosine"]), "eps": 1e-3}
    if kind == "mdlm":
        model["time_conditioning"] = r.random() < 0.5
    changes: Json = {"data": WORDS}
    if kind != "duo" and r.random() < 0.4:
        model |= {"own_window": True, "length": 16}
        changes["data"] = LINES
    if kind == "duo" and r.random() < 0.6:
        changes["curriculum"] = {
            "steps": r.randint(1, 3),
            "temperature": r.choice([[1e-3, 1e-3], [0.05, 0.01]]),
            "tokens": r.choice([2, 4, 16]),
        }
    train = recipe("didi")["train"] | _train(r, 1)
    return {
        "recipe": {"model": model, "train": train, "optim": _optim(r) | {"eps": 1e-6}} | changes
    }


def unbroken(method: str) -> Json:
    """A run of four iterations for a method, to be broken by one version and ended by the other."""
    case = distillation(random.Random(f"unbroken {method}"), 0, method)
    changed = case["recipe"]
    plain = {"micro_batch": None, "batch_size": 12, "steps": 4, "log_every": 1, "ema": 0.9}
    changed["train"] |= plain
    for section in ("sdtt", "duo"):
        changed[section]["iterations"] = None
    return case
