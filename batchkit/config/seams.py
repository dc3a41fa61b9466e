"""Extension points: readers, engines, engine layers, extractors, scorers, predictions and exports.

Each extension point has one dict of built-in implementations by name. Its values are lazy ``"module:Name"`` or
``"module"`` strings. The choices in the job file, its documentation, and the input suffixes are derived from these
dicts. Installed packages add implementations with entry points; ``batchkit export`` gets a flag for each added export.
docs/plugins.md describes each extension point.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, create_model

from batchkit.config.suggest import did_you_mean
from batchkit.config.terminal import shortened
from batchkit.errors import JobError


class Seam(NamedTuple):
    """An extension point: a key of the job file that takes the name of an implementation. The implementation is built
    in, or comes from an installed package (entry point).

    ``name``: the entry point group is ``batchkit.NAME``. ``table``: ``"module:NAME"`` of the dict of built-in
    implementations. ``also``: further values that the key in the job file accepts, without an implementation.
    ``beside``: another extension point whose names the key accepts, too. ``is_list``: the key takes a list of names.
    Entry points are read only if a name is not built in, or to list all names.
    """

    name: str
    table: str
    also: tuple[str, ...] = ()
    beside: Seam | None = None
    is_list: bool = False

    @property
    def built_in(self) -> Mapping[str, Any]:
        """The built-in implementations: ``"module:Name"`` by name."""
        table: Mapping[str, Any] = found_at(self.table)
        return table

    @property
    def added(self) -> Mapping[str, EntryPoint]:
        """The implementations of other packages: entry points by name. A built-in name can't be replaced."""
        return {
            name: point for name, point in _added(self.name).items() if name not in self.built_in
        }

    @property
    def documented(self) -> list[str]:
        """The values that the job file accepts for this key, without those of other packages."""
        others = [] if self.beside is None else self.beside.documented
        return [*self.also, *self.built_in, *others]

    @property
    def known(self) -> list[str]:
        """All values that the job file accepts for this key."""
        others = () if self.beside is None else self.beside.added
        return [*self.documented, *self.added, *others]

    def has(self, name: str) -> bool:
        """Return True if the job file accepts ``name`` for this key."""
        return name in self.documented or name in self.known

    def names(self) -> Iterator[str]:
        """Yield the built-in names, then those of other packages. Entry points are read only when the built-in names
        are used up."""
        yield from self.built_in
        yield from self.added

    def load(self, name: str) -> Any:
        """Import and return the implementation called ``name``.

        Raises:
            JobError: Another package provides the implementation, and importing it fails.
        """
        if name in self.built_in:
            return found_at(self.built_in[name])
        point = self.added[name]
        try:
            return point.load()
        except Exception as error:  # importing another package may run any code
            package = "" if point.dist is None else f" of the package {point.dist.name}"
            raise JobError(
                f"can't load {name} ({point.value}{package}): {type(error).__name__}: {error}; update or uninstall"
                " that package"
            ) from error

    def parameters(self, name: str) -> type[BaseModel]:
        """Return a pydantic model of the parameters that ``name`` takes in the job file. They are the keyword-only
        parameters of the implementation or, if it has a method ``find`` or ``score``, of this method.

        Raises:
            JobError: Another package provides the implementation, and importing it fails.
        """
        if self.beside is not None and name not in self.built_in and self.beside.has(name):
            return self.beside.parameters(name)
        found = self.load(name)
        return _keywords(getattr(found, "find", getattr(found, "score", found)))

    def check(self, name: str) -> str:
        """Return ``name`` unchanged if it is valid. Pydantic calls this to validate keys of the job.

        Raises:
            ValueError: No implementation has this name.
        """
        if self.has(name):
            return name
        found = f"found {shortened(json.dumps(name, ensure_ascii=False))}"
        if not self.known:
            raise ValueError(f"{found}, but no installed package has a name for this key")
        *first, last = map(json.dumps, self.known)
        expected = f"{', '.join(first)} or {last}" if first else last
        raise ValueError(f"{found}, expected {expected}{did_you_mean(name, self.known)}")

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Return the JSON Schema of a key that takes a name, or names with parameters (``tables/parameters.py``)."""
        found: dict[str, Any] = handler(schema)
        if found["type"] == "string":
            return {**found, "enum": self.known}
        table = {
            "type": "object",
            "properties": {name: self.parameters(name).model_json_schema() for name in self.known},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        }
        entry = {"anyOf": [{"enum": self.known}, table]}
        if not self.built_in:  # all names come from packages, which an editor does not know
            entry = {"type": ["string", "object"]}
        return {"type": "array", "items": entry} if self.is_list else entry


ENGINES = Seam("engines", "batchkit.engines:ENGINES")

READERS = Seam("readers", "batchkit.sources.formats:FORMATS", also=("auto",))
DEFERRED = Seam("deferred_scorers", "batchkit.scoring.deferred:DEFERRED")
SCORERS = Seam("scorers", "batchkit.scoring.scorers:SCORERS", beside=DEFERRED, is_list=True)
EXTRACTORS = Seam("extractors", "batchkit.scoring.extract:EXTRACTORS")
MODES = Seam("scoring_modes", "batchkit.scoring.overlap:MODES")
PREDICTIONS = Seam("predictions", "batchkit.commands.score.predictions:PREDICTIONS")
EXPORTS = Seam("exports", "batchkit.commands.export:EXPORTS")
LAYERS = Seam("layers", "batchkit.execution.engine_layer:LAYERS", is_list=True)

EngineKind = Annotated[str, ENGINES, AfterValidator(ENGINES.check)]
FormatName = Annotated[str, READERS, AfterValidator(READERS.check)]
ScorerName = Annotated[str, SCORERS, AfterValidator(SCORERS.check)]
ModeName = Annotated[str, MODES, AfterValidator(MODES.check)]


def is_deferred(scorer: str) -> bool:
    """Return True if the scorer runs after all rows have finished."""
    return scorer not in SCORERS.built_in and DEFERRED.has(scorer)


def found_at(target: str) -> Any:
    """Import and return the module ``"module"``, or the object ``"module:Name"`` in it."""
    module, _, name = target.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


@lru_cache
def _keywords(function: Callable[..., Any]) -> type[BaseModel]:
    """Return a pydantic model of the keyword-only parameters of ``function``, with their types and defaults."""
    fields: dict[str, Any] = {
        name: (
            Any if one.annotation is one.empty else one.annotation,
            ... if one.default is one.empty else one.default,
        )
        for name, one in signature(function).parameters.items()
        if one.kind is one.KEYWORD_ONLY
    }
    strict = ConfigDict(extra="forbid", strict=True)
    return create_model("Parameters", __config__=strict, __module__=function.__module__, **fields)


@lru_cache
def _added(name: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"batchkit.{name}")}
