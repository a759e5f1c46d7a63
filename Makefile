# Sealane. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := .make
NATIVE_SOURCES := $(shell find native \( -path native/target -o -path native/fuzz \) -prune -o -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.lock' \) -print)
WORKSPACES := native native/fuzz benchmarks/freshness benchmarks/kernels benchmarks/sessions
export PYTHONSAFEPATH := 1
# Compiled modules are kept: tests start hundreds of daemons, and each would compile its own.
unexport PYTHONDONTWRITEBYTECODE
# Random values in tests come from SEED, so that a gate gives the same result for the same commit.
# `make hunt` and `make kill-test` choose a new seed and print it; SEED=n repeats a run.
SEED ?= 1
NEW_SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
export SEALANE_SEED = $(SEED)
export PROPTEST_RNG_SEED = $(SEED)
export PYTHONHASHSEED = 0
# Two workers per core, as tests wait half of their time. Each has the daemons that its tests share,
# and idle workers take tests from the ends of the others' queues, so that tests of one module stay
# together. ARGS="-n 0" runs in one process.
PARALLEL := -n $(shell echo $$(( 2 * $$(nproc) < 8 ? 2 * $$(nproc) : 8 ))) --dist worksteal

# Builds and tests for Arm on other processors: Debian's cross compiler, and QEMU's emulation of a
# process.
ifneq ($(shell uname -m),aarch64)
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER := aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER := qemu-aarch64 -L /usr/aarch64-linux-gnu
endif

.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-23s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: tools
tools:
	@$(SHELL) tools/require $(PYTHON)

$(STAMP)/venv: requirements-dev.lock | tools
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	mkdir -p $(STAMP) && touch $@

# Built against libtss2-dev, so only if that is installed (make packages).
$(STAMP)/tpm: requirements-tpm.lock $(STAMP)/venv
	if pkg-config --exists tss2-esys tss2-fapi; then \
	  $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --require-hashes -r $<; \
	else echo "no libtss2-dev: built without TPM evidence (make packages installs it)"; fi
	touch $@

$(STAMP)/native: $(STAMP)/venv pyproject.toml rust-toolchain.toml $(NATIVE_SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	cd native && cargo build --locked --release --quiet --package sealane-dpu
	cp native/target/release/sealane-dpu $(BIN)/
	touch $@

.PHONY: build
build: $(STAMP)/native $(STAMP)/tpm ## virtual environment and native engine, in release mode

.PHONY: demo
demo: build ## the main job on this machine; INPUT=FILE uses your own bytes
	$(BIN)/sealane demo --all-reduce --accelerator $(if $(INPUT),--input "$(INPUT)") $(ARGS)

.PHONY: test
test: build ## unit, property, simulation and end-to-end tests that take seconds
	cd native && cargo test --locked --quiet --workspace --exclude sealane-py
	$(BIN)/pytest $(PARALLEL) --randomly-seed=$(SEED) -m "not slow" $(ARGS)

.PHONY: test-slow
test-slow: build ## the tests that take longer, most with daemons of their own
	$(BIN)/pytest $(PARALLEL) --randomly-seed=$(SEED) -m slow $(ARGS)

.PHONY: check
check: lint test test-slow demo test-wheel ## lint, all tests, the demo and the wheel

.PHONY: packages
packages: ## install the Debian packages for lab, fuzzing, aarch64 and the tests of TPM, HSM and etcd (root)
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$(grep -v '^#' tools/apt-packages)
	rm -f $(STAMP)/tpm # the next build finds the TPM's library

.PHONY: lab
lab: build ## all tests with stock Linux kernels as hosts and targets (25 minutes)
	$(BIN)/pytest tests/kernel_lab -m lab --durations=0 $(ARGS)

.PHONY: lab-short
lab-short: build ## the part of the lab that CI runs (a minute)
	$(BIN)/pytest tests/kernel_lab -m lab_short --durations=0 $(ARGS)

VERBS_LAB = SEALANE_DEB="$$(echo dist/sealane_*.deb)" $(BIN)/pytest tests/kernel_lab --durations=0

.PHONY: lab-verbs
lab-verbs: deb ## sessions over RDMA verbs, on kernels with soft-RoCE (15 minutes)
	$(VERBS_LAB) -m lab_verbs $(ARGS)

.PHONY: lab-verbs-short
lab-verbs-short: build ## the part of it that CI runs: queue pairs (half a minute)
	$(VERBS_LAB) -m lab_verbs_short $(ARGS)

.PHONY: lab-aarch64
lab-aarch64: build cross ## an Arm guest with Debian's kernel: stores, sessions, a gateway (15 minutes)
	tools/aarch64-site $(BIN)/pip dist/aarch64/sealane-*.whl $(STAMP)/aarch64
	SEALANE_AARCH64=$(STAMP)/aarch64 $(BIN)/pytest tests/kernel_lab -m lab_aarch64 --durations=0 $(ARGS)

SYSTEMD_LAB = SEALANE_DEB="$$(echo dist/sealane_*.deb)" $(BIN)/pytest tests/systemd_lab --durations=0

.PHONY: lab-systemd
lab-systemd: deb ## the package on Debian machines with real systemd (root; 3 minutes)
	$(SYSTEMD_LAB) -m lab_systemd $(ARGS)

.PHONY: lab-systemd-short
lab-systemd-short: deb ## the part of it that CI runs (a minute)
	$(SYSTEMD_LAB) -m lab_systemd_short $(ARGS)

export CASES ?= 5000

.PHONY: hunt
hunt: SEED := $(NEW_SEED)
hunt: export PYTHONHASHSEED = $(SEED)
hunt: export PROPTEST_CASES = $(CASES)
hunt: export SEALANE_SIM_WORLDS = $(CASES)0
hunt: export SEALANE_SIM_FIRST = $(SEED)00000
hunt: build ## fast tests with a new seed, in another order, CASES (5,000) of each property; SEED=n repeats
	@echo SEED=$(SEED)
	cd native && cargo test --locked --release --quiet --no-fail-fast --workspace --exclude sealane-py
	$(BIN)/pytest $(PARALLEL) -q --randomly-seed=$(SEED) --hypothesis-profile=hunt -m "not slow" $(ARGS)

KILLS ?= 48

.PHONY: kill-test
kill-test: SEED := $(NEW_SEED)
kill-test: build ## kill -9 of brokers, targets, gateways and etcd members under load, KILLS (48) times
	SEALANE_KILLS=$(KILLS) $(BIN)/pytest tests/kills -s --randomly-seed=$(SEED) $(ARGS)

PREVIOUS ?=

.PHONY: test-compat
test-compat: build ## a cluster of the previous release (PREVIOUS=REF) and this one, upgraded and rolled back (5 minutes)
	previous="$$(tools/previous $(BIN)/python $(PREVIOUS))"; \
	  SEALANE_PREVIOUS_PATH="$$previous" $(BIN)/pytest tests/compat -s -m lab_compat $(ARGS)

.PHONY: golden
golden: build ## write the files again that later releases must read (tests/compat/golden)
	PYTHONPATH=tests $(BIN)/python tests/compat/golden_cluster.py

.PHONY: freshness-model
freshness-model: ## search the model of the freshness protocol; print what goes wrong without each rule
	cd native && cargo test --locked --release --package sealane-sim --test freshness -- --nocapture $(ARGS)

DEBIAN_TORCH := /usr/lib/python3/dist-packages

WORLDS ?= 100000

.PHONY: freshness-worlds
freshness-worlds: ## WORLDS (100,000) seeded simulations of crashes of, and attacks on, stores that keep freshness
	cd native && WORLDS=$(WORLDS) cargo test --locked --release --package sealane-engine --lib many_worlds -- --ignored --nocapture

.PHONY: freshness-world
freshness-world: ## one of those simulations, step by step: SEED=n
	cd native && SEED=$(SEED) cargo test --locked --package sealane-engine --lib one_world -- --ignored --nocapture

.PHONY: ring-stress
ring-stress: ## post, receive and complete on two threads, 10^7 messages (minutes)
	cd native && RING_ROUNDS=10000000 cargo test --locked --release -p sealane-engine --lib ring_stress -- --nocapture

.PHONY: ring-lab
ring-lab: build ## all-reduce of eight sites in the link lab, float32 and bfloat16 (root)
	SEALANE_RING_SITES=$(or $(SITES),8) $(BIN)/pytest tests/collectives/test_lab.py --durations=3 $(ARGS)

.PHONY: torch-test
torch-test: build ## torch.distributed over sessions, with Debian's python3-torch (installed if root)
	[ -d $(DEBIAN_TORCH)/torch ] || { apt-get update -q && apt-get install -q -y --no-install-recommends python3-torch; }
	mkdir -p $(STAMP)/torch && ln -sfn $(addprefix $(DEBIAN_TORCH)/,torch torchgen functorch) $(STAMP)/torch/
	PYTHONPATH="$(CURDIR)/$(STAMP)/torch" $(BIN)/pytest tests/collectives/test_torch.py $(ARGS)

.PHONY: bench-storage
bench-storage: build ## compare plain and secure volumes; ARGS="--target HOST:PORT --subsystem NQN" for other targets
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.storage $(ARGS)

.PHONY: bench-storage-path
bench-storage-path: build ## cost of the secure path compared with the plain one: ratios, CPU per I/O by role
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.storage_path $(ARGS)

.PHONY: bench-freshness
bench-freshness: build ## freshness: tree, tables and stores; ARGS=--quick takes a minute
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.freshness $(ARGS)

.PHONY: bench-sessions
bench-sessions: build ## cost of a session's packet compared with TLS over TCP and QUIC (root)
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.sessions packets $(ARGS)

.PHONY: bench-scale
bench-scale: build ## threads, descriptors, memory and times with 1,000 volumes; ARGS="--volumes 100" for fewer
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.control scale $(ARGS)

.PHONY: bench-verbs
bench-verbs: deb ## sessions over UDP and over queue pairs, in one guest with soft-RoCE (10 minutes)
	SEALANE_DEB="$$(echo dist/sealane_*.deb)" PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.verbs $(ARGS)

CRYPTODEV := build/cryptodev.so

# DPDK's headers have warnings of their own. Parts of its interface are "experimental" in 22.11.
$(CRYPTODEV): native/dpu/drivers/cryptodev.c native/dpu/include/sealane_driver.h
	pkg-config --exists libdpdk || { echo "no libdpdk-dev: make packages installs it" >&2; exit 1; }
	mkdir -p build
	$(CC) -std=gnu11 -O2 -shared -fPIC -Wall -Wextra -Werror -DALLOW_EXPERIMENTAL_API \
	  $$(pkg-config --cflags libdpdk | sed 's/-I/-isystem /g') -Inative/dpu/include $< \
	  $$(pkg-config --libs libdpdk) -o $@

.PHONY: cryptodev
cryptodev: $(CRYPTODEV) ## driver of DPDK's crypto devices for sealane-dpu

.PHONY: test-accelerators
test-accelerators: export SEALANE_CRYPTODEV = $(CURDIR)/$(CRYPTODEV)
test-accelerators: build $(CRYPTODEV) ## conformance and faults: processor, emulated card, DPDK's crypto devices
	cd native && cargo test --locked --quiet --package sealane-dpu
	$(BIN)/pytest $(PARALLEL) --randomly-seed=$(SEED) tests/accelerators $(ARGS)

JOBS ?= 1000000

.PHONY: accelerator-ledger
accelerator-ledger: SEED := $(NEW_SEED)
accelerator-ledger: ## JOBS (10^6) for emulated cards with every fault: no IV twice on the wire; SEED=n repeats their draws
	cd native && JOBS=$(JOBS) cargo test --locked --release --quiet --package sealane-dpu --test ledger -- --nocapture

.PHONY: bench-offload
bench-offload: export SEALANE_CRYPTODEV = $(CURDIR)/$(CRYPTODEV)
bench-offload: build $(CRYPTODEV) ## cost and latency of sectors sealed by cards; verified writes while one is killed every second (7 minutes)
	cd native && cargo build --locked --release --quiet --package sealane-dpu --example cost
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.offload $(ARGS)

.PHONY: bench-kernels
bench-kernels: build ## sealing and erasure coding compared with ISA-L and other libraries, one core
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.kernels $(ARGS)

.PHONY: bench-sessions-simulate
bench-sessions-simulate: build ## the experiments of SDR-RDMA in virtual time, compared with the model (10 minutes, resumable)
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.sessions simulate $(ARGS)

.PHONY: sessions-short
sessions-short: build ## the same with a tenth of the messages: what CI runs (a minute)
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.sessions simulate --quick --output sealane-sessions/short $(ARGS)

.PHONY: bench-allreduce
bench-allreduce: build ## all-reduces around rings of 2 to 8 sites in virtual time, compared with the model (5 minutes)
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.sessions allreduce $(ARGS)

.PHONY: bench-uno
bench-uno: build ## Uno's evaluation beside its rivals, in virtual time (15 minutes, resumable); ARGS=--quick takes a minute
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.uno $(ARGS)

.PHONY: bench-uno-lab
bench-uno-lab: build ## near and far messages of real daemons beside TCP and QUIC in the link lab (root; three hours, resumable); ARGS=--quick takes a minute
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.uno.lab $(ARGS)

.PHONY: uno-short
uno-short: build ## the same with one seed and short flows: what CI runs (a minute)
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.uno --quick --output sealane-uno/short $(ARGS)

.PHONY: bench-sessions-lab
bench-sessions-lab: build ## messages over long links compared with TCP and QUIC (root; 10 minutes, resumable)
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.sessions lab $(ARGS)

.PHONY: bench-sessions-field
bench-sessions-field: build ## the same with bursts, jitter, outages and more (root; hours, resumable); ARGS=--quick takes 5 minutes
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.sessions field $(ARGS)

.PHONY: bench-sessions-fairness
bench-sessions-fairness: build ## how jobs, sessions and priorities share a fabric (3 minutes)
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.sessions fairness $(ARGS)

.PHONY: bench-sessions-pace
bench-sessions-pace: build ## processor time of a GB by rate, compared with TLS and QUIC (root, Cargo; 8 minutes, resumable)
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.sessions pace $(ARGS)

.PHONY: bench-sessions-threads
bench-sessions-threads: build ## rate of a session by path threads, message size and chunk (Cargo; 10 minutes)
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.sessions threads $(ARGS)

.PHONY: bench-sessions-workers
bench-sessions-workers: build ## goodput of a session by path threads, modelled from costs measured here (a minute)
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks.sessions workers $(ARGS)

.PHONY: image
image: deb ## OCI image of the Debian package in dist/ (root; 2 minutes)
	rm -f dist/sealane_*.oci.tar
	tools/image dist/sealane_*.deb "$$(echo dist/sealane_*.deb | sed 's/\.deb$$/.oci.tar/')"

.PHONY: lab-image
lab-image: image ## containers of that image (root; a minute)
	SEALANE_IMAGE="$$(echo dist/sealane_*.oci.tar)" $(BIN)/pytest -n 0 tests/image_lab -m lab_image $(ARGS)

.PHONY: wheel
wheel: build ## one abi3 wheel in dist/
	rm -rf build/lib build/lib.* # setuptools would pack modules of earlier builds that are gone
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

.PHONY: test-wheel
test-wheel: wheel ## install the wheel alone and run a small demo from an empty directory
	$(SHELL) tools/try-wheel $(PYTHON) dist/sealane-*.whl

ARCH ?= aarch64

.PHONY: cross
cross: $(STAMP)/venv ## the wheel for another processor in dist/ARCH/: ARCH=aarch64
	$(SHELL) tools/require-cross $(ARCH)
	rm -rf build/lib build/lib.* dist/$(ARCH)
	_PYTHON_HOST_PLATFORM=linux-$(ARCH) CARGO_BUILD_TARGET=$(ARCH)-unknown-linux-gnu \
	  $(BIN)/python -m build --wheel --no-isolation --outdir dist/$(ARCH) .

.PHONY: test-aarch64
test-aarch64: build cross ## what of the tests an emulated Arm process can run, Rust and Python (4 minutes, without builds)
	$(SHELL) tools/test-aarch64 $(BIN)/pip dist/aarch64/sealane-*.whl $(STAMP)/aarch64

# Its Python is Debian's, which need not be the one of the build.
$(STAMP)/tpm2_pytss: requirements-tpm.lock $(STAMP)/venv
	rm -rf $@ && $(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --require-hashes -r $< -w $@

# Of a commit without a release tag: the release before it, and the commit's time and id.
DEB_VERSION = $(shell git describe --exact-match --match 'v*' HEAD >/dev/null 2>&1 || \
  git log -1 --date=format:%Y%m%d%H%M%S --format="$$(dpkg-parsechangelog -S Version)+%cd.%h" 2>/dev/null)

.PHONY: deb
deb: wheel $(STAMP)/tpm2_pytss ## Debian package of daemon and client in dist/ (make packages installs what it needs)
	rm -f dist/sealane_*.deb
	WHEEL="$$(echo dist/sealane-*.whl)" TPM_WHEEL="$$(echo $(STAMP)/tpm2_pytss/*.whl)" \
	  PIP="$(CURDIR)/$(BIN)/pip" MANUALS="$(CURDIR)/$(BIN)/python $(CURDIR)/tools/manuals" OUT="$(CURDIR)/dist" VERSION="$(DEB_VERSION)" \
	  dpkg-buildpackage --build=binary --no-sign --no-check-builddeps \
	  --buildinfo-file=dist/sealane.buildinfo --buildinfo-option=-udist --changes-file=dist/sealane.changes --changes-option=-udist
	lintian --no-tag-display-limit --fail-on error dist/sealane_*.deb

.PHONY: lock
lock: ## renew the Python lock files (needs uv)
	uv pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 pyproject.toml -o requirements.lock
	uv pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 --extra dev -c requirements.lock pyproject.toml -o requirements-dev.lock
	uv pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 --extra hsm --extra lab -c requirements-dev.lock pyproject.toml - -o requirements-package.lock <<< packaging
	uv pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 --no-deps -o requirements-tpm.lock - <<< "tpm2-pytss>=3"

.PHONY: errors
errors: $(STAMP)/venv ## write docs/operate/errors.md and the type of reason ids from tools/reasons.toml and the source
	$(BIN)/python tools/errors

.PHONY: metrics
metrics: build ## write the tables of docs/operate/metrics.md and the dashboards from the source
	$(BIN)/python tools/metrics
	$(BIN)/python tools/dashboards

.PHONY: synchronous
synchronous: $(STAMP)/venv ## write client/synchronous.py from the asynchronous client
	$(BIN)/python tools/synchronous

.PHONY: proto
proto: build ## generate the gRPC code from protocol/*/*.proto
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I src \
	  --python_out=src --mypy_out=quiet,readable_stubs:src \
	  --grpc_python_out=src --mypy_grpc_out=quiet:src \
	  src/sealane/protocol/v1/*.proto src/sealane/protocol/etcd/*.proto

$(STAMP)/fuzz: requirements-fuzz.lock $(STAMP)/native
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-fuzz.lock
	touch $@

FUZZ_SECONDS ?= 600

.PHONY: fuzz
fuzz: $(STAMP)/fuzz ## coverage-guided fuzzing of every parser, FUZZ_SECONDS (600) each; ARGS names some
	$(BIN)/python tools/fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

.PHONY: fuzz-short
fuzz-short: ## the same for 2 s each, two at a time: what CI runs
	$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=2 ARGS="--jobs 2 --seed $(SEED)"

.PHONY: formal
formal: $(STAMP)/venv ## prove the protocols in tests/formal with ProVerif
	$(BIN)/python tests/formal/prove.py

.PHONY: thread-sanitizer
thread-sanitizer: ## tests of the tree, the leaves and the rings under ThreadSanitizer (a nightly toolchain with rust-src)
	cd native && RUSTFLAGS=-Zsanitizer=thread CARGO_TARGET_DIR=target/thread-sanitizer \
	  cargo +nightly test --locked -Zbuild-std --target x86_64-unknown-linux-gnu -p sealane-proto -p sealane-engine --lib -- freshness leaves_tests ring_stress

.PHONY: address-sanitizer
address-sanitizer: ## tests of the sealing and erasure-code kernels under AddressSanitizer (a nightly toolchain)
	cd native && RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/address-sanitizer \
	  cargo +nightly test --locked --target x86_64-unknown-linux-gnu -p sealane-gcm -p sealane-erasure --lib --tests

.PHONY: mutants
mutants: build ## remove each security check in turn and see its tests fail; ARGS names some
	$(BIN)/python tools/mutants $(ARGS)

.PHONY: lint
lint: build ## formatting, types, layers, clippy, for aarch64 as well if its tools are installed
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	for workspace in $(WORKSPACES); do (cd $$workspace && cargo fmt --check && \
	  CARGO_TARGET_DIR=$(CURDIR)/native/target cargo clippy --locked --all-targets -- -D warnings) || exit 1; done
	! $(SHELL) tools/require-cross aarch64 || \
	  (cd native && cargo clippy --locked --all-targets --target aarch64-unknown-linux-gnu -- -D warnings)

.PHONY: format
format: build ## format Python and Rust
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .
	for workspace in $(WORKSPACES); do (cd $$workspace && cargo fmt) || exit 1; done

.PHONY: clean
clean: ## remove everything that make created
	rm -rf $(VENV) $(STAMP) build dist native/target src/sealane/*.so src/*.egg-info
	cd debian && rm -rf .debhelper sealane files debhelper-build-stamp *.substvars *.debhelper*
