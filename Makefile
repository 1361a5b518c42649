# Post-training tasks on verl. `make help` lists targets and variables.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Variables of make's command line; the others come from the shell.
export GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(filter-out -%,$(name))))
# A value is text: make expands no $ in it, and recipes read it from the environment, "$$NAME", so that no shell runs it.
GIVEN_TO_US := $(foreach name,FILE OPTIONS OUTPUT PYTHON SLOW STACK TASK UPGRADE,$(if $(filter environment,$(origin $(name))),$(name)))
$(foreach name,$(GIVEN) $(GIVEN_TO_US),$(if $(findstring $$,$(name)),,$(eval override export $(name) := $$(value $(name)))))
override TASK := $(strip $(TASK))
one_of = $(and $(filter 1,$(words $1)),$(filter $2,$1))
quoted = '$(subst ','\'',$1)'

TASKS := $(notdir $(patsubst %/train.sh,%,$(wildcard tasks/*/train.sh)))
STACKS := $(patsubst tasks/common/stacks/%/__init__.py,%,$(wildcard tasks/common/stacks/*/__init__.py))
# A rehearsal of the stack that is given, else of `current`, is played on the cpu stack.
ifneq ($(filter rehearse,$(MAKECMDGOALS)),)
  export REHEARSED := $(or $(STACK),current)
  override STACK := cpu
endif
CHOSEN :=
ifndef STACK
  CHOSEN := $(shell bash tasks/common/install/choose_stack.sh)
  STACK := $(firstword $(subst :, ,$(CHOSEN)))
endif
# A program tasks/TASK/STAGE.py is a stage of that task.
OWN := $(shell grep -ls '^if __name__' $(filter-out tasks/common/% %/evaluate.py %/prepare_data.py,$(wildcard tasks/*/*.py)))
STAGES := $(shell sed -n 's/^    "\([a-z_]*\)": Stage.*/\1/p' tasks/common/stages.py) $(sort $(basename $(notdir $(OWN))))
export STACK
# Files and screens are UTF-8 in any locale (LANG=C, PYTHONIOENCODING=ascii).
export PYTHONUTF8 := 1
unexport PYTHONIOENCODING
export STARTED := $(shell date +%s)

# PYTHON=/some/python uses an environment of your own; without it, .venv is made from the stack's pinned list, or
# .venv-STACK when .venv holds another stack.
ifdef PYTHON
  INSTALLED :=
  override PYTHON := $(or $(shell command -v $(call quoted,$(PYTHON)) || true),$(PYTHON))
else
  VENV := .venv$(if $(filter-out .venv/.installed-$(STACK),$(wildcard .venv/.installed-*)),-$(STACK))
  INSTALLED := $(VENV)/.installed-$(STACK)
  export PYTHON := $(CURDIR)/$(VENV)/bin/python
endif

# Refused before anything is made, so also under `make -n`.
goals = $(filter $1,$(MAKECMDGOALS))
known_task = $(if $(call one_of,$(TASK),$(TASKS)),,$(error TASK=$(TASK): no such task; there are: $(TASKS)))
$(if $(call one_of,$(STACK),$(STACKS)),,$(error STACK=$(STACK): no such stack; there are: $(STACKS)))
$(if $(call goals,$(STAGES) report),$(known_task))
$(if $(call goals,repeat runs diff test),$(if $(TASK),$(known_task)))
$(if $(call goals,new),$(if $(TASK),,$(error TASK is empty; give the new task a name: make new TASK=my_task)))

ifneq ($(GIVEN),)
  WORDS := $(foreach word,$(MAKECMDGOALS) -- $(GIVEN),$(call quoted,$(word)))
  REFUSED := $(shell export PYTHONPATH=. OPTIONS=$(call quoted,$(OPTIONS)); $\
    python=$(call quoted,$(PYTHON)); [ -x "$$python" ] || python=python3; $\
    "$$python" -m verl_tasks.launch.names $(WORDS) 2>/dev/null)
  $(if $(REFUSED),$(error $(REFUSED)))
endif

$(if $(call goals,install $(filter-out config settings,$(STAGES))),$(if $(CHOSEN),$(info STACK=$(CHOSEN))))

.PHONY: $(shell sed -n 's/^\([a-z_-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST))) $(STAGES)

# What `make help` shows, with the stages of tasks/common/stages.py.
##@ Every day
help: ## list the targets and the variables
install: ## install the packages of STACK into .venv, and check them
new: ## scaffold tasks/TASK; OPTIONS="reward=exact lora=yes", SOURCE=reasoning_gym ENV=name CONFIG='{"key": 1}'
report: ## write the newest run of TASK, or RUN, as one HTML file to attach to a pull request
test: ## run the fast tests, with TASK only those of tasks/TASK; SLOW=1 adds longer ones and short real trainings
clean: ## remove data, runs and results of TASK (without TASK of all tasks, and models); asks first unless YES=1
##@ Before a training
##@ Training
repeat: ## train RUN again from its record, under a new name (docs/RUNS.md)
monitor: ## open a live dashboard of all runs on PORT=7860: curves, samples, comparison
##@ After a training
runs: ## list all runs, or those of TASK: steps, reward, accuracy, date, duration
diff: ## RUN=a,b: show what differs between two runs in settings, code, packages and results
##@ Data and rewards
json_to_parquet: ## convert FILE (chats, questions or pairs) to verl's parquet files in OUTPUT; ARGS="--help"
bench_rewards: ## rows per second of every reward, and of the scorers of verl, reasoning-gym and math-verify
##@ This repository
lock: ## pin all packages of every stack from pyproject.toml; UPGRADE=1 takes the newest versions
lint: ## run ruff and shellcheck, and check the format
format: ## format the Python code
docs: ## build the documents as a site with search: artifacts/site/index.html
recipe: ## run a published result again, NAME=cpu-countdown: is its promise kept? Without NAME list all
test-all: ## run all tests, including the long end-to-end runs
cluster-status: ## list the nodes of the Ray cluster at RAY_ADDRESS, and check for NNODES x N_GPUS free GPUs

help:
	@PYTHONPATH=. python3 -m verl_tasks.launch.help

install: $(INSTALLED)

ifneq ($(INSTALLED),)
$(INSTALLED): $(wildcard tasks/common/stacks/$(STACK)/requirements.txt) tasks/common/install/install.sh
	@bash tasks/common/install/install.sh $(STACK) $(VENV)
endif

$(STAGES): $(INSTALLED)
	@STAGE=$@ bash tasks/$(TASK)/train.sh

# Two tests at a time, those of a file one after another: most of a small training is one process that starts.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder
lock: PROGRAM = -m verl_tasks.install.lock $(if $(UPGRADE),--upgrade)
repeat: PROGRAM = -m verl_tasks.runs.repeat
monitor: PROGRAM = -m verl_tasks.reports.monitor
runs diff: PROGRAM = -m verl_tasks.reports.overview $@
report: PROGRAM = -m verl_tasks.reports.run_report
new: PROGRAM = -m verl_tasks.launch.new
cluster-status: PROGRAM = -m verl_tasks.machine.cluster
json_to_parquet: PROGRAM = -m verl_tasks.data.convert $(if $(FILE),"$$FILE") $(if $(OUTPUT),"$$OUTPUT")
bench_rewards: PROGRAM = tests/benchmarks/rewards.py
recipe: PROGRAM = -m tests.recipes
test: PROGRAM = -m pytest -q -m 'not $(if $(SLOW),long,slow$(if $(TASK),, and not medium)) and not gpu' $(if $(TASK),tasks/$(TASK),$(IN_TWO) tests tasks)
test-all: PROGRAM = -m pytest -q -m 'not gpu' --durations=15 $(IN_TWO) tests tasks

lock new repeat monitor runs diff report cluster-status json_to_parquet bench_rewards recipe test test-all: $(INSTALLED)
	@PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" "$$PYTHON" $(PROGRAM)

OF_PYTHON = PATH="$${PYTHON%/*}:$$PATH"
lint: $(INSTALLED)
	@$(OF_PYTHON) ruff check .
	@$(OF_PYTHON) ruff format --check .
	@$(OF_PYTHON) shellcheck -x .ci/run $$(git ls-files '*.sh' '*.sbatch' ':!template')

format: $(INSTALLED)
	@$(OF_PYTHON) ruff check --fix .
	@$(OF_PYTHON) ruff format .

docs:
	@bash docs/site/build.sh

clean:
	@python=$$PYTHON; [[ -x $$python ]] || python=python3; PYTHONPATH=. "$$python" -m verl_tasks.runs.clean
