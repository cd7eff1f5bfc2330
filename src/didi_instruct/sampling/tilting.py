"""The arithmetic of tilting, Eq. (10), on rows of logits: by passes over memory, not by operations.

The vocabulary may be padded to a width W that GPUs like: the logits of the columns that are added
are -inf and the embeddings there 0, so they have probability 0, slope 0 and tilt 0.
"""

import torch
from torch import Tensor

from didi_instruct.models.compile import Fused


def logit_gradient(p: Tensor, slope: Tensor) -> Tensor:
    """From the slopes E g at the mixture p @ E to the gradient at the logits: p * (E g - p . E g).

    Shapes: p and slope (R, V) -> (R, V).
    """
    return p * (slope - (p * slope).sum(-1, keepdim=True))


def tilted(logits: Tensor, slope: Tensor, h: Tensor, clamp: Tensor) -> Tensor:
    """Logits + h * gradient of the reward, clamped: (R, V), (R, V) -> (R, V) in the slopes' type.

    h and clamp are tensors without dimensions: other numbers would be compiled anew.
    """
    wide = logits.to(slope.dtype)
    tilt = logit_gradient(wide.softmax(-1), slope)
    return wide + h * tilt.clamp(-clamp, clamp)


def slopes(gradient: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """E g in a type, for gradients g (R, d) and embeddings E (V, d): (R, V).

    Products of 16-bit numbers are exact in 32 bits, in which a GPU's 16-bit units add them up.
    """
    narrow = gradient.dtype == table.dtype and gradient.dtype in (torch.bfloat16, torch.float16)
    if narrow and gradient.is_cuda and dtype == torch.float32:
        return torch.mm(gradient, table.T, out_dtype=dtype)
    return gradient.to(dtype) @ table.T.to(dtype)


def mixture(logits: Tensor, table: Tensor) -> Tensor:
    """Average embedding softmax(logits) @ E: (R, V), (V, d) -> (R, d).

    Where both are of one type, what is summed is rounded to it; the sums are in 32 bits at least.
    """
    if logits.dtype != table.dtype:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits, table = logits.to(dtype), table.to(dtype)
    return logits.softmax(-1) @ table


fused_tilt: Fused[[Tensor, Tensor, Tensor, Tensor], Tensor] = Fused(tilted, "A tilt")
