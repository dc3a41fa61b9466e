"""Vectors of an embed run: storing them, and the exports; seconds and peak memory of each command.

    python benchmarks/vectors.py [--rows 1000000] [--dimensions 1024] [--dtype float16] [--quick]

The run is made, by no engine: its vectors are random, of length 1, and go through the store as a run's
do, in batches that are nearly in the order of the input; one row in a hundred failed. The exports are
commands of their own, start-up included. Beside them is what a user would write with pyarrow and
numpy, which reads all segments into memory and sorts them; its files are compared with ours. At most
four times the size of the vectors is on disk.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from frame import Figure, arguments, batchkit, python, report
from parquet import Made, make

LIMIT_MIB = 2048
STORE = """
import random
import sys
from pathlib import Path

import numpy as np
import orjson

from batchkit.storage.ledger import Ledger, rewritten

folder, rows, dimensions, dtype = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
record = orjson.loads((folder / "results.jsonl").read_bytes())
del record["embedding"]
error = {"kind": "timeout", "type": "RowTimeoutError", "message": "late", "retryable": True}
shuffle, values = random.Random(0), np.random.default_rng(0)
(folder / "results.jsonl").unlink()
ledger = Ledger(folder)
for block in range(0, rows, 256):
    n = min(256, rows - block)
    vectors = values.standard_normal((n, dimensions), np.float32)
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(dtype)
    for index, vector in zip(shuffle.sample(range(block, block + n), n), vectors):
        made = record | {"index": index, "id": f"q{index}"}
        if index % 100 == 99:
            made |= {"status": "failed", "error": error, "usage": None}
            vector = None
        ledger.write([rewritten(made, vector)])
ledger.close()
"""
READ = """
import sys
from glob import glob

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

paths = sorted(glob(sys.argv[1] + "/vectors/*.arrow"))
table = pa.concat_tables([pa.ipc.open_stream(path).read_all() for path in paths])
order = np.argsort(table["index"].to_numpy())
matrix = np.concatenate([chunk.flatten().to_numpy() for chunk in table["vector"].chunks])
matrix = matrix.reshape(len(order), -1)[order]
"""
BY_HAND = {
    "npy": """
np.save(sys.argv[2], matrix)
""",
    "parquet": """
vectors = pa.FixedSizeListArray.from_arrays(matrix.ravel(), matrix.shape[1])
columns = {"index": table["index"].take(order), "vector": vectors}
pq.write_table(pa.table(columns), sys.argv[2], row_group_size=10_000)
""",
}
EQUAL = {
    "npy": """
import sys
import numpy as np
ours, theirs = (np.load(path, mmap_mode="r") for path in sys.argv[1:])
assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
for at in range(0, len(ours), 10_000):
    assert np.array_equal(ours[at : at + 10_000], theirs[at : at + 10_000]), at
""",
    "parquet": """
import sys
import pyarrow as pa
import pyarrow.parquet as pq
ours, theirs = (pq.ParquetFile(path) for path in sys.argv[1:])
def vectors(file, name):
    for batch in file.iter_batches(10_000, columns=["index", name]):
        yield from zip(batch["index"].to_pylist(), batch[name])
answered = ((index, vector) for index, vector in vectors(ours, "embedding") if vector.is_valid)
for (index, vector), (index_2, vector_2) in zip(answered, vectors(theirs, "vector"), strict=True):
    assert index == index_2 and vector.values.equals(vector_2.values), index
""",
}


def main() -> None:
    dtype = {"dtype": {"choices": ["float16", "float32"], "default": "float16"}}
    args = arguments(
        __doc__, "50,000 rows", dtype, rows=(1_000_000, 50_000), dimensions=(1024, 1024)
    )
    n = args.rows
    found: dict[str, Made] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = begin(folder, args.dtype)
        log = run / "results.jsonl"
        stored = make(["-c", STORE, run, n, args.dimensions, args.dtype], folder, log)
        stored_mb = sum(path.stat().st_size for path in (run / "vectors").iterdir()) / 1e6
        found["store"] = stored._replace(mb=stored_mb)
        for kind in ("npy", "parquet"):
            ours, theirs = folder / f"ours.{kind}", folder / f"theirs.{kind}"
            found[kind] = make(["-m", "batchkit", "export", run, f"--{kind}", ours], folder, ours)
            found[f"{kind}, by hand"] = make(
                ["-c", READ + BY_HAND[kind], run, theirs], folder, theirs
            )
            python(folder, "-c", EQUAL[kind], ours, theirs)
            ours.unlink()
            theirs.unlink()
    print(
        f"{n:,} rows, {args.dimensions:,} dimensions, {args.dtype}; both files hold the same vectors"
    )
    print(f"{'':>17} {'s':>7} {'rows/s':>9} {'peak MiB':>9} {'file MB':>8}")
    for kind, one in found.items():
        print(
            f"{kind:>17} {one.seconds:>7.1f} {n / one.seconds:>9,.0f} {one.peak_mib:>9,.0f} {one.mb:>8,.0f}"
        )
    figures = [
        Figure(
            f"{n:,} vectors to {kind}: peak memory",
            found[kind].peak_mib,
            "MiB",
            LIMIT_MIB,
            at_most=True,
        )
        for kind in ("npy", "parquet")
    ]
    results = {kind: one._asdict() for kind, one in found.items()}
    about = {"rows": n, "dimensions": args.dimensions, "dtype": args.dtype}
    report("vectors", figures, **about, results=results)


def begin(folder: Path, dtype: str) -> Path:
    """Make a run of one row. The records of all other rows are variations of its record."""
    (folder / "job.toml").write_text(
        'name = "vectors"\ntask = "embed"\ninput.path = "rows.jsonl"\ninput.id = "id"\n'
        f'prompt.user = "{{{{ q }}}}"\nengine.kind = "dry-run"\noutput.vector_dtype = "{dtype}"\n'
    )
    (folder / "rows.jsonl").write_text('{"id": "q0", "q": "what is tea?"}\n')
    batchkit(folder, "run", "job.toml")
    run = folder / "output" / "vectors"
    (run / "checkpoint.json").unlink()
    shutil.rmtree(run / "vectors")
    return run


if __name__ == "__main__":
    main()
