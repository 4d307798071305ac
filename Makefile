# Many Hands. Two commands do everything on a fresh machine: `make lab` and `make test`.
# Each target sets up what it needs. `make` alone lists them.
#
#   SITE_PYTHON=/path/python   build on a site's Python that has torch and MPI already, and install neither
#   PYTHON=/path/python3       the Python to build with, where python3 is too old
#   ENV=/path                  use the environment that `make shared` built there; lab and kernel remember it here
#   VENV=/path                 build the course's own environment there (default .venv here); REBUILD=yes: anew
#   PROCESSES=8                files of tests that run at once (default: 3, and with 1 each after the other; see tests/conftest.py)
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu   on Linux without a GPU: torch without the gigabytes for GPUs

PYTHON ?= python3
# an environment built elsewhere: named, or remembered by `make kernel ENV=/path`; nothing is built in it
ENV_HERE := $(if $(filter command,$(origin ENV)),$(ENV),$(if $(VENV),,$(shell cat .manyhands-env 2>/dev/null)))
ifneq ($(ENV_HERE),)
override VENV := $(ENV_HERE)
endif
VENV ?= $(CURDIR)/.venv
BIN = $(VENV)/bin
RUN = PYTHONNOUSERSITE=1 "$(BIN)/python"
SETUP = "$(PYTHON)" scripts/setup_environment.py
FETCH = $(if $(ENV_HERE),:,$(RUN) scripts/prepare_data.py)
ANEW = $(if $(filter yes,$(REBUILD)),--rebuild)
REMEMBER = $(if $(ENV_HERE),remember)
LESSON ?=
PROCESSES ?= 3
AT_ONCE = -n $(PROCESSES)
# what failed beside other tests runs once more, each after the other; whatever fails again, fails
INSTALL = $(if $(wildcard $(BIN)/uv),"$(BIN)/uv" pip install -q --no-deps $(if $(PIP_NO_INDEX),--no-index) -p "$(BIN)/python",$(RUN) -m pip install -q --no-deps)
TESTS = $(RUN) -m manyhands.launch.machine "make test" && $(RUN) scripts/prepare_data.py && \
	$(RUN) -m manyhands.notebook.jupyter kernel && $(RUN) -m pytest --cache-clear -p no:nbval $(AT_ONCE)
ALONE = echo "--- once more, alone:" && $(RUN) -m pytest --last-failed --last-failed-no-failures none --maxfail 3 -n 0
# unpacked from `make bundle`: the packages lie here, and no index is asked
ifneq ($(wildcard wheels/*.whl),)
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(CURDIR)/wheels
export UV_FIND_LINKS := $(CURDIR)/wheels
endif
OPEN ?= yes
SHELL = /bin/bash

.PHONY: help hub lock lab kernel shared jobs lesson sync reset copy bundle update join leave board notebooks site slides figures preflight record smoke serve lint lesson-check test test-full test-gpu gpu-hour gpu-quarter check bench ready my-report rehearsal doctor environment
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

lock: environment  ## write scripts/requirements.lock anew: hashes of the pins in requirements.txt
	@grep -v '^torch==' requirements.txt | "$(BIN)/uv" pip compile - -q --generate-hashes --no-deps --no-annotate \
	  --no-header --universal --python-version 3.11.7 -o scripts/requirements.lock

environment:
	@$(SETUP) --venv "$(VENV)" $(if $(ENV_HERE),--use,$(if $(SITE_PYTHON),--site-python "$(SITE_PYTHON)")) $(ANEW)

lab: environment  ## JupyterLab on the first lesson (OPEN=no prints the address and opens no browser)
	@$(FETCH)
	@$(RUN) -m manyhands.notebook.jupyter $(REMEMBER) kernel
	@$(RUN) -m manyhands.notebook.jupyter lab --open $(OPEN)

kernel: environment  ## the kernel "Many Hands" for a hub's JupyterLab (ENV=/path: of a shared environment)
	@$(FETCH)
	@$(RUN) -m manyhands.notebook.jupyter $(REMEMBER) kernel --user

shared:  ## PREFIX=/path: one environment, with data and kernel, for a whole class
	@test -n "$(PREFIX)" || { echo "name the folder: make shared PREFIX=/path/that/all/can/read" >&2; exit 2; }
	@umask 022; $(SETUP) --venv "$(PREFIX)" --copy $(if $(SITE_PYTHON),--site-python "$(SITE_PYTHON)") $(ANEW)
	@umask 022; export MANYHANDS_DATA="$(PREFIX)/share/manyhands/data" PYTHONNOUSERSITE=1; \
	  mkdir -p "$$MANYHANDS_DATA" && "$(PREFIX)/bin/python" scripts/prepare_data.py && \
	  "$(PREFIX)/bin/python" -m manyhands.notebook.jupyter kernel
	@test -n "$(ENV_HERE)" || test -e .venv || PYTHONNOUSERSITE=1 "$(PREFIX)/bin/python" -m manyhands.notebook.jupyter remember
	@echo "each attendee, in a copy of the course: make kernel ENV=$$(cd "$(PREFIX)" && pwd), or make lab with the same ENV"

jobs:  ## SITE=polaris ACCOUNT=... QUEUE=... RESERVATION=... WALLTIME=... NODES=2 GPUS=4 MEM=64G: write these into the job files
	@PYTHONPATH="$(CURDIR)/scripts" "$(PYTHON)" -m manyhands.jobs.stamp stamp --site "$$SITE" --account "$$ACCOUNT" \
	  --queue "$$QUEUE" --reservation "$$RESERVATION" --walltime "$$WALLTIME" --nodes "$$NODES" --gpus "$$GPUS" --mem "$$MEM"

lesson: environment  ## NAME=17_mine TITLE="Our network": the skeleton of a lesson of your own, which runs at once
	@$(RUN) -m manyhands.course.new_lesson "$$NAME" --title "$$TITLE"

sync: environment  ## write the notebook or script that was saved last into the other (LESSON=03; none: all)
	@$(RUN) -m manyhands.course.pairs sync $(LESSON)

reset: environment  ## LESSON=03: the lesson as it was; your own work is kept in outputs/kept
	@$(RUN) -m manyhands.course.handouts reset $(LESSON)

update: environment  ## FROM=/path (or /path.zip): fixes of a newer copy come into this one; what you wrote stays
	@$(RUN) -m manyhands.course.update "$$FROM"

join: environment  ## BOARD=/shared/folder: your checks write to the class's progress board (NAME="Ana"; none: a number)
	@$(RUN) -m manyhands.course.board join "$$BOARD" --name "$$NAME"

leave: environment  ## your checks no longer write to the progress board
	@$(RUN) -m manyhands.course.board leave

board: environment  ## FOLDER=/shared/folder: who is at which build, what fails most; in outputs/board.html (EVERY=5: again and again)
	@$(RUN) -m manyhands.course.board show "$$FOLDER" --every $(or $(EVERY),0)

copy: environment  ## TO=/path (or /path.zip): the course for attendees, without outputs and notes
	@$(RUN) -m manyhands.course.handouts copy "$$TO"

bundle: environment  ## TO=/path/many-hands.tar: course, packages, corpus in one file, for a place without internet (FULL=yes: the teacher's)
	@$(RUN) -m manyhands.course.bundle "$$TO" $(if $(filter yes,$(FULL)),--full)

notebooks: environment  ## run the notebooks and store their outputs (LESSON=03; none: all)
	@$(RUN) scripts/prepare_data.py
	@$(RUN) -m manyhands.notebook.jupyter kernel
	@$(RUN) -m manyhands.course.pairs notebooks $(LESSON)

site: environment  ## the course as web pages, in outputs/site (no web is needed to read them; FOR=attendees: without teachers' pages)
	@$(RUN) -c "import furo, icalendar" 2>/dev/null || UV_HTTP_RETRIES=0 $(INSTALL) -r assets/site/requirements.txt || { echo \
	  "make site needs the packages of assets/site/requirements.txt: be online once, or unpack a make bundle FULL=yes" >&2; exit 2; }
	@$(RUN) assets/site/build.py $(if $(FOR),--for $(FOR)) $(ARGS)

slides: environment  ## a deck per lesson from its notebook, in outputs/site/slides (npm, for reveal.js, the first time)
	@$(RUN) assets/site/slides.py $(ARGS)

figures: environment  ## draw assets/*.svg again
	@$(RUN) assets/src/draw.py

preflight: environment  ## run everything before an event; report in outputs/preflight/report.html (ARGS="--lesson 03")
	@$(RUN) scripts/prepare_data.py
	@$(RUN) -m manyhands.notebook.jupyter kernel
	@$(RUN) scripts/preflight.py $(ARGS)

ready: environment  ## a test of ten minutes before the course: six small functions in PyTorch
	@$(RUN) -m manyhands.tools.ready

my-report: environment  ## NAME="Ana": a page of what you have built and had checked, in outputs/my_report.html
	@$(RUN) -m manyhands.tools.my_report --name "$$NAME"

rehearsal: environment  ## the three jobs before an event: which one is next, and were those before healthy?
	@$(RUN) -m manyhands.jobs.rehearsal

doctor: environment  ## what this machine has and lacks, each with its remedy (ARGS=--json)
	@$(RUN) scripts/doctor.py $(ARGS)

bench: environment  ## measure what the course promises about speed; table in outputs/bench
	@$(RUN) scripts/prepare_data.py
	@$(RUN) -m manyhands.notebook.jupyter kernel
	@$(RUN) scripts/bench.py $(ARGS)

record: environment  ## LESSON=06 NAME=h200x4: keep the figures of its last run on GPUs in assets/recorded
	@$(RUN) -m manyhands.launch.recorded_runs $(LESSON) $(if $(NAME),--name "$$NAME")

smoke: environment  ## the trainer in a minute: 2 ranks, DDP, then resumed under FSDP, then a sample
	@$(RUN) scripts/prepare_data.py
	@set -e; where="$${MANYHANDS_OUTPUTS:-outputs}/smoke"; rm -rf "$$where"; \
	  train() { $(RUN) scripts/launch.py --nproc 2 --timeout 120 -- --checkpoint.folder "$$where" --log.eval-batches 2 "$$@"; }; \
	  train --train.steps 20; \
	  train --train.steps 40 --checkpoint.resume must --parallel.strategy fsdp; \
	  $(RUN) scripts/sample.py "$$where" --length 200

serve: environment  ## chat with a model of yours (MODEL=outputs/mine; none: lesson 13's, else assets/models/plays; ARGS="--port 8123")
	@$(RUN) scripts/serve.py $(if $(MODEL),"$$MODEL") $(ARGS)

lint: environment  ## format, habits, import rules, types: ruff, import-linter, mypy
	@$(RUN) -m ruff check scripts tests assets
	@$(RUN) -m ruff format --check scripts tests assets
	@PYTHONPATH=scripts "$(BIN)/lint-imports"
	@$(RUN) -m mypy

test test-full test-gpu check lint lesson-check hub: | tests
tests:
	@echo "the tests know the answers: they are not in the attendees' copy" >&2; exit 2

lesson-check: environment  ## LESSON=16: all that this lesson lacks, at once (none: all lessons)
	@$(RUN) tests/wants.py $(LESSON)

test: environment  ## minutes: every lesson, program, strategy, check and message once (ARGS="-k ring")
	@$(TESTS) -m "not full" $(ARGS) || { test $$? = 1 && $(ALONE); }

# a JupyterHub and its proxy for tests/test_jupyterhub.py, in an environment of their own as on a site
HUB = $(VENV)/hub
hub: environment
	@test "$(HUB)/complete" -nt tests/hub_requirements.txt || { \
	  command -v npm >/dev/null || { echo "npm is missing, and JupyterHub's proxy needs it: install Node.js" >&2; exit 2; }; \
	  rm -rf "$(HUB)" && "$(BIN)/uv" venv -q -p "$(BIN)/python" "$(HUB)" && \
	  "$(BIN)/uv" pip install -q --compile-bytecode -p "$(HUB)/bin/python" -c requirements.txt -r tests/hub_requirements.txt && \
	  npm install --silent --no-fund --no-audit --prefix "$(HUB)" configurable-http-proxy@5.3.0 && touch "$(HUB)/complete"; }

test-full: environment hub site slides  ## everything: full-length lessons, schedulers, browser, many seeds; some need root, slurm-wlm, munge and chromium, and say so
	@$(TESTS) $(ARGS) || { test $$? = 1 && $(ALONE); }

test-gpu: environment  ## the tests that only GPUs can make (MANYHANDS_DEVICE=xpu: Intel's); they fail where there is none
	@$(RUN) scripts/prepare_data.py
	@MANYHANDS_DEVICE="$${MANYHANDS_DEVICE:-cuda}" $(RUN) -m pytest -n 0 -m gpu tests/test_on_gpus.py $(ARGS)

gpu-hour: environment  ## on GPUs: what nobody has run there yet, each result kept at once, a page, a branch to send
	@$(RUN) scripts/prepare_data.py
	@$(RUN) scripts/preflight.py --gpu-hour hour $(ARGS)

gpu-quarter: environment  ## as gpu-hour, what 15 minutes of one GPU can tell
	@$(RUN) scripts/prepare_data.py
	@$(RUN) scripts/preflight.py --gpu-hour quarter $(ARGS)

check: lint  ## in minutes: the tests that start no scheduler, browser, lesson or rank
	@$(RUN) -m manyhands.launch.machine "make check"
	@$(RUN) -m pytest $(AT_ONCE) -m "not full and not lesson and not ranks" $(ARGS)
