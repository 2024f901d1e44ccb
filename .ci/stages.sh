# The stages of .ci/run and .ci/nightly; to be sourced after lib.sh. What is longer than a few lines is a script in .ci/stages.
# shellcheck shell=bash

# What goes stale most easily comes first. Arguments stand behind a stage's name. The stages behind an & run beside those that follow, for
# processors that these leave idle: they build, or what they show depends on no clock.
check=(
    scripts words locks disclosure needs '& programs wheel fuzz-check' lints api header 'package --manifests' tests programs
    '& sim 0..5000 explore --small interleavings --quick miri --quick instructions counts lab-quick'
    suite 'under-load 20 20 4' examples python ffi module libvalkey 'forks --short' journeys action sbom lab-soft unprivileged python-valkey
)
nightly=(
    'needs --all' plain oldest-rust deny 'package --all' coverage programs card 'sim 0..1000000' seeds long-tests explore mutants interleavings miri 'ffi --memory'
    'module without lend=600 mutants suite-lends kills cuts faults idle sanitizers synced=25000 replication=600 replication-soak=60 hostile-primary tcl tcl-replication python debian'
    module-trixie 'libvalkey --memory' 'libvalkey --own' glide
    'under-load 20 20' right middleware benches lab lab-long 'lab --soft' 'soak 3600' python-long many forks static deb deb-module tarball aarch64 pages 'fuzz 1800'
)

# A line each: the name, what it is, what runs it. In the order of the two lists above; the last are run by name only.
all_stages() {
    cat <<'END'
scripts|the scripts of CI and of the lab|.ci/stages/scripts
words|plain words, in the folders that are rewritten|.ci/stages/words
locks|lock files and patches|.ci/stages/locks
disclosure|what is withheld is named nowhere that is published|env -C "$called_from" "$PWD/.ci/stages/disclosure"
needs|packages and the Valkey that stages need|install_needs
lints|format, edges between packages, features, files that nobody compiles, dead links, lints, documentation|check_lints
api|the public API, as docs/api lists it|.ci/stages/api
header|the C header of rdma-ffi, as cbindgen makes it|rdma-ffi/header
package|manifests for a registry, or packages as one would have them|.ci/stages/package
tests|cargo test, of all three houses, with all features that need nothing installed|tests cargo test --workspace
programs|programs and examples, in release|programs_built
suite|the README: main job|run_suite
under-load|under load: a right implementation never fails, and a wrong one does|.ci/stages/under-load
sim|simulator, with the seeds that are named|simulate
explore|model checker|explore
interleavings|interleavings of threads, and races among them|.ci/stages/interleavings
miri|Miri|.ci/stages/miri
examples|examples|run_examples
python|the Python package|apps/python/test
wheel|the wheel of the Python package|apps/python/test build
ffi|the C interface, on softrdma|rdma-ffi/test
module|valkey-server with the module, on softrdma|valkey/module/test
libvalkey|libvalkey_rdma, under valkey-cli and valkey-benchmark, on softrdma|valkey/libvalkey/test
forks|forked children by every face, on softrdma; --short has three ways|trust/forks/run
journeys|the first steps of four kinds of users|.ci/stages/journeys
action|action.yml, as it stands there|.ci/stages/action
sbom|the bill of materials|env -C "$called_from" "$PWD/.ci/stages/sbom"
instructions|counts of instructions|benches/instructions
benches|benchmarks|cargo bench -p benches -- --quick
lab-quick|the lab: in the guest what softrdma cannot show|run_lab_quick
lab-soft|the lab: on softrdma, what no other stage shows|run_lab_soft
lab|the lab: real RDMA|lab/run test
counts|counts beside libvalkey, whose source and headers the lab has fetched|benches/peer/run
unprivileged|programs as they are, on softrdma, for a user who may do nothing|lab/run unprivileged
python-valkey|the Python package and Valkey, on softrdma|lab/run soft apps/python/valkey
fuzz-check|fuzz targets compile|check_fuzz
plain|cargo test as README has it: each package with the features that it asks for|tests env -u CARGO_RESOLVER_FEATURE_UNIFICATION cargo test --target-dir "$target/plain"
oldest-rust|the oldest Rust|.ci/stages/oldest-rust
deny|licences|.ci/stages/deny
coverage|coverage|.ci/stages/coverage
card|the kit for an RDMA card, in its shortest form, on softrdma|lab/run card --soft --quick
seeds|replicas and relays by seeds|run_seeds
long-tests|tests that take minutes|run_long_tests
mutants|mutants|trust/mutants/run
module-trixie|the module in Valkey 8.1|run_module_trixie
glide|Valkey GLIDE with RDMA as a transport, on softrdma; the first build takes 10 processor minutes|valkey/glide/test
right|right implementations: windows of any length, all kinds of devices, latency|run_right
lab-long|the lab: what takes long|run_lab_long
middleware|UCX, libfabric, Open MPI, Mooncake and rsockets, as they are, on softrdma|lab/run programs
soak|the soak|lab/run soak
python-long|the Python package: what takes long|run_python_long
many|1 to 1000 connections of one process by every face, on softrdma; --short has 1 to 100|trust/many/run
static|one static file|.ci/stages/static
deb|a Debian package of all programs|env -C "$called_from" "$PWD/.ci/stages/deb"
deb-module|Debian packages of the module, of libvkrdma and of libvalkey_rdma with its clients, in fresh Debians with their own valkey-server|env -C "$called_from" "$PWD/.ci/stages/deb-module"
tarball|the tarball, and the Containerfile's steps, beside a server with the official image's flags, in a fresh Debian|env -C "$called_from" "$PWD/.ci/stages/tarball"
aarch64|AArch64, emulated|.ci/stages/aarch64
pages|report pages, in a browser|look_at_pages
fuzz|fuzzing, for the seconds that are named|fuzz/run
edges|which package depends on which, beside the table of what may|.ci/stages/edges
one-graph|packages that a command would build again with other features|.ci/stages/one-graph
orphans|files of Rust that nobody compiles, and links that lead nowhere|.ci/stages/orphans
page|a report page that is named, in a browser|env -C "$called_from" "$PWD/.ci/stages/page"
export|the repository that is published: docs/releasing.md|env -C "$called_from" "$PWD/.ci/stages/export"
END
}

is_stage() { all_stages | grep -c "^$1|" >/dev/null; }
# Items of a list, several on a line.
indented() { printf '%s\n' "${@// /_}" | paste -s -d ' ' | fold -s -w 100 | sed 's/ $//; s/ /, /g; s/_/ /g; s/^/    /'; }

run_stage() { # NAME [ARGUMENT…]
    local name what command
    if [[ $1 == '&' ]]; then beside "${@:2}" && return; fi
    IFS='|' read -r name what command < <(all_stages | grep "^$1|")
    stage "$*: $what"
    shift
    eval "$command $*"
}

# Runs stages in the background, where the others come first. `joined` waits for them.
beside() { # STAGE [ARGUMENT…]…
    times=${times:+$times.$1} nice -n 5 setsid .ci/run "$@" >"$target/beside.$1.log" 2>&1 &
    besides+=("$!:$1")
}
joined() {
    local one log
    for one in "${besides[@]}"; do
        log=$target/beside.${one#*:}.log
        stage "${one#*:} and what follows it: beside the stages above"
        if ! wait "${one%%:*}"; then command cat "$log" && false; fi
        command cat "$log"
    done
    besides=()
}

install_needs() { # [--all]
    # Chromium for report pages.
    # shellcheck disable=SC2086 # a list of words
    missing=$(missing_packages $CI_PACKAGES ${1:+chromium})
    # shellcheck disable=SC2086
    [ -z "$missing" ] || apt_install $missing
    # Valkey, which tests run if it is there, and the headers of rdma-core.
    lab/run setup --module ${1:+--patched --sanitizer}
    find_valkey
    export VALKEY_SERVER=$VALKEY_BIN/valkey-server
}

check_lints() {
    cargo fmt --all --check
    .ci/stages/edges
    .ci/stages/orphans
    .ci/stages/one-graph
    cargo clippy --workspace --all-targets --all-features -- -D warnings
    RUSTDOCFLAGS='-D warnings' cargo doc --workspace --all-features --no-deps --quiet
}

# Once, for a stage that is run alone as well.
programs_built() {
    [ -n "${built:-}" ] || build_programs
    built=yes
}

run_suite() {
    programs_built
    "$programs/valkey-rdma-conformance"
}

simulate() { # SEEDS
    programs_built
    "$programs/valkey-rdma-trust" sim --seeds "${1:?which seeds: FROM..TO}"
}

explore() {
    programs_built
    "$programs/valkey-rdma-trust" explore "$@"
}

run_examples() {
    local example
    programs_built
    "$programs/examples/ping_pong"
    "$programs/examples/kv_server" --backend softsim
    "$programs/examples/event_server" --backend softsim
    for example in get_set pubsub transaction; do
        "$programs/examples/$example"
    done
    if [ -n "$(ls /sys/class/infiniband 2>/dev/null)" ]; then echo 'skipped: there is an RDMA device' && return; fi
    # Without a device, a server says so as all programs do: docs/exit-statuses.md.
    for example in 'kv_server --listen 127.0.0.1:0' 'event_server --rdma 127.0.0.1:0'; do
        local status=0
        # shellcheck disable=SC2086 # words
        timeout 60 "$programs/examples/"$example || status=$?
        [ "$status" -eq 69 ] || { echo "$example ends with $status, not 69" >&2 && return 1; }
    done
}


# cargo test takes their seeds and a bounded share of what they do; .ci/nightly runs them.
check_fuzz() {
    cargo check --quiet --locked --manifest-path fuzz/Cargo.toml --target-dir "$target/fuzz" --features hostile,snapshot,fabric
}

run_seeds() {
    SNAPSHOT_SEEDS=0..100000 tests cargo test --release -p rdma-snapshot --lib seeds_break_no_rule
    SNAPSHOT_STOPS=100 tests cargo test --release -p rdma-snapshot --test snapshot -- compression publisher_that_ends
    RELAY_SEEDS=0..100000 tests cargo test -p rdma-bridge --lib who_saw
    SERVER_SEEDS=0..5000 tests cargo test -p rdma-server --test server who_saw
}

# A seed is one run, also beside forks; what a thousand idle clients keep; a benchmark of many clients; a replica that follows for ten
# minutes; a thousand programs that are killed; a program with 60,000 queue pairs, and figures of another one beside it.
run_long_tests() {
    tests cargo test --release -p trust --test together sim:: -- --ignored
    tests cargo test --release -p trust --test crowd -- --ignored
    tests cargo test --release -p rdma-bench -- --ignored
    tests cargo test --release -p rdma-snapshot --test snapshot follows_for_minutes -- --ignored
    SOFTRDMA_KILLS=1000 tests cargo test -p softrdma --test kills
    SOFTRDMA_CROWD=60000 tests cargo test -p softrdma --test crowded
}

run_right() {
    programs_built
    "$programs/valkey-rdma-trust" right --windows all --who ours,example
    "$programs/valkey-rdma-trust" right --device-kinds all --latency 0,3 --times 20
}

# With the newest Valkey's programs as its clients.
run_module_trixie() {
    lab/run setup --module trixie
    valkey/module/test --of trixie layout load serves threads without suite synced ends closed forked failed runtest replication replication-versions
}

# The guest shows the kernel's verbs, its connection manager and its links, a processor that is 20 times as slow, and a real limit on locked memory.
run_lab_quick() {
    lab/run test verbs client-to-valkey inside-valkey semantics killed-while-saving replication server-killed address-lost link-down
}

run_lab_soft() {
    lab/run test --soft types own-side conformance-client conformance-exits conformance-pairs conformance-replay conformance-awaited conformance-snapshot \
        cluster crowd large-values
}

run_lab_long() {
    LAB_LONG=1 LAB_RANDOM=1000 LAB_ENV=LAB_RANDOM lab/run test verbs conformance-valkey conformance-inside-valkey deployed large-values windows-ahead yama
}

run_python_long() {
    apps/python/test -m long -s
    lab/run guest apps/python/valkey
}

look_at_pages() {
    local reports=$target/reports.html
    python3 -m venv "$target/page" && "$target/page/bin/pip" -q install playwright
    run_suite
    "$target/page/bin/python" .ci/stages/page target/conformance/report.html target/page/pictures
    "$programs/valkey-rdma-conformance" report html docs/reports/*.json --spec ../spec -o "$reports"
    "$target/page/bin/python" .ci/stages/page "$reports"
}
