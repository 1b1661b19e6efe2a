"""Pre-norm transformer blocks, which several tasks are made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional


class AttentionBlock(nn.Module):
    """The first half of a pre-norm block, attention, and the norm of the second.

    Parameters
    ----------
    width
        Channels of the residual stream, a multiple of `heads`.
    heads
        Attention heads.
    is_causal
        Whether a place sees only itself and those before.
    """

    def __init__(self, width: int, heads: int, *, is_causal: bool = True) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn_qkv, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def attended(self, x: Tensor) -> Tensor:
        """Return (batch, length, width) plus what attention adds."""
        batch, length, width = x.shape
        parts = self.attn_qkv(self.ln1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        out: Tensor = x + self.attn_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class TransformerBlock(AttentionBlock):
    """Pre-norm transformer block: attention, then two linear layers with GELU between them.

    Parameters
    ----------
    width, heads, is_causal
        As `AttentionBlock` has them.
    """

    def __init__(self, width: int, heads: int, *, is_causal: bool = True) -> None:
        super().__init__(width, heads, is_causal=is_causal)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = self.attended(x)
        out: Tensor = x + self.fc2(functional.gelu(self.fc1(self.ln2(x))))
        return out


class CharTransformer(nn.Module):
    """Blocks over characters with learned positions; the head is not tied.

    Parameters
    ----------
    n_characters
        Size of the alphabet.
    width, context
        Channels, and the longest sequence.
    blocks
        Made after the embeddings, so that random numbers are drawn in this order.
    """

    def __init__(self, n_characters: int, width: int, context: int, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(n_characters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(blocks)
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, n_characters, bias=False)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the sum of the embeddings of characters and places."""
        x: Tensor = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, alphabet)."""
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln(x))
        return logits
