"""Trains one attention layer to copy the token three positions back. Run: python minimal.py"""

import torch
from torch import nn

from group_muon import GroupMuon

VOCABULARY, WIDTH, HEADS, CONTEXT = 32, 96, 12, 32


class TinyGpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.lm_head(x + self.attention(x, x, x, attn_mask=mask, is_causal=True)[0])


torch.manual_seed(0)
model = TinyGpt()

# Q and K in random groups of 6 heads, drawn at every step; V and the rest as in plain Muon.
# Embeddings, head and biases are stepped by AdamW.
optimizer = GroupMuon(model, group_size=6, rule="random", lr=2e-3, adamw_lr=3.6e-3)

for step in range(201):
    tokens = torch.randint(VOCABULARY, (32, CONTEXT))
    logits = model(tokens)[:, 3:]  # from position 3, predict the token 3 back
    loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, :-3].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
