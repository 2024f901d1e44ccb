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

/* For what succeeds, also on a machine that stands still for a while. */
static const struct timeval a_minute = {.tv_sec = 60};

static inline valkeyContext *connected(void) {
    valkeyOptions options = options_to(port);
    options.connect_timeout = &a_minute;
    valkeyContext *c = valkeyConnectWithOptions(&options);
    CHECK(c && !c->err, "%s", c ? c->errstr : "no context");
    return c;
}

static inline void says(valkeyContext *c, const char *command, const char *wanted) {
    valkeyReply *reply = valkeyCommand(c, command);
    CHECK(reply && reply->str && !strcmp(reply->str, wanted), "%s: %s", command, reply && reply->str ? reply->str : c->errstr);
    freeReplyObject(reply);
}

/* What must be said stands in the first 100 bytes of an error's text: libvalkey keeps 128. */
static inline void begins_with(const char *what, const char *text, const char *const *words) {
    char first[101] = "";
    strncat(first, text, sizeof first - 1);
    for (; *words; words++) CHECK(strstr(first, *words), "%s: '%s' is not in: %s", what, *words, first);
}

static inline void start(int argc, char **argv) {
    CHECK(argc > 2, "usage: %s HOST PORT …", argv[0]);
    host = argv[1];
    port = atoi(argv[2]);
    CHECK(valkeyInitiateRdma() == VALKEY_OK, "begin");
}

#endif
