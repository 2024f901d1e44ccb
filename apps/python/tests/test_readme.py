"""The examples of the README run as they stand there."""

import pathlib
import re

import pytest

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS)
def test_an_example_of_the_readme(block, capsys):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    expected = re.findall(r"print\(.*\n *# (.*)", block)
    assert capsys.readouterr().out.splitlines() == expected


def test_there_are_examples():
    assert len(BLOCKS) == 3


def test_how_it_is_installed():
    """CI runs the command, from docs/start.md."""
    assert re.findall("^ *(pip install .*)", README, re.MULTILINE) == [
        "pip install ./apps/python",
        "pip install target/wheels/valkey_rdma-*.whl",
    ]
    assert "pip install ./apps/python\n" in (pathlib.Path(__file__).parents[3] / "docs/start.md").read_text()
