# Post-training tasks on verl. `make help` lists targets and variables.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

TASKS := $(notdir $(patsubst %/train.sh,%,$(wildcard tasks/*/train.sh)))
STACKS := $(patsubst tasks/common/stacks/%/__init__.py,%,$(wildcard tasks/common/stacks/*/__init__.py))
ifndef STACK
  CHOSEN := $(shell bash tasks/common/install/choose_stack.sh)
  STACK := $(firstword $(subst :, ,$(CHOSEN)))
endif
# A program tasks/TASK/STAGE.py is a stage of that task.
OWN := $(sort $(basename $(notdir $(shell grep -ls '^if __name__' $(filter-out tasks/common/% %/evaluate.py %/prepare_data.py,$(wildcard tasks/*/*.py))))))
STAGES := settings doctor data attack probe sft train dpo all experiment merge eval compare rescore chat batch config $(OWN)
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

# Variables of make's command line; the others come from the shell.
export GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(filter-out -%,$(name))))
ifneq ($(GIVEN),)
  REFUSED := $(shell PYTHONPATH=. OPTIONS='$(subst ','\'',$(OPTIONS))' $(or $(wildcard $(PYTHON)),python3) -m tasks.common.launch.names $(MAKECMDGOALS) -- $(GIVEN) 2>/dev/null)
  $(if $(REFUSED),$(error $(REFUSED)))
endif

ifneq ($(filter install $(filter-out config settings,$(STAGES)),$(MAKECMDGOALS)),)
  $(if $(CHOSEN),$(info STACK=$(CHOSEN)))
endif

RUN_STAGE = PYTHON='$(PYTHON)' STAGE=$@ bash tasks/$(TASK)/train.sh $(ARGS)
# What `make new` tells the template besides OPTIONS.
export CONFIG
NEW = $(if $(SOURCE),'source=$(SOURCE)') $(if $(filter reasoning_gym,$(SOURCE)),reward=environment 'description=$(or $(ENV),An environment) of reasoning-gym') $(if $(ENV),'env=$(ENV)') $(if $(CONFIG),"config=$$CONFIG")
# cookiecutter's own command, but a choice that there is not is said in one line.
COOKIECUTTER = 'import sys; sys.tracebacklimit = 0; import cookiecutter.cli as c; c.main(prog_name="cookiecutter")'

.PHONY: help install lock bench bench_training bench_rewards new json_to_parquet test test-all lint format clean cluster-status repeat monitor runs diff report $(STAGES)

# What `make help` shows, in this order.
##@ Every day
help: ## this text
install: ## install the STACK's pinned packages into .venv, and check them
new: ## scaffold tasks/TASK; OPTIONS="reward=exact lora=yes", SOURCE=reasoning_gym ENV=name CONFIG='{"key": 1}'
settings: ## every variable of TASK with its value, where it comes from, and its help
doctor: ## check this machine, the settings and the data before a training; says what to do
train: ## everything: data, model, SFT warm-up, RL, evaluation, closing table; FROM=train starts later
eval: ## evaluate MODEL, or base, warm-up and trained model
compare: ## BASE against MODEL or the trained model: paired tests, prompts gained and lost
chat: ## talk to MODEL, or to the trained model
report: ## the newest run of TASK, or RUN, as one HTML file to attach to a pull request
test: ## the fast tests; with TASK only those of tasks/TASK; SLOW=1: real trainings too, except long ones
clean: ## remove artifacts/ (data, models, runs)
##@ Before a training
data: ## prepare the task's data
attack: ## look for answers that earn reward without being right, for SECONDS=120; exit code 1 when it finds some
probe: ## before training: do this model's rewards differ on the data? FILTER=1 keeps the prompts where they do
sft: ## SFT warm-up on the task's demonstrations
config: ## print verl's resolved config without training
##@ Training
dpo: ## the same as train with DPO: on pairs of PAIRS_FILE, or of the policy's own samples
all: ## the same, then merge and compare
experiment: ## train with METHODS=grpo,gspo SEEDS=3 LRS=1e-6,3e-6 on the same data, and compare them
repeat: ## train again as RUN was, from its record, into a run of another name (docs/RUNS.md)
monitor: ## a dashboard of all runs on PORT=7860 of this machine: curves, samples, comparison, live
##@ After a training
runs: ## all runs, or those of TASK: steps, reward, accuracy, when and how long
diff: ## RUN=a,b: what differs between two runs in settings, code, packages and results
merge: ## the checkpoint STEP as one folder that vLLM and transformers load
batch: ## answer the prompts of INPUT with MODEL, or with the trained model, into OUTPUT
rescore: ## score stored ROLLOUTS again, without a model
##@ Data and rewards
json_to_parquet: ## any FILE of chats, questions or pairs as verl's parquet files in OUTPUT; ARGS="--help"
bench_rewards: ## rows a second of every reward, beside the scorers of verl, reasoning-gym and math-verify
##@ This repository
lock: ## pin all packages of every stack from pyproject.toml; UPGRADE=1: newest versions
lint: ## ruff, shellcheck, format
format: ## format the Python code
test-all: ## all tests: also the long end-to-end runs
bench: ## throughput of our sampling beside plain LLM.generate, in one run; ARGS="--out file.json"
bench_training: ## a GRPO step with our settings, with those of verl's example and with naive ones; ARGS="--help"
cluster-status: ## the nodes of the Ray cluster at RAY_ADDRESS, and whether they are enough for NNODES x N_GPUS

help:
	@echo 'make TARGET TASK=<$(subst $() ,|,$(TASKS))> [VARIABLE=value ...] [ARGS="hydra.key=value ..."]'
	@awk -F': ## ' '/^##@ /{printf "\n%s\n", substr($$0, 5)} /^[a-z_-]+: ## /{printf "  %-16s%s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@printf '\nOf one task\n'
	@for stage in $(OWN); do file=$$(ls tasks/*/$$stage.py | grep -v common/ | head -n 1); \
	  printf '  %-16s%s: %s\n' $$stage "$$(basename "$$(dirname "$$file")")" "$$(sed -n '1s/^"""//p' "$$file" | sed 's/"""$$//')"; done
	@printf '\nVariables with their defaults. A task, a stack and a method have their own: make settings TASK=...\n'
	@PYTHONPATH=. python3 -m tasks.common.settings

install: $(INSTALLED)

ifneq ($(INSTALLED),)
$(INSTALLED): $(wildcard tasks/common/stacks/$(STACK)/requirements.txt) tasks/common/install/install.sh
	@bash tasks/common/install/install.sh $(STACK) $(VENV)
endif

lock: $(INSTALLED)
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.install.lock $(if $(UPGRADE),--upgrade) $(ARGS)

$(STAGES): $(INSTALLED)
	@$(RUN_STAGE)

repeat: $(INSTALLED)
	@PYTHONPATH=. PYTHON='$(PYTHON)' '$(PYTHON)' -m tasks.common.runs.repeat

monitor: $(INSTALLED)
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.reports.monitor

runs diff: $(INSTALLED)
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.reports.overview $@

report: $(INSTALLED)
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.reports.run_report

bench bench_training: data
	@$(RUN_STAGE)

bench_rewards: $(INSTALLED)
	@PYTHONPATH=. '$(PYTHON)' tests/benchmarks/rewards.py $(ARGS)

new: $(INSTALLED)
	@'$(PYTHON)' -c $(COOKIECUTTER) template -o tasks --no-input 'task=$(TASK)' $(NEW) $(OPTIONS)

json_to_parquet: $(INSTALLED)
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.data.convert $(if $(FILE),'$(FILE)') $(if $(OUTPUT),'$(OUTPUT)') $(ARGS)

# Two tests at a time, those of a file one after another: most of a small training is one process that starts.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	@PYTHONPATH=. '$(PYTHON)' -m pytest -q -m 'not $(if $(SLOW),long,slow) and not gpu' $(if $(TASK),'tasks/$(TASK)',$(IN_TWO) tests tasks)

test-all: $(INSTALLED)
	@PYTHONPATH=. '$(PYTHON)' -m pytest -q -m 'not gpu' --durations=15 $(IN_TWO) tests tasks

lint: $(INSTALLED)
	@'$(BIN)ruff' check .
	@'$(BIN)ruff' format --check .
	@'$(BIN)shellcheck' -x .ci/run $$(git ls-files '*.sh' '*.sbatch' ':!template')

format: $(INSTALLED)
	@'$(BIN)ruff' check --fix .
	@'$(BIN)ruff' format .

cluster-status: $(INSTALLED)
	@PYTHONPATH=. '$(PYTHON)' -m tasks.common.machine.cluster

clean:
	rm -rf artifacts
