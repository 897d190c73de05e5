#!/bin/sh
# Makes .venv as requirements.lock says, or does nothing if it is already so.
# Called by the Makefile.  $1: the Python to use; empty: the one .venv has, else the first that fits.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.course-stamp

# uv must never fetch a Python of its own, and must trust what the system trusts.
export UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=1

die() { echo "make: $*" >&2; exit 1; }
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; }
identity() { "$1" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)' 2>/dev/null; }
wanted() {
    printf '%s\n' "$PWD"
    identity "$venv/bin/python"
    cat requirements.lock pyproject.toml tools/env.sh tools/jupyter/*.json tools/jupyter/*/*.json | cksum
}

# 0. A checkout that was moved or copied: the scripts in its .venv name the old place.
if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" != "$PWD" ]; then rm -rf "$venv"; fi

# 1. Which Python?
given=${1:-}
python=
if [ -n "$given" ]; then
    command -v "$given" >/dev/null 2>&1 || die "there is no $given here. Give a Python 3.11, 3.12 or 3.13: make ... PYTHON=python3.12"
    fits "$given" || die "$given is $("$given" -V 2>&1); the course needs Python 3.11, 3.12 or 3.13."
    python=$given
    # Another Python than the one .venv was made with: make .venv again.
    if [ "$(identity "$python")" != "$(identity "$venv/bin/python" || true)" ]; then rm -rf "$venv"; fi
elif fits "$venv/bin/python"; then
    python=$venv/bin/python
else
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if fits "$candidate"; then python=$candidate; break; fi
    done
    [ -n "$python" ] || die "no Python 3.11, 3.12 or 3.13 on PATH (python3 is: $(python3 -V 2>&1 | head -n 1)). Install one, or name it: make ... PYTHON=/path/to/python3.12"
fi

# 2. Nothing changed: done.
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted)" ]; then exit 0; fi

# 3. The environment itself, and uv.
offline="could not download packages. Check the network connection (or HTTPS_PROXY), then run the same command again."
rm -f "$stamp"
echo "Setting up .venv (once; later runs start at once) ..."
if uv --version >/dev/null 2>&1; then uv=uv; else uv=$venv/bin/uv; fi
if ! fits "$venv/bin/python"; then
    rm -rf "$venv"
    if [ "$uv" = uv ]; then
        uv venv --quiet --seed --python "$(command -v "$python")" "$venv" || { rm -rf "$venv"; die "$offline"; }
    elif ! log=$("$python" -m venv "$venv" 2>&1); then
        rm -rf "$venv"
        case $log in
            *ensurepip*|*"No module named venv"*)
                die "$python cannot make an environment: its venv module is missing. On Debian or Ubuntu: sudo apt install python3-venv. Or install uv." ;;
            *) die "$python -m venv failed: $log" ;;
        esac
    fi
fi
if [ "$uv" != uv ] && ! "$uv" --version >/dev/null 2>&1; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 2 "uv>=0.5,<1" || die "$offline"
fi

# 4. Exactly what the lock says, then the project itself, in place.
"$uv" pip install --quiet --python "$venv/bin/python" --require-hashes -r requirements.lock || die "$offline"
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation -e . \
    || die "the project itself could not be installed; the lines above say why."
"$venv/bin/python" -c 'import matplotlib.font_manager' >/dev/null 2>&1 || die "matplotlib does not import in .venv. Try: make clean"
wanted > "$stamp"
