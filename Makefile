# Post-training tasks on verl. `make help` lists targets and variables. A project's Makefile includes the same file.
include verl_tasks/Makefile

.PHONY: $(shell sed -n 's/^\([a-z_-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))
##@ This repository
lock: ## pin all packages of every stack from pyproject.toml; UPGRADE=1 takes the newest versions
bench_rewards: ## rows per second of every reward, and of the scorers of verl, reasoning-gym and math-verify
lint: ## run ruff and shellcheck, and check the format
format: ## format the Python code
docs: ## build the documents as a site with search: artifacts/site/index.html
recipe: ## run a published result again, NAME=cpu-countdown: is its promise kept? Without NAME list all
test-all: ## run all tests, including the long end-to-end runs

lock: PROGRAM = -m verl_tasks.install.lock $(if $(UPGRADE),--upgrade)
bench_rewards: PROGRAM = tests/benchmarks/rewards.py
recipe: PROGRAM = -m tests.recipes
test-all: PROGRAM = -m pytest -q -m 'not gpu' --durations=15 $(IN_TWO) tests tasks

lock bench_rewards recipe test-all: $(INSTALLED)
	@$(run_python) $(PROGRAM)

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
