"""Writes ``docs/job-file.md`` and ``job.schema.json`` from the tables in ``batchkit/config/tables/``.

    .venv/bin/python scripts/make_job_file_doc.py

``tests/test_docs.py`` fails if the committed files differ from the result of this script.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pydantic import PlainSerializer
from pydantic.fields import FieldInfo

from batchkit.config.job_schema import SCHEMA, descriptions, job_schema
from batchkit.config.problems import in_words
from batchkit.config.seams import EXTRACTORS, SCORERS
from batchkit.config.speed_options import SPEED_OPTIONS
from batchkit.config.suggest import NAMES
from batchkit.config.tables import (
    JobConfig,
    RolloutTable,
    ScoringRule,
    ServerTable,
    StepTable,
    Table,
)

_CODE = re.compile(r'"[^"]*"|\btrue\b|\bfalse\b|\^\S+')
PAGE = Path(__file__).parent.parent / "docs" / "job-file.md"

EXAMPLE = """\
name = "reviews"                       # the run folder is output/reviews

[input]
path = "data/reviews.csv"              # looked up beside this file first
id   = "id"                            # the field that names a row in the results

[vars]
language = "English"                   # a free name for the templates below

[prompt]                               # a row's fields are the templates' names
system = "You judge the mood of reviews. Answer in {{ language }}."
user   = "Is this review positive or negative?\\n\\n{{ review }}"
images = ["photos/{{ id }}.jpg"]       # any number of images, below media.root

[media]
root = "data"                          # no file outside it is ever opened

[engine]
model = "Qwen/Qwen3-VL-8B-Instruct"    # a folder, or a name on the Hugging Face hub

[engine.options]                       # any option of vllm.LLM
max_model_len = 8192

[sampling]                             # any name of vllm.SamplingParams
temperature = 0.7
max_tokens  = 512

[output]
keep = ["label"]                       # copied from the row into its record
"""

HEAD = """\
<!-- Made by scripts/make_job_file_doc.py from batchkit/config/tables/: change it there. -->

# The job file

A job file names the rows, the model and the settings of a run, in [TOML](https://toml.io). Every job with a model needs
`engine.model`, and nearly every one needs `input.path` and `prompt.user`; all other keys have defaults.

```toml
{example}```

`batchkit validate JOB.toml` checks it against every row, without loading the model. `batchkit run
JOB.toml --dry-run` prints the first rows as the model would get them.

- **Names.** A key is written with its table: `temperature` under `[sampling]` is `sampling.temperature`. Unknown keys and
  tables, and values of a wrong type, are errors; batchkit reports all of them together, then all errors that vLLM's
  classes find. You choose the names in `[vars]`, `[engine.options]`, `[sampling]`, `[pooling]`, `[input.where]`,
  `[prompt.texts]` and `[prompt.chat_template_kwargs]`.
- **Overrides.** `--set KEY=VALUE` overrides any key and may be repeated: `--set sampling.temperature=0 --set
  engine.options.max_num_seqs=64 --set vars.language=French`. The value is TOML (`0`, `true`, `["a", "b"]`); anything else
  is text.
- **Paths.** `input.path`, `media.root`, `prompt.system_file`, `user_file` and `tools` (also of a step), and the file or
  module of `rollout.function` are looked up beside the job file first, then in the working directory. `engine.model`,
  `engine.lora` and `output.dir` start from the working directory.
- **Templates.** `{{{{ name }}}}` in `prompt.system`, `user`, `images`, `texts` and `tools`, and in `[pair]`, is
  a field of the row or a name from `[vars]`; if both exist, the row's field wins. Templates are
  [Jinja2](https://jinja.palletsprojects.com/templates/), with loops, conditions and filters.
- **Rows without templates.** Without `system`, `user` and `images`, batchkit sends a row's own `messages` (OpenAI's chat
  shape), `body` (an OpenAI batch request) or `prompt`.
- **Editors.** The first line of a job file from `batchkit init`, `#:schema …`, refers to the JSON Schema in the installed
  package. Editors with support for TOML schemas (Even Better TOML, Taplo) then complete and check the keys. `batchkit
  init --schema` prints the schema, with the names that installed plug-ins add.

## Top level

{top}
## `[vars]`

Your own names for the templates, and for `input.path` and `media.root`: text, numbers, lists, tables. With them, one job
file serves several runs: `--set vars.language=French`.
"""

SPEED = f"""
These options change speed and memory use, not answers. A run may be resumed with other values of them:
{textwrap.fill(", ".join(f"`{name}`" for name in SPEED_OPTIONS), 115)}.
"""

STEPS = """
`prompt` and `sampling` are tables with the keys that they have at top level: `[steps.prompt]` and
`[steps.sampling]` below their `[[steps]]`. Only the first step may have no `user`, `user_file` or
`images`: it sends a row's own prompt. `--set` names a step by its name: `--set
steps.draft.sampling.temperature=0`. docs/steps.md is the guide.
"""

VARIANTS = """
## `[[variant]]`

A variant of the job: `name`, and any keys that it changes, such as `engine.options.max_num_seqs = 512`. `batchkit run`
runs each variant, in a folder with that name inside the run folder, and compares them. Other commands read the job
without its variants. docs/compare.md is the guide.
"""

ENGINES = """
## `[engines.NAME]`

A further model, for steps with `engine = "NAME"`, and for a function's `generate(…, engine="NAME")`.
Its keys are those of `[engine]`, with `[engines.NAME.options]` and `[engines.NAME.server]`. `--set
engines.NAME.kind=dry-run` tries the job without it.
"""

ELSEWHERE = """
## Names in other tools

If you use a name on the right where batchkit has no such name, the error message gives the name on the left.

| here | elsewhere |
|---|---|
"""


PARAMETERS = """
### Parameters of extractors and scorers

An extractor or a scorer with parameters is a table: `extract = { regex = { pattern = "Answer: (.*)" } }`,
`scorers = ["em", { numeric = { tolerance = 0.05 } }]`. docs/scoring.md says what the parameters do.

| parameter | type | default |
|---|---|---|
"""


_OF_THEIR_OWN = ("vars", "steps", "rollout", "engines")  # sections


def document() -> str:
    """Return the page as Markdown."""
    fields = JobConfig.model_fields
    plain = {name: field for name, field in fields.items() if not _is_table(field)}
    of_top = {name: plain[name] for name in plain if name not in _OF_THEIR_OWN}
    sections = [
        _section(name, field.annotation)
        + (SPEED + _section("engine.server", ServerTable)) * (name == "engine")
        + (PARAMETERS + "".join(_parameters())) * (name == "scoring")
        for name, field in fields.items()
        if _is_table(field)
    ]
    top = _table(of_top, descriptions(JobConfig))
    return (
        HEAD.format(example=EXAMPLE, top=top)
        + "".join(sections)
        + _section("[steps]", StepTable, leave_out=("prompt", "sampling"))
        + STEPS
        + _section("rollout", RolloutTable)
        + ENGINES
        + VARIANTS
        + _section("[scoring.rules]", ScoringRule)
        + ELSEWHERE
        + "".join(
            f"| `{here.replace('|', chr(92) + '|')}` | {_listed(names)} |\n"
            for here, names in NAMES.items()
        )
    )


def _listed(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _section(name: str, table: Any, leave_out: Collection[str] = ()) -> str:
    own = sorted(table.model_fields, key=lambda key: key not in table.__annotations__)  # come first
    fields = {key: table.model_fields[key] for key in own if key not in leave_out}
    return f"\n## `[{name}]`\n\n{_sentence(table)}\n\n{_table(fields, descriptions(table))}"


def _table(fields: dict[str, FieldInfo], described: dict[str, str]) -> str:
    lines = ["| key | type | default | description |", "|---|---|---|---|"]
    for name, field in fields.items():
        cells = (
            f"`{name}`",
            _CODE.sub(r"`\g<0>`", in_words(field.annotation, field.metadata)),
            _default(name, field),
            described.get(name, ""),
        )
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _parameters() -> Iterator[str]:
    """Yield a line for each parameter of an extractor or a scorer."""
    for key, seam in (("extract", EXTRACTORS), ("scorers", SCORERS)):
        for name in seam.documented:
            for one, field in seam.parameters(name).model_fields.items():
                words = _CODE.sub(r"`\g<0>`", in_words(field.annotation, field.metadata))
                yield f"| `{key}.{name}.{one}` | {words} | {_default(one, field)} |\n"


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None or field.default == "":
        return "not set"
    written = [one.func for one in field.metadata if isinstance(one, PlainSerializer)]
    shown = f"`{json.dumps(written[0](field.default) if written else field.default)}`"
    if name.endswith("_bytes"):
        shown += f" ({field.default // 2**20:,} MiB)"
    return shown


def _is_table(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Table)


def _sentence(table: Any) -> str:
    return " ".join((table.__doc__ or "").split())


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
    SCHEMA.write_text(json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{PAGE}: written")
    print(f"{SCHEMA}: written")
