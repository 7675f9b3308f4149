"""What commands must survive: a fault at every call on a file, and kill -9 at any moment.

hardships.py faults [COMMAND[:KIND] …]   every call in turn, for all commands and kinds of faults unless some are named
hardships.py kills [COUNT]               so many kills of each command at random moments (default 25)

After each, nothing half-written may lie under its final name, errors must be in our words, and the same command or
--resume must end with the same bytes as an undisturbed run. tests/faults.c describes the kinds of faults.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter

from running import PROGRAM, ROOT, arguments, curve, program

KINDS = ("full", "broken", "short", "killed", "blind")
FOREIGN = re.compile(
    r"exception|filesystem error|std::|basic_|terminate|Traceback|\bc10\b|\[json|Error: |errno"
)
MODEL = {
    "layers": 1,
    "heads": 2,
    "width": 8,
    "context": 8,
    "batch": 4,
    "warmdown": 2,
    "validation-interval": 2,
    "validation-tokens": 64,
    "checkpoint-interval": 2,
    "qk-group": 1,
    "vocabulary": 0,
}
STUDY = """
settings = ["three-way"]
seeds = 1
keep-checkpoints = false

[options]
layers = 1
heads = 2
width = 8
context = 8
batch = 4
steps = {steps}
warmdown = 1
validation-interval = 1
validation-tokens = 64
checkpoint-interval = 1
muon-lr = 1e-3
"""


def contents(folder, but=()):
    """All files below a folder by their paths, without those that match one of `but`."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(path.relative_to(folder).match(pattern) for pattern in but)
    }


def lines_of(path):
    """The JSON lines of a file that are complete."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
    ]


def make_text(path, words):
    draw = random.Random(0)
    path.write_text("".join(f"w{draw.randrange(300):x} " for _ in range(words)))
    return path


class Scenario:
    """A command, what is there before it, and what must be there after it. `base` holds what is made once and only
    read; each trial has the same folder `work`."""

    name = ""

    def __init__(self, base: pathlib.Path, length=1):
        self.base, self.length = base, length
        self.work = base / f"{self.name}-work"
        self.prepare()
        self.begin()
        program(*self.words())
        self.finished = self.finish_state()

    def prepare(self):
        """Makes what all trials share."""

    def begin(self):
        """The state before the command."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()

    def words(self):
        raise NotImplementedError

    def again(self):
        """The command that ends what was interrupted."""
        return self.words()

    def inspect(self):
        """Asserts that nothing is half-written."""

    def finish_state(self):
        """What must be the same in the end."""
        return contents(self.work)

    def leftovers(self):
        """What nobody will use. It may be there after a fault or a kill, but the next command deletes it."""
        patterns = (".*", "*.tmp", "writing-*", "deleting-*")
        return [str(path) for pattern in patterns for path in self.work.rglob(pattern)]


def made_data(base):
    """Data made by tokenize, with a vocabulary."""
    data = base / "data"
    if not data.exists():
        text = make_text(base / "text.txt", 20_000)
        program("tokenize", text, "--out", data, "--learn", 300, "--validation-fraction", 0.2)
    return data


class Tokenize(Scenario):
    """Replaces a data folder."""

    name = "tokenize"

    def prepare(self):
        self.data = made_data(self.base)
        self.text = make_text(self.base / "long.txt", 60_000 * self.length)

    def begin(self):
        super().begin()
        shutil.copytree(self.data, self.work / "data")

    def words(self):
        vocabulary = self.data / "vocabulary.tiktoken"
        out = self.work / "data"
        words = ["tokenize", self.text, "--out", out, "--vocabulary", vocabulary, "--overwrite"]
        return [*words, "--shard-tokens", 50_000 * self.length, "--threads", 2]

    def inspect(self):
        now = contents(self.work / "data")
        assert now in (contents(self.data), self.finished), "neither the old data nor the new"

    def finish_state(self):
        return contents(self.work / "data")


class Train(Scenario):
    """A run with three checkpoints."""

    name = "train"

    def options(self, **more):
        steps = 6 * self.length
        return {**MODEL, "steps": steps, "diagnose-every": 3, "diagnose-groups": "1", **more}

    def prepare(self):
        self.data = made_data(self.base)
        self.whole = self.base / f"{self.name}-whole"
        program("train", *arguments(self.data, self.whole, **self.options(keep=1000)))

    def words(self):
        return ["train", *arguments(self.data, self.work / "run", **self.options(keep=2))]

    def again(self):
        run = self.work / "run"
        return ["train", "--resume", run] if (run / "config.toml").exists() else self.words()

    def inspect(self):
        inspect_run(self.work / "run", self.whole)

    def finish_state(self):
        return state_of_run(self.work / "run")


def inspect_run(run, whole):
    """Compares what is there with an undisturbed run that has every checkpoint."""
    for checkpoint in run.glob("checkpoints/step-*"):
        for name in ("model.safetensors", "optimizer.safetensors"):
            twin = whole / "checkpoints" / checkpoint.name / name
            assert (checkpoint / name).read_bytes() == twin.read_bytes(), checkpoint.name
        json.loads((checkpoint / "state.json").read_text())
    config = run / "config.toml"
    assert not config.exists() or "[" in config.read_text()
    if config.exists():
        assert len(config.read_text().splitlines()) == len(
            (whole / "config.toml").read_text().splitlines()
        )
    vocabulary = run / "vocabulary.tiktoken"
    twin = whole / "vocabulary.tiktoken"
    assert not vocabulary.exists() or vocabulary.read_bytes() == twin.read_bytes()


def state_of_run(run):
    """A finished run without times, and without what earlier starts left to look at."""
    but = ("events.*", "lock", "*.jsonl", "state.json", "log.txt", "set-aside-*/*")
    return {
        "files": contents(run, but),
        "curve": curve(run),
        "diagnostics": lines_of(run / "diagnostics.jsonl"),
    }


class Resume(Train):
    """A run that goes on from its first checkpoint, although it has later ones."""

    name = "resume"

    def begin(self):
        super().begin()
        shutil.copytree(self.whole, self.work / "run")

    def words(self):
        return ["train", "--resume", self.work / "run/checkpoints/step-000002", "--keep", 2]

    def again(self):
        first = self.work / "run/checkpoints/step-000002"
        return self.words() if first.exists() else ["train", "--resume", self.work / "run"]


class Study(Scenario):
    """A study of one run, which does not keep its checkpoints."""

    name = "study"

    def prepare(self):
        self.data = made_data(self.base)
        self.file = self.base / f"{self.name}.toml"
        self.file.write_text(STUDY.format(steps=2 * self.length))

    def words(self):
        out = self.work / "study"
        words = ["study", self.file, "--data", self.data, "--out", out]
        return [*words, "--jobs", 1, "--threads", 1]

    def again(self):
        return [*self.words(), "--retry"]

    def finish_state(self):
        study = self.work / "study"
        but = ("events.*", "lock", "*.jsonl", "state.json", "log.txt")
        curves = {str(path.parent): curve(path.parent) for path in study.rglob("metrics.jsonl")}
        return {"files": contents(study, but), "curves": curves}

    def inspect(self):
        for path in (self.work / "study").rglob("*.json"):
            if "checkpoints" not in str(path):
                json.loads(path.read_text())


def finished_study(base):
    study = base / "finished-study"
    if not study.exists():
        file = base / "finished.toml"
        file.write_text(STUDY.format(steps=2))
        program("study", file, "--data", made_data(base), "--out", study)
    return study


class Report(Scenario):
    """Replaces a report; without figures, since these are Python's."""

    name = "report"
    more = ("--no-figures",)

    def prepare(self):
        self.study = finished_study(self.base)

    def begin(self):
        super().begin()
        for name in (
            "report.html",
            "report.json",
            "table.md",
            "table.csv",
            "table.tex",
            "differences.csv",
        ):
            (self.work / "report").mkdir(exist_ok=True)
            (self.work / "report" / name).write_text("old\n")

    def words(self):
        words = ["report", self.study, "--out", self.work / "report", "--python", sys.executable]
        return [*words, *self.more]

    def inspect(self):
        for name, content in contents(self.work, ("*.tmp",)).items():
            assert content in (b"old\n", self.finished[name]), f"{name} is half-written"


class Figures(Report):
    """Also draws the figures."""

    name = "figures"
    more = ()


class Analyze(Scenario):
    """Replaces a JSON file."""

    name = "analyze"

    def prepare(self):
        self.run = self.base / "analyzed"
        if not self.run.exists():
            options = {**MODEL, "steps": 2}
            program("train", *arguments(made_data(self.base), self.run, **options))

    def begin(self):
        super().begin()
        (self.work / "old.json").write_text("old\n")

    def words(self):
        return ["analyze", self.run, "--json", self.work / "old.json", "--groups", "1"]

    def inspect(self):
        now = (self.work / "old.json").read_text()
        assert now == "old\n" or json.loads(now), "the file is half-written"

    def finish_state(self):
        def without_times(value):
            if isinstance(value, dict):
                return {k: without_times(v) for k, v in value.items() if "seconds" not in k}
            return [without_times(item) for item in value] if isinstance(value, list) else value

        files = {path.name: json.loads(path.read_text()) for path in self.work.iterdir()}
        return without_times(files)


class Sample(Scenario):
    """Writes to standard output alone, so only its reads can fail."""

    name = "sample"

    def prepare(self):
        Analyze.prepare(self)

    def words(self):
        return ["sample", self.run, "--prompt", "w1 w2", "--tokens", 5, "--seed", 1]


SCENARIOS = (Tokenize, Train, Resume, Study, Report, Figures, Analyze, Sample)


def build_library(folder):
    """The library of tests/faults.c, or None without a compiler."""
    library = folder / "faults.so"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source = ROOT / "tests/faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@dataclasses.dataclass
class Faults:
    """Faults of one kind in one scenario."""

    scenario: Scenario
    kind: str
    library: pathlib.Path

    def places(self):
        """What must be in the paths of calls. A data folder is written beside its place; what is read is elsewhere."""
        if self.kind != "blind":
            return f"/{self.scenario.work.name}/"
        return "/" + self.scenario.base.name + "/"

    def run(self, call):
        """Runs the command with this call failing. Returns the process and a list of the calls so far."""
        base = self.scenario.base
        count, log = base / "count", base / "calls"
        count.write_bytes(bytes(8))
        log.write_text("")
        environment = {
            **os.environ,
            "LD_PRELOAD": str(self.library),
            "FAULT_KIND": self.kind,
            "FAULT_PATH": self.places(),
            "FAULT_CALL": str(call),
            "FAULT_COUNT": str(count),
            "FAULT_LOG": str(log),
        }
        self.scenario.begin()
        done = program(*self.scenario.words(), check=False, env=environment)
        return done, log.read_text().splitlines()

    def calls(self):
        """The calls of an undisturbed run."""
        done, calls = self.run(0)
        assert done.returncode == 0, done.stderr
        return calls

    def trial(self, call):
        """One fault. Returns how it ended: "survived", "noted", "refused" or "killed"."""
        done, calls = self.run(call)
        if len(calls) < call:
            return "missed"  # another run may need a call less, such as for a lock that was free
        try:
            return self.judge(done)
        except (AssertionError, ValueError, OSError) as error:
            raise AssertionError(
                f"{self.scenario.name}:{self.kind}, call {calls[call - 1]}: {error}\n"
                f"exit code {done.returncode}: {done.stdout[-600:]}{done.stderr}"
            ) from error

    def judge(self, done):
        scenario = self.scenario
        output = done.stdout + done.stderr
        noted = self.kind == "blind" and done.returncode == 0 and "is left out" in output
        if not noted:
            scenario.inspect()
        found = FOREIGN.search(output)
        assert not found, f"foreign words: {found.group()}"
        outcome = {0: "survived", -signal.SIGKILL: "killed"}.get(done.returncode, "refused")
        if noted:
            outcome = "noted"
        elif outcome == "survived":
            assert scenario.finish_state() == scenario.finished, "exit code 0, but not all is done"
        elif outcome == "refused":
            assert done.returncode in (1, 2), "an odd exit code"
            words = [
                line for line in output.splitlines() if "group-muon: " in line or "failed" in line
            ]
            assert words and (self.kind == "short" or self.names_reason(output)), "no reason given"
        again = program(*scenario.again(), check=False)
        assert again.returncode == 0, f"it cannot be ended: {again.stdout[-300:]}{again.stderr}"
        scenario.inspect()
        assert scenario.finish_state() == scenario.finished, "it ends otherwise than undisturbed"
        assert not scenario.leftovers(), f"left for ever: {scenario.leftovers()}"
        return outcome

    def names_reason(self, output):
        reasons = ("No space left on device", "Input/output error", "damaged", "killed", "cannot")
        return any(reason in output for reason in reasons)


def kill_trial(scenario, draw, seconds):
    """Kills a command at a random moment, again and again until it is done. Returns the number of kills."""
    scenario.begin()
    command, kills = scenario.words(), 0
    while True:
        process = subprocess.Popen(
            [PROGRAM, *map(str, command)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        moment = draw.uniform(0.1, 1.1) * seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moment)
        if process.poll() is None:
            process.kill()
            kills += 1
        errors = process.communicate()[1].decode()
        scenario.inspect()
        if process.returncode == 0:
            return kills
        assert process.returncode == -signal.SIGKILL, f"{scenario.name}: {errors}"
        command = scenario.again()


def run_kills(scenario, count, seed=0):
    """At least `count` kills. Returns kills and endings."""
    start = time.monotonic()
    scenario.begin()
    program(*scenario.words())
    seconds = time.monotonic() - start
    draw = random.Random(seed)
    kills = ends = 0
    while kills < count:
        kills += kill_trial(scenario, draw, seconds)
        ends += 1
        assert not scenario.leftovers(), f"left for ever: {scenario.leftovers()}"
        assert scenario.finish_state() == scenario.finished, "it ends otherwise than undisturbed"
    return kills, ends


def wanted(words):
    """The scenarios and kinds that are named, or all."""
    for scenario in SCENARIOS:
        kinds = ("blind",) if scenario is Sample else KINDS
        for kind in kinds:
            if not words or {scenario.name, f"{scenario.name}:{kind}", f":{kind}"} & set(words):
                yield scenario, kind


def faults_main(words, base):
    library = build_library(base)
    total, failures = Counter(), []
    made = {}
    for scenario, kind in wanted(words):
        made.setdefault(scenario, None)
        made[scenario] = made[scenario] or scenario(base)
        faults = Faults(made[scenario], kind, library)
        calls, outcomes, start = faults.calls(), Counter(), time.monotonic()
        for call in range(1, len(calls) + 1):
            try:
                outcomes[faults.trial(call)] += 1
            except AssertionError as error:
                outcomes["FAILED"] += 1
                failures.append(str(error))
                print(error, flush=True)
        total += outcomes
        counts = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
        print(
            f"{scenario.name:9} {kind:7} {len(calls):5} calls: {counts or 'none'}"
            f"  ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    print(
        f"{sum(total.values())} faults: " + ", ".join(f"{n} {k}" for k, n in sorted(total.items()))
    )
    return 1 if failures else 0


def kills_main(words, base):
    count = int(words[0]) if words else 25
    lengths = {Tokenize: 20, Train: 30, Study: 20, Report: 1, Figures: 1}
    total = 0
    for scenario, length in lengths.items():
        kills, ends = run_kills(scenario(base, length), count, seed=int(time.time()))
        total += kills
        print(
            f"{scenario.name:9} {kills:4} kills, {ends} times ended with the same bytes", flush=True
        )
    print(f"{total} kills")
    return 0


def main(words):
    mains = {"faults": faults_main, "kills": kills_main}
    if not words or words[0] not in mains:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory(prefix="hardships-") as folder:
        return mains[words[0]](words[1:], pathlib.Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
