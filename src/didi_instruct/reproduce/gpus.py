"""The GPUs that a grid may spread over."""

import os


def visible_gpus() -> list[str]:
    """GPUs by the names that CUDA_VISIBLE_DEVICES has for them; torch is asked how many."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named if len(named) == count else [str(i) for i in range(count)]
