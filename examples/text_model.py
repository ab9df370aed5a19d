"""A small byte-level language model, and its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class ByteTransformer(nn.Module):
    """A causal transformer of one layer over bytes: (batch, length) → (batch, length, 256) logits."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(longest, width)
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        batch, length = text.shape
        x = self.bytes(text) + self.places.weight[:length]
        # (batch, length, 3 · width) → three of (batch, heads, length, width / heads)
        q, k, v = (
            self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, -1))
        x = x + self.mlp(x)
        return self.head(x)


def mean_loss(model: nn.Module, text: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the samples of each one's mean loss per predicted byte; padding does not count."""
    logits = model(text[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="none").view(len(text), -1)
    counts = (lengths - 1).clamp(min=1)
    is_real = torch.arange(losses.shape[1], device=losses.device) < (lengths - 1)[:, None]
    return ((losses * is_real).sum(1) / counts).mean()
