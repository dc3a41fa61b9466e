"""Runs in a store (``output.store``): copies of them to read, or to continue on this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson

from batchkit.config.urls import bare
from batchkit.errors import JobError
from batchkit.storage.files import cache_folder, disk_errors, write_atomically
from batchkit.storage.log import STEPS
from batchkit.storage.runfolder import IN_STORE, JOB, is_run
from batchkit.storage.score_store import SCORES
from batchkit.storage.store.objects import Objects
from batchkit.storage.store.restore import fetch, relation
from batchkit.storage.store.seals import Chain
from batchkit.storage.vectors import segments_of


def copied(address: str) -> Path:
    """Return a local copy of the run at ``address``, or of all runs in the folder at ``address``. It is kept in the user's
    cache folder, and only new parts are fetched.

    Raises:
        JobError: there is no run at this address, or the store can't be used.
        StoreError: the store can't be reached, or the disk fails.
    """
    objects = Objects(address)
    here = cache_folder("stores") / hashlib.sha256(objects.address.encode()).hexdigest()[:16]
    folder = here / objects.address.rpartition("/")[2]
    with disk_errors(here):
        here.mkdir(parents=True, exist_ok=True)
        chain = Chain(objects, here / "seals").catch_up()
        if chain.files:
            _refresh(chain, folder)
            return folder
        chains = [
            (name, Chain(objects.at(name), here / f"{name}.seals").catch_up())
            for name in objects.folders()
        ]
    if not any(chain.files for _, chain in chains):
        raise JobError(
            f"{bare(address)}: no run in this folder of the store; name output.store of a job, or that folder with"
            " /NAME of a run"
        )
    for name, chain in chains:
        if chain.files:
            _refresh(chain, folder / name)
    return folder


def restored(address: str, output: Path) -> Path:
    """Restore the run at ``address`` into the folder ``output``, unless it is there already. Return the path of its
    job.toml.

    Raises:
        JobError, StoreError: as ``copied``.
    """
    chain = Chain(Objects(address)).catch_up()
    folder = output / address.rstrip("/").rpartition("/")[2]
    if JOB not in chain.files:
        raise JobError(f"{bare(address)}: no run in this folder of the store; give the job file")
    if not is_run(folder) or relation(folder, chain) == "behind":
        fetch(chain, folder)
    return folder / JOB


def _refresh(chain: Chain, folder: Path) -> None:
    fetch(chain, folder)
    assert chain.last is not None
    owner, is_closed = chain.last.owner, chain.last.state == "closed"
    held = {"pid": owner.pid, "host": owner.host, "since": chain.last.written_at}
    with disk_errors(folder):
        for path in (folder / STEPS, folder / SCORES, *segments_of(folder).values()):
            if (
                str(path.relative_to(folder)) not in chain.files
            ):  # of an earlier run at this address
                path.unlink(missing_ok=True)
        write_atomically(folder / IN_STORE, orjson.dumps({"held_by": None if is_closed else held}))
