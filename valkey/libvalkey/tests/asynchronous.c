/* libvalkey's asynchronous API: asynchronous HOST PORT UNUSED [killed]. By its adapter of
 * poll(2), or by libevent with -DLIBEVENT. */
#include "common.h"

#ifdef LIBEVENT
#include <adapters/libevent.h>
static struct event_base *base;
static void attach(valkeyAsyncContext *ac) { CHECK(valkeyLibeventAttach(ac, base) == VALKEY_OK, "attach"); }
static void turn(valkeyAsyncContext *ac) {
    (void)ac;
    event_base_loop(base, EVLOOP_ONCE);
}
#else
#include <adapters/poll.h>
static void attach(valkeyAsyncContext *ac) { CHECK(valkeyPollAttach(ac) == VALKEY_OK, "attach"); }
static void turn(valkeyAsyncContext *ac) { CHECK(valkeyPollTick(ac, 10) >= 0, "tick"); }
#endif

enum { COMMANDS = 5000 };
static int connects, connect_status, disconnects, disconnect_status, replies, messages, turns;
static size_t length;

static void on_connect(valkeyAsyncContext *ac, int status) {
    (void)ac;
    connects++;
    connect_status = status;
}
static void on_disconnect(const valkeyAsyncContext *ac, int status) {
    (void)ac;
    disconnects++;
    disconnect_status = status;
}
static void on_echo(valkeyAsyncContext *ac, void *reply, void *wanted) {
    valkeyReply *r = reply;
    CHECK(r && r->type == VALKEY_REPLY_STRING && atoi(r->str) == *(int *)wanted, "%s", ac->errstr ? ac->errstr : "no reply");
    replies++;
}
static void on_value(valkeyAsyncContext *ac, void *reply, void *none) {
    (void)none;
    valkeyReply *r = reply;
    CHECK(r && r->type != VALKEY_REPLY_ERROR, "%s", r ? r->str : ac->errstr);
    if (r->type == VALKEY_REPLY_STRING) length = r->len;
    replies++;
}
static void on_message(valkeyAsyncContext *ac, void *reply, void *none) {
    (void)ac, (void)none;
    if (reply) messages++;
}
static void on_nothing(valkeyAsyncContext *ac, void *reply, void *none) {
    (void)ac, (void)none;
    replies += reply ? 1 : 1000;
}

static valkeyAsyncContext *begin(int to, const struct timeval *limit) {
    valkeyOptions options = options_to(to);
    options.connect_timeout = limit;
    connects = disconnects = replies = messages = turns = 0;
    valkeyAsyncContext *ac = valkeyAsyncConnectWithOptions(&options);
    CHECK(ac && !ac->err, "%s", ac ? ac->errstr : "no context");
    attach(ac);
    valkeyAsyncSetConnectCallback(ac, on_connect);
    valkeyAsyncSetDisconnectCallback(ac, on_disconnect);
    return ac;
}

static valkeyAsyncContext *open_one(void) {
    valkeyAsyncContext *ac = begin(port, NULL);
    while (!connects) turn(ac);
    /* libvalkey has freed the context of a connection that failed. */
    CHECK(connect_status == VALKEY_OK, "it does not connect");
    return ac;
}

static void end(valkeyAsyncContext *ac) {
    valkeyAsyncDisconnect(ac);
    while (!disconnects) turn(ac);
    CHECK(disconnect_status == VALKEY_OK, "disconnected by an error");
}

static void commands(void) {
    static int numbers[COMMANDS];
    valkeyAsyncContext *ac = open_one();
    /* One after the other, and then many. */
    for (int at = 0; at < COMMANDS; at++) {
        numbers[at] = at;
        CHECK(valkeyAsyncCommand(ac, on_echo, &numbers[at], "ECHO %d", at) == VALKEY_OK, "%s", ac->errstr);
        while (at < 100 && replies <= at) turn(ac);
    }
    while (replies < COMMANDS) turn(ac);
    end(ac);
}

/* The socket has always room, and the server not: the loop sleeps until it has. */
static void values(void) {
    valkeyAsyncContext *ac = open_one();
    size_t len = 20000001;
    char *value = calloc(1, len);
    CHECK(valkeyAsyncCommand(ac, on_value, NULL, "SET large %b", value, len) == VALKEY_OK, "%s", ac->errstr);
    CHECK(valkeyAsyncCommand(ac, on_value, NULL, "GET large") == VALKEY_OK, "%s", ac->errstr);
    while (replies < 2) {
        turn(ac);
        turns++;
    }
    CHECK(length == len, "%zu", length);
    /* A few for each window in both directions, and not one for each time that there was
     * room. */
    CHECK(turns < 2000, "%d turns", turns);
    end(ac);
    free(value);
}

static void subscription(void) {
    valkeyContext *other = connected();
    valkeyAsyncContext *ac = open_one();
    CHECK(valkeyAsyncCommand(ac, on_message, NULL, "SUBSCRIBE news") == VALKEY_OK, "%s", ac->errstr);
    while (messages < 1) turn(ac);
    for (int at = 0; at < 50; at++) {
        freeReplyObject(valkeyCommand(other, "PUBLISH news %d", at));
        while (messages < at + 2) turn(ac);
    }
    valkeyFree(other);
    valkeyAsyncFree(ac);
    CHECK(disconnects == 1, "not disconnected");
}

static void nobody(int to) {
    struct timeval limit = {.tv_usec = 500000};
    valkeyAsyncContext *ac = begin(to, &limit);
    while (!connects) turn(ac);
    CHECK(connect_status == VALKEY_ERR, "connected");
    /* Given up while it is being made. */
    valkeyAsyncFree(begin(to, NULL));
}

static void killed(void) {
    const char *command = getenv("KILL");
    valkeyAsyncContext *ac = open_one();
    CHECK(command, "KILL names no command");
    CHECK(valkeyAsyncCommand(ac, on_nothing, NULL, "BLPOP nothing 0") == VALKEY_OK, "%s", ac->errstr);
    CHECK(valkeyAsyncCommand(ac, on_nothing, NULL, "PING") == VALKEY_OK, "%s", ac->errstr);
    turn(ac);
    CHECK(system(command) == 0, "%s", command);
    while (!disconnects) turn(ac);
    CHECK(disconnect_status == VALKEY_ERR && replies == 2000, "%d, %d", disconnect_status, replies);
}

int main(int argc, char **argv) {
    start(argc, argv);
#ifdef LIBEVENT
    base = event_base_new();
#endif
    if (argc > 4) {
        killed();
        return 0;
    }
    commands();
    values();
    subscription();
    nobody(argc > 3 ? atoi(argv[3]) : 0);
#ifdef LIBEVENT
    event_base_free(base);
#endif
    puts("asynchronous: passed");
    return 0;
}
