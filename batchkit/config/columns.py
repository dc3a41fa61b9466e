"""The columns that a job's prompts are made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from batchkit.config.regular_file import read_text
from batchkit.config.tables import JobConfig


def prompt_columns(job: JobConfig) -> frozenset[str]:
    """Names in the texts of its prompts, but those of ``[vars]``, ``input.cross`` and the places of clips; a template
    that can't be used is refused where it is, and has none here."""
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.meta import find_undeclared_variables

    found = set[str]()
    for text in _texts(job):
        with suppress(TemplateError, RecursionError):
            tree = Environment().parse(text)
            found |= find_undeclared_variables(tree)
            found |= {  # {{ row["my column"] }}
                item.arg.value
                for item in tree.find_all(nodes.Getitem)
                if isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str)
            }
    prompts = [its.prompt for _, its in job.of_each_step()]
    places = {kind for kind in ("audio", "video") if any(getattr(p, f"{kind}s") for p in prompts)}
    return frozenset(found - job.vars.keys() - job.input.cross.keys() - places)


def with_filled(job: JobConfig) -> JobConfig:
    """The job whose input leaves out what ``input.empty`` says, once its prompts' files have been found."""
    if job.input.empty != "skip":
        return job
    return job.model_copy(update={"input": job.input.with_filled(prompt_columns(job))})


def _texts(job: JobConfig) -> Iterator[str]:
    for _, its in job.of_each_step():
        for text in (its.prompt.user, its.prompt.system, its.pair.query, its.pair.documents):
            if isinstance(text, str):
                yield text
        for file in (its.prompt.user_file, its.prompt.system_file):
            with suppress(OSError, UnicodeDecodeError):
                yield "" if file is None else read_text(file)
