"""Files that are compiled for one kind of CPU must define nothing that the linker could merge with code of other
files: it might keep the copy that older CPUs cannot run. kernel_symbols.py OBJECT…"""

import re
import subprocess
import sys

# Functions that every file may define a copy of, by nm's letters.
MERGED = re.compile(r"^[0-9a-f]* [VWu] (?!DW\.ref\.)(.*)$", re.M)
OWN = re.compile(r"\b(group_muon|gpt)::(avx2|avx512|avx512_bf16|neon)::|group_muon_(avx|neon)")

bad = 0
for path in sys.argv[1:]:
    names = subprocess.run(
        ["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True
    ).stdout
    if not names:
        sys.exit(f"{path} defines nothing")
    for name in MERGED.findall(names):
        if not OWN.search(name):
            print(f"{path}: {name}")
            bad += 1
if bad or len(sys.argv) < 2:
    sys.exit(
        f"{bad} functions of {len(sys.argv) - 1} files may be merged with those of other files"
    )
print(f"{len(sys.argv) - 1} files define nothing that others could share")
