# What a person does here. `make help` lists it. Everything that is needed is installed or built once: Python packages into
# .venv, compiled parts into build/, the test cluster into the cache directory (SHAREPOD_CACHE, default ~/.cache/sharepod).

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Branch coverage in percent that `make coverage` demands: what it is (89.4), rounded down.
COVERAGE_FLOOR := 89
# Folders that `make test` and `make test-all` leave out: .ci/run names tests/unit, which `make coverage` has run.
TESTED :=
# K/N: `make test-all` runs the K-th of N parts of the test files; commit/N: the commit chooses.
SLICE := 1/1
# Seed of a random order of the tests of `make test`; empty: the order of the files.
ORDER :=
# Percent of the examples of each property that `make test` tries; `make test-all` tries all.
EXAMPLES := 20
# Tests marked `alone` measure time and run one by one after the others. Those also marked `paired` run two at a time.
FOLDERS := tests/node tests/cluster tests/hook tests/attack tests/unit tests/property
QUICK_LIST = $(shell grep -v '^\#' tests/quick.txt)
IN_FULL = $(filter-out $(TESTED),tests/unit tests/property)
# The passes for tests marked `alone` collect only files with such tests: each process takes ten seconds to collect all.
QUICK_ALONE = $(QUICK_LIST) $(if $(IN_FULL),$(shell grep -rl --include='*.py' 'pytest\.mark\.alone' $(IN_FULL)))
RANDOM_ORDER := $(if $(ORDER),--random-order-seed $(ORDER) --random-order-bucket module)
# A test that failed has one more try with nothing beside it. Both are shown: one that passes so is looked into.
AGAIN := --last-failed --last-failed-no-failures none --maxfail 1
# The guarantees of the token scheduler hold for the compiled modules, too.
COMPILED := --numprocesses 3 --examples-percent 30 -m "not alone" tests/unit/timeshare tests/unit/agent/shares $(wildcard tests/property/test_timeshare*.py)
# Runs pytest with workers $(1), options $(2) and paths $(3); a slice without such tests (status 5) passes. The second try
# names folders: pytest does not find a test by its name in a file that it leaves out.
PYTEST_PASS = { $(BIN)/python -m pytest $(1) $(2) $(3) || [ $$? -eq 5 ] || $(BIN)/python -m pytest $(AGAIN) $(2) $(FOLDERS) || status=1; }
# Where unit and property tests run alone, a socket or file that nobody closed is an error too.
UNCLOSED := -W error::ResourceWarning -W error::pytest.PytestUnraisableExceptionWarning
# What PYTEST_ARGS needs built: unit and property tests need neither the fake driver nor the cluster.
TEST_PATHS := $(filter tests/%,$(PYTEST_ARGS))
TEST_NEEDS := shim $(if $(TEST_PATHS),$(if $(filter-out tests/unit% tests/property%,$(TEST_PATHS)),doubles) \
	$(if $(filter tests/cluster% tests/node% tests/attack%,$(TEST_PATHS)),cluster),doubles programs)
# What SharePod relies on of ResourceClaims, on a real API server, scheduler and controller manager.
CANARY := $(addprefix tests/cluster/,test_canary.py test_operator_claims.py test_operator_share_claims.py test_admission_claims.py \
	test_plain_webhook.py)
export PYTHONPATH := tests:benchmarks:manifests:cli
export PYTHONDONTWRITEBYTECODE :=

SHIM_SOURCES := $(wildcard shim/include/*.h shim/include/*/*.h shim/*.py $(shell find operator/sharepod/placement/binpack/native operator/sharepod/agent/sockets/native operator/sharepod/agent/native shim/src -type f)) setup.py
C_SOURCES := $(shell find shim operator/sharepod/placement operator/sharepod/agent tests -name '*.[ch]')
DOUBLE_SOURCES := $(shell find tests/doubles tests/hook -name '*.c' -o -name '*.h' -o -name '*.map' -o -name 'Makefile' 2>/dev/null)

.PHONY: venv demo-parts demo-programs demo-minutes play-minutes $(shell sed -n 's/^\([a-z-]*\):.* \#\# .*/\1/p' Makefile)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

doctor: ## says what is missing on this machine, before anything starts
	@if [ -z "$(PYTHON)" ]; then echo "missing: Python >= 3.11 with venv and headers (Debian: apt install python3 python3-venv python3-dev)"; exit 1; fi
	@$(PYTHON) tests/harness/doctor.py

venv: .venv/installed

.venv/installed: pyproject.toml setup.py
	@[ -n "$(PYTHON)" ] || { echo "missing: Python >= 3.11; run make doctor"; exit 1; }
	@echo "Python packages: installing into .venv (once, about a minute)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[operator,agent,dev]'
	@touch $@

shim: build/shim.built ## the hook, the wire binding, the agent's reading of frames, placement's inner loops

build/shim.built: .venv/installed $(SHIM_SOURCES)
	@mkdir -p build
	@$(BIN)/python setup.py --quiet build_ext --inplace build_hook
	@touch $@

table: ## the hook's table of driver entry points, from the headers of CUDA 11.8, 12.9 and 13.5
	@PYTHONPATH=shim $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m table

memory-table: shim doubles ## every function of the driver that takes memory: whether the limit holds, tried on the fake driver
	@$(BIN)/python -m pytest -q -s tests/hook/memory/test_memory_table.py

compiled: build/compiled/built ## the package as it is shipped, its token scheduler compiled, in build/compiled

build/compiled/built: .venv/installed setup.py $(wildcard operator/sharepod/timeshare/*.py)
	@echo "token scheduler: compiling (half a minute)"
	@rm -rf build/compiled && mkdir -p build/compiled/sharepod
	@for part in operator/sharepod/*; do case $$part in */timeshare|*/__pycache__) ;; *) ln -s ../../../$$part build/compiled/sharepod/;; esac; done
	@$(BIN)/python setup.py --quiet build_core --build-lib build/compiled > build/compiled/log 2>&1 || { cat build/compiled/log; exit 1; }
	@PYTHONPATH=build/compiled $(BIN)/python -c 'from sharepod.timeshare import scheduler as s; assert not s.__file__.endswith(".py"), s.__file__'
	@touch $@

doubles: build/doubles.built ## fake CUDA and the programs of the tests

build/doubles.built: .venv/installed $(DOUBLE_SOURCES)
	@mkdir -p build
	@$(MAKE) --silent -C tests/doubles PYTHON=$(abspath $(BIN)/python)
	@touch $@

# Programs that only releases need (the locks' and the audit's, and the writer of SPDX documents), or only the site.
.venv/release .venv/site: .venv/installed
	@$(BIN)/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")' $(notdir $@) > $@.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $@.txt
	@touch $@

images: .venv/installed ## operator's and agent's image as OCI archives in build/images, without a container engine; root; minutes once, then half a minute; IMAGES_ARGS
	@$(BIN)/python -m images $(IMAGES_ARGS)

sbom: .venv/release ## what is in the images, as SPDX documents in build/images
	@$(BIN)/python -m images.sbom

locks: .venv/release ## versions and hashes of all that the images need, from pyproject.toml, into manifests/images/locks
	@$(BIN)/python -m images.relock

audit: .venv/release ## known vulnerabilities of what the locks name, where pip-audit's data can be had
	@$(BIN)/python -m images.audit

cluster: .venv/installed ## builds the test cluster's programs into the cache (once, six to twelve minutes); KUBEBUILDER_ASSETS=FOLDER for prebuilt ones
	@$(BIN)/python -m harness build

programs: .venv/installed ## builds all programs of the tests into the cache: also Helm and, for root, the real node's (once, ten to fourteen minutes)
	@$(BIN)/python -m harness build --all

prometheus: .venv/installed ## builds Prometheus, promtool and Grafana's schema into the cache, for the tests of rules and dashboards (once, about four minutes)
	@$(BIN)/python -m harness build --tool dashboard-schema
	@$(BIN)/python -m harness build --tool prometheus

.PHONY: helm workflows dist
helm: .venv/installed ## builds Helm, which the tests of the chart use, into the cache (once, one to three minutes)
	@$(BIN)/python -m harness build --tool helm

workflows: .venv/installed ## lints .github/workflows by actionlint, which is built once (a quarter of a minute)
	@"$$($(BIN)/python -m harness build --tool actionlint)/actionlint" .github/workflows/*.yml

dist: shim ## the Helm chart, install.yaml and the kubectl plugin for krew, in dist/; DIST_ARGS="--registry NAME --images build/images"
	@$(BIN)/python -m chart $(DIST_ARGS)

taste: shim doubles ## three programs share one simulated GPU, live in this terminal: no cluster, no root, half a minute
	@$(BIN)/python demo/taste.py $(TASTE_ARGS)

demo: demo-minutes demo-parts ## three SharePods on a real cluster with two simulated GPUs: asked and got; a minute and a quarter, the first time seven to eleven more
	@$(BIN)/python demo/run.py

play: play-minutes demo-parts ## a cluster of your own with SharePod and two simulated GPUs, until Ctrl-C: an admin, a user, five things to try (root)
	@$(BIN)/python demo/play.py

demo-images: demo-parts ## the same with operator and agent as pods, from images of this tree; a failure where these cannot be made
	@$(BIN)/python demo/run.py --images

demo-device-plugin: shim doubles cluster ## two SharePods on a GPU that a holder has from NVIDIA's device plugin, beside a whole-GPU pod (a minute; root)
	@$(BIN)/python demo/device_plugin.py

develop: shim cluster ## kopf run of the operator on a test cluster with played nodes and GPUs; Enter runs it again with changed code
	@cd tests && ../$(BIN)/python -m cluster.develop $(DEVELOP_ARGS)

# Packages are installed and the hook is compiled while Go builds: each leaves a processor idle for minutes.
demo-parts:
	@$(MAKE) --silent --no-print-directory --jobs=2 demo-programs shim doubles

demo-programs:
	@[ -z "$(PYTHON)" ] || $(PYTHON) demo/programs.py

demo-minutes play-minutes:
	@[ -z "$(PYTHON)" ] || $(PYTHON) demo/minutes.py $(@:-minutes=)

check: lint ## what to run before a commit: lint, unit tests, property tests with a tenth of their examples and cases, without those that measure time
	@$(BIN)/python -m pytest -q --numprocesses 3 $(UNCLOSED) -m "not soak and not alone" --examples-percent 10 tests/unit tests/property

mutants: shim ## faults that the tests have to notice, one at a time; MUTANTS=hook or all for those of the hook too (minutes); MUTANTS_ARGS='--slice 3/8' for a part
	@if [ -n "$(filter hook all,$(MUTANTS))" ]; then $(MAKE) --no-print-directory doubles; fi
	@$(BIN)/python -m mutants --lists $(or $(MUTANTS),python) $(MUTANTS_ARGS)

coverage: shim ## all unit tests that do not measure time; their branch coverage may not fall below COVERAGE_FLOOR
	@$(BIN)/python -m pytest -q --numprocesses 3 -m "not alone" --cov --cov-report=term \
		--cov-fail-under=$(COVERAGE_FLOOR) tests/unit || \
	{ $(BIN)/python -m pytest $(AGAIN) -m "not alone" tests/unit && $(BIN)/coverage report --fail-under=$(COVERAGE_FLOOR) >/dev/null; }

test: $(TEST_NEEDS) ## all unit tests, a fifth of each property's examples and cases, and of the others those that hold each promise once; PYTEST_ARGS="tests/unit -k lease" for some, one after the other; ORDER=SEED
ifdef PYTEST_ARGS
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	@trap "exit 130" INT; status=0; \
	$(call PYTEST_PASS,--numprocesses 4,$(RANDOM_ORDER) --examples-percent $(EXAMPLES) -m "not alone",$(QUICK_LIST) $(IN_FULL)); \
	$(call PYTEST_PASS,--numprocesses 2,$(RANDOM_ORDER) -m "alone and paired",$(QUICK_ALONE)); \
	$(call PYTEST_PASS,,$(RANDOM_ORDER) -m "alone and not paired",$(QUICK_ALONE)); \
	exit $$status
endif

# Tests of rules and panels need Prometheus, which a slice with one of them builds; `make coverage` runs them without.
test-all: export BUILD_PROMETHEUS := 1
test-all: TESTS_OF_ALL = $(filter-out $(TESTED),$(FOLDERS)) $(if $(filter tests/unit,$(TESTED)),tests/unit/monitoring)
test-all: shim doubles programs ## all tests (40 minutes); SLICE=3/8 for a part of the files
	@trap "exit 130" INT; status=0; \
	$(call PYTEST_PASS,--numprocesses 4,--slice $(SLICE) -m "not alone",$(TESTS_OF_ALL)); \
	$(call PYTEST_PASS,--numprocesses 2,--slice $(SLICE) -m "alone and paired",$(TESTS_OF_ALL)); \
	$(call PYTEST_PASS,,--slice $(SLICE) -m "alone and not paired",$(TESTS_OF_ALL)); \
	exit $$status

test-compiled: compiled ## the tests of the token scheduler on the compiled modules, as they are shipped
	@PYTHONPATH=$(CURDIR)/build/compiled:$(PYTHONPATH) $(BIN)/python -m pytest $(COMPILED)

quick: .venv/installed ## tests/quick.txt: the tests that hold each promise once, chosen by the durations of past runs
	@PYTHONPATH=$(PYTHONPATH):$(CURDIR)/docs $(BIN)/python tests/quick.py

test-arm: shim doubles ## the hook for arm64: built by a cross compiler, its tests run under emulation
	@for tool in aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu qemu-aarch64:qemu-user; do command -v $${tool%%:*} >/dev/null || \
		{ echo "no $${tool%%:*} here: the hook for arm64 is not tested (Debian: apt install $${tool##*:} libc6-dev-arm64-cross)"; exit 0; }; done; \
	$(BIN)/python -m pytest -rs tests/hook/process/test_portable.py -k arm64

test-oldest: shim doubles ## the tests on a real API server, with Kubernetes 1.30; its programs are built once, six to twelve minutes
	@assets=$$($(BIN)/python -m harness build --oldest) && KUBEBUILDER_ASSETS="$$assets" \
		$(BIN)/python -m pytest --numprocesses 3 $(PYTEST_ARGS) tests/cluster

test-canary: shim doubles ## what claims rest on, tried with Kubernetes MINORS ("1.34 1.35 1.36"); each is built once, six to twelve minutes
	@status=0; for minor in $(or $(MINORS),1.34 1.35 1.36); do assets=$$($(BIN)/python -m harness build --minor $$minor) || { status=1; continue; }; \
		echo "canary: Kubernetes $$minor"; FEATURE_GATES=DRAConsumableCapacity=true KUBEBUILDER_ASSETS="$$assets" \
		$(BIN)/python -m pytest $(or $(PYTEST_ARGS),$(CANARY)) || status=1; done; exit $$status

promise: .venv/installed ## the tests that hold a promise: make promise ID=time-guarantee
	@tests="$$($(BIN)/python docs/promises.py --tests "$(ID)")" && $(MAKE) --no-print-directory test PYTEST_ARGS="$$tests"

promises: .venv/installed ## build/promises.md: each promise of the docs, the tests and benchmarks that hold it, its last figure
	@$(BIN)/python docs/promises.py

lint: .venv/installed shim ## format, lint, spelling, dead code, types, import contract, promises
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)
	$(BIN)/ruff check .
	$(BIN)/codespell $$(git ls-files)
	$(BIN)/vulture
	$(BIN)/mypy operator/sharepod cli/kubectl_sharepod tests benchmarks demo shim setup.py crds docs manifests/chart manifests/images
	$(BIN)/lint-imports
	$(BIN)/python shim/layers.py
	$(BIN)/python docs/promises.py --check

docs: shim doubles promises ## docs/settings.md from the code, docs/pictures, the recording of make taste, and build/promises.md
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/pictures.py
	@$(BIN)/python docs/recording.py

docs-site: .venv/site ## the documentation as a site in build/site; a broken link is an error; REPOSITORY_URL= for links to sources
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --config-file docs/site/mkdocs.yml
	@echo build/site/index.html

dashboards: .venv/installed ## examples/monitoring/dashboards/*.json, from dashboards.py
	@$(BIN)/python examples/monitoring/dashboards.py

figures: .venv/installed ## takes the figures of promises from build/results/ into docs/promises.toml
	@$(BIN)/python docs/promises.py --figures

crds: shim cluster ## generates crds/ from the models and a real API server's PodSpec
	@$(BIN)/python crds/generate.py --cluster

bench: bench-hook bench-memory bench-shares bench-policies bench-decisions bench-handoff bench-changes bench-apply bench-operator bench-status bench-packing bench-placement bench-throughput bench-burst bench-chaos bench-claims bench-drains bench-new-holder bench-busy-node bench-weather bench-refusals bench-plugin bench-queue-flood bench-offences bench-whole-nodes ## every benchmark: prints tables, writes build/results/

bench-hook: shim doubles ## cost of a launch and of an exec under the hook
	@$(BIN)/python benchmarks/hook_overhead.py

bench-memory: shim doubles ## cost of an allocation and a free under the hook, and how soon idle credits are called back
	@$(BIN)/python benchmarks/memory.py

bench-shares: shim doubles compiled ## asked and got on one simulated GPU, over mixes of shares and kernels (75 minutes); SHARES_ARGS
	@$(BIN)/python benchmarks/shares.py $(SHARES_ARGS)

bench-policies: shim ## the time scheduler's core beside SFQ, stride, lottery and Gemini's in simulated time (a minute); POLICIES_ARGS
	@$(BIN)/python benchmarks/policies.py $(POLICIES_ARGS)

bench-decisions: shim compiled ## how long the token scheduler decides, compiled and interpreted
	@$(BIN)/python benchmarks/decisions.py

bench-shares bench-handoff bench-busy-node bench-changes soak-agent: export PYTHONPATH := $(CURDIR)/build/compiled:tests:benchmarks

bench-handoff: shim doubles compiled ## how long the token takes from tenant to tenant, and the agent's CPU
	@$(BIN)/python benchmarks/handoff.py

bench-busy-node: shim doubles compiled ## shares on a node with fully loaded processors, by the agent's CPU request (two minutes; root)
	@$(BIN)/python benchmarks/busy_node.py

bench-changes: shim doubles compiled cluster ## what tenants notice of the agent's restart, and how soon an edited share is a measured one
	@$(BIN)/python benchmarks/changes.py --cluster

bench-apply: shim cluster ## apply to Pod created to bound, beside bare pods
	@$(BIN)/python benchmarks/apply_latency.py

bench-operator: shim cluster ## the operator's latency, rate, processor time and calls beside a bare client (5 minutes); OPERATOR_ARGS
	@$(BIN)/python benchmarks/operator_speed.py $(OPERATOR_ARGS)

bench-claims: shim cluster ## plain Pods with ResourceClaims: latency beside SharePods and bare Pods, bursts, the operator killed (5 minutes); CLAIMS_ARGS
	@$(BIN)/python benchmarks/claims.py $(CLAIMS_ARGS)

bench-drains: shim doubles cluster ## an HTTP server drained from node to node ten times under load, beside plain Pods (12 minutes); DRAINS_ARGS
	@$(BIN)/python benchmarks/drains.py $(DRAINS_ARGS)

bench-status: shim cluster ## a SharePod's status by merge patch and by server-side apply, on a real API server (a minute)
	@$(BIN)/python benchmarks/status_writes.py

bench-packing: shim ## % allocated beside BestFit and FGD; TRACE=DIR with a trace's CSV files, else a generated one
	@$(BIN)/python benchmarks/packing.py $(if $(TRACE),--trace $(TRACE)) $(PACKING_ARGS)

bench-placement: shim ## decisions per second, p50 and p99 on 100 to 50,000 GPUs
	@$(BIN)/python benchmarks/placement.py

bench-fairness: shim ## a simulated month of four teams, with budgets and without: each one's GPU time, what budgets cost, waits; TRACE=DIR, else drawn jobs
	@$(BIN)/python benchmarks/fairness.py $(if $(TRACE),--trace $(TRACE)) $(FAIRNESS_ARGS)

bench-whole-nodes: shim ## a simulated week at a load of 0.9: how long requests for whole nodes wait, and what that costs (3 minutes)
	@$(BIN)/python benchmarks/whole_nodes.py

bench-throughput: shim doubles ## jobs finished a day and waits: a GPU each, static fractions, SharePod; TRACE=DIR, else drawn jobs
	@$(BIN)/python -m throughput $(if $(TRACE),--trace $(TRACE)) $(THROUGHPUT_ARGS)

bench-burst: shim cluster ## 16 SharePods of 0.5 at once on 8 GPUs, 100 times
	@$(BIN)/python benchmarks/burst.py

bench-chaos: shim cluster ## 2,000 SharePods on 1,010 nodes, the operator killed ten times, in bad weather (10 minutes); SEED=
	@$(BIN)/python benchmarks/chaos.py $(CHAOS_ARGS)

bench-new-holder: shim doubles cluster ## from apply to running where a holder takes the GPU first, beside NVIDIA's device plugin: 30 times (5 minutes; root)
	@$(BIN)/python benchmarks/new_holder.py $(NEW_HOLDER_ARGS)

bench-weather: shim cluster ## each fault between operator and API server, played once: how long it was blind (10 minutes); WEATHER_ARGS
	@$(BIN)/python benchmarks/weather.py $(WEATHER_ARGS)

bench-queue-flood: shim ## from apply to Pod while thousands of SharePods of another namespace arrive and wait (five minutes); QUEUE_FLOOD_ARGS
	@PYTHONPATH=tests:benchmarks $(BIN)/python benchmarks/queue_flood.py $(QUEUE_FLOOD_ARGS)

bench-plugin: cluster ## each command of the kubectl plugin on 1,000 nodes, next to kubectl's own read
	@$(BIN)/python benchmarks/plugin_speed.py

bench-chart: shim doubles programs ## from helm install until the first SharePod runs, on five new clusters with a real kubelet (two minutes; root and make helm)
	@$(BIN)/python benchmarks/chart_install.py $(CHART_ARGS)

bench-refusals: shim cluster ## malformed SharePods and what kubectl says of each
	@$(BIN)/python benchmarks/refusals.py

bench-offences: shim ## how soon a process with more than its share is found and, by policy, ended: 50 of each kind (two minutes; root)
	@$(BIN)/python benchmarks/offences.py $(OFFENCES_ARGS)

trace-picture: shim doubles ## docs/trace.svg: turns and co-running of two programs on the simulated GPU, from two traces
	@$(BIN)/python benchmarks/trace_picture.py

soak-memory: shim doubles ## twenty minutes of random memory calls, ledger against driver, from a printed seed; SEED= repeats a run
	@$(BIN)/python benchmarks/soak_memory.py

soak-agent: shim doubles compiled ## twenty minutes of trouble for an agent and its tenants, from a printed seed; SEED= repeats a run
	@$(BIN)/python benchmarks/soak_agent.py

gpu-kit: shim doubles ## build/gpu-kit.tar.gz: measures SharePod on a machine with an NVIDIA GPU, without Kubernetes or network
	@$(BIN)/python benchmarks/gpu/bundle.py

bench-gpu: gpu-kit ## the GPU kit on the fake driver: its tables, marked so
	@$(BIN)/python build/gpu-kit/measure.py --fake --fresh --results build/results/gpu-kit-fake $(GPU_KIT_ARGS)

soak-placement: shim ## twenty minutes of random sequences of what can happen to placement; SEED= repeats a run
	@$(BIN)/python benchmarks/soak_placement.py $(SOAK_ARGS)

soak-holders: shim doubles cluster ## twenty faults of holders beside NVIDIA's device plugin, on a real node (5 minutes; root); ROUNDS=, SEED=
	@ROUNDS=$${ROUNDS:-20} $(BIN)/python -m pytest -q -s --timeout 1500 tests/node/test_device_plugin.py -k two_owners

soak-frames: shim ## ten million frames of fuzz against what the agent parses (some minutes), from a printed seed; SEED= repeats
	@$(BIN)/python benchmarks/soak_frames.py $(SOAK_ARGS)

sanitize: shim doubles ## random life with the hook's C sources under the address, undefined-behaviour and thread sanitizers
	@$(BIN)/python -m hook.life.sanitize $(SANITIZE_ARGS)

soak-hook: shim doubles ## 20 minutes of random life under the hook: forks, kills, stops, agents that go, captures; SEED= repeats
	@$(BIN)/python benchmarks/soak_hook.py $(SOAK_ARGS)

clean: ## removes what was built here; the cache directory stays
	rm -rf build dist .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache operator/*.egg-info
	find operator tests benchmarks demo -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f operator/sharepod/protocol/_wire.* operator/sharepod/placement/binpack/_scores.* operator/sharepod/agent/sockets/_frame_reader.* operator/sharepod/agent/_timed_wait.* operator/sharepod/agent/hook/libsharepod.so
