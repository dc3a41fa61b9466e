"""Which model answered, and when: what tells one run from another besides its name."""

from __future__ import annotations

from batchkit.config.numbers import when
from batchkit.storage.manifest import Manifest


def origin(manifest: Manifest) -> list[str]:
    """The model, or the engine if it has none, and the time of the run."""
    model, starts = manifest.model, manifest.starts
    name = model.name or manifest.identity.get("engine.kind", "")
    revision = f" at {model.revision}" if model.revision else ""
    time = when(starts[0].started_at, starts[-1].ended_at) if starts else ""
    return [part for part in (f"{name}{revision}", time) if part]
