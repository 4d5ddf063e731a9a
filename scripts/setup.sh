#!/bin/sh
# Create the virtual environment $1 and install Outrider into it, editable, with every extra.
# Quiet on success; on failure, the end of the log. PYTHON=/path/to/python chooses the interpreter.
set -eu

venv=${1:-.venv}
log=$venv/setup.log

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

say() { if [ -t 2 ] && [ "${CI:-}" != true ]; then echo "$1" >&2; fi; }

fail() {
    echo "set-up failed: $1" >&2
    if [ -s "$log" ]; then
        grep -v '^WARNING: ' "$log" | tail -n 25 >&2
        echo "(the whole log: $log)" >&2
    fi
    exit 1
}

if ! { [ -x "$venv/bin/python" ] && recent "$venv/bin/python"; }; then
    python=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if recent "$candidate"; then python=$candidate && break; fi
    done
    if [ -z "$python" ]; then
        found=$("${PYTHON:-python3}" --version 2>/dev/null || true)
        fail "Outrider needs Python 3.11 or newer; ${PYTHON:-python3} is: ${found:-missing or not runnable}. Set PYTHON=/path/to/python3.11."
    fi
    rm -rf "$venv"
    mkdir -p "$venv"
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv" >"$log" 2>&1 || fail "'$python -m venv' does not work; is the venv module installed?"
fi

say "installing Outrider and its tools (a minute or two; log in $log)"
PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install --no-input --progress-bar off \
    --no-compile --constraint constraints.txt --editable '.[dev]' >"$log" 2>&1 </dev/null \
    || fail "pip could not install the requirements"
# pip would compile modules to bytecode on one core, which takes longer than the rest of its work.
# Some files are templates that do not compile.
"$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" >>"$log" 2>&1 </dev/null || :
say "ready"
