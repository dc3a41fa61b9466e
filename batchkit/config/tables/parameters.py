"""The keys ``extract``, ``scorers`` and ``layers``: names of extractors, scorers and engine layers, each with its
parameters.

In the job file, each one is a name, or a table ``{ NAME = { PARAMETER = VALUE } }``. In ``JobConfig``, the key is a
dict: by name, the values of all parameters, including defaults.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, ValidationError

from batchkit.config.problems import shown
from batchkit.config.seams import EXTRACTORS, LAYERS, SCORERS, Seam

Parameters = dict[str, dict[str, Any]]


def _read(value: Any, seam: Seam) -> Parameters:
    """Return the parameters by name. ``value`` has the form of the job file."""
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
Layers = Annotated[Parameters, *_key_of(LAYERS)]
"""Any number of engine layers, the highest first."""
