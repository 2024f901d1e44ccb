# Shared by the scripts of this folder; POSIX sh, to be sourced (also inside the guest).
# Sets LAB_CACHE and the paths below; defines logging, `die`, `explained`, `usage`, `as_root`, `apt_install`, `await`, `within`, the search for
# softrdma's fabric, what builds and names our programs, and the search for Valkey's.
# shellcheck shell=sh

: "${LAB_CACHE:=${XDG_CACHE_HOME:-${HOME:?HOME is not set, set LAB_CACHE}/.cache}/valkey-rdma-lab}"
export LAB_CACHE

# Read by the scripts that source this file.
# shellcheck disable=SC2034
{
    LAB_KERNEL=$LAB_CACHE/kernel/vmlinuz
    LAB_INITRAMFS=$LAB_CACHE/kernel/initramfs
    LAB_KERNEL_TREE=$LAB_CACHE/kernel/root
    LAB_LOCK=$LAB_CACHE/lock

    # What must be installed to run the guest, and what more to build Valkey and the optional bindings.
    LAB_RUN_PACKAGES='qemu-system-x86 busybox-static cpio kmod xz-utils iproute2 libibverbs1 librdmacm1
        ibverbs-providers rdmacm-utils ibverbs-utils perftest'
    LAB_BUILD_PACKAGES='build-essential pkg-config libssl-dev libibverbs-dev librdmacm-dev libclang-dev cmake
        debian-archive-keyring ca-certificates'
    # What more the stages of .ci/run take; tests of what is not there are skipped, which fails there.
    CI_PACKAGES="$LAB_RUN_PACKAGES $LAB_BUILD_PACKAGES patch tshark ucx-utils libfabric-bin curl netcat-traditional python3-venv valgrind strace man-db
        golang-go libevent-dev"
}

LAB_STARTED=${LAB_STARTED:-$(date +%s)}

# One line on stderr, with the seconds since the script started.
say() { printf 'lab: [%4ds] %s\n' "$(($(date +%s) - LAB_STARTED))" "$*" >&2; }

warn() { printf 'lab: %s\n' "$*" >&2; }

# The places of `lab/run` set LAB_DIE_STATUS so that their own failures differ from the program's.
die() {
    warn "$*"
    exit "${LAB_DIE_STATUS:-1}"
}

# Prints what stands at the top of a script: its comment, or the documentation of one in Python.
explained() { # SCRIPT
    awk 'NR == 1 { next } /^"""/ { inside = !inside; sub(/^"""/, "") } /"""$/ || (!inside && !/^#/) { exit } { sub(/^# ?/, ""); print }' "$1"
}

# Ends a script that was called with arguments which it does not take.
usage() {
    explained "$0" >&2
    exit "${LAB_DIE_STATUS:-2}"
}

# Runs a command as root: as it is, or through sudo. Nothing but installing packages needs it.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1; then
        sudo -- "$@"
    else
        die "this needs root and there is no sudo: $*"
    fi
}

# Installs Debian packages that a script of this repository needs.
apt_install() { # PACKAGE…
    # shellcheck disable=SC2016 # the inner shell expands it
    as_root env DEBIAN_FRONTEND=noninteractive sh -c \
        'apt-get -q update && apt-get -q -o DPkg::Lock::Timeout=600 install -y --no-install-recommends "$@"' sh "$@"
}

# Builds the programs and examples of the workspace in release, all in one go: packages that are built apart have other features of what they
# share, which is built anew for each. Arguments are further options of Cargo.
build_programs() {
    cargo build --quiet --release --workspace --lib --bins --examples --features rdma-redis/cluster "$@"
}

# Exports where they are then, in the root of the repository or in another folder, and has them go along into the guest.
name_programs() { # [FOLDER]
    lab_release=$(cd "${1:-${CARGO_TARGET_DIR:-target}/release}" && pwd -P)
    export CONFORMANCE="$lab_release/valkey-rdma-conformance" TRUST="$lab_release/valkey-rdma-trust" BENCH="$lab_release/valkey-rdma-bench"
    export EXAMPLES="$lab_release/examples" LAB_ENV="${LAB_ENV:-} CONFORMANCE TRUST BENCH EXAMPLES"
}

# Build our parts of Valkey, in the root of the repository, from the sources that lab/run setup has fetched: the module, for the server that
# lab/run setup --module has built, and valkey-cli and valkey-benchmark linked with our library. They export the command of that server, and
# the folder of the two, which go along into the guest; without those sources these stay unset.
build_module() {
    lab_server=$LAB_CACHE/valkey-module/bin/valkey-server
    if [ -n "${VALKEY_DIR:-}" ] || ! [ -x "$lab_server" ]; then return; fi
    lab_inside=$(mkdir -p "${CARGO_TARGET_DIR:-target}/inside-valkey" && cd "${CARGO_TARGET_DIR:-target}/inside-valkey" && pwd -P)
    flock "$lab_inside/lock" make --quiet -C valkey/module VALKEY_SRC="$LAB_CACHE/valkey/src" OUT="$lab_inside"
    export VALKEY_WITH_MODULE="$lab_server --loadmodule $lab_inside/valkey-rdma-engine.so"
}
build_relinked() {
    if [ -n "${VALKEY_DIR:-}" ]; then return; fi
    lab_inside=$(mkdir -p "${CARGO_TARGET_DIR:-target}/inside-valkey" && cd "${CARGO_TARGET_DIR:-target}/inside-valkey" && pwd -P)
    cargo build --quiet --release --locked -p rdma-ffi
    # Linking takes a minute: what is there stays as long as nothing is newer. Stages beside each other build it once.
    (
        flock 9
        if ! [ -x "$lab_inside/valkey-benchmark" ] || [ -n "$(find valkey/libvalkey rdma-ffi/include "${lab_inside%/*}/release/libvkrdma.a" \
            "$VALKEY_BIN" -type f -newer "$lab_inside/valkey-benchmark")" ]; then
            valkey/libvalkey/relink "$LAB_CACHE/valkey/src" "$lab_inside" MALLOC=libc >"$lab_inside/log" 2>&1 ||
                { tail -n 20 "$lab_inside/log" >&2 && exit 1; }
        fi
    ) 9>"$lab_inside/lock"
    export VALKEY_RELINKED="$lab_inside"
}

# Waits at most 30 s for a line of a file, as long as the process that writes it lives, if one is given. Fails otherwise, and shows the file.
await() { # FILE PATTERN [PID]
    for _ in $(seq 300); do
        grep -q "$2" "$1" 2>/dev/null && return
        if [ -n "${3:-}" ] && ! kill -0 "$3" 2>/dev/null; then break; fi
        sleep 0.1
    done
    warn "no '$2' in $1 within 30 s${3:+, or until its program ended}:"
    cat "$1" >&2
    return 1
}

# Runs a command again and again until it succeeds, for that many seconds. Fails otherwise, and names it.
within() { # SECONDS COMMAND…
    lab_seconds=$1
    shift
    for _ in $(seq $((lab_seconds * 10))); do
        "$@" && return
        sleep 0.1
    done
    warn "not so within $lab_seconds s: $*"
    return 1
}

# The process of softrdma's fabric of this directory; one that ends may still be there beside it for a while. Sets `fabric`.
find_fabric() { # DIRECTORY
    within 30 is_one_fabric "$1"
}
is_one_fabric() { fabric=$(pgrep -f "^[^ ]*softrdma fabric $1/") && [ "$(echo "$fabric" | wc -l)" -eq 1 ]; }

# Stops that fabric. A stopped process may still serve what it has begun to: this returns when none of its threads does. Sets `fabric`.
stop_fabric() { # DIRECTORY
    find_fabric "$1" && kill -STOP "$fabric" && within 30 has_stopped "$fabric"
}
has_stopped() { lab_states=$(sed 's/.*) //' "/proc/$1/task/"*/stat) && ! echo "$lab_states" | grep -qv '^T'; }

# Runs a program of others that gives up by time-outs of its own, which a busy machine exceeds: again after a failure, three times at most, and
# says so each time. Its output is shown.
patiently() { # WHY COMMAND…
    lab_why=$1
    shift
    for lab_attempt in 1 2 3; do
        "$@" && return
        echo "attempt $lab_attempt of 3 failed, with a load of $(cut -d ' ' -f 1 /proc/loadavg): $lab_why" >&2
    done
    return 1
}

# Prints those of the named packages that are not installed.
missing_packages() {
    for lab_package in "$@"; do
        dpkg-query -W -f '${db:Status-Status}' "$lab_package" 2>/dev/null | grep -qx installed ||
            printf '%s ' "$lab_package"
    done
}

# Finds valkey-server, valkey-cli and valkey-benchmark: in VALKEY_DIR (or its src/) when that is set, else in the cache.
# Exports VALKEY_BIN, the directory that holds them, and VALKEY_RDMA_TEST, Valkey's own RDMA test client, when it is
# there. Fails, silently, when they are not found.
find_valkey() {
    if [ -n "${VALKEY_DIR:-}" ]; then
        set -- "$VALKEY_DIR" "$VALKEY_DIR/src"
    else
        set -- "$LAB_CACHE/valkey/bin"
    fi
    unset VALKEY_BIN VALKEY_RDMA_TEST
    for lab_dir in "$@"; do
        if ! [ -x "$lab_dir/valkey-server" ] || ! [ -x "$lab_dir/valkey-cli" ] || ! [ -x "$lab_dir/valkey-benchmark" ]; then
            continue
        fi
        VALKEY_BIN=$lab_dir
        export VALKEY_BIN
        for lab_test in "$lab_dir/rdma-test" "${VALKEY_DIR:-$lab_dir}/tests/rdma/rdma-test"; do
            [ -x "$lab_test" ] || continue
            VALKEY_RDMA_TEST=$lab_test
            export VALKEY_RDMA_TEST
            break
        done
        return 0
    done
    return 1
}
