# Fresh Debians, for stages that try packages in one; to be sourced after lab/lib.sh. They take root.
# shellcheck shell=bash

# Installs the packages of this machine that stages need to make such a Debian, and further ones.
fresh_needs() { # [PACKAGE…]
    local missing
    missing=$(missing_packages debootstrap "$@")
    # shellcheck disable=SC2086 # a list of words
    [ -z "$missing" ] || apt_install $missing >&2
}

# Debian's mirror, as this machine reaches it.
debian_mirror() {
    # shellcheck disable=SC2016 # apt expands it
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1
}

# Makes a Debian of a suite in a folder, with further packages. What it mounts goes with its namespace.
fresh() { # SUITE FOLDER [PACKAGE,…]
    unshare --mount debootstrap --variant=minbase ${3:+--include="$3"} "$1" "$2" "$(debian_mirror)" >"$2.log" 2>&1 ||
        { tail -n 5 "$2.log" >&2 && return 1; }
    # The mirror may be known by this alone.
    cp /etc/hosts "$2/etc/hosts"
}

# Runs a script in it, under bash -eux. What the script has started ends with it. Shows what it said if it fails, and its last line if not.
inside() { # FOLDER SCRIPT [ARGUMENT…]
    local root=$1 script=$2
    cp "$script" "$root/script"
    shift 2
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare --mount --pid --fork --kill-child --propagation private bash -euc '
        root=$1 && shift
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        exec chroot "$root" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive bash -eux /script "$@"' \
        _ "$root" "$@" </dev/null >"$root.log" 2>&1 || { tail -n 60 "$root.log" >&2 && return 1; }
    tail -n 1 "$root.log"
}

# Copies softrdma, with its libraries beside it, to /opt/softrdma of a fresh Debian.
softrdma_into() { # FOLDER
    local built=${CARGO_TARGET_DIR:-target}/release
    mkdir -p "$1/opt/softrdma"
    cp "$built/softrdma" "$built"/lib{rdmacm,ibverbs}-softrdma "$1/opt/softrdma/"
}
