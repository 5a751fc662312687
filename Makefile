# Two commands: `make run` and `make test`. Both are thin; the work is in `llmgw demo` and pytest.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet

# Another Python for .venv: make run PYTHON=/usr/bin/python3.12
PYTHON ?= python3
# Seconds after which `make run` ends by itself; empty: on Ctrl-C.
DEMO_SECONDS ?=
# More options for `llmgw demo`, such as --port 9443.
DEMO_OPTIONS ?=
# More options for pytest, such as -x or -k health.
PYTEST_OPTIONS ?=
# Processes that share the tests; most tests wait for other processes, so more than there are cores.
PYTEST_WORKERS ?= 4
# Versions of Python packages that the tests are run with. PINNED= (nothing behind the =) takes the newest.
PINS := tests/constraints.txt
PINNED ?= yes
# Debian packages that the tests need.
APT := redis-server redis-sentinel etcd-server haproxy openssl chromium faketime slowhttptest prometheus

.PHONY: help run test test-slow docs bench regression lint format pins audit clean system

help: ## say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1|/' | column -t -s '|'

run: $(VENV)/.run ## start three real llama-servers and a gateway before them
	@exec $(VENV)/bin/llmgw demo --end-with-parent $(if $(DEMO_SECONDS),--seconds '$(DEMO_SECONDS)') $(DEMO_OPTIONS)

# The closing line of pytest is repeated, so that it stands last whatever the coverage gate says.
test: lint system ## lint, types, all tests but the slow ones, coverage of core and routing
	@log=$(VENV)/pytest.log; status=0
	$(PY) -m pytest -n $(PYTEST_WORKERS) --dist loadfile --reruns 2 --reruns-delay 1 --cov --cov-report= -m 'not slow' $(PYTEST_OPTIONS) 2>&1 | tee "$$log" || status=$$?
	if [ $$status -eq 0 ]; then
		$(PY) -m coverage report --include='llmgw/core/*,llmgw/routing/*' --skip-covered --fail-under=100 || status=$$?
		tail -n 1 "$$log"
	fi
	exit $$status

test-slow: $(VENV)/.test system ## the slow tests
	@$(PY) -m pytest -m slow $(PYTEST_OPTIONS)

docs: $(VENV)/.test ## build/docs/docs/index.html, with warnings as errors
	@$(PY) -m sphinx -q -W --keep-going -c docs -b html . build/docs
	echo 'build/docs/docs/index.html'

# What is measured: make bench BENCH='--targets nginx,haproxy,llmgw --jobs event --rounds 5'
BENCH ?=
bench: $(VENV)/.test ## llmgw and nginx side by side: CPU for each request and each event
	@$(MAKE) --no-print-directory system APT='gcc libssl-dev nginx'
	$(PY) benchmarks/compare.py $(BENCH)

regression: $(VENV)/.test ## whether a request or an event has become dearer: a report
	@$(PY) benchmarks/regression.py

lint: $(VENV)/.test ## ruff and mypy
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.test ## let ruff format everything
	@$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

pins: $(VENV)/.test ## the newest versions into tests/constraints.txt
	@$(PIP) install --upgrade --upgrade-strategy eager -e '.[test]'
	{ grep '^#' $(PINS); $(PIP) freeze --all --exclude pip --exclude wheel --exclude-editable; } > $(PINS).new
	mv $(PINS).new $(PINS)

audit: | $(VENV)/.made ## known vulnerabilities of the versions in tests/constraints.txt
	@if [ ! -x $(VENV)/audit/bin/pip-audit ]; then
		$(PY) -m venv $(VENV)/audit
		$(VENV)/audit/bin/python -m pip --disable-pip-version-check --quiet install pip-audit
	fi
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r $(PINS)

clean: ## remove what was made, .venv and .demo included
	rm -rf $(VENV) .demo .coverage .mypy_cache .ruff_cache .hypothesis build dist *.egg-info tests/clients/node_modules
	find . -name __pycache__ -prune -exec rm -rf {} +

# --- what the above stand on -------------------------------------------------

# Which Python: the first one that is new enough and can make an environment.
$(VENV)/.made:
	@good='import sys, ensurepip; sys.exit(sys.version_info < (3, 11))'
	new='import sys; sys.exit(sys.version_info < (3, 11))'
	if ! $(PY) -c "$$good" 2>/dev/null; then
		chosen=; bare=
		for candidate in '$(PYTHON)' python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
			if "$$candidate" -c "$$good" 2>/dev/null; then chosen=$$candidate; break; fi
			if [ -z "$$bare" ] && "$$candidate" -c "$$new" 2>/dev/null; then bare=$$candidate; fi
		done
		if [ -z "$$chosen" ] && [ -n "$$bare" ]; then
			$(MAKE) --no-print-directory system APT=python3-venv
			if ! /usr/bin/python3 -c "$$good" 2>/dev/null; then
				echo "$$bare cannot make virtual environments: it lacks ensurepip. On Debian: apt-get install python3-venv" >&2
				exit 1
			fi
			chosen=/usr/bin/python3
		fi
		if [ -z "$$chosen" ]; then
			echo "llmgw needs Python 3.11 or newer, and '$(PYTHON)' is $$('$(PYTHON)' --version 2>&1 || true). Name another: make PYTHON=/path/to/python3" >&2
			exit 1
		fi
		echo "Making $(VENV) with $$("$$chosen" --version) ($$chosen)"
		"$$chosen" -m venv --clear $(VENV)
	fi
	touch $@

$(VENV)/.run: setup.cfg pyproject.toml | $(VENV)/.made
	@echo 'Installing llmgw and what the demo needs'
	if ! $(PIP) install -e '.[demo,fast]'; then
		echo 'The real llama.cpp server cannot be installed here; the demo will use simulated ones.' >&2
		$(PIP) install -e . 'openai>=2'
	fi
	touch $@

$(VENV)/.test: setup.cfg pyproject.toml $(PINS) | $(VENV)/.made
	@echo 'Installing llmgw and what the tests need'
	$(PIP) install 'setuptools>=77' wheel
	if [ -z '$(PINNED)' ]; then
		$(PIP) install -e '.[test]'
	elif ! $(PIP) install -c $(PINS) -e '.[test]'; then
		echo 'The versions of $(PINS) cannot be had here; the newest are taken.' >&2
		$(PIP) install -e '.[test]'
	fi
	touch $@

# Clients in JavaScript. Debian's node and others' do not mix, so apt is asked only where there is none.
CLIENTS := tests/clients/node_modules/.package-lock.json
test test-slow: $(CLIENTS)
$(CLIENTS): tests/clients/package.json tests/clients/package-lock.json
	@command -v npm >/dev/null || $(MAKE) --no-print-directory system APT='nodejs npm'
	if ! command -v npm >/dev/null; then
		echo 'no npm: the tests with clients for Node will be skipped' >&2
	elif npm --prefix tests/clients ci --no-audit --no-fund --loglevel=error; then
		touch $@
	else
		echo 'npm ci failed in tests/clients: the tests with clients for Node will be skipped' >&2
	fi

# sslyze wants older libraries than ours, so it has an environment of its own.
TOOLS := $(VENV)/tools/.installed
test test-slow: $(TOOLS)
$(TOOLS): | $(VENV)/.made
	@echo 'Installing sslyze'
	if $(PY) -m venv $(VENV)/tools && $(VENV)/tools/bin/python -m pip --disable-pip-version-check --quiet install 'sslyze >= 6'; then
		touch $@
	else
		echo 'no sslyze: the test with it will be skipped' >&2
	fi

# Installs what is missing where that is allowed; tests that lack a program say so and are skipped.
system:
	@missing=
	for package in $(APT); do
		dpkg-query -W -f '$${Status}' "$$package" 2>/dev/null | grep -q ' installed$$' || missing+=" $$package"
	done
	[ -n "$$missing" ] || exit 0
	if ! command -v apt-get >/dev/null; then echo "not installed:$$missing (no apt-get here)" >&2; exit 0; fi
	sudo=
	if [ "$$(id -u)" -ne 0 ]; then
		if ! sudo -n true 2>/dev/null; then echo "not installed:$$missing (needs root)" >&2; exit 0; fi
		sudo='sudo -n'
	fi
	echo "Installing$$missing"
	$$sudo apt-get update -qq
	$$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
		-o Dpkg::Use-Pty=0 -o Dpkg::Options::=--force-confold $$missing >/dev/null
