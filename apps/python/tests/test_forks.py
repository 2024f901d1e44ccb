"""What a forked child may do: nothing to its parent's clients. trust/forks/run has the same for other faces."""

import pathlib
import subprocess
import sys

import pytest
import servers

import valkey_rdma

DEEDS = ["_exit", "exit", "return", "close", "drop", "use", "exec", "multiprocessing"]


@pytest.fixture(scope="module", params=["embedded", "tcp", "rdma"])
def server(request):
    if request.param != "rdma":
        yield "embedded://forks" if request.param == "embedded" else valkey_rdma.serve_embedded("forks")
        return
    if reason := servers.missing():
        pytest.skip(reason)
    one = servers.Servers(1, 7181)
    yield one.url
    one.close()


@pytest.mark.parametrize("parent", ["idle", "busy"])
@pytest.mark.parametrize("face", ["client", "pool", "async"])
def test_children_change_nothing_for_their_parent(server, face, parent):
    program = pathlib.Path(__file__).with_name("forks.py")
    for deed in DEEDS:
        command = [sys.executable, program, server, deed, parent, face]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert (ended.returncode, ended.stdout) == (0, "done\n"), f"{deed}: {ended.stderr}"
