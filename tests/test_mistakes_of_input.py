"""Mistakes in the rows, in templates and in the syntax of the job file. tests/test_mistakes.py has more."""

from __future__ import annotations

import gzip
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.images import png
from tests.support.mistakes import DRY, JOB, ONE_LINE, REVIEWS, Mistake, check, job_of_steps, params

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

STEPS = job_of_steps(draft="{{ review }}", revise="{{ steps.draft.text }}")
OWN = 'name = "mood"\n[input]\npath = "own.jsonl"\n[engine]\nkind = "dry-run"\n'
PROMPTS = '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n'
SYNTAX = [
    *(
        Mistake("validate bad.toml", said, files={"bad.toml": bad})
        for bad, said in {
            JOB.replace('"reviews.csv"', r'"C:\Users\me\reviews.csv"'): (
                r"line 3: Invalid hex value; \ starts an escape in \"…\": write '…', or use / instead"
            ).replace(r"\"", '"'),
            JOB.replace('"reviews.csv"', r'"C:\data\reviews.csv"'): "write '…', or use / instead",
            JOB.replace("Mood? ", "Mood?\n"): 'text of several lines needs three quotes: """…"""',
        }.items()
    ),
    Mistake(
        "run job.toml\nexport output/mood --csv",
        (
            "output/mood/job.toml: the file is missing; `batchkit run` with the original job file writes",
            "`status` and `verify` work without it",
        ),
        gone="output/mood/job.toml",
    ),
    Mistake("run job.toml\nrun job.toml", '"skipped": 3', 0, gone="output/mood/job.toml"),
    *(
        Mistake(
            f"run steps.toml --set 'steps.revise.{key}={{{{ draft.text }}}}'",
            "steps.revise: draft is a step, not a column: write {{ steps.draft.text }}",
            files={"steps.toml": STEPS},
        )
        for key in ("prompt.user", "when")
    ),
    *(
        Mistake(
            f"{command} job.toml --set 'input.cross={{t=[0,0.7]}}'",
            ("input.cross.t: no template reads this key, so", "write {{ t }}", "sampling.n"),
        )
        for command in ("run", "validate")
    ),
    *(
        Mistake(
            f"run {job} --set 'input.cross={{t=[0,0.7]}}' {reads}",
            '"ok": 6',
            0,
            {"own.toml": OWN, "own.jsonl": PROMPTS},
        )
        for job, reads in (
            ("job.toml", "--set 'sampling.temperature={{ t }}'"),
            ("job.toml", "--set 'prompt.user={{ row }}'"),
            ("own.toml", "--set input.path=own.jsonl"),
        )
    ),
    Mistake(
        "validate job.toml --set scoring.reference=stars --set 'scoring.scorers=[\"em\"]'"
        ' --set \'sampling.structured_outputs={choice=["good","bad"]}\'',
        "scoring.reference: is '5' in the first row, but the possible answers are good, bad",
        0,
    ),
]


def parquet(**columns: list[object]) -> bytes:
    file = BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


CELLS = parquet(s=[{"a": 1}], l=[["x", "y"]], b=[b"ab"])
FILES: dict[str, tuple[str | bytes, str]] = {
    "r.zip": ("PK", "r.zip: is an archive; unpack it, or name its files: zip://*.csv::"),
    "pd.json": ('{"review": {"0": "a", "1": "b"}, "label": {"0": "x"}}', 'orient="records"'),
    "s.csv": ("id, review\n1,a\n2,b\n3,c\n", 'write {{ row[" review"] }}'),
    "h.csv": (
        "r1,Good soup,5\nr2,Late,1\nr3,Usual,3\nr4,Fine,4\n",
        "if the input is a CSV file without a header",
    ),
}
SPLIT = "quote a prompt and a glob, because the shell splits"
ROWS = [
    *(
        Mistake(
            f"run --model m --input {name} {DRY} --prompt '{{{{ review }}}}'",
            said,
            files={name: content},
        )
        for name, (content, said) in FILES.items()
    ),
    Mistake(
        "run job.toml --set input.path=b.csv.gz",
        '"ok": 3',
        0,
        {"b.csv.gz": gzip.compress(REVIEWS.encode())},
    ),
    Mistake(
        "run job.toml --input -",
        ('input.path = "-": standard input is not supported', "save it as a file"),
    ),
    *(
        Mistake(
            f"run --model m --input s.parquet {DRY} --prompt 'P {{{{ {column} }}}}'",
            said,
            0,
            {"s.parquet": CELLS},
        )
        for column, said in {
            "s": "s of the first row is dict, which the prompt shows in Python's notation; write {{ s | tojson }}",
            "l": "l of the first row is list, which the prompt shows in Python's notation; write {{ l | tojson }}",
            "b": "b of the first row is bytes, which the prompt shows in Python's notation; store it as text",
        }.items()
    ),
    Mistake(
        f"run --model m --input s.parquet {DRY} --prompt 'P {{{{ s.a }}}} {{{{ l | join }}}}'",
        '"ok": 1',
        0,
        {"s.parquet": CELLS},
        never="in Python's notation",
    ),
    Mistake(
        f"run --model m --input i.parquet {DRY} --images '{{{{ image }}}}' --prompt 'P {{{{ image }}}}'",
        ('"ok": 1',),
        0,
        {"i.parquet": parquet(image=[png()])},
        never=("in Python's notation",),
    ),
    *(
        Mistake(command, said, code)
        for command, said, code in [
            (f"{ONE_LINE} a.csv b.csv --prompt A", SPLIT, 2),
            (f"{ONE_LINE} --prompt Mood? {{{{ review }}}}", SPLIT, 2),
            (f"{ONE_LINE} reviews.csv --prompt A", SPLIT, 2),
            (f"{ONE_LINE} --prompt Mood? {{{{review}}}}", SPLIT, 2),
            ("report output/mood output/mood", "to compare runs: batchkit compare RUN RUN", 2),
            (f"{ONE_LINE} --prompt 'M {{{{ review }}}}' --keep label,stars", '"ok": 3', 0),
            (f"{ONE_LINE} --prompt 'M\\n{{{{ review }}}}'", r"contains \n as two characters", 0),
            (
                "run job.toml\nexport output/mood --csv output",
                "output: is a folder; give a file",
                2,
            ),
        ]
    ),
]
GONE = "columns of the input are missing or empty: …rows.csv: no file matches"
ROWS += [
    Mistake(
        f"run job.toml --set input.path=rows.csv --set 'output.keep=\"*\"'\nexport output/mood --csv{more}",
        said,
        code,
        {"rows.csv": REVIEWS},
        gone="rows.csv",
    )
    for more, said, code in [
        ("", f"{GONE}…; restore the input, or give --without-input", 2),
        (" --without-input", GONE, 0),
    ]
]
TEMPLATES = [
    Mistake(f"validate job.toml --set 'prompt.user={prompt}'", said, code)
    for prompt, said, code in [
        ("{{ review | toJson }}", "No filter named 'toJson'; did you mean 'tojson'?", 2),
        ("{{ review | upper_case }}", "No filter named 'upper_case'; did you mean 'upper'?", 2),
        ("{{ review | json }}", "No filter named 'json'; did you mean 'tojson'?", 2),
        ("{{ len(review) }}", "in templates this function is a filter: {{ … | length }}", 3),
        (
            '{% include "a.txt" %}{{ review }}',
            "include is not available: prompt.user_file reads",
            2,
        ),
        ("{{ review if stars > 3 }}", "the column is text, not a number: write … | int > 3", 3),
    ]
]
ROWS += [
    Mistake(
        "validate job.toml --set input.where.label=Positive",
        "no row matches input.where: label = 'Positive' (upper and lower case differ)",
    ),
    Mistake(
        "run job.toml --set input.path=pipes.csv",
        '"ok": 2',
        0,
        {"pipes.csv": "id|review|label\n1|Good, hot soup|x\n2|Late|y\n"},
    ),
    Mistake(
        f"run --model m --input t.csv {DRY}",
        "expected a list of messages; it is text: store the rows as JSON Lines or Parquet",
        3,
        {"t.csv": 'id,messages\n1,"[{""role"":""user"",""content"":""hi""}]"\n'},
    ),
]
MESSAGES = [
    Mistake(
        f"run --model batchkit-demo --input chats.jsonl {DRY}",
        said,
        code,
        {"chats.jsonl": f"{row}\n" * 5},
    )
    for row, said, code in [
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "end with the assistant's turn: leave this turn out to get a new answer",
            0,
        ),
        (
            '{"messages": [{"role": "human", "content": "a"}]}',
            "messages: role is 'human'; write user or assistant",
            2,
        ),
        (
            '{"conversations": [{"from": "human", "value": "a"}]}',
            "turn ShareGPT's conversations into messages of role and content",
            2,
        ),
    ]
]
TABLES = {"messages": MESSAGES, "syntax": SYNTAX, "rows": ROWS, "templates": TEMPLATES}


@pytest.mark.parametrize("mistake", params(TABLES))
def test_a_mistake_is_named_with_what_to_do(mistake: Mistake) -> None:
    check(mistake)


@pytest.mark.parametrize("home", ["~", "$HOME"])
def test_the_home_folder_may_be_named(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path("home").resolve()))
    files = {"home/rows.csv": REVIEWS}
    settings = f"--set 'input.path={home}/rows.csv' --set 'output.dir={home}/output'"
    check(Mistake(f"run job.toml {settings}", '"ok": 3', 0, files))
    assert Path("home/output/mood").is_dir()
