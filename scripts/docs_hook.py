"""A hook for mkdocs that adds the pages outside docs/ to the site."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = {
    "benchmarks.md": "benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, source in PAGES.items():
        text = Path(source).read_text(encoding="utf-8").replace("](docs/", "](")
        text = text.replace("](SECURITY.md)", "](security.md)")
        files.append(File.generated(config, name, content=text))
    return files
