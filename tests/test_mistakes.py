"""Mistakes that people make on the command line, and what they are told.

A row of a table is the mistake, what its answer must hold, and the exit code. Each is made in a folder with
``reviews.csv`` (id, review, label, stars; three rows) and ``job.toml``, a job for it with the engine "dry-run".
tests/test_docs.py holds the messages of docs/troubleshooting.md against the code; PAGE has those of them that no
other test makes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import batchkit
from tests.support.mistakes import (
    DRY,
    JOB,
    NO_PROMPT,
    ONE_LINE,
    REVIEWS,
    Mistake,
    check,
    job_of_steps,
    params,
    write_example,
)
from tests.support.paths import ROOT

LOG, MANIFEST = "output/mood/results.jsonl", "output/mood/manifest.json"


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

OF_REVIEWS = f"{ONE_LINE} --prompt 'M {{{{ review }}}}'"
PROMPTS = [
    Mistake(f"{ONE_LINE} --prompt 'Mood? {{review}}'", "write {{ review }} instead of {review}"),
    Mistake(f"{ONE_LINE} --prompt 'Mood? ${{review}}'", "write {{ review }} instead of ${review}"),
    Mistake(
        f"{ONE_LINE} --prompt 'Positive or negative?'",
        ("no column is used", "write {{ review }} where", "prompt.allow_constant = true"),
    ),
    Mistake("validate job.toml --set 'prompt.user=Positive or negative?'", "no column is used, so"),
    Mistake(
        f"{ONE_LINE} --prompt 'Mood?' --set prompt.allow_constant=true", '"ok": 3', exit_code=0
    ),
    *(
        Mistake(
            f"{ONE_LINE} --prompt {name}",
            "to send the text of this file, set prompt.user_file = 'prompt.txt'",
            files={"prompt.txt": "Mood? {{ review }}"},
        )
        for name in ("prompt.txt", "@prompt.txt")
    ),
    Mistake(
        "run job.toml --set input.path=odd.csv --set 'prompt.user={{ row[\"my review\"] }}'",
        '"ok": 1',
        0,
        {"odd.csv": "id,my review,is-good,label\n1,Fine,yes,positive\n"},
    ),
    *(
        Mistake(
            f"run job.toml --set input.path=odd.csv --set 'prompt.user={prompt}'",
            said,
            files={"odd.csv": "id,my review,is-good,label\n" + "1,Fine,yes,positive\n" * 3},
        )
        for prompt, said in {
            "{{ my review }}": 'write {{ row["my column"] }} for a column whose name is not a plain word',
            "{{ 2nd }}": 'write {{ row["my column"] }} for',
            "{{ is-good }}": 'write {{ row["is-good"] }}',
            "{{ review }": "write {{ name }}, with two braces on both sides",
        }.items()
    ),
]

SCORED = """\
[input]
path = "reviews.csv"
id = "id"
[prompt]
user = "{{ review }}"
[scoring]
reference = "stars"
scorers = ["em"]
"""
STOPPED = "run job.toml --set run.max_in_flight=1 --set budget.max_completion_tokens=6"
RUNS = [
    *(
        Mistake(f"{command} job.toml", 'engine.kind = "dry-run" answers without delay')
        for command in ("tune", "find-bs")
    ),
    Mistake(f"{STOPPED} --output a.csv", "a.csv: not written, because the run has not ended", 1),
    Mistake(f"{STOPPED}\nexport output/mood --csv", "1 of 3 rows; 2 have no answer yet", 0),
    Mistake(
        f"{STOPPED}\nexport output/mood --parquet --only-finished",
        "1 of 3 rows; 2 have no answer yet; resume the run, or omit --only-finished",
    ),
    # A dry run is never in the way, and never among answers.
    Mistake(
        f"{ONE_LINE} --prompt 'Mood? {{{{ review }}}}'\n" * 2 + OF_REVIEWS,
        ("output/reviews-batchkit-demo.dry-run", '"skipped": 0'),
        0,
    ),
    Mistake(
        "run job.toml\nrun job.toml --set engine.kind=openai-server --set engine.model=m"
        " --set engine.base_url=http://127.0.0.1:9/v1",
        (
            "the earlier run was a dry run, so the run starts from the beginning",
            "127.0.0.1:9/v1: no answer",
        ),
        1,
    ),
    Mistake(
        "run solve.toml",
        "| all | 3 | 33.33 |",
        0,
        {
            "solve.py": "async def solve(row, generate):\n    return {'answer': 'positive', 'why': 'x'}\n",
            "solve.toml": '[input]\npath = "reviews.csv"\n[rollout]\nfunction = "solve.py:solve"\n[engine]\n'
            'kind = "dry-run"\n[scoring]\nreference = "label"\nscorers = ["em"]\n',
        },
    ),
    Mistake(
        "run job.toml --set input.path=twice.csv",
        '"ok": 3',
        0,
        {"twice.csv": "id,review,label\na,Fine,positive\na,Bad,negative\nb,Good,positive\n"},
    ),
    Mistake(  # answers in words, references that are numbers
        "run job.toml --set scoring.reference=stars --set 'scoring.scorers=[\"em\"]'",
        ("EM is 0 for all 3 rows; in the first, the prediction is '", "' and the reference '5'"),
        0,
    ),
    Mistake(
        "run job.toml\nreport output/mood",
        "nothing is scored: set [scoring] extract, reference and scorers in the job file",
        0,
    ),
    Mistake(
        "run job.toml --set vars.rules="
        + "x" * 300
        + "a\nrun job.toml --set vars.rules="
        + "x" * 300
        + "b",
        ("vars.rules: …" + "x" * 30 + 'a" → …' + "x" * 30 + 'b"',),
        never=("x" * 40,),
    ),
    # Rows that failed do not block the corrected job.
    Mistake(
        "run job.toml --set 'prompt.user={{ reveiw }}' --set run.check_rows=0\nrun job.toml",
        ("no row was answered before, so the run starts from the beginning", '"ok": 3'),
        0,
    ),
    # What no answer can fit is found before the model is loaded.
    *(
        Mistake(
            f"run job.toml --set 'sampling.structured_outputs={given}'", f"structured_outputs{said}"
        )
        for given, said in {
            '{json={type="objekt"}}': ".json: not a valid JSON schema: $.type: 'objekt'",
            '{json="{"}': ".json: not valid JSON: ",
            '{choices=["a"]}': ".choices: vLLM has no such constraint; did you mean 'choice'?",
            '{choice="a"}': ".choice: found 'a', expected a list of texts",
            '{regex="(a"}': ".regex: '(a' is not a valid regular expression: missing )",
            "{}": ": has no constraint; expected one of json, regex, choice",
        }.items()
    ),
    # What failed in a later step is set aside, too.
    Mistake(
        "run steps.toml\nrun steps.toml",
        (
            "requeue: 0 records kept, 3 rows to run again (3 of their generations can be used again)",
            "'reviw' is undefined",
            "so the run was stopped",
        ),
        files={"steps.toml": job_of_steps(a="{{ review }}", b="{{ reviw }}")},
    ),
    *(
        Mistake("run job.toml\nverify", says, 0, never="None", gone=gone)
        for says, gone in {
            ("rows: 3", "pending: 0", "sound"): (),
            "not_compared: the input can't be read": "reviews.csv",
        }.items()
    ),
    # 5 is not 50 by default, and a table of predictions needs no engine.
    Mistake(
        "score scored.toml --predictions made.csv",
        ("| all | 1 | 0.00 |", "2 rows of the input have no prediction"),
        0,
        {"made.csv": "id,prediction\nr1,5.0 0\n", "scored.toml": SCORED},
    ),
    Mistake(
        "score scored.toml --predictions made.csv",
        "made.csv row 1: a second, different answer for id 'r1'; remove one of them",
        files={"made.csv": "id,prediction\nr1,5\nr1,3\n", "scored.toml": SCORED},
    ),
    Mistake(
        "run job.toml --set scoring.reference=label --set 'scoring.scorers=[\"numeric\"]'",
        (
            'the scorer "numeric" compares numbers, but label of the first row',
            'the scorers "em" and "choice"',
        ),
        0,
    ),
]

SET = {  # a key that is set for ``run``, and what is said of it
    "'output.keep=[\"lable\"]'": "output.keep: the rows have no field 'lable'; did you mean 'label'?",
    "'input.where=label == \"a\"'": 'a table of fields and the values to keep: { label = "positive" }',
    "'prompt.images=[\"label\"]'": "prompt.images: label is a column: write {{ label }}",
    "'prompt.images=[\"{label}\"]'": "prompt.images: label is a column: write {{ label }}",
    "engine.kind=VLLM": "did you mean 'vllm'?",
    "engine.api_key=good": "unknown key; did you mean 'api_key_env'?",
    "input=x": "expected table; set one of its keys, for example input.path",
    f"run.on_end={'x' * 20_000}": "run.on_end: found 20,000 characters, at most 16,384; put the",
}
REFUSED = {
    "resume job.toml": "Did you mean 'batchkit run', which also resumes an interrupted run?",
    "job.toml": "Did you mean 'batchkit run job.toml', which also resumes an interrupted run?",
    "diff a b": "Did you mean 'batchkit compare'?",
    "export output/mood --xlsx": "Did you mean '--csv'?",
    "show output/mood r1": "select a row with --id ID",
    "run job.toml --fresh --skip-from output/mod": (
        "--skip-from output/mod: not a run folder; did you mean 'output/mood'?"
    ),
}
KEYS = [
    *(Mistake(f"run job.toml --set {given}", said) for given, said in SET.items()),
    *(Mistake(f"run job.toml\n{command}", said) for command, said in REFUSED.items()),
    *(
        Mistake(
            f"run job.toml --set engine.api_key_env={key}",
            "engine.api_key_env: expected the name of an environment variable",
            never=(key,),
        )
        for key in ("sk-good", "hf_aBcDeFgHiJkLmNoPqRsTuVwX")
    ),
    *(
        Mistake(
            f"run job.toml --set engine.kind=transformers --set engine.model={model}",
            "did you mean 'batchkit-demo'?",
            is_slow=True,
        )
        for model in ("batchkit-dmo", "batchkit_demo")
    ),
    Mistake(
        "validate job.toml --set sampling.max_new_tokens=3 --set sampling.guided_choice=a --set sampling.tokens=1",
        (
            "sampling.max_new_tokens: no such parameter; did you mean 'max_tokens'?",
            "sampling.guided_choice: no such parameter; did you mean 'structured_outputs'?",
            "sampling.tokens: no such parameter; did you mean 'max_tokens'?",
        ),
    ),
    Mistake(
        f"validate job.toml {DRY}",
        (
            "engine.model_name: unknown key; did you mean 'model'?",
            "engine.tensor_parallel_size: unknown key; did you mean 'options.tensor_parallel_size'?",
        ),
        files={
            "job.toml": JOB.replace(
                'kind = "dry-run"', 'model = "m"\nmodel_name = "m"\ntensor_parallel_size = 2'
            )
        },
    ),
    Mistake(
        "run job.toml --set engine.kind=vllm --set engine.model=m"
        " --set 'engine.options={tp_size=2, gpu_memory=0.5, batch_size=8, max_tokens=9}'",
        (
            "engine.options.tp_size: vLLM has no such option; did you mean 'tensor_parallel_size'?",
            "engine.options.gpu_memory: vLLM has no such option; did you mean 'gpu_memory_utilization'?",
            "engine.options.batch_size: vLLM has no such option; did you mean 'max_num_seqs'?",
            "engine.options.max_tokens: vLLM has no such option; did you mean 'sampling.max_tokens'?",
        ),
        never="loading",
    ),
    Mistake(
        "run job.toml --set engine.kind=vllm --set engine.model=m"
        """ --set 'engine.options.speculative_config={"method": "ngram"}'""",
        "engine.options.speculative_config: found JSON as text; write it as a TOML table",
        is_slow=True,
    ),
    Mistake(
        "run job.toml --set engine.kind=vllm --set engine.model=m --set 'engine.options.speculative_config="
        '{method = "ngram", num_speculative_tokens = 3, rejection_sample_method = "synthetic"}\'',
        'engine.options.speculative_config.rejection_sample_method: found "synthetic", which accepts wrong tokens',
        is_slow=True,
    ),
    *(
        Mistake(
            f"validate fn.toml --set rollout.function={place}:solve",
            f"rollout.function: no module '{place}'; name a file that ends in .py",
            never="Traceback",
            files={"fn.toml": f"{NO_PROMPT}[rollout]\n"},
        )
        for place in ("/etc/passwd", "solver", "no_package.solver")
    ),
    Mistake(
        "run job.toml\nstatus output/mod", ("output/mod: neither", "did you mean 'output/mood'?")
    ),
    Mistake(
        "run job.yaml",
        "job.yaml: is YAML, but a job file is TOML",
        files={"job.yaml": "name: mood\n"},
    ),
    *(
        Mistake(
            f"run job.toml --set input.path=other.csv{more}",
            '"ok": 3',
            0,
            {"other.csv": REVIEWS.replace(",", separator)},
        )
        for separator, more in ((";", ""), ("\t", ""), ("|", " --set 'input.separator=|'"))
    ),
    *(
        Mistake(f"validate job.toml {change}", said, files={"head.csv": "id,review,label\n"})
        for change, said in {
            "--set input.path=head.csv": "head.csv: has no rows",
            "--set 'input.where={label=\"none\"}'": "no row matches input.where: label",
        }.items()
    ),
    # What other tools call it is said together with unknown keys.
    Mistake(
        "run job.toml --set promt.user=a --set sampling.max_new_tokens=3",
        ("promt: unknown key; did you mean 'prompt'", "did you mean 'max_tokens'?"),
    ),
    Mistake(
        "validate job.toml --set sampling.top_z=1",
        'sampling: top_z not checked, as engine.kind is "dry-run"',
        0,
    ),
    # The keys of the one-line form that most jobs set.
    Mistake(
        f"{OF_REVIEWS} --keep label --keep stars --name mine --system Short"
        " --max-tokens 9 --temperature 0.5\nexport output/mine.dry-run --csv",
        "mine.dry-run/results.csv: 3 rows",
        0,
    ),
    Mistake(OF_REVIEWS, "the column id has the row ids; the run folder is", 0),
    Mistake(f"{OF_REVIEWS} --id label", "the column label has the row ids", 0),
    Mistake(f"{OF_REVIEWS} --images label", "prompt.images: label is a column: write {{ label }}"),
    # Empty cells are counted before the run.
    *(
        Mistake(
            f"{command} job.toml --set input.path=blank.csv --set input.empty={empty}",
            (f"review is empty in 2 of the 4 rows; these rows {said}", ended),
            exit_code,
            {"blank.csv": 'id,review,label\n1,Fine,a\n2,,b\n3," ",b\n4,Bad,c\n'},
        )
        for command, empty, said, ended, exit_code in (
            ("run", "keep", 'are sent anyway; input.empty = "skip" leaves them out', '"ok": 4', 0),
            ("run", "skip", "are left out", '"total": 2, "ok": 2', 0),
            ("run", "fail", "fail", "review is empty, and input.empty", 3),
            ("validate", "keep", "are sent anyway", "4 ok", 0),
            ("validate", "skip", "are left out", "2 rows: 2 ok", 0),
            ("validate", "fail", "fail", "2 would fail", 3),
        )
    ),
    Mistake(
        "run job.toml --set input.path=blank.csv --set input.empty=skip",
        'blank.csv: input.empty = "skip" leaves out all rows, because each has an empty field: review',
        files={"blank.csv": "id,review,label\n1,,a\n"},
    ),
    # A file that batchkit has not written is not replaced.
    *(
        Mistake(command, said, exit_code, {"mine.csv": REVIEWS, "mine.jsonl": '{"a": 1}\n'})
        for command, said, exit_code in (
            ("run job.toml\nexport --csv mine.csv", "mine.csv: exists, and was not written by", 2),
            ("run job.toml\nexport --jsonl mine.jsonl", "or replace it with --force", 2),
            ("run job.toml\nexport --csv mine.csv --force", "mine.csv: 3 rows", 0),
            ("run job.toml\nexport --jsonl a.jsonl\nexport --jsonl a.jsonl", "3 rows", 0),
            ("run job.toml\nexport --parquet a.parquet\nexport --parquet a.parquet", "3 rows", 0),
            ("run job.toml --output mine.csv", "exists, and was not written by batchkit", 2),
            ("run job.toml --output a.csv\nrun job.toml --output a.csv", "a.csv: 3 rows", 0),
        )
    ),
    Mistake(
        "run job.toml --set output.dir=/proc/none",
        ("/proc/none/mood: can't be used as a run folder", "set output.dir to a folder"),
    ),
    # Where all rows fail, nothing says that the job has no scoring.
    Mistake(
        "run job.toml --set 'prompt.user={{ reveiw }}' --set run.check_rows=0 --set scoring.reference=label"
        " --set 'scoring.scorers=[\"em\"]'",
        "| all | 0 | 0 | 3 |",
        3,
        never="nothing is scored",
    ),
    # What is kept of the input is no part of what was asked.
    Mistake(
        "run job.toml\nrun job.toml --set 'output.keep=[\"stars\"]'\nexport output/mood --csv",
        "output/mood/results.csv: 3 rows",
        0,
    ),
    Mistake(
        "run job.toml --set input.path=wide.csv --set 'output.keep=[\"none\"]'",
        ("the rows have no field 'none'", "characters left out …]", "c9999"),
        files={
            "wide.csv": "id,review,"
            + ",".join(f"c{n}" for n in range(10_000))
            + "\n1,Fine"
            + ",1" * 10_000
        },
        never="c5000",
    ),
    Mistake("run job.toml\nrun job.toml", "results.jsonl: is missing", 1, gone=LOG),
    Mistake("run job.toml\nstatus output/mood", "but no manifest.json", 1, gone=(LOG, MANIFEST)),
]

PAGE = [
    Mistake("run", "give a job file (… or --model and --input…"),
    Mistake("run job.toml --set prompt.user_file=reviews.csv", "… and … are both given; keep one"),
    Mistake("validate job.toml --set input.id=idd", "… the field … (input.id) …", 3),
    Mistake("run job.toml", "…: can't be used as a run folder: …", files={"output": ""}),
    Mistake(
        "run job.toml --set 'scoring.scorers=[\"choice\"]'",
        'the scorer "choice" needs scoring.choices',
    ),
]

COMMANDS = [
    # A run folder that was moved is continued where it is, never begun again where it was.
    Mistake(
        "run moved/mv/job.toml",
        ("moved/mv/job.toml: this run folder was moved here from …/output/mood", "--set name=mv"),
        files={"moved/mv/job.toml": JOB, "moved/mv/manifest.json": "{}"},
    ),
    Mistake("run job.toml\nrun output/mood", "for a run folder: output/mood/job.toml"),
    Mistake("run job.toml\nrun output/mood/job.toml", '"skipped": 3', 0),
    # An option that counts once is given once.
    Mistake(
        f"{ONE_LINE} --input more.csv --prompt A",
        ("--input is given twice, but may be given only once", "a quoted glob reads several files"),
    ),
    *(
        Mistake(command, f"{flag} is given twice, but may be given only once: keep one")
        for command, flag in (
            (f"{ONE_LINE} --prompt A --prompt 'Mood? {{{{ review }}}}'", "--prompt"),
            ("show output/mood -n 3 -n 4", "-n"),
            ("export output/mood --csv a.csv --csv b.csv", "--csv"),
            ("find-bs job.toml --low 1 --low=2", "--low"),
        )
    ),
    # A suffix and a format that contradict each other.
    *(
        Mistake(f"run job.toml\nexport output/mood {given}", said)
        for given, said in {
            "answers --csv": "FILE answers: unknown suffix; write the path after the format: --csv answers",
            "--csv ans.parquet": "ans.parquet: --csv writes .csv files; give a file name with this suffix, or give --parquet",
            "--jsonl ans.json": "ans.json: --jsonl writes .jsonl files; give a file name with this suffix",
            "--csv ans.csv.gz": "ans.csv.gz: --csv writes .csv files; give a file name with this suffix",
            "--parquet ans.xlsx": "ans.xlsx: --parquet writes .parquet files; give a file name with this suffix",
        }.items()
    ),
    # A template for max_tokens is no secret, so the job in the run folder can be run.
    Mistake(
        "run job.toml --set 'sampling.max_tokens={{ stars }}'\nrun output/mood/job.toml",
        '"skipped": 3',
        0,
    ),
    # An address that can't be written is known before the run.
    *(
        Mistake(f"run job.toml {given}", words, never="ok, 0 failed")
        for given, words in (
            ("--output nosuch://b/a.csv", "--output: nosuch://b/a.csv: can't be written to"),
            ("--output https://b/a.csv", "--output https://b/a.csv: can't be written to"),
            ("--set 'output.export=[\"nosuch://b/a.csv\"]'", "nosuch://b/a.csv: can't be written"),
            ("--set 'output.export=[\"a.xlsx\"]'", "a.xlsx: unknown suffix; use .parquet"),
            ("--set 'output.export=[\"parqet\"]'", "did you mean 'parquet'?"),
        )
    ),
    Mistake("run job.toml\nexport output --csv", ("output: neither a", "'output/mood'")),
    Mistake(
        "validate job.toml --set engine.kind=vllm --set engine.model=batchkit-demo --set engine.lora=gone",
        "engine.lora: gone: no such folder, and not a name on the hub, which has the form owner/name",
        is_slow=True,
    ),
    Mistake(
        "validate job.toml --set scoring.reference=label --set 'scoring.scorers=[\"accuracy\"]'",
        ('found "accuracy"', "did you mean 'em'?"),
    ),
    Mistake(
        "validate steps.toml --set 'steps.b.when=stars == 5'",
        "steps.b: when: 'stars == 5' is the same text for all rows; write {{ stars == 5 }} to compute it for each row",
        files={"steps.toml": job_of_steps(a="{{ review }}", b="{{ review }}")},
    ),
]

NAMES = [
    *(
        Mistake(f"validate job.toml --set {key}=1", said)
        for key, said in {
            "model_name": "model_name: unknown key; did you mean 'engine.model'?",
            "input_file": "input_file: unknown key; did you mean 'input.path'?",
            "system_prompt": "system_prompt: unknown key; did you mean 'prompt.system'?",
            "batch_size": "did you mean 'engine.options.max_num_seqs'?",
            "max_model_len": "did you mean 'engine.options.max_model_len'?",
            "prompt.messages": "prompt.messages: unknown key; did you mean 'user'?",
            "output.path": "output.path: unknown key; did you mean 'export'?",
            "output.format": "output.format: unknown key; did you mean 'export'?",
            "prompt.name": "did you mean 'name', at the top of the file, above the first [table]?",
            "sampling.name": "sampling.name: belongs at the top of the file, above the first [table]",
            "sampling.task": "sampling.task: belongs at the top of the file, above the first [table]",
            "sampling.max_seq_len": "no such parameter; did you mean 'engine.options.max_model_len'?",
        }.items()
    ),
    *(
        Mistake(command, f"Did you mean '{here}'?")
        for command, here in {
            "run job.toml -n 5": "--limit",
            "run job.toml --gpus 2": "--set engine.options.tensor_parallel_size=…",
            "run job.toml --tensor-parallel-size 2": "--set engine.options.tensor_parallel_size=…",
            "run job.toml --output-dir x": "--set output.dir=…",
            "run --model_name m": "--model",
            "run job.toml -o a.csv": "--output",
            "run job.toml --temp 1": "--temperature",
            "export output/mood --format csv": "--csv",
            "run --system-prompt m": "--system",
            "run job.toml --top-p 1": "--set sampling.top_p=…",
            "retry output/mood": "batchkit retry-failed",
            "evaluate output/mood": "batchkit score",
        }.items()
    ),
    Mistake(
        "start job.toml", "Did you mean 'batchkit run', which also resumes an interrupted run?"
    ),
]

VALUES = [
    Mistake(f"run job.toml\n{command}", said, files={"old.xls": "x"})
    for command, said in {
        "run job.toml --set output.keep=label": '; write ["label"]',
        "run job.toml --set scoring.choices=a": 'expected list of text; write ["a"]',
        "run job.toml --set sampling=0": "set one of its keys, for example sampling.temperature",
        "run job.toml --set budget.max_seconds=1h": "expected number > 0; write the number of seconds",
        "run job.toml --set input.path=old.xls": "is a workbook of Excel before 2007; save it as .xlsx",
        "run job.toml --fresh --on-change requeue": "keeps answers of the old run: give only one of them",
        "merge output/mood": "--into is missing: batchkit merge output/a output/b --into output/ab",
        "export output/mood/results.jsonl --csv": "a file of a run; name the run's folder: output/mood",
        "run job.toml --fresh --set 'prompt.user={{ row.Review }}'": "did you mean 'review'?",
    }.items()
]

TABLES = {
    "prompts": PROMPTS,
    "runs": RUNS,
    "keys": KEYS,
    "commands": COMMANDS,
    "names": NAMES,
    "values": VALUES,
    "page": PAGE,
}


@pytest.mark.parametrize("mistake", params(TABLES))
def test_a_mistake_is_named_with_what_to_do(mistake: Mistake) -> None:
    check(mistake)


def test_messages_of_the_page_are_on_it() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [mistake.says for mistake in PAGE if f"`{mistake.says}`" not in page] == []


def test_a_moved_run_is_continued_where_it_is() -> None:
    folder = Path.cwd()
    write_example(folder)
    batchkit("run", "job.toml")
    (folder / "output/mood").rename(folder / "output/archive")
    refused = batchkit("run", "output/archive/job.toml")
    *_, place, _, name = refused.stderr.split()
    assert (refused.exit_code, name) == (2, "name=archive")
    again = batchkit("run", "output/archive/job.toml", "--set", place, "--set", name)
    assert (again.exit_code, again.json["skipped"]) == (0, 3)
    assert not (folder / "output/mood").exists()
