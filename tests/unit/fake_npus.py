"""An `npu-smi` for tests: prints what the vendor's tool prints, in its layout, about a machine of the test's choice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

RULE = "+===========================+===============+====================================================+"
SCRIPT = f"#!{sys.executable}\n" + "import json, sys\nprint(json.load(open(__file__ + '.json'))[' '.join(sys.argv[1:])])\n"


def mapping(ids: list[int]) -> str:
    """`npu-smi info -m` of a machine or container with these NPUs: logic ids count from 0; every card also has a controller."""
    rows = [f"{'NPU ID':<31}{'Chip ID':<31}{'Chip Logic ID':<31}Chip Name"]
    for logic, npu in enumerate(ids):
        rows += [f"{npu:<31}{0:<31}{logic:<31}Ascend 910B3", f"{npu:<31}{1:<31}{'-':<31}Mcu"]
    return "".join(f"\t{row}\n" for row in rows)


def health(npu: int, state: str) -> str:
    """`npu-smi info -t health -i N`."""
    rows = {"NPU ID": npu, "Chip Count": 1, "Chip ID": 0, "Health Status": state, "Error Code": "NA", "Error Information": "NA"}
    return "".join(f"\t{name:<31}: {value}\n" for name, value in rows.items())


def overview(ids: list[int], users: dict[int, list[tuple[int, str, int]]]) -> str:
    """`npu-smi info`: a table of chips and one of processes (pid, name, MB)."""
    rows = ["+------------------------------------------------------------------------------------------------+"]
    rows += ["| npu-smi 25.2.0                   Version: 25.2.0                                               |", RULE]
    for n, npu in enumerate(ids):
        rows += [f"| {npu:<5} 910B3               | OK            | 93.6        36                0    / 0             |"]
        rows += [f"| 0                         | 0000:C{n}:00.0  | 0           0    / 0          3364 / 65536         |", RULE]
    rows += ["| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |", RULE]
    for npu in ids:
        for pid, name, megabytes in users.get(npu, []):
            rows.append(f"| {npu:<7} 0                 | {pid:<13} | {name:<24} | {megabytes:<23} |")
        if npu not in users:
            rows.append(f"| No running processes found in NPU {npu:<61}|")
        rows.append(RULE)
    return "\n".join(rows)


def install(
    folder: Path, ids: list[int], states: dict[int, str] | None = None, users: dict[int, list[tuple[int, str, int]]] | None = None
) -> None:
    """Put an `npu-smi` into `folder` that answers for NPUs `ids`, healthy and free unless said otherwise."""
    answers = {"info -m": mapping(ids), "info": overview(ids, users or {})}
    answers |= {f"info -t health -i {npu}": health(npu, (states or {}).get(npu, "OK")) for npu in ids}
    script = folder / "npu-smi"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    (folder / "npu-smi.json").write_text(json.dumps(answers))
