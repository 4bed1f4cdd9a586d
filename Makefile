# Every habit is one command; CI runs the same ones. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PY := .venv/bin/python
PYTEST := $(PY) -m pytest -p no:cacheprovider
export PYTHONUNBUFFERED := 1

.PHONY: help env demo demo-down quickstart test test-fast test-full check fmt bench lock

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort | while IFS=$$'\t' read -r t d; do printf '  %-22s %s\n' "$$t" "$$d"; done

env: ## make .venv from the hashed lock file
	@hack/env.sh

demo: env ## the main job on a real cluster: weights change under load, no pod restarts (ENGINE=vllm|sglang: in their own servers; SOURCE=s3: versions from an S3 server)
	@$(PY) -m demo.cluster_demo --engine $(or $(ENGINE),embedded) --source $(or $(SOURCE),mounted)

demo-down: env ## remove the demo's cluster
	@$(PY) -m demo.cluster_demo --down

quickstart: env ## the same transaction on one engine process, no cluster
	@$(PY) -m demo.quickstart

test: env ## every test but the long matrices
	@hack/test.sh

test-fast: env ## all tests that start no model, cluster or API server: under two minutes
	@hack/kind/tools.sh helm
	@$(PYTEST) -q -n 2 -m "not model and not api and not cluster and not engine and not sources and not full" tests

test-full: env ## all tests, with whole fault matrices and soaks
	@FULL=1 hack/test.sh

check: env ## ruff, mypy strict, import-linter, codespell, generated files clean
	@hack/check.sh

fmt: env ## format the code
	@$(PY) -m ruff check -q --fix . || true
	@$(PY) -m ruff format -q .

bench: env ## figures as ratios measured in one run (BENCH=name runs one)
	@$(PY) -m bench $(BENCH)

lock: env ## resolve the lock files anew
	@hack/lock.sh

-include hack/cluster.mk
