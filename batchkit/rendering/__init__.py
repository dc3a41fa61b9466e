"""Rendering: from rows to requests."""
