"""What the commands do, one file or folder each."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
"""Gets the lines that a command says while it works."""
