#!/usr/bin/env bash
# All tests, the quick ones first:  bash tests/run.sh [--set npu-versions] [pytest arguments]
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
status=0
for part in tests/unit tests/contract tests/system; do
    echo "== $part"
    code=0
    "$python" -m pytest "$part" "$@" || code=$?
    [[ $code -eq 0 || $code -eq 5 ]] || status=1  # 5: the arguments select no test of this part
done
exit $status
