# Shared by .ci/run and the scripts of its stages; to be sourced by bash, in the root of the repository. Has all of lab/lib.sh, and
#
#   stage WORDS…      begins a stage: if something fails, the script ends, and its last line names the stage. With `times` set, the file of that
#                     name gets a line for each stage that is over: seconds, seconds of processors, the stage
#   tests COMMAND…    runs tests; fails if there were none, or if one was skipped for want of something that can be installed
#   told LOG          counts the tests and the skips of a whole log; fails as `tests` does
#
# A skip is a line that begins with `skipped: `, or one of pytest's with `SKIPPED`, and says why. Those that .ci/skips does not name are failures.
# shellcheck shell=bash
. lab/lib.sh

# Whatever packages a command names, they are built with the features that the whole workspace has (.ci/features), so that each profile builds them
# once. Cargo has it behind an option that a stable toolchain takes in this way; the compiler is not told.
export CARGO_UNSTABLE_FEATURE_UNIFICATION=true CARGO_RESOLVER_FEATURE_UNIFICATION=workspace RUSTC_BOOTSTRAP=1 RUSTC_WRAPPER=$PWD/.ci/rustc
# Files for incremental builds would take 5 GB, and hardly anything is built again from changed sources. Panics name their line without debug data.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=none
begun=$(date +%s)
# What `beside` of stages.sh has started: PROCESS:STAGE.
besides=()
current=${0##*/}

stage() {
    [ -z "${times:-}" ] || measured
    current=$*
    printf '\n### [%4ds] %s\n' "$(($(date +%s) - begun))" "$*"
}

# Adds the stage that is over to the file `times`.
measured() {
    local now used
    # In this shell: a child would tell of its own.
    times >"$times.now"
    now=$(date +%s) used=$(awk 'NR == 2 { gsub(/[ms]/, " "); print int($1 * 60 + $2 + $3 * 60 + $4) }' "$times.now")
    rm "$times.now"
    [ -z "${since:-}" ] || printf '%5d %5d  %s\n' $((now - since)) $((used - used_before)) "${current%%:*}" >>"$times"
    since=$now used_before=$used
}

# For the traps below.
failed_at() { printf '\n### %s: line %s: exit status %s: %s\n' "$0" "$2" "$1" "$3" >&2; }
ended() {
    local status=$? one
    for one in "${besides[@]}"; do kill -- "-${one%%:*}" 2>/dev/null || true; done
    ((status == 0)) || printf '\n### [%4ds] FAILED (exit status %d) in the stage: %s\n' "$(($(date +%s) - begun))" "$status" "$current" >&2
}
trap 'failed_at $? $LINENO "$BASH_COMMAND"' ERR
trap ended EXIT

# Reasons of skips that .ci/skips names.
allowed() { grep -Ev '^(#|$)' .ci/skips; }

# Prints why things were skipped, a line each.
reasons() { sed -n -e 's/^skipped: //p' -e 's/^SKIPPED \[[0-9]*\] [^ ]*: //p' "$1"; } # LOG

# Prints the skips of a log, each reason once, with how often it was; fails if there is one that is not allowed.
skips() { # LOG
    local wrong
    reasons "$1" | sort | uniq -c | sed 's/^ *\([0-9]*\) /skipped, \1 times: /'
    wrong=$(reasons "$1" | grep -Evf <(allowed) | sort -u) || true
    [ -z "$wrong" ] || printf 'these are for want of something that can be installed, or .ci/skips does not name them:\n%s\n' "$wrong" >&2
    [ -z "$wrong" ]
}

# Prints how many tests of a log passed.
passed() { sed -n 's/^test result: ok\. \([0-9]*\) passed.*/\1/p' "$1" | awk '{ sum += $1 } END { print sum + 0 }'; }

# What passing tests printed is left out, but for skips.
shortened() {
    awk '/^successes:$/ { hidden = 1 } /^(test result: |failures:$)/ { hidden = 0 } !hidden || /^skipped: / { print; fflush() }'
}

tests() { # COMMAND…
    local log count status=0
    local command=("$@")
    [[ " $* " == *' -- '* ]] || command+=(--)
    log=$(mktemp)
    "${command[@]}" --show-output 2>&1 | tee "$log" | shortened || status=$?
    count=$(passed "$log")
    if ((status == 0 && count == 0)); then
        echo "no test was run: $*" >&2
        status=1
    fi
    ((status)) || skips "$log" >/dev/null || status=$?
    rm -f "$log"
    return "$status"
}

told() { # LOG
    printf '\n### %s tests passed\n' "$(passed "$1")"
    skips "$1"
}
