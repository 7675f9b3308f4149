"""Data folders: whole or not there, made in bounded memory, and checked by those who read them."""

import contextlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest
from running import PROGRAM, arguments, curve, metrics, program, random_walk, write_shard

WORDS = [f"w{i:x}" for i in range(2000)]


def make_text(path, megabytes, seed=0, documents=20):
    """A text of random words in several documents."""
    draw = random.Random(seed)
    line = " ".join(draw.choices(WORDS, k=20_000)) + "\n"
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            file.write(line)
            if draw.random() < documents * len(line) / (megabytes * 1e6):
                file.write("<|endoftext|>\n")
    return path


def tokenize(out, *inputs, check=True, learn=300, **options):
    return program("tokenize", "--out", out, "--learn", learn, *inputs, check=check, **options)


def contents(folder):
    """All files of a folder, or nothing if there is none."""
    if not folder.exists():
        return None
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(done, *messages):
    """Checks for one clear line without a library's words."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode in (1, 2) and len(lines) == 1, (done.returncode, done.stderr)
    assert lines[0].startswith("group-muon: ") and len(lines[0]) < 600
    for message in messages:
        assert str(message) in lines[0]
    for foreign in ("exception", "filesystem error", "std::", "basic_string"):
        assert foreign not in lines[0]


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Data of ours: several training shards, one for validation."""
    folder = tmp_path_factory.mktemp("original")
    text = make_text(folder / "text.txt", 0.4)
    tokenize(folder / "made", text, "--shard-tokens", 50_000, "--validation-fraction", 0.2)
    assert len(list((folder / "made").glob("train_*.bin"))) >= 3
    return folder


@pytest.fixture
def text(tmp_path, original):
    return pathlib.Path(shutil.copy(original / "text.txt", tmp_path))


@pytest.fixture
def made(tmp_path, original):
    return shutil.copytree(original / "made", tmp_path / "made")


class TestManifest:
    def test_it_lists_every_file_with_its_checksum(self, made, original):
        manifest = json.loads((made / "manifest.json").read_text())
        shards = sorted(path.name for path in made.glob("*.bin"))
        assert sorted(shard["name"] for shard in manifest["shards"]) == shards
        smallest = min(manifest["shards"], key=lambda shard: shard["tokens"])
        body = (made / smallest["name"]).read_bytes()[1024:]
        assert len(body) == 2 * smallest["tokens"]
        assert smallest["crc32c"] == f"{crc32c(body):08x}"
        vocabulary = (made / "vocabulary.tiktoken").read_bytes()
        assert manifest["vocabulary"] == {"entries": 300, "crc32c": f"{crc32c(vocabulary):08x}"}
        made_from = manifest["made_from"]
        assert (
            made_from["inputs"] == [str(original / "text.txt")]
            and made_from["shard-tokens"] == 50_000
        )
        for split, counts in (("train", "training_text"), ("val", "validation_text")):
            tokens = [s["tokens"] for s in manifest["shards"] if s["name"].startswith(split)]
            assert sum(tokens) == made_from[counts]["tokens"] > 0

    def train(self, data, out, **options):
        options = {"vocabulary": 0, "steps": 2, "warmdown": 1, **options}
        return program("train", *arguments(data, out, **options), check=False)

    def test_training_takes_whole_data_without_a_note(self, made, tmp_path):
        done = self.train(made, tmp_path / "run")
        assert done.returncode == 0 and "manifest" not in done.stdout

    def test_foreign_shards_are_taken_with_a_note(self, made, tmp_path, data):
        done = self.train(data, tmp_path / "run", vocabulary=64)
        assert done.returncode == 0
        assert done.stdout.count("note: ") == 1 and "has no manifest.json" in done.stdout
        (made / "manifest.json").unlink()  # as an older version left it
        done = self.train(made, tmp_path / "another")
        assert done.returncode == 0 and "has no manifest.json" in done.stdout

    @pytest.mark.parametrize("place", ["first", "last"])
    def test_a_flipped_bit_is_found(self, made, tmp_path, place):
        shard = made / "train_000001.bin"
        content = bytearray(shard.read_bytes())
        content[1024 if place == "first" else -1] ^= 1
        shard.write_bytes(content)
        refused(self.train(made, tmp_path / "run"), shard, "is damaged", "tokenize --overwrite")
        assert not (tmp_path / "run").exists()

    def test_a_flipped_bit_is_found_by_analyze(self, made, tmp_path):
        assert self.train(made, tmp_path / "run").returncode == 0
        shard = made / "val_000000.bin"
        content = bytearray(shard.read_bytes())
        content[2000] ^= 1
        shard.write_bytes(content)
        refused(program("analyze", tmp_path / "run", check=False), shard, "is damaged")

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda d: (d / "train_000001.bin").unlink(), "lacks 'train_000001.bin'"),
            (
                lambda d: shutil.copy(d / "train_000000.bin", d / "train_000009.bin"),
                "has a shard 'train_000009.bin' that its manifest does not list",
            ),
            (
                lambda d: write_shard(d / "train_000001.bin", random_walk(100)),
                "holds 100 tokens, but the manifest says 50000",
            ),
            (lambda d: (d / "vocabulary.tiktoken").unlink(), "vocabulary.tiktoken' cannot be read"),
            (
                lambda d: (d / "vocabulary.tiktoken").write_text("YQ== 0\n"),
                "is not the vocabulary that the shards were made with",
            ),
            (lambda d: os.truncate(d / "manifest.json", 200), "manifest.json' is damaged"),
            (lambda d: (d / "manifest.json").write_text("[" * 100_000), "is damaged"),
            (lambda d: (d / "manifest.json").write_text("{}"), "is damaged"),
            (
                lambda d: (d / "manifest.json").write_text(
                    (d / "manifest.json").read_text().replace('"entries": 300', '"entries": 301')
                ),
                "manifest.json' is damaged",
            ),
        ],
    )
    def test_a_folder_that_differs_from_its_manifest_is_refused(
        self, made, tmp_path, spoil, message
    ):
        spoil(made)
        for vocabulary in (0, 300):
            refused(self.train(made, tmp_path / "run", vocabulary=vocabulary), message)
        assert not (tmp_path / "run").exists()

    def test_a_vocabulary_smaller_than_the_data_s_is_refused(self, made, tmp_path):
        refused(
            self.train(made, tmp_path / "run", vocabulary=299),
            "made with a vocabulary of 300 entries, but the model's vocabulary is 299",
        )


class TestWholeOrNotThere:
    def test_a_killed_tokenize_leaves_nothing_and_the_next_cleans_up(self, tmp_path, made):
        vocabulary = made / "vocabulary.tiktoken"
        old = contents(made)
        for out, flags in ((tmp_path / "new", []), (made, ["--overwrite"])):
            command = [PROGRAM, "tokenize", "-", "--out", str(out), "--vocabulary", str(vocabulary)]
            command += [
                "--shard-tokens",
                "50000",
                "--validation-fraction",
                "0",
                "--threads",
                "1",
                *flags,
            ]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            with contextlib.suppress(BrokenPipeError):
                # It is in the midst of writing shards, since it waits for more text.
                process.stdin.write(b"word and word " * 400_000)
                deadline = time.monotonic() + 30
                while not list(tmp_path.glob(f".{out.name}.writing-*/train_000003.bin")):
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.01)
                busy = tokenize(out, vocabulary, *flags, check=False)
                refused(busy, f"another process is writing '{out}'")
                process.send_signal(signal.SIGKILL)
                process.stdin.close()
            assert process.wait() == -signal.SIGKILL
            assert contents(out) == (old if out == made else None)
            assert list(tmp_path.glob(f".{out.name}.writing-*"))
            program("tokenize", vocabulary, "--out", out, "--vocabulary", vocabulary, *flags)
            assert not list(tmp_path.glob(".*"))

    @pytest.mark.parametrize("flags", [[], ["--overwrite"]])
    def test_kills_at_random_moments(self, tmp_path, made, flags):
        text = make_text(tmp_path / "other.txt", 1.5, seed=1)
        arguments = [text, "--shard-tokens", 100_000]
        start = time.monotonic()
        tokenize(tmp_path / "expected", *arguments)
        seconds = time.monotonic() - start
        old, new = contents(made), contents(tmp_path / "expected")
        out = made if flags else tmp_path / "out"
        draw = random.Random(len(flags))
        killed = 0
        for _ in range(8):
            if flags and contents(out) == new:
                shutil.rmtree(out)
                out.mkdir()
                for name, content in old.items():
                    (out / name).write_bytes(content)
            if not flags and out.exists():
                shutil.rmtree(out)
            command = [PROGRAM, "tokenize", "--out", out, "--learn", 300, *arguments, *flags]
            process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
            time.sleep(draw.uniform(0.3, 1.0) * seconds)
            process.kill()
            killed += process.wait() == -signal.SIGKILL
            assert contents(out) in ([old, new] if flags else [None, new])
        assert killed > 0
        if flags or not out.exists():
            tokenize(out, *arguments, *flags)
        assert contents(out) == new
        assert not list(tmp_path.glob(f".{out.name}.*"))

    def test_data_needs_a_folder_of_its_own(self, tmp_path, text, made):
        (tmp_path / "notes.md").write_text("mine")
        for flags in ([], ["--overwrite"]):
            refused(tokenize(tmp_path, text, *flags, check=False), "also contains '", "--out")
        refused(tokenize(text, text, "--overwrite", check=False), "is not a folder")
        refused(tokenize(made, text, check=False), "already contains shards", "--overwrite")
        (tmp_path / "empty").mkdir()
        refused(
            tokenize(".", text, check=False, cwd=tmp_path / "empty"), "is the current folder or"
        )
        tokenize(tmp_path / "empty", text)
        (tmp_path / "link").symlink_to(made)
        tokenize(tmp_path / "link", text, "--overwrite")
        assert (tmp_path / "link").is_symlink()
        assert contents(made) == contents(tmp_path / "empty")


@pytest.fixture
def small_disk(tmp_path):
    """Makes file systems of a given size."""
    mounted = []

    def make(kilobytes):
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"there is no mount: {error}")
        if done.returncode != 0:
            pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


class TestFullDisk:
    def test_nothing_is_left_and_nothing_is_reported_as_done(self, tmp_path, text, small_disk):
        tokenize(tmp_path / "expected", text)
        expected = contents(tmp_path / "expected")
        need = sum(len(content) for content in expected.values()) // 1024
        succeeded = []
        for kilobytes in [16, need // 2, need - 8, need - 4, need, need + 4, need + 64]:
            disk = small_disk(kilobytes)
            done = tokenize(disk / "out", text, check=False)
            if done.returncode == 0:
                assert contents(disk / "out") == expected
            else:
                refused(done, disk, "No space left on device")
                assert list(disk.iterdir()) == []
            succeeded.append(done.returncode == 0)
        assert not succeeded[1] and succeeded[-1]

    def test_old_data_stays(self, text, small_disk):
        disk = small_disk(1024)
        tokenize(disk / "out", text, "--validation-fraction", 0.3)
        old = contents(disk / "out")
        refused(tokenize(disk / "out", text, "--overwrite", check=False), "No space left on device")
        assert contents(disk / "out") == old
        assert [path.name for path in disk.iterdir()] == ["out"]

    def test_standard_input_that_does_not_fit(self, made, small_disk):
        disk = small_disk(256)
        words = ["tokenize", "-", "--out", disk / "out"]
        words += ["--vocabulary", made / "vocabulary.tiktoken"]
        refused(program(*words, check=False, input="word " * 400_000), "No space left on device")
        assert list(disk.iterdir()) == []

    def test_a_limit_on_file_sizes(self, tmp_path, text):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        done = tokenize(tmp_path / "out", text, check=False, preexec_fn=limit)
        refused(done, "train_000000.bin' cannot be written: File too large")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def peak(*command, **options):
    """A process's largest resident memory, in MB."""
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, **options)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss / 1024


class TestMemory:
    """The text is several times as large as the memory that may be used for it."""

    @pytest.mark.parametrize("kind", ["documents", "one document", "standard input", "learning"])
    def test_it_does_not_grow_with_the_text(self, tmp_path, made, kind):
        documents = 1 if kind in ("one document", "standard input") else 50
        peaks = []
        for megabytes in (8, 80):
            text = make_text(
                tmp_path / f"{megabytes}.txt", megabytes, documents=0 if documents == 1 else 50
            )
            out = tmp_path / f"out-{megabytes}"
            words = [PROGRAM, "tokenize", "--threads", 2, "--out", out]
            words += ["--learn", 300] if kind == "learning" else []
            words += [] if kind == "learning" else ["--vocabulary", made / "vocabulary.tiktoken"]
            if kind == "standard input":
                with text.open() as file:
                    peaks.append(peak(*words, "-", stdin=file))
            else:
                peaks.append(peak(*words, text))
            counts = json.loads((out / "manifest.json").read_text())["made_from"]
            split = [counts[f"{name}_text"] for name in ("training", "validation")]
            assert sum(part["bytes"] for part in split) > 0.99e6 * megabytes
            assert all(part["documents"] > 0 for part in split)
        assert peaks[1] - peaks[0] < 12

    def test_a_word_of_many_megabytes(self, tmp_path, made):
        draw = random.Random(0)
        peaks = []
        for megabytes in (1, 9):
            path = tmp_path / f"{megabytes}.txt"
            path.write_text("".join(draw.choices("abcdefgh", k=megabytes * 1_000_000)))
            words = [PROGRAM, "tokenize", "--out", tmp_path / f"out-{megabytes}"]
            words += ["--vocabulary", made / "vocabulary.tiktoken", "--validation-fraction", 0]
            peaks.append(peak(*words, path))
        assert peaks[1] - peaks[0] < 8 * 40

    def test_a_word_without_end_is_refused(self, tmp_path, made):
        words = ["--vocabulary", made / "vocabulary.tiktoken", "--out", tmp_path / "out"]
        with (tmp_path / "zeros").open("wb") as file:
            file.truncate(200 << 20)
        done = program("tokenize", tmp_path / "zeros", *words, check=False)
        refused(done, "near byte 0: more than 64 MiB of nothing but letters", "is it text?")

    def test_threads_that_cannot_be_started_are_done_without(self, tmp_path, made):
        text = make_text(tmp_path / "many.txt", 20)
        words = [text, "--vocabulary", made / "vocabulary.tiktoken"]
        program("tokenize", *words, "--out", tmp_path / "one", "--threads", 1)
        # As much address space as the program takes by itself, and room for a few threads.
        for room in (100 << 20, 400 << 20, 4 << 30):
            with subprocess.Popen([PROGRAM, "tokenize", "-", "--out", tmp_path / "x", *words[1:]],
                                  stdin=subprocess.PIPE) as process:  # fmt: skip
                time.sleep(0.5)
                status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                process.kill()
            own = int(status.split("VmPeak:")[1].split()[0]) * 1024

            def limit(bytes=own + room):
                resource.setrlimit(resource.RLIMIT_AS, (bytes, bytes))

            out = tmp_path / f"out-{room}"
            done = program(
                "tokenize", *words, "--out", out, "--threads", 1000, check=False, preexec_fn=limit
            )
            if done.returncode == 0:
                assert (
                    contents(out)["train_000000.bin"]
                    == contents(tmp_path / "one")["train_000000.bin"]
                )
            else:
                refused(done, "memory ran out", "--threads")
        assert done.returncode == 0


class TestUnderARunningTraining:
    STEPS = 400

    def start(self, data, out):
        options = {"steps": self.STEPS, "warmdown": 100, "validation-interval": 50, "batch": 4}
        command = [PROGRAM, "train", *arguments(data, out, **options), "--log-interval", "5"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for line in process.stdout:
            if line.startswith("step 20/"):
                return process
        raise AssertionError(process.stderr.read())

    def finish(self, process):
        _, stderr = process.communicate(timeout=120)
        return process.returncode, stderr

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda path: os.truncate(path, 0),
            lambda path: os.truncate(path, path.stat().st_size // 2),
            lambda path: write_shard(path, random_walk(20000, seed=9)),
        ],
        ids=["emptied", "truncated", "overwritten"],
    )
    @pytest.mark.parametrize("split", ["train", "val"])
    def test_a_shard_that_is_written_to_stops_it_with_words(self, tmp_path, data, spoil, split):
        process = self.start(data, tmp_path / "run")
        spoil(data / f"{split}_000000.bin")
        code, stderr = self.finish(process)
        assert code == 1, stderr
        assert f"{split}_000000.bin' was changed while it was in use" in stderr
        assert "The last checkpoint is intact" in stderr
        losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
        assert all(loss > 0 for loss in losses)

    def test_a_shard_that_is_deleted_or_replaced_does_not_disturb_it(self, tmp_path, data):
        shutil.copytree(data, tmp_path / "copy")
        undisturbed = self.start(tmp_path / "copy", tmp_path / "undisturbed")
        assert self.finish(undisturbed)[0] == 0
        process = self.start(data, tmp_path / "run")
        write_shard(tmp_path / "other.bin", random_walk(20000, seed=9))
        (tmp_path / "other.bin").rename(data / "train_000000.bin")
        (data / "val_000000.bin").unlink()
        code, stderr = self.finish(process)
        assert code == 0, stderr
        assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")


class TestWords:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["t.txt", "--validation-fraction", "nan"], "number from 0 to 0.5, not 'nan'"),
            (["t.txt", "--validation-fraction", "0.6"], "number from 0 to 0.5, not '0.6'"),
            (["t.txt", "--threads", "-1"], "whole number from 1 to 1000000, not '-1'"),
            (["t.txt", "--threads", "two"], "not 'two'"),
            (["t.txt", "--shard-tokens", "3000000000"], "from 1 to 2147483647, not '3000000000'"),
            (["t.txt", "--learn", "0"], "whole number from 257 to 65536, not '0'"),
            (["empty.txt"], "the inputs contain no text"),
            (["empty.txt", "t.txt", "--validation", "blank.txt"], "--validation contain no text"),
            (["t.txt", "--validation", "-", "--learn", "300"], "cannot read standard input"),
            (["-", "--validation", "-"], "can be read only once"),
            (["t.txt", "--vocabulary", "/dev/null"], "the vocabulary '/dev/null' is empty"),
            (["t.txt", "--vocabulary", "/dev/zero"], "more than expected"),
            (["t.txt", "--vocabulary", "folder"], "'folder' cannot be read: Is a directory"),
            (["t.txt", "--vocabulary", "folder.tiktoken"], "cannot be read: Is a directory"),
            (["t.txt", "--vocabulary", "empty.tiktoken"], "'empty.tiktoken' is empty"),
            (["t.txt", "--vocabulary", "cut.tiktoken"], "line 300: expected a token in base64"),
            (["t.txt", "--vocabulary", "cut2.tiktoken"], "line 299: expected a token in base64"),
            (["t.txt", "--vocabulary", "twice.tiktoken"], "entries 5 and 299 of the vocabulary"),
            (["t.txt", "--vocabulary", "cut.bpe"], "is cut off: its last line has no line end"),
            (["t.txt", "--vocabulary", "other.bpe"], "line 1: expected two tokens of the lines"),
            (["folder"], "'folder' contains no .txt files"),
            (["/dev/null"], "'/dev/null' is neither a file nor a folder"),
            (["t.txt/x"], "'t.txt/x' is neither a file nor a folder"),
        ],
    )
    def test_bad_input_is_refused_with_the_value(self, tmp_path, made, words, message):
        (tmp_path / "t.txt").write_text("some text\n")
        (tmp_path / "empty.txt").write_text("")
        (tmp_path / "blank.txt").write_text(" \n\n")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder.tiktoken").mkdir()
        (tmp_path / "empty.tiktoken").write_text("")
        lines = (made / "vocabulary.tiktoken").read_text()
        (tmp_path / "cut.tiktoken").write_text(lines + "YWI")
        (tmp_path / "cut2.tiktoken").write_text(lines[:-2])
        (tmp_path / "twice.tiktoken").write_text(lines + "BQ== 299\n")
        (tmp_path / "cut.bpe").write_text("#version: 0.2\na b\nab c")
        (tmp_path / "other.bpe").write_text("ab c\n")
        if not {"--vocabulary", "--learn"} & set(words):
            words = [*words, "--vocabulary", "made/vocabulary.tiktoken"]
        done = program(
            "tokenize", *words, "--out", "out", check=False, cwd=tmp_path, input="standard input"
        )
        refused(done, message)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
