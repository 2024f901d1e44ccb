# Steps of ../test, which sources this, about the connections that a server makes: to its primary, and to targets of slots.
# shellcheck shell=bash

# Builds modules of tests/ in the folder of this run.
modules_of_tests() { # NAME…
    local one
    for one; do cc -Wall -Wextra -Werror -shared -fPIC -I"$source/src" -o "$work/$one.so" "$here/tests/$one.c"; done
}

replication() { # [SECONDS]
    modules_of_tests takes-connect read-only-table as-tls
    "$here/tests/replication.py" "$with_module" "$module" "$SOFTRDMA" "$work" "$@"
}

replication-versions() {
    local newest=$LAB_CACHE/valkey
    [ "$of" != "$newest" ] || die 'the newest server takes an older one beside it: --of SUITE'
    mkdir -p "$work/newest"
    make --quiet -C "$here" VALKEY_SRC="$newest/src" OUT="$work/newest"
    NEWEST="$newest-module/bin/valkey-server $work/newest/valkey-rdma-engine.so" \
        "$here/tests/replication.py" "$with_module" "$module" "$SOFTRDMA" "$work" versions
}

replication-soak() { # [MINUTES]
    "$here/tests/replication_soak.py" "$with_module" "$module" "$SOFTRDMA" "$work" "${1:-2}"
}

hostile-primary() { # [STEP]
    bridged
    modules_of_tests links
    "$here/tests/hostile_primary.py" "$with_module" "$module" "$SOFTRDMA" "$work" "$CONFORMANCE" "$BRIDGE" "$@"
}

replication-cost() { # [ROUNDS]
    [ -n "${SYNC:-}" ] || { cargo build --quiet --release --locked -p rdma-snapshot && SYNC=$target/release/valkey-rdma-sync; }
    "$here/tests/replication_cost.py" "$with_module" "$module" "$SOFTRDMA" "$work" "$VALKEY_BIN/valkey-benchmark" "$SYNC" "$@"
}
