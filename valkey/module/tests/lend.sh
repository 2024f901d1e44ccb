# Steps of ../test, which sources this, about values that leave from where they lie.
# shellcheck shell=bash

# Memory that is freed has other bytes at once, and stays readable: glibc returns none of it to the kernel.
freed=GLIBC_TUNABLES=glibc.malloc.perturb=165:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=8589934592

lend() { # [SECONDS]
    client_of_libvalkey lend
    loans
    half
    lend-cuts "${1:-60}"
}

# Readers and writers of the same values, beside connections that are cut, programs that are killed, faults of the device, saves, and settings that
# change. Half of the time is without IO threads, and a fourth with 4 and with 7: from 7 on, the server hands over values of every length.
lend-cuts() { # SECONDS
    client_of_libvalkey lend
    printf '#!/bin/sh\nexec env %s MALLOC_PERTURB_=165 %s "$@"\n' "$freed" "$with_module" >"$work/with-freed"
    chmod +x "$work/with-freed"
    late
    lent_for $(($1 / 2))
    lent_for $(($1 / 4)) "${in_threads[@]}"
    lent_for $(($1 / 4)) "${in_threads[@]/#4/7}"
}

# A client that is freed with a value in flight, which is deleted, receives no more of it: what it reads later is of its window. The connection could deliver
# for a minute.
late() {
    local module="$module linger 60000000"
    start "$work/with-freed"
    sets_long
    holds
    is 1 other DEL long
    is 1 other CLIENT KILL LADDR "$SERVER:6379"
    touch "$work/lend-stop"
    wait "$last" || { cat "$work/holds" && return 1; }
    is 1 field rdma_engine rdma_engine_lent_aborted
    if grep 'RDMA: a connection is closed that lends' "$work/log"; then return 1; fi
    other SHUTDOWN NOSAVE
    wait "$server"
    server=
}

# Which values are lent, and what is in flight: with a client that reads none of it, also when its value is deleted, and when it is killed.
loans() {
    start "$with_module"
    is OK other CONFIG SET rdma_engine.lend-from 100kb
    is $'rdma_engine.lend-from\n102400' other CONFIG GET rdma_engine.lend-from
    zeros 99999 | other -x SET short >"$work/said"
    sets_long
    [ "$(cli GET short | wc -c)" -eq 100000 ]
    within 60 comes_to '0 0 0 0 0' lent
    gets_long
    within 60 comes_to '1 9000000 0 0 0' lent
    # Not so much may be in flight, or nothing is to be lent: all three parts of it are copied.
    is OK other CONFIG SET rdma_engine.lend-bytes 1mb
    gets_long
    within 60 comes_to '1 9000000 3 0 0' lent
    is OK other CONFIG SET rdma_engine.lend-bytes 256mb rdma_engine.lend-from 0
    gets_long
    within 60 comes_to '1 9000000 3 0 0' lent
    is OK other CONFIG SET rdma_engine.lend-from 100kb
    holds
    is 1 other DEL long
    [ "$(field memory used_memory)" -gt 9000000 ]
    is 1 other CLIENT KILL LADDR "$SERVER:6379"
    is 1 field rdma_engine rdma_engine_lent_aborted
    is 0 field rdma_engine rdma_engine_lent_in_flight
    [ "$(field memory used_memory)" -lt 9000000 ]
    killed
    sets_long
    holds
    killed
    within 60 comes_to 2 field rdma_engine rdma_engine_lent_aborted
    is 0 field rdma_engine rdma_engine_lent_in_flight
    handed_over
    stop
    # A child of this process would lack what is registered.
    echo 'int ibv_is_fork_initialized(void) { return 1; }' | cc -shared -fPIC -o "$work/fork-safe.so" -xc -
    printf '#!/bin/sh\nexec env "LD_PRELOAD=%s:$LD_PRELOAD" %s "$@"\n' "$work/fork-safe.so" "$with_module" >"$work/with-fork-safe"
    chmod +x "$work/with-fork-safe"
    start "$work/with-fork-safe"
    is 1 grep -c 'RDMA: values are copied before they are sent' "$work/log"
    sets_long
    gets_long
    within 60 comes_to '0 0 0 0 0' lent
    stop
}
# Values in flight leave half of what the module may register to new clients. The second of three parts is one too many.
half() {
    local module="$module registered_bytes 8388608"
    start "$with_module"
    is OK other CONFIG SET rdma_engine.lend-from 100kb
    sets_long
    holds
    within 60 comes_to 1 field rdma_engine rdma_engine_lent_refused
    gets_long
    killed
    stop
}
# The README's table: how many values a command's reply lends, and how long the reply is, which no error is.
handed_over() {
    local one=200001
    # As long as its value.
    is OK other CONFIG SET rdbcompression no
    zeros 200000 | other -x SET value >"$work/said"
    zeros 200000 | other -x HSET hash field >"$work/said"
    for _ in {1..4}; do zeros 200000 | other -x RPUSH list >"$work/said"; done
    lends 1 $one GETEX value
    lends 2 $((2 * one)) MGET value value
    is 1 other COPY value other
    lends 1 $one GETSET other short
    is 1 other COPY value other REPLACE
    lends 1 $one SET other short GET
    is 1 other COPY value other REPLACE
    lends 1 $one GETDEL other
    lends 0 $one GETRANGE value 0 -1
    lends 0 $one LRANGE list 0 0
    lends 0 $one LINDEX list 0
    lends 0 $one HGET hash field
    # With a type, a length, a version and a checksum.
    lends 0 $((one + 16)) DUMP value
    lends 0 $one EVAL 'return redis.call("GET", "value")' 0
    lends 1 $one LPOP list
    lends 1 $one LMOVE list moved LEFT LEFT
    # With the key's name.
    lends 1 $((one + 5)) BLPOP list 1
    lends 1 110001 ECHO "$(zeros 110000)"
}
# Of a reply, valkey-cli ends each value with a line feed.
lends() { # NUMBER LENGTH COMMAND…
    local before
    before=$(field rdma_engine rdma_engine_lent_values)
    cli "${@:3}" >"$work/said"
    [ "$(wc -c <"$work/said")" -eq "$2" ] || { echo "not $2 bytes: the reply to $3, $(head -c 100 "$work/said")" && return 1; }
    is $((before + $1)) field rdma_engine rdma_engine_lent_values || { echo "which is after $3" && return 1; }
}
zeros() { head -c "$1" /dev/zero | tr '\0' 0; }
sets_long() { is OK other EVAL 'return redis.call("SET", "long", string.rep("VL000000", 1125000))' 0; }
# valkey-cli ends it with a line feed.
gets_long() {
    [ -s "$work/long" ] || awk 'BEGIN { for (at = 0; at < 1125000; at++) printf "VL000000"; print "" }' >"$work/long"
    cli GET long | cmp - "$work/long"
}
holds() {
    rm -f "$work/lend-stop"
    background holds "${at_client[@]}" "$work/lend" "$SERVER" 6379 hold 0 "$work/lend-stop" 0
    within 60 in_flight
}
killed() { { kill -KILL "$last" && wait "$last" || true; } 2>/dev/null; }
in_flight() { [ "$(field rdma_engine rdma_engine_lent_in_flight)" -gt 0 ]; }
# The counts: values, bytes, refused, aborted, in flight.
lent() { field rdma_engine 'rdma_engine_lent_[a-z_]*' | paste -s -d ' '; }

lent_for() { # SECONDS [OPTION…]
    local end=$((SECONDS + $1)) before fault seed=$RANDOM name children=() dead=0 beyond=0 status
    local faults=(not-ready=3 key-refused queue-lost hold=200 lose spurious pair-fatal slow-ready=20)
    local client=(env LADDR="$SERVER:6379" "$work/lend")
    rm -f "$work"/lend-*
    start "$work/with-freed" "${@:2}"
    before=$(at_rest)
    is OK other CONFIG SET rdma_engine.lend-from 16384
    for name in 1 2; do
        background "lend-write-$name" "${client[@]}" "$work/socket" 0 write $((seed + name)) "$work/lend-stop" $((name - 1))
        children+=("$last")
    done
    for name in 1 4 9; do
        background "lend-read-$name" "${at_client[@]}" "${client[@]}" "$SERVER" 6379 read $((seed + name)) "$work/lend-stop" $name
        children+=("$last")
    done
    # The fourth reader kills itself, and is followed by another one. The time is too short only where nothing goes on.
    until ((SECONDS >= end && dead > 0)) && [ "$(field rdma_engine rdma_engine_lent_values)" -ge 20 ] &&
        [ "$(field rdma_engine rdma_engine_lent_aborted)" -ge 1 ]; do
        # Each round is of work that was done, however slow the machine is.
        ((SECONDS < end)) || beyond=$((beyond + 1))
        ((beyond <= 40)) || { echo "after $dead rounds, not 20 values were lent or no client was aborted: $(lent)" && return 1; }
        status=0
        # The shell tells of a program that was killed.
        { "${at_client[@]}" "${client[@]}" "$SERVER" 6379 die $((++seed)) "$work/lend-stop" 5 >"$work/lend-die" 2>&1 || status=$?; } 2>"$work/said"
        [ $status -eq 137 ] || { cat "$work/lend-die" && return 1; }
        dead=$((dead + 1))
        fault=${faults[RANDOM % ${#faults[@]}]}
        "$SOFTRDMA" fault --address "$SERVER" "$fault"
        if grep -h '^wrong' "$work"/lend-*; then return 1; fi
        kill -0 "$server"
    done
    touch "$work/lend-stop"
    for name in "${children[@]}"; do wait "$name" || { grep -h '^wrong' "$work"/lend-* && return 1; }; done
    grep -H . "$work"/lend-*-* | sed 's/.*lend-/    /'
    is OK other FLUSHALL SYNC
    within 120 comes_to 0 field rdma_engine rdma_engine_connections
    echo "    lent: $(lent): values, bytes, refused, aborted, in flight; $dead programs were killed;" \
        "$(field stats io_threaded_writes_processed) writes by threads"
    is 0 field rdma_engine rdma_engine_lent_in_flight
    [ "$(field memory used_memory)" -lt 33554432 ]
    within 60 is_as_before "$before" || { echo "$before before, and now $(now)" && return 1; }
    if grep 'RDMA: a connection is closed that lends\|RDMA: the device keeps' "$work/log"; then return 1; fi
    stop
}

# The server's instructions for a GET, by callgrind, which counts each copied byte as one: without a copy, with it, and over TCP. A difference of two
# runs, without those of the server's timer.
lend-cost() {
    local length count transport
    printf '#!/bin/sh\nexec valgrind --quiet --tool=callgrind --callgrind-out-file=%s %s "$@"\n' "$work/counts" "$with_module" >"$work/with-counts"
    chmod +x "$work/with-counts"
    start "$work/with-counts" --port 7379 --bind 127.0.0.1 --hz 1
    printf '%10s %12s %12s %12s\n' length lent copied TCP
    for length in 65536 1048576 33554432; do
        count=$((length > 1048576 ? 2 : 10))
        other EVAL 'return redis.call("SET", "long", string.rep("x", ARGV[1]))' 0 "$length" >"$work/said"
        printf '%10s' "$length"
        for transport in lent copied tcp; do
            is OK other CONFIG SET rdma_engine.lend-from "$([ "$transport" = lent ] && echo 4096 || echo 0)" >"$work/said"
            printf ' %12s' "$(per_get "$transport" "$count")"
        done
        echo
    done
    other SHUTDOWN NOSAVE
    wait "$server"
    server=
}
per_get() { # TRANSPORT COUNT
    local fewer more
    gets "$1" "$2" >"$work/said"
    fewer=$(gets "$1" "$2") more=$(gets "$1" $(($2 * 3)))
    echo $(((more - fewer) / ($2 * 2)))
}
gets() { # TRANSPORT COUNT; prints the server's instructions
    local client=("${benchmark[@]}")
    [ "$1" != tcp ] || client=("$VALKEY_BIN/valkey-benchmark" -p 7379)
    callgrind_control --zero "$server" >"$work/control" 2>&1
    "${client[@]}" -c 1 -n "$2" -q GET long >"$work/benchmark"
    rm -f "$work"/counts.*
    callgrind_control --dump "$server" >"$work/control" 2>&1
    callgrind_annotate --inclusive=yes --threshold=100 "$work"/counts.* 2>"$work/control" | tr -d , |
        awk '/PROGRAM TOTALS/ { all = $1 } /:serverCron / { timer = $1 } END { print all - timer }'
}

# Mistakes in the module, one at a time: `lend-cuts` must notice each by what a client receives, or by what the module says.
mutants() {
    local patch name begun said=$work/of-mutant
    for patch in "$here"/mutants/*.patch; do
        name=$(basename "$patch" .patch) begun=$SECONDS
        rm -rf "$work/mutant"
        mkdir -p "$work/mutant/valkey/module" "$work/mutant/vkrdma/lib"
        cp "$here"/*.[ch] "$here/Makefile" "$work/mutant/valkey/module"
        patch --quiet --strip=1 --directory="$work/mutant" --input="$PWD/$patch"
        ln -s "$PWD/rdma-ffi/include" "$work/mutant/vkrdma"
        ln -s "$target/release/libvkrdma.a" "$work/mutant/vkrdma/lib"
        make --quiet -C "$work/mutant/valkey/module" VALKEY_SRC="$source" OUT="$work/mutant" VKRDMA="$work/mutant/vkrdma"
        if MODULE=$work/mutant/valkey-rdma-engine.so SOFTRDMA=$SOFTRDMA CONFORMANCE=$CONFORMANCE "$here/test" lend-cuts=600 >"$said" 2>&1; then
            echo "$name: nothing was noticed" && return 1
        fi
        grep -m 1 '^wrong \(value\|part\|length\) of\|RDMA: a connection is closed that lends' "$said" >"$work/said" || { cat "$said" && return 1; }
        echo "$name: within $((SECONDS - begun)) s: $(cat "$work/said")"
    done
}
