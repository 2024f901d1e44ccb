# The step of ../test, which sources this, that runs docs/operate.md: its commands in a shell, and its tables beside a server.
# shellcheck shell=bash

operate() {
    local page=docs/operate.md folder=$work/page name names field least most
    mkdir -p "$folder/bin"
    # shellcheck disable=SC2016 # the scripts expand it
    printf '#!/bin/sh\nexec %s "$@"\n' "$with_module" >"$folder/bin/valkey-server"
    printf '#!/bin/sh\nexec %s -s %s "$@"\n' "$VALKEY_BIN/valkey-cli" "$work/socket" >"$folder/bin/valkey-cli"
    chmod +x "$folder/bin/valkey-server" "$folder/bin/valkey-cli"
    start "$with_module"
    is PONG cli PING
    # Its commands, from the top.
    awk '/^```$/ { inside = 0 } inside { print } /^```sh$/ { inside = 1 }' "$page" >"$folder/commands"
    [ -s "$folder/commands" ]
    (cd "$folder" && PATH=$folder/bin:$PATH MODULE=$module bash -euxo pipefail ./commands) >"$work/said" 2>&1 || { cat "$work/said" && return 1; }
    # The question whether a module fits ends without `bash -e`, too, and says why it does not.
    awk '/^```$/ { exit } inside { print } /^```sh$/ { inside = 1 }' "$page" >"$folder/question"
    (cd "$folder" && PATH=$folder/bin:$PATH MODULE=$folder/none timeout 300 bash ./question) >"$work/said" 2>&1 || true
    grep -q "$folder/none failed to load" "$work/said" || { cat "$work/said" && die 'the page does not tell why a module does not fit'; }
    grep -q '^valkey_rdma_engine_accepted [1-9]' "$folder/rdma.prom"
    cmp "$folder/rdma-engine.so" "$module"
    # Each field of INFO.
    other INFO rdma_engine | tr -d '\r' | sed -n 's/^rdma_engine_\([a-z_]*\):.*/\1/p' | sort >"$work/fields"
    sed -n '/^## Monitoring/,/^## Upgrade/p' "$page" | grep '^| `' | cut -d '|' -f 2 | grep -o '[a-z_]*' | sort >"$work/told"
    diff "$work/fields" "$work/told"
    stop
    # Each argument, and each bound.
    refuses 'there is no option windws' "$module windws 2" "$with_module"
    names=$(sed -n 's/.*there are \(.*\)\. Its own are \(.*\)/\1 \2/p' "$work/said" | sed 's/=[^, ]*//g; s/,//g; s/ and / /')
    for name in $names; do
        case $name in window | completion_vector) continue ;; esac
        grep '^|' "$page" | cut -d '|' -f 2 | grep -q "\`$name\`" || die "$page does not have the argument $name"
    done
    while read -r name least most; do
        refuses "$name" "$module $name $((most + 1))" "$with_module"
        # The module's own bounds are in its message.
        ! grep -q 'the argument' "$work/said" || says "the argument $name is $least to $most"
        [ "$least" -eq 0 ] || refuses "$name" "$module $name $((least - 1))" "$with_module"
    done < <(sed -n 's/^| `\([a-z_]*\)` | [^|]* | \([0-9]*\) to \([0-9]*\) |.*/\1 \2 \3/p' "$page")
    # What it quotes of the log.
    while read -r field; do
        grep -qF -- "$field" "$here"/*.c "$source"/src/server.c || die "no log has '$field', which $page quotes"
    done < <(sed -n '/^## What fails how/,/^## Access/p' "$page" | grep '^|' | cut -d '|' -f 3 | grep -o '`[^`]*`' | tr -d '`' | grep -v '^rejected$')
}
