"""A build hook for hatchling that adapts the README and the links to the page of a package registry."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FILE_LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:|#)([^)]+)\)")
_PICTURE = re.compile(r"!\[([^]]+)\]\(([^)]+)\)\n*")


class CustomMetadataHook(MetadataHookInterface):
    """A hook that replaces relative links in the README, because they lead nowhere on a registry's page.

    If the environment variable ``REPOSITORY`` holds the repository's address, links and pictures lead to the files in
    the repository. Otherwise links become plain text, and pictures are left out.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = os.environ.get("REPOSITORY", "").rstrip("/")
        link = rf"[\1]({address}/blob/main/\2)" if address else r"\1"
        picture = rf"![\1]({address}/raw/main/\2)\n\n" if address else ""
        text = _FILE_LINK.sub(link, _PICTURE.sub(picture, readme))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if address:
            metadata["urls"] = {
                "Repository": address,
                "Changelog": f"{address}/blob/main/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
