# valkey-cli and valkey-benchmark as clients under the conformance suite; POSIX sh, to be sourced. Writes scripts into the folder WORK:
#
#   sh $WORK/cli HOST PORT FOLDER          runs the valkey-cli of a folder, and does what the case asks of a client (docs/adopt.md)
#   sh $WORK/benchmark HOST PORT FOLDER
#
# WORK must be exported when they run.
# shellcheck shell=sh

stores() { # KEY LENGTH
    echo "SET $1 $(head -c "$2" /dev/zero | tr '\0' x)"
    echo "GET $1"
}
# Sixty small commands, values that are read back, and a reply longer than the client's windows.
{
    seq 60 | sed 's/^/ECHO round-/'
    for length in 1 100 4096 70000; do stores "key-$length" "$length"; done
    echo 'GET conformance:bytes:4000000'
} >"$WORK/commands"
{ seq 2000 | sed 's/^/ECHO round-/' && cat "$WORK/commands"; } >"$WORK/many"
# A value that wraps any send buffer.
{ cat "$WORK/commands" && stores key-long 3145728; } >"$WORK/long"
cat >"$WORK/cli" <<'END'
cli="$3/valkey-cli -e --rdma -h $1 -p $2"
case $CONFORMANCE_CASE in
flow.unhandled | flow.room-to-ask) exec $cli <"$WORK/many" ;;
xfer.send-memory) exec $cli <"$WORK/long" ;;
keep.idle) { echo 'ECHO idle' && cat && cat "$WORK/commands"; } | $cli ;;
*) exec $cli <"$WORK/commands" ;;
esac
END
cat >"$WORK/benchmark" <<'END'
benchmark="$3/valkey-benchmark --rdma -h $1 -p $2 -c 1 -t set"
case $CONFORMANCE_CASE in
flow.unhandled | flow.room-to-ask) exec $benchmark -n 2000 -d 3 ;;
xfer.send-memory) exec $benchmark -n 4 -d 3145728 ;;
*) exec $benchmark -n 400 -d 800 ;;
esac
END
