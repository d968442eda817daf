# The two commands of the README are `make demo` and `make test`. Everything is made in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard native/*/*.[ch]pp native/*/*/*.[ch]pp) CMakeLists.txt pyproject.toml
CPP_FILES := '*.cpp' '*.hpp' '*.cu'
SYSTEM_PACKAGES := swtpm swtpm-tools etcd-server chromium maude valgrind iproute2 nftables curl prometheus slurmctld slurmd slurm-client \
  munge $(if $(shell command -v kubectl),,kubernetes-client) golang-go golang-github-masterminds-sprig-dev
LIBCRYPTO := build/libcrypto
# Where the checkout's own module is built.
MODULE := build/module
# Where the libcrypto is that becomes part of the module; empty for the system's.
STATIC_OPENSSL = SEALRING_STATIC_OPENSSL=$(shell cat $(LIBCRYPTO)/prefix)
CMAKE_NATIVE = $(BIN)/cmake -S . -G Ninja -DSEALRING_NATIVE_TESTS=ON -D$(STATIC_OPENSSL) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)

FUZZ_CMAKE = -DCMAKE_BUILD_TYPE=Release -DSEALRING_FUZZ=ON -D$(STATIC_OPENSSL) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)

.PHONY: docs coverage format tidy lock sbom wheels install-test reproducible release containers container-deps container-test demo test test-gpu system-deps libcrypto lint native-test asan ubsan tsan chaos fuzz fuzz-api fuzz-native fuzz-deps model constant-time conformance integrations torch-versions clean help

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(VENV)/.locked: requirements.lock tools/lock.py
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/lock.py here >$(VENV)/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes --no-deps -r $(VENV)/requirements.txt
	@touch $@

$(LIBCRYPTO)/prefix: native/libcrypto.sh
	@native/libcrypto.sh $(LIBCRYPTO)

$(VENV)/.installed: $(VENV)/.locked $(LIBCRYPTO)/prefix $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
	  --config-settings=editable.rebuild=false --config-settings=build-dir=$(MODULE) \
	  --config-settings=cmake.define.$(STATIC_OPENSSL) --editable .
	@touch $@

demo: $(VENV)/.installed ## train a small GPT with four sealed workers, and watch an attack fail
	$(BIN)/sealring demo

test: $(VENV)/.installed ## everything CI runs
	@$(BIN)/python tools/run_tests.py "$(MAKE) --no-print-directory native-test" "$(MAKE) --no-print-directory lint" "$(MAKE) --no-print-directory docs"

test-gpu: $(VENV)/.installed ## what needs a GPU (compute capability 9.0 or later) and a CUDA build of torch
	@$(BIN)/python -c "import torch, sys; sys.exit(not torch.cuda.is_available())" || { echo "torch finds no GPU here"; exit 1; }
	$(BIN)/python -m pytest tests/gpu tests/core/engine/cuda

system-deps: ## Debian packages that some tests need: a TPM in software, etcd, Chromium, Maude, valgrind, iproute2, curl, Prometheus, Slurm, kubectl, Go
	@dpkg --status $(SYSTEM_PACKAGES) >/dev/null 2>&1 || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install --yes -qq --no-install-recommends $(SYSTEM_PACKAGES); }

libcrypto: ## looks for a newer OpenSSL to build in, where the system's is slow
	@native/libcrypto.sh $(LIBCRYPTO)

lint: $(VENV)/.installed tidy ## ruff, mypy, import contracts, clang-format, clang-tidy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@git ls-files $(CPP_FILES) | xargs $(BIN)/clang-format --dry-run --Werror

docs: $(VENV)/.installed ## the documents as a site, in build/site; warnings and dead links are errors
	@$(BIN)/sphinx-build -q -W --keep-going -j auto -c docs -d build/site.cache . build/site
	@echo build/site/index.html

format: $(VENV)/.locked ## formats Python and C++
	$(BIN)/ruff format .
	@git ls-files $(CPP_FILES) | xargs $(BIN)/clang-format -i

tidy: $(VENV)/.locked $(LIBCRYPTO)/prefix ## clang-tidy on the native sources (.clang-tidy), eight files as one, as they are compiled
	@rm -rf build/tidy && $(CMAKE_NATIVE) -B build/tidy -DCMAKE_BUILD_TYPE=Release -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
	@ls build/tidy/CMakeFiles/sealring_core.dir/Unity/*.cxx native/stand_ins/*.cpp \
	  | xargs -P $$(nproc) -n 1 $(BIN)/clang-tidy -p build/tidy --quiet --checks=-bugprone-suspicious-include 2>/dev/null

coverage: $(VENV)/.installed ## lines that the tests run: Python's by all tests (or TESTS=...), C++'s by the C++ tests
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(CMAKE_NATIVE) -B build/coverage/native -DCMAKE_CXX_FLAGS=--coverage >/dev/null
	@$(BIN)/cmake --build build/coverage/native --target native_tests >/dev/null && $(BIN)/ctest --test-dir build/coverage/native --output-on-failure >/dev/null
	@status=0; $(BIN)/coverage run -m pytest $(TESTS) || status=$$?; \
	  $(BIN)/coverage combine --quiet && $(BIN)/coverage html --quiet && $(BIN)/coverage report; \
	  $(BIN)/python tools/native_coverage.py build/coverage/native; exit $$status

native-test: $(VENV)/.installed ## the C++ tests
	@$(BIN)/cmake --build $(MODULE) --target native_tests
	@$(BIN)/ctest --test-dir $(MODULE) --output-on-failure

asan: $(VENV)/.locked $(LIBCRYPTO)/prefix ## the C++ tests under AddressSanitizer
	$(CMAKE_NATIVE) -B build/asan -DSEALRING_SANITIZE=address
	$(BIN)/cmake --build build/asan --target native_tests && $(BIN)/ctest --test-dir build/asan --output-on-failure

ubsan: $(VENV)/.locked $(LIBCRYPTO)/prefix ## ... under UndefinedBehaviorSanitizer
	$(CMAKE_NATIVE) -B build/ubsan -DSEALRING_SANITIZE=undefined
	$(BIN)/cmake --build build/ubsan --target native_tests && $(BIN)/ctest --test-dir build/ubsan --output-on-failure

tsan: $(VENV)/.locked $(LIBCRYPTO)/prefix ## ... under ThreadSanitizer
	$(CMAKE_NATIVE) -B build/tsan -DSEALRING_SANITIZE=thread
	$(BIN)/cmake --build build/tsan --target native_tests && $(BIN)/ctest --test-dir build/tsan --output-on-failure

chaos: $(VENV)/.installed ## traffic with random faults, SECONDS=120 of it; SEED=... and WORLD=... repeat one
	$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),120) $(if $(SEED),--seed $(SEED)) $(if $(WORLD),--world $(WORLD))

fuzz: $(VENV)/.installed ## every parser under atheris, SECONDS=30 each; finds go to build/fuzz
	@# A wheel on x86-64; elsewhere pip builds it, with clang and libclang-rt-14-dev (or later).
	@$(BIN)/python -c "import atheris" 2>/dev/null || CLANG_BIN=$$(command -v clang) CC=clang CXX=clang++ \
	  LIBFUZZER_LIB=$$(ls /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer_no_main-$$(uname -m).a 2>/dev/null | tail -1) \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	@for harness in tests/fuzz/fuzz_*.py; do \
	  target=$$(basename $$harness .py | sed s/fuzz_//); mkdir -p build/fuzz/$$target; \
	  echo "fuzzing $$target for $(or $(SECONDS),30) s"; \
	  $(BIN)/python -m tests.fuzz.fuzz_$$target -max_total_time=$(or $(SECONDS),30) -max_len=2048 \
	    -print_final_stats=1 -artifact_prefix=build/fuzz/$$target- \
	    build/fuzz/$$target tests/fuzz/corpus/$$target >build/fuzz/$$target.log 2>&1 \
	    || { tail -40 build/fuzz/$$target.log; exit 1; }; \
	  grep -E "executed_units|new_units" build/fuzz/$$target.log; \
	done

fuzz-native: $(VENV)/.locked $(LIBCRYPTO)/prefix ## the native parsers under libFuzzer and sanitizers (clang), SECONDS=60 each; COVERAGE=1 adds lines covered
	@command -v clang++ >/dev/null || { echo "fuzz-native needs clang and its libclang-rt: make fuzz-deps"; exit 1; }
	@CXX=clang++ $(BIN)/cmake -S . -B build/fuzz-native -G Ninja $(FUZZ_CMAKE) >/dev/null && $(BIN)/cmake --build build/fuzz-native
	@if [ -n "$(COVERAGE)" ]; then \
	  CXX=clang++ $(BIN)/cmake -S . -B build/fuzz-native-coverage -G Ninja $(FUZZ_CMAKE) -DSEALRING_FUZZ_COVERAGE=ON >/dev/null \
	  && $(BIN)/cmake --build build/fuzz-native-coverage; else rm -rf build/fuzz-native-coverage; fi
	@$(BIN)/python -m tests.fuzz.native --seconds $(or $(SECONDS),60) $(if $(ONLY),--only $(ONLY))

fuzz-deps: ## Debian's clang, libFuzzer and coverage tools
	@dpkg --status clang llvm >/dev/null 2>&1 || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install --yes -qq --no-install-recommends clang llvm libclang-rt-dev; }

fuzz-api: $(VENV)/.installed ## random calls on sealring and on Gloo, SECONDS=60 of it; SEED=..., CASE=... and WORLD=... repeat one
	$(BIN)/python -m tests.fuzz_api --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE)) $(if $(WORLD),--world $(WORLD))

lock: $(VENV)/.locked ## writes requirements.lock: the hashes of all packages of constraints.txt
	@$(BIN)/python tools/lock.py

sbom: $(VENV)/.installed ## a software bill of materials (CycloneDX): build/sealring.cdx.json
	@mkdir -p build && $(BIN)/python tools/sbom.py >build/sealring.cdx.json && echo build/sealring.cdx.json

# Interpreters to build with; without them tools/wheels.py looks for 3.11, and for 3.12 or later.
PYTHONS ?=
wheels: ## source distribution and manylinux wheels with OpenSSL inside, in dist/; PYTHONS="python3.11 python3.12"
	@$(PYTHON) tools/wheels.py $(addprefix --python ,$(PYTHONS))

install-test: ## installs dist/'s wheel where no compiler and no header can be reached, and runs it; PYTHONS=... chooses
	@$(foreach python,$(or $(PYTHONS),$(PYTHON)),$(PYTHON) tools/install_test.py --python $(python) dist &&) true

reproducible: ## builds source distribution and wheels twice, in different folders, and compares
	@tools/reproducible.sh $(PYTHON) $(PYTHONS)

release: $(VENV)/.installed ## makes and checks the files of VERSION=X.Y.Z, on its tag; DRY=1 tries it without a tag. Publishes nothing
	@test -n "$(VERSION)" || { echo "make release VERSION=X.Y.Z"; exit 1; }
	@$(BIN)/python tools/release.py $(if $(DRY),--dry) $(addprefix --python ,$(PYTHONS)) $(VERSION)

CONTAINER_PACKAGES := podman buildah runc mmdebstrap
container-deps: ## Debian packages that build and run containers
	@dpkg --status $(CONTAINER_PACKAGES) >/dev/null 2>&1 || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install --yes -qq --no-install-recommends $(CONTAINER_PACKAGES); }

# Without LOCAL_BASE the images are based on the registry's debian:trixie-slim.
LOCAL_BASE ?=
CONTAINER_PYTHON ?= 3.13
ROLES ?= broker worker
containers: $(VENV)/.installed ## images of the broker and of a worker, from dist/'s wheels; LOCAL_BASE=trixie: no registry
	@$(BIN)/python -m tools.containers $(addprefix --local-base ,$(LOCAL_BASE)) --python $(CONTAINER_PYTHON) $(ROLES)

container-test: $(VENV)/.installed ## starts the images: the broker's health check, a worker's training
	$(BIN)/python -m pytest tests/containers -v -rs

model: ## the protocol's models: no attack with all checks, the known one without each (needs maude)
	@$(PYTHON) -m model.check

constant-time: $(VENV)/.installed ## no branch or address on a secret: the CPU's code (valgrind), the GPU's (nvcc)
	@for tool in valgrind nvcc; do command -v $$tool >/dev/null || echo "$$tool is not installed: its half is skipped"; done
	$(BIN)/python -m pytest tests/constant_time -v -rs

conformance: $(VENV)/.installed ## torch's own backend tests, on sealring and on Gloo
	@$(BIN)/python -m tests.conformance

INTEGRATIONS := build/integrations
integrations: $(VENV)/.installed ## frameworks on Gloo and sealed: what they computed, and whether all was sealed; ONLY="plain fabric", INTEGRATIONS_DEVICE=cuda
	@test -d $(INTEGRATIONS) || { $(PYTHON) -m venv $(INTEGRATIONS) && \
	  echo "import site; site.addsitedir('$(abspath $(VENV))/lib/$$(ls $(VENV)/lib)/site-packages')" \
	    >$(INTEGRATIONS)/lib/$$(ls $(INTEGRATIONS)/lib)/site-packages/sealring-venv.pth; }
	@# DeepSpeed is built here with these tools, and looks for torch meanwhile.
	@$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools
	@$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --requirement tests/train/integrations/requirements.txt
	@$(INTEGRATIONS)/bin/python -m tests.train.integrations $(ONLY)

torch-versions: $(VENV)/.installed ## the checks of tests/torch_versions with every torch that is allowed, and newer ones; VERSIONS="2.14 2.15", WHEEL=..., KEEP=1
	@$(BIN)/python tools/torch_versions.py $(addprefix --version ,$(VERSIONS)) $(addprefix --wheel ,$(WHEEL)) $(if $(KEEP),--keep)

clean:
	rm -rf build $(VENV)
