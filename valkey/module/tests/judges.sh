# Steps of ../test, which sources this: the conformance suite and Valkey's own suites, clients that are killed or cut, faults, idle connections, and
# Debian's package.
# shellcheck shell=bash

suite() { # [ENVIRONMENT…]
    local command="env $* $with_module --loadmodule $module --rdma-bind {host} --rdma-port {port} --port 0 --protected-mode no --save '' \
--dir $work --enable-debug-command yes --crash-log-enabled no"
    "$SOFTRDMA" run --fabric "suite-$$" --address 127.0.0.1,::1 -- "$CONFORMANCE" run server --listen 127.0.0.1:7100 --exec "$command" \
        --name 'valkey-server with the module' --allow-disruptive --patience "${PATIENCE:-8}" --strict --out "$work/suite" | tee "$work/said"
    # Both profiles, with nothing left out.
    says '^wire contract: \([0-9]*\) of \1, hardening profile: \([0-9]*\) of \2$'
}
suite-lends() {
    local module="$module lend_from 16384"
    suite
}

# run.py ends with 0 whatever its test returned, and looks for devices where softrdma has none: so its test is called, with the address.
runtest() {
    local tree=$work/tree
    mkdir -p "$tree/src" "$tree/tests"
    cp -r "$source/tests/rdma" "$tree/tests/rdma"
    cp "$VALKEY_RDMA_TEST" "$tree/tests/rdma/rdma-test"
    printf '#!/bin/sh\nexec %s "$@" --loadmodule %s\n' "$with_module" "$module" >"$tree/src/valkey-server"
    chmod +x "$tree/src/valkey-server"
    patiently 'rdma-test gives resolving an address and a route a time of its own' at_server env PYTHONPATH="$tree/tests/rdma" python3 -c '
import sys, types
sys.modules["netifaces"] = types.ModuleType("netifaces")
import run
sys.exit(run.test_rdma(sys.argv[1]))' "$SERVER"
}

descriptors() { ls "/proc/$server/fd" | wc -l; }
# What the fabric has for the server: protection domains, regions, bytes, queues, queue pairs, identifiers.
objects() { "$SOFTRDMA" status | sed -n "s/^| valkey-server *|[^|]*|[^|]*|\(.*\)|[^|]*|$/\1/p" | tr -d ' '; }

kills() {
    local before round one burst key
    start "$with_module"
    is PONG cli PING
    within 30 comes_to 0 field rdma_engine rdma_engine_connections
    before=$(at_rest)
    for round in {1..10}; do
        burst=()
        for one in {1..10}; do
            background "victim-$one" "${benchmark[@]}" -c 2 -P 4 -l -d 20000 -r 100 -t set,get -q
            burst+=("$last")
        done
        within 60 connected 10
        # Meanwhile what was acknowledged is kept.
        for key in {1..5}; do is OK cli SET "kept:$round:$key" "$round $key"; done
        kill -KILL "${burst[@]}"
    done
    for round in {1..10}; do
        for key in {1..5}; do is "$round $key" cli GET "kept:$round:$key"; done
    done
    within 120 comes_to 0 field rdma_engine rdma_engine_connections
    within 60 is_as_before "$before"
    stop
}
# Each cut is of a connection that works, so as many follow each other as there is time for. Nothing but a cut may end a connection, and what was
# acknowledged before one is there at the end.
cuts() { # [SECONDS]
    local end left before one=0 name victim killed=0 reads children=() client=("${at_client[@]}" "$work/acknowledged" "$SERVER" 6379)
    client_of_libvalkey acknowledged
    rm -f "$work"/client-*
    start "$with_module" "${in_threads[@]}"
    is PONG cli PING
    within 30 comes_to 0 field rdma_engine rdma_engine_connections
    before=$(at_rest)
    end=$((SECONDS + ${1:-60}))
    while ((SECONDS < end)); do
        # One of six clients at a time is replaced by the next.
        name=$((one % 6)) left=$((end - SECONDS))
        [ -z "${children[name]:-}" ] || { kill -KILL "${children[name]}" && wait "${children[name]}" || true; } 2>/dev/null
        "${client[@]}" write "client-$one" "$left" >"$work/client-$one" 2>&1 &
        children[name]=$!
        within 120 test -s "$work/client-$one"
        one=$((one + 1))
        # A connection over RDMA: not that of this look.
        victim=$(other CLIENT LIST | sed -n "s/^id=\([0-9]*\) addr=$CLIENT:.*/\1/p" | shuf -n 1)
        [ -z "$victim" ] || killed=$((killed + $(other CLIENT KILL ID "$victim")))
    done
    # The last ones are not killed, and end as those that got right answers.
    for name in "${!children[@]}"; do wait "${children[name]}"; done
    reads=$(field stats io_threaded_reads_processed)
    awk '/^client-/ { if ($2 > most[$1]) most[$1] = $2 } END { for (one in most) print one, most[one] }' "$work"/client-* >"$work/all"
    "${client[@]}" read <"$work/all"
    echo "$((one > 6 ? one - 6 : 0)) clients were killed, $killed connections cut by the server, $(cat "$work"/client-* | grep -c '^lost') lost;" \
        "$reads reads by threads"
    if grep -h '^wrong' "$work"/client-*; then return 1; fi
    [ "$(cat "$work"/client-* | grep -c '^lost')" -le "$killed" ]
    [ "$killed" -gt 0 ]
    [ "$reads" -gt 0 ]
    within 120 comes_to 0 field rdma_engine rdma_engine_connections
    within 60 is_as_before "$before" || { echo "$before before, and now $(now)" && return 1; }
    echo "$before before and after: descriptors, and domains, regions, bytes, queues, pairs, identifiers"
    stop
    # Nothing was worth a line.
    if sed '1,/Ready to accept connections rdma/d; /User requested shutdown/,$d' "$work/log" | grep .; then return 1; fi
}
connected() { [ "$(field rdma_engine rdma_engine_connections)" -ge "$1" ]; }
now() { echo "$(descriptors) $(objects)"; }
# What is there once two looks agree: an earlier look by the Unix socket may still have its descriptor.
at_rest() {
    local one two
    two=$(now)
    until one=$two && sleep 0.2 && two=$(now) && [ "$one" = "$two" ]; do :; done
    echo "$two"
}
is_as_before() { [ "$(now)" = "$1" ]; }

# Each fault, at the server's device and in the middle of its clients' work. Whatever that does to them, new ones are served, and nothing is lost.
faults() {
    local fault key=0
    start "$with_module"
    for fault in not-ready=3 link-down=200000 key-refused receive-gone source-gone queue-lost queue-full hold=1000 spurious lose lose-answer \
        address-error route-error unreachable rejected=3 connect-error slow-ready=1000 request-refused address-change pair-fatal exhausted \
        stall=100000 device-fatal device-removal; do
        background load "${benchmark[@]}" -c 4 -P 4 -l -d 3000 -r 100 -t set,get -q
        within 60 connected 4
        "$SOFTRDMA" fault --address "$SERVER" "$fault"
        key=$((key + 1))
        within 60 comes_to OK once SET "after:$key" "$fault"
        kill -KILL "$last" 2>/dev/null || true
        kill -0 "$server"
    done
    for fault in not-ready=3 link-down=200000 device-fatal; do other MGET $(seq -f 'after:%g' "$key") | grep -qx "$fault"; done
    is "$key" other EVAL 'return #redis.call("KEYS", "after:*")' 0
    within 60 comes_to 0 field rdma_engine rdma_engine_connections
    other SHUTDOWN NOSAVE
    wait "$server"
    server=
}
# A client that a fault keeps from its answer has no time-out of its own.
once() { timeout 10 "${cli[@]}" "$@" 2>&1; }

# Prints registered bytes and descriptors per connection.
idle_at() { # NAME
    local before after fds
    before=$(objects | cut -d '|' -f 3) fds=$(descriptors)
    background idle "${benchmark[@]}" -I -c 1000
    within 300 comes_to 1001 field clients connected_clients
    # What is only kept for the busy goes.
    within 60 settled
    after=$(objects | cut -d '|' -f 3)
    per=$(((after - before) / 1000))
    fds=$(($(descriptors) - fds))
    echo "$1: an idle connection has $per bytes registered; a thousand have $fds descriptors"
    kill -KILL "$last"
}
settled() { [ "$(objects | cut -d '|' -f 3)" = "$(sleep 6 && objects | cut -d '|' -f 3)" ]; }

idle() {
    local per fds=0
    start "$with_module" --rdma-rx-size 131072 --maxclients 2000
    idle_at 'with the module'
    [ "$per" -le 262144 ]
    [ "$fds" -le 100 ]
    stop
    : >"$work/log"
    "$SOFTRDMA" run --address "$SERVER" -- "$of/bin/valkey-server" --rdma-bind "$SERVER" --rdma-port 6379 --port 0 \
        --rdma-rx-size 131072 --maxclients 2000 --unixsocket "$work/socket" --save '' --dir "$work" --protected-mode no >"$work/log" 2>&1 &
    server=$!
    await "$work/log" 'Ready to accept connections rdma' "$server"
    idle_at 'built in'
    kill "$server" && wait "$server" || true
    server=
}

# ---- Valkey's own suites, whose clients speak TCP, by the bridge

bridged() {
    [ -n "${BRIDGE:-}" ] || { cargo build --quiet --release --locked -p rdma-bridge && export BRIDGE=$target/release/valkey-rdma-bridge; }
}

tcl() {
    bridged
    "$SOFTRDMA" run --fabric "tcl-$$" --address 127.0.0.1,::1 -- "$here/tests/tcl" "$source" "$with_module" "$module" "$BRIDGE" "$work/tcl"
}

tcl-replication() {
    "$SOFTRDMA" run --fabric "tcl-$$" --address 127.0.0.1,::1 -- "$here/tests/tcl-replication" "$source" "$with_module" "$module" "$work/tcl-replication"
}

python() {
    bridged
    printf '#!/bin/sh\nexec %s "$@" --loadmodule %s\n' "$with_module" "$module" >"$work/server"
    chmod +x "$work/server"
    SOFTRDMA=$SOFTRDMA lab/run soft apps/rdma-bridge/tests/valkey-py "$work/server" | tee "$work/said"
}

# ---- Debian's package

debian() {
    local root=$work/debian suite=${of#"$LAB_CACHE"/valkey} mirror
    suite=${suite#-}
    [ "$(id -u)" -eq 0 ] || die 'a chroot takes root'
    [ -z "$(missing_packages debootstrap)" ] || apt_install debootstrap >"$work/said"
    # shellcheck disable=SC2016 # apt expands it
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
    # What it mounts goes with its namespace.
    unshare -m debootstrap --variant=minbase --include=valkey-server "${suite:-sid}" "$root" "$mirror" >"$work/said" || { cat "$work/said" && return 1; }
    chroot "$root" dpkg-query -W valkey-server
    chroot "$root" valkey-server --version | grep -qF "v=$version " || die "the sources here are of $version: lab/run setup --module takes newer ones"
    # The module and softrdma's library are where they are outside.
    cat >"$work/in-chroot" <<END
#!/bin/sh
exec unshare -m sh -ec '
    for folder in "$work" "$(dirname "$(realpath "$SOFTRDMA")")"; do
        mkdir -p "$root\$folder"
        mount --rbind "\$folder" "$root\$folder"
    done
    mount -t proc proc "$root/proc"
    exec chroot "$root" valkey-server "\$@"' sh "\$@"
END
    chmod +x "$work/in-chroot"
    local with_module=$work/in-chroot
    features "$with_module"
    rm -rf "$work/dump.rdb" "$work/appendonlydir"
    suite
}
