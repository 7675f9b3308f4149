"""What names say of a weight is the same in C++ (assemble) and in Python (param_groups)."""

import os
import subprocess

import torch
from torch import nn

from group_muon import param_groups

# Linear layers end with ".weight"; the others are parameters of a plain module.
ADAMW = [
    "lm_head.weight", "my_lm_head.weight", "classifier.weight", "net.classifier.weight", "qa_outputs.weight",
    "body.0.qa_outputs.weight", "seq_relationship.weight", "score.weight", "unembed.weight", "start_logits.weight",
    "vocab_projector.weight", "head.weight", "mlm_head.weight", "body.head.weight", "body.cls_heads.weight",
    "output.weight", "out.weight", "decoder.weight", "fc.weight",
    "pos_embed", "body.pos_embed", "latents", "codebook", "query_tokens", "relative_position_bias_table",
    "body.0.register_tokens", "class_emb", "A_log", "body.0.D", "time_mix_k", "dt_bias", "pos_bias_u", "body.mask_bias",
    "attention_biases",
]  # fmt: skip
MUON = [
    "up_proj.weight", "overhead.weight", "body.fc.weight", "body.output.weight", "body.0.head.weight",
    "embedder.weight", "wte.weight", "scores.weight", "classifiers.weight", "Data", "kernel", "body.mixing",
    "body.0.composition", "posterior", "pre_classifier.weight", "prompts_visual_projection",
]  # fmt: skip


def python_choice(name):
    model = nn.Module()
    model.filler = nn.Linear(6, 6)
    *path, last = name.split(".")
    owner = model
    for part in path[:-1] if last == "weight" else path:
        owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    if last == "weight":
        owner.add_module(path[-1], nn.Linear(6, 8))
    else:
        owner.register_parameter(last, nn.Parameter(torch.randn(8, 6)))
    groups = param_groups(model, verbose=False)
    return next(g["algorithm"] for g in groups for n, _ in g["params"] if n == name)


def test_cpp_and_python_agree_on_every_name():
    names = ADAMW + MUON
    expected = dict.fromkeys(ADAMW, "adamw") | dict.fromkeys(MUON, "muon")
    assert {name: python_choice(name) for name in names} == expected
    printed = subprocess.check_output([os.environ["CPP_DOOR"], "roles", *names], text=True)
    assert dict(zip(names, printed.split(), strict=True)) == expected
