/* A limit on locked memory ends no context that is in: locked HOST PORT
 *
 * The limit (`ulimit -l`) is 8 MiB and applies, as it does with `softrdma run --memlock`. */
#include "common.h"

#include <poll.h>
#include <stdbool.h>
#include <sys/resource.h>

enum {
    LIMIT = 8 << 20,
    /* An idle context locks 1 MiB for its window, and 44 KiB. */
    MOST = 7,
    /* More than the limit, and more than the rest of it. */
    LONG = 10 << 20,
    MORE = 2 << 20,
    /* How long memory of contexts that are idle or freed may take to be given back. */
    SECONDS = 120,
};

static char value[LONG];

static void set(valkeyContext *c, const char *key, size_t len) {
    for (size_t at = 0; at < len; at++) value[at] = (char)(at * 7 + at / 1000);
    valkeyReply *reply = valkeyCommand(c, "SET %s %b", key, value, len);
    CHECK(reply && reply->type == VALKEY_REPLY_STATUS, "%s", c->errstr);
    freeReplyObject(reply);
}

static void get(valkeyContext *c, const char *key, size_t len) {
    valkeyReply *reply = valkeyCommand(c, "GET %s", key);
    CHECK(reply && reply->len == len && !memcmp(reply->str, value, len), "%s", c->errstr);
    freeReplyObject(reply);
}

/* Returns the error's text if it is refused. Then it is gone. */
static const char *newcomer(int kind, valkeyContext **into) {
    static char text[sizeof(*into)->errstr];
    valkeyOptions options = options_to(port);
    options.options = kind;
    options.connect_timeout = &a_minute;
    *into = valkeyConnectWithOptions(&options);
    CHECK(*into, "no context");
    /* Without a handler of pushes it connects while the program goes on. */
    while (!(*into)->err && kind & VALKEY_OPT_NO_PUSH_AUTOFREE) {
        struct pollfd polled = {.fd = (*into)->fd, .events = POLLIN};
        CHECK(poll(&polled, 1, SECONDS * 1000) == 1, "neither connected nor refused");
        (void)valkeyBufferRead(*into);
    }
    if (!(*into)->err) return NULL;
    memcpy(text, (*into)->errstr, sizeof text);
    valkeyFree(*into);
    *into = NULL;
    return text;
}

/* It says that memory is lacking, by which limit, and that this process has it. */
static void is_our_limit(const char *text) { begins_with("locked", text, (const char *[]){"locked memory", "RLIMIT_MEMLOCK", "this process", NULL}); }

/* Connects as soon as there is memory. */
static valkeyContext *admitted(void) {
    for (int times = 0; times < SECONDS * 10; times++) {
        valkeyContext *c;
        const char *text = newcomer(0, &c);
        if (!text) return c;
        is_our_limit(text);
        (void)poll(NULL, 0, 100);
    }
    CHECK(false, "no memory was given back within %d s", SECONDS);
    return NULL;
}

int main(int argc, char **argv) {
    static const int kinds[] = {0, VALKEY_OPT_NONBLOCK, VALKEY_OPT_NONBLOCK | VALKEY_OPT_NO_PUSH_AUTOFREE};
    struct rlimit limit;
    valkeyContext *in[MOST], *none;
    start(argc, argv);
    CHECK(getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur == LIMIT, "the limit is not %d bytes", LIMIT);
    /* One that reads has a second window, and gives it back when it is idle. One that has written
     * may keep a send buffer: nothing tells it that the last bytes have arrived. It goes. */
    in[1] = connected();
    set(in[1], "long", LONG);
    in[0] = connected();
    get(in[0], "long", LONG);
    valkeyFree(in[1]);
    for (int one = 1; one < MOST; one++) in[one] = admitted();
    for (int one = 0; one < MOST; one++) says(in[one], "PING", "PONG");

    /* Others are refused, while one that is in waits for a reply, and has no part in that. */
    CHECK(valkeyAppendCommand(in[1], "BLPOP list 0") == VALKEY_OK, "%s", in[1]->errstr);
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        int done = 0;
        CHECK(valkeyBufferWrite(in[1], &done) == VALKEY_OK, "%s", in[1]->errstr);
        const char *text = newcomer(kinds[kind], &none);
        CHECK(text, "there is memory for %d idle contexts", MOST + 1);
        is_our_limit(text);
        for (int one = 2; one < MOST; one++) says(in[one], "PING", "PONG");
    }
    freeReplyObject(valkeyCommand(in[2], "LPUSH list pushed"));
    valkeyReply *reply = NULL;
    CHECK(valkeyGetReply(in[1], (void **)&reply) == VALKEY_OK && reply->elements == 2, "%s", in[1]->errstr);
    freeReplyObject(reply);

    /* There is no memory now for what was given back. */
    for (int one = 0; one < 2; one++) {
        set(in[one], "more", MORE);
        get(in[one], "more", MORE);
        get(in[one], "long", LONG);
    }
    CHECK(newcomer(0, &none), "there is memory for %d contexts", MOST + 1);
    for (int one = 0; one < MOST; one++) says(in[one], "PING", "PONG");

    /* One that leaves makes room for another. */
    valkeyFree(in[0]);
    in[0] = admitted();
    get(in[0], "long", LONG);
    for (int one = 0; one < MOST; one++) {
        says(in[one], "PING", "PONG");
        valkeyFree(in[one]);
    }
    puts("locked: a limit on locked memory refuses newcomers, and ends none that is in");
    return 0;
}
