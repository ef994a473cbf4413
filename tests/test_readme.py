"""The README tells the truth: its examples run, its tables are complete."""

import pathlib
import re
import subprocess
import sys

import pytest

from overspill import policies
from overspill.zoo.sharding import PRESETS

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"<!-- example -->\n```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(example, tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "Kept for the backward pass" in result.stdout


def test_there_are_examples():
    assert len(EXAMPLES) == 9
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 18


def test_every_preset_is_in_the_table():
    named = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert named == [*policies.presets(), *PRESETS]


def test_make_has_the_two_commands():
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{command}:" in makefile
