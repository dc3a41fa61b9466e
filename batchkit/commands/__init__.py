"""The implementation of the commands, one file or folder each."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
"""A callback for progress messages of a command."""
