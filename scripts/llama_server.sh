#!/usr/bin/env bash
# Builds llama.cpp's server for its tests: .venv/bin/llama-server, from the sources that llama-cpp-python
# ships. Under two minutes on two idle cores, once; without cmake or a C++ compiler those tests are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
target=$venv/bin/llama-server
sdist="llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
stamp=$venv/.llama-server-stamp
key=$(cat scripts/llama_server.sh scripts/llama_server/CMakeLists.txt | cksum)
if [ -x "$target" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then exit 0; fi
for tool in cmake c++; do
    command -v $tool >/dev/null || { echo "llama-server: no $tool here; its tests are skipped"; exit 0; }
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo "llama-server: fetching 77 MB of sources, compiling them: two minutes"
echo "$sdist" > "$scratch/wanted"
"$venv/bin/python" -m pip download --quiet --no-deps --no-binary :all: --require-hashes \
    -r "$scratch/wanted" -d "$scratch"
tar xzf "$scratch"/llama_cpp_python-*.tar.gz -C "$scratch"
cmake -G Ninja -S scripts/llama_server -B "$scratch/build" -DCMAKE_MAKE_PROGRAM="$(realpath "$venv/bin/ninja")" \
    -DLLAMA_CPP="$(echo "$scratch"/llama_cpp_python-*/vendor/llama.cpp)" \
    -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="-O0 -w" -DCMAKE_CXX_FLAGS="-O0 -w" > "$scratch/log"
"$venv/bin/ninja" -C "$scratch/build" --quiet llama-server
mv "$scratch/build/bin/llama-server" "$target"
echo "$key" > "$stamp"
