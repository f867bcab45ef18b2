import re
import subprocess
from pathlib import Path

from pasync.observe.metrics import table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readme_describes_every_metric():
    assert table() in README


def test_the_readme_lists_every_module_and_nothing_that_is_gone():
    command = ["git", "ls-files", "pasync", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    modules = {Path(name).name for name in tracked.stdout.split() if not name.endswith("__init__.py")}
    tree = README.split("## What is where")[1].split("\n## ")[0]
    assert set(re.findall(r"(\w+\.py)\b", tree)) == modules


def test_commands_of_the_readme_name_files_that_exist():
    for name in re.findall(r"bash (?!runs/)([\w./]+\.sh)(?: (configs/[\w.]+))?", README):
        assert all((ROOT / part).exists() for part in name if part)
