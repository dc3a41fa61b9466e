"""Jobs of the transformers engine on a demo model or a failing one, and those that both engines with a model run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from batchkit.config.tables import JobConfig
from tests.support import model_runs

OPTIONS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}
N_ROWS = 24
FAULTS = "BATCHKIT_TEST_FAULTS"


def make_job(model: Path, output: Path | str = "output", **options: Any) -> JobConfig:
    engine = {"kind": "transformers", "model": str(model), "in_process": True}
    return JobConfig(
        engine={**engine, "options": {**OPTIONS, **options}}, output={"dir": str(output)}
    )


def write_job(
    folder: Path, model: Path, *, images: bool = False, engine: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The rows are written, too."""
    rows = [{"q": f"question {n} " + "about tea " * (n * 7 % 40)} for n in range(N_ROWS)]
    for n, row in enumerate(rows):
        if images:
            image = Image.new("RGB", (128 + 32 * (n % 5), 96 + 32 * (n % 3)), (n * 9, 80, 140))
            image.paste((255, 255, 255 - n), (10 + n, 10, 60 + n, 50))
            row["file"] = f"{n}.png"
            image.save(folder / row["file"])
    options = {"dtype": "float32", "max_model_len": 512}
    model_runs.write_job(
        folder,
        rows,
        prompt={"user": "{{ q }}", "images": ["{{ file }}"] if images else []},
        media={"max_pixels": 65536},
        engine={"kind": "transformers", "options": options, **(engine or {}), "model": str(model)},
        sampling={"max_tokens": 24},
    )
    return rows


def faulty_model(model: Path, folder: Path) -> Path:
    """``model``, a Qwen2, copied to ``folder`` with ``failing_model.py`` as its code."""
    shutil.copytree(model, folder)
    shutil.copy(Path(__file__).with_name("failing_model.py"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "failing_model.FailingQwen2"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
