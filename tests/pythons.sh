#!/usr/bin/env bash
# Runs the agent's unit tests under every CPython from the agent's floor on that is found on PATH, in pyenv or among
# those that `make newer-pythons` has made.
# Each gets a small virtual environment in .venv-pythons/, which is reused.
set -euo pipefail
cd "$(dirname "$0")/.."
failed=() ran=() packages=('pytest>=8' 'pytest-timeout>=2.3')
for version in 3.9 3.10 3.11 3.12 3.13 3.14 3.15; do
    python=""
    for candidate in "$(command -v "python$version" || true)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python \
        "$PWD/build/newer-pythons/root/usr/local/bin/python$version"; do
        # a pyenv shim exists for versions that are not active: it must run, not only be there
        if [ -x "$candidate" ] && "$candidate" -c 'import ctypes' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] || continue
    venv=.venv-pythons/$version
    if [ ! -e "$venv/.installed" ]; then
        "$python" -m venv --without-pip "$venv"  # Debian's Python has no pip of its own
        # pip runs itself under that Python, which a pip that is older than it may not bear; uv does not.
        .venv/bin/pip --python "$venv/bin/python" install --quiet --disable-pip-version-check "${packages[@]}" 2>/dev/null ||
            .venv/bin/uv pip install --quiet --python "$venv/bin/python" "${packages[@]}"
        touch "$venv/.installed"
    fi
    echo "== $("$venv/bin/python" --version)"
    ran+=("$version")
    # The sanitizer runs of the collector do not depend on the Python that starts them.
    PYTHONPATH=agent:protos "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/unit/agent \
        --deselect tests/unit/agent/native/test_native_build.py || failed+=("$version")
done
[ ${#ran[@]} -gt 0 ] || { echo "no Python from 3.9 on was found" >&2; exit 1; }
[ ${#failed[@]} -eq 0 ] || { echo "failed under Python ${failed[*]}" >&2; exit 1; }
echo "the agent's tests pass under Python ${ran[*]}"
