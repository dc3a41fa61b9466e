"""The commands that add missing packages, depending on how batchkit was installed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Literal

DISTRIBUTION = "batchkit-vllm"
"""The name on PyPI, where ``batchkit`` is another project."""
# Extras that `make setup` installs.
_BY_SETUP = ("vllm", "transformers", "charts", "excel", "media", "speech", "pdf", "ray", "store")


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of ``extra`` in ``pyproject.toml``."""
    folder = _checkout()
    if folder is None:
        return f"pip install {_packages_of(extra)}"
    if extra in _BY_SETUP:
        return f"make -C {quote(str(folder))} setup"
    return f"pip install -e {quote(f'{folder}[{extra}]')}"


def how_to_reinstall(build: Literal["cpu", "cuda"] | None = None) -> str:
    """Return the command that reinstalls vLLM and batchkit. ``build`` selects the CPU or the CUDA build of vLLM."""
    folder = _checkout()
    if folder is None:
        return f"pip install --force-reinstall {_packages_of('cpu' if build == 'cpu' else 'vllm')}"
    return f"make -C {quote(str(folder))} clean setup" + (f" BUILD={build}" if build else "")


def _packages_of(extra: str) -> str:
    """Return the packages of ``extra``, quoted for a shell. The names are read from the metadata of the installed
    batchkit."""
    parts = (text.partition("; extra == ") for text in metadata.requires(DISTRIBUTION) or ())
    return " ".join(quote(package) for package, _, of in parts if of.strip("'\"") == extra)


def _checkout() -> Path | None:
    """Return the repository's folder if batchkit is imported from a checkout, otherwise None."""
    folder = Path(__file__).parents[2]
    return folder if (folder / "scripts" / "setup.sh").is_file() else None
