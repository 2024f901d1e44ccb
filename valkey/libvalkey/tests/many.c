/* Many contexts of one process: many HOST PORT COUNT blocking|nonblocking|asynchronous [THREADS]
 *
 * All of them connect, each thread its share, and each gets the reply to a command while the
 * others exist. Prints descriptors and time for each, or the text of the first that cannot
 * connect. With MOST in the environment the program fails if a context costs more descriptors
 * than that. */
#include "common.h"

#include <adapters/poll.h>
#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

enum { MOST_CONTEXTS = 4096, MOST_THREADS = 64 };
static void *contexts[MOST_CONTEXTS];
static const char *kind;
static int all, threads = 1;
static pthread_barrier_t connected_all, counted;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool failed;
static char failure[256];
/* Of the contexts of this thread. */
static _Thread_local int connects, replies;

static int descriptors(void) {
    int count = 0;
    DIR *open = opendir("/proc/self/fd");
    CHECK(open, "/proc/self/fd");
    while (readdir(open)) count++;
    closedir(open);
    return count;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* A busy machine is not a limit. */
static valkeyOptions patient(void) {
    static const struct timeval long_enough = {.tv_sec = 120};
    valkeyOptions options = options_to(port);
    options.connect_timeout = &long_enough;
    return options;
}

static void fails(const char *text, int at) {
    pthread_mutex_lock(&lock);
    if (!failure[0]) snprintf(failure, sizeof failure, "context %d: %s", at + 1, text);
    atomic_store(&failed, true);
    pthread_mutex_unlock(&lock);
}

static void on_connect(valkeyAsyncContext *ac, int status) {
    connects++;
    if (status == VALKEY_OK) return;
    fails(ac->errstr, (int)(size_t)ac->data);
    /* libvalkey frees it. */
    contexts[(size_t)ac->data] = NULL;
}

static void on_reply(valkeyAsyncContext *ac, void *reply, void *none) {
    (void)none;
    if (!reply) fails(ac->errstr ? ac->errstr : "no reply", (int)(size_t)ac->data);
    replies++;
}

/* Sleeps until one of the contexts has something to do, and does it. */
static void turn(int from, int to, int limit) {
    static _Thread_local struct pollfd polled[MOST_CONTEXTS];
    for (int at = from; at < to; at++) {
        valkeyPollEvents *of = contexts[at] ? ((valkeyAsyncContext *)contexts[at])->ev.data : NULL;
        polled[at] = (struct pollfd){.fd = -1};
        if (of) polled[at] = (struct pollfd){.fd = of->fd, .events = (short)((of->reading ? POLLIN : 0) | (of->writing ? POLLOUT : 0))};
    }
    CHECK(poll(polled + from, (nfds_t)(to - from), limit) >= 0, "poll");
    for (int at = from; at < to; at++) {
        if (contexts[at] && polled[at].revents) CHECK(valkeyPollTick(contexts[at], 0) >= 0, "tick");
    }
}

/* Sends the command as well: what comes first is the answer to the connect. */
static void connect_asynchronous(int from, int to) {
    for (int at = from; at < to && !failed; at++) {
        valkeyOptions options = patient();
        valkeyAsyncContext *ac = valkeyAsyncConnectWithOptions(&options);
        CHECK(ac, "no context");
        connects += ac->err != 0;
        if (ac->err) fails(ac->errstr, at);
        if (ac->err) {
            valkeyAsyncFree(ac);
            continue;
        }
        contexts[at] = ac;
        ac->data = (void *)(size_t)at;
        CHECK(valkeyPollAttach(ac) == VALKEY_OK, "attach");
        valkeyAsyncSetConnectCallback(ac, on_connect);
        CHECK(valkeyAsyncCommand(ac, on_reply, NULL, "PING") == VALKEY_OK, "%s", ac->errstr);
        turn(from, at + 1, 0);
    }
    while (connects < to - from && !failed) turn(from, to, 1000);
}

static void connect_blocking(int from, int to, int options_of_kind) {
    for (int at = from; at < to && !failed; at++) {
        valkeyOptions options = patient();
        options.options = options_of_kind;
        valkeyContext *c = contexts[at] = valkeyConnectWithOptions(&options);
        CHECK(c, "no context");
        if (c->err) fails(c->errstr, at);
    }
}

static void ping(int from, int to) {
    for (int at = from; at < to && !failed; at++) {
        valkeyContext *c = contexts[at];
        valkeyReply *reply = NULL;
        int done = 0;
        CHECK(valkeyAppendCommand(c, "PING") == VALKEY_OK && valkeyBufferWrite(c, &done) == VALKEY_OK && done, "%s", c->errstr);
        while (valkeyGetReply(c, (void **)&reply) == VALKEY_OK && !reply) {
            struct pollfd polled = {.fd = c->fd, .events = POLLIN};
            CHECK(poll(&polled, 1, -1) == 1 && valkeyBufferRead(c) == VALKEY_OK, "%s", c->errstr);
        }
        if (!reply) fails(c->errstr, at);
        freeReplyObject(reply);
    }
}

static void *share(void *nth) {
    int from = (int)(size_t)nth * all / threads, to = ((int)(size_t)nth + 1) * all / threads;
    bool asynchronous = !strcmp(kind, "asynchronous");
    if (asynchronous)
        connect_asynchronous(from, to);
    else
        connect_blocking(from, to, strcmp(kind, "blocking") ? VALKEY_OPT_NONBLOCK : 0);
    pthread_barrier_wait(&connected_all);
    pthread_barrier_wait(&counted);
    if (!asynchronous) ping(from, to);
    while (asynchronous && replies < to - from && !failed) turn(from, to, 1000);
    return NULL;
}

int main(int argc, char **argv) {
    static pthread_t started[MOST_THREADS];
    start(argc, argv);
    CHECK(argc > 4 && atoi(argv[3]) <= MOST_CONTEXTS, "how many, and of which kind");
    all = atoi(argv[3]);
    kind = argv[4];
    if (argc > 5) threads = atoi(argv[5]);
    CHECK(threads > 0 && threads <= MOST_THREADS, "how many threads");
    const char *most = getenv("MOST");
    /* The first connection opens what a process has once. */
    valkeyOptions options = patient();
    valkeyContext *first = valkeyConnectWithOptions(&options);
    CHECK(first && !first->err, "%s", first ? first->errstr : "no context");
    says(first, "PING", "PONG");
    int before = descriptors();
    double begun = seconds();
    CHECK(!pthread_barrier_init(&connected_all, NULL, (unsigned)threads + 1) && !pthread_barrier_init(&counted, NULL, (unsigned)threads + 1), "barriers");
    for (int nth = 0; nth < threads; nth++) CHECK(!pthread_create(&started[nth], NULL, share, (void *)(size_t)nth), "a thread");
    pthread_barrier_wait(&connected_all);
    double each = (double)(descriptors() - before) / all, time = (seconds() - begun) * 1000 / all;
    pthread_barrier_wait(&counted);
    for (int nth = 0; nth < threads; nth++) pthread_join(started[nth], NULL);
    if (failed) {
        printf("%4d %-12s %2d %s\n", all, kind, threads, failure);
        return 3;
    }
    printf("%4d %-12s %2d %.2f descriptors and %.2f ms each\n", all, kind, threads, each, time);
    CHECK(!most || each <= atof(most), "more than %s descriptors each", most);
    return 0;
}
