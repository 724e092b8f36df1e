# Two commands matter: `make demo` and `make test`. Each sets everything up in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNS := $(VENV)/.runs
# One more than there are cores in the smallest machines meant: tests wait for other processes for a fifth of the time.
# Beside programs that take the cores, more workers get more of them.
WORKERS ?= 3
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal
NATIVE := $(wildcard agent/native/*.py agent/native/*/*.[ch] agent/native_tools/*.c daemon/native/*/*.[ch] daemon/native_counters/*.[ch])

.PHONY: demo dyno test test-all lock audit test-pythons newer-pythons level-zero lint unit sanitize gpu rocm rocm-fake zoo bench bench-attach bench-traces rootcause rootcause-gpu rootcause-ranks campaign campaign-attach campaign-gaps campaign-own-gil campaign-profiler campaign-jax campaign-systemd fuzz properties fuzz-replay campaign-fuzz-service campaign-access campaign-exec-race campaign-uploads campaign-reports campaign-diff campaign-load campaign-faults campaign-slurm campaign-fleet campaign-clocks campaign-kineto campaign-xpu campaign-mutants views config-docs images screenshots docs protos clean install

install: $(STAMP)

$(STAMP): pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(RUNS) $@

# The product without the developers' tools.
$(RUNS): pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

demo: $(RUNS)
	$(BIN)/kinetoctl demo --output-dir demo-output

# The heart: just under four minutes on two quiet cores, in a new checkout one more. What is marked slow is left out.
test: lint unit

# All that CI runs, but for `make test-pythons`.
test-all: lint
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests examples
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/unit/test_english.py
	git ls-files '*.c' '*.h' | xargs $(BIN)/clang-format --dry-run -Werror

unit: $(STAMP)
	$(PYTEST) -m 'not slow'

# Renews the pinned versions and hashes that the image and the packages are built from. Every extra but the developers' (dev, docs, fuzz), those of notebooks (notebook, polars), the Perfetto UI (perfetto) and what has a licence of its own (cupti).
EXTRAS := nvidia amd s3 gcs azure otlp dask kubernetes web
LOCK := pip compile --quiet --universal --python-version 3.11 --generate-hashes --fork-strategy fewest --upgrade \
    --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'
lock: $(STAMP)
	$(BIN)/uv $(LOCK) $(EXTRAS:%=--extra %) pyproject.toml --output-file deploy/supply/requirements.txt
	$(BIN)/uv $(LOCK) deploy/supply/build.in --output-file deploy/supply/build.txt

# Known vulnerabilities of what is pinned; KINETO_ADVISORIES names a folder of advisories where osv.dev is out of reach.
audit: $(STAMP)
	PYTHONPATH=deploy/supply $(BIN)/python -m pinned.audit

# The agent's tests under every Python from 3.9 on that this machine has, but for that of .venv.
test-pythons: $(STAMP)
	tests/pythons.sh

# CPython releases that this machine does not have, unpacked from Debian packages into build/ (root is not needed).
newer-pythons: $(STAMP)
	cd tests && ../$(BIN)/python -m support.machine.newer_pythons

# Intel's libpti_view in five versions and Debian's Level Zero loader, unpacked into build/ (root is not needed).
level-zero: $(STAMP)
	cd tests && ../$(BIN)/python -m support.xpu.level_zero

# The collector against the fake libcupti under ASan + UBSan and under TSan (also part of `make test-all`).
sanitize: $(STAMP)
	$(PYTEST) tests/unit/agent/native/test_drivers.py

# On a machine with an NVIDIA GPU and a torch that uses it.
gpu: $(STAMP)
	$(BIN)/pytest tests/gpu
	$(BIN)/python tests/bench/overhead.py

# On a machine with an AMD GPU and ROCm 7 (HIP_LIBRARY names a libamdhip64 elsewhere than in /opt/rocm): ten minutes, and
# one file, build/rocm-report.json. FAKE=1 needs neither.
rocm: $(STAMP)
	$(BIN)/python tests/rocm/prove.py $(if $(FAKE),--fake)

# The collector against the fake ROCm in all versions: a million launches and 200 recordings each, plain and sanitized.
rocm-fake: $(STAMP)
	cd tests && ../$(BIN)/python -m support.rocm.fakes '' address,undefined thread

# On a machine with an NVIDIA GPU: some eighty real GPU programs, each traced and compared with an untouched run; half some twenty minutes.
zoo: $(STAMP)
	$(BIN)/python tests/gpu/zoo/run.py --output build/zoo

bench: $(STAMP)
	$(BIN)/python tests/bench/formats.py
	$(BIN)/python tests/bench/tree.py
	$(BIN)/python tests/bench/profiles.py

# Attaching beside memray, gdb (which must be installed) and hypno.
bench-attach: $(STAMP)
	$(PYTHON) -m venv .venv-rivals
	.venv-rivals/bin/pip install --quiet --disable-pip-version-check memray hypno
	$(BIN)/python tests/bench/attach.py

# Traces beside HTA and the TensorBoard plug-in. HTA 0.6.1 fails on larger traces with pandas 3.
bench-traces: $(STAMP)
	$(PYTHON) -m venv .venv-analysers
	.venv-analysers/bin/pip install --quiet --disable-pip-version-check traceinsight torch-tb-profiler 'pandas<3' 'setuptools<81'
	$(BIN)/python tests/bench/traces.py

# Some forty trainings on the CPU (torch is needed) with one planted cause each: do the findings name it? A quarter of an hour.
rootcause: $(STAMP)
	cd tests && ../$(BIN)/python -m rootcause $(CAUSES)

# The same on an NVIDIA GPU that nothing else uses (torch with CUDA, JAX): ten minutes. JOBS=2 takes two GPUs.
# CAUSES=--held-out runs those that were written after the rules.
JOBS ?= 1
rootcause-gpu: $(STAMP)
	cd tests && ../$(BIN)/python -m rootcause --gpu --jobs $(JOBS) $(CAUSES)

# Two processes each, on two GPUs if there are so many.
rootcause-ranks: $(STAMP)
	cd tests && ../$(BIN)/python -m rootcause --ranks $(CAUSES)

# Long checks, not part of `make test`: other people's tools read our traces.
campaign: $(STAMP)
	-cd tests && ../$(BIN)/python -m support.machine.newer_pythons
	$(PYTHON) -m venv .venv-readers
	.venv-readers/bin/pip install --quiet --disable-pip-version-check HolisticTraceAnalysis torch-tb-profiler
	rm -rf build/readers
	$(BIN)/python tests/campaign/make_traces.py build/readers
	.venv-readers/bin/python tests/campaign/read_traces.py build/readers

# Hours: every kind of target on every Python of this machine (`make newer-pythons` gets newer ones).
campaign-attach: $(STAMP)
	$(BIN)/python tests/campaign/attach.py --output build/attach/campaign.md

# Hours: longest gaps of programs during a trace and for a minute afterwards, and what they do next, beside untouched twins.
campaign-gaps: $(STAMP)
	$(BIN)/python tests/campaign/gaps.py --output build/attach/gaps.md

# Traces of programs with sub-interpreters that have a GIL of their own, on every Python of this machine from 3.12 on.
campaign-own-gil: $(STAMP)
	$(BIN)/python tests/campaign/sources/own_gil.py

# Captures of a training loop whose own torch.profiler runs all the time; with CUDA where torch (needed) has it.
campaign-profiler: $(STAMP)
	$(BIN)/python tests/campaign/sources/user_profiler.py

# Captures of a JAX training loop on the CPU whose own jax.profiler runs all the time: five minutes. Needs JAX.
campaign-jax: $(STAMP)
	$(BIN)/python tests/campaign/sources/jax_profiler.py

# The Debian package under a real systemd, in a throw-away copy of this machine: root, systemd-container.
campaign-systemd: $(STAMP)
	$(BIN)/python tests/campaign/systemd.py

# A million launches on a fake Intel GPU, and two hundred attaches and detaches, through each version of the real
# libpti_view (`make level-zero` gets them): five minutes a version.
campaign-xpu: $(STAMP)
	cd tests && ../$(BIN)/python -m support.xpu.level_zero
	$(BIN)/python tests/campaign/sources/xpu.py

# The stub by which editors complete views, from the code.
views: $(STAMP)
	$(BIN)/python docs/generate_view_stub.py

# The settings in docs/configuration.md and deploy/config/config.toml, from their declarations.
config-docs: $(STAMP)
	$(BIN)/python docs/generate_config.py

# The images of README.md and docs/, from the code and a real capture.
images: $(STAMP)
	$(BIN)/python docs/generate_images.py

# The pictures of the web page in docs/web.md, by Chromium.
screenshots: $(STAMP)
	$(BIN)/python docs/generate_screenshots.py

# The documentation as a website in build/site. Nothing is fetched once the extra `docs` is installed.
DOCS_STAMP := $(VENV)/.docs
$(DOCS_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml

# The unmodified dyno and unitrace.py of a checkout of facebookincubator/dynolog, built with cargo and Debian's packages,
# against a daemon and real training processes (torch is needed).
DYNOLOG ?=
dyno: $(STAMP)
	DYNOLOG_SOURCES=$(abspath $(DYNOLOG)) $(BIN)/pytest tests/integration/dynolog_door/test_dyno.py

# Every role against every call, over the Unix socket, loopback and TLS; then a hostile user beside another one; as root.
HOSTILE_SECONDS ?= 600
campaign-access: $(STAMP)
	$(BIN)/python tests/campaign/access.py
	$(BIN)/python tests/campaign/hostile.py --seconds $(HOSTILE_SECONDS)

# Ten thousand traces of processes that become another user's meanwhile, at every step and at random; as root: some twenty minutes.
campaign-exec-race: $(STAMP)
	$(BIN)/python tests/campaign/exec_race.py

# Every parser of foreign data alone, led by coverage: so many seconds for each of FUZZ_TARGETS (none: all of them; half
# an hour each is a night). Needs clang with libFuzzer for those in C; the others take atheris, where there is one.
FUZZ_SECONDS ?= 30
FUZZ_TARGETS ?=
fuzz: $(STAMP)
	-$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fuzz]'
	cd tests && ../$(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_TARGETS)

# The tests of properties with new examples, twenty times as many: a quarter of an hour. What it finds is printed so that it
# can become an example of its test.
properties: $(STAMP)
	$(PYTEST) -m hypothesis --hypothesis-profile search

# One input again, as `make fuzz` names it.
fuzz-replay: $(STAMP)
	cd tests && ../$(BIN)/python -m fuzz --replay $(abspath $(FUZZ_FILE)) $(FUZZ_TARGET)

# Ten minutes of damaged input through every door of running processes: daemon, agent, decode worker; or through FUZZ_DOORS.
FUZZ_DOORS ?=
campaign-fuzz-service: $(STAMP)
	$(BIN)/python tests/campaign/fuzz_service.py $(FUZZ_DOORS)

# A quarter of some twenty minutes of uploads to an S3 server through kills of the daemon and cut connections.
campaign-uploads: $(STAMP)
	$(BIN)/python tests/campaign/uploads.py

# Reports of 256 ranks out of an S3 server through a Dask cluster; time and memory.
campaign-reports: $(STAMP)
	$(BIN)/python tests/campaign/reports.py

# Any traces in halves: `kinetoctl diff` calls nothing changed, and finds what is made 20 % slower; some minutes.
TRACES = tests/data/h200/ddp4/*.json.gz
campaign-diff: $(STAMP)
	$(BIN)/python tests/campaign/diff_noise.py $(TRACES)

# 50 requests in a row to the libkineto of an unmodified torch, then 64 such processes at once; quarter of an hour, 8 GiB.
# TORCH_PYTHON=/path/to/python takes another torch.
TORCH_PYTHON = $(BIN)/python
campaign-kineto: $(STAMP)
	$(BIN)/python tests/campaign/kineto_recorder.py --python $(TORCH_PYTHON)

# Twelve minutes: 64 agents and 20 captures a minute, then nothing to do; verdicts, latency, memory, idle CPU against goals.
campaign-load: $(STAMP)
	$(BIN)/python tests/campaign/load.py

# Some 200 kills at random moments of captures, then full disks, set clocks and slow readers: half some twenty minutes, as root.
campaign-faults: $(STAMP)
	$(BIN)/python tests/campaign/faults.py

# One capture of 256 simulated hosts with 8 processes each, then the same with 5 % of the hosts broken; ten minutes.
campaign-fleet: $(STAMP)
	$(BIN)/python tests/campaign/fleet.py

# Three daemons in network namespaces, each with a clock of its own, and one merged trace; as root.
campaign-clocks: $(STAMP)
	$(BIN)/python tests/campaign/clocks.py

# Steps, arrays, components and ends of jobs on a real Slurm (Debian's slurm-wlm and munge), as root: four minutes.
campaign-slurm: $(STAMP)
	$(BIN)/python tests/campaign/slurm.py

# Does a test fail where the code is broken? 300 places of the product at random, or of MODULES; as root; two hours.
MODULES ?=
campaign-mutants: $(STAMP)
	$(BIN)/python tests/campaign/mutants.py --count 300 $(MODULES)

# Generated code is committed. The old generator is the floor for the run-time libraries.
protos:
	$(PYTHON) -m venv .venv-protos
	.venv-protos/bin/pip install --quiet 'grpcio-tools==1.62.3' 'setuptools<80'
	cd protos && ../.venv-protos/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. kineto_protos/v1/profiler.proto \
	    kineto_protos/kubelet/v1/pod_resources.proto kineto_protos/pprof/profile.proto kineto_protos/pyroscope/push.proto

clean:
	rm -rf $(VENV) .venv-* build dist demo-output
