"""Rows that name the same image share its pixels, as long as one of them holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakValueDictionary

from PIL import Image


class SharedImages:
    """Images by name, in weak references, so no limit is needed. Many threads may use it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._alive: WeakValueDictionary[str, Image.Image] = WeakValueDictionary()
        self._loading: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def get(self, name: str, load: Callable[[], Image.Image]) -> Image.Image:
        """The image of that name; calls ``load`` if no row holds it. One thread at a time loads it.

        Callers must not modify the image. Raises what ``load`` raises.
        """
        with self._guard:
            turn = self._loading.setdefault(name, threading.Lock())
        with turn:
            image = self._alive.get(name)
            if image is None:
                image = self._alive[name] = load()
            return image
