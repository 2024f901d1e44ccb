# Steps of ../test, which sources this, about the server's process: what its loop does in which order, its forks and its end.
# shellcheck shell=bash

# Builds a program of tests/ with the client library of Valkey's tree.
client_of_libvalkey() { # NAME
    local library=$LAB_CACHE/valkey/src/deps/libvalkey
    # shellcheck disable=SC2046
    cc -w -I"$library/include" -I"$library/include/valkey" -I"$library/src" -o "$work/$1" "$here/tests/$1.c" \
        $(find "$library/src" -name '*.c' ! -name tls.c) -lrdmacm -libverbs
}

# A program that starts the server with a library of tests/ loaded before it.
server_with() { # LIBRARY VARIABLE…
    cc -shared -fPIC -o "$work/$1.so" "$here/tests/$1.c"
    printf '#!/bin/sh\nexec env %s "LD_PRELOAD=%s:$LD_PRELOAD" %s "$@"\n' "${*:2}" "$work/$1.so" "$with_module" >"$work/with-$1"
    chmod +x "$work/with-$1"
}

# Clients write while they receive large replies, which a server sends in parts. A Unix socket shows that the server and the test are right.
synced() { # [WRITES]
    client_of_libvalkey synced
    server_with slow-fsync "SYNCED=$work/on-disk"
    synced_by unix "${1:-2000}"
    synced_by rdma "${1:-2000}"
    synced_by rdma "${1:-2000}" "${in_threads[@]}"
}
synced_by() { # unix|rdma WRITES [OPTION…]
    local client=("$work/synced" "$work/socket" 0) one each=$((($2 + 7) / 8)) children=()
    [ "$1" = unix ] || client=("${at_client[@]}" "$work/synced" "$SERVER" 6379)
    rm -rf "$work/appendonlydir"
    head -c 8 /dev/zero >"$work/on-disk"
    start "$work/with-slow-fsync" --appendonly yes --appendfsync always --auto-aof-rewrite-percentage 0 "${@:3}"
    for one in {1..8}; do
        background "synced-$one" "${client[@]}" ask "client-$one" "$each" "$work/on-disk"
        children+=("$last")
    done
    for one in "${children[@]}"; do wait "$one"; done
    printf '%s: ' "$1${3:+ with threads}"
    cat "$work"/synced-? | "$work/synced" judge "$work"/appendonlydir/*.incr.aof
    stop
}

# A clean shutdown delivers what was written, and warns of nothing. Behind the bridge, because valkey-cli's own RDMA ends at the disconnect,
# whatever has arrived before it (VR-CLOSE-002).
ends() {
    local bridge subscriber port
    bridged
    start "$with_module" --loglevel verbose
    background bridge "${at_client[@]}" "$BRIDGE" --listen tcp://127.0.0.1:0 --connect "rdma://$SERVER:6379"
    bridge=$last
    await "$work/bridge" '^listening on' "$bridge"
    port=$(sed -n 's/^listening on tcp:.*:\([0-9]*\)$/\1/p' "$work/bridge")
    background heard "$VALKEY_BIN/valkey-cli" -p "$port" SUBSCRIBE news
    subscriber=$last
    within 30 comes_to 1 subscribers
    head -c 30000 /dev/urandom | base64 >"$work/value"
    is 1 other -x PUBLISH news <"$work/value"
    other SHUTDOWN NOSAVE
    wait "$server"
    server=
    # If the machine stood still for longer than the server waits, it says so.
    if grep -q 'RDMA: the last bytes of all connections but 0 are delivered' "$work/log"; then
        wait "$subscriber" || true
        [ "$(wc -c <"$work/heard")" -gt "$(wc -c <"$work/value")" ]
    else
        grep 'RDMA: the last bytes of all connections but [1-9]' "$work/log"
    fi
    kill "$bridge"
    wait "$bridge"
    # Beside the lines in which the server says so itself.
    if grep ' # ' "$work/log" | grep -v 'overcommit\|User requested shutdown\|ready to exit, bye bye'; then return 1; fi
    interrupted_twice
}

# Nothing may wait for a lock in exit(3), which Valkey calls in a signal handler at the second SIGINT: here in one that has interrupted a call on
# the endpoint, which does not return while the fabric stands still.
interrupted_twice() {
    local fabric idle code=0
    start "$with_module"
    is PONG cli PING
    within 30 is_idle
    stop_fabric "$work"
    background listens "$VALKEY_BIN/valkey-cli" -s "$work/socket" CONFIG SET rdma-port 6380
    within 30 is_not "$idle" system_call
    kill -INT "$server"
    await "$work/log" 'Received SIGINT scheduling shutdown'
    kill -INT "$server"
    within 60 has_ended "$server" || code=$?
    kill -CONT "$fabric"
    [ "$code" -eq 0 ]
    wait "$server" || code=$?
    server=
    [ "$code" -eq 1 ] && grep -q 'You insist... exiting now' "$work/log"
}
# The system call in which the server's main thread waits.
system_call() { cut -d ' ' -f 1 "/proc/$server/syscall"; }
# It waits for events, not for the fabric to take away the last client: epoll_wait, epoll_pwait, epoll_pwait2.
is_idle() { idle=$(system_call) && [[ $idle =~ ^(232|281|441)$ ]]; }
is_not() { [ "$("${@:2}")" != "$1" ]; }
has_ended() { [ ! -e "/proc/$1/stat" ] || [ "$(cut -d ' ' -f 3 "/proc/$1/stat")" = Z ]; }

# Connections that the server closes while it accepts them.
closed() {
    cc -shared -fPIC -I"$source/src" -o "$work/kill-at-accept.so" "$here/tests/kill-at-accept.c"
    start "$with_module" --loadmodule "$work/kill-at-accept.so" --crash-log-enabled no
    for _ in {1..20}; do (! "${cli[@]}" PING) >"$work/said" 2>&1; done
    is PONG other PING
    other SHUTDOWN NOSAVE
    wait "$server"
    server=
}

# A child that saves, for a thousand seconds, has no descriptor that the server got from librdmacm or libibverbs. softrdma's libraries have one of
# their own. lab/commands/suite kills the server then.
forked() {
    local ready=unix
    start "$with_module" --rdma-port 0 --rdb-key-save-delay 1000000000
    is OK other SET key value
    objects_of "$server" >"$work/before"
    is OK other CONFIG SET rdma-port 6379
    subscriber heard
    objects_of "$server" | comm -13 "$work/before" - >"$work/of-rdma"
    is 'Background saving started' other BGSAVE
    within 30 is_not '' child
    objects_of "$(child)" | comm -12 "$work/of-rdma" - >"$work/shared"
    echo "$(wc -l <"$work/of-rdma") sockets and pipes for RDMA, of which the child has $(wc -l <"$work/shared")"
    [ "$(wc -l <"$work/of-rdma")" -ge 3 ]
    [ "$(wc -l <"$work/shared")" -le 1 ]
    stop
}
child() { pgrep -P "$server" -f '^valkey-rdb-bgsave'; }
objects_of() { find "/proc/$1/fd" -printf '%l\n' | grep -E '^(socket|pipe):' | sort; } # PROCESS

# The endpoint fails while IO threads use it: all connections end, and the server goes on. softrdma has no second fabric for it to listen on.
failed() {
    start "$with_module" "${in_threads[@]}"
    background load "${benchmark[@]}" -c 8 -P 4 -l -d 3000 -r 100 -t set,get -q
    within 60 connected 8
    within 60 threads_read
    find_fabric "$work"
    kill -KILL "$fabric"
    await "$work/log" 'RDMA: all connections end' "$server"
    # Only this look is a client.
    within 60 comes_to 1 field clients connected_clients
    kill -KILL "$last" 2>/dev/null || true
    other SHUTDOWN NOSAVE
    wait "$server"
    server=
}
threads_read() { [ "$(field stats io_threaded_reads_processed)" -gt 100 ]; }
