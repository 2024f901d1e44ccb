# Steps of ../test, which sources this, about modules and servers of different layouts: layout.c.
# shellcheck shell=bash

# What a version of Valkey would move, and which field is named then: the file, the first line of a structure, the member before which words are put.
# A server with TLS shows postpone_update_state where another one shows has_pending_data.
moves() {
    cat <<'END'
server.h|struct valkeyServer|pid_t pid|server.verbosity is at
server.h|struct valkeyServer|aeEventLoop [*]el|server.verbosity is at
server.h|struct valkeyServer|int verbosity|server.verbosity is at
server.h|struct valkeyServer|int aof_fsync|server.aof_fsync is at
server.h|struct valkeyServer|.*int max_new_conns_per_cycle|server.max_new_conns_per_cycle is at
server.h|struct valkeyServer|int tls_replication|server.tls_replication is at
server.h|struct valkeyServer|int repl_timeout|server.repl_timeout is at
server.h|struct valkeyServer|serverRdmaContextConfig rdma_ctx_config|server.rdma_ctx_config.port is at
server.h|typedef struct serverRdmaContextConfig|int port|server.rdma_ctx_config.port is at
server.h|typedef struct serverRdmaContextConfig|int rx_size|server.rdma_ctx_config.rx_size is at
server.h|typedef struct serverRdmaContextConfig|int completion_vector|server.rdma_ctx_config.completion_vector is at
ae.h|typedef struct aeEventLoop|aeBeforeSleepProc [*]beforesleep|server.el is not
adlist.h|typedef struct list |unsigned long len|list.len is not
adlist.h|typedef struct listNode|void [*]value|list.head is not
connection.h|typedef struct ConnectionType|.*[(][*]get_type[)]|ConnectionType.
connection.h|typedef struct ConnectionType|.*[(][*]ae_handler[)]|ConnectionType.
connection.h|typedef struct ConnectionType|.*[(][*]addr[)]|ConnectionType.
connection.h|typedef struct ConnectionType|.*[(][*]conn_create[)]|ConnectionType.
connection.h|typedef struct ConnectionType|.*[(][*]connect[)]|ConnectionType.
connection.h|typedef struct ConnectionType|.*[(][*]write[)]|ConnectionType.
connection.h|typedef struct ConnectionType|.*[(][*]sync_readline[)]|ConnectionType.
connection.h|typedef struct ConnectionType|.*[(][*]has_pending_data[)]|ConnectionType.[hp][a-z_]* is not
connection.h|typedef struct ConnectionType|.*[(][*]process_pending_data[)]|ConnectionType.
connection.h|struct connection {|ConnectionType [*]type|connection.type is not
connection.h|struct connection {|ConnectionState state|connection.state is not
connection.h|struct connection {|int last_errno|connection.
connection.h|struct connection {|int fd|connection.fd is not
connection.h|struct connection {|short int flags|connection.
connection.h|struct connection {|short int refs|connection.
connection.h|struct connection {|unsigned short int iovcnt|connection.iovcnt is not
connection.h|struct connection {|void [*]private_data|connection.
connection.h|struct connection {|ConnectionCallbackFunc conn_handler|connection.
connection.h|struct connection {|ConnectionCallbackFunc write_handler|connection.
connection.h|struct connection {|ConnectionCallbackFunc read_handler|connection.read_handler is not
END
}

# Prints a header with WORDS put before a member of a structure, which must be there once.
moved() { # HEADER STRUCTURE MEMBER WORDS
    awk -v first="$2" -v member="$3" -v words="$4" '
        index($0, first) == 1 { inside = 1 }
        inside && match($0, "^ +(" member ")") { print "    uint64_t made_up[" words "];"; found++ }
        { print }
        /^}/ { inside = 0 }
        END { exit found != 1 }' "$1"
}

# Copies of the sources' headers keep their times, which are before those of a module.
places() {
    local tree=$work/tree file structure member named words at=0 flags
    read -ra flags <<<"-I$tree/src -I$tree/deps/libvalkey/include -I$tree/deps/hiredis -I$tree/deps/hdr_histogram -I$tree/deps/fpconv \
-I$tree/deps/fast_float -Irdma-ffi/include"
    copy_headers
    is_complete
    # Without a device: the server ends before it would use one.
    looks() { # EXPECTED [SOURCE]
        local status=0
        cc -std=gnu11 -D_GNU_SOURCE= -w -fPIC -shared "${flags[@]}" -o "$work/layout.so" "${2:-$here/tests/layout.c}"
        timeout 60 "$with_module" --port 0 --dir "$work" --loadmodule "$work/layout.so" >"$work/said" 2>&1 || status=$?
        [ "$status" -eq 1 ] && says "$1"
    }
    looks 'RDMA: the server has this layout'
    while IFS='|' read -r file structure member named; do
        at=$((at + 1))
        # Each place by one, two or three words; those of the server's state by all.
        for words in $([[ $structure == *valkeyServer ]] && echo 1 2 3 || echo $((at % 3 + 1))); do
            moved "$source/src/$file" "$structure" "$member" "$words" >"$tree/src/$file" ||
                die "$file has no '$member' in $structure, as this test expects"
            looks "RDMA: .*: $named"
            says 'Build it with the server.s sources and CFLAGS'
        done
        cp -p "$source/src/$file" "$tree/src/$file"
    done < <(moves)
    # The event loop alone is elsewhere.
    sed '/^struct valkeyServer {/,/^}/ { s/^    aeEventLoop [*]el;/    void *made_up;/; s/^}/    aeEventLoop *el;\n}/ }' "$source/src/server.h" \
        >"$tree/src/server.h"
    looks 'RDMA: .*: server.el is not'
    cp -p "$source/src/server.h" "$tree/src/server.h"
    # A setting that other sources do not have: here the module asks for one.
    sed 's/"repl-timeout"/"made-up"/' "$here/layout.c" >"$work/layout.c"
    sed "s|\"../layout.c\"|\"$work/layout.c\"|" "$here/tests/layout.c" >"$work/asks.c"
    flags+=("-I$here")
    looks 'server.repl_timeout is the setting made-up, which the server does not have' "$work/asks.c"
    echo "$at places in the server's structures"
}
copy_headers() {
    mkdir -p "$tree"
    (cd "$source" && find src deps -name '*.h' -exec cp -p --parents -t "$tree" {} +)
}

# Each field that the module uses of the server's state is in layout.c, and so is each member of a connection.
is_complete() {
    local field
    for field in $(grep -ohE '\bserver\.[a-z_]+(\.[a-z_]+)*' "$here"/*.c | sort -u); do
        case $field in server.h | server.el) continue ;; esac
        grep -q "SETTING(\"[-a-z]*\", ${field#server.})" "$here/layout.c" || die "$field is used, and layout.c does not compare it"
    done
    for field in $(sed -n '/^struct connection {/,/^}/s/.*[ *]\([a-z_]*\);$/\1/p' "$source/src/connection.h"); do
        grep -q "\"connection.$field\"" "$here/layout.c" || die "connection.$field is not compared in layout.c"
    done
    for field in $(sed -n '/^typedef struct ConnectionType/,/^}/s/.*([*]\([a-z_A-Z]*\))(.*/\1/p' "$source/src/connection.h" | sed '/update_state/q'); do
        grep -q "SET[_A-Z]*($field)" "$here/layout.c" || die "ConnectionType.$field is not compared in layout.c"
    done
}

# A module that does not fit the server is refused, and made anew as its message says.
layout() {
    local tree=$work/tree made=$work/made headers
    mkdir -p "$made"
    places
    copy_headers
    other_headers() { # SED-SCRIPT FILE
        headers=$tree/src/$2
        sed -i.bak "$1" "$headers"
        touch -r "$headers.bak" "$headers"
        cmp -s "$headers" "$headers.bak" && die "$2 has other lines than this test expects"
        make --quiet -C "$here" VALKEY_SRC="$tree" OUT="$made" CFLAGS=-w
        mv "$headers.bak" "$headers"
    }
    # Another patch release.
    other_headers 's/^\(#define VALKEY_VERSION_NUM 0x......\).*/\1ff/; s/^#define VALKEY_VERSION .*/#define VALKEY_VERSION "9.9.9"/' version.h
    refuses 'this module is for Valkey 9.9.9, and the server is '"$version" "$made/valkey-rdma-engine.so" "$with_module"
    # Settings that change the server's structures.
    make --quiet -C "$here" VALKEY_SRC="$tree" OUT="$made" CFLAGS='-w -DLOG_REQ_RES'
    refuses 'RDMA: .*: server.[a-z_.]* is at [0-9]* here, and at [0-9]* there' "$made/valkey-rdma-engine.so" "$with_module"
    # A log level at which a wrong field would hide the message.
    refuses 'RDMA: .*: server.[a-z_.]* is at [0-9]* here, and at [0-9]* there' "$made/valkey-rdma-engine.so" "$with_module" --loglevel warning
    # What the server fills in later: where it listens,
    other_headers '/^struct connListener {/,/^}/ { s/char [*][*]bindaddr;/ConnectionType *other;/; s/ConnectionType [*]ct;/char **bindaddr;/; s/[*]other;/*ct;/ }' connection.h
    refuses 'RDMA: .*: connListener.ct is not' "$made/valkey-rdma-engine.so" "$with_module"
    # and its clients. Of those of Valkey 8.1 the module reads two fields, and of later versions none.
    local module=$made/valkey-rdma-engine.so
    other_headers 's/^typedef struct client {/&\n    uint64_t two, words;/' server.h
    start "$with_module" "${in_threads[@]}"
    case $version in
    8.*)
        (! "${cli[@]}" PING) >"$work/said" 2>&1
        grep -q 'RDMA: .*client.conn is not where the module looks for it, so no client is accepted' "$work/log"
        other SHUTDOWN NOSAVE
        wait "$server"
        server=
        ;;
    *) values && stop ;;
    esac
    # What comes behind all fields that are used does not matter.
    other_headers 's/^    ConnectionCallbackFunc read_handler;/&\n    uint64_t words[2];/; s/^} ConnectionType;/    void (*words[3])(void);\n&/' connection.h
    start "$with_module" "${in_threads[@]}"
    values
    stop
    make --quiet -C "$here" VALKEY_SRC="$tree" OUT="$made"
    start "$with_module"
    is PONG cli PING
    stop
}
