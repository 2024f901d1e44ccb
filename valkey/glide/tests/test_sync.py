"""The blocking client, which shares the core and the C interface with the asynchronous one."""

import os

import glide_sync
import pytest
import seen

LONG = 120
TRANSPORTS = pytest.mark.parametrize(
    "transport", [glide_sync.Transport.RDMA, glide_sync.Transport.TCP], ids=["rdma", "tcp"]
)


def connect(servers, transport):
    addresses = [glide_sync.NodeAddress(servers.host, servers.ports[0])]
    advanced = {"connection_timeout": LONG * 1000, "transport": transport}
    if servers.clustered:
        advanced = glide_sync.AdvancedGlideClusterClientConfiguration(**advanced)
        return glide_sync.GlideClusterClient.create(
            glide_sync.GlideClusterClientConfiguration(addresses, request_timeout=LONG * 1000, advanced_config=advanced)
        )
    advanced = glide_sync.AdvancedGlideClientConfiguration(**advanced)
    return glide_sync.GlideClient.create(
        glide_sync.GlideClientConfiguration(addresses, request_timeout=LONG * 1000, advanced_config=advanced)
    )


@TRANSPORTS
@pytest.mark.parametrize("which", ["alone", "cluster"])
def test_commands_and_large_values(request, which, transport):
    servers = request.getfixturevalue(which)
    client = connect(servers, transport)
    try:
        for length in (0, 5, 70_000, 8 << 20):
            value = os.urandom(length)
            for number in range(6):
                assert client.set(f"{length}.{number}", value) == "OK"
                assert client.get(f"{length}.{number}") == value
        assert (seen.over_tcp(servers) > 0) == (transport is glide_sync.Transport.TCP)
    finally:
        client.close()
