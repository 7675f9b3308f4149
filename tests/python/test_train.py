"""The programs group-muon train and sample: correct numbers, and robust against errors."""

import fcntl
import json
import math
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request

import numpy
import pytest
import torch
from conftest import make_data
from reference_gpt import Gpt, batch_at, muon_step, read_tokens
from running import (
    PROGRAM,
    ROOT,
    arguments,
    as_of_an_older_version,
    checkpoints,
    curve,
    last_weights,
    metrics,
    program,
    random_walk,
    train,
    values,
    write_shard,
)
from safetensors.torch import load_file, save_file

import group_muon

DOOR = os.environ["MODEL_DOOR"]


def eventually(ask, seconds=60):
    """The first answer that is not an error."""
    deadline = time.time() + seconds
    while True:
        try:
            return ask()
        except (OSError, LookupError, TypeError):
            if time.time() > deadline:
                raise
            time.sleep(0.3)


def save_model(model, path):
    save_file({k: v.clone() for k, v in model.state_dict().items()}, path)


# Flags, and what they mean for Q, K and V at a step and a fraction of the learning rate: heads per group (two are drawn
# at random), and the factor on the learning rate.
USUAL = {}, lambda step, fraction: {"q": (2, 1), "k": (2, 1), "v": (4, 1)}
PERIODIC = (
    {"qkv-lr": 0.5, "qk-group": "2:random*3~all*1.5/4", "v-group": "1,all@0.6lr"},
    lambda step, fraction: {
        "q": (4, 0.75) if step in (0, 4, 8) else (2, 1.5),
        "k": (4, 0.75) if step in (0, 4, 8) else (2, 1.5),
        "v": (4, 0.5) if fraction >= 0.6 else (1, 0.5),
    },
)
PACKED = {"qkv-lr": 0.5, "qkv": "packed", "qk-group": "all"}, None


@pytest.mark.parametrize("engine", group_muon.engines())
class TestParity:
    @pytest.mark.parametrize("qk_norm", [False, True])
    @pytest.mark.parametrize("kv_heads", [4, 2, 1])
    def test_loss_and_gradients_equal_plain_pytorch(self, tmp_path, engine, kv_heads, qk_norm):
        torch.manual_seed(0)
        model = Gpt(layers=3, heads=4, width=64, vocabulary=100, kv_heads=kv_heads, qk_norm=qk_norm)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(3)  # away from the initial weights, where gradients are small
        tokens = torch.randint(0, 100, (5, 25))
        save_model(model, tmp_path / "weights")
        save_file({"tokens": tokens}, tmp_path / "tokens")
        (tmp_path / "config.toml").write_text(
            f"[model]\nlayers = 3\nheads = 4\nkv-heads = {kv_heads}\nwidth = 64\ncontext = 24\n"
            f"vocabulary = 100\nqk-norm = {str(qk_norm).lower()}\n"
            f'precision = "fp32"\n[run]\nengine = "{engine}"\n'
        )
        files = [tmp_path / name for name in ("config.toml", "weights", "tokens", "out")]
        subprocess.run([DOOR, *files], check=True)
        ours = load_file(tmp_path / "out")
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        assert abs(ours["loss"].item() - loss.item()) < 1e-5
        theirs = dict(model.named_parameters())
        assert set(ours) == set(theirs) | {"loss"}
        for name, weight in theirs.items():
            difference = (ours[name] - weight.grad).norm() / weight.grad.norm()
            assert difference < 1e-5, name

    @pytest.mark.parametrize("flags, meaning", [USUAL, PERIODIC, PACKED])
    def test_ten_steps_follow_a_pytorch_loop(self, tmp_path, data, engine, flags, meaning):
        torch.manual_seed(1)
        heads, width, layers, context, batch = 4, 32, 2, 16, 8
        model = Gpt(layers, heads, width, vocabulary=64)
        save_model(model, tmp_path / "weights")
        precise = {"precision": "fp32", "muon-precision": "float32", "micro-batch": 3}
        lr, adamw_lr = 2e-3, 3e-3
        options = {"muon-lr": lr, "adamw-lr": adamw_lr, "seed": 5, "init": tmp_path / "weights"}
        options["engine"] = engine
        train(data, tmp_path / "run", steps=10, **precise, **options, **flags)

        size = width // heads
        embedding = model.lm_head.weight
        adamw = torch.optim.AdamW([embedding], adamw_lr, betas=(0.9, 0.95), weight_decay=0)
        matrices = {k: w for k, w in model.named_parameters() if w is not embedding}
        momenta = {name: torch.zeros_like(weight) for name, weight in matrices.items()}
        stream = read_tokens(data / "train_000000.bin")
        losses = []
        for step in range(10):
            factor = 1 if step < 6 else (10 - step) / 4
            tokens = batch_at(stream, step, batch, context)
            model.zero_grad()
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            losses.append(loss.item())
            adamw.param_groups[0]["lr"] = adamw_lr * factor
            adamw.step()
            for name, weight in matrices.items():
                groups = [(list(range(weight.size(0))), 1)]
                if name.endswith("c_attn.weight") and meaning is None:
                    groups = [(groups[0][0], 0.5)]
                elif name.endswith("c_attn.weight"):
                    groups = []
                    for segment, (g, own) in enumerate(meaning(step, factor).values()):
                        rule = "2:random" if g == 2 else g
                        order = group_muon.head_order(
                            heads, rule, seed=5, step=step, parameter=name, stream=segment
                        )
                        rows = [segment * width + h * size + r for h in order for r in range(size)]
                        groups += [(rows[i : i + g * size], own) for i in range(0, width, g * size)]
                muon_step(weight, momenta[name], lr * factor, groups)

        assert values(tmp_path / "run", "loss") == pytest.approx(losses, abs=1e-4)
        ours = load_file(tmp_path / "run/checkpoints/step-000010/model.safetensors")
        assert set(ours) == set(model.state_dict())
        for name, weight in model.state_dict().items():
            assert (ours[name] - weight).abs().max() < 1e-4, name
        momentum = load_file(tmp_path / "run/checkpoints/step-000010/optimizer.safetensors")
        for name, buffer in momenta.items():
            assert (momentum[f"muon.momentum.{name}"] - buffer).abs().max() < 1e-4, name

    def test_bf16_stays_near_fp32(self, tmp_path, data, engine):
        if engine not in ("portable", "avx512_bf16"):
            refused = train(data, tmp_path / "bf16", check=False, precision="bf16", engine=engine)
            assert refused.returncode != 0 and "does not compute in BFloat16" in refused.stderr
            return
        for precision in ("bf16", "fp32"):
            train(data, tmp_path / precision, steps=100, precision=precision, engine=engine)
        both = [values(tmp_path / p, "validation_loss")[-1] for p in ("bf16", "fp32")]
        assert both[0] == pytest.approx(both[1], abs=0.03) and both[0] < 2


class TestWhatAPersonSees:
    @pytest.mark.parametrize("engine", ["portable", "auto"])
    def test_a_profile_accounts_for_all_of_the_time(self, tmp_path, data, engine):
        words = arguments(data, tmp_path / "run", steps=20, engine=engine)
        out = program("train", *words, "--profile").stdout
        shares = {
            m[1].strip(): float(m[2]) for m in re.finditer(r"^(.*?) +[\d.]+ +([\d.]+)%$", out, re.M)
        }
        assert shares.pop("a step") == 100
        assert sum(shares.values()) == pytest.approx(100, abs=0.5)
        used = re.search(r'engine = "(\w+)"', (tmp_path / "run/config.toml").read_text())[1]
        assert used in group_muon.engines()  # what auto selected
        parts = {"matmul", "attention", "normalisation", "activation"}
        assert "model" in shares if used == "portable" else parts <= set(shares)
        assert {"optimizer", "data"} <= set(shares)

    def test_plain_lines_in_a_log(self, tmp_path, data):
        done = train(data, tmp_path / "run", log_interval=6)
        assert "\r" not in done.stdout + done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].startswith(f"note: '{data}' has no manifest.json")
        assert lines[1] == f"run {tmp_path / 'run'}"
        assert [line for line in lines if "tokens/s" in line and "of GEMM peak" in line]
        assert sum("validation loss" in line for line in lines) == 4  # 0, 4, 8, 12
        assert lines[-1] == f"checkpoint {tmp_path / 'run/checkpoints/step-000012'}"

    @pytest.mark.parametrize("columns", [80, 120])
    def test_one_live_line_on_a_terminal(self, tmp_path, data, columns):
        parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        with subprocess.Popen(
            [PROGRAM, "train", *arguments(data, tmp_path / "run", steps=40)],
            stdout=child, stderr=child,
        ) as process:  # fmt: skip
            os.close(child)
            seen = b""
            try:
                while chunk := os.read(parent, 65536):
                    seen += chunk
            except OSError:  # the other side is closed
                pass
        assert process.returncode == 0
        live = [
            part for part in seen.decode().split("\r") if re.search(r"\] step \d+/40  loss", part)
        ]
        assert len(live) > 40
        assert max(len(part.replace("\033[2K", "").split("\n")[0]) for part in live) < columns
        pattern = r"\[=*>? *\] step \d+/40  loss \d+\.\d{4}  [\d.]+k tokens/s, \d+% of GEMM peak, "
        assert re.search(pattern + r"\d+:\d\d left", live[-1]), live[-1]

    def test_plain_lines_in_a_log_beside_a_terminal(self, tmp_path, data):
        parent, child = pty.openpty()
        words = arguments(data, tmp_path / "run")
        done = subprocess.run(
            [PROGRAM, "train", *words], stdout=subprocess.PIPE, stderr=child, check=True
        )
        os.close(parent), os.close(child)
        assert b"step 10/12  loss" in done.stdout and b"step 12/12  loss" in done.stdout

    def test_the_run_folder_holds_the_record(self, tmp_path, data):
        train(data, tmp_path / "run")
        names = {path.name.split(".")[0] for path in (tmp_path / "run").iterdir()}
        assert names == {"checkpoints", "config", "events", "lock", "machine", "metrics"}
        facts = json.loads((tmp_path / "run/machine.jsonl").read_text())
        assert re.fullmatch(
            r"[0-9a-f]{12}(-dirty)?|unknown|.*-g[0-9a-f]{12}(-dirty)?", facts["commit"]
        )
        assert facts["torch"] == torch.__version__.split("+")[0] and facts["threads"] == 1
        # Update norms take a copy of all weights, so they are measured every ten steps, first and last.
        measured = [line["step"] for line in metrics(tmp_path / "run") if "update_norm" in line]
        assert measured == [1, 10, 12]
        step = metrics(tmp_path / "run")[1]
        for kind in ("", "/embedding", "/qkv", "/attention_output", "/mlp"):
            assert step[f"gradient_norm{kind}"] > 0 and step[f"update_norm{kind}"] > 0
        # A step of Muon has the norm lr · √max(shape) · about √rank.
        assert step["update_norm/attention_output"] == pytest.approx(
            1e-3 * math.sqrt(32) * math.sqrt(32) * math.sqrt(2), rel=0.2
        )

    def test_the_recorded_config_repeats_the_run(self, tmp_path, data):
        train(data, tmp_path / "run", seed=3)
        program("train", tmp_path / "run/config.toml", "--out", tmp_path / "again")
        assert curve(tmp_path / "again") == curve(tmp_path / "run")
        assert last_weights(tmp_path / "again") == last_weights(tmp_path / "run")

    def test_tensorboard_opens_it(self, tmp_path, data):
        train(data, tmp_path / "run", steps=8)
        program("train", "--resume", tmp_path / "run/checkpoints/step-000004")  # steps 5 … 8 twice
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(
                [sys.executable, "-m", "tensorboard.main", "--logdir", tmp_path, "--port", "0",
                 "--host", "127.0.0.1", "--load_fast", "false"],
                stdout=log, stderr=log,
            ) as server,
        ):  # fmt: skip
            try:
                tags, points = eventually(lambda: self.ask_tensorboard(tmp_path / "log"))
            finally:
                server.kill()
        names = {
            name
            for line in metrics(tmp_path / "run")
            for name, value in line.items()
            if name != "step" and not isinstance(value, str)
        }
        assert set(tags) == names
        assert [point[1] for point in points] == list(range(1, 9))
        losses = values(tmp_path / "run", "loss")
        assert [point[2] for point in points] == pytest.approx(losses, rel=1e-6)

    def ask_tensorboard(self, log):
        address = re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())[0]

        def ask(path):
            url = f"{address}data/plugin/scalars/{path}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)

        return ask("tags")["run"], ask("scalars?tag=loss&run=run")

    def test_help_has_every_key_with_default_and_meaning(self, tmp_path, data):
        text = program("train", "--help").stdout
        train(data, tmp_path / "run", steps=4)
        for line in (tmp_path / "run/config.toml").read_text().splitlines():
            if found := re.match(r"([\w-]+) = .*  # (.+)", line):
                assert re.search(rf"--{found[1]} .*{re.escape(found[2][:15])}", text), line
        for name, default in {"layers": 12, "qk-group": "6:random", "adamw-lr": 0.0036}.items():
            assert re.search(rf"--{name} \[{default}\] +\w", text), name
        assert "--resume" in text

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--qk-grop", "2"], "there is no flag --qk-grop; did you mean --qk-group?"),
            (["--steps"], "--steps needs a value"),
            (["a.toml", "b.toml"], "unexpected argument 'b.toml'"),
            (["nowhere.toml"], "there is no file 'nowhere.toml'"),
            (["/tmp"], "there is no file '/tmp'"),
            (["--resume", ""], "--resume is given an empty value"),
            (["--layers", "many"], "layers should be a whole number, not 'many'"),
        ],
    )
    def test_wrong_words(self, words, message):
        done = program("train", *words, check=False)
        assert done.returncode != 0 and message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1

    def test_bare_switches_and_idle_schedules(self, tmp_path, data):
        words = arguments(data, tmp_path / "run", **{"qk-group": "1@0,2@99"})
        done = program("train", "--shuffle", "--nesterov", "--average", "false", *words)
        assert "note: qk-group = 1@0,2@99: step 99 is never reached; steps = 12" in done.stdout
        config = (tmp_path / "run/config.toml").read_text()
        assert "shuffle = true" in config and "average = false" in config
        train(data, tmp_path / "second", init=tmp_path / "run")  # its newest weights
        first = values(tmp_path / "second", "validation_loss")[0]
        assert first == values(tmp_path / "run", "validation_loss")[-1]

    def test_wrong_commands(self):
        done = program("trian", check=False)
        assert done.returncode == 2 and "did you mean train?" in done.stderr
        assert program(check=False).returncode == 2
        assert program("--version").stdout.startswith("group-muon 0.")


# Makes a CPU look as if it had no AVX-512, to us and to the libraries below torch.
AVX2 = {
    "GROUP_MUON_CPU": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
PLAIN = {**AVX2, "GROUP_MUON_CPU": "portable"}


# What "auto" selects here.
AUTO = torch.ops.group_muon.resolved("auto", "auto", "auto", torch.device("cpu"))


def words_of(run):
    """Precision, engine and method in a run's config."""
    text = (run / "config.toml").read_text()
    return dict(re.findall(r'^(\S*precision|engine|method) = "(\w+)"', text, re.M))


class TestEngines:
    def test_auto_is_written_down_as_what_it_came_to(self, tmp_path, data):
        train(data, tmp_path / "run", steps=4)
        words = words_of(tmp_path / "run")
        precision, engine, method = AUTO
        assert words["muon-precision"] == precision
        assert words["precision"] == {"bfloat16": "bf16", "float32": "fp32"}[precision]
        assert words["validation-precision"] == words["precision"]
        assert words["engine"] == engine and words["method"] == method
        line = next(line for line in metrics(tmp_path / "run") if "validation_loss" in line)
        for key in ("engine", "precision", "muon-precision", "validation-precision"):
            assert line[key.replace("-", "_")] == words[key]

    def test_without_bf16_in_hardware_auto_is_fp32(self, tmp_path, data):
        older = {**os.environ, **PLAIN}
        done = program("train", *arguments(data, tmp_path / "run", steps=20), env=older)
        assert words_of(tmp_path / "run") == {
            "precision": "fp32",
            "validation-precision": "fp32",
            "muon-precision": "float32",
            "engine": "portable",
            "method": "newton_schulz",
        }
        assert values(tmp_path / "run", "loss")[-1] < values(tmp_path / "run", "loss")[0]
        assert "software" not in done.stdout + done.stderr

    def test_model_optimizer_and_validation_each_have_an_engine_that_fits(self, tmp_path, data):
        best = group_muon.engines()[-1]
        mixed = {"precision": "bf16", "muon-precision": "float32", "validation-precision": "fp32"}
        train(data, tmp_path / "run", steps=2, warmdown=1, **mixed)
        text = (tmp_path / "run/config.toml").read_text()
        has_bf16 = best == "avx512_bf16" and AUTO[0] == "bfloat16"
        line = next(line for line in metrics(tmp_path / "run") if "validation_loss" in line)
        if has_bf16:
            assert f'engine = "{best}"' in text.split("[run]")[1]
        assert f'muon-engine = "{best}"' in text  # every engine computes in fp32
        assert f'method = "{"newton_schulz" if best == "portable" else "gram"}"' in text
        assert line["muon_engine"] == best
        assert line["validation_engine"] == line["engine"]  # it computes in fp32, too
        if best != "portable":
            wrong = {"engine": best, "muon-precision": "float64", "muon-engine": best}
            refused = train(data, tmp_path / "other", check=False, **wrong)
            assert refused.returncode != 0 and "does not compute in Double" in refused.stderr

    def test_a_run_says_when_auto_would_choose_a_better_engine(self, tmp_path, data):
        train(data, tmp_path / "run", steps=8, engine="portable", **{"checkpoint-interval": 4})
        shutil.rmtree(tmp_path / "run/checkpoints/step-000008")
        done = program("train", "--resume", tmp_path / "run")
        assert ("auto would choose" in done.stdout + done.stderr) == (AUTO[1] != "portable")

    @pytest.mark.parametrize("method", ["newton_schulz", "gram"])
    def test_a_run_from_before_muon_engines_goes_on_as_it_was(self, tmp_path, data, method):
        options = {"steps": 8, "checkpoint-interval": 4, "method": method}
        train(data, tmp_path / "whole", **options)
        train(data, tmp_path / "run", **options)
        shutil.rmtree(tmp_path / "run/checkpoints/step-000008")
        as_of_an_older_version(tmp_path / "run")
        config = tmp_path / "run/config.toml"
        lines = config.read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith("muon-engine")]
        assert len(kept) == len(lines) - 1
        config.write_text("".join(kept))
        done = program("train", "--resume", tmp_path / "run")
        assert "muon-engine" not in done.stdout + done.stderr
        assert curve(tmp_path / "run") == curve(tmp_path / "whole")

    def test_the_optimizer_follows_an_engine_that_is_named_at_a_resume(self, tmp_path, data):
        train(data, tmp_path / "run", steps=8, **{"checkpoint-interval": 4})
        shutil.rmtree(tmp_path / "run/checkpoints/step-000008")
        program("train", "--resume", tmp_path / "run", "--engine", "portable")
        assert 'muon-engine = "portable"' in (tmp_path / "run/config.toml").read_text()

    def test_an_engine_that_does_not_run_here_is_refused(self, tmp_path, data):
        for engine in {"neon", "avx2"} - set(group_muon.engines()):
            refused = train(data, tmp_path / "run", check=False, engine=engine)
            assert refused.returncode != 0 and "does not run on this CPU" in refused.stderr
            assert not (tmp_path / "run").exists()

    def test_a_run_goes_on_under_another_engine_and_says_so(self, tmp_path, data):
        run = tmp_path / "run"
        options = {"precision": "bf16", "steps": 8, "checkpoint-interval": 4}
        train(data, run, **options)
        began = words_of(run)
        shutil.rmtree(run / "checkpoints/step-000008")
        done = program("train", "--resume", run, env={**os.environ, **PLAIN})
        assert "only in software: a matrix product takes about" in done.stdout + done.stderr
        if began["engine"] != "portable":
            said = f"engine changed from {began['engine']} to portable"
            assert said in done.stdout + done.stderr
            assert "not bit for bit" in done.stdout + done.stderr
        assert words_of(run) == {**began, "engine": "portable"}  # everything else is kept
        other = {"bf16": "fp32", "fp32": "bf16"}[began["precision"]]
        refused = program("train", "--resume", run, "--precision", other, check=False)
        assert refused.returncode != 0 and "a resumed run keeps its options" in refused.stderr

    @pytest.mark.parametrize("engine", group_muon.engines())
    def test_resumed_under_the_same_engine_it_is_itself(self, tmp_path, data, engine):
        options = {"steps": 12, "checkpoint-interval": 6, "engine": engine}
        train(data, tmp_path / "whole", **options)
        train(data, tmp_path / "run", **options)
        shutil.rmtree(tmp_path / "run/checkpoints/step-000012")
        done = program("train", "--resume", tmp_path / "run")
        assert "bit for bit" not in done.stdout + done.stderr
        assert curve(tmp_path / "run") == curve(tmp_path / "whole")


class TestResume:
    @pytest.mark.parametrize("written", ["", 'kernels = "portable"\n'])
    def test_a_run_of_before_there_were_engines_stays_portable(self, tmp_path, data, written):
        whole = train(data, tmp_path / "whole", steps=20, engine="portable")
        assert whole.returncode == 0
        train(data, tmp_path / "run", steps=20, engine="portable", **{"checkpoint-interval": 10})
        for name in checkpoints(tmp_path / "run"):
            if name != "step-000010":
                shutil.rmtree(tmp_path / "run/checkpoints" / name)
        as_of_an_older_version(tmp_path / "run")
        config = tmp_path / "run/config.toml"
        lines = config.read_text().splitlines(keepends=True)
        config.write_text("".join(written if line.startswith("engine") else line for line in lines))
        program("train", "--resume", tmp_path / "run")
        assert curve(tmp_path / "run") == curve(tmp_path / "whole")

    @pytest.mark.parametrize(("precision", "interval"), [("auto", 7), ("fp32", 7), ("auto", 60)])
    def test_after_kill_9_at_any_moment(self, tmp_path, data, precision, interval):
        options = {"precision": precision, "steps": 1500, "checkpoint-interval": interval}
        start = time.monotonic()
        train(data, tmp_path / "whole", **options)
        whole = time.monotonic() - start
        run = tmp_path / "cut"
        generator = numpy.random.default_rng(7)
        command = [PROGRAM, "train", *arguments(data, run, **options)]
        kills = 0
        while True:
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as process:
                try:
                    # Long enough to make progress, short enough to hit any moment, even during a write.
                    process.wait(timeout=whole * generator.uniform(0.3, 0.7))
                except subprocess.TimeoutExpired:
                    process.kill()
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, process.stderr.read()
            kills += 1
            assert kills < 60
            if (run / "config.toml").exists():
                command = [PROGRAM, "train", "--resume", run]
        assert kills > 0
        assert curve(run) == curve(tmp_path / "whole")
        assert last_weights(run) == last_weights(tmp_path / "whole")
        assert not [name for name in checkpoints(run) if name.startswith("writing")]

    def test_ctrl_c_writes_a_checkpoint_and_says_how_to_resume(self, tmp_path, data):
        options = {"steps": 3000, "checkpoint-interval": 0, "validation-interval": 1000}
        command = [PROGRAM, "train", *arguments(data, tmp_path / "run", **options)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            while "step 10/" not in process.stdout.readline():
                pass
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        run = tmp_path / "run"
        assert out.splitlines()[-1].endswith(f"resume with: group-muon train --resume {run}")
        stopped = json.loads((run / "checkpoints" / checkpoints(run)[0] / "state.json").read_text())
        assert stopped["step"] >= 10
        assert values(run, "step")[-1] == stopped["step"]

    def test_two_processes_do_not_train_in_one_folder(self, tmp_path, data):
        options = {"steps": 3000, "validation-interval": 1000}
        command = [PROGRAM, "train", *arguments(data, tmp_path / "run", **options)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while "step 10/" not in process.stdout.readline():
                pass
            done = program("train", "--resume", tmp_path / "run", check=False)
            process.kill()
        assert done.returncode == 1 and "another process is training in" in done.stderr

    def test_a_conflicting_option_is_refused_by_name(self, tmp_path, data):
        train(data, tmp_path / "run")
        before = curve(tmp_path / "run")
        for flag, value in {
            "qk-group": "2:interval",
            "batch": 4,
            "seed": 1,
            "precision": {"bfloat16": "fp32", "float32": "bf16"}[AUTO[0]],  # the other one
        }.items():
            done = program("train", "--resume", tmp_path / "run", f"--{flag}", value, check=False)
            assert done.returncode == 1 and f"{flag} = {value} conflicts" in done.stderr
        assert curve(tmp_path / "run") == before
        start = tmp_path / "run/checkpoints/step-000008"
        done = program("train", "--resume", start, "--micro-batch", "2")
        assert (
            "micro-batch changed from 8 to 2: the run continues, but not bit for bit" in done.stdout
        )

    def test_the_same_option_said_otherwise_is_no_conflict(self, tmp_path, data):
        train(data, tmp_path / "run")
        start = tmp_path / "run/checkpoints/step-000008"
        words = ["--out", f"{tmp_path}/data/../run/", "--micro-batch", 0, "--keep", 2, "--keep", 3]
        done = program("train", "--resume", start, *words)
        assert "not bit for bit" not in done.stdout
        finished = program("train", "--resume", tmp_path / "run")
        assert "the run is finished: all 12 steps" in finished.stdout

    def test_a_moved_run_and_moved_data(self, tmp_path, data):
        train(data, tmp_path / "run")
        shutil.move(tmp_path / "run", tmp_path / "elsewhere")
        shutil.move(data, tmp_path / "data2")
        start = tmp_path / "elsewhere/checkpoints/step-000008"
        failed = program("train", "--resume", start, check=False)
        assert failed.returncode == 1 and "cannot be read" in failed.stderr
        program("train", "--resume", start, "--data", tmp_path / "data2")


def state_of(checkpoint, **changes):
    """Changes entries of a checkpoint's state.json."""
    path = checkpoint / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def content(folder):
    """All files below a folder, but for the lock."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {path.relative_to(folder): path.read_bytes() for path in files}


def refused(run, *messages, command=("train", "--resume")):
    """Checks that a command refuses a run in one line and changes nothing in it."""
    before = content(run)
    done = program(*command, run, check=False)
    assert done.returncode == 1, done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("group-muon: "), done.stderr
    for message in messages:
        assert str(message) in lines[0]
    assert content(run) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 12 steps and its data. Tests change copies of it."""
    folder = tmp_path_factory.mktemp("finished")
    train(make_data(folder / "data"), folder / "run", keep=9)
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def cut(run):
    """Takes the last steps away, so that there is something to resume."""
    shutil.rmtree(run / "checkpoints/step-000012")


class TestConfigOfARun:
    @pytest.mark.parametrize("checkpointed", [True, False])
    @pytest.mark.parametrize(
        ("old", "new", "key"),
        [
            (r"^warmdown = .*\n", "", "warmdown"),
            (r"^steps = 12", "steps = 62", "steps"),
            (r"^adamw-lr = 0.0036", "adamw-lr = 0.0035", "adamw-lr"),
            (r"^threads = 1", "threads = 2", "threads"),
            (r"^seed = ", "seeds = ", "seed"),
        ],
    )
    def test_a_change_by_hand_is_refused_by_name(self, run, checkpointed, old, new, key):
        cut(run)
        if not checkpointed:
            shutil.rmtree(run / "checkpoints")
        config = run / "config.toml"
        text = re.sub(old, new, config.read_text(), flags=re.M)
        assert text != config.read_text()
        config.write_text(text)
        named = checkpointed or key in ("warmdown", "seed")  # without checkpoints a checksum knows
        refused(run, "config.toml", key if named else "was changed by hand")

    @pytest.mark.parametrize("command", [("sample",), ("analyze",)])
    def test_other_commands_refuse_it_too(self, run, command):
        config = run / "config.toml"
        config.write_text(config.read_text().replace("heads = 4", "heads = 8"))
        refused(run, "heads = 8, but 4 in its checkpoints", command=command)

    def test_comments_and_places_may_change(self, run, finished):
        cut(run)
        config = run / "config.toml"
        config.write_text(config.read_text() + "# mine\n")
        program("train", "--resume", run)
        assert curve(run) == curve(finished) and last_weights(run) == last_weights(finished)

    def test_flags_change_what_may_change_and_are_recorded(self, run):
        cut(run)
        words = ["--threads", 2, "--keep", 3, "--checkpoint-interval", 1]
        done = program("train", "--resume", run, *words)
        assert "threads changed from 1 to 2" in done.stdout
        text = (run / "config.toml").read_text()
        assert "threads = 2 " in text and "keep = 3 " in text and "steps = 12 " in text
        cut(run)
        assert "threads" not in program("train", "--resume", run).stdout

    def test_a_run_of_an_older_version_goes_on_with_a_note(self, run, finished):
        cut(run)
        as_of_an_older_version(run)
        config = run / "config.toml"
        later = r"^(shuffle|perturb|qk-norm|diagnose-\w+) = .*\n"
        config.write_text(re.sub(later, "", config.read_text(), flags=re.M))
        done = program("train", "--resume", run)
        assert done.stdout.count("from an older version") == 1
        assert curve(run) == curve(finished) and last_weights(run) == last_weights(finished)
        assert config.read_text().startswith("# A run of group-muon, format 4")

    def test_a_run_of_an_older_version_has_the_keys_of_that_version(self, run):
        cut(run)
        as_of_an_older_version(run)
        config = run / "config.toml"
        config.write_text(re.sub(r"^momentum = .*\n", "", config.read_text(), flags=re.M))
        refused(run, "has no momentum under [muon]")

    def test_a_checksum_cannot_be_lost_together_with_a_key(self, run):
        cut(run)
        config = run / "config.toml"
        text = config.read_text().split("\n", 1)[1]
        config.write_text(re.sub(r"^shuffle = .*\n", "", text, flags=re.M))
        refused(run, "has no shuffle", "was made with shuffle = false")

    def test_a_checkpoint_of_another_run_is_refused(self, run, tmp_path):
        data = re.search(r'^data = "(.*?)"', (run / "config.toml").read_text(), re.M)[1]
        train(data, tmp_path / "other", seed=3)
        cut(run)
        other = tmp_path / "other/checkpoints/step-000012"
        shutil.copytree(other, run / "checkpoints/step-000012")
        refused(run, "seed = 0", "was made with seed = 3")


class TestCheckpointOfARun:
    @pytest.mark.parametrize("older", [False, True])
    @pytest.mark.parametrize(
        "changes",
        [{"step": 11}, {"step": 13}, {"step": -3}, {"step": "8"}, {"files": {}}, {"files": 3}],
    )
    def test_a_changed_state_is_refused_and_nothing_is_moved(self, run, older, changes):
        if older:
            as_of_an_older_version(run)
        state_of(run / "checkpoints/step-000012", **changes)
        refused(run, "step-000012' is damaged", "--resume", "step-000008")

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
    def test_each_file_has_its_checksum(self, run, name):
        as_of_an_older_version(run)
        path = run / "checkpoints/step-000012"
        files = json.loads((path / "state.json").read_text())["files"]
        state_of(path, files={key: files[key] for key in files if key != name})
        refused(run, f"state.json has no checksum of {name}")

    def test_the_step_is_that_of_the_name_and_of_the_tensors(self, run):
        (run / "checkpoints/step-000008").rename(run / "checkpoints/step-000011")
        refused(run / "checkpoints/step-000011", "state.json says step 8")
        as_of_an_older_version(run)
        state_of(run / "checkpoints/step-000011", step=11)
        refused(
            run / "checkpoints/step-000011", "state.json says step 11, but model.safetensors says 8"
        )

    def test_a_step_beyond_the_last_is_refused(self, run):
        as_of_an_older_version(run)
        config = run / "config.toml"
        config.write_text(config.read_text().replace("steps = 12 ", "steps = 8 "))
        refused(run, "the checkpoint is of step 12", "has 8 steps")


class TestRecordOfARun:
    @pytest.mark.parametrize("harm", ["empty", "missing", "short", "garbage"])
    def test_lost_lines_are_said_and_nothing_is_deleted(self, run, finished, harm):
        cut(run)
        path = run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        if harm == "missing":
            path.unlink()
        else:
            kept = {"empty": [], "short": lines[:4], "garbage": [*lines[:4], "}{\n", *lines[5:]]}
            path.write_text("".join(kept[harm]))
        before = path.read_text() if path.exists() else None
        done = program("train", "--resume", run)
        assert "note: metrics.jsonl has only" in done.stdout
        assert "of the 8 steps that were done" in done.stdout
        assert last_weights(run) == last_weights(finished)
        assert curve(run)[-4:] == curve(finished)[-4:]
        if harm == "garbage":
            assert "1 lines that cannot be read" in done.stdout
            assert (run / "metrics.jsonl.damaged").read_text() == before

    def test_a_line_that_a_kill_cut_off_is_no_damage(self, run, finished):
        cut(run)
        path = run / "metrics.jsonl"
        path.write_text(path.read_text()[:-20])
        assert "metrics.jsonl" not in program("train", "--resume", run).stdout
        assert curve(run) == curve(finished)

    def test_a_record_that_cannot_be_continued_is_an_error(self, run):
        cut(run)
        (run / "metrics.jsonl").unlink()
        (run / "metrics.jsonl/x").mkdir(parents=True)
        refused(run, "metrics.jsonl' is not a file and cannot be continued")


def test_norms_of_queries_and_keys_belong_to_the_run(tmp_path, data):
    train(data, tmp_path / "true", qk_norm="true")
    train(data, tmp_path / "false")
    losses = {name: values(tmp_path / name, "validation_loss") for name in ("true", "false")}
    assert losses["true"] != losses["false"]
    for run, other in (("true", "false"), ("false", "true")):
        done = train(data, tmp_path / "second", check=False, init=tmp_path / run, qk_norm=other)
        assert f"was trained with qk-norm = {run}" in done.stderr and done.returncode != 0
        assert not (tmp_path / "second").exists()
        done = program("train", "--resume", tmp_path / run, "--qk-norm", other, check=False)
        assert f"qk-norm = {other} conflicts with the run's {run}" in done.stderr
    train(data, tmp_path / "second", init=tmp_path / "true", qk_norm="true")
    assert values(tmp_path / "second", "validation_loss")[0] == losses["true"][-1]


class TestInit:
    def begin(self, run, tmp_path, init, *messages):
        data = re.search(r'^data = "(.*?)"', (run / "config.toml").read_text(), re.M)[1]
        done = train(data, tmp_path / "second", check=False, init=init)
        assert (done.returncode == 0) == (not messages), done.stderr
        assert (tmp_path / "second").exists() == (not messages)
        for message in messages:
            assert message in done.stderr
        assert done.stderr.count("\n") <= 1

    @pytest.mark.parametrize(
        "given", ["", "checkpoints/step-000012", "checkpoints/step-000012/model.safetensors"]
    )
    def test_a_damaged_checkpoint_is_refused_and_the_one_before_offered(self, run, tmp_path, given):
        path = run / "checkpoints/step-000012/model.safetensors"
        weights = bytearray(path.read_bytes())
        weights[5000] ^= 64
        path.write_bytes(weights)
        offer = f"--init {run / 'checkpoints/step-000008'}"
        self.begin(run, tmp_path, run / given, "model.safetensors has the wrong checksum", offer)
        self.begin(run, tmp_path, run / "checkpoints/step-000008")

    @pytest.mark.parametrize(
        ("harm", "message"),
        [
            ("head", "lm_head.weight differs from transformer.wte.weight"),
            ("nan", "transformer.h.1.mlp.c_fc.weight contains nan"),
            ("infinite", "transformer.h.1.mlp.c_fc.weight contains a value of size inf"),
            ("huge", "transformer.h.1.mlp.c_fc.weight contains a value of size 3e+36"),
            ("extra", "this one has no transformer.wpe.weight"),
            ("missing", "has no transformer.h.1.mlp.c_fc.weight"),
            ("shape", "transformer.h.1.mlp.c_fc.weight should have the shape"),
            ("none", None),
        ],
    )
    def test_weights_of_others_are_checked(self, run, tmp_path, harm, message):
        weights = load_file(run / "checkpoints/step-000012/model.safetensors")
        name = "transformer.h.1.mlp.c_fc.weight"
        if harm == "head":
            weights["lm_head.weight"][3, 3] += 1
        elif harm == "extra":
            weights["transformer.wpe.weight"] = torch.zeros(16, 32)
        elif harm == "missing":
            del weights[name]
        elif harm == "shape":
            weights[name] = weights[name].t().contiguous()
        elif harm != "none":
            weights[name][2, 1] = {"nan": math.nan, "infinite": math.inf, "huge": 3e36}[harm]
        save_file(weights, tmp_path / "weights.safetensors")
        self.begin(run, tmp_path, tmp_path / "weights.safetensors", *([message] if message else []))


LONG = {"steps": 100000, "checkpoint-interval": 0, "validation-interval": 50000}


class Running:
    """A training process that has done ten steps."""

    def __init__(self, data, run, **options):
        command = [PROGRAM, "train", *arguments(data, run, **{**LONG, **options})]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while "step 10/" not in self.process.stdout.readline():
            pass

    def __enter__(self):
        return self.process

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


class TestFolder:
    @pytest.mark.parametrize("fate", ["deleted", "moved", "replaced"])
    def test_a_run_whose_folder_is_gone_stops_and_does_not_come_back(self, tmp_path, data, fate):
        run = tmp_path / "run"
        with Running(data, run) as process:
            if fate == "deleted":
                shutil.rmtree(run)
            else:
                run.rename(tmp_path / "elsewhere")
            if fate == "replaced":
                run.mkdir()
            _, error = process.communicate(timeout=60)
        assert process.returncode == 1 and error.count("\n") == 1
        word = "deleted" if fate == "deleted" else f"moved to '{tmp_path / 'elsewhere'}'"
        assert f"'{run}' was {word}" in error
        assert list(run.iterdir()) == [] if fate == "replaced" else not run.exists()

    def test_deleting_the_lock_lets_nobody_in(self, tmp_path, data):
        with Running(data, tmp_path / "run"):
            (tmp_path / "run/lock").unlink()
            done = program("train", "--resume", tmp_path / "run", check=False)
        assert done.returncode == 1 and "another process is training in" in done.stderr

    def test_parts_of_a_run_are_named(self, tmp_path, data):
        (tmp_path / "run/checkpoints").mkdir(parents=True)
        done = train(data, tmp_path / "run", check=False)
        assert done.returncode == 1 and "(checkpoints, but no config.toml)" in done.stderr


class TestStop:
    @pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM", "SIGPIPE"])
    def test_signals_lead_to_a_checkpoint(self, tmp_path, data, name):
        run = tmp_path / "run"
        with Running(data, run) as process:
            if name == "SIGPIPE":
                process.stdout.close()  # as in: train | head
            else:
                process.send_signal(signal.Signals[name])
            process.wait(timeout=60)
        assert process.returncode == 128 + signal.Signals[name]
        (only,) = checkpoints(run)
        stopped = json.loads((run / "checkpoints" / only / "state.json").read_text())
        assert stopped["step"] >= 10 and values(run, "step")[-1] == stopped["step"]

    def test_nohup_is_respected(self, tmp_path, data):
        command = ["nohup", PROGRAM, "train", *arguments(data, tmp_path / "run", **LONG)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while "step 10/" not in process.stdout.readline():
                pass
            process.send_signal(signal.SIGHUP)
            while "step 20/" not in process.stdout.readline():
                pass
            process.kill()

    def test_closed_streams_do_not_end_up_in_files(self, tmp_path, data):
        words = [PROGRAM, "train", *arguments(data, tmp_path / "run")]
        closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *map(str, words)]
        assert subprocess.run(closed, check=False).returncode == 0
        assert len(values(tmp_path / "run", "loss")) == 12  # every line is JSON

    @pytest.mark.parametrize("during", ["step", "validation"])
    def test_a_stop_is_heeded_between_micro_batches(self, tmp_path, data, during):
        # A step of 200,000 micro-batches, or a validation of as many, takes many minutes.
        write_shard(data / "val_000000.bin", random_walk(4_000_000))
        write_shard(data / "train_000000.bin", random_walk(4_000_000))
        many = {"batch": 200_000} if during == "step" else {"validation-tokens": 4_000_000}
        options = {**LONG, **many, "micro-batch": 1}
        command = [PROGRAM, "train", *arguments(data, tmp_path / "run", **options)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            begun = "validation loss" if during == "step" else "run "
            while begun not in process.stdout.readline():
                pass
            process.terminate()
            process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert checkpoints(tmp_path / "run") == ["step-000000"]


class TestPacked:
    def test_shared_groups_mean_nothing_to_a_packed_matrix(self, tmp_path, data):
        options = {"qkv": "packed", "qk-group": "all"}
        for name, shared in (("a", "false"), ("b", "true")):
            train(data, tmp_path / name, **options, **{"share-qk": shared})
        assert curve(tmp_path / "a") == curve(tmp_path / "b")


class TestPerturb:
    def test_one_rounding_error_makes_a_run_of_its_own(self, tmp_path, data):
        for name, perturb in (("a", 0), ("b", 1), ("c", 1), ("d", 2)):
            train(data, tmp_path / name, perturb=perturb, precision="fp32")
        a, b, c, d = (values(tmp_path / name, "validation_loss") for name in "abcd")
        assert b == c and len({a[-1], b[-1], d[-1]}) == 3
        assert b[0] == pytest.approx(a[0], abs=1e-5) and b[-1] == pytest.approx(a[-1], abs=1e-2)

    def test_a_resumed_run_is_not_moved_again(self, tmp_path, data):
        train(data, tmp_path / "whole", perturb=3)
        train(data, tmp_path / "cut", perturb=3)
        shutil.rmtree(tmp_path / "cut/checkpoints/step-000012")
        program("train", "--resume", tmp_path / "cut")
        assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
        assert last_weights(tmp_path / "cut") == last_weights(tmp_path / "whole")


class TestBadInput:
    def refused(self, data, out, *messages, **options):
        """Checks for one clear line, a non-zero exit code and nothing written."""
        done = train(data, out, check=False, **options)
        assert done.returncode == 1
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("group-muon: "), done.stderr
        for message in messages:
            assert str(message) in lines[0]
        assert not out.exists()

    def test_missing_data(self, tmp_path, data):
        self.refused(tmp_path / "nowhere", tmp_path / "run", tmp_path / "nowhere", "cannot be read")
        (tmp_path / "empty").mkdir()
        self.refused(tmp_path / "empty", tmp_path / "run", "no *train*.bin shard", "tokenize")
        (data / "val_000000.bin").unlink()
        self.refused(data, tmp_path / "run", "no *val*.bin shard")

    @pytest.mark.parametrize(
        ("offset", "value", "message"), [(0, 20240521, "20240520"), (4, 2, "version")]
    )
    def test_wrong_header(self, tmp_path, data, offset, value, message):
        path = data / "train_000000.bin"
        content = bytearray(path.read_bytes())
        content[offset : offset + 4] = numpy.int32(value).tobytes()
        path.write_bytes(content)
        self.refused(data, tmp_path / "run", path, message)

    def test_truncated_shard(self, tmp_path, data):
        path = data / "train_000000.bin"
        path.write_bytes(path.read_bytes()[:-100])
        self.refused(data, tmp_path / "run", path)

    def test_short_data(self, tmp_path, data):
        self.refused(data, tmp_path / "run", "20000 tokens", "less than one batch", batch=2000)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"heads": 5}, "5 heads do not divide a width of 32"),
            ({"qk-group": "3:random"}, "qk-group = 3:random does not fit the 4 query heads"),
            ({"qk-group": "6:rendom"}, "rendom"),
            ({"v-group": 3}, "v-group = 3 does not fit the 4 key and value heads"),
            ({"device": "cuda"}, "CUDA"),
            ({"warmdown": 13}, "set --warmup and --warmdown as well"),
            ({"init": "."}, "has no weights"),
            ({"init": "nowhere.safetensors"}, "nowhere.safetensors"),
        ],
    )
    def test_options(self, tmp_path, data, options, message):
        self.refused(data, tmp_path / "run", message, **options)

    def test_a_token_beyond_the_vocabulary(self, tmp_path, data):
        tokens = random_walk(20000)
        tokens[19000] = 64
        write_shard(data / "train_000000.bin", tokens)
        self.refused(data, tmp_path / "run", data / "train_000000.bin", "64")

    def test_a_run_that_diverges_keeps_its_last_good_checkpoint(self, tmp_path, data):
        run = tmp_path / "run"
        # Weight decay that multiplies weights by -10⁶ per step.
        options = {"muon-weight-decay": 1e9, "checkpoint-interval": 1}
        done = train(data, run, check=False, **options)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert re.search(r"group-muon: step \d+: .* cannot continue", done.stderr)
        newest = run / "checkpoints" / checkpoints(run)[-1]
        assert str(newest) in done.stderr
        for name in checkpoints(run):
            for weight in load_file(run / "checkpoints" / name / "model.safetensors").values():
                assert weight.isfinite().all()

    def test_a_corrupted_checkpoint(self, tmp_path, data):
        run = tmp_path / "run"
        train(data, run)
        path = run / "checkpoints/step-000012/model.safetensors"
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(content)
        done = program("train", "--resume", run, check=False)
        assert done.returncode == 1
        assert "step-000012' is damaged (model.safetensors has the wrong checksum)" in done.stderr
        offer = re.search(r"--resume (\S+)", done.stderr)[1]
        assert offer == str(run / "checkpoints/step-000008")
        program("train", "--resume", offer)

    @pytest.mark.parametrize("kind", ["tmpfs", "limit"])
    def test_a_full_disk_while_checkpointing(self, tmp_path, data, kind):
        run = tmp_path / "disk/run"
        run.parent.mkdir()
        words = [PROGRAM, "train", *arguments(data, run, width=256, steps=40)]
        if kind == "tmpfs":  # a real small disk: a checkpoint has 13 MB, and two fit
            disk = f"mount -t tmpfs -o size=34m none {run.parent} && "
            command = [
                "unshare",
                "-rm",
                "sh",
                "-c",
                disk + '"$@"; code=$?; ls ' + f"{run}/checkpoints; exit $code",
                "sh",
                *words,
            ]
            if subprocess.run(
                ["unshare", "-rm", "mount", "-t", "tmpfs", "none", run.parent],
                check=False,
                capture_output=True,
            ).returncode:
                pytest.skip("no permission to mount a small disk here")
        else:  # no file may grow beyond 4 MB
            command = [
                "sh",
                "-c",
                f"trap '' XFSZ; ulimit -f 8192; \"$@\"; code=$?; ls {run}/checkpoints; exit $code",
                "sh",
                *words,
            ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        errors = done.stderr.strip().splitlines()
        assert len(errors) == 1 and "cannot be written" in errors[0]
        assert ("No space left on device" if kind == "tmpfs" else "File too large") in errors[0]
        kept = [line for line in done.stdout.splitlines() if line.startswith("step-")]
        assert "writing" not in done.stdout
        if kind == "tmpfs":
            assert kept and kept[-1] in errors[0] and "intact" in errors[0]


class TestMemory:
    def test_it_does_not_grow_over_200_steps(self, tmp_path, data):
        options = {"steps": 600, "validation-interval": 20, "checkpoint-interval": 20, "keep": 1}
        command = [PROGRAM, "train", *arguments(data, tmp_path / "run", **options)]
        resident = {}  # by step, in bytes
        with subprocess.Popen(
            [*command, "--log-interval", "5"], stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                if found := re.match(r"step (\d+)/600  loss", line):
                    pages = pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[1]
                    resident[int(found[1])] = int(pages) * os.sysconf("SC_PAGESIZE")
        assert process.returncode == 0
        early = max(size for step, size in resident.items() if 100 <= step <= 200)
        late = max(size for step, size in resident.items() if step >= 400)
        # A leak of one weight per step would be 3 MB or more; of a batch's activations, 80 MB.
        assert late - early < 2 << 20


class TestSample:
    @pytest.fixture
    def run(self, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text(
            "\n<|endoftext|>\n".join(["the quick brown fox jumps over the lazy dog. " * 40] * 9)
        )
        program(
            "tokenize",
            text,
            "--out",
            tmp_path / "words",
            "--learn",
            280,
            "--validation-fraction",
            0.2,
        )
        train(tmp_path / "words", tmp_path / "run", steps=80, vocabulary=0, **{"muon-lr": 3e-3})
        return tmp_path / "run"

    def test_text_from_a_prompt(self, run):
        words = ["sample", run, "--prompt", "the quick", "--tokens", 60]
        greedy = program(*words, "--temperature", 0).stdout
        assert greedy.startswith("the quick brown fox jumps over the lazy dog. the quick"), greedy
        assert program(*words, "--seed", 1).stdout == program(*words, "--seed", 1).stdout
        hot = [
            program(*words, "--temperature", 3, "--top-k", 0, "--seed", s).stdout for s in (1, 2)
        ]
        assert hot[0] != hot[1]
        assert program(*words, "--temperature", 3, "--top-k", 1).stdout == greedy
        best = program(*words, "--temperature", 0, "--best").stdout
        assert best.startswith("the quick")
        checkpoint = run / "checkpoints" / checkpoints(run)[-1]
        assert program("sample", checkpoint, *words[2:], "--temperature", 0).stdout == greedy

    def test_wrong_input(self, run, tmp_path):
        for words, message in [
            ([tmp_path], "contains no run"),
            ([run, "--vocabulary", "gpt2"], "50257 entries"),
            ([run, "--temperature", -1], "temperature"),
            ([run / "checkpoints/step-000001"], "no checkpoint"),
        ]:
            done = program("sample", *words, check=False)
            assert done.returncode != 0 and message in done.stderr


class TestConfigs:
    """The files in configs/, each with the real model. The data is synthetic and the batch tiny."""

    @pytest.mark.parametrize("name", ["gpt2-record4", "gpt2-paper"])
    def test_two_steps_of_the_real_model(self, tmp_path, name):
        data = tmp_path / "data"
        data.mkdir()
        generator = numpy.random.default_rng(0)
        for split in ("train", "val"):
            write_shard(data / f"fineweb_{split}_000000.bin", generator.integers(0, 50257, 9000))
        tiny = ["--batch", 2, "--steps", 2, "--warmdown", 1, "--validation-tokens", 1024]
        program(
            "train", ROOT / f"configs/{name}.toml", "--data", data, "--out", tmp_path / "run", *tiny
        )
        weights = load_file(tmp_path / "run/checkpoints/step-000002/model.safetensors")
        unique = {name: w for name, w in weights.items() if name != "lm_head.weight"}
        assert sum(weight.numel() for weight in unique.values()) == 123_532_032
        losses = values(tmp_path / "run", "validation_loss")
        assert losses[0] == pytest.approx(math.log(50257), rel=0.02)

    @pytest.mark.parametrize("name", ["demo", "small"])
    def test_a_few_steps(self, tmp_path, data, name):
        few = ["--steps", 2, "--warmdown", 0, "--validation-tokens", 512, "--batch", 4]
        program(
            "train", ROOT / f"configs/{name}.toml", "--data", data, "--out", tmp_path / "run", *few
        )


class TestDemo:
    def test_a_short_one_from_text_to_report_and_again(self, tmp_path):
        study = tmp_path / "short.toml"
        text = (ROOT / "configs/demo-study.toml").read_text()
        study.write_text(
            text.replace('"demo.toml"', f'"{ROOT}/configs/demo.toml"')
            + "[options]\nsteps = 6\nwarmdown = 2\nvalidation-interval = 3\nbatch = 4\n"
            + "validation-tokens = 1024\n"
        )
        command = [ROOT / "run", "demo", tmp_path / "demo", study]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = ["packed", "three-way", "head-wise", "qk-6-random"]
        runs = [tmp_path / "demo/study" / name / "seed-0" for name in names]
        for run in runs:
            assert len(values(run, "loss")) == 6
            assert f"{values(run, 'validation_loss')[-1]:.4f}" in out
        assert len({tuple(values(run, "loss")) for run in runs}) == 4
        assert "Our country" in out and "Full-QKV Muon, packed" in out
        picture = (tmp_path / "demo/study/report/figures/differences.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 20000
        again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "finished" not in again and "tokens" not in again.split("setting ")[0]
        assert again.split("setting ")[1].split("wrote ")[0] in out  # nothing is trained twice
