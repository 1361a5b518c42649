# Post-training tasks on verl. `make help` lists targets and variables.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

TASKS := $(notdir $(patsubst %/train.sh,%,$(wildcard tasks/*/train.sh)))
STACKS := $(basename $(notdir $(wildcard tasks/common/stacks/*.sh)))
ifndef STACK
  CHOSEN := $(shell bash tasks/common/install/choose_stack.sh)
  STACK := $(firstword $(subst :, ,$(CHOSEN)))
endif
STAGES := doctor data probe sft train dpo all experiment merge eval compare rescore chat batch config bfcl simulate
ARGS ?=
export STACK
export STARTED := $(shell date +%s)

# PYTHON=/some/python uses an environment of your own; without it, .venv is made from the stack's pinned list, or
# .venv-STACK when .venv holds another stack.
ifdef PYTHON
  INSTALLED :=
else
  VENV := .venv$(if $(filter-out .venv/.installed-$(STACK),$(wildcard .venv/.installed-*)),-$(STACK))
  INSTALLED := $(VENV)/.installed-$(STACK)
  PYTHON := $(CURDIR)/$(VENV)/bin/python
endif
BIN = $(dir $(PYTHON))

# Refused before anything is made, so also under `make -n`.
ifeq ($(filter $(STACK),$(STACKS)),)
  $(error STACK=$(STACK): no such stack; there are: $(STACKS))
endif
ifneq ($(filter $(STAGES) bench bench_training report,$(MAKECMDGOALS)),)
  ifeq ($(filter $(TASK),$(TASKS)),)
    $(error TASK=$(TASK): no such task; there are: $(TASKS))
  endif
endif
ifneq ($(filter repeat runs diff,$(MAKECMDGOALS)),)
  ifneq ($(filter-out $(TASKS),$(TASK)),)
    $(error TASK=$(TASK): no such task; there are: $(TASKS))
  endif
endif
ifneq ($(filter new,$(MAKECMDGOALS)),)
  ifeq ($(TASK),)
    $(error TASK is empty; give the new task a name: make new TASK=my_task)
  endif
endif

ifneq ($(filter install $(filter-out config,$(STAGES)),$(MAKECMDGOALS)),)
  $(if $(CHOSEN),$(info STACK=$(CHOSEN)))
endif

RUN_STAGE = PYTHON='$(PYTHON)' STAGE=$@ bash tasks/$(TASK)/train.sh $(ARGS)
# Installation counts as the first stage of `make train`.
# What `make new` tells the template besides OPTIONS.
export CONFIG
NEW = $(if $(SOURCE),'source=$(SOURCE)') $(if $(filter reasoning_gym,$(SOURCE)),reward=environment 'description=$(or $(ENV),An environment) of reasoning-gym') $(if $(ENV),'env=$(ENV)') $(if $(CONFIG),"config=$$CONFIG")
# cookiecutter's own command, but a choice that there is not is said in one line.
COOKIECUTTER = 'import sys; sys.tracebacklimit = 0; import cookiecutter.cli as c; c.main(prog_name="cookiecutter")'
WHOLE := $(filter train dpo all,$(MAKECMDGOALS))
NUMBER = $(if $(WHOLE),[1/$$(GOAL=$(WHOLE) STAGE=count bash tasks/$(TASK)/train.sh)] )

.PHONY: help install lock bench bench_training bench_rewards new json_to_parquet test test-all lint format clean cluster-status repeat monitor runs diff report $(STAGES)

help: ## this text
	@echo 'make TARGET TASK=<$(subst $() ,|,$(TASKS))> [VARIABLE=value ...] [ARGS="hydra.key=value ..."]'
	@grep -hE '^[a-z_-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  %-16s%s\n", $$1, $$2}'
	@printf '\nVariables, the same in every task (defaults: tasks/TASK/train.sh, tasks/common/stacks/$(STACK).sh):\n'
	@PYTHONPATH=. python3 -m tasks.common.settings

install: $(INSTALLED) ## install the STACK's pinned packages into .venv, and check them

ifneq ($(INSTALLED),)
$(INSTALLED): $(wildcard tasks/common/stacks/$(STACK)/requirements.txt) tasks/common/install/install.sh
	@bash tasks/common/install/install.sh $(STACK) $(VENV) "$(NUMBER)"
endif

lock: $(INSTALLED) ## pin all packages of every stack from pyproject.toml; UPGRADE=1: newest versions
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.install.lock $(if $(UPGRADE),--upgrade) $(ARGS)

doctor: $(INSTALLED) ## what this machine, the settings and the data would come to grief on, and what to do
data: $(INSTALLED) ## prepare the task's data
sft: $(INSTALLED) ## SFT warm-up on the task's demonstrations
train: $(INSTALLED) ## everything: data, model, SFT warm-up, RL, evaluation, closing table
dpo: $(INSTALLED) ## the same with DPO: on pairs of PAIRS_FILE, or of the policy's own samples
all: $(INSTALLED) ## data, (sft), train, merge, eval, compare; FROM=train starts later, on data that is there
experiment: $(INSTALLED) ## train with METHODS=grpo,gspo, SEEDS=3, LRS=1e-6,3e-6 on the same data, and compare them
probe: $(INSTALLED) ## before training: has the data signal for this model? FILTER=1 keeps the prompts that have
eval: $(INSTALLED) ## evaluate MODEL, or base, warm-up and trained model
compare: $(INSTALLED) ## BASE against MODEL or the trained model: paired tests, prompts gained and lost
bfcl: $(INSTALLED) ## tool_calling: the single-turn categories of BFCL, the first LIMIT of each
simulate: $(INSTALLED) ## econ_agent: the policies run the economy for MONTHS
rescore: $(INSTALLED) ## score stored ROLLOUTS again, without a model
merge: $(INSTALLED) ## the checkpoint STEP as one folder that vLLM and transformers load
chat: $(INSTALLED) ## talk to MODEL, or to the trained model
batch: $(INSTALLED) ## answer the prompts of INPUT with MODEL, or with the trained model, into OUTPUT
config: $(INSTALLED) ## print verl's resolved config without training
$(filter-out train dpo all,$(STAGES)):
	@$(RUN_STAGE)
train dpo all:
	@[[ $$(stat -c %Y $(INSTALLED) 2>/dev/null || echo 0) -ge $(STARTED) ]] || echo "$(NUMBER)install: up to date"
	@$(RUN_STAGE)

repeat: $(INSTALLED) ## train again as RUN was, from its record, into a run of another name (docs/RUNS.md)
	@PYTHONPATH=. PYTHON='$(PYTHON)' '$(PYTHON)' -m tasks.common.runs.repeat

monitor: $(INSTALLED) ## a dashboard of all runs on PORT=7860 of this machine: curves, samples, comparison, live
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.reports.monitor

runs: $(INSTALLED) ## all runs, or those of TASK: steps, reward, accuracy, when and how long
diff: $(INSTALLED) ## RUN=a,b: what differs between two runs in settings, code, packages and results
runs diff:
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.reports.overview $@

report: $(INSTALLED) ## the newest run of TASK, or RUN, as one HTML file to attach to a pull request
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.reports.run_report

bench: ## throughput of our sampling beside plain LLM.generate, in one run; ARGS="--out file.json"
bench_training: ## a GRPO step with our settings, with those of verl's example and with naive ones; ARGS="--help"
bench bench_training: data
	@$(RUN_STAGE)

bench_rewards: $(INSTALLED) ## rows a second of every reward, beside the scorers of verl, reasoning-gym and math-verify
	@PYTHONPATH=. '$(PYTHON)' tests/benchmarks/rewards.py $(ARGS)

new: $(INSTALLED) ## scaffold tasks/TASK; OPTIONS="reward=exact lora=yes", SOURCE=reasoning_gym ENV=name CONFIG='{"key": 1}'
	@'$(PYTHON)' -c $(COOKIECUTTER) template -o tasks --no-input 'task=$(TASK)' $(NEW) $(OPTIONS)

json_to_parquet: $(INSTALLED) ## any FILE of chats, questions or pairs as verl's parquet files in OUTPUT; ARGS="--help"
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.data.convert $(if $(FILE),'$(FILE)') $(if $(OUTPUT),'$(OUTPUT)') $(ARGS)

# Two tests at a time, those of a file one after another: most of a small training is one process that starts.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED) ## the fast tests; with TASK only those of tasks/TASK; SLOW=1: real trainings too, except long ones
	@PYTHONPATH=. '$(PYTHON)' -m pytest -q -m 'not $(if $(SLOW),long,slow) and not gpu' $(if $(TASK),'tasks/$(TASK)',$(IN_TWO) tests tasks)

test-all: $(INSTALLED) ## all tests: also the long end-to-end runs
	@PYTHONPATH=. '$(PYTHON)' -m pytest -q -m 'not gpu' --durations=15 $(IN_TWO) tests tasks

lint: $(INSTALLED) ## ruff, shellcheck, format
	@'$(BIN)ruff' check .
	@'$(BIN)ruff' format --check .
	@'$(BIN)shellcheck' -x .ci/run $$(git ls-files '*.sh' '*.sbatch' ':!template')

format: $(INSTALLED) ## format the Python code
	@'$(BIN)ruff' check --fix .
	@'$(BIN)ruff' format .

cluster-status: $(INSTALLED) ## the nodes of the Ray cluster at RAY_ADDRESS, and whether they are enough for NNODES x N_GPUS
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.machine.cluster

clean: ## remove artifacts/ (data, models, runs)
	rm -rf artifacts
