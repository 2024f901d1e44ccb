"""Sets and gets a value of 32 MiB in one registered arena, in a store inside this process.

With an address as its argument, in a Valkey: python large.py rdma://192.0.2.1:6379
"""

import sys

import valkey_rdma

LENGTH = 32 << 20

with valkey_rdma.Client(sys.argv[1] if len(sys.argv) > 1 else "embedded://example") as client:
    arena = bytearray(2 * LENGTH)
    client.register(arena)
    sent, received = memoryview(arena)[:LENGTH], memoryview(arena)[LENGTH:]
    sent[:] = bytes(range(256)) * (LENGTH // 256)

    client.set_from("example", sent)
    length = client.get_into("example", received)
    client.delete("example")

    if length != LENGTH or sent != received:
        sys.exit(f"{length} bytes came back of {LENGTH}, or other ones")
    counts = client.counts
    print(f"sent without a copy: {counts.bytes_lent / LENGTH:.1%} of {LENGTH >> 20} MiB")
    print(f"received without a copy: {counts.bytes_landed / LENGTH:.1%}")
