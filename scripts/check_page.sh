#!/usr/bin/env bash
# Checks the page in batchkit/commands/view: types, lint and unit tests. Only these checks need Node.js.
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in node npm; do
    command -v $tool >/dev/null && continue
    echo "page: not checked, because $tool is missing; install Node.js 20.19 or newer" >&2
    [ -z "${CI:-}" ] # an error only in CI
    exit
done

# npm writes this file at the end of an installation.
installed=node_modules/.package-lock.json
[ $installed -nt package-lock.json ] && [ $installed -nt package.json ] ||
    npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
node_modules/.bin/tsc --project jsconfig.json
node_modules/.bin/eslint batchkit/commands/view tests/page eslint.config.js
node --test --test-reporter=spec tests/page/*.test.js
