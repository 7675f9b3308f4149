"""Several processes train one model: real torchrun, real kills, checkpoints compared byte by byte."""

import bisect
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import safetensors.numpy
from running import (
    PROGRAM,
    arguments,
    checkpoints,
    curve,
    last_weights,
    metrics,
    program,
    train,
    values,
    write_shard,
)

# Eight micro-batches of one sequence, so that 1, 2, 4 and 8 processes can share them in one order.
SMALL = {"batch": 8, "micro_batch": 1}


def together(
    count: int, *words: object, restarts: int = 0, **options: object
) -> subprocess.Popen[str]:
    """The program under torchrun, in a process group of its own."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--max-restarts",
        str(restarts), "--master-port", str(free_port()), "--no-python", PROGRAM, "train", "--timeout", "60",
        *map(str, words),
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        **options,
    )  # fmt: skip


def finish(run: subprocess.Popen[str], seconds: float = 120) -> str:
    try:
        text, _ = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for child in children_of(run).values():
            os.kill(child, signal.SIGKILL)
        run.kill()
        text, _ = run.communicate()
        raise AssertionError(f"still running after {seconds} seconds:\n{text}") from None
    return text


def train_together(count: int, data: Path, out: Path, **options: object) -> str:
    run = together(count, *arguments(data, out, **{**SMALL, **options}))
    text = finish(run)
    assert run.returncode == 0, text
    return text


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def weights(run: Path) -> str:
    return hashlib.sha256(b"".join(last_weights(run))).hexdigest()


def test_ordered_reduction_gives_the_same_bits_for_1_2_and_4_processes(
    data: Path, tmp_path: Path
) -> None:
    options = {
        "steps": 100,
        "reduction": "ordered",
        "checkpoint_interval": 0,
        "clip": 0.5,
        "warmup": 3,
    }
    train(data, tmp_path / "1", **SMALL, **options)
    expected = curve(tmp_path / "1")
    assert any(line.get("gradient_norm", 0) > 0.5 for line in expected), "clipping should happen"
    for count in (2, 4):
        out = tmp_path / str(count)
        train_together(count, data, out, **options)
        assert weights(out) == weights(tmp_path / "1"), count
        assert curve(out) == expected, count


def test_the_number_of_processes_may_change_in_the_middle(data: Path, tmp_path: Path) -> None:
    options = {"steps": 24, "reduction": "ordered", "checkpoint_interval": 6, "keep": 9}
    train(data, tmp_path / "whole", **SMALL, **options)
    out = tmp_path / "parts"
    # Each part is stopped at a checkpoint: the ones after it are deleted, as if it had been killed there.
    for last, count in zip((6, 12, 18, 24), (4, 1, 2, 4), strict=True):
        words = (
            arguments(data, out, **SMALL, **options)
            if last == 6
            else ["--resume", out, "--threads", 1]
        )
        if count == 1:
            text = program("train", *words).stdout
        else:
            run = together(count, *words)
            text = finish(run)
            assert run.returncode == 0, text
        assert last == 6 or f"resuming from {out}/checkpoints/step-{last - 6:06}" in text
        for name in checkpoints(out):
            if int(name[-6:]) > last:
                shutil.rmtree(out / "checkpoints" / name)
        assert checkpoints(out)[-1] == f"step-{last:06}"
    assert weights(out) == weights(tmp_path / "whole")
    assert values(out, "loss") == values(tmp_path / "whole", "loss")


@pytest.mark.parametrize("count", [2, 3])
def test_processes_learn_what_one_learns(data: Path, tmp_path: Path, count: int) -> None:
    options = {"steps": 40, "clip": 1.0, "kv_heads": 2, "validation_tokens": 1000}
    options |= {
        "precision": "fp32",
        "muon_precision": "float32",
    }  # bf16 rounds more than this test allows
    train(data, tmp_path / "one", **SMALL, **options)
    text = train_together(count, data, tmp_path / "more", **options)
    ours, theirs = curve(tmp_path / "more"), curve(tmp_path / "one")
    assert len(ours) == len(theirs)
    for more, one in zip(ours, theirs, strict=True):
        assert more.keys() == one.keys()
        for name in ("loss", "validation_loss", "gradient_norm", "gradient_norm/qkv"):
            if name in one:  # the same numbers, added in another order
                assert more[name] == pytest.approx(one[name], rel=2e-3), name
    before_the_first_step = ours[0]["validation_loss"]
    assert before_the_first_step == pytest.approx(theirs[0]["validation_loss"], rel=1e-6)
    assert values(tmp_path / "more", "gradient_norm")[0] == pytest.approx(
        values(tmp_path / "one", "gradient_norm")[0], rel=1e-5
    )
    # One process prints and writes.
    assert text.count("validation loss") == len(values(tmp_path / "more", "validation_loss"))
    assert f"{count} processes" in text
    facts = json.loads((tmp_path / "more/machine.jsonl").read_text())
    assert facts["processes"] == count


def test_a_run_of_processes_repeats_bit_for_bit(data: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_together(3, data, tmp_path / name, steps=10, batch=7)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert curve(tmp_path / "a") == curve(tmp_path / "b")


def bytes_written(data: Path, out: Path, **options: object) -> int:
    """What the second of two processes wrote, nearly all to sockets, as the kernel counts it."""
    options = {
        "width": 64,
        "batch": 8,
        "checkpoint_interval": 0,
        "validation_interval": 100,
        **options,
    }
    runs = list(by_hand(2, *arguments(data, out, **options)))
    os.waitid(os.P_PID, runs[1].pid, os.WEXITED | os.WNOWAIT)
    lines = Path(f"/proc/{runs[1].pid}/io").read_text().splitlines()
    texts = [finish(run) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], texts
    return int(dict(line.split(": ") for line in lines)["wchar"])


def test_a_step_reduces_once_and_sends_no_more_than_an_all_reduce(
    data: Path, tmp_path: Path
) -> None:
    few = bytes_written(data, tmp_path / "few", micro_batch=1, steps=4)
    whole = bytes_written(data, tmp_path / "whole", micro_batch=4, steps=12)
    parts = bytes_written(data, tmp_path / "parts", micro_batch=1, steps=12)
    assert parts == pytest.approx(whole, rel=1e-3)
    saved = tmp_path / "parts/checkpoints/step-000012/model.safetensors"
    elements = sum(tensor.size for tensor in safetensors.numpy.load_file(saved).values())
    a_step = (parts - few) / 8
    assert 0.9 < a_step / (4 * elements) <= 1.02  # 2(N-1)/N is 1 for two processes


def test_checkpoints_of_4_are_resumed_by_1_2_and_3(data: Path, tmp_path: Path) -> None:
    train_together(4, data, tmp_path / "four", steps=12, checkpoint_interval=4, keep=9)
    expected = values(tmp_path / "four", "loss")
    for count in (1, 2, 3):
        out = tmp_path / f"resumed-{count}"
        shutil.copytree(tmp_path / "four", out)
        for step in (8, 12):
            shutil.rmtree(out / "checkpoints" / f"step-{step:06}")
        if count == 1:
            program("train", "--resume", out)
        else:
            run = together(count, "--resume", out)
            text = finish(run)
            assert run.returncode == 0, text
        losses = values(out, "loss")
        assert losses[:4] == expected[:4]
        assert losses == pytest.approx(expected, rel=1e-3)
        # What the checkpoint holds is the whole state, whoever wrote it.
        first = metrics(out)
        assert [line["step"] for line in first if "loss" in line] == list(range(1, 13))


def children_of(run: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids by rank. torchrun gives each a session of its own."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, KeyError):
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent != run.pid:
                continue
            entries = (folder / "environ").read_bytes().split(b"\0")
            environment = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            found[int(environment[b"RANK"])] = int(folder.name)
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def by_hand(
    count: int,
    *words: object,
    port: int | None = None,
    ranks: range | None = None,
    **options: object,
) -> Iterator[subprocess.Popen[str]]:
    """The processes without torchrun, which would end them all when one ends."""
    port = port or free_port()
    for rank in ranks or range(count):
        where = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {key: str(value) for key, value in where.items()}
        yield subprocess.Popen(
            [PROGRAM, "train", *map(str, words)], env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, **options,
        )  # fmt: skip


LONG = {"steps": 100000, "warmdown": 0, "checkpoint_interval": 7, "validation_interval": 50}


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_process_ends_the_others_and_is_named(
    data: Path, tmp_path: Path, killed: int
) -> None:
    out = tmp_path / "run"
    words = arguments(data, out, **{**SMALL, **LONG})
    runs = list(by_hand(3, "--timeout", 60, *words))
    wait_for((out / "checkpoints/step-000014").exists)
    runs[killed].kill()
    for rank, run in enumerate(runs):
        text = finish(run, 60)
        assert run.returncode != 0
        if rank != killed:
            assert (
                f"process {rank} of 3: process {killed}" in text or f"process {killed}," in text
            ), text
            assert "ended" in text
            assert "frame #" not in text, text  # no stack traces of libraries
            assert ("The last checkpoint is intact" in text) == (rank == 0), text
    whole = [name for name in checkpoints(out) if name.startswith("step-")]
    saved = program("analyze", out / "checkpoints" / whole[-1], "--sequences", 1, check=False)
    assert saved.returncode == 0, saved.stderr


@pytest.mark.parametrize("still", [0, 1])
def test_a_process_that_stands_still_is_named(data: Path, tmp_path: Path, still: int) -> None:
    out = tmp_path / "run"
    runs = list(by_hand(3, "--timeout", 5, *arguments(data, out, **{**SMALL, **LONG})))
    wait_for((out / "checkpoints/step-000007").exists)
    runs[still].send_signal(signal.SIGSTOP)
    for rank in {0, 1, 2} - {still}:
        text = finish(runs[rank], 60)
        assert runs[rank].returncode != 0
        assert f"process {rank} of 3: process {still}" in text, text
        assert "not answer" in text, text
        assert "frame #" not in text, text
    runs[still].kill()
    runs[still].communicate()


@functools.cache
def functions() -> list[tuple[int, str]]:
    """The program's functions in the order of their addresses."""
    listed = subprocess.run(
        ["nm", "-C", "--defined-only", "-n", PROGRAM], capture_output=True, text=True, check=True
    ).stdout
    found = [line.split(" ", 2) for line in listed.splitlines()]
    return [(int(at, 16), name) for at, kind, name in found if kind in "tT"]


def stop_inside(process: int, pattern: str) -> None:
    """Stops the process where it executes a function of such a name."""
    names = functions()
    starts = [at for at, _ in names]
    folder = Path("/proc", str(process))
    program = str(Path(PROGRAM).resolve())
    mapped = [line for line in (folder / "maps").read_text().splitlines() if line.endswith(program)]
    base = min(int(line.split("-")[0], 16) for line in mapped)
    while True:  # until the run ends, which is an error
        os.kill(process, signal.SIGSTOP)
        while (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(1e-4)
        counter = int((folder / "syscall").read_text().split()[-1], 16) - base
        if 0 <= counter < starts[-1] and re.search(
            pattern, names[bisect.bisect(starts, counter) - 1][1]
        ):
            return
        os.kill(process, signal.SIGCONT)
        time.sleep(1e-3)


@pytest.mark.parametrize("moment", ["forward", "backward", "collective", "checkpoint"])
def test_torchrun_goes_on_from_the_last_checkpoint(data: Path, tmp_path: Path, moment: str) -> None:
    options = {
        **SMALL, "steps": 60, "reduction": "ordered", "checkpoint_interval": 5, "keep": 1,
        "validation_interval": 20,
    }  # fmt: skip
    if moment in ("forward", "backward"):
        options |= {"batch": 64, "micro_batch": 8, "context": 64, "validation_interval": 60}
    train(data, tmp_path / "whole", **options)
    out = tmp_path / "run"
    functions()  # takes a moment
    run = together(2, *arguments(data, out, **options), restarts=2)
    wait_for((out / "checkpoints/step-000005").exists)
    if moment == "checkpoint":
        folder = out / "checkpoints"
        wait_for(lambda: any(name.name.startswith("writing-") for name in folder.iterdir()))
        victim = 0
    else:
        victim = 1
        if moment == "collective":  # the others wait for one that stands still
            os.kill(children_of(run)[1], signal.SIGSTOP)
            time.sleep(0.5)
            victim = 0
        else:
            end = {"forward": "<", "backward": "_backward<"}[moment]
            stop_inside(children_of(run)[1], f"::(gelu|attention|rms_norm|embed){end}")
    killed = children_of(run)
    os.kill(killed[victim], signal.SIGKILL)
    text = finish(run, 240)
    assert run.returncode == 0, text
    assert f"resuming from {out}/checkpoints/" in text, text
    assert weights(out) == weights(tmp_path / "whole"), text
    assert values(out, "loss") == values(tmp_path / "whole", "loss")
    assert all(name.startswith("step-") for name in checkpoints(out))


def test_a_stop_saves_one_checkpoint(data: Path, tmp_path: Path) -> None:
    options = {**SMALL, "steps": 400, "reduction": "ordered", "checkpoint_interval": 0}
    out = tmp_path / "run"
    runs = list(by_hand(2, *arguments(data, out, **options)))
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(values(out, "loss")) > 5)
    runs[1].send_signal(signal.SIGTERM)  # one of them is enough
    texts = [finish(run, 60) for run in runs]
    assert [run.returncode for run in runs] == [128 + signal.SIGTERM] * 2, texts
    assert "stopped after step" in texts[0]
    assert "stopped" not in texts[1]
    assert len(checkpoints(out)) == 1
    resumed = together(2, "--resume", out)
    text = finish(resumed)
    assert resumed.returncode == 0, text
    train(data, tmp_path / "whole", **options)
    assert weights(out) == weights(tmp_path / "whole")


def test_a_restart_does_not_resume_a_run_that_it_did_not_begin(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {**SMALL, "checkpoint_interval": 4, "keep": 9}
    train(data, out, **options)
    before = weights(out)
    run = together(2, *arguments(data, out, **options), restarts=1)
    text = finish(run)
    assert run.returncode != 0
    assert "already contains a run" in text
    assert weights(out) == before


def test_a_checkpoint_before_the_first_step_is_resumed(data: Path, tmp_path: Path) -> None:
    """Stopped while the first validation runs, and once more right after it."""
    options = {
        **SMALL,
        "steps": 3,
        "warmdown": 0,
        "validation_tokens": 2900,
        "width": 256,
        "batch": 64,
    }
    out = tmp_path / "run"
    runs = list(by_hand(2, *arguments(data, out, **options)))
    wait_for((out / "metrics.jsonl").exists)
    runs[0].send_signal(signal.SIGTERM)
    texts = [finish(run, 60) for run in runs]
    assert "stopped after step 0" in texts[0], texts
    assert checkpoints(out) == ["step-000000"]
    runs = list(by_hand(2, "--resume", out))
    wait_for(lambda: len(metrics(out)) > 0)
    runs[1].send_signal(signal.SIGTERM)
    texts = [finish(run, 60) for run in runs]
    assert all(run.returncode in (0, 128 + signal.SIGTERM) for run in runs), texts
    resumed = together(2, "--resume", out)
    text = finish(resumed)
    assert resumed.returncode == 0, text
    assert values(out, "loss")


def test_a_process_without_a_part_of_the_batch_heeds_a_stop(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    runs = list(by_hand(2, *arguments(data, out, **{**SMALL, **LONG, "batch": 1})))
    wait_for((out / "checkpoints/step-000007").exists)
    runs[0].send_signal(signal.SIGTERM)  # the only sequence is the other one's
    texts = [finish(run, 60) for run in runs]
    assert [run.returncode for run in runs] == [128 + signal.SIGTERM] * 2, texts


def test_wrong_starts_are_named_and_never_hang(data: Path, tmp_path: Path) -> None:
    words = arguments(data, tmp_path / "run", **SMALL)
    # Nobody at the address.
    (lonely,) = by_hand(2, "--timeout", 3, *words, ranks=range(1, 2))
    assert "could not reach the first process at 127.0.0.1" in finish(lonely, 60)
    assert lonely.returncode == 1
    # A process that never comes.
    (first,) = by_hand(2, "--timeout", 3, *words, ranks=range(1))
    text = finish(first, 60)
    assert "process 0 of 2 waited 3 seconds for process 1; were all started?" in text, text
    # A port in use.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (refused,) = by_hand(2, "--timeout", 3, *words, port=port, ranks=range(1))
        text = finish(refused, 60)
        assert f"could not listen at 127.0.0.1:{port}; is another program using the port?" in text
    assert not (tmp_path / "run").exists()


def test_other_data_is_named(data: Path, tmp_path: Path) -> None:
    """Each process reads the same path; a mount makes it another folder for one of them."""
    other = tmp_path / "other"
    shutil.copytree(data, other)
    write_shard(other / "train_000000.bin", numpy.arange(20000) % 64)
    words = arguments(data, tmp_path / "run", **SMALL)
    port = free_port()
    (first,) = by_hand(2, "--timeout", 30, *words, port=port, ranks=range(1))
    hidden = [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount --bind {other} {data} && exec "$0" "$@"',
        PROGRAM,
    ]
    if subprocess.run([*hidden[:4], "true"], check=False, capture_output=True).returncode != 0:
        first.kill()
        first.communicate()
        pytest.skip("this user may not mount folders")
    where = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    second = subprocess.Popen(
        [*hidden, "train", "--timeout", "30", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {key: str(value) for key, value in where.items()},
    )  # fmt: skip
    texts = [finish(first, 60), finish(second, 60)]
    assert "process 1 of 2 has other data" in texts[0], texts
    assert first.returncode == second.returncode == 1
    assert not (tmp_path / "run").exists()


def test_another_build_is_named(data: Path, tmp_path: Path) -> None:
    """The same program in every respect but for some bytes at its end."""
    other = tmp_path / "group-muon"
    other.write_bytes(Path(PROGRAM).read_bytes() + b"another")
    other.chmod(0o755)
    words = ["--timeout", "30", *arguments(data, tmp_path / "run", **SMALL)]
    port = free_port()
    runs = [
        *by_hand(2, *words, port=port, ranks=range(1)),
        *by_hand(2, *words, port=port, ranks=range(1, 2), executable=str(other)),
    ]
    texts = [finish(run, 60) for run in runs]
    assert [run.returncode for run in runs] == [1, 1], texts
    assert "process 1 of 2 runs another build of group-muon (commit " in texts[0], texts
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "ordered", "micro_batch": 8}, "power of two that divides the number of micro-batches"),
        ({"reduction": "ordered", "micro_batch": 3}, "a batch of whole micro-batches"),
        ({"diagnose_every": 2}, "group-muon analyze"),
        ({"reduction": "sorted"}, "reduction should be one of fast, ordered, not 'sorted'"),
        ({"heads": 5}, "5 heads do not divide a width of 32"),
    ],
)  # fmt: skip
def test_what_processes_cannot_do_is_said_once(
    data: Path, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    run = together(2, *arguments(data, tmp_path / "run", **{**SMALL, **options}))
    text = finish(run)
    assert run.returncode != 0
    assert text.count(words) == 1, text
    assert not (tmp_path / "run/config.toml").exists()


def test_processes_share_the_cores(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = together(2, *arguments(data, out, **{**SMALL, "threads": 0}))
    text = finish(run)
    assert run.returncode == 0, text
    cores = os.cpu_count() or 1
    assert f"threads = {max(1, cores // 2)} " in (out / "config.toml").read_text()
