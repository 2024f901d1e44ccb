/* Slow work on one connection stops no other: stalls HOST PORT [fork]
 *
 * The linker gives this program the library's calls of some functions (--wrap). For the context
 * that is to be slow, one of two waits until the program lets it go on: the teardown of a
 * connection, or a turn, in which memory is registered. Meanwhile another context of the same
 * event loop must be woken for each of its replies.
 *
 * fork: a child that is forked while another thread opens the devices can tell why it cannot
 * connect. */
#include "common.h"

#include <adapters/poll.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <vkrdma.h>

enum { ROUNDS = 50 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
/* The endpoint whose call waits, the last one that was made, and whether the call waits. */
static const vkrdma_endpoint *slow, *last;
static enum { FREE, TURN } slow_call;
static bool waits;
static int replies;

static void wait_if_slow(const vkrdma_endpoint *endpoint, int call) {
    pthread_mutex_lock(&lock);
    while (slow && slow == endpoint && slow_call == (unsigned)call) {
        waits = true;
        pthread_cond_broadcast(&changed);
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

vkrdma_code __real_vkrdma_endpoint_new_with_events(const vkrdma_shared_events *, const vkrdma_limits *, int, vkrdma_endpoint **, vkrdma_error *);
vkrdma_code __wrap_vkrdma_endpoint_new_with_events(const vkrdma_shared_events *events, const vkrdma_limits *limits, int waker,
                                                   vkrdma_endpoint **endpoint, vkrdma_error *error) {
    vkrdma_code code = __real_vkrdma_endpoint_new_with_events(events, limits, waker, endpoint, error);
    if (code == VKRDMA_OK) last = *endpoint;
    return code;
}

void __real_vkrdma_endpoint_free(vkrdma_endpoint *);
void __wrap_vkrdma_endpoint_free(vkrdma_endpoint *endpoint) {
    wait_if_slow(endpoint, FREE);
    __real_vkrdma_endpoint_free(endpoint);
}

vkrdma_code __real_vkrdma_progress(const vkrdma_endpoint *, vkrdma_event *, size_t, size_t, size_t *, vkrdma_error *);
vkrdma_code __wrap_vkrdma_progress(const vkrdma_endpoint *endpoint, vkrdma_event *events, size_t capacity, size_t size, size_t *count,
                                   vkrdma_error *error) {
    wait_if_slow(endpoint, TURN);
    return __real_vkrdma_progress(endpoint, events, capacity, size, count, error);
}

/* The device is being opened until some time after the program forks. */
static bool opens, forks;
vkrdma_code __real_vkrdma_verbs_open(vkrdma_device **, vkrdma_error *);
vkrdma_code __wrap_vkrdma_verbs_open(vkrdma_device **device, vkrdma_error *error) {
    vkrdma_code code = __real_vkrdma_verbs_open(device, error);
    pthread_mutex_lock(&lock);
    opens = true;
    pthread_cond_broadcast(&changed);
    while (!forks) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    /* The fork has begun, and waits for this call: nothing tells when. */
    (void)poll(NULL, 0, 100);
    return code;
}

static void set_slow(const vkrdma_endpoint *endpoint, int call) {
    pthread_mutex_lock(&lock);
    slow = endpoint;
    slow_call = (unsigned)call;
    waits = false;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void await_slow(void) {
    pthread_mutex_lock(&lock);
    while (!waits) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void on_reply(valkeyAsyncContext *ac, void *reply, void *none) {
    (void)none;
    CHECK(reply, "%s", ac->errstr);
    replies++;
}

static valkeyAsyncContext *begin(void) {
    valkeyOptions options = options_to(port);
    valkeyAsyncContext *ac = valkeyAsyncConnectWithOptions(&options);
    CHECK(ac && !ac->err, "%s", ac ? ac->errstr : "no context");
    CHECK(valkeyPollAttach(ac) == VALKEY_OK, "attach");
    return ac;
}

/* Each reply comes when the loop sleeps, so that another thread must wake it. */
static void ping(valkeyAsyncContext *ac, int rounds) {
    for (int wanted = replies + 1, last_wanted = replies + rounds; wanted <= last_wanted; wanted++) {
        CHECK(valkeyAsyncCommand(ac, on_reply, NULL, "PING") == VALKEY_OK, "%s", ac->errstr);
        while (replies < wanted) CHECK(valkeyPollTick(ac, 1000) >= 0, "tick");
    }
}

static void *connect_once(void *none) {
    (void)none;
    valkeyContext *c = connected();
    says(c, "PING", "PONG");
    valkeyFree(c);
    return NULL;
}

static void forked(void) {
    pthread_t thread;
    int status;
    CHECK(pthread_create(&thread, NULL, connect_once, NULL) == 0, "thread");
    pthread_mutex_lock(&lock);
    while (!opens) pthread_cond_wait(&changed, &lock);
    forks = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        alarm(60);
        valkeyOptions options = options_to(port);
        valkeyContext *c = valkeyConnectWithOptions(&options);
        CHECK(c && c->err && strstr(c->errstr, "fork"), "%s", c ? c->errstr : "no context");
        valkeyFree(c);
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child: %x", status);
    CHECK(pthread_join(thread, NULL) == 0, "join");
    puts("stalls: a child that is forked while the devices are opened can tell that");
}

int main(int argc, char **argv) {
    start(argc, argv);
    /* The test fails, and does not hang, if a wake-up does not come. */
    alarm(300);
    if (argc > 3) {
        forked();
        return 0;
    }
    forks = true;
    valkeyAsyncContext *ac = begin(), *other = begin();
    ping(ac, 1);
    ping(other, 1);
    set_slow(last, FREE);
    valkeyAsyncFree(other);
    await_slow();
    ping(ac, ROUNDS);
    set_slow(NULL, TURN);
    puts("stalls: a teardown that does not end stops no other context");

    other = begin();
    set_slow(last, TURN);
    await_slow();
    ping(ac, ROUNDS);
    set_slow(NULL, TURN);
    ping(other, 1);
    puts("stalls: nor does a connection that is being established");
    valkeyAsyncFree(other);
    valkeyAsyncFree(ac);
    return 0;
}
