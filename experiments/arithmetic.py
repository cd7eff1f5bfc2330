"""Sums with worked steps: a small LLaDA learns them, and adapters distil it to few steps.

    python experiments/arithmetic.py data|teachers|students|table [--out runs/arithmetic] [--tiny]

A prompt is a sum of four numbers, an answer three steps. Each adds two of the terms that are left.
Any two may be added, so a sum has many right answers, which a rule tells from wrong ones.
The teacher has LLaDA's shape and key names and 3.4 million parameters, students are adapters of
rank 32 on it. Every method has the same minutes. `table` compares right answers and their variety.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import didi_instruct as didi
from didi_instruct.sampling.generate import Request
from didi_instruct.tasks.statistics import mean_interval
from didi_instruct.tasks.written_answers import variety

TERMS, STEP = 4, re.compile(r"(\d{3})\+(\d{3})=(\d{3});")
LENGTH = 12 * (TERMS - 1)
"""Tokens of an answer, which are its characters."""
WIDTH = 4 * TERMS
"""Tokens of a prompt."""
WORDS = ["<|endoftext|>", "<|mdm_mask|>", *"0123456789+=;"]
METHODS = ("didi", "token-matching", "sdtt", "mixture")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of a run."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    rows: int = 200_000
    teacher_steps: int = 12_000
    batch: int = 256
    questions: int = 256
    samples: int = 16
    minutes: float = 10.0
    probe: int = 30
    bank: int = 8192
    seeds: tuple[int, ...] = (0, 1)
    methods: tuple[str, ...] = METHODS


TINY = Scale(
    layers=1, hidden=32, heads=2, rows=200, teacher_steps=4, batch=8, questions=4, samples=2,
    minutes=0.0, probe=4, bank=16, seeds=(0,), methods=("didi", "sdtt"),
)  # fmt: skip


def sums(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Prompts with one right answer each, by chance among all."""
    chance = random.Random(seed)
    for _ in range(count):
        terms = [chance.randrange(100) for _ in range(TERMS)]
        prompt, steps = "+".join(f"{term:03d}" for term in terms) + "=", []
        while len(terms) > 1:
            one, two = (terms.pop(chance.randrange(len(terms))) for _ in range(2))
            steps.append(f"{one:03d}+{two:03d}={one + two:03d};")
            terms.append(one + two)
        yield {"prompt": prompt, "answer": "".join(steps)}


def is_right(prompt: str, answer: str) -> bool:
    """Tell whether each step adds two of the terms that are left, and none is left over."""
    left = [int(term) for term in prompt.rstrip("=").split("+")]
    steps = STEP.findall(answer)
    if "".join(f"{a}+{b}={c};" for a, b, c in steps) != answer:
        return False
    for one, two, total in (map(int, step) for step in steps):
        for term in (one, two):
            if term not in left:
                return False
            left.remove(term)
        if one + two != total:
            return False
        left.append(total)
    return len(left) == 1


def write_data(out: Path, scale: Scale) -> None:
    """Sums to learn, to distil on and to be asked, none of them twice."""
    test = list(sums(scale.questions, 1))
    asked = {row["prompt"] for row in test}
    parts = {"train": sums(scale.rows, 2), "prompts": sums(scale.bank, 3)}
    for name, rows in {**parts, "test": iter(test)}.items():
        kept = (row for row in rows if name == "test" or row["prompt"] not in asked)
        lines = "".join(json.dumps(row) + "\n" for row in kept)
        (out / f"{name}.jsonl").write_text(lines)


def write_llada(folder: Path, scale: Scale) -> None:
    """A network of LLaDA's shape with random weights, in its own key names."""
    folder.mkdir(exist_ok=True)
    d, inner, size = scale.hidden, 3 * scale.hidden, len(WORDS)
    block = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), (d, d)),
        **dict.fromkeys(("ff_proj", "up_proj"), (inner, d)),
        "ff_out": (d, inner), "attn_norm": (d,), "ff_norm": (d,),
    }  # fmt: skip
    shapes = {"wte": (size, d), "ln_f": (d,), "ff_out": (size, d)}
    shapes |= {f"blocks.{n}.{k}": v for n in range(scale.layers) for k, v in block.items()}
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            f"model.transformer.{name}.weight": torch.ones(shape)
            if len(shape) == 1
            else torch.randn(shape, generator=generator) * 0.02
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "activation_type": "silu",
        "block_type": "llama", "layer_norm_type": "rms", "rope": True, "rope_theta": 10000.0,
        "d_model": d, "n_heads": scale.heads, "n_kv_heads": scale.heads, "n_layers": scale.layers,
        "mlp_hidden_size": inner, "rms_norm_eps": 1e-5, "max_sequence_length": WIDTH + LENGTH,
        "embedding_size": size, "vocab_size": size, "mask_token_id": 1, "eos_token_id": 0,
        "pad_token_id": 0, "weight_tying": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(WORDS[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {
        "eos_token": WORDS[0],
        "mask_token": WORDS[1],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


def make_teacher(out: Path, scale: Scale, device: str | None) -> None:
    """Fine-tune the random network on worked sums: all of its weights learn."""
    write_llada(out / "random", scale)
    steps = scale.teacher_steps
    settings = {
        "task": "answers",
        "data": {"source": str(out / "train.jsonl"), "valid": min(1000, scale.rows // 10)},
        "optim": {"lr": 1e-3, "schedule": "cosine", "warmup": steps // 20, "beta2": 0.98},
        "train": {"steps": steps, "batch_size": scale.batch, "ema": 0.999, "eval_every": steps // 4,
                  "save_every": steps, "log_every": 50},
    }  # fmt: skip
    run = out / "teacher"
    didi.finetune(settings, model=out / "random", out=run, device=device, resume=run.exists())


def student_settings(out: Path, method: str, seed: int, scale: Scale) -> dict:
    """The shipped recipe's settings, sized for these texts."""
    group, few = 8 if scale.batch >= 64 else 4, scale.batch < 64
    return {
        "base": f"llada-{method}",
        "reproduces": "", "expect": "",
        "lora": {"rank": 4 if few else 32, "checkpointing": False},
        "prompts": {"source": str(out / "prompts.jsonl"), "length": LENGTH, "longest": WIDTH},
        "didi": {"group_size": group, "rollout_steps": 8},
        "discriminator": {"lr": 3e-4, "warmup": 2},
        "token_matching": {"budgets": [4, 8], "aux_lr": 1e-3, "warmup": 2},
        "mixture": {"codes": 16, "budgets": [4, 8], "learning": 2},
        "sdtt": {"steps": 64, "iterations": None},
        "reference": {"source": "bank", "steps": 64, "rows": scale.bank, "bank": str(out / "bank")},
        "optim": {"lr": 5e-4},
        "train": {"seed": seed, "batch_size": scale.batch, "micro_batch": None, "ema": 0.99,
                  "log_every": 2, "save_every": 100_000},
        "watch": {"budgets": [], "min_entropy": 0.0},
    }  # fmt: skip


def make_students(out: Path, scale: Scale, device: str | None) -> None:
    """Each method for as many iterations as it makes in the minutes."""
    import yaml

    for method in scale.methods:
        for seed in scale.seeds:
            run = out / f"{method}-{seed}"
            if (run / "config.json").exists():
                continue
            recipe = out / f"{method}-{seed}.yaml"
            recipe.write_text(yaml.safe_dump(student_settings(out, method, seed, scale)))
            given = {"teacher": out / "teacher", "device": device}
            probe = out / f"probe-{method}"
            if not probe.exists():
                few = [f"train.steps={scale.probe}"]
                didi.distill(str(recipe), out=probe, overrides=few, **given)
            lines = [json.loads(line) for line in (probe / "log.jsonl").read_text().splitlines()]
            rates = [line["iterations_per_second"] for line in lines if "lr" in line]
            rate = float(np.median(rates[len(rates) // 2 :]))
            steps = max(scale.probe, int(60 * scale.minutes * rate) // 10 * 10)
            begun = time.monotonic()
            didi.distill(str(recipe), out=run, overrides=[f"train.steps={steps}"], **given)
            print(f"{run.name}: {steps} steps, {(time.monotonic() - begun) / 60:.1f} minutes")


def ask(model: didi.Model, test: list[dict], samples: int, **how) -> dict:
    """Draw answers, check them by the rule, and tell their variety."""
    encoded = model.tokenizer.encode([row["prompt"] for row in test])
    tokens = torch.full((len(test) * samples, WIDTH + LENGTH), model.config.mask_symbol)
    tokens[:, :WIDTH] = torch.tensor(encoded).repeat_interleave(samples, 0)
    request = Request(tokens=tokens, batch_size=512, seed=7, **how)
    drawn = model.request(request)
    texts = np.array(model.tokenizer.decode_batch(drawn.tokens[:, WIDTH:].tolist()))
    texts = texts.reshape(len(test), samples)
    pairs = zip(texts, test, strict=True)
    right = np.array([[is_right(row["prompt"], text) for text in each] for each, row in pairs])
    share = right.mean(1)
    return {
        "nfe": drawn.nfe, "tokens_per_pass": LENGTH / drawn.passes,
        "accuracy": share.mean(), "accuracy_ci95": mean_interval(share), **variety(texts, right),
    }  # fmt: skip


def make_table(out: Path, scale: Scale, device: str | None) -> None:
    """Teacher, its free baselines and students, at equal numbers of steps."""
    test = [json.loads(line) for line in (out / "test.jsonl").read_text().splitlines()]
    streams, plain = {"options": {"order": "streams"}}, {}
    ways = {"teacher": [("64", plain, 64)] + [("", plain, n) for n in (8, 4)]}
    ways["teacher"] += [("streams", streams, n) for n in (8, 4)]
    for threshold in (0.3, 0.5, 0.7, 0.9):
        for temperature in (0.0, 1.0):
            how = {"sampler": "confidence", "temperature": temperature,
                   "options": {"threshold": threshold}}  # fmt: skip
            ways["teacher"].append((f"threshold {threshold}, T {temperature:g}", how, None))
    for path in sorted(out.glob("*-[0-9]/config.json")):
        ways[path.parent.name] = [("", plain, n) for n in (8, 4)]
        ways[path.parent.name] += [("streams", streams, n) for n in (8, 4)]
    rows = []
    for name, asked in ways.items():
        model = didi.load(out / name, device=device)
        for words, how, steps in asked:
            found = ask(model, test, scale.samples, **how, steps=steps)
            rows.append({"model": name, "how": words, "steps": steps, **found})
            print(line_of(rows[-1]), flush=True)
    (out / "table.json").write_text(json.dumps(rows, indent=1, default=float) + "\n")
    head = "| model | drawn | NFE | tokens a pass | right, % | distinct, % | entropy, nats |"
    table = [head, "|---|---|--:|--:|--:|--:|--:|", *map(line_of, rows)]
    (out / "table.md").write_text("\n".join(table) + "\n")


def line_of(row: dict) -> str:
    """A row of the table in Markdown."""
    low, high = row["accuracy_ci95"] or (0.0, 1.0)
    right = f"{100 * row['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    some = row["distinct_right"] is not None
    varied = (
        [f"{100 * row['distinct_right']:.0f}", f"{row['right_entropy']:.2f}"]
        if some
        else ["–", "–"]
    )
    cells = [row["model"], row["how"], row["nfe"], f"{row['tokens_per_pass']:.1f}", right, *varied]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Run one part, in the order of the usage line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["data", "teachers", "students", "table"])
    parser.add_argument("--out", type=Path, default=Path("runs/arithmetic"))
    parser.add_argument("--device")
    parser.add_argument("--minutes", type=float, help="of each student")
    parser.add_argument("--teacher-steps", type=int)
    parser.add_argument("--batch", type=int, help="of teacher and students; 64 for a CPU")
    parser.add_argument("--tiny", action="store_true", help="a minute on a CPU: does it run?")
    given = parser.parse_args()
    scale = TINY if given.tiny else Scale()
    names = ("minutes", "teacher_steps", "batch")
    changes = {name: getattr(given, name) for name in names}
    scale = Scale(**(vars(scale) | {k: v for k, v in changes.items() if v is not None}))
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part == "data" or not (given.out / "test.jsonl").exists():
        write_data(given.out, scale)
    parts = {"teachers": make_teacher, "students": make_students, "table": make_table}
    if given.part in parts:
        parts[given.part](given.out, scale, given.device)


if __name__ == "__main__":
    main()
