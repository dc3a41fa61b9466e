#!/usr/bin/env bash
# Builds llama.cpp's server for its tests: .venv/bin/llama-server, from the sources that llama-cpp-python
# ships, for any x86-64 processor with AVX2, or any 64-bit Arm. About two and a half minutes on two idle
# cores, once for each user: the program is kept in the cache folder (XDG_CACHE_HOME, else ~/.cache) and
# .venv links to it.
#
# Where it can't be built, two lines say why and those tests are skipped. With CI=true that is an error.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
target=$venv/bin/llama-server
reason=$venv/.llama-server-missing # what the skipped tests give as their reason
sdist="llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"

key=$({
    cat scripts/llama_server.sh scripts/llama_server/CMakeLists.txt
    uname -m
    getconf GNU_LIBC_VERSION 2>/dev/null || true
} | sha256sum | cut -c 1-16)
cache=${XDG_CACHE_HOME:-${HOME:-/nowhere}/.cache}/batchkit
if ! mkdir -p "$cache" 2>/dev/null || [ ! -w "$cache" ]; then cache=$(realpath "$venv"); fi
kept=$cache/llama-server-$key
log=$cache/llama-server.log

missing() { # its lines are the reason
    printf 'llama-server: %s\n' "$@" | tee "$reason" >&2
    rm -f "$target"
}
runs() { "$1" --version >/dev/null 2>&1; }
link() {
    ln -sfn "$kept" "$target"
    rm -f "$reason"
}

if runs "$kept"; then
    link
    exit 0
fi
for tool in cmake c++; do
    if ! command -v $tool >/dev/null; then
        missing "no $tool here; its tests are skipped"
        exit 0
    fi
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

build() {
    echo 'int main() {}' > "$scratch/empty.cpp"
    c++ "$scratch/empty.cpp" -o "$scratch/empty" || return # before 77 MB are fetched
    echo "llama-server: fetching 77 MB of sources, compiling them: about three minutes" >&3
    echo "$sdist" > "$scratch/wanted"
    "$venv/bin/python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --require-hashes \
        -r "$scratch/wanted" -d "$scratch" || return
    tar xzf "$scratch"/llama_cpp_python-*.tar.gz -C "$scratch" || return
    cmake -G Ninja -S scripts/llama_server -B "$scratch/build" \
        -DCMAKE_MAKE_PROGRAM="$(realpath "$venv/bin/ninja")" \
        -DLLAMA_CPP="$(echo "$scratch"/llama_cpp_python-*/vendor/llama.cpp)" \
        -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="-O0 -w" -DCMAKE_CXX_FLAGS="-O0 -w" || return
    "$venv/bin/ninja" -C "$scratch/build" --quiet llama-server || return
    "$scratch/build/bin/llama-server" --version || return
    mv "$scratch/build/bin/llama-server" "$kept.$$" && mv "$kept.$$" "$kept"
}

if build 3>&1 > "$log" 2>&1; then
    link
    exit 0
fi
error=$(grep -m 1 -iE '\b(error|fatal)\b.*:' "$log" || tail -n 1 "$log")
end="its tests are skipped; the whole log: $log"
if [ "${CI:-}" = true ]; then end="CI=true, so this is an error; the whole log: $log"; fi
missing "not built: ${error//"$scratch/"/}" "$end"
[ "${CI:-}" != true ]
