# Two commands on a fresh machine with Python 3.11 or newer, make and git: `make demo` and `make test`.
PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin

# `make demo task=digits tracker=tensorboard` passes on the answers given on make's command line.
QUESTIONS := project_name project_slug author parallelism task launcher cluster tracker docker license
quote = '$(subst ','\'',$(1))'
ANSWERS := $(foreach q,$(QUESTIONS),$(if $(filter command line,$(origin $(q))),$(call quote,$(q)=$(value $(q)))))

.PHONY: help demo test test-fast lint
help:
	@echo "make demo        render the default project into demo/, train it on two CPU processes, evaluate it"
	@echo "make test        render every variant, check it, train it, and run the tests of the rendered projects"
	@echo "make test-fast   run only the tests that train nothing"
	@echo "make lint        run the pre-commit checks"

demo: .venv/installed
	@rm -rf demo
	$(BIN)/cookiecutter . --no-input --output-dir demo $(ANSWERS) >/dev/null
	@BIN=$(BIN) tests/demo.sh

test: .venv/installed
	$(BIN)/pytest -n auto --no-loadscope-reorder

test-fast: .venv/installed
	$(BIN)/pytest -m "not slow"

lint: .venv/installed
	$(BIN)/pre-commit run --all-files

.venv/installed: requirements.txt {{cookiecutter.project_slug}}/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; try make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@
