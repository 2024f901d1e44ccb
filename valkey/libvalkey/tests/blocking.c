/* Contexts that wait, and those that others wait for: blocking HOST PORT UNUSED [PART]
 *
 * HOST and PORT are those of a Valkey server; on port UNUSED nothing listens. Without PART all
 * that need no more than that. */
#include "common.h"

#include <errno.h>
#include <malloc.h>
#include <poll.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

static int nobody;

static void set_get(void) {
    valkeyContext *c = connected();
    says(c, "PING", "PONG");
    /* Longer than windows and send buffers. */
    size_t len = 5000001;
    char *value = malloc(len);
    for (size_t at = 0; at < len; at++) value[at] = (char)(at * 7 + at / 1000);
    valkeyReply *reply = valkeyCommand(c, "SET large %b", value, len);
    CHECK(reply && reply->type == VALKEY_REPLY_STATUS, "%s", c->errstr);
    freeReplyObject(reply);
    for (int times = 0; times < 3; times++) {
        reply = valkeyCommand(c, "GET large");
        CHECK(reply && reply->len == len && !memcmp(reply->str, value, len), "%s", c->errstr);
        freeReplyObject(reply);
    }
    for (int round = 0; round < 3000; round++) CHECK(valkeyAppendCommand(c, "ECHO %d", round) == VALKEY_OK, "%s", c->errstr);
    for (int round = 0; round < 3000; round++) {
        CHECK(valkeyGetReply(c, (void **)&reply) == VALKEY_OK && atoi(reply->str) == round, "%s", c->errstr);
        freeReplyObject(reply);
    }
    CHECK(valkeyReconnect(c) == VALKEY_OK, "%s", c->errstr);
    says(c, "PING", "PONG");
    valkeyFree(c);
    free(value);
}

/* Bytes that the C library's allocator has given out. */
static size_t allocated(void) {
    struct mallinfo2 all = mallinfo2();
    return all.uordblks + all.hblkhd;
}

/* After a long value a context has no more than before it, but for a second window. */
static void after_long_value(void) {
    size_t len = 64 << 20, window = 1 << 20, little = 1 << 17;
    valkeyContext *c = connected();
    freeReplyObject(valkeyCommand(c, "SETRANGE long %d x", (int)len - 1));
    says(c, "ECHO before", "before");
    size_t before = allocated();
    valkeyReply *reply = valkeyCommand(c, "GET long");
    CHECK(reply && reply->len == len && reply->str[len - 1] == 'x', "%s", c->errstr);
    freeReplyObject(reply);
    for (int times = 0; times < 3; times++) says(c, "ECHO after", "after");
    size_t after = allocated();
    CHECK(after <= before + window + little, "%zu bytes, and then %zu", before, after);
    freeReplyObject(valkeyCommand(c, "DEL long"));
    valkeyFree(c);
}

/* The table's `read`, which valkey-cli uses. */
static void read_copies(void) {
    valkeyContext *c = connected();
    char into[5];
    CHECK(valkeyAppendCommand(c, "ECHO again") == VALKEY_OK, "%s", c->errstr);
    int done = 0;
    CHECK(valkeyBufferWrite(c, &done) == VALKEY_OK && done, "%s", c->errstr);
    for (const char *rest = "$5\r\nagain\r\n"; *rest;) {
        ssize_t got = c->funcs->read(c, into, sizeof into);
        CHECK(got > 0 && !memcmp(rest, into, (size_t)got), "%zd: %s", got, c->errstr);
        rest += got;
    }
    valkeyFree(c);
}

static void time_outs(void) {
    valkeyContext *c = connected();
    struct timeval soon = {.tv_usec = 20000}, never = {0};
    CHECK(valkeySetTimeout(c, soon) == VALKEY_OK, "%s", c->errstr);
    CHECK(!valkeyCommand(c, "BLPOP nothing 0"), "a reply");
    CHECK(c->err == VALKEY_ERR_IO && errno == EAGAIN, "%d: %s", c->err, c->errstr);
    CHECK(valkeyReconnect(c) == VALKEY_OK, "%s", c->errstr);
    CHECK(valkeySetTimeout(c, never) == VALKEY_OK, "%s", c->errstr);
    /* 0 is none. */
    valkeyReply *reply = valkeyCommand(c, "BLPOP nothing 0.3");
    CHECK(reply && reply->type == VALKEY_REPLY_NIL, "%s", c->errstr);
    freeReplyObject(reply);
    valkeyFree(c);
}

/* The text of a context that cannot connect is whole: it ends with `end`. */
static void fails_to(valkeyContext *c, const char *end) {
    size_t len = strlen(c->errstr), end_len = strlen(end);
    CHECK(c->err && len >= end_len && !strcmp(c->errstr + len - end_len, end), "%s", c->errstr);
}

static void refused(void) {
    valkeyOptions options = options_to(nobody);
    valkeyContext *c = valkeyConnectWithOptions(&options);
    fails_to(c, "refused the connection: nothing listens there for RDMA");
    CHECK(c->fd == VALKEY_INVALID_FD, "a descriptor is left");
    CHECK(valkeyReconnect(c) == VALKEY_ERR, "connected");
    valkeyFree(c);
    options.endpoint.tcp.ip = "no.such.name.invalid";
    c = valkeyConnectWithOptions(&options);
    CHECK(c && c->err == VALKEY_ERR_OTHER, "%s", c ? c->errstr : "no context");
    valkeyFree(c);
    options.endpoint.tcp.port = 65536;
    c = valkeyConnectWithOptions(&options);
    CHECK(c && c->err == VALKEY_ERR_OTHER, "%s", c ? c->errstr : "no context");
    valkeyFree(c);
}

/* From an address that is this machine's, and from one that is not. */
static void source(void) {
    valkeyOptions options = options_to(port);
    options.endpoint.tcp.source_addr = getenv("SOURCE");
    CHECK(options.endpoint.tcp.source_addr, "SOURCE names no address");
    valkeyContext *c = valkeyConnectWithOptions(&options);
    CHECK(c && !c->err, "%s", c ? c->errstr : "no context");
    says(c, "PING", "PONG");
    valkeyFree(c);
    options.endpoint.tcp.source_addr = "203.0.113.9";
    c = valkeyConnectWithOptions(&options);
    CHECK(c && c->err, "connected from an address of others");
    valkeyFree(c);
}

/* A machine without a device. What to do stands in the text, although it is short. */
static void no_device(void) {
    valkeyOptions options = options_to(port);
    valkeyContext *c = valkeyConnectWithOptions(&options);
    CHECK(c && c->err && strstr(c->errstr, "softrdma run --") && strlen(c->errstr) < sizeof c->errstr - 1, "%s", c ? c->errstr : "no context");
    valkeyFree(c);
}

/* A context that finds no descriptor says whose limit that is. */
static void no_descriptor(void) {
    struct rlimit before, few;
    int next = dup(0);
    CHECK(next >= 0 && getrlimit(RLIMIT_NOFILE, &before) == 0, "limits");
    close(next);
    few = before;
    /* One context costs three. */
    for (rlim_t more = 0; more < 3; more++) {
        few.rlim_cur = (rlim_t)next + more;
        CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0, "setrlimit");
        valkeyOptions options = options_to(port);
        valkeyContext *c = valkeyConnectWithOptions(&options);
        fails_to(c, "limit on open files (`ulimit -n`) is reached");
        valkeyFree(c);
    }
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0, "setrlimit");
}

static int ready(valkeyContext *c, short kinds, int milliseconds) {
    struct pollfd polled = {.fd = c->fd, .events = kinds};
    return poll(&polled, 1, milliseconds);
}

static int readable(valkeyContext *c, int milliseconds) { return ready(c, POLLIN, milliseconds); }

/* Writes all of the output. A context that does not wait may still be connecting. */
static void write_all(valkeyContext *c) {
    int done = 0;
    while (!done) {
        CHECK(valkeyBufferWrite(c, &done) == VALKEY_OK, "%s", c->errstr);
        if (!done) CHECK(ready(c, POLLOUT, -1) == 1, "poll");
    }
}

/* A program that polls the descriptor of a context, of any kind, sees each message, also those
 * that came while it wrote a value for which there was too little room. */
static void polled(int kind) {
    valkeyOptions options = options_to(port);
    options.options = kind;
    valkeyContext *c = valkeyConnectWithOptions(&options), *other = connected();
    size_t len = 3000000;
    char *value = calloc(1, len);
    valkeyReply *reply = NULL;
    CHECK(c && !c->err, "%s", c ? c->errstr : "no context");
    CHECK(valkeyAppendCommand(c, "HELLO 3") == VALKEY_OK && valkeyAppendCommand(c, "SUBSCRIBE news") == VALKEY_OK, "%s", c->errstr);
    for (int replies = 0; replies < 60; replies++) {
        write_all(c);
        while (valkeyGetReplyFromReader(c, (void **)&reply) == VALKEY_OK && !reply) {
            CHECK(readable(c, -1) == 1, "poll");
            CHECK(valkeyBufferRead(c) == VALKEY_OK, "%s", c->errstr);
        }
        CHECK(reply && reply->type != VALKEY_REPLY_ERROR, "%s", reply ? reply->str : c->errstr);
        freeReplyObject(reply);
        if (replies % 5 == 1 && replies < 50) {
            for (int message = 0; message < 4; message++) freeReplyObject(valkeyCommand(other, "PUBLISH news %d", message));
            CHECK(valkeyAppendCommand(c, "SET large %b", value, len) == VALKEY_OK, "%s", c->errstr);
        }
        if (replies >= 51) freeReplyObject(valkeyCommand(other, "PUBLISH news last"));
    }
    free(value);
    valkeyFree(other);
    valkeyFree(c);
}

/* A program that waits for room, as valkey-cli --pipe does: it makes a context that waits, and
 * then no longer lets it wait. */
static void piped(void) {
    enum { COMMANDS = 20000 };
    valkeyContext *c = connected();
    valkeyReply *reply;
    int replies = 0, sent = 0;
    c->flags &= ~VALKEY_BLOCK;
    while (replies < COMMANDS) {
        struct pollfd polled = {.fd = c->fd, .events = sent < COMMANDS ? POLLIN | POLLOUT : POLLIN};
        CHECK(poll(&polled, 1, -1) == 1, "poll");
        if (polled.revents & POLLIN) CHECK(valkeyBufferRead(c) == VALKEY_OK, "%s", c->errstr);
        do {
            CHECK(valkeyGetReply(c, (void **)&reply) == VALKEY_OK, "%s", c->errstr);
            if (!reply) continue;
            CHECK(reply->type == VALKEY_REPLY_STRING && atoi(reply->str) == replies, "%d: %s", replies, reply->str);
            freeReplyObject(reply);
            replies++;
        } while (reply);
        if (!(polled.revents & POLLOUT)) continue;
        for (int last = sent + 100; sent < last; sent++) CHECK(valkeyAppendCommand(c, "ECHO %d", sent) == VALKEY_OK, "%s", c->errstr);
        write_all(c);
    }
    valkeyFree(c);
}

/* Without a handler of pushes, a context that does not wait is made as those of the asynchronous
 * interface are: it connects while the program goes on. */
static void refused_later(void) {
    valkeyOptions options = options_to(nobody);
    options.options = VALKEY_OPT_NONBLOCK | VALKEY_OPT_NO_PUSH_AUTOFREE;
    valkeyContext *c = valkeyConnectWithOptions(&options);
    CHECK(c && !c->err, "%s", c ? c->errstr : "no context");
    CHECK(valkeyAppendCommand(c, "PING") == VALKEY_OK, "%s", c->errstr);
    write_all(c);
    CHECK(readable(c, -1) == 1 && valkeyBufferRead(c) == VALKEY_ERR, "connected");
    fails_to(c, "refused the connection: nothing listens there for RDMA");
    valkeyFree(c);
}

/* The last command is delivered, although the program does not wait for its reply. The server
 * must read it: Valkey's own may drop unread commands when the connection ends. The child is
 * forked before a device is opened. */
static void last_words(void) {
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        valkeyContext *c = connected();
        CHECK(valkeyAppendCommand(c, "SET last words") == VALKEY_OK, "%s", c->errstr);
        int done = 0;
        CHECK(valkeyBufferWrite(c, &done) == VALKEY_OK && done, "%s", c->errstr);
        valkeyFree(c);
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child: %x", status);
    valkeyContext *c = connected();
    says(c, "GET last", "words");
    valkeyFree(c);
}

/* A child has no part in the parent's connections, and does them no harm. */
static void forked(void) {
    valkeyContext *c = connected();
    says(c, "PING", "PONG");
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        CHECK(!valkeyCommand(c, "PING") && strstr(c->errstr, "fork"), "%s", c->errstr);
        valkeyFree(c);
        valkeyOptions options = options_to(port);
        c = valkeyConnectWithOptions(&options);
        CHECK(c && c->err && strstr(c->errstr, "fork"), "%s", c ? c->errstr : "no context");
        valkeyFree(c);
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child: %x", status);
    says(c, "PING", "PONG");
    valkeyFree(c);
}

/* A server dies by the command KILL, while a request waits for its reply. */
static void killed(void) {
    valkeyContext *c = connected(), *idle = connected();
    const char *command = getenv("KILL");
    CHECK(command, "KILL names no command");
    says(c, "PING", "PONG");
    CHECK(valkeyAppendCommand(c, "BLPOP nothing 0") == VALKEY_OK, "%s", c->errstr);
    int done = 0;
    CHECK(valkeyBufferWrite(c, &done) == VALKEY_OK && done, "%s", c->errstr);
    CHECK(system(command) == 0, "%s", command);
    valkeyReply *reply = NULL;
    CHECK(valkeyGetReply(c, (void **)&reply) == VALKEY_ERR && c->err, "a reply");
    printf("killed, in a call: %s\n", c->errstr);
    /* Who polls hears of it, too. */
    CHECK(readable(idle, -1) == 1, "poll");
    CHECK(valkeyBufferRead(idle) == VALKEY_ERR && idle->err, "no error");
    printf("killed, polled: %s\n", idle->errstr);
    /* A write is no place to learn it: programs that do not block try again. */
    CHECK(valkeyAppendCommand(idle, "PING") == VALKEY_OK, "%s", idle->errstr);
    CHECK(idle->funcs->write(idle) == (ssize_t)sdslen(idle->obuf), "the write failed");
    valkeyFree(idle);
    valkeyFree(c);
}

/* The connection is idle for that many seconds, while the server's keepalives use up receives.
 * Then the server must still answer: it would not if no receive were posted again. */
static void idle(void) {
    const char *seconds = getenv("IDLE");
    CHECK(seconds, "IDLE says no time");
    valkeyContext *c = connected();
    says(c, "PING", "PONG");
    sleep((unsigned)atoi(seconds));
    says(c, "PING", "PONG");
    valkeyFree(c);
}

static void polled_waiting(void) { polled(0); }
static void polled_direct(void) { polled(VALKEY_OPT_NONBLOCK); }
static void polled_without_pushes(void) { polled(VALKEY_OPT_NONBLOCK | VALKEY_OPT_NO_PUSH_AUTOFREE); }

static const struct {
    const char *name;
    void (*run)(void);
    bool by_name_only;
} parts[] = {
    {"set-get", set_get, false},
    {"after-long-value", after_long_value, false},
    {"read", read_copies, false},
    {"time-outs", time_outs, false},
    {"refused", refused, false},
    {"source", source, false},
    {"polled", polled_waiting, false},
    {"polled-direct", polled_direct, false},
    {"polled-without-pushes", polled_without_pushes, false},
    {"piped", piped, false},
    {"refused-later", refused_later, false},
    {"no-descriptor", no_descriptor, true},
    {"forked", forked, false},
    {"no-device", no_device, true},
    {"killed", killed, true},
    {"idle", idle, true},
    {"last-words", last_words, true},
};

int main(int argc, char **argv) {
    start(argc, argv);
    nobody = argc > 3 ? atoi(argv[3]) : 0;
    for (size_t at = 0; at < sizeof parts / sizeof *parts; at++) {
        if (argc > 4 ? !strcmp(argv[4], parts[at].name) : !parts[at].by_name_only) parts[at].run();
    }
    if (argc <= 4) puts("blocking: passed");
    return 0;
}
