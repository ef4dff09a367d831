# What CONTRIBUTING.md explains, by name. Every command takes what is installed in the active environment.
.PHONY: check quick test docs bench

check:  ## lint, style, types, layers, spelling: seconds
	ruff check . && ruff format --check .
	mypy && lint-imports && codespell

quick:  ## tests of parts and of properties: minutes
	python -m pytest tests/unit tests/laws

test:  ## all tests but those marked slow or jobs
	python -m pytest

docs:  ## writes the generated pages from the results that are kept, and checks all links
	python benchmarks/performance.py --results benchmarks/results && python benchmarks/scale_model.py --write docs/evidence/scaling.md
	python -m raytf.config.reference > docs/reference/settings.md
	python -m pytest tests/unit/test_links.py tests/unit/test_architecture.py

bench:  ## raytf beside its peers, in 20 minutes with larger spreads
	python benchmarks/all.py --quick
