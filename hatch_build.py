"""Called by hatchling: the README and the links as a registry's page shows them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FILE_LINK = re.compile(r"\[([^]]+)\]\((?!https?:|#)([^)]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """On a registry's page a link to a file leads nowhere: it becomes one to the file in the
    repository, whose address is in the environment variable ``REPOSITORY``, or else plain text."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = os.environ.get("REPOSITORY", "").rstrip("/")
        link = rf"[\1]({address}/blob/main/\2)" if address else r"\1"
        text = _FILE_LINK.sub(link, readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if address:
            metadata["urls"] = {
                "Repository": address,
                "Changelog": f"{address}/blob/main/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
