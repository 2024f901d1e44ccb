/* Children change nothing for their parent, whatever they do with the contexts that they have of
 * it, and however they end: forks HOST PORT WAY WHEN, of a Valkey, for trust/forks/run, which has
 * the same for other faces. */
#define _GNU_SOURCE
#include "common.h"

#include <adapters/poll.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum deed { UNDERSCORE_EXIT, EXIT, RETURN, FREE, DISCONNECT, USE, EXEC, DEEDS };

static const char *const ways[DEEDS] = {"_exit", "exit", "return", "drop", "close", "use", "exec"};

enum { DESCRIPTORS = 4096 };

/* The contexts of each kind; one more waits in a call of another thread, or is NULL. */
static valkeyContext *blocking, *nonblocking, *waiting;
static valkeyAsyncContext *async;
static int replies, failures;

static void on_reply(valkeyAsyncContext *ac, void *reply, void *none) {
    (void)none;
    if (reply) {
        replies++;
        return;
    }
    CHECK(strstr(ac->errstr, "fork") || !ac->err, "%s", ac->errstr);
    failures++;
}

static void say_without_waiting(valkeyContext *c) {
    valkeyReply *reply = NULL;
    int done = 0;
    CHECK(valkeyAppendCommand(c, "PING") == VALKEY_OK && valkeyBufferWrite(c, &done) == VALKEY_OK && done, "%s", c->errstr);
    while (valkeyGetReply(c, (void **)&reply) == VALKEY_OK && !reply) {
        struct pollfd polled = {.fd = c->fd, .events = POLLIN};
        CHECK(poll(&polled, 1, -1) == 1 && valkeyBufferRead(c) == VALKEY_OK, "%s", c->errstr);
    }
    CHECK(reply, "%s", c->errstr);
    freeReplyObject(reply);
}

/* All of them work, and are woken. */
static void use_all(void) {
    says(blocking, "PING", "PONG");
    say_without_waiting(nonblocking);
    int wanted = replies + 1;
    CHECK(valkeyAsyncCommand(async, on_reply, NULL, "PING") == VALKEY_OK, "%s", async->errstr);
    while (replies < wanted) CHECK(valkeyPollTick(async, 1000) >= 0, "tick");
}

/* ---- what children do */

static void refused(valkeyContext *c) {
    int done;
    CHECK(valkeyAppendCommand(c, "SET of the-child") == VALKEY_OK, "%s", c->errstr);
    CHECK(valkeyBufferWrite(c, &done) == VALKEY_ERR && strstr(c->errstr, "fork"), "%s", c->errstr);
}

static void use_none(void) {
    CHECK(!valkeyCommand(blocking, "SET of the-child") && strstr(blocking->errstr, "fork"), "%s", blocking->errstr);
    refused(nonblocking);
    if (waiting) refused(waiting);
    CHECK(valkeyAsyncCommand(async, on_reply, NULL, "SET of the-child") == VALKEY_OK, "%s", async->errstr);
    /* The first tick that fails frees the context. */
    for (int times = 0; failures == 0 && times < 100; times++) valkeyPollTick(async, 100);
    CHECK(failures == 1, "the command of a child has no answer");
    valkeyOptions options = options_to(port);
    valkeyContext *c = valkeyConnectWithOptions(&options);
    CHECK(c && c->err && strstr(c->errstr, "fork"), "%s", c ? c->errstr : "no context");
    valkeyFree(c);
    CHECK(valkeyReconnect(blocking) == VALKEY_ERR && strstr(blocking->errstr, "fork"), "%s", blocking->errstr);
}

static void free_all(void) {
    valkeyFree(blocking);
    valkeyFree(nonblocking);
    valkeyFree(waiting);
    valkeyAsyncFree(async);
}

/* Returns true in a child that returns from main. */
static bool forked(enum deed deed) {
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        /* A child that hangs fails the test, and does not outlive it. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(60);
        switch (deed) {
        case UNDERSCORE_EXIT: _exit(0);
        case EXIT: exit(0);
        case RETURN: return true;
        case FREE: free_all(); exit(0);
        case DISCONNECT: valkeyAsyncDisconnect(async); exit(0);
        case USE: use_none(); exit(0);
        default: execl("/bin/true", "true", (char *)NULL); _exit(2);
        }
    }
    int status;
    while (waitpid(child, &status, 0) != child) CHECK(errno == EINTR, "wait");
    CHECK(status == 0, "the child that does %d: %x", deed, status);
    use_all();
    return false;
}

/* A child takes no wake-up that came before the fork: its parent reads the answer. An asynchronous
 * context is woken by a socket, which the child shares. */
static void leave_a_wake_up(void) {
    valkeyContext *c = &async->c;
    struct pollfd polled = {.fd = c->fd, .events = POLLIN};
    int wanted = replies + 1, status;
    CHECK(valkeyAsyncCommand(async, on_reply, NULL, "PING") == VALKEY_OK, "%s", async->errstr);
    valkeyAsyncHandleWrite(async);
    CHECK(poll(&polled, 1, -1) == 1, "no wake-up");
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(60);
        CHECK(valkeyBufferRead(c) == VALKEY_ERR && strstr(c->errstr, "fork"), "%s", c->errstr);
        _exit(0);
    }
    while (waitpid(child, &status, 0) != child) CHECK(errno == EINTR, "wait");
    CHECK(status == 0, "the child that reads: %x", status);
    CHECK(poll(&polled, 1, 0) == 1, "a child has taken a wake-up of its parent");
    while (replies < wanted) CHECK(valkeyPollTick(async, 1000) >= 0, "tick");
}

/* ---- the parent */

static valkeyContext *connected_without_waiting(void) {
    valkeyOptions options = options_to(port);
    options.options = VALKEY_OPT_NONBLOCK;
    valkeyContext *c = valkeyConnectWithOptions(&options);
    CHECK(c && !c->err, "%s", c ? c->errstr : "no context");
    return c;
}

static void *wait_for_a_value(void *none) {
    (void)none;
    valkeyReply *reply = valkeyCommand(waiting, "BLPOP forks 0");
    CHECK(reply && reply->elements == 2, "%s", waiting->errstr);
    freeReplyObject(reply);
    return NULL;
}

static bool is_blocked(void) {
    valkeyReply *reply = valkeyCommand(blocking, "INFO clients");
    CHECK(reply && reply->str, "%s", blocking->errstr);
    bool blocked = strstr(reply->str, "blocked_clients:1\r\n");
    freeReplyObject(reply);
    return blocked;
}

int main(int argc, char **argv) {
    static bool before[DESCRIPTORS];
    pthread_t thread;
    for (int fd = 0; fd < DESCRIPTORS; fd++) before[fd] = fcntl(fd, F_GETFD) >= 0;
    start(argc, argv);
    CHECK(argc == 5, "usage: %s HOST PORT WAY WHEN", argv[0]);
    alarm(300);
    blocking = connected();
    nonblocking = connected_without_waiting();
    valkeyOptions options = options_to(port);
    async = valkeyAsyncConnectWithOptions(&options);
    CHECK(async && !async->err && valkeyPollAttach(async) == VALKEY_OK, "%s", async ? async->errstr : "no context");
    use_all();
    /* A program that is executed has none of them. */
    for (int fd = 0; fd < DESCRIPTORS; fd++) {
        int flags = fcntl(fd, F_GETFD);
        CHECK(before[fd] || flags < 0 || flags & FD_CLOEXEC, "%d stays open", fd);
    }
    int deed = 0;
    while (deed < DEEDS && strcmp(argv[3], ways[deed]) != 0) deed++;
    bool wakes = strcmp(argv[3], "wake") == 0, busy = strcmp(argv[4], "busy") == 0;
    if (deed == DEEDS && !wakes) return 77;
    if (busy) {
        waiting = connected();
        CHECK(pthread_create(&thread, NULL, wait_for_a_value, NULL) == 0, "thread");
        while (!is_blocked()) (void)poll(NULL, 0, 10);
    }
    if (wakes) leave_a_wake_up();
    else if (forked(deed)) return 0;
    valkeyReply *reply = valkeyCommand(blocking, "EXISTS of");
    CHECK(reply && reply->integer == 0, "a child has set a key");
    freeReplyObject(reply);
    if (busy) {
        CHECK(is_blocked(), "a child has ended the call of its parent's thread");
        freeReplyObject(valkeyCommand(blocking, "RPUSH forks value"));
        CHECK(pthread_join(thread, NULL) == 0, "join");
    }
    free_all();
    return 0;
}
