"""What a package of others can add to: readers, engines, scorers, extractors and exports.

Each of these is one table, beside the things themselves, of names with a lazy ``"module:Name"`` or
``"module"``. Choices in the job file and its docs and the suffixes of inputs are derived from it. An installed
package adds to a table with entry points, and ``export`` has a flag for each export that is added so;
docs/plugins.md says what each is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from batchkit.config.suggest import did_you_mean
from batchkit.config.terminal import shortened
from batchkit.errors import JobError


class Seam(NamedTuple):
    """The names of one kind of thing: those in ``table``, then the entry points ``batchkit.NAME``.

    Entry points are only read if a name is not in the table, or to list all names. ``also``: further
    values of the job file's key, which name none of the things.
    """

    name: str
    table: str
    also: tuple[str, ...] = ()

    @property
    def own(self) -> Mapping[str, Any]:
        """The things that come with batchkit."""
        table: Mapping[str, Any] = found_at(self.table)
        return table

    @property
    def added(self) -> Mapping[str, EntryPoint]:
        """The things of other packages."""
        return {name: point for name, point in _added(self.name).items() if name not in self.own}

    def names(self) -> Iterator[str]:
        """All of them; other packages are only looked for if the first ones are not enough."""
        yield from self.own
        yield from self.added

    def load(self, name: str) -> Any:
        """The thing itself; its module is imported now.

        Raises:
            JobError: it is of another package, and can't be imported.
        """
        if name in self.own:
            return found_at(self.own[name])
        point = self.added[name]
        try:
            return point.load()
        except Exception as error:  # any code may run here
            package = "" if point.dist is None else f" of the package {point.dist.name}"
            raise JobError(
                f"{name} ({point.value}{package}) can't be loaded: {type(error).__name__}: {error}"
            ) from error

    def check(self, name: str) -> str:
        """
        Raises:
            ValueError: nothing has this name.
        """
        if name in self.also or name in self.own or name in self.added:
            return name
        known = [*self.also, *self.names()]
        *first, last = map(json.dumps, known)
        raise ValueError(
            f"found {shortened(json.dumps(name, ensure_ascii=False))}, expected {', '.join(first)} or {last}"
            f"{did_you_mean(name, known)}"
        )


ENGINES = Seam("engines", "batchkit.engines:ENGINES")

READERS = Seam("readers", "batchkit.sources.formats:FORMATS", also=("auto",))
SCORERS = Seam("scorers", "batchkit.scoring.scorers:SCORERS", also=("chart", "judge"))
EXTRACTORS = Seam("extractors", "batchkit.scoring.extract:EXTRACTORS")
EXPORTS = Seam("exports", "batchkit.commands.export:EXPORTS")

EngineKind = Annotated[str, ENGINES, AfterValidator(ENGINES.check)]
FormatName = Annotated[str, READERS, AfterValidator(READERS.check)]
ScorerName = Annotated[str, SCORERS, AfterValidator(SCORERS.check)]
Extract = Annotated[str, EXTRACTORS, AfterValidator(EXTRACTORS.check)]

ExportName = Annotated[str, EXPORTS, AfterValidator(EXPORTS.check)]


def found_at(target: str) -> Any:
    """The module, or what has the name in it, at ``"module"`` or ``"module:Name"``."""
    module, _, name = target.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


@lru_cache
def _added(name: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"batchkit.{name}")}
