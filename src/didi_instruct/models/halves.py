"""A denoiser's pass in two parts: all positions, and then those alone that are asked for.

Keys and values of the last block need all positions; what comes after its attention does not.
"""

from torch import Tensor

from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import Affine, Block, reads, take, upcast


def begin(
    network: DiT, tokens: Tensor, c: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """State (B, L, d) of the trunk before the MLP of its last block; all positions attended.

    Without c the modulations are the folded ones. With `positions` (B, W) at those alone:
    (B, W, d), and so attends the last block.
    """
    x = upcast(network.embed(tokens))
    if network.position_embed is not None:
        x = network.position_embed(x)
    cos, sin = network.rotary_emb(x.shape[1])
    block = last_block(network)
    for lower in list(network.blocks)[:-1]:
        x = lower(x, cos, sin, c)
    m = affine(block, c, x.ndim)
    normed = block.norm1(x, m.weight1, m.bias1)
    branch = block.attend(normed, cos, sin, positions=positions)
    return block.residual(x if positions is None else take(x, positions), branch, m.gate1)


def finish(network: DiT, x: Tensor, c: Tensor) -> Tensor:
    """From states of `begin` at some positions (R, d) to those after the last block.

    c is one row for all, or one for each position.
    """
    block = last_block(network)
    m = affine(block, None if c is network.folded_condition else c, x.ndim)
    branch = block.norm2(x, m.weight2, m.bias2).to(reads(block.mlp[0]))
    return block.residual(x, block.feed(branch), m.gate2)


def last_block(network: DiT) -> Block:
    """The block that ends the trunk."""
    block = network.blocks[-1]
    assert isinstance(block, Block)
    return block


def affine(block: Block, c: Tensor | None, ndim: int) -> Affine:
    """What modulates a block: from the condition, or as folded."""
    if c is not None:
        return Affine(*block.affine(c, ndim))
    assert block.folded is not None, "a condition is needed where nothing is folded"
    return Affine(*block.folded.unbind())
