/* Shared by the programs of this folder: a check that says what failed, and connections. */
#ifndef COMMON_H
#define COMMON_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <async.h>
#include <rdma.h>
#include <sds.h>
#include <valkey.h>

static const char *host;
static int port;

#define CHECK(holds, ...)                                            \
    do {                                                             \
        if (!(holds)) {                                              \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #holds); \
            fprintf(stderr, __VA_ARGS__);                            \
            fputc('\n', stderr);                                     \
            exit(1);                                                 \
        }                                                            \
    } while (0)

static inline valkeyOptions options_to(int to) {
    valkeyOptions options = {0};
    VALKEY_OPTIONS_SET_RDMA(&options, host, to);
    return options;
}

static inline valkeyContext *connected(void) {
    valkeyOptions options = options_to(port);
    valkeyContext *c = valkeyConnectWithOptions(&options);
    CHECK(c && !c->err, "%s", c ? c->errstr : "no context");
    return c;
}

static inline void says(valkeyContext *c, const char *command, const char *wanted) {
    valkeyReply *reply = valkeyCommand(c, command);
    CHECK(reply && reply->str && !strcmp(reply->str, wanted), "%s: %s", command, reply && reply->str ? reply->str : c->errstr);
    freeReplyObject(reply);
}

static inline void start(int argc, char **argv) {
    CHECK(argc > 2, "usage: %s HOST PORT …", argv[0]);
    host = argv[1];
    port = atoi(argv[2]);
    CHECK(valkeyInitiateRdma() == VALKEY_OK, "begin");
}

#endif
