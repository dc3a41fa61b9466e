"""The keys ``extract`` and ``scorers``: names of extractors and scorers, each with its parameters.

The job file writes each as a name, or as a table ``{ NAME = { PARAMETER = VALUE } }``. The job holds a dict of all
parameters, with their defaults, by name.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, ValidationError

from batchkit.config.problems import shown
from batchkit.config.seams import EXTRACTORS, SCORERS, Seam

Parameters = dict[str, dict[str, Any]]


def _read(value: Any, seam: Seam) -> Parameters:
    """Return the parameters of each name in ``value``, which is written as in the job file."""
    entries = value if seam.is_list else [value]
    if not isinstance(entries, list):
        raise ValueError(f"found {shown(value)}, expected a list; write [{shown(value)}]")
    found, problems = Parameters(), list[Any]()
    for entry in entries:
        match entry:
            case str(name):
                given: Any = {}
            case dict() if len(entry) == 1:
                ((name, given),) = entry.items()
            case _:
                raise ValueError(
                    f"found {shown(entry)}, expected a name, or a table {{ NAME = {{ PARAMETER = VALUE }} }}"
                )
        if seam.check(name) in found:
            raise ValueError(f"has {name} twice; leave one out")
        try:
            found[name] = seam.parameters(name).model_validate(given).model_dump()
        except ValidationError as error:
            details = error.errors(include_url=False)
            problems += [{**one, "loc": (name, *one["loc"])} for one in details]
    if problems:
        raise ValidationError.from_exception_data(seam.name, problems)
    return found


def _written(found: Parameters, seam: Seam) -> Any:
    """Return the value for the job file. Parameters that are None are left out, since TOML has no null."""
    entries: list[Any] = []
    for name, parameters in found.items():
        given = {key: value for key, value in parameters.items() if value is not None}
        entries.append({name: given} if given else name)
    return entries if seam.is_list else entries[0]


def _key_of(seam: Seam) -> tuple[Any, ...]:
    return (
        seam,
        BeforeValidator(partial(_read, seam=seam)),
        PlainSerializer(partial(_written, seam=seam)),
    )


Extract = Annotated[Parameters, *_key_of(EXTRACTORS)]
"""One extractor."""
Scorers = Annotated[Parameters, *_key_of(SCORERS)]
"""Any number of scorers, in the order of the job file."""
