"""Called by hatchling: the README and the links as a registry's page shows them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FILE_LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:|#)([^)]+)\)")
_PICTURE = re.compile(r"!\[([^]]+)\]\(([^)]+)\)\n*")


class CustomMetadataHook(MetadataHookInterface):
    """On a registry's page a link to a file leads nowhere: it becomes one to the file in the
    repository, whose address is in the environment variable ``REPOSITORY``, or else plain text. So do pictures, or
    else they are left out."""

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
