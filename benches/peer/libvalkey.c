/* libvalkey's own transport, unmodified, on the device of device.c. It does the same work as
 * benches/examples/peer.rs does with ours.
 *
 *   libvalkey stream ROUNDS    a request of 64 bytes and its answer, which is there when it is read
 *   libvalkey after ROUNDS     the same after a value of 32 MiB
 *   libvalkey pieces ROUNDS    16 requests written, then their 16 answers read together
 *   libvalkey waits ROUNDS     a request whose answer comes when the client waits
 *   libvalkey value ROUNDS     GET of a value of 32 MiB, as a reply of libvalkey's */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rdma.h"
#include "valkey.h"
#include "valkey_private.h"

enum { LEN = 64, MANY = 16, VALUE = 32 << 20 };

static void check(int holds, const char *what, valkeyContext *c) {
    if (holds) return;
    fprintf(stderr, "libvalkey: %s: %s\n", what, c ? c->errstr : "no context");
    exit(1);
}

__attribute__((noinline)) void measured_write(valkeyContext *c) {
    check(c->funcs->write(c) == LEN, "write", c);
}

/* What a caller does for bytes of its own: libvalkey's reader copies them as well. */
__attribute__((noinline)) void measured_read(valkeyContext *c, char *into, size_t wanted) {
    while (wanted > 0) {
        char *at;
        ssize_t got = c->funcs->read_zc(c, &at);
        check(got > 0 && (size_t)got <= wanted, "read", c);
        memcpy(into, at, got);
        check(c->funcs->read_zc_done(c) == VALKEY_OK, "give back", c);
        into += got;
        wanted -= got;
    }
}

/* One copy into its reader, and one into the reply. */
__attribute__((noinline)) void measured_value(valkeyContext *c) {
    valkeyReply *reply = valkeyCommand(c, "GET key");
    check(reply && reply->type == VALKEY_REPLY_STRING && reply->len == VALUE && reply->str[VALUE - 1] == 'v', "value", c);
    freeReplyObject(reply);
}

static void set_request(valkeyContext *c, char when) {
    char request[LEN];
    memset(request, when, LEN);
    sdsclear(c->obuf);
    c->obuf = sdscatlen(c->obuf, request, LEN);
}

int main(int argc, char **argv) {
    char answers[MANY * LEN];
    valkeyOptions options = {0};
    long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 0;
    check(rounds > 0, "usage: libvalkey stream|after|pieces|waits|value ROUNDS", NULL);
    check(valkeyInitiateRdma() == VALKEY_OK, "begin", NULL);
    VALKEY_OPTIONS_SET_RDMA(&options, "192.0.2.1", 6379);
    valkeyContext *c = valkeyConnectWithOptions(&options);
    check(c && !c->err, "connect", c);
    /* The server's window is taken first. */
    set_request(c, 'w');
    check(c->funcs->write(c) == LEN, "write", c);
    measured_read(c, answers, LEN);
    if (!strcmp(argv[1], "value")) {
        sdsclear(c->obuf);
        for (long round = 0; round < rounds; round++) measured_value(c);
        return 0;
    }
    if (!strcmp(argv[1], "after")) {
        sdsclear(c->obuf);
        measured_value(c);
    }
    int pieces = strcmp(argv[1], "pieces") ? 1 : MANY;
    char when = strcmp(argv[1], "waits") ? 'a' : 'w';
    for (long round = 0; round < rounds; round++) {
        for (int piece = 1; piece <= pieces; piece++) {
            set_request(c, piece < pieces ? 'l' : when);
            measured_write(c);
        }
        measured_read(c, answers, (size_t)pieces * LEN);
    }
    /* The connection goes with the process. */
    return 0;
}
