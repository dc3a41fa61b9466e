"""The decision which models are loaded at the same time, and which take turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from batchkit.commands import Say
from batchkit.engines.memory import visible_gpus
from batchkit.execution.engine_turns import is_loaded_here, side_by_side
from batchkit.serve.settings import ServedModel, Settings


@dataclass(frozen=True)
class ModelPlace:
    """A slot for one loaded model. If it has several ``models``, they take turns in it.

    - ``name``: part of the name of the engine's log; "" for the first slot.
    - ``elsewhere``: names of the models in other slots.
    - ``environment``: variables for the engine's processes, for example its GPUs.
    """

    name: str
    models: Collection[ServedModel]
    elsewhere: Collection[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_workers(self) -> bool:
        return any(model.job.workers.count is not None for model in self.models)

    def is_for(self, name: str) -> bool:
        """Return True if batches of the model called ``name`` run in this place.

        The first place also runs the batches of models that the server no longer offers.
        """
        is_here = any(name == model.name for model in self.models)
        return is_here or (not self.name and name not in self.elsewhere)


def places_of(settings: Settings, say: Say) -> list[ModelPlace]:
    """Assign the server's models to places.

    Each model on a remote server gets a separate place. Local models get separate places if all of them fit on the GPUs
    at the same time; otherwise they share one place. The number of GPUs is ``workers.gpus`` if all jobs set it (0 means
    no GPU), otherwise the number of visible GPUs.
    """
    models = {model.name: model for model in settings.models.values()}
    here = {name: model for name, model in models.items() if is_loaded_here(model.job.engine)}
    obstacle, environments = _side_by_side(here)
    groups = [[name] for name in models if name not in here or not obstacle]
    if obstacle:
        say(f"only one of {len(here)} models is loaded at a time: {obstacle}")
        groups.append([*here])
    return [
        ModelPlace(
            str(number + 1) if number else "",
            [models[name] for name in group],
            models.keys() - set(group),
            environments.get(group[0], {}),
        )
        for number, group in enumerate(groups)
    ]


def _side_by_side(here: Mapping[str, ServedModel]) -> tuple[str, Mapping[str, Mapping[str, str]]]:
    jobs = {name: model.job for name, model in here.items()}
    if len(jobs) < 2:
        return "", {}
    if any(job.workers.count is not None for job in jobs.values()):
        return "workers.count already spreads each model over the GPUs", {}
    if any(job.workers.per_gpu is not None for job in jobs.values()):
        return "workers.per_gpu uses all visible GPUs for one model", {}
    given = [room for job in jobs.values() if (room := job.workers.gpus) is not None]
    if len(given) == len(jobs):
        return side_by_side(jobs, max(given))
    n_visible = visible_gpus()
    return side_by_side(jobs, n_visible) if n_visible else ("no GPU is visible", {})
