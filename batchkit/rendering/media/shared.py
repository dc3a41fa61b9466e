"""Rows that name the same image share its pixels, for as long as one of them holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakValueDictionary

from PIL import Image


class SharedImages:
    """Images by their names. It keeps none alive, so it needs no bound. Safe to use from many threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._alive: WeakValueDictionary[str, Image.Image] = WeakValueDictionary()
        self._loading: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def get(self, name: str, load: Callable[[], Image.Image]) -> Image.Image:
        """The image of that name, by ``load`` where nobody holds it; one thread at a time loads it.

        Whoever gets it must leave it as it is. Raises what ``load`` raises.
        """
        with self._guard:
            turn = self._loading.setdefault(name, threading.Lock())
        with turn:
            image = self._alive.get(name)
            if image is None:
                image = self._alive[name] = load()
            return image
