#!/usr/bin/env bash
# Writes what is in .venv, which the locks pin, into FOLDER (dist): batchkit.cdx.json, a software bill of materials
# (CycloneDX), and licenses.csv, the licence that each package declares.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-dist}
mkdir -p "$folder"

.venv/bin/uv tool run --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py environment --pyproject pyproject.toml \
    --output-format JSON --output-file "$folder/batchkit.cdx.json" .venv
.venv/bin/uv tool run --quiet pip-licenses@5.5.5 --python .venv/bin/python --from mixed --format csv \
    --output-file "$folder/licenses.csv"
