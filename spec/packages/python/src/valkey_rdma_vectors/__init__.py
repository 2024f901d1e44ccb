"""The test vectors of Valkey over RDMA as data: what control messages mean, and what a connection does when.

>>> trace = traces()["close"]["traces"][0]

The file README.md beside the vectors tells how to read them.
"""

import json
from importlib.resources import files

__version__ = "@VERSION@"


def _read(folder):
    names = (files(__name__) / "vectors" / folder).iterdir()
    return {file.name.removesuffix(".json"): json.loads(file.read_text()) for file in sorted(names, key=lambda file: file.name)}


def control():
    """The files of control messages by name, in the format control-1."""
    return _read("control")


def traces():
    """The files of traces by name, in the format trace-1."""
    return _read("trace")


def schemas():
    """The JSON Schemas of both formats, and of the protocol between a runner and an implementation, by name."""
    return _read("schema")
