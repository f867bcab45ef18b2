#!/usr/bin/env bash
# All tests, the quick ones first, side by side on all cores:  bash tests/run.sh [--set npu-versions] [pytest arguments]
# -n 0: one after the other, each with all cores and the terminal.
# --set: on the versions of requirements/SET.txt, in a venv of its own (setup.sh), instead of this machine's.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
set=()
if [[ ${1:-} == --set ]]; then
    set=("${2:?--set needs a name}")
    shift 2
fi
python=$(bash "$here/setup.sh" "${set[@]}")
cd "$here"
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}

side_by_side() {  # nothing where pytest-xdist is not; a test needs a core, and 8 GB if it starts the demo
    "$python" -c 'import xdist' 2>/dev/null || return 0
    local cores memory
    cores=$(nproc)
    memory=$(awk '/^MemTotal/ { print int($2 / 8000000) }' /proc/meminfo)
    echo "-n $((cores < memory ? cores : memory))"
}

read -ra parallel <<<"$(side_by_side)"
status=0
for part in tests/unit tests/contract tests/system; do
    echo "== $part"
    code=0
    "$python" -m pytest "$part" "${parallel[@]}" "$@" || code=$?
    [[ $code -eq 0 || $code -eq 5 ]] || status=1  # 5: the arguments select no test of this part
done
exit $status
