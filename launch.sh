#!/usr/bin/env bash
# Train as a configuration says:  bash launch.sh configs/demo_cpu.yaml [key.sub=value ...] [--dry-run]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ $# -eq 0 ]]; then
    echo "usage: bash launch.sh CONFIG.yaml [key.sub=value ...] [--dry-run]     (configurations: $here/configs)" >&2
    exit 2
fi
python=$(bash "$here/setup.sh")
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m pasync.launch "$@"  # exec: signals reach the launcher itself
