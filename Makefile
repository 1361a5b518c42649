# Post-training tasks on verl. `make help` lists targets and variables.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

TASKS := $(filter-out common,$(notdir $(patsubst %/train.sh,%,$(wildcard tasks/*/train.sh))))
STACK ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo current || echo cpu)
VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed-$(STACK)
STAGES := data sft train eval config
ARGS ?=
export STACK
export STARTED := $(shell date +%s)

# Said before anything is made, so also under `make -n`.
ifneq ($(filter $(STAGES),$(MAKECMDGOALS)),)
  ifeq ($(filter $(TASK),$(TASKS)),)
    $(error TASK=$(TASK): no such task; there are: $(TASKS))
  endif
endif

.PHONY: help install new test test-all lint format clean $(STAGES)

help: ## this text
	@echo "make TARGET TASK=<$(subst $() ,|,$(TASKS))> [VARIABLE=value ...] [ARGS=\"hydra.key=value ...\"]"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  %-10s%s\n", $$1, $$2}'
	@echo; echo "Variables, the same in every task (defaults: tasks/<task>/train.sh and tasks/common/stacks/$(STACK).sh):"
	@PYTHONPATH=. python3 -m tasks.common.settings

install: $(INSTALLED) ## install the pinned packages of the stack into .venv

$(INSTALLED): tasks/common/stacks/$(STACK)/requirements.txt tasks/common/install.sh
	@bash tasks/common/install.sh $(STACK) $(VENV) "$(if $(filter train,$(MAKECMDGOALS)),[1/$(STAGE_COUNT)] )"
	@touch $@

data: $(INSTALLED) ## prepare the task's data
sft: $(INSTALLED) ## SFT warm-up on the task's demonstrations
train: $(INSTALLED) ## everything: data, model, SFT warm-up, RL, evaluation, closing table
eval: $(INSTALLED) ## evaluate base, warm-up and trained model again
config: $(INSTALLED) ## print verl's resolved config without training
$(STAGES):
	@PYTHON=$(CURDIR)/$(PYTHON) STAGE=$@ bash tasks/$(TASK)/train.sh $(ARGS)

new: $(INSTALLED) ## scaffold tasks/$(TASK) from the template
	@$(PYTHON) -m cookiecutter template -o tasks --no-input task="$(TASK)" $(OPTIONS)

test: $(INSTALLED) ## fast tests
	@PYTHONPATH=. $(PYTHON) -m pytest -q -m "not slow" tests tasks

test-all: $(INSTALLED) ## fast tests and slow end-to-end runs
	@PYTHONPATH=. $(PYTHON) -m pytest -q tests tasks

lint: $(INSTALLED) ## ruff, shellcheck, format
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	@$(VENV)/bin/shellcheck -x $$(git ls-files '*.sh' | grep -v '{{') .ci/run

format: $(INSTALLED) ## format the Python code
	@$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .

clean: ## remove artifacts/ (data, models, runs)
	rm -rf artifacts
