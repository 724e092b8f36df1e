#!/usr/bin/env bash
# Runs the agent's unit tests under every CPython from the agent's floor on that is found on PATH, in pyenv or among
# those that `make newer-pythons` has made, but for that of .venv, with which `make test-all` runs them.
# Each gets a small virtual environment in .venv-pythons/, which is reused.
set -euo pipefail
cd "$(dirname "$0")/.."
own=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
users=tests/unit/agent/sources/cupti/test_libcupti_users.py
failed=() ran=() packages=('pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3')
for version in 3.9 3.10 3.11 3.12 3.13 3.14 3.15; do
    [ "$version" != "$own" ] || continue
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
    # Most of the time they wait, so there are more workers than in the Makefile.
    # C programs, which do not depend on the Python that starts them, are left out. pytest-xdist has a thread of its own,
    # of which os.fork() warns.
    PYTHONPATH=agent:protos "$venv/bin/python" -m pytest -q -p no:cacheprovider -n 5 --dist worksteal tests/unit/agent \
        -W 'ignore:This process:DeprecationWarning' --ignore tests/unit/agent/native \
        --deselect "$users::test_the_real_library_answers_through_its_gates_as_without" \
        --deselect "$users::test_calls_that_cross_a_block_have_gates_even_if_the_library_alone_has_room" \
        --deselect "$users::test_calls_have_gates_between_the_segments_of_a_library_that_is_linked_for_large_pages" \
        --deselect "$users::test_gates_are_placed_where_a_program_leaves_hardly_any_room_or_their_lack_is_said" ||
        failed+=("$version")
done
[ ${#ran[@]} -gt 0 ] || { echo "no Python from 3.9 on was found" >&2; exit 1; }
[ ${#failed[@]} -eq 0 ] || { echo "failed under Python ${failed[*]}" >&2; exit 1; }
echo "the agent's tests pass under Python ${ran[*]}"
