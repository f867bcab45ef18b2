#!/usr/bin/env bash
# Train as a configuration says:  bash launch.sh configs/demo_cpu.yaml [key.sub=value ...] [--dry-run] [--node-rank N --address HOST:PORT]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

is_ascend() { compgen -G '/dev/davinci[0-9]*' >/dev/null || command -v npu-smi >/dev/null; }

source_set_env() {  # $1: what it is; other arguments: where its set_env.sh may lie. The first is sourced, its words go to stderr
    local what=$1 file
    shift
    for file in "$@"; do
        [[ -f $file ]] || continue
        set --  # the file would take our arguments for its own
        set +eu  # and was not written for these
        # shellcheck disable=SC1090
        source "$file" >&2
        set -eu
        return
    done
    echo "launch.sh: $what is not set up, and no set_env.sh was found in: ${*}; source yours first" >&2
}

set_up_cann() {  # what torch_npu loads: the toolkit, and NNAL's operators for transformers
    local places=("$HOME/Ascend" /usr/local/Ascend)
    [[ -n ${ASCEND_HOME_PATH:-} ]] || source_set_env "CANN" "${places[@]/%//ascend-toolkit/set_env.sh}"
    [[ -n ${ATB_HOME_PATH:-} ]] || source_set_env "CANN's NNAL" "${places[@]/%//nnal/atb/set_env.sh}"
}

if [[ $# -eq 0 ]]; then
    echo "usage: bash launch.sh CONFIG.yaml [key.sub=value ...] [--dry-run] [--node-rank N --address HOST:PORT]" >&2
    echo "configurations: $here/configs" >&2
    exit 2
fi
python=$(bash "$here/setup.sh")
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
if is_ascend; then
    PATH=$(dirname "$python"):$PATH  # NNAL asks `python3` how its torch was built
    set_up_cann
fi
exec "$python" -m pasync.launch "$@"  # exec: signals reach the launcher itself
