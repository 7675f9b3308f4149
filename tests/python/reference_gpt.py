"""The paper's GPT, its data order and Algorithm 1, written plainly in PyTorch."""

import math

import numpy
import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x):
    """x: [batch, heads, tokens, size]"""
    size = x.size(-1)
    frequencies = 10000 ** -(torch.arange(0, size, 2).float() / size)
    angles = torch.arange(x.size(-2)).float()[:, None] * frequencies
    x1, x2 = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat(
        [x1 * angles.cos() + x2 * angles.sin(), -x1 * angles.sin() + x2 * angles.cos()], -1
    )


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads, qk_norm):
        super().__init__()
        self.qk_norm = qk_norm
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.c_attn = nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, tokens, width = x.shape
        rows = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, k, v = (
            part.view(batch, tokens, -1, self.size).transpose(1, 2)
            for part in self.c_attn(x).split(rows, -1)
        )
        if self.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        q, k = rotate(q), rotate(k)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size)
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, layers, width, heads, kv_heads, qk_norm):
        super().__init__()
        self.attn = Attention(width, heads, kv_heads, qk_norm)
        self.mlp = Mlp(width)
        self.scale = 1 / math.sqrt(2 * layers)

    def forward(self, x):
        x = x + self.attn(rms_norm(x)) * self.scale
        return x + self.mlp(rms_norm(x))


class Gpt(nn.Module):
    def __init__(self, layers, heads, width, vocabulary, kv_heads=None, qk_norm=False):
        super().__init__()
        blocks = [Block(layers, width, heads, kv_heads or heads, qk_norm) for _ in range(layers)]
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(vocabulary, width), "h": nn.ModuleList(blocks)}
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens, targets):
        x = self.transformer["wte"](tokens)
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(rms_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_tokens(path):
    return torch.from_numpy(numpy.fromfile(path, numpy.uint16, offset=1024).astype(numpy.int64))


def batch_at(stream, step, batch, context):
    """The sequences of a step in the first epoch: consecutive windows, [batch, context + 1]."""
    starts = [(step * batch + i) * context for i in range(batch)]
    return torch.stack([stream[start : start + context + 1] for start in starts])


def newton_schulz(g):
    x = g / g.norm()
    if g.size(0) > g.size(1):
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.size(0) > g.size(1) else x


@torch.no_grad()
def muon_step(weight, momentum, lr, groups, mu=0.95):
    """Algorithm 1 with Nesterov and the script's scale. `groups` are lists of rows, with factors on the learning rate."""
    momentum.mul_(mu).add_(weight.grad)
    look_ahead = weight.grad + mu * momentum
    for rows, factor in groups:
        block = look_ahead[rows]
        weight[rows] -= lr * factor * math.sqrt(max(block.shape)) * newton_schulz(block)
