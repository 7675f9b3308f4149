"""Runs fuzz targets: fuzz.py BUILD SECONDS [TARGET …], or fuzz.py BUILD test.

The first form runs each target for so many seconds of CPU time and keeps what it finds in BUILD/corpus. The second runs
each for a moment, always with the same random numbers, over the seeds and tests/fuzz/regressions, and keeps nothing.
"""

import concurrent.futures
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

from seeds import SEEDS, dictionary

HERE = pathlib.Path(__file__).resolve().parent
JOBS = 2
# An input of a few kilobytes should take neither seconds nor gigabytes.
LIMITS = ["-timeout=10", "-rss_limit_mb=2048", "-malloc_limit_mb=1024"]
LIMITS += ["-report_slow_units=1000000"]  # a timeout is enough
TEST_RUNS, TEST_SECONDS = 20000, 3


@dataclass
class Outcome:
    executions: int = 0
    edges: int = 0
    corpus: int = 0
    seconds: float = 0  # of CPU time
    crashes: list = field(default_factory=list)
    output: str = ""
    failed: bool = False


def program(build, target):
    return build / "tests/fuzz" / f"fuzz_{target}"


def folders_of_inputs(build, target):
    """Writes the seeds of a target. Regression inputs come with the sources."""
    seeds = build / "seeds" / target
    shutil.rmtree(seeds, ignore_errors=True)
    seeds.mkdir(parents=True)
    for number, content in enumerate(SEEDS[target]):
        (seeds / str(number)).write_bytes(content)
    return [seeds, *filter(pathlib.Path.is_dir, [HERE / "regressions" / target])]


def words(build, target):
    """The option that names the dictionary of a target, if it has one."""
    path = build / f"{target}.dict"
    path.write_text(dictionary(target))
    return [f"-dict={path}"] if path.stat().st_size else []


def temporary_folder():
    """In memory if possible: targets write files."""
    memory = "/dev/shm"
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


def execute(command, scratch):
    """Runs a program. Returns its exit status, what it said and its CPU time."""
    log = pathlib.Path(scratch) / "log"
    with log.open("wb") as file:
        environment = {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    said = log.read_text(errors="replace")
    return process.returncode, said, usage.ru_utime + usage.ru_stime


def is_slow(build, target, path, scratch):
    """Whether an input is slow again. A machine that was stopped for a while makes any input look slow."""
    return execute([program(build, target), path, *LIMITS], scratch)[0] != 0


def once(build, target, corpus, scratch, span, outcome):
    """Runs a target once and adds to its outcome."""
    found = build / "crashes" / target
    found.mkdir(parents=True, exist_ok=True)
    before = set(found.iterdir())
    command = [program(build, target), corpus, *folders_of_inputs(build, target), *span, *LIMITS]
    command += [*words(build, target), f"-artifact_prefix={found}/", "-max_len=4096"]
    code, said, seconds = execute([*command, "-print_final_stats=1"], scratch)
    crashes = sorted(set(found.iterdir()) - before)
    slow = len(crashes) == 1 and crashes[0].name.startswith("timeout-")
    if slow and not is_slow(build, target, crashes[0], scratch):
        crashes.pop().unlink()
        code = 0
    outcome.executions += sum(map(int, re.findall(r"number_of_executed_units:\s+(\d+)", said)))
    outcome.edges = max([outcome.edges, *map(int, re.findall(r"cov: (\d+)", said))])
    outcome.corpus = len(list(corpus.iterdir()))
    outcome.seconds += seconds
    outcome.crashes += crashes
    outcome.output, outcome.failed = said, code != 0


def fuzz(build, target, seconds):
    outcome = Outcome()
    with temporary_folder() as scratch:
        if not seconds:
            span = [f"-runs={TEST_RUNS}", "-seed=1", f"-max_total_time={TEST_SECONDS}"]
            corpus = pathlib.Path(scratch) / "corpus"
            corpus.mkdir()
            once(build, target, corpus, scratch, span, outcome)
            return outcome
        corpus = build / "corpus" / target
        corpus.mkdir(parents=True, exist_ok=True)
        while outcome.seconds < 0.95 * seconds and not outcome.failed:
            span = [f"-max_total_time={math.ceil(seconds - outcome.seconds)}"]
            once(build, target, corpus, scratch, span, outcome)
    return outcome


def main(build, span, *targets):
    build = pathlib.Path(build)
    seconds = 0 if span == "test" else int(span)
    unknown = sorted(set(targets) - set(SEEDS))
    if unknown:
        return f"there is no target {', '.join(unknown)}; there are {', '.join(SEEDS)}"
    if not all(program(build, target).exists() for target in SEEDS):
        print("the fuzz targets are not built; ./run fuzz does it, with clang")
        return 1 if "fuzz" in os.environ.get("GROUP_MUON_REQUIRE", "").split() else 77
    print("target       executions   edges  corpus  crashes  CPU seconds", flush=True)
    failed = False
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        jobs = {name: pool.submit(fuzz, build, name, seconds) for name in targets or SEEDS}
        for target, job in jobs.items():
            done = job.result()
            failed = failed or done.failed
            figures = f"{done.executions:10} {done.edges:7} {done.corpus:7} {len(done.crashes):8}"
            print(f"{target:12} {figures} {done.seconds:12.0f}", flush=True)
            if done.failed:
                print(*done.output.splitlines()[-60:], sep="\n")
            for path in done.crashes:
                print(f"repeat it with: {program(build, target)} {path}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
