"""Writes what follows from the library's list of options (group_muon/options.h) into Python's signatures and into
docs/options.md. ./run generate calls it; a test fails if the files are not up to date.

usage: generate.py LIBRARY"""

import pathlib
import re
import sys
import textwrap

import torch

ROOT = pathlib.Path(__file__).parents[1]
OPTIMIZER, STEP_OPTIONS, PAGE = (
    "python/group_muon/optimizer.py", "python/group_muon/options.py", "docs/options.md",
)  # fmt: skip

# In Python, names come with the parameters, and `coefficients` takes a list.
ONLY_CPP = ("names", "custom_coefficients")
PYTHON_TYPES = {"float": "float", "int": "int", "bool": "bool", "str": "str"}
WIDER_TYPES = {
    "lr": "float | Tensor",
    "coefficients": "str | Sequence[Sequence[float]]",
    "precision": "str | torch.dtype",
    "partitions": "Sequence[str] | None",
}
MORE_HELP = {
    "layout": "; see packed_qkv and the other layout functions",
    "coefficients": ", or your own: a list of (a, b, c), one per iteration (C++: custom_coefficients)",
}
# Defaults that are empty lists or layouts, in the words of the page.
SHOWN_DEFAULTS = {"layout": "plain", "partitions": "none", "restarts": "chosen"}


def python_options():
    names = ("name", "type", "default", "part", "help")
    options = [dict(zip(names, row)) for row in torch.ops.group_muon.options()]
    for option in options:
        option["help"] += MORE_HELP.get(option["name"], "")
    return [option for option in options if option["name"] not in ONLY_CPP]


def python_type(option):
    kind = option["type"].removesuffix("[]")
    plain = PYTHON_TYPES[kind] if kind == option["type"] else f"Sequence[{PYTHON_TYPES[kind]}]"
    return WIDER_TYPES.get(option["name"], plain)


def python_default(option):
    if python_type(option).endswith("| None"):
        return "None"
    if option["type"].endswith("[]"):
        return "()"
    text = option["default"]
    if option["type"] == "float":
        return text if "." in text or "e" in text else text + ".0"
    return {"bool": text.capitalize(), "str": f'"{text}"'}.get(option["type"], text)


def signature(options):
    return [f"{o['name']}: {python_type(o)} = {python_default(o)}," for o in options]


def in_docstring(options):
    lines = []
    for option in options:
        entry = f"{option['name']}: {option['help']}."
        lines += textwrap.wrap(entry, 92, subsequent_indent="    ", break_on_hyphens=False)
    return lines


def in_page(options):
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in options:
        words = re.sub(r"\b[a-z0-9]+(_[a-z0-9]+)+\b", r"`\g<0>`", option["help"])
        default = SHOWN_DEFAULTS.get(option["name"], option["default"])
        lines.append(f"| `{option['name']}` | {default} | {words} |")
    return lines


def regions():
    """(file, the line that begins, the line that ends, the lines between). A docstring has no comments: there the
    region begins after an argument and ends before the first argument that is Python's alone."""
    options = python_options()
    of_step = [option for option in options if option["part"] != "weight"]
    of_block = [option for option in options if option["part"] == "orthogonalize"]
    begin, end = "# options: begin (./run generate)", "# options: end"
    annotations = [f"{option['name']}: {python_type(option)}" for option in of_step]
    arguments = [f"{option['name']}={option['name']}," for option in of_block]
    words = begin.replace("begin", "begin orthogonalize")
    return [
        (STEP_OPTIONS, begin, end, annotations),
        (OPTIMIZER, begin, end, signature(options)),
        (OPTIMIZER, words, end, signature(of_block)),
        (OPTIMIZER, words.replace("orthogonalize", "arguments"), end, arguments),
        (OPTIMIZER, "model_options: for a model", "maximize: step", in_docstring(options)),
        (PAGE, begin.replace("#", "<!--") + " -->", end.replace("#", "<!--") + " -->", in_page(options)),
    ]  # fmt: skip


def filled(text, begin, end, lines):
    """The text with these lines between the line that starts with `begin` and the next that starts with `end`."""
    place = re.search(
        rf"^( *){re.escape(begin)}[^\n]*\n(.*?)^\1{re.escape(end)}", text, re.DOTALL | re.MULTILINE
    )
    if place is None:
        sys.exit(f"generate.py: there is no '{begin}' … '{end}'")
    body = "".join(f"{place[1]}{line}\n" for line in lines)
    return text[: place.start(2)] + body + text[place.end(2) :]


def generated():
    """The path and text of every file as it should be."""
    texts = {}
    for name, begin, end, lines in regions():
        text = texts.get(name) or (ROOT / name).read_text()
        texts[name] = filled(text, begin, end, lines)
    return texts


def main():
    torch.ops.load_library(sys.argv[1])
    for name, text in generated().items():
        if (ROOT / name).read_text() != text:
            (ROOT / name).write_text(text)
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
