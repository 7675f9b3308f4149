"""Inputs to begin with and words to mix in, for every fuzz target: made from the files of this repository."""

import json
import pathlib
import re
import struct

ROOT = pathlib.Path(__file__).resolve().parents[2]
# fmt: off
JSON_WORDS = ["{", "}", "[", "]", '"', ":", ",", "null", "true", "1e999", "-1", "9223372036854775807",
              "18446744073709551616", "\\u0000"]
TOML_WORDS = ["[[", "]]", "[", "]", "=", '"', '"' * 3, "'", "'" * 3, "nan", "inf", "0x", "1979-05-27", "{", "}", "true",
              "#", "\\u0000", "ü", "\\\n"]
# fmt: on
RUN = ["packed", "three-way", "qk-6-random", "table1", "all", "6:random", "auto", "bf16", "fp32"]


def text(*lines):
    return "\n".join(map(str, lines)).encode()


def toml_files():
    return [path.read_text() for path in sorted((ROOT / "configs").glob("*.toml"))]


def is_study(config):
    return bool(re.search(r"^settings\b", config, re.M))


def keys():
    """Names of options, from the configuration files and the list of the optimizer's options."""
    options = (ROOT / "docs/options.md").read_text()
    found = re.findall(r"^#? ?([a-z][a-z0-9-]+) = ", "\n".join(toml_files()), re.M)
    return sorted({*found, *re.findall(r"^\| `(\w+)`", options, re.M)})


def commands():
    """The command lines in the documents, and every flag that the tests of wrong words use."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    lines = re.findall(r"group-muon ((?:.*\\\n)*.*)", "\n".join(page.read_text() for page in pages))
    return [re.sub(r"\\\n|`.*", "", line).split() for line in lines]


def flags():
    sources = [path.read_text() for path in sorted((ROOT / "cli").glob("*.cpp"))]
    declared = re.findall(r'"(?:-\w,)?(--[a-z-]+)"', "\n".join(sources))
    return sorted({*declared, *("--" + key.replace("_", "-") for key in keys())})


def shard(tokens):
    return struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(
        f"<{len(tokens)}H", *tokens
    )


def safetensors():
    entry = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}
    other = {"dtype": "BF16", "shape": [], "data_offsets": [8, 10]}
    header = json.dumps({"__metadata__": {"step": "4"}, "a": entry, "b.c": other}).encode()
    raw = struct.pack("<Q", len(header)) + header + bytes(10)
    return [b"0\n" + raw, b"1\n" + header + b"\n---\n" + bytes(10), b"1\n{}", b"0\n"]


def manifest():
    shards = [{"name": "train_0.bin", "tokens": 7, "crc32c": "00abcdef"}]
    known = {"entries": 300, "crc32c": "00000000"}
    whole = {"format": 1, "vocabulary": known, "tokens_per_crc32c": 524288, "shards": shards}
    return [b"1\n" + json.dumps({**whole, "made_from": {"a": 1}}).encode(), b"0\n{}"]


def state():
    files = {
        f"{name}.safetensors": {"bytes": 40, "crc32c": 12345} for name in ("model", "optimizer")
    }
    rest = {"seconds": 1.5, "validation_loss": None, "training_tokens": 9, "data_crc32c": 7}
    whole = {"version": 2, "step": 4, **rest, "config": {"steps": "4"}, "files": files}
    return [b"1\n" + json.dumps(whole).encode(), b"0\n" + json.dumps(whole).encode()]


def metrics():
    steps = [{"step": n, "loss": 2.5, "seconds": n / 2, "optimizer_seconds": 0.1} for n in (1, 2)]
    validation = {"step": 2, "validation_loss": 1.25, "engine": "portable"}
    return "\n".join(json.dumps(line) for line in (*steps, validation))


def results():
    machine = {"commit": "a", "torch": "2", "processor": "b", "cpu_capability": "AVX2"}
    of = {"weight": "w", "part": "q", "of": "gradient", "rows": 4, "cols": 8, "ranks": [1, 2, 3, 4]}
    values = {"squared_norm": 3.5, "nuclear_norm": 2, "first_order": 1}
    lines = [{"step": 1, **of, **values, "grouping": name} for name in ("three-way", "1")]
    parts = [
        json.dumps({"validation_loss": 1.25}),
        metrics(),
        json.dumps(machine),
        "\n".join(json.dumps(line) for line in lines),
    ]
    return ["\n---\n".join(parts).encode(), "\n---\n".join(parts[:2]).encode()]


LAYOUTS = [
    text(2303, 767, "rows q=12x64@0+64/6:random k=12x64@768+64/6:random~1 v=12x64@1536+64/all~2"),
    text(767, 767, "columns o=12x64@0+64/1:interval@0,6:random@2000"),
    text(5, 7, "rows transposed stack a=2x1@0,5/1 b=2x2@1+2/2:1-0"),
    text(1, 1, "rows flatten"),
    text(767, 767, "rows q=12x64@0+64/6:random*0.5~all*1.5/5~1"),
    text(767, 767, "columns o=12x64@0+64/1~2/3,6:random~all/5@0.5lr~2"),
]
SEEDS = {
    "arguments": [text(*words) for words in commands()],
    "config": [config.encode() for config in toml_files() if not is_study(config)],
    "documents": [
        text(
            "One document, it's 12 words",
            "<|endoftext|>",
            " ",
            "<|endoftext|>\r",
            "Noch eins: Ä 世界",
        )
    ],
    "grouping": [
        text(11, 5, "6:random"),
        text(11, 2000, "1:adjacent@0,6:random@2000"),
        text(3, 0, "2:3-1-0-2"),
        text(7, 1, "all"),
        text(11, 1, "4:interval"),
        text(11, 7, "6:random*0.5~all*1.5/5@0,1*1e-05@2000"),
        text(11, 60, "1,2:random:3~4/3@0.25lr,6@0.5lr"),
    ],
    "json": [metrics().encode(), *(item[2:] for item in (*manifest(), *state()))],
    "layout": LAYOUTS,
    "manifest": manifest(),
    "metrics": [text(1, metrics(), ""), text(9, metrics(), '{"step":', "")],
    "options": [
        text(
            1, "momentum=0.95 nesterov=true seed=3 method=gram coefficients=polar_express steps=5"
        ),
        text(2, "lr=1e-3 names=a,b custom_coefficients=3.4,-4.7,2.0 restarts=2 precision=fp32"),
        text(0, "method=exact eps=1e-7 tail_steps=2 engine=portable"),
    ],
    "results": results(),
    "safetensors": safetensors(),
    "shapes": [
        b"[sizes]\nlayers = 2\nwidth = 64\nheads = 4\nkv-heads = 2\ngated = true\nexperts = 4\nactive-experts = 2\n",
        b"[sizes]\nlayers = 2\nheads = 4\nhead-dim = 8\nq-rank = 6\nkv-rank = 4\nrope-dim = 2\ntied = false\n",
        b'[[weight]]\nname = "a"\nshape = [8, 6]\nlayout = "rows q=4x2@0+2/2:random"\ncopies = 3\nactive = 0.5\n'
        b'[[weight]]\nshape = [5]\nlayout = "adamw"\n',
        b"[model]\nlayers = 2\nwidth = 96\n",
    ],
    "shards": [
        b"0\n65535\n0\n2\n" + shard([1, 2, 3, 65534]),
        b"1\n99\n1\n1\n" + bytes(range(20)),
        b"2\n65535\n3\n4\n" + bytes(range(64)),
        b"3\n65535\n0\n1\n" + bytes(4),
    ],
    "state": state(),
    "study": [
        *(b"\n---\n" + config.encode() for config in toml_files() if is_study(config)),
        b'[model]\nlayers = 2\n---\nbase = "base.toml"\nsettings = "table1"\n'
        b'[[own-settings]]\nname = "own"\noptions = { muon-lr = 0.1 }\n'
        b'[[variants]]\nname = "half"\nsettings = ["own"]\noptions = { adamw-lr = 0.1 }\n'
        b'[noise]\nsetting = "own"\nseeds = 1\n[more-seeds]\nown = 3\n[tuned]\nown = { momentum = 0.9 }\n',
    ],
    "vocabulary": [
        text(1, "YWI= 256", "YWJj 257\n---", "abcab aab"),
        text(2, "#version: 0.2", "a b", "ab c\n---", " abc abab"),
        text(0, "IQ== 0", "Ig== 1"),
    ],
}
WORDS = {
    "arguments": [*flags(), *RUN, "tokenize", "train", "sample", "analyze", "study", "run", "report", "--", "-o", "="],
    "config": [*keys(), *TOML_WORDS, *RUN],
    "documents": ["<|endoftext|>", "\r\n", "'ll", "\u3000", "\u00a0", "\ufffd"],
    "grouping": [":random", ":interval", ":adjacent", "@", ",", "all", "9223372036854775807", "~all/5",
                 "*0.5", "*1e-05", "*nan", "*-0", "@0.5lr", "lr", "/1"],
    "json": JSON_WORDS,
    "layout": ["rows", "columns", "transposed", "stack", "flatten", "/all", "@0+", "~", "9223372036854775807",
               "~all/5", "*0.5", "@0.5lr"],
    "manifest": [*JSON_WORDS, "format", "entries", "shards", "tokens", "crc32c", "made_from"],
    "metrics": [*JSON_WORDS, "step", "validation_loss"],
    "options": [*keys(), "=", ",", "nan", "inf", "1e308", *RUN],
    "results": [*JSON_WORDS, "step", "validation_loss", "seconds", "engine", "ranks", "squared_norm"],
    "safetensors": [*JSON_WORDS, "dtype", "shape", "data_offsets", "F32", "F64", "BF16", "F16", "I64", "__metadata__"],
    "shapes": [*keys(), *TOML_WORDS, "sizes", "weight", "shape", "layout", "copies", "active", "adamw", "rows"],
    "shards": [],
    "state": [*JSON_WORDS, "version", "step", "files", "bytes", "crc32c", "validation_loss"],
    "study": [*keys(), *TOML_WORDS, *RUN, "own-settings", "variants", "noise", "more-seeds", "first-seed", "tuned", "options", "seeds", "base"],
    "vocabulary": ["==", "YWI=", "#version", " 256", "\u0120", "\n---\n"],
}  # fmt: skip


def dictionary(target):
    """The words of a target as libFuzzer reads them."""
    escaped = ("".join(f"\\x{byte:02x}" for byte in word.encode()) for word in WORDS[target])
    return "".join(f'"{word}"\n' for word in escaped)
