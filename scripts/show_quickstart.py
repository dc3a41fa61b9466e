"""Show one of the quickstart's pictures with its question and answers, and what to do next."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path("output/quickstart/results.jsonl")
ID = "8"
NEXT = """
next: batchkit report         every row with its picture, in one page
      batchkit init images    a job file to start from, for your own data"""


def main() -> None:
    records = map(json.loads, RESULTS.open(encoding="utf-8"))
    record = next(record for record in records if record["id"] == ID)
    fields = record["fields"]
    print(f"\njobs/data/quickstart/{fields['image']}")
    for name, text in {
        "question": fields["question"],
        "answer": record["text"],
        "right answer": fields["answer"],
    }.items():
        print(f"  {name:14}{text}")
    print(NEXT)


if __name__ == "__main__":
    main()
