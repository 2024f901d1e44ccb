# valkey-cli by RDMA, linked with our library, does in each of its modes what it does by TCP: sourced by ../test.
# shellcheck shell=bash disable=SC2154

tcp() { "$VALKEY_BIN/valkey-cli" -p "$tcp_port" "$@"; }
rdma() { on 192.0.2.2 -- "$relinked/valkey-cli" --rdma -h 192.0.2.1 -p "$rdma_port" "$@"; }

# A mode that ends by itself: what it prints, and how it ends. What is different in any two runs is left out.
same() { # FILE_FOR_INPUT ARGUMENT…
    local how status
    for how in tcp rdma; do
        status=0
        # The name of a file of its own, for those that write one.
        "$how" "${@:2}" <"$1" >"$work/$how.out" 2>&1 || status=$?
        echo "status $status" >>"$work/$how.out"
        sed -i -E 's/[0-9]+ bytes|offset [0-9]+|[0-9]+\.[0-9]+ seconds//g; /^id|^ *[0-9]+\) \(integer\)/d' "$work/$how.out"
    done
    diff -u "$work/tcp.out" "$work/rdma.out" || { echo "valkey-cli ${*:2}: RDMA differs from TCP" >&2 && exit 1; }
}

# A mode that goes on until it is ended: it prints a line when somebody does something.
endless() { # WHAT_TELLS_THAT_IT_HAS_BEGUN WHAT_IT_PRINTS_THEN COMMAND_OF_ANOTHER ARGUMENT…
    local how mode
    for how in tcp rdma; do
        # As a program of its own, so that it can be ended.
        if [ "$how" = tcp ]; then
            "$VALKEY_BIN/valkey-cli" -p "$tcp_port" "${@:4}" </dev/null >"$work/$how.out" 2>&1 &
        else
            "$softrdma" run --address 192.0.2.2 -- "$relinked/valkey-cli" --rdma -h 192.0.2.1 -p "$rdma_port" "${@:4}" </dev/null \
                >"$work/$how.out" 2>&1 &
        fi
        mode=$!
        servers+=("$mode")
        await "$work/$how.out" "$1" "$mode"
        # shellcheck disable=SC2086 # words
        tcp $3 >/dev/null
        await "$work/$how.out" "$2" "$mode"
        kill "$mode" && wait "$mode" 2>/dev/null || true
    done
}

modes() { # TCP_PORT RDMA_PORT
    local tcp_port=$1 rdma_port=$2 number how
    tcp CONFIG SET repl-diskless-sync-delay 0 >/dev/null
    for number in $(seq 20000); do printf 'SET pipe:%d %d\r\n' "$number" "$number"; done >"$work/input"
    echo 'return {KEYS[1], ARGV[1]}' >"$work/script"
    printf 'PING\nECHO again\nNO SUCH\n' >"$work/lines"
    tcp FLUSHALL >/dev/null
    same "$work/input" --pipe
    [ "$(tcp DBSIZE)" -eq 20000 ]
    printf 'NO SUCH COMMAND\r\n' >"$work/wrong"
    same "$work/wrong" --pipe
    tcp FLUSHALL >/dev/null
    for number in $(seq 50); do tcp SET "key:$number" "$(head -c "$number" /dev/zero | tr '\0' x)" >/dev/null; done
    same /dev/null -r 3 -i 0.01 PING
    same "$work/lines"
    same "$work/script" -x SET stdin
    same /dev/null --eval "$work/script" key , argument
    same /dev/null --bigkeys
    same /dev/null --memkeys
    same /dev/null -3 HGETALL nothing
    same /dev/null --csv MGET key:1 key:2
    same /dev/null --no-raw DEBUG JMAP
    # It asks for an eviction policy that counts. Each key begins with 5; a read adds 1 here, and time takes none away.
    same /dev/null --hotkeys
    for number in maxmemory-policy:allkeys-lfu lfu-decay-time:0 lfu-log-factor:0; do tcp CONFIG SET "${number%:*}" "${number#*:}" >/dev/null; done
    tcp FLUSHALL >/dev/null
    for number in $(seq 50); do tcp SET "key:$number" "$number" >/dev/null; done
    tcp -r 100 GET key:7 >/dev/null
    same /dev/null --hotkeys
    grep -q 'counter: 105[[:space:]]*keyname: "key:7"' "$work/rdma.out" || { cat "$work/rdma.out" && exit 1; }
    tcp CONFIG SET maxmemory-policy noeviction >/dev/null
    # One that listens nowhere: neither waits.
    [ "$({ rdma -p 1 PING 2>&1 || true; } | grep -c 'nothing listens there for RDMA$')" -eq 1 ]
    for how in tcp rdma; do
        "$how" --scan | sort >"$work/$how.out"
        "$how" --rdb "$work/$how.rdb" >/dev/null 2>&1
        "$how" --functions-rdb "$work/$how.functions" >/dev/null 2>&1
        for number in "$work/$how.rdb" "$work/$how.functions"; do
            case $(head -c 6 "$number") in REDIS* | VALKEY) ;; *) echo "$number is no RDB" >&2 && exit 1 ;; esac
        done
        "$how" --latency --raw -i 1 </dev/null >"$work/latency"
        [ "$(awk '{ print NF }' "$work/latency")" -eq 4 ]
    done
    cmp "$work/tcp.out" "$work/rdma.out"
    endless OK '"ECHO" "seen"' 'ECHO seen' MONITOR
    endless '^1$' 'to-all' 'PUBLISH news to-all' SUBSCRIBE news
    endless 'rdb-filter-only' '"SET","replicated"' 'SET replicated yes' --replica
    endless keys 'requests' 'PING' --stat -i 0.1
    endless 'samples)' 'seconds range' 'PING' --latency-history --no-raw -i 0.2
    echo 'valkey-cli: each mode by RDMA does what it does by TCP'
}

# A cluster that is made over RDMA. valkey-cli follows it, and says of it what it says by TCP.
cluster() { # PORT…
    local key how number
    local -a create=("$softrdma" run --address 127.0.0.1 -- "$relinked/valkey-cli" --rdma)
    tcp() { "$VALKEY_BIN/valkey-cli" "$@"; }
    rdma() { "${create[@]}" "$@"; }
    start_cluster -- "$@"
    for key in a b c d e f g h; do
        [ "$(rdma -c -p "$1" SET "$key" "$key")" = OK ]
        [ "$(rdma -c -p "$2" GET "$key")" = "$key" ]
    done
    # Each node has some of them, so that each was found by way of another.
    for number in "$@"; do [ "$(rdma -p "$number" DBSIZE)" -gt 0 ]; done
    # Without -c it is told where to go.
    same /dev/null -p "$1" MGET a
    same /dev/null -p "$2" GET a
    same /dev/null --cluster check "127.0.0.1:$1"
    same /dev/null --cluster info "127.0.0.1:$2"
    same /dev/null --cluster call "127.0.0.1:$3" DBSIZE
    echo 'valkey-cli: makes a cluster over RDMA, and follows it'
}
