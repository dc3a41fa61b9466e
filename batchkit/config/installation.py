"""How batchkit was installed, and so how a package that it lacks is added."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Literal

DISTRIBUTION = "batchkit-vllm"
"""Its name on the registry, where ``batchkit`` is another project's."""
# Extras of `make setup`.
_BY_SETUP = ("vllm", "transformers", "charts", "excel", "media", "speech", "pdf", "ray")


def how_to_install(extra: str) -> str:
    """The command that installs what ``extra`` of ``pyproject.toml`` names."""
    folder = _checkout()
    if folder is None:
        return f"pip install {_packages_of(extra)}"
    if extra in _BY_SETUP:
        return f"make -C {quote(str(folder))} setup"
    return f"pip install -e {quote(f'{folder}[{extra}]')}"


def how_to_reinstall(build: Literal["cpu", "cuda"] | None = None) -> str:
    """The command that installs vLLM and batchkit again, for the CPU or for CUDA if that matters."""
    folder = _checkout()
    if folder is None:
        return f"pip install --force-reinstall {_packages_of('cpu' if build == 'cpu' else 'vllm')}"
    return f"make -C {quote(str(folder))} clean setup" + (f" BUILD={build}" if build else "")


def _packages_of(extra: str) -> str:
    """Quoted for a shell, as the installed package names them."""
    parts = (text.partition("; extra == ") for text in metadata.requires(DISTRIBUTION) or ())
    return " ".join(quote(package) for package, _, of in parts if of.strip("'\"") == extra)


def _checkout() -> Path | None:
    """The repository's folder, if batchkit is imported from one."""
    folder = Path(__file__).parents[2]
    return folder if (folder / "scripts" / "setup.sh").is_file() else None
