#!/usr/bin/env bash
# Builds the docs site into site/, and fails at a broken link. Its tools live in .venv-docs, apart from
# batchkit's own: the API reference is read from the source, and nothing of batchkit is imported.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-docs
lock=requirements-docs.lock
key="$PWD ${PYTHON:-python3} $(cksum < $lock)"

if [ "$(cat $venv/.stamp 2>/dev/null)" != "$key" ]; then
    echo "docs: installing the $(grep -c '^[a-z].*==' $lock) packages of $lock into $venv"
    "${PYTHON:-python3}" -m venv --clear $venv
    $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
        -r $lock 2> >(grep -v "WARNING: Location .* is ignored" >&2)
    echo "$key" > $venv/.stamp
fi
NO_MKDOCS_2_WARNING=1 $venv/bin/mkdocs build --strict
echo "docs: site/index.html"
