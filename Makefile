# Two commands on a fresh machine with Python 3.11 or newer, make and git: `make demo` and `make test`.
PYTHON ?= python3
# `make demo TORCH=cpu` installs PyTorch's build without CUDA, TORCH=cu126 the one for that version of CUDA.
TORCH ?=
# Where `make demo` renders the project.
DEMO ?= demo
BIN := $(CURDIR)/.venv/bin
GPU_NEEDS := cookiecutter 'jsonargparse[signatures]' matplotlib numpy pytest pytest-xdist pyyaml safetensors
PYTEST := $(BIN)/pytest -n auto --durations=10

# `make demo task=language tracker=tensorboard` passes on the answers given on make's command line.
QUESTIONS := project_name project_slug description author parallelism task launcher cluster tracker docker license
quote = '$(subst ','\'',$(1))'
ANSWERS := $(foreach q,$(QUESTIONS),$(if $(filter command line,$(origin $(q))),$(call quote,$(q)=$(value $(q)))))

.PHONY: help demo test test-long test-weekly test-gpu lint sizes where verify diffs recipes bump address
help:
	@echo "make demo         render the default project into demo/, train it on two CPU processes, evaluate it"
	@echo "make test         check every rendered file; compare every strategy with a plain loop: ten minutes"
	@echo "make test-long    the other tests: failures, clusters, the rendered projects' own tests"
	@echo "make test-weekly  what is left of these"
	@echo "make test-gpu     compare with plain loops on this machine's GPUs, in results and in speed"
	@echo "make lint         run the pre-commit checks"
	@echo "make sizes        print the sizes and densities of what is rendered, and their caps"
	@echo "make where        print which files of the template FILE=src/my_experiment/train.py comes from"
	@echo "make verify       compare the tests and the certificate of PROJECT=folder with what its answers render to"
	@echo "make diffs        write docs/diffs, between the default project and other strategies"
	@echo "make recipes      make the patches of recipes and adopted scripts anew, and name those that conflict"
	@echo "make bump         move every pin to its newest version, or that of one package: NAME=numpy"
	@echo "make address      write the repository's address, _repository in cookiecutter.json, into the pages"

demo: .venv/installed
	@test ! -e $(DEMO) || { echo "error: $(DEMO)/ is there already; try make demo DEMO=demo2" >&2; exit 2; }
	$(BIN)/cookiecutter . --no-input --output-dir $(DEMO) $(ANSWERS) >/dev/null
	@BIN=$(BIN) tests/demo.sh $(DEMO)/*

test: .venv/installed
	$(PYTEST) -m "not long and not weekly"

test-long: .venv/installed
	@# Many of these tests wait for a timeout, so there is one more at a time than processors.
	$(PYTEST) -n $$(($$(nproc) + 1)) -m "long and not weekly"

test-weekly: .venv/installed
	$(PYTEST) -m weekly

# With the PyTorch of PYTHON, which a path file makes importable.
test-gpu:
	@$(PYTHON) -c 'import torch' || { echo "error: $(PYTHON) has no PyTorch; try make test-gpu PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv .venv-gpu
	@$(PYTHON) -c 'import sys; print(*(path for path in sys.path if "-packages" in path), sep="\n")' \
		>"$$(echo .venv-gpu/lib/python*/site-packages)/gpu.pth"
	.venv-gpu/bin/pip install --quiet --disable-pip-version-check $(GPU_NEEDS)
	@export PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/runs/numbers; \
		.venv-gpu/bin/python tools/gpus/agree.py && code=0 || code=1; .venv-gpu/bin/python tools/gpus/speed.py && exit $$code

lint: .venv/installed
	$(BIN)/pre-commit run --all-files

sizes: .venv/installed
	@PYTHONPATH=.:tests $(BIN)/python tests/template/sizes.py

# `make where FILE=src/my_experiment/parallel.py parallelism=mesh` takes the answers that `make demo` takes.
where: .venv/installed
	@PYTHONPATH=.:tests $(BIN)/python tests/template/where.py $(call quote,$(FILE)) $(ANSWERS)

verify: .venv/installed
	@PYTHONPATH=.:tests $(BIN)/python tests/verify.py $(call quote,$(PROJECT))

diffs: .venv/installed
	@PYTHONPATH=.:tests $(BIN)/python tests/template/test_diffs.py

recipes: .venv/installed
	@PYTHONPATH=.:tests $(BIN)/python tests/documents/patches.py

bump: .venv/installed
	@# The environment may have a NAME, too.
	@$(BIN)/python .ci/bump.py $(if $(filter command line,$(origin NAME)),$(NAME))
	@touch .venv/installed

address: .venv/installed
	@$(BIN)/python .ci/bump.py address

.venv/installed: requirements.txt {{cookiecutter.project_slug}}/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; try make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(if $(filter-out cpu cu%,$(TORCH)),$(error TORCH is $(TORCH); give cpu, or a version of CUDA such as cu126))
	$(PYTHON) -m venv .venv
	@# PyTorch comes first, because TORCH chooses its build.
	$(if $(TORCH),.venv/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--index-url https://download.pytorch.org/whl/$(TORCH) -c '{{cookiecutter.project_slug}}/constraints.txt' torch)
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@
