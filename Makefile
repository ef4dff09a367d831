# What CONTRIBUTING.md explains, by name. Every command takes what is installed in the active environment. Without one, `demo`
# and `test` make .venv; they are what scripts/ has for machines without make.
.PHONY: demo check quick test gate docs site bench

demo:  ## trains a first model, and installs raytf before if it is missing
	./scripts/demo

check:  ## lint, style, types, layers, spelling: seconds
	ruff check . && ruff format --check .
	mypy && lint-imports && codespell

quick:  ## tests of parts and of properties: minutes
	python -m pytest tests/unit tests/laws

test:  ## all tests but whole jobs and clusters
	./scripts/test

gate:  ## what a change must pass
	bash .ci/run

docs:  ## writes the generated pages from the results that are kept, and checks all links
	python -m benchmarks.performance --results benchmarks/results && python -m benchmarks.scale.model --write docs/evidence/scaling.md
	python docs/reference/write.py && python docs/pictures/draw.py
	python -m pytest tests/unit/test_links.py tests/unit/test_architecture.py tests/unit/test_site.py

site:  ## the pages of docs/ as a site, in build/site
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --site-dir build/site

bench:  ## raytf beside its peers, in 20 minutes with larger spreads
	python -m benchmarks.all --quick
