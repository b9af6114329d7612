# Two commands on a fresh machine with Python 3.11 or newer, make and git: `make demo` and `make test`.
PYTHON ?= python3
# `make demo TORCH=cpu` installs PyTorch's build without CUDA, TORCH=cu126 the one for that version of CUDA.
TORCH ?=
BIN := $(CURDIR)/.venv/bin
PYTEST := $(BIN)/pytest -n auto --no-loadscope-reorder --durations=30

# `make demo task=digits tracker=tensorboard` passes on the answers given on make's command line.
QUESTIONS := project_name project_slug description author parallelism task launcher cluster tracker docker license
quote = '$(subst ','\'',$(1))'
ANSWERS := $(foreach q,$(QUESTIONS),$(if $(filter command line,$(origin $(q))),$(call quote,$(q)=$(value $(q)))))

.PHONY: help demo test test-long test-weekly test-mutants test-fast lint benchmark
help:
	@echo "make demo          render the default project into demo/, train it on two CPU processes, evaluate it"
	@echo "make test          check every rendered file; train every strategy, task and launcher: at most ten minutes"
	@echo "make test-long     the other tests: failures, clusters, debuggers, the rendered projects' own tests"
	@echo "make test-weekly   what is left of these: the same for more strategies, tasks and recipes"
	@echo "make test-mutants  plant faults one at a time, and see that a test catches each: less than an hour"
	@echo "make test-fast     lint, and run the tests that train nothing"
	@echo "make lint          run the pre-commit checks"
	@echo "make benchmark     time rendered projects beside other frameworks, into docs/benchmarks.md: half an hour"

demo: .venv/installed
	@rm -rf demo
	$(BIN)/cookiecutter . --no-input --output-dir demo $(ANSWERS) >/dev/null
	@BIN=$(BIN) tests/demo.sh

test: .venv/installed
	$(PYTEST) -m "not long and not weekly and not mutant"

test-long: .venv/installed
	$(PYTEST) -m long

test-weekly: .venv/installed
	$(PYTEST) -m weekly

test-mutants: .venv/installed
	$(PYTEST) -m mutant

test-fast: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m "not slow and not mutant"

lint: .venv/installed
	$(BIN)/pre-commit run --all-files

# Each arm runs alone: leave the machine idle. If it is interrupted, the same command goes on.
benchmark: .venv/installed .venv/peers/installed
	$(BIN)/python tests/benchmark.py
	$(BIN)/python tests/benchmark_page.py

.venv/installed: requirements.txt {{cookiecutter.project_slug}}/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; try make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(if $(filter-out cpu cu%,$(TORCH)),$(error TORCH is $(TORCH); give cpu, or a version of CUDA such as cu126))
	$(call install,.venv,requirements.txt)

# Frameworks to compare with, in an environment of their own: the template's must not depend on them.
.venv/peers/installed: tests/peers/requirements.txt {{cookiecutter.project_slug}}/constraints.txt
	$(call install,.venv/peers,tests/peers/requirements.txt)

# An environment, and the file of what it needs; PyTorch comes first, because TORCH chooses its build.
define install
	$(PYTHON) -m venv $(1)
	$(if $(TORCH),$(1)/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--index-url https://download.pytorch.org/whl/$(TORCH) -c '{{cookiecutter.project_slug}}/constraints.txt' torch)
	$(1)/bin/pip install --quiet --disable-pip-version-check -r $(2)
	@touch $@
endef
