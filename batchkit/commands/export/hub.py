"""``export --parquet --hub``: pushes the Parquet file as a dataset, with a dataset card, to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.masking import masked_text
from batchkit.config.tables import JobConfig
from batchkit.engines.registry import require
from batchkit.errors import JobError, StoreError
from batchkit.runs.status import Status, status
from batchkit.storage.job_toml import job_of_run, toml_of
from batchkit.storage.manifest import Manifest, read_manifest

_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_ON_THIS_MACHINE = (
    ("input", "shard"),
    ("output", "dir"),
    ("output", "upload"),
    ("media", "root"),
    ("engine", "server"),
)
_FOLDERS = re.compile(
    r"(?<=\")(?:/|~/)[^\"\s]*/(?=[^\"\s/]+/?\")"
)  # the folders of an absolute path in TOML


class Pushed(NamedTuple):
    """The result of a push: the dataset's URL and the commit."""

    url: str
    commit: str

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    def to_text(self) -> str:
        return f"{self.url} (commit {self.commit[:12]})"


def check_hub(repo: str) -> None:
    """Check before the export that the package is installed, the name ``repo`` is valid, and a token is set.

    Raises:
        JobError: One of these is missing or invalid.
    """
    require(("huggingface_hub",), user="--hub", extra="hub")
    if _NAME.fullmatch(repo) is None:
        raise JobError(
            f"--hub {repo}: give the owner and the name of the dataset: --hub OWNER/NAME"
        )
    from huggingface_hub import get_token

    if get_token() is None:
        raise JobError(
            f"--hub {repo}: there is no token for the Hugging Face hub; set HF_TOKEN, or run `hf auth login`"
        )


def push(folder: Path, table: Path, repo: str, *, public: bool) -> Pushed:
    """Push ``table``, the Parquet file of the run in ``folder``, and its dataset card to the dataset ``repo``.

    One commit replaces an earlier push of this run. A new dataset is private unless ``public``.

    Raises:
        StoreError: The hub refuses the push, or can't be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    job, api = job_of_run(folder), HfApi()
    file = f"data/{job.name}.parquet"
    card = card_of(job, read_manifest(folder), status(folder), file)
    files = [
        CommitOperationAdd(file, str(table)),
        CommitOperationAdd("README.md", card.encode()),
    ]
    message = f"Answers of the run {job.name}"
    try:
        made = api.create_repo(repo, repo_type="dataset", private=not public, exist_ok=True)
        done = api.create_commit(repo, files, commit_message=message, repo_type="dataset")
    except Exception as error:  # includes errors of its HTTP library, which depends on its version
        raise StoreError(
            f"--hub {repo}: not pushed: {type(error).__name__}: {' '.join(str(error).split())}. The"
            f" table is in {table}; run the same command to retry"
        ) from error
    return Pushed(str(made), done.oid)


def card_of(job: JobConfig, manifest: Manifest, counts: Status, file: str) -> str:
    """Return the dataset card (README.md), without secrets and without folders of this machine."""
    versions = {**(manifest.last_start.versions or {}), **manifest.last_start.engine}
    with_version = [f"{name} {found}" for name, found in sorted(versions.items()) if found]
    facts = {
        "model": " ".join(
            filter(
                None,
                [_FOLDERS.sub("", f'"{job.engine.model}"').strip('"'), manifest.model.revision],
            )
        ),
        "rows": f"{counts.ok + counts.failed:,}",
        "answered": f"{counts.ok:,}",
        **{f"failed: {kind}": f"{n:,}" for kind, n in counts.failed_by_kind.items()},
        "tokens": f"{counts.prompt_tokens:,} prompt, {counts.completion_tokens:,} completion",
        "begun": manifest.created_at[:10],
        "made with": ", ".join(with_version),
    }
    as_toml = _FOLDERS.sub("", toml_of(job, change=_for_others, only_set=True).strip())
    # The fence of the code block must be longer than any run of backticks in the job file.
    fence = "`" * max(3, *(len(found) + 1 for found in re.findall("`+", as_toml)), 3)
    lines = [
        "---",
        "configs:",
        "- config_name: default",
        f"  data_files: {file}",
        "tags:",
        "- batchkit",
        "---",
        "",
        f"# {job.name}",
        "",
        "Answers of a model, one row for each row of the input. `status` is `ok` or `failed`; a failed row has",
        "no `text`, and its `error_kind` and `error_message` say why.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        "",
        "The job:",
        "",
        f"{fence}toml",
        as_toml,
        fence,
        "",
    ]
    return masked_text("\n".join(lines))


def _for_others(table: dict[str, Any]) -> dict[str, Any]:
    """Remove settings from a job's tables that apply only to this machine, and return the tables."""
    for name, key in _ON_THIS_MACHINE:
        table.get(name, {}).pop(key, None)
    for engine in table.get("engines", {}).values():
        engine.pop("server", None)
    return {name: value for name, value in table.items() if value != {}}
