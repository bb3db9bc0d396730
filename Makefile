# Every target sets itself up from a bare Python 3.11 or newer; a second run installs nothing.
#   make demo    decode with a model larger than its memory budget
#   make test    linters and types, and the tests that run each time
#   make test-full  all tests, what computes as one kind of processor computes it; TEST_SEED=3141592653 repeats the draws of another commit
#   make test-costs measures what every test takes, which decides what a quick run can afford
#   make test-rest  what `make test` leaves to the full run, likewise: both together are all tests, each once
#   make test-slice the thirty-third of that which is this commit's
#   make test-isa   all that computes, as every kind of processor computes it
#   make test-eval  what speaks to lm-eval, in an environment that has it
#   make planted  mistakes in the program, one against each promise: which test notices; ONLY="--only session" for some
#   make faults  a fault at every place where a system call is made, in every command (hours); ONLY="--share 0.05" for less
#   make check   linters only
#   make fuzz CASES=10000 SEED=0   damaged files against all that reads them, see tests/fuzz
#   make test-floor   tests with the oldest versions that pyproject.toml admits, in an environment of their own (Python 3.12)
#   make test-newest  tests with the newest releases of all that pyproject.toml admits, likewise; TORCH='torch==2.13.0' picks one
#   make audit   known holes in all that is installed, by pip-audit; fails where the advisory database is out of reach
#   make licences   of what the wheel needs; make sbom   the same as a CycloneDX list in build/sbom.json
#   make pictures   record the demo and the chat page for README and docs anew
#   make clean   remove the virtual environments, caches and builds
# `make PYTHON=python3.12 test` names another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FLOOR := .venv-floor
NEWEST := .venv-newest
TORCH ?= torch# an index may have a newer one for CUDA alone, of gigabytes
EVAL := .venv-eval
AUDIT := .venv-audit# tools that look at the environment from outside
# On a terminal pip shows what it fetches: torch takes minutes.
PIP_INSTALL := $(BIN)/python -m pip install $(if $(MAKE_TERMOUT),,-qq) --disable-pip-version-check -c constraints.txt
# What outlives a clone: what mypy knows of the libraries, and a browser (tests/server/headless.py).
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/offload-tests
# Which rows run, by the commit: what is green stays green until something changes. `tests/matrix.py` has the same rule.
export TEST_SEED ?= $(shell printf %d 0x$$(git rev-parse HEAD 2>/dev/null | grep -oE '^.{8}' || echo 1))
# Compiled once and kept, whatever the environment says: every process that a test starts would compile all of it again.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/pytest -q -n auto --maxprocesses 8 --dist worksteal
CONTRACT := build/contract# the layout of a wheel: there mypy and the contract see the bench and the kernels, too
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: demo test test-full test-rest test-slice test-isa test-costs test-eval planted fuzz faults test-floor test-newest check lint types audit licences sbom pictures clean

demo: $(VENV)/.installed-run
	@echo "== offload demo"
	@$(BIN)/offload demo
	@echo "the program is $(BIN)/offload: source $(BIN)/activate lets you call it offload"

# Types and imports are checked beside the tests: the linters alone would stop the run.
test: lint
	@mkdir -p build
	@$(MAKE) --no-print-directory types > build/types.log 2>&1 & types=$$!; \
	$(BIN)/python -m compileall -q -j 0 offload kernels bench; \
	echo "== pytest, what runs each time"; $(PYTEST); tests=$$?; \
	wait $$types; types=$$?; cat build/types.log; test $$tests -eq 0 && test $$types -eq 0

# Beside the packages of .venv: lm-eval brings datasets and more along, which no other test is to see.
test-eval: $(EVAL)/.installed
	@echo "== pytest with lm-eval"
	@$(EVAL)/bin/python -m pytest -q -n 0 --full tests/integrations

# Each library has its own switch: torch's loops, MKL's float32 products, oneDNN's bfloat16 ones (see tests/README.md).
# With narrower loops torch 2.13 must not see AMX either: its attention would pack for it, and has no loop that does.
WITHOUT_AMX := ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
ISA_VARIANTS := ATEN_CPU_CAPABILITY=default,MKL_CBWR=COMPATIBLE,$(WITHOUT_AMX) \
  ATEN_CPU_CAPABILITY=avx2,MKL_CBWR=AVX2,$(WITHOUT_AMX) \
  ATEN_CPU_CAPABILITY=avx2,MKL_ENABLE_INSTRUCTIONS=AVX2,$(WITHOUT_AMX) $(WITHOUT_AMX) ONEDNN_MAX_CPU_ISA=AVX2
# What looks at files, flags, plans and text alone is left out there; a folder or file that is not named here computes.
NOT_COMPUTED := bench checkpoint cli memory planning kernels/test_kernels_compile.py streaming/test_disk.py \
  test_packaging.py test_structure.py
comma := ,
# One of the variants, or this processor as it is, by the commit's seed.
COMPUTED_AS ?= $(word $(shell expr $(TEST_SEED) % $(words as-it-is $(ISA_VARIANTS)) + 1),as-it-is $(ISA_VARIANTS))

test-full: $(VENV)/.installed-dev
	@echo "== pytest, all tests of files, flags, plans and text"
	@failed=; $(PYTEST) --full $(NOT_COMPUTED:%=tests/%) || failed=1; \
	echo "== pytest, all tests that compute: COMPUTED_AS=$(COMPUTED_AS)"; \
	env $(subst $(comma), ,$(filter-out as-it-is,$(COMPUTED_AS))) $(PYTEST) --full $(NOT_COMPUTED:%=--ignore=tests/%) || failed=1; \
	test -z "$$failed"

test-rest: $(VENV)/.installed-dev
	@echo "== pytest, what a quick run leaves out: COMPUTED_AS=$(COMPUTED_AS)"
	@env $(subst $(comma), ,$(filter-out as-it-is,$(COMPUTED_AS))) $(PYTEST) -m full

test-slice: $(VENV)/.installed-dev
	@echo "== pytest, this commit's share of what a quick run leaves out: COMPUTED_AS=$(COMPUTED_AS)"
	@env $(subst $(comma), ,$(filter-out as-it-is,$(COMPUTED_AS))) $(PYTEST) --slice

# What every test takes, and so what a quick run can afford (tests/costs.py).
test-costs: $(VENV)/.installed-dev
	@mkdir -p build; rm -f build/costs.txt
	@$(PYTEST) --full --meter build/costs.txt
	@$(BIN)/python tests/costs.py build/costs.txt

test-isa: $(VENV)/.installed-dev
	@failed=; for variant in $(ISA_VARIANTS); do \
	  echo "== pytest with $$variant"; \
	  env $$(echo $$variant | tr , ' ') $(PYTEST) --full $(NOT_COMPUTED:%=--ignore=tests/%) || failed="$$failed $$variant"; \
	done; test -z "$$failed" || { echo "failed with$$failed" >&2; exit 1; }

CASES ?= 10000
SEED ?= 0
fuzz: $(VENV)/.installed-dev
	@$(BIN)/python tests/fuzz --cases $(CASES) --seed $(SEED)

planted: $(VENV)/.installed-dev
	@PYTHONPATH=tests:. $(BIN)/python -m planted $(ONLY)

# Each breach is printed with what repeats it alone: make faults ONLY="--scene batch --call write --fault EIO --at 1"
faults: $(VENV)/.installed-dev
	@PYTHONPATH=tests:. HF_HUB_OFFLINE=1 $(BIN)/python -m faults $(ONLY)

check: lint types

lint: $(VENV)/.installed-dev
	@echo "== ruff check"
	@$(BIN)/ruff check --quiet
	@echo "== ruff format"
	@$(BIN)/ruff format --check --quiet --diff

# Both look at the layout of a wheel, for they do not know that offload/bench/__init__.py finds bench/ in a checkout.
# What mypy says there is told of the files here.
types: $(VENV)/.installed-dev
	@rm -rf $(CONTRACT) && mkdir -p $(CONTRACT) && cp -Rp offload tests/planted_calls.py $(CONTRACT) && cp -Rp bench kernels $(CONTRACT)/offload
	@touch $(patsubst %,$(CONTRACT)/offload/%/__init__.py,$(wildcard bench/*/)) # folders without one are not looked into
	@echo "== mypy"
	@cd $(CONTRACT) && { $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CACHE)/mypy > mypy.txt; \
	  failed=$$?; sed -E 's#^offload/(bench|kernels)/#\1/#; s#^planted_calls#tests/&#' mypy.txt; exit $$failed; }
	@echo "== lint-imports"
	@cd $(CONTRACT) && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --no-logo --no-cache --config $(CURDIR)/pyproject.toml

# Warnings are no errors there: old libraries use what newer ones beside them, or a newer Python, have deprecated.
test-floor: $(FLOOR)/.installed
	@echo "== pytest with $$($(FLOOR)/bin/python -V) and the versions of constraints-floor.txt"
	@$(FLOOR)/bin/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal --full -o filterwarnings=default

# A failure there is an issue, not a fault of the commit. To try a minor version beyond the bound of pyproject.toml:
# .venv-newest/bin/pip install --no-deps 'transformers==X.Y.*'
test-newest: $(NEWEST)/.installed
	@echo "== pytest with the newest releases: $$($(NEWEST)/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)')"
	@failed=; run="$(NEWEST)/bin/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal"; \
	$$run tests/contract && $$run || failed=1; $$run --full tests/model || failed=1; test -z "$$failed"

# What pip-audit ends with is not asked: it ends well where it has audited nothing.
audit: $(VENV)/.installed-dev $(AUDIT)/.installed
	@mkdir -p build && rm -f build/audit.json
	@$(BIN)/python .ci/supply.py pins environment > build/environment.txt
	@$(AUDIT)/bin/pip-audit -r build/environment.txt --no-deps --disable-pip --progress-spinner off \
	  -f json -o build/audit.json || true
	@$(BIN)/python .ci/supply.py judge build/audit.json

licences: $(VENV)/.installed-dev
	@$(BIN)/python .ci/supply.py licences

sbom: $(VENV)/.installed-dev $(AUDIT)/.installed
	@mkdir -p build
	@$(BIN)/python .ci/supply.py pins wheel > build/requirements.txt
	@$(AUDIT)/bin/python -W ignore -m cyclonedx_py requirements build/requirements.txt --pyproject pyproject.toml --mc-type library \
	  --output-reproducible --validate -o build/sbom.json
	@echo "build/sbom.json lists $$(wc -l < build/requirements.txt) packages"

pictures: $(VENV)/.installed-dev
	@$(BIN)/python .ci/pictures.py

clean:
	rm -rf $(VENV) $(FLOOR) $(NEWEST) $(EVAL) $(AUDIT) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find offload kernels bench tests -name __pycache__ -prune -exec rm -rf {} +

# The stamps are newer than what decides their content; a development install serves `make demo` too.
$(VENV)/.installed-run: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "== installing offload into $(VENV) (once; torch is large, this takes minutes)"
	@$(PIP_INSTALL) -e '.[serve]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "== installing offload and its development tools into $(VENV) (once; torch is large, this takes minutes)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed-run $@

$(FLOOR)/bin/pip: PYTHON := python3.12# as in CUDA images; make PYTHON=... test-floor names another here, too

# Of torch's oldest version an index may have builds for some Pythons only, or none without CUDA: pip says which it misses.
$(FLOOR)/.installed: pyproject.toml constraints-floor.txt | $(FLOOR)/bin/pip
	@echo "== installing the oldest versions into $(FLOOR) (once; torch may come as its CUDA build of some 3 GB)"
	@$(FLOOR)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-floor.txt -e '.[bench,test]' \
	  || { echo "the oldest versions cannot be installed here, see above: NOT tested with $$($(FLOOR)/bin/python -V)" >&2; exit 1; }
	@touch $@

$(NEWEST)/.installed: pyproject.toml | $(NEWEST)/bin/pip
	@echo "== installing the newest versions into $(NEWEST) (once; torch is large, this takes minutes)"
	@$(NEWEST)/bin/python -m pip install -qq -U --disable-pip-version-check -e '.[bench,test]' '$(TORCH)'
	@touch $@

$(EVAL)/.installed: $(VENV)/.installed-dev | $(EVAL)/bin/pip
	@echo "== installing lm-eval into $(EVAL), beside what $(VENV) holds (once)"
	@cd $(VENV)/lib/python3*/site-packages && pwd > $(CURDIR)/$(EVAL)/dev.pth
	@mv $(EVAL)/dev.pth $(EVAL)/lib/python3*/site-packages/
	@$(EVAL)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e . 'lm-eval[api]>=0.4.13' 'openai-agents>=0.24,<0.25'
	@touch $@

$(AUDIT)/.installed: | $(AUDIT)/bin/pip
	@echo "== installing pip-audit and cyclonedx-bom into $(AUDIT) (once)"
	@$(AUDIT)/bin/python -m pip install -qq --disable-pip-version-check 'pip-audit>=2.9,<3' 'cyclonedx-bom>=7,<8'
	@touch $@

%/bin/pip:
	@command -v $(PYTHON) >/dev/null || { echo "offload needs Python 3.11 or newer, and there is no $(PYTHON): install it or name another with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c '$(IS_NEW_ENOUGH)' || { echo "offload needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1): name another with make PYTHON=python3.12" >&2; exit 1; }
	@echo "== creating $* with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $*
