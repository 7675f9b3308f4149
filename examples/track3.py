"""The public optimizer benchmark of modded-nanogpt, track 3, with Group Muon as its optimizer.

The benchmark fixes the model, the data, the batch and one forward and backward pass per step. What counts is the
number of steps to a validation loss of 3.28. Rules and results:
https://github.com/KellerJordan/modded-nanogpt/tree/master/records/track_3_optimization

Model, data, schedule and rates are those of its script train_gpt_simple.py of June 2026, the tuned baseline of 3250
steps. With --group-size all the optimizer is that baseline, too. On eight GPUs:

    torchrun --standalone --nproc_per_node=8 examples/track3.py --data FOLDER --group-size 3

--help says how to get the data. At a small size it can be tried on a CPU, with data made by `group-muon tokenize`:

    python examples/track3.py --data FOLDER --device cpu --layers 2 --width 128 --heads 2 \
        --batch-tokens 2048 --sequence 256 --steps 2
"""

import argparse
import json
import math
import os
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import group_muon

NEEDED_MARGIN = 0.004  # of (target - mean) * sqrt(runs): 3.09 standard deviations of 0.0013
DATA_HELP = """The data is in data/fineweb10B of a clone of KellerJordan/modded-nanogpt, after
`python data/cached_fineweb10B.py 18` there: 18 training shards of 100M tokens are enough for 3250 steps.
For a try, any folder with *train_*.bin and *val_*.bin in the same format will do."""


def fail(words):
    """Ends this process. Every process says why, since torchrun stops the others when the first one ends."""
    sys.exit(f"track3: {words}")


# Options. What the rules of the benchmark fix comes first.


def parser():
    made = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=DATA_HELP,
        allow_abbrev=False,
    )

    def add(group, name, default, text, **more):
        more.setdefault("type", type(default))
        shown = f"{text} (default: {default})" if default != "" else text
        return group.add_argument(f"--{name}", default=default, help=shown, **more)

    yes_no, numbers = ("yes", "no"), ("bfloat16", "float32")
    fixed = made.add_argument_group("fixed by the benchmark; others only for a try")
    made.fixed = [
        add(fixed, "layers", 12, "layers of the model"),
        add(fixed, "width", 768, "width of the model"),
        add(fixed, "heads", 6, "attention heads; each has width / heads rows"),
        add(fixed, "vocabulary", 50304, "rows of embedding and head: GPT-2's 50257, padded"),
        add(fixed, "sequence", 1024, "tokens of a sequence"),
        add(fixed, "batch-tokens", 524288, "tokens of a step, over all processes"),
        add(fixed, "validation-batches", 20, "batches of a validation, the first of its shard"),
        add(fixed, "target", 3.28, "validation loss to get below"),
    ]
    free = made.add_argument_group("the optimizer")
    size = "heads orthogonalized together: a number, half, all, or a schedule such as 1@0,3@1000"
    add(free, "group-size", "half", size)
    add(free, "rule", "random", "how groups are chosen", choices=("adjacent", "interval", "random"))
    add(free, "grouped", "qk", "which projections have groups: any of the letters q, k, v and o")
    add(free, "grouped-lr-factor", 1.0, "factor on the learning rate of these projections")
    add(free, "steps", 3250, "steps of a run")
    add(free, "cooldown", 0.7, "last fraction of the steps, in which learning rates fall to 0")
    add(free, "lr", 0.025, "Muon's learning rate")
    add(free, "weight-decay", 0.05, "Muon's weight decay")
    add(free, "momentum", 0.95, "Muon's momentum")
    add(free, "embedding-lr", 0.7, "AdamW's learning rate of the embedding")
    add(free, "head-lr", 0.004, "AdamW's learning rate of the output head")
    add(free, "vector-lr", 0.015, "AdamW's learning rate of gains and biases")
    add(free, "runs", 1, "runs with successive seeds; the verdict is on their mean")
    add(free, "seed", 0, "seed of the first run: initial weights and random groups")
    how = made.add_argument_group("how it runs")
    add(how, "data", "data/fineweb10B", "folder of shards", metavar="FOLDER")
    add(how, "device", "cuda", "where it runs", choices=("cuda", "cpu"))
    add(how, "precision", "", "default: bfloat16 on cuda, float32 on cpu", choices=numbers)
    add(how, "compile", "", "torch.compile the model; default: yes on cuda", choices=yes_no)
    add(how, "micro-batch", 64, "sequences at a time in a process; fewer need less memory")
    add(how, "share", "yes", "processes divide the optimizer's work", choices=yes_no)
    add(how, "out", "", "log file; default: runs/track3/ and the time", metavar="FILE")
    return made


def options(words=None):
    made = parser()
    args = made.parse_args(words)
    counts = "layers width heads vocabulary sequence batch_tokens validation_batches steps"
    for name in (*counts.split(), "runs", "micro_batch"):
        if getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} should be 1 or more, not {getattr(args, name)}")
    if not 0 < args.cooldown <= 1:
        fail(f"--cooldown should be above 0 and at most 1, not {args.cooldown}")
    if args.width % (4 * args.heads):
        fail(
            f"--width should be a multiple of 4 times --heads, not {args.width} for {args.heads} heads"
        )
    if args.batch_tokens % args.sequence:
        fail(f"--batch-tokens should be a multiple of --sequence, which is {args.sequence}")
    if set(args.grouped) - set("qkvo"):
        fail(f"--grouped should have some of the letters q, k, v and o, not '{args.grouped}'")
    if args.group_size == "half":
        args.group_size = str(args.heads // 2 if args.heads % 2 == 0 else 1)
    on_gpu = args.device == "cuda"
    args.precision = args.precision or ("bfloat16" if on_gpu else "float32")
    args.compile = args.compile or ("yes" if on_gpu else "no")
    args.out = args.out or time.strftime("runs/track3/%Y-%m-%d-%H%M%S.jsonl")
    args.differences = [
        f"--{action.dest.replace('_', '-')} {getattr(args, action.dest)}"
        for action in made.fixed
        if getattr(args, action.dest) != action.default
    ]
    if args.precision != "bfloat16":
        args.differences.append(f"--precision {args.precision}")
    return args


# Processes: one for each GPU, as torchrun starts them, or a single one.


class Place(NamedTuple):
    rank: int
    processes: int
    device: torch.device


def join(args):
    """This process's place among all. Also checks that they can divide the batch."""
    rank, processes, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    sequences = args.batch_tokens // args.sequence
    if sequences % processes:
        fail(f"{processes} processes cannot divide a batch of {sequences} sequences")
    args.micro_batch = min(args.micro_batch, sequences // processes)
    if sequences // processes % args.micro_batch:
        fail(
            f"--micro-batch should divide the {sequences // processes} sequences of each process, "
            f"not be {args.micro_batch}"
        )
    device = torch.device(args.device)
    if args.device == "cuda":
        if local >= torch.cuda.device_count():
            has = torch.cuda.device_count() or "no"
            fail(f"this machine has {has} GPUs for torch; --device cpu tries it at a small size")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        on_gpu = args.device == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    return Place(rank, processes, device)


def sum_over_processes(tensor, place):
    if place.processes > 1:
        dist.all_reduce(tensor)
    return tensor


# Data: shards of 256 int32 (magic number, version, number of tokens) and 16-bit tokens.


def tokens_of(path):
    """The tokens of a shard, mapped into memory."""
    with path.open("rb") as file:
        header = file.read(12).ljust(12, b"\0")
    magic, version, count = struct.unpack("<3i", header)
    if (magic, version) != (20240520, 1):
        fail(f"'{path}' is not a shard of tokens")
    if path.stat().st_size != 1024 + 2 * count:
        fail(f"'{path}' should have {1024 + 2 * count} bytes, not {path.stat().st_size}")
    return torch.from_file(str(path), size=512 + count, dtype=torch.uint16)[512:]


def shards_of(args, split, batch, needed):
    """The shards of a split, which must have enough batches. As in the benchmark, what is left at the end of a shard
    and does not fill a batch is not used, and a batch's last target is not a shard's last token."""
    if not Path(args.data).is_dir():
        fail(f"there is no folder '{args.data}'; give the shards with --data.\n{DATA_HELP}")
    paths = sorted(Path(args.data).glob(f"*{split}_*.bin"))
    if not paths:
        fail(f"'{args.data}' has no *{split}_*.bin.\n{DATA_HELP}")
    found = sum(max(0, len(tokens_of(path)) - 2) // batch for path in paths)
    if found < needed:
        fail(
            f"the {len(paths)} {split} shards in '{args.data}' have {found} whole batches of {batch} tokens, but "
            f"{needed} are needed"
        )
    return paths


def batches(paths, batch, args, place):
    """This process's sequences of each batch, in the order of the shards: inputs, and the tokens that follow them."""
    own = batch // place.processes
    for path in paths:
        tokens = tokens_of(path)
        for start in range(0, (len(tokens) - 2) // batch * batch, batch):
            whole = tokens[start : start + batch + 1].long()
            if whole.max() >= args.vocabulary:
                fail(f"'{path}' has token {whole.max()}, which needs a larger --vocabulary")
            part = whole[place.rank * own :][: own + 1].to(place.device)
            yield part[:-1].view(-1, args.sequence), part[1:].view(-1, args.sequence)


# Model. Weights are float32 but for the embedding; all layers compute in the embedding's type.


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.gain.shape, self.gain.type_as(x))


class Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.type_as(x), self.bias.type_as(x))


def rotation(length, head_dim):
    """Cosines and sines, length × head_dim / 2. The first half of the pairs turn at frequencies from 1 down to
    1/1024; the second half do not turn."""
    turning = 1024 ** -torch.linspace(0, 1, head_dim // 4)
    angles = torch.outer(torch.arange(length).float(), F.pad(turning, (0, head_dim // 4)))
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).type_as(x)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.q, self.k, self.v, self.o = (Linear(width, width) for _ in range(4))

    def forward(self, x, cos, sin):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = (rotate(F.rms_norm(part, (self.head_dim,)), cos, sin) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention = Norm(width), Attention(width, heads)
        self.norm2, self.mlp = Norm(width), Mlp(width)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, args):
        super().__init__()
        dtype = getattr(torch, args.precision)
        self.embedding = nn.Embedding(args.vocabulary, args.width, dtype=dtype)
        self.norm1, self.norm2 = Norm(args.width), Norm(args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.lm_head = Linear(args.width, args.vocabulary)
        cos, sin = rotation(args.sequence, args.width // args.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens, targets):
        """The sum of the losses of all tokens."""
        x = self.norm1(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.lm_head(self.norm2(x)).float().flatten(0, 1)
        logits = 15 * logits * torch.rsqrt(logits.square() + 15**2)  # stays within ±15
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")


@torch.no_grad()
def initialize(model, seed):
    """Draws on the CPU, so that a seed gives the same weights everywhere."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        layer = name.split(".")[-2]
        if weight.dim() < 2:
            weight.fill_(1 if name.endswith("gain") else 0)
        elif layer in ("o", "down", "lm_head"):
            weight.zero_()
        else:
            std = 1 if layer == "embedding" else math.sqrt(0.33 / weight.shape[1])
            weight.copy_(std * torch.randn(weight.shape, generator=generator))


# Optimizer.


def make_optimizer(model, args, seed, place, verbose):
    """Group Muon for the blocks' matrices, AdamW for all else, as in the benchmark. With whole matrices it is the
    benchmark's own Muon. With groups the entries of an update stay as large."""
    sizes = dict.fromkeys(args.grouped, args.group_size)
    groups = group_muon.param_groups(model, sizes, args.rule, verbose=verbose)
    vector = args.vector_lr
    rates = {"embedding": args.embedding_lr, "head": args.head_lr, "gain": vector, "bias": vector}
    for group in groups:
        layer = group["params"][0][0].split(".")[-2]
        muon_rate = args.lr * (args.grouped_lr_factor if layer in sizes else 1)
        group["lr"] = rates.get(group["role"], muon_rate)
    shared = place.processes > 1 and args.share == "yes"
    return group_muon.GroupMuon(
        groups,
        momentum=args.momentum,
        average=True,
        weight_decay=args.weight_decay,
        method="newton_schulz",
        coefficients=[(2.0, -1.5, 0.5)] * 12,
        precision=args.precision,
        base_scale="keller_jordan",
        transfer="sqrt_max",
        seed=seed,
        adamw_betas=(0.8, 0.95),
        adamw_eps=1e-10,
        adamw_weight_decay=0.001,
        process_group=dist.group.WORLD if shared else None,
        gradients="averaged",  # already the same on all processes
    )


# Training.


def micro_batches(batch, args):
    return zip(*(part.split(args.micro_batch) for part in batch), strict=True)


@torch.no_grad()
def validate(model, batch, args, place):
    total = torch.zeros((), dtype=torch.float64, device=place.device)
    for part in micro_batches(batch, args):
        total += model(*part)
    return sum_over_processes(total, place).item() / (args.validation_batches * args.batch_tokens)


def train(model, data, validation, args, place, seed, report):
    """One run. Returns the validation losses by step."""
    initialize(model, seed)
    try:
        optimizer = make_optimizer(model, args, seed, place, place.rank == 0 and seed == args.seed)
    except ValueError as error:
        fail(error)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (1 - step / args.steps) / args.cooldown)
    )
    losses, seconds, start = {}, 0.0, time.perf_counter()
    for step in range(args.steps + 1):
        if step == args.steps or step % (125 if step / args.steps < 0.9 else 25) == 0:
            seconds += time.perf_counter() - start
            losses[step] = validate(model, validation, args, place)
            if not math.isfinite(losses[step]):
                fail(f"the validation loss at step {step} is {losses[step]}")
            report(seed, step, validation_loss=losses[step], seconds=seconds)
            start = time.perf_counter()
        if step == args.steps:
            break
        total = torch.zeros((), device=place.device)
        for part in micro_batches(next(data), args):
            loss = model(*part)
            loss.backward()
            total += loss.detach()
        for weight in model.parameters():
            sum_over_processes(weight.grad, place)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step < 10 or (step + 1) % 25 == 0:
            mean = sum_over_processes(total, place).item() / args.batch_tokens
            report(seed, step + 1, train_loss=mean, seconds=seconds + time.perf_counter() - start)
    return losses


def reporter(args, place):
    """A function that prints what happens and writes it to the log, on the first process alone."""
    if place.rank:
        return lambda *_, **__: None
    path = Path(args.out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("x")
    except OSError as error:
        fail(f"cannot write the log '{path}': {error.strerror}")

    def report(seed=None, step=None, **values):
        if step is not None:
            (name, loss), (_, seconds) = values.items()
            words = f"{name.replace('_', ' ')} {loss:.4f}  {seconds:.1f} s"
            print(f"seed {seed}  step {step}/{args.steps}  {words}", flush=True)
            values = {"seed": seed, "step": step, **values}
        log.write(json.dumps(values) + "\n")
        log.flush()

    return report


def verdict(runs, args):
    """The benchmark's rule on the validation losses of all runs, in words and numbers."""
    for seed, losses in runs.items():
        below = next((step for step, loss in losses.items() if loss < args.target), None)
        words = "not below" if below is None else f"{below} steps to below"
        print(f"seed {seed}: {words} {args.target}")
    for step in runs[args.seed]:  # to the first one that fulfils the rule
        mean = sum(losses[step] for losses in runs.values()) / len(runs)
        margin = (args.target - mean) * math.sqrt(len(runs))
        if valid := margin >= NEEDED_MARGIN:
            break
    print(
        f"verdict: {'valid' if valid else 'not valid'} after {step} steps: mean {mean:.5f}, n = {len(runs)}, "
        f"({args.target} - mean)·√n = {margin:.5f}, {NEEDED_MARGIN} is needed"
    )
    if args.differences:
        print(f"This was not the benchmark: {', '.join(args.differences)}")
    return {"valid": valid, "step": step, "mean": mean, "margin": margin, "runs": len(runs)}


def main(words=None):
    args = options(words)
    of_validation = args.validation_batches * args.batch_tokens
    validation_shards = shards_of(args, "val", of_validation, 1)
    shards = shards_of(args, "train", args.batch_tokens, args.steps)
    if not validation_shards[0].name.startswith("fineweb_val"):
        args.differences.append(f"--data {args.data}")
    place = join(args)
    with place.device:
        model = Gpt(args)
    report = reporter(args, place)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "group_muon": group_muon.__version__}
    report(config=vars(args), processes=place.processes, device=name, **versions)
    if args.compile == "yes":
        model.compile(dynamic=False)
    validation = next(batches(validation_shards, of_validation, args, place))
    runs = {}
    for seed in range(args.seed, args.seed + args.runs):
        data = batches(shards, args.batch_tokens, args, place)
        runs[seed] = train(model, data, validation, args, place, seed, report)
    if place.rank == 0:
        report(verdict=verdict(runs, args))
        print(f"log: {args.out}")
    if dist.is_initialized():
        dist.barrier()  # or a process may be gone while another still sends to it, which then aborts
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
