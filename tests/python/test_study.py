"""group-muon study with real processes: killed, failed, in parallel, and under a real Slurm."""

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import time

import pytest
from private_slurm import installed, private_slurm, wait_for_job
from running import PROGRAM, curve, last_weights, program, train, values

STUDY = """
settings = ["packed", "three-way", "qk-2-random"]
seeds = 2

[options]
layers = 2
heads = 4
width = 32
context = 16
vocabulary = 64
batch = 8
steps = 12
warmdown = 4
validation-interval = 4
validation-tokens = 512
checkpoint-interval = 2
muon-lr = 1e-3
log-interval = 1
"""
FAILING = """
[[variants]]
name = "exploding"
settings = ["packed"]
options = { muon-lr = 1e38 }
"""
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SETTINGS = ("packed", "three-way", "qk-2-random")
TABLES = ("table.md", "table.csv", "table.tex", "differences.csv")


@pytest.fixture
def study(tmp_path):
    """Writes a study file."""

    def write(text=STUDY, name="study.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def tables(folder):
    program("report", folder, "--no-figures")
    return {name: (folder / "report" / name).read_text() for name in TABLES}


def of_runs(folder, name):
    """The file of that name in every run. Does not look into checkpoints, which come and go."""
    return [*folder.glob(f"*/seed-*/{name}"), *folder.glob(f"*/*/seed-*/{name}")]


def starts(folder):
    """How often each run was started or resumed."""
    return {
        str(path.parent.relative_to(folder)): len(path.read_text().splitlines())
        for path in of_runs(folder, "machine.jsonl")
    }


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def processes_of(folder):
    """Processes with the folder among their arguments."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if os.fsencode(str(folder)) in file.read():
                        found.append(int(entry))
            except OSError:
                pass
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study that nothing disturbed, and its tables."""
    from conftest import make_data

    folder = tmp_path_factory.mktemp("finished")
    make_data(folder / "data")
    (folder / "study.toml").write_text(STUDY)
    out = folder / "study"
    done = program("study", folder / "study.toml", "--data", folder / "data", "--out", out)
    return done, out, tables(out), folder / "data"


def test_runs_everything_once_and_leaves_finished_runs_alone(finished):
    done, out, before, _ = finished
    assert "6 of 6 done, 0 running, 0 failed, best " in done.stdout
    assert set(starts(out).values()) == {1} and len(starts(out)) == 6
    again = program("study", out)
    assert "begin" not in again.stdout and "6 of 6 done" in again.stdout
    assert set(starts(out).values()) == {1}
    assert tables(out) == before
    assert len(before["table.csv"].splitlines()) == 1 + 3


def test_list_and_dry_run_change_nothing(finished, tmp_path):
    _, out, _, data = finished
    listed = program("study", out, "--list").stdout
    assert re.search(r"^ +0  packed/seed-0 +\d\.\d{4}$", listed, re.M), listed
    assert "6 runs, 3 settings" in listed
    file = out.parent / "study.toml"
    estimate = program("study", file, "--data", data, "--out", tmp_path / "new", "--dry-run").stdout
    assert "6 of 6 runs are left: 9.22e+03 tokens" in estimate
    assert re.search(r"about \d+:\d\d minutes, \d+ at a time with \d+ threads? each", estimate)
    assert not (tmp_path / "new").exists()


def test_ten_kills_give_the_same_tables(finished, study, tmp_path):
    _, _, expected, data = finished
    out = tmp_path / "killed"
    words = [PROGRAM, "study", str(study()), "--data", str(data), "--out", str(out), "--jobs", "2"]
    moments = random.Random()
    seed = moments.randrange(10**6)
    moments.seed(seed)
    killed = 0
    while killed < 10:
        worker = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(moments.uniform(0.05, 1.5))
        # Everything at once, as in a power cut, or the study alone, whose runs should then stop by themselves.
        everything = killed % 2 == 0
        victims = processes_of(out) if everything else [worker.pid]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        worker.wait()
        until(lambda: not processes_of(out))
        killed += 1
    program("study", out)
    assert tables(out) == expected, f"moments of seed {seed}"
    for metrics in of_runs(out, "metrics.jsonl"):
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        assert steps == sorted(steps) and steps[-1] == 12


def test_two_workers_share_the_runs(finished, study, tmp_path):
    _, _, expected, data = finished
    out = tmp_path / "shared"
    words = [PROGRAM, "study", str(study()), "--data", str(data), "--out", str(out), "--jobs", "2"]
    workers = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for worker in workers:
        output, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
        assert "6 of 6 done" in output
    assert set(starts(out).values()) == {1}  # each by one worker, and not started again
    assert tables(out) == expected


def test_a_run_is_taken_over_from_a_dead_worker_only(finished, study, tmp_path):
    _, _, _, data = finished
    file = study(STUDY.replace("steps = 12", "steps = 400"))
    out = tmp_path / "taken"
    script = program("study", file, "--data", data, "--out", out, "--slurm", "--dry-run").stdout
    assert "#SBATCH --array=0-5\n" in script and not out.exists()
    # A stopped study leaves its folder, in which a single run can be started.
    worker = subprocess.Popen([PROGRAM, "study", str(file), "--data", str(data), "--out", str(out)])
    until((out / "study.toml").exists)
    worker.send_signal(signal.SIGINT)
    assert worker.wait(timeout=60) == 128 + signal.SIGINT
    words = [PROGRAM, "study", "run", str(out), "packed/seed-1"]
    holder = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    until((out / "packed/seed-1/checkpoints").is_dir)
    holder.send_signal(signal.SIGSTOP)  # alive, but does not finish the run
    refused = program(*words[1:], check=False)
    assert refused.returncode == 75
    assert "another process is running packed/seed-1" in refused.stderr
    # A study waits for the run and takes it over when its worker dies.
    waiting = subprocess.Popen([PROGRAM, "study", str(out), "--jobs", "2"], stdout=subprocess.PIPE)
    until(lambda: len(of_runs(out, "result.json")) == 5)
    time.sleep(1.5)  # it looks around every second
    begun = starts(out)["packed/seed-1"]
    assert waiting.poll() is None and not (out / "packed/seed-1/result.json").exists()
    holder.kill()
    holder.wait()
    waiting.communicate(timeout=120)
    assert waiting.returncode == 0
    assert starts(out)["packed/seed-1"] == begun + 1
    assert (out / "packed/seed-1/result.json").exists()


def test_stopping_saves_checkpoints_and_says_how_to_go_on(finished, study, tmp_path):
    _, _, _, data = finished
    file = study(
        STUDY.replace("steps = 12", "steps = 4000").replace("interval = 2", "interval = 0")
    )
    out = tmp_path / "stopped"
    words = [PROGRAM, "study", str(file), "--data", str(data), "--out", str(out), "--jobs", "1"]
    worker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    metrics = out / "packed/seed-0/metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5)
    worker.send_signal(signal.SIGTERM)
    output, _ = worker.communicate(timeout=60)
    assert worker.returncode == 128 + signal.SIGTERM
    assert f"resume with: group-muon study {out}" in output
    assert any((out / "packed/seed-0/checkpoints").iterdir())
    assert not processes_of(out)


def test_a_failed_run_is_kept_with_its_error_and_does_not_stop_the_rest(study, data, tmp_path):
    out = tmp_path / "failing"
    words = ("study", study(STUDY + FAILING), "--data", data, "--out", out)
    done = program(*words, check=False)
    assert done.returncode == 1
    assert "6 of 7 done, 0 running, 1 failed" in done.stdout and "--retry" in done.stdout
    error = (out / "exploding/packed/seed-0/error.txt").read_text()
    assert "the run cannot continue" in error
    assert "failed: " in program(*words, "--list").stdout
    before = starts(out)
    assert program("study", out, check=False).returncode == 1
    assert starts(out) == before
    assert program("study", out, "--retry", check=False).returncode == 1
    assert starts(out)["exploding/packed/seed-0"] == before["exploding/packed/seed-0"] + 1
    report = json.loads(report_of(out).read_text())
    assert report["counts"]["failed"] == 1
    assert [run["state"] for run in report["runs"]].count("failed") == 1


def report_of(out):
    program("report", out, "--no-figures")
    return out / "report/report.json"


def test_a_changed_study_is_noticed(finished, study, tmp_path):
    _, out, _, data = finished
    words = ("--data", data, "--out", out)
    changed = program("study", study(STUDY.replace("1e-3", "2e-3")), *words, check=False)
    assert changed.returncode == 1 and "muon-lr" in changed.stderr, changed.stderr
    assert "the study has changed since 6 runs" in changed.stderr
    removed = program("study", study(STUDY.replace("warmdown = 4\n", "")), *words, check=False)
    assert removed.returncode == 1 and "warmdown" in removed.stderr, removed.stderr
    longer = study(STUDY.replace("steps = 12", "steps = 13"))
    assert program("study", longer, *words, "--dry-run", check=False).returncode == 1
    listed = program("study", longer, *words, "--list").stdout
    assert listed.count("differs from the study: steps = 13 conflicts") == 6, listed


def test_a_study_can_grow_and_shrink(finished, study, tmp_path):
    _, out, _, data = finished
    copy = shutil.copytree(out, tmp_path / "copy")
    words = ("--data", data, "--out", copy)
    more = program("study", study(STUDY.replace("seeds = 2", "seeds = 3")), *words)
    assert "9 of 9 done" in more.stdout and more.stdout.count("begin") == 3
    fewer = program("study", study(STUDY.replace('"three-way", ', "")), *words)
    assert "note: 5 of the runs in the folder are not in the study" in fewer.stdout
    assert "4 of 4 done" in fewer.stdout and (copy / "three-way/seed-0/result.json").exists()


def test_seeds_can_be_added_from_the_command_line(finished, tmp_path):
    folder = shutil.copytree(finished[1], tmp_path / "more")
    before = starts(folder)
    out = program("study", folder, "--seeds", 3).stdout
    assert "9 of 9 done" in out and out.count("begin") == 3
    assert starts(folder) == before | {f"{name}/seed-2": 1 for name in SETTINGS}
    program("study", folder)  # the folder remembers the number of seeds
    assert "seeds = 3" in (folder / "study.toml").read_text()
    lines = program("report", folder, "--no-figures").stdout.splitlines()
    (row,) = [line for line in lines if line.startswith("QK g = 2 random")]
    mean = (
        sum(values(folder / f"qk-2-random/seed-{s}", "validation_loss")[-1] for s in range(3)) / 3
    )
    assert row.split()[5:7] == ["3", f"{mean:.4f}"]
    assert "not evidence" in "".join(lines)


def test_seeds_that_catch_up_with_more_seeds(study, tmp_path):
    file = study(STUDY + "[more-seeds]\npacked = 3\nthree-way = 5\n")
    for seeds, planned in ((2, 2 + 3 + 5), (3, 3 + 3 + 5), (4, 4 + 4 + 5)):
        assert f"{planned} runs" in program("study", file, "--seeds", seeds, "--list").stdout


def test_runs_that_leave_the_study_while_it_runs_are_let_go(finished, study, tmp_path):
    _, _, _, data = finished
    out = tmp_path / "study"
    words = ("--data", data, "--out", out)
    file = study(STUDY.replace("seeds = 2", "seeds = 1"))
    worker = subprocess.Popen(
        [PROGRAM, "study", file, *words, "--jobs", "1"], stdout=subprocess.PIPE, text=True
    )
    until((out / "packed/seed-0/metrics.jsonl").exists)
    written = out / "study.toml"
    written.write_text(
        written.read_text().replace("'qk-2-random'", "").replace("'three-way',", "'three-way'")
    )
    said, _ = worker.communicate(timeout=120)
    assert worker.returncode == 0 and "2 of 2 done, 0 running, 0 failed" in said, said
    assert not (out / "qk-2-random/seed-0/error.txt").exists()


def test_an_edited_folder_is_noticed(finished, tmp_path):
    _, out, _, _ = finished
    copy = shutil.copytree(out, tmp_path / "copy")
    file = copy / "study.toml"
    file.write_text(file.read_text().replace("0.001", "0.002"))
    refused = program("study", copy, check=False)
    assert refused.returncode == 1 and "muon-lr" in refused.stderr, refused.stderr
    report = program("report", copy, "--no-figures").stdout
    assert report.count("differs from the study: ") == 6


def test_other_data_is_noticed(finished, study, tmp_path):
    _, out, _, data = finished
    other = shutil.copytree(data, tmp_path / "other")
    copy = shutil.copytree(out, tmp_path / "copy")
    more = study(STUDY.replace("seeds = 2", "seeds = 3"))
    program("study", more, "--data", other, "--out", copy, "--list")
    shard = other / "train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\x07\x00")
    refused = program("study", more, "--data", other, "--out", copy, check=False)
    assert refused.returncode == 1 and "is not the data the study" in refused.stderr


def test_data_that_cannot_be_read_is_refused_before_anything_is_written(study, tmp_path):
    (tmp_path / "no-shards").mkdir()
    words = ("study", study(), "--data", tmp_path / "no-shards", "--out", tmp_path / "out")
    for more in ((), ("--dry-run",), ("--slurm", "--dry-run")):
        refused = program(*words, *more, check=False)
        assert refused.returncode == 1 and "*train*.bin shard" in refused.stderr, refused.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "train.toml").write_text("[model]\nlayers = 2\n")
    refused = program("study", tmp_path / "train.toml", "--list", check=False)
    assert "not a study" in refused.stderr, refused.stderr
    assert "give a study file" in program("study", "nothing", "--list", check=False).stderr


def test_damaged_results_are_failures_of_their_run_alone(finished, tmp_path):
    _, out, _, _ = finished
    copy = shutil.copytree(out, tmp_path / "copy")
    (copy / "packed/seed-0/result.json").write_text('{"validation_loss":null}')
    shutil.rmtree(copy / "packed/seed-1")
    done = program("study", copy, check=False)
    assert done.returncode == 1 and "5 of 6 done, 0 running, 1 failed" in done.stdout
    assert "result.json cannot be read; use --retry" in program("study", copy, "--list").stdout
    assert "6 of 6 done" in program("study", copy, "--retry").stdout
    assert values(copy / "packed/seed-0", "validation_loss") == values(
        out / "packed/seed-0", "validation_loss"
    )


def test_a_result_that_differs_from_the_metrics_is_not_believed(finished, tmp_path):
    _, out, _, _ = finished
    copy = shutil.copytree(out, tmp_path / "copy")
    result = copy / "packed/seed-0/result.json"
    true = result.read_text()
    result.write_text('{"validation_loss":1.5}\n')
    listed = program("study", copy, "--list").stdout
    assert "failed: result.json says 1.5 but metrics.jsonl says " in listed
    (copy / "packed/seed-1/metrics.jsonl").write_text("")
    assert (
        "metrics.jsonl has no validation after step 12" in program("study", copy, "--list").stdout
    )
    assert "4 of 6 runs are finished" in tables(copy)["table.md"]
    assert "5 of 6 done" in program("study", copy, "--retry", check=False).stdout
    assert result.read_text() == true


def test_the_last_words_name_no_file_that_is_not_there(finished, tmp_path):
    copy = shutil.copytree(finished[1], tmp_path / "copy")
    (copy / "packed/seed-0/result.json").write_text("{}")
    done = program("study", copy, check=False)
    assert done.returncode == 1 and not of_runs(copy, "error.txt")
    assert "error.txt" not in done.stdout and f"group-muon study {copy} --list" in done.stdout


def test_dozens_of_readers_and_array_tasks_disturb_nobody(finished, study, tmp_path):
    _, _, expected, data = finished
    out = tmp_path / "busy"
    stopped = program(
        "study", study(), "--data", data, "--out", out, "--slurm", env={"PATH": "/nowhere"}, check=False
    )  # fmt: skip
    assert "cannot start sbatch" in stopped.stderr
    (out / "data.json").unlink()  # as if killed before it was written: every task wants to write it
    with open(out / "lock", "w") as lock:  # somebody is slow in the study's folder
        fcntl.fcntl(lock, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))  # F_OFD_SETLK
        names = [f"{name}/seed-{seed}" for name in SETTINGS for seed in (0, 1)]
        words = [[PROGRAM, "study", "run", str(out), name, "--threads", "1"] for name in names]
        tasks = [subprocess.Popen(word, **QUIET) for word in words * 4]
        until(lambda: len(of_runs(out, "lock")) == 6)  # all runs have begun
        end = time.monotonic() + 13  # longer than the ten seconds after which tasks used to fail
        while time.monotonic() < end:  # readers need no lock
            assert "6 runs" in program("study", out, "--list").stdout
        assert all(task.poll() in (None, 75) for task in tasks)
    readers = [subprocess.Popen([PROGRAM, "study", str(out), "--list"], **QUIET) for _ in range(12)]
    codes = [process.wait(timeout=300) for process in tasks + readers]
    assert set(codes) <= {0, 75}, codes
    assert not of_runs(out, "error.txt")
    program("study", out)
    assert set(starts(out).values()) == {1}
    assert tables(out) == expected


def test_runs_have_the_programs_name(finished, study, tmp_path):
    _, _, _, data = finished
    file = study(STUDY.replace("steps = 12", "steps = 4000"))
    out = tmp_path / "named"
    words = [PROGRAM, "study", str(file), "--data", str(data), "--out", str(out), "--jobs", "1"]
    worker = subprocess.Popen(words, **QUIET)
    until((out / "packed/seed-0/metrics.jsonl").exists)
    names = {}
    for process in set(processes_of(out)) - {worker.pid}:
        with open(f"/proc/{process}/cmdline") as line, open(f"/proc/{process}/comm") as name:
            names[line.read().split("\0")[0]] = name.read().strip()
    worker.send_signal(signal.SIGTERM)
    worker.wait(timeout=60)
    assert names == {"group-muon": "group-muon"}


def test_a_stop_while_runs_start_is_no_failure(finished, study, tmp_path):
    _, _, expected, data = finished
    out = tmp_path / "early"
    words = [PROGRAM, "study", str(study()), "--data", str(data), "--out", str(out), "--jobs", "2"]
    for attempt in range(6):
        worker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        worker.stdout.readline()
        worker.stdout.readline()  # the first run begins
        time.sleep(0.1 * attempt)
        # To all processes, as batch systems do, or to the study alone.
        for process in processes_of(out) if attempt % 2 else [worker.pid]:
            os.kill(process, signal.SIGTERM)
        worker.communicate(timeout=60)
        assert worker.returncode == 128 + signal.SIGTERM
        assert not of_runs(out, "error.txt")
    program("study", out)
    assert tables(out) == expected


def test_workers_agree_on_a_run_that_fails(study, data, tmp_path):
    out = tmp_path / "failing"
    file = study(STUDY.replace("seeds = 2", "seeds = 1") + FAILING)
    words = [PROGRAM, "study", str(file), "--data", str(data), "--out", str(out), "--jobs", "1"]
    workers = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for worker in workers:
        output, errors = worker.communicate(timeout=120)
        assert worker.returncode == 1 and "3 of 4 done, 0 running, 1 failed" in output, errors
    assert starts(out)["exploding/packed/seed-0"] == 1


def test_wrong_words_are_errors_with_the_nearest_name(study, data, tmp_path):
    def error(text, *words):
        done = program(
            "study", study(text), "--data", data, "--out", tmp_path / "x", *words, check=False
        )
        assert done.returncode == 1
        return done.stderr

    assert "did you mean 'settings'?" in error(STUDY.replace("settings", "setings"))
    assert "did you mean 'muon-lr'?" in error(STUDY.replace("muon-lr", "muon-lrr"))
    assert "did you mean qk-2-random?" in error(STUDY.replace("qk-2-random", "qk-2-rand"))
    assert not (tmp_path / "x").exists()
    assert "contains no study" in program("study", data, check=False).stderr
    missing = program("study", study(), "--data", tmp_path / "none", check=False)
    assert "there is no folder" in missing.stderr


def test_finished_runs_can_leave_their_checkpoints(study, data, tmp_path):
    out = tmp_path / "light"
    file = study("keep-checkpoints = false\n" + STUDY.replace("seeds = 2", "seeds = 1"))
    program("study", file, "--data", data, "--out", out)
    assert not list(out.rglob("*.safetensors"))
    assert "3 of 3 done" in program("study", out).stdout


def test_rules_are_the_same_for_single_heads_to_the_bit(data, tmp_path):
    runs = []
    for group in ("1", "1:adjacent", "1:interval", "1:random"):
        runs.append(tmp_path / group.replace(":", "-"))
        train(data, runs[-1], qk_group=group)
    for run in runs[1:]:
        assert curve(run) == curve(runs[0])
        assert last_weights(run) == last_weights(runs[0])


def required(name):
    """Whether a test must run. Continuous integration has everything; elsewhere tests may be skipped."""
    return os.environ.get("GROUP_MUON_REQUIRE", "").find(name) >= 0


@pytest.mark.skipif(not installed() and not required("slurm"), reason="needs slurm-wlm and munge")
def test_an_array_job_runs_to_the_end_under_slurm(finished, study, tmp_path):
    _, _, expected, data = finished
    out = tmp_path / "array"
    with private_slurm(tmp_path) as environment:
        words = ("study", study(), "--data", data, "--out", out, "--slurm", "--threads", 1)
        done = program(*words, "--slurm-options", "--time=10", env=environment)
        job = re.search(r"Submitted batch job (\d+)", done.stdout).group(1)
        tasks = wait_for_job(job, environment, 120)
        assert tasks == dict.fromkeys(range(6), ("COMPLETED", 0))
        assert set(starts(out).values()) == {1}
        assert tables(out) == expected
        assert "are finished or have failed" in program(*words, env=environment, check=False).stderr
