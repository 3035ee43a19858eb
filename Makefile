# make demo | make test | make check: everything else is for those who change the code.
SHELL := /bin/bash
PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3),python3)
VENV := .venv
BIN := $(VENV)/bin
GPU_VENV := .venv-gpu
.DEFAULT_GOAL := help
.PHONY: help setup demo deployment test test-gpu-wheel check format lock generate clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.installed  ## install everything into .venv (pinned, with hashes)

$(VENV)/.installed: requirements.lock pyproject.toml tidewright/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed and was not found; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null || \
	  { echo "libgomp1 is missing; Paddle needs it: apt-get install libgomp1"; exit 1; }
	@echo "Installing into $(VENV): takes a minute or two, most of it Paddle ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e tidewright -e .
	@touch $@

check: setup  ## format, lint, types, import contracts, unit and property tests: under a minute
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache | tail -n 3
	@$(BIN)/python -m pytest -q tests/unit tests/properties

demo: setup  ## the main job, live, in two minutes (DEMO_FAULT=no-shrink|lost-worker|double-run|stalled shows a failing check)
	@DEMO_FAULT=$(DEMO_FAULT) $(BIN)/python -m demo

deployment: setup  ## the processes of docker-compose.yml on this machine, with a real Postgres, Kafka and Prometheus; Ctrl-C ends it
	@$(BIN)/python -m loadtests.deployment

generate: setup  ## write JSON Schemas and docs/events.md from the event models
	@$(BIN)/python -m schemas.generate

test: setup  ## every test, on the servers that it starts itself
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder tests

test-gpu-wheel: $(GPU_VENV)/.installed  ## the trainer's tests on the wheel for GPUs, Paddle 2.6; no GPU is needed (3 GB)
	@PYTHONPATH=$(CURDIR) $(GPU_VENV)/bin/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --noconftest \
	  tests/integration/test_elastic_*.py tests/integration/test_zygote_*.py tests/integration/test_shim_*.py \
	  tests/integration/test_rendezvous_*.py

$(GPU_VENV)/.installed: requirements-gpu.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || \
	  { echo "Paddle 2.6 is tested with Python 3.11, which was not found; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into $(GPU_VENV): a minute or more, 3 GB, most of it the wheel for GPUs ..."
	@$(PYTHON) -m venv $(GPU_VENV)
	@$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-gpu.lock
	@touch $@

format: setup  ## format the code and fix what can be fixed
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format .

UV_COMPILE := uv pip compile --generate-hashes --python-version 3.11 --no-emit-index-url --no-emit-find-links \
  --no-header --quiet --upgrade

lock:  ## make all locks anew from the .in files: what the images hold are parts of requirements.lock (needs uv)
	@$(UV_COMPILE) requirements.in -o requirements.lock
	@for part in server worker build; do \
	  $(UV_COMPILE) deploy/requirements/$$part.in --no-annotate -o deploy/requirements/$$part.lock \
	    -c <(grep -E '^[a-z0-9-]+==' requirements.lock | tr -d '\\') || exit 1; done
	@$(UV_COMPILE) requirements-gpu.in --no-annotate -o requirements-gpu.lock \
	  -c <(grep -E '^[a-z0-9-]+==' requirements.lock | grep -vE '^(numpy|paddlepaddle)==' | tr -d '\\')

clean:  ## remove what was installed and built
	@rm -rf $(VENV) $(GPU_VENV) build dist demo-out
