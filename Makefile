# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out/demo

.PHONY: demo animation test quick browser harness reproduce lint types wheel docs setup clean

setup: $(VENV)/ready

# With uv, where it is there; with pip otherwise. Both read constraints.txt.
UV := $(shell command -v uv 2> /dev/null)
ifdef UV
INSTALL := $(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt
else
INSTALL := $(BIN)/pip install --quiet --constraint constraints.txt
endif

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/python examples/demo.py --out $(OUT)

# The picture at the top of the README, from the shipped models.
animation: setup
	$(BIN)/python examples/animation.py --out docs/stories.gif

test: setup
	$(BIN)/python -m pytest -n auto --durations=10

# All but the tests that take longer than about ten seconds each.
quick: setup
	$(BIN)/python -m pytest -n auto --durations=10 -m "not slow"

# The adapter for lm-evaluation-harness, whose library is too large for every developer's machine.
harness: setup
	$(INSTALL) --editable ".[tasks]"
	$(BIN)/python -m pytest tests/tasks/test_harness.py

# The page of `didi serve` in Debian's Chromium; axe-core, which looks for what keeps people out, is
# fetched where npm is. What is absent is named as the reason of a skipped test.
browser: setup
	$(INSTALL) --editable ".[serve,browser]"
	command -v npm > /dev/null && npm install --silent --prefix out/axe axe-core@4.14.1 || true
	$(BIN)/python -m pytest -rs tests/serving

# Every table and figure of the paper, tiny: that they can be made, not what they say.
reproduce: setup
	@began=$$(date +%s); \
	OMP_NUM_THREADS=1 $(BIN)/didi reproduce all --scale toy --out out/toy || exit $$?; \
	echo "All items at toy scale took $$(( $$(date +%s) - began )) s (to stay under 360 s)."

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

wheel: setup
	$(BIN)/python .ci/check_wheel.py

# A site of README, docs and docstrings, in out/site.
docs: setup
	$(INSTALL) --editable ".[docs]"
	rm -rf out/site-src && mkdir -p out/site-src
	cp -r --parents README.md ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE docs benchmarks src/didi_instruct/process out/site-src/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) build dist out
