"""A fix that makes torchvision importable where its compiled ops can't be loaded. It is part of set-up, not of a run.

The registry's torchvision is built for CUDA. With a CPU torch its compiled ops can't be loaded, and
``import torchvision`` fails with "operator torchvision::nms does not exist". Qwen3-VL's processors then fail too,
although they need only torchvision's Python part. It is enough to declare the two operators for which torchvision
registers fakes. ``nms`` then exists, but calling it still fails.

Every process needs the fix, since vLLM inspects models in a subprocess. So
``python -m batchkit.commands.doctor.torchvision_fix`` copies this file into the environment, with a ``.pth`` line that
installs the hook below when Python starts. The hook imports nothing until torchvision is imported, and does nothing if
the compiled ops can be loaded.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

COPY = "_batchkit_torchvision_fix"
PTH_LINE = f"import {COPY}; {COPY}.install_hook()\n"
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
WITHOUT_FIX = f"""
import sys
sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "__module__", "") != {COPY!r}]
"""  # removes the hook, in a process that checks whether it is needed
_libraries: list[object] = []  # a torch Library loses its operators when it is garbage-collected


def install_hook() -> None:
    """Install the import hook for torchvision in this process."""
    sys.meta_path.insert(0, _TorchvisionFinder)


class _TorchvisionFinder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return torchvision's spec with a loader that declares the missing operators before the import; None for other
        modules."""
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _FixingLoader(name, spec.loader.path)
        return spec


class _FixingLoader(SourceFileLoader):
    def exec_module(self, module: object) -> None:
        if not _ops_load(self.path):
            _declare_ops()
        super().exec_module(module)  # type: ignore[arg-type]


def _ops_load(package_file: str) -> bool:
    """Load torchvision's compiled ops (``_C*.so``) into torch. Return False if no file fits this torch."""
    from pathlib import Path

    import torch

    for library in Path(package_file).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False


def _declare_ops() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _libraries.append(library)


def main() -> int:
    """Install the fix in this environment if it is needed, and remove it otherwise."""
    import sysconfig
    from pathlib import Path

    site_packages = Path(sysconfig.get_path("purelib"))
    copy, pth = site_packages / f"{COPY}.py", site_packages / f"{COPY}.pth"
    error = _import_error(WITHOUT_FIX)
    if error is None:
        pth.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
        print("torchvision: its compiled ops fit this torch; nothing to fix")
        return 0
    if "torchvision::nms does not exist" not in error:
        print(f"torchvision: can't be imported, and this fix can't help: {error}", file=sys.stderr)
        return 1
    copy.write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    pth.write_text(PTH_LINE, encoding="utf-8")
    error = _import_error("")
    if error is not None:
        print(f"torchvision: still can't be imported after the fix: {error}", file=sys.stderr)
        return 1
    print(f"torchvision: its compiled ops don't fit this torch; fixed by {pth.name}")
    return 0


def _import_error(first: str) -> str | None:
    """Return the last line that ``import torchvision`` prints in a new process, or None if it works."""
    import subprocess

    tried = subprocess.run(
        [sys.executable, "-c", f"{first}\nimport torchvision"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode == 0:
        return None
    lines = tried.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {tried.returncode}"


if __name__ == "__main__":
    raise SystemExit(main())
