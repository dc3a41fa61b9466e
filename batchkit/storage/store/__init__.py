"""Run folders in an object store (``output.store``): ``seals.py`` has the format."""
