"""What builds llama-server: for any processor, kept for the next clone, and what a failure does.

The sources are a stand-in for llama.cpp's, with the same targets.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NINJA = shutil.which("ninja", path=Path(sys.executable).parent)
HAS_TOOLS = bool(NINJA and shutil.which("cmake") and shutil.which("c++"))
pytestmark = [
    pytest.mark.skipif(not HAS_TOOLS, reason="no cmake, c++ or ninja"),
    pytest.mark.release,
]

TARGETS = """
option(GGML_NATIVE "as ggml has it" ON)
add_library(ggml-base STATIC empty.cpp)
add_library(ggml-cpu STATIC empty.cpp)
if(GGML_NATIVE)
    target_compile_definitions(ggml-cpu PRIVATE FOR_THIS_PROCESSOR)
endif()
add_library(llama-common STATIC common/json.cpp)
add_library(mtmd STATIC tools/mtmd/mtmd-helper.cpp tools/mtmd/mtmd-helper-gen.cpp)
add_executable(llama-server server.cpp)
target_link_libraries(llama-server ggml-base ggml-cpu llama-common mtmd)
"""
FILES = [
    "empty.cpp",
    "common/json.cpp",
    "tools/mtmd/mtmd-helper.cpp",
    "tools/mtmd/mtmd-helper-gen.cpp",
]
FOR_ANY = "#ifdef FOR_THIS_PROCESSOR\n#error built for this processor alone\n#endif\n"


class Machine:
    """A user's: an environment, a cache folder, and what pip would fetch."""

    def __init__(self, folder: Path) -> None:
        self.venv, self.cache = folder / "venv", folder / "cache"
        self.fetched = folder / "llama_cpp_python-0.0.0.tar.gz"
        (self.venv / "bin").mkdir(parents=True)
        assert NINJA is not None
        (self.venv / "bin" / "ninja").symlink_to(NINJA)
        self.repair()

    def repair(self) -> None:
        # pip download … -d FOLDER
        self.program(self.venv / "bin" / "python", f'cp "{self.fetched}" "${{@: -1}}"')
        self.sources({"server.cpp": "int main() {}"})

    def program(self, path: Path, script: str) -> None:
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)

    def sources(self, changed: dict[str, str]) -> None:
        files = {**dict.fromkeys(FILES, FOR_ANY), "CMakeLists.txt": TARGETS, **changed}
        with tarfile.open(self.fetched, "w:gz") as tar:
            for name, text in files.items():
                info = tarfile.TarInfo(f"llama_cpp_python-0.0.0/vendor/llama.cpp/{name}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))

    @property
    def server(self) -> Path:
        return self.venv / "bin" / "llama-server"

    def build(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "CI"}
        environment |= {
            "VENV": str(self.venv),
            "XDG_CACHE_HOME": str(self.cache),
            **variables,
        }
        script = ROOT / "scripts" / "llama_server.sh"
        return subprocess.run([script], capture_output=True, text=True, env=environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_it_is_built_for_any_processor_and_a_fresh_clone_takes_what_was_built_before(
    machine: Machine,
) -> None:
    built = machine.build(CI="true")
    assert built.returncode == 0, built.stderr
    assert subprocess.run([machine.server], check=False).returncode == 0

    machine.server.unlink()
    machine.fetched.unlink()
    again = machine.build(CI="true")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert machine.server.exists()


@pytest.mark.parametrize("broken", ["sources", "download", "program"])
def test_a_server_that_can_not_be_built_is_two_lines(broken: str, machine: Machine) -> None:
    match broken:
        case "sources":
            words = "error: #error written by hand"
            machine.sources({"server.cpp": "#error written by hand\n" * 100})
        case "download":
            words = "ERROR: No matching distribution found"
            machine.program(machine.venv / "bin" / "python", f"echo '{words}' >&2; exit 1")
        case "program":
            words = "it starts and dies"
            text = f'#include <cstdio>\nint main() {{ puts("{words}"); return 9; }}'
            machine.sources({"server.cpp": text})
    for ci, code in (("", 0), ("true", 1)):
        tried = machine.build(CI=ci)
        assert tried.returncode == code
        why, end = tried.stderr.splitlines()
        assert words in why
        log = Path(end.rpartition("the whole log: ")[2])
        assert words in log.read_text()
        assert log.is_relative_to(machine.cache)
        assert ("its tests are skipped" in end) is not bool(ci)
        assert not machine.server.exists()
        assert (machine.venv / ".llama-server-missing").read_text() == tried.stderr

    machine.repair()
    assert machine.build(CI="true").returncode == 0
    assert not (machine.venv / ".llama-server-missing").exists()
