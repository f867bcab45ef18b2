#!/usr/bin/env bash
# All tests, the quick ones first, one on each core:  bash tests/run.sh [--set npu-versions] [pytest arguments]
# A worker's tests need up to 6 GB; `-n 0` runs them one after the other, with a terminal and all cores each.
# --set: on the versions of requirements/SET.txt, in a venv of its own (setup.sh), instead of this machine's.
set -euo pipefail
MOST_WORKERS=4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
set=()
if [[ ${1:-} == --set ]]; then
    set=("${2:?--set needs a name}")
    shift 2
fi
python=$(bash "$here/setup.sh" "${set[@]}")
cd "$here"
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
workers=$(($(nproc) < MOST_WORKERS ? $(nproc) : MOST_WORKERS))
status=0
for part in tests/unit tests/contract tests/system; do
    echo "== $part"
    code=0
    "$python" -m pytest "$part" -n "$workers" "$@" || code=$?
    [[ $code -eq 0 || $code -eq 5 ]] || status=1  # 5: the arguments select no test of this part
done
exit $status
