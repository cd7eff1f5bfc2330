"""Peak memory on a GPU of an 8-billion shape with random weights, beside its budget.

python experiments/adapter_memory.py [--layers 32] [--batch 4] [--prompt 256] [--answer 256]
"""

import argparse

import torch
import transformers

from didi_instruct.adapters.lora import shared
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.distillation.methods import make_task
from didi_instruct.distillation.run import Teacher
from didi_instruct.hub import memory
from didi_instruct.hub.run_budget import budget_of
from didi_instruct.models.causal_lm import CAUSAL
from didi_instruct.models.masked_network import MaskedLM, SpecialIds
from didi_instruct.models.native import described
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import network_denoiser
from didi_instruct.sampling.state import Canvas, State
from didi_instruct.training.distributed import World

DEVICE = torch.device("cuda")
LLADA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 12288, "vocab_size": 126464,
    "max_position_embeddings": 4096, "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip


def network_of(layers: int) -> MaskedLM:
    """LLaDA-8B with random weights in bfloat16."""
    build, config = described(transformers, "llama", LLADA | {"num_hidden_layers": layers})
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        network = build(config)
    torch.set_default_dtype(torch.float32)
    shape = {"layers": layers, "hidden": 4096, "heads": 32, "vocab_size": 126465, "length": 4096}
    own = ModelConfig(kind="mdlm", cond_dim=1, banned=(126336,), **shape)
    ids = SpecialIds(126336, 126081, (), (), (126336,))
    return MaskedLM(network, own, ids, CAUSAL["llama"]).to(DEVICE).eval()


class Prompts:
    """Random rows, prompt and answer: a TokenSource."""

    num_sequences, tokenizer, fingerprint, num_tokens = None, None, "random", 126464

    def __init__(self, length: int) -> None:
        self.length = length

    def rows(self, start: int, count: int) -> torch.Tensor:
        """Rows of the stream."""
        generator = torch.Generator().manual_seed(start)
        return torch.randint(126000, (count, self.length), generator=generator)


def gb(size: float) -> str:
    """Bytes in GB."""
    return f"{size / 1e9:.2f}"


def main() -> None:
    """Measure sampling, and two iterations of each method."""
    parser = argparse.ArgumentParser()
    for name, usual in (("layers", 32), ("batch", 4), ("prompt", 256), ("answer", 256)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    network, length = network_of(given.layers), given.prompt + given.answer
    count = sum(p.numel() for p in network.parameters())
    shape = memory.CausalShape.of(network.record.settings, count, 2)
    weights = torch.cuda.memory_allocated()
    print(f"{count:,} parameters, {gb(weights)} GB of weights; {given.batch} texts of {length}")

    torch.cuda.reset_peak_memory_stats()
    schedule = make_schedule(network.config.schedule)
    canvas = Canvas.blank(given.batch, length, network.config.num_tokens, device=DEVICE)
    ancestral(network_denoiser(network, schedule), schedule, State(canvas), steps=4)
    reads = given.batch * length // 4
    told = memory.sampling(shape, batch=given.batch, length=length, reads=reads)["total"]
    peak = torch.cuda.max_memory_allocated()
    print(f"sampling in 4 steps: {gb(peak)} GB, budget {gb(told)} ({told / peak - 1:+.1%})")

    for method in ("didi", "token-matching", "sdtt", "mixture"):
        changes = [
            "prompts.source=random", f"prompts.length={given.answer}", "lora.rank=64",
            "reference.source=data", "discriminator.warmup=0", "token_matching.warmup=0",
            f"train.batch_size={2 * given.batch}", f"train.micro_batch={given.batch}",
            "train.compile=off",
        ]  # fmt: skip
        config = load_recipe(DistillConfig, f"llada-{method}", changes)
        world, data = World(DEVICE), Prompts(length)
        budget = budget_of(config, network, world, length)
        teacher = Teacher(network=network, tokenizer=None, fingerprint="random", source="random")
        task = make_task(config, teacher, shared(network), world, data=data, references=data.rows)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        task.step(0)
        start[0].record()
        task.step(1)
        start[1].record()
        torch.cuda.synchronize()
        peak, told = torch.cuda.max_memory_allocated(), budget.parts["total"]
        seconds = start[0].elapsed_time(start[1]) / 1000
        line = f"{method}: {gb(peak)} GB, budget {gb(told)} ({told / peak - 1:+.1%})"
        print(f"{line}, {seconds:.1f} s an iteration of {2 * given.batch} texts")
        print("  ", {name: gb(size) for name, size in budget.parts.items()}, flush=True)
        del task
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
