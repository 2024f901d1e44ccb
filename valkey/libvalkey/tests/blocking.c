/* Contexts that wait, and those that others wait for: blocking HOST PORT UNUSED [PART…]
 *
 * HOST and PORT are those of a Valkey server; on port UNUSED nothing listens. Without PART all
 * that need no more than that. */
#include "common.h"

#include <errno.h>
#include <poll.h>
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

static void refused(void) {
    valkeyOptions options = options_to(nobody);
    valkeyContext *c = valkeyConnectWithOptions(&options);
    CHECK(c && c->err && strstr(c->errstr, "nothing listens"), "%s", c ? c->errstr : "no context");
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

static int readable(valkeyContext *c, int milliseconds) {
    struct pollfd polled = {.fd = c->fd, .events = POLLIN};
    return poll(&polled, 1, milliseconds);
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
        int done = 0;
        CHECK(valkeyBufferWrite(c, &done) == VALKEY_OK && done, "%s", c->errstr);
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

int main(int argc, char **argv) {
    start(argc, argv);
    nobody = argc > 3 ? atoi(argv[3]) : 0;
    if (argc > 4) {
        if (!strcmp(argv[4], "killed")) killed();
        if (!strcmp(argv[4], "idle")) idle();
        if (!strcmp(argv[4], "last-words")) last_words();
        return 0;
    }
    set_get();
    read_copies();
    time_outs();
    refused();
    source();
    polled(0);
    polled(VALKEY_OPT_NONBLOCK);
    forked();
    puts("blocking: passed");
    return 0;
}
