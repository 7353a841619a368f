# Sourced by deploy/local.sh and tests/run.sh, from the repository's root.
#
# ensure_venv EXTRAS: make .venv and install this checkout with EXTRAS (node,images, or node,test) into it, as deploy/install.py
# says. Does nothing when the last installation finished, had these extras, and neither that nor pyproject.toml has changed
# since.

ensure_venv() {
    local extras=$1 python=${PYTHON:-python3} stamp=.venv/.tandem-installed wanted
    if [ "$(uname -s)" != Linux ]; then
        echo "error: Tandem runs on Linux, this is $(uname -s); docs/operations.md, Containers, says how to run it in one" >&2
        return 1
    fi
    if [ ! -x .venv/bin/python ]; then
        if ! command -v "$python" >/dev/null; then
            echo "error: $python not found; Python 3.11 or newer is needed (set PYTHON=/path/to/python)" >&2
            return 1
        fi
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "error: $("$python" --version 2>&1) is too old; Python 3.11 or newer is needed" \
                "(set PYTHON=/path/to/python)" >&2
            return 1
        fi
        if ! "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 14))'; then
            echo "note: $("$python" --version 2>&1) is newer than 3.13, the newest that was tried" >&2
        fi
        echo "making .venv with $("$python" --version 2>&1)"
        if ! "$python" -m venv .venv; then
            rm -rf .venv
            echo "error: '$python -m venv' failed; on Debian and Ubuntu install the package python3-venv" >&2
            return 1
        fi
    fi
    wanted="$extras $(cat pyproject.toml deploy/install.py | cksum) $PWD"
    if [ -f "$stamp" ]; then
        case "$(cat "$stamp")" in
            "$wanted" | "node,test ${wanted#* }") return 0 ;;
        esac
    fi
    echo "installing tandem-serve[$extras] into .venv (a few minutes the first time)"
    rm -f "$stamp"
    .venv/bin/python deploy/install.py "$extras" || return 1
    printf '%s' "$wanted" >"$stamp"
}
