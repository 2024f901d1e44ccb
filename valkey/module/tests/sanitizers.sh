# Steps of ../test, which sources this: the sanitizers.
# shellcheck shell=bash

sanitizers() { # [PART…]
    local part
    for part in ${1:-module server}; do "sanitized-$part"; done
}

# The module's C under ASan and UBSan. The server is as it is built: the sanitizers' run-time libraries are loaded before it.
sanitized-module() {
    local preloaded module=$work/sanitized/valkey-rdma-engine.so
    mkdir -p "$work/sanitized"
    build OUT="$work/sanitized" CFLAGS='-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer'
    without_deepbind
    preloaded=$work/plain.so:$(cc -print-file-name=libasan.so):$(cc -print-file-name=libubsan.so)
    suite "LD_PRELOAD=$preloaded:\$LD_PRELOAD" "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0:log_path=$work/asan" \
        "UBSAN_OPTIONS=log_path=$work/ubsan"
    printf '#!/bin/sh\nexec env "LD_PRELOAD=%s:$LD_PRELOAD" ASAN_OPTIONS=%s UBSAN_OPTIONS=%s %s "$@"\n' "$preloaded" \
        "detect_leaks=0:verify_asan_link_order=0:log_path=$work/asan" "log_path=$work/ubsan" "$with_module" >"$work/sanitized/server"
    chmod +x "$work/sanitized/server"
    "$here/tests/replication.py" "$work/sanitized/server" "$module" "$SOFTRDMA" "$work" modes cuts roles names stopped
    local with_module=$work/sanitized/server
    hostile-primary protocol
    lend
    no_reports
}

# The server under ASan as well, for values that are lent: it sees what the server does with memory that a loan refers to. Memory that is freed has other
# bytes at once, which a client would receive.
sanitized-server() {
    local program=$of-address/bin/valkey-server with_module=$work/address/server module=$work/address/valkey-rdma-engine.so
    local options=detect_leaks=0:verify_asan_link_order=0:max_free_fill_size=1073741824:free_fill_byte=165
    [ -x "$program" ] || die 'no Valkey under ASan: lab/run setup --sanitizer'
    mkdir -p "$work/address"
    build OUT="$work/address" CFLAGS='-O1 -g -fsanitize=address -fno-omit-frame-pointer'
    without_deepbind
    printf '#!/bin/sh\nexec env "LD_PRELOAD=%s:$LD_PRELOAD" ASAN_OPTIONS=%s %s "$@"\n' "$work/plain.so:$(cc -print-file-name=libasan.so)" \
        "$options:log_path=$work/asan" "$program" >"$with_module"
    chmod +x "$with_module"
    lend
    no_reports
}

# A library for LD_PRELOAD, plain.so: the server loads modules with RTLD_DEEPBIND, which the sanitizers do not take.
without_deepbind() {
    cc -shared -fPIC -o "$work/plain.so" -xc - <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
void *dlopen(const char *path, int flags) { return ((void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen"))(path, flags & ~RTLD_DEEPBIND); }
END
}
no_reports() {
    if ls "$work"/*san.[0-9]* 2>/dev/null; then cat "$work"/*san.[0-9]* && return 1; fi
}
