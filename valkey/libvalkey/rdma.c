/* libvalkey's RDMA connections, in place of its own src/rdma.c: the functions of its table, on
 * the C interface of an endpoint. */
#define _GNU_SOURCE
#include "rdma.h"

#include "async.h"
#include "async_private.h"
#include "valkey.h"
#include "valkey_private.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "link.h"

/* The longest sleep of a waiting call, in milliseconds. */
enum { LOOK = 100 };

/* ---- errors */

/* Returns where the last part of a line begins, after its first third: a part that is a sentence
 * if there is one, else in parentheses, a clause, or a word. */
static char *last_part(char *line, size_t least) {
    static const char *const marks[] = {". ", "(", ": ", "; ", " "};
    char *open = NULL, *found;
    int depth = 0;
    for (char *at = line; *at; at++) {
        if (*at == '(' && depth++ == 0) open = at;
        if (*at == ')') depth--;
    }
    for (size_t kind = 0; kind < sizeof marks / sizeof *marks; kind++) {
        found = NULL;
        for (char *next = line; (next = strstr(next, marks[kind])); next++) found = next;
        if (*marks[kind] == '(') found = depth > 0 && open > line ? open - (open[-1] == ' ') : NULL;
        if (found && found >= line + least) return found;
    }
    return line + strlen(line);
}

/* Copies as many whole parts of a text into a line as it has room for. If an error number of the
 * system comes first, what it means follows, and is kept. */
static void shorten(char *line, size_t size, const char *text) {
    const char *number = strstr(text, "(os error "), *meaning = number ? strstr(number, "). ") : NULL;
    if (strlen(text) >= size && meaning) text = meaning + 3;
    line[0] = '\0';
    strncat(line, text, size - 1);
    if (strlen(text) >= size) *last_part(line, size / 3) = '\0';
}

const char *link_reason(void) {
    return errno == EMFILE ? "no descriptor is left: the limit on open files (`ulimit -n`) is reached" : strerror(errno);
}

int link_fail_about(valkeyContext *c, int type, const char *what, const char *text) {
    char line[sizeof c->errstr];
    int begun = snprintf(line, sizeof line, "RDMA: %.60s", what);
    shorten(line + begun, sizeof line - (size_t)begun, text);
    valkeySetError(c, type, line);
    return VALKEY_ERR;
}

int link_fail(valkeyContext *c, int type, const char *text) { return link_fail_about(c, type, "", text); }

/* Reports an error of an established connection. */
static int broken(valkeyContext *c, const vkrdma_error *error) {
    if (error->code == VKRDMA_DISCONNECTED) {
        valkeySetError(c, VALKEY_ERR_EOF, "Server closed the connection");
        return VALKEY_ERR;
    }
    return link_fail(c, VALKEY_ERR_IO, error->text);
}

/* Reports a time-out like read(2). */
static int timed_out(valkeyContext *c) {
    valkeySetError(c, VALKEY_ERR_IO, "Resource temporarily unavailable");
    errno = EAGAIN;
    return VALKEY_ERR;
}

/* Reports why a connection has ended. */
static int over(valkeyContext *c, struct link *link) {
    vkrdma_error error;
    if (vkrdma_check(link->endpoint, link->connection, &error) != VKRDMA_OK) return broken(c, &error);
    /* The keeper gave it up. */
    if (!atomic_load(&link->opened)) return link_fail_about(c, VALKEY_ERR_TIMEOUT, "timed out connecting to ", c->tcp.host);
    valkeySetError(c, VALKEY_ERR_EOF, "Server closed the connection");
    return VALKEY_ERR;
}

/* ---- waiting */

/* Takes out the wake-ups of the context's descriptor. */
static void drain(valkeyContext *c, struct link *link) {
    char wakeups[8];
    atomic_store(&link->woken, false);
    if (link->direct) {
        (void)!read(link->waker, wakeups, sizeof wakeups);
        return;
    }
    /* A call that waits must not be begun because of a wake-up that is long done with. */
    while (recv(c->fd, wakeups, sizeof wakeups, MSG_DONTWAIT) > 0 && link->waits) continue;
}

int link_sleep(valkeyContext *c, struct link *link, int64_t most) {
    struct pollfd polled[] = {{.fd = c->fd, .events = POLLIN}, {.fd = link->completions, .events = POLLIN}};
    int64_t left = -1;
    if (vkrdma_next_timeout(link->endpoint, &left, NULL) == VKRDMA_OK && left >= 0 && left / 1000 < most) most = (left + 999) / 1000;
    if (poll(polled, link->direct ? 1 : 2, (int)most) < 0) return errno == EINTR ? 0 : -1;
    if (polled[0].revents) drain(c, link);
    return 0;
}

static inline int progress(valkeyContext *c, struct link *link, vkrdma_error *error) {
    atomic_store_explicit(&link->used, true, memory_order_relaxed);
    return link_turn(link, error) == VKRDMA_OK ? VALKEY_OK : broken(c, error);
}

/* Returns until when a call may wait; INT64_MAX for no limit, which a time-out of 0 means for
 * sockets. */
static int command_deadline(valkeyContext *c, int64_t *deadline) {
    long timeout = 0;
    if (valkeyCommandTimeoutMsec(c, &timeout) != VALKEY_OK) return VALKEY_ERR;
    *deadline = timeout == 0 || timeout == INT_MAX ? INT64_MAX : link_now() + timeout;
    return VALKEY_OK;
}

/* Sleeps until something has come, and takes it. */
static int await(valkeyContext *c, struct link *link, int64_t deadline, vkrdma_error *error) {
    int64_t left = deadline == INT64_MAX ? LOOK : deadline - link_now();
    if (left <= 0) return timed_out(c);
    /* A signal handler may close it to end the wait. */
    if (c->fd == VALKEY_INVALID_FD) return link_fail(c, VALKEY_ERR_IO, "this program has closed the context's descriptor");
    if (link_sleep(c, link, left < LOOK ? left : LOOK) < 0) {
        valkeySetError(c, VALKEY_ERR_IO, NULL);
        return VALKEY_ERR;
    }
    return progress(c, link, error);
}

void link_rest(valkeyContext *c, struct link *link) {
    int64_t left;
    if (c->flags & VALKEY_BLOCK) return;
    /* A turn is bounded, and a wake-up comes only after one that has done all. */
    if (vkrdma_next_timeout(link->endpoint, &left, NULL) == VKRDMA_OK && left == 0) link_wake(link);
    if (!link->direct) keeper_arm(link);
}

/* ---- reading and writing */

/* Returns the bytes that have arrived; a blocking context waits for some. Returns 1, or 0 for
 * nothing now, or an error. */
static int arrived(valkeyContext *c, struct link *link, vkrdma_pieces *pieces) {
    int64_t deadline = 0;
    vkrdma_error error;
    if (!atomic_load_explicit(&link->made, memory_order_acquire)) return 0;
    /* Wake-ups in the descriptor, which a child shares, are its parent's. */
    if (vkrdma_descriptor(link->endpoint) < 0) return progress(c, link, &error);
    /* The endpoint itself wakes a context, too, if the connection ends. One that waits sees that
     * when it sleeps. */
    if (!(c->flags & VALKEY_BLOCK) || atomic_load_explicit(&link->woken, memory_order_relaxed)) drain(c, link);
    if (progress(c, link, &error) != VALKEY_OK) return VALKEY_ERR;
    for (;;) {
        bool ended = link->ended;
        /* One that failed before it had a queue pair has no bytes, and the reason is another. */
        if (vkrdma_arrived(link->endpoint, link->connection, pieces, &error) != VKRDMA_OK) return ended ? over(c, link) : broken(c, &error);
        if (pieces->bytes > 0) return 1;
        if (ended) return over(c, link);
        if (!(c->flags & VALKEY_BLOCK)) return 0;
        if (deadline == 0 && command_deadline(c, &deadline) != VALKEY_OK) return VALKEY_ERR;
        if (await(c, link, deadline, &error) != VALKEY_OK) return VALKEY_ERR;
    }
}

static int arrived_alone(valkeyContext *c, struct link *link, vkrdma_pieces *pieces) {
    atomic_store_explicit(&link->busy, true, memory_order_relaxed);
    int result = arrived(c, link, pieces);
    atomic_store_explicit(&link->busy, false, memory_order_release);
    if (result >= 0) link_rest(c, link);
    return result;
}

static ssize_t read_zc(valkeyContext *c, char **into) {
    struct link *link = c->privctx;
    vkrdma_pieces pieces;
    int some = arrived_alone(c, link, &pieces);
    link->shown = 0;
    if (some <= 0) return some;
    /* A program that polls the descriptor must see that more is left. */
    if (pieces.count > 1) link_wake(link);
    *into = (char *)pieces.pieces[0].base;
    link->shown = pieces.pieces[0].len;
    return (ssize_t)link->shown;
}

static ssize_t read_zc_done(valkeyContext *c) {
    struct link *link = c->privctx;
    vkrdma_error error;
    if (link->shown > 0 && vkrdma_consume(link->endpoint, link->connection, link->shown, &error) != VKRDMA_OK) return broken(c, &error);
    link->shown = 0;
    return VALKEY_OK;
}

static ssize_t read_copy(valkeyContext *c, char *into, size_t len) {
    struct link *link = c->privctx;
    vkrdma_pieces pieces;
    vkrdma_error error;
    size_t read = 0;
    int some = arrived_alone(c, link, &pieces);
    if (some <= 0) return some;
    if (vkrdma_read(link->endpoint, link->connection, into, len, &read, &error) != VKRDMA_OK) return broken(c, &error);
    if (read < pieces.bytes) link_wake(link);
    return (ssize_t)read;
}

/* Waits for room. */
static int room(valkeyContext *c, struct link *link, int64_t *deadline, vkrdma_error *error) {
    if (*deadline != 0) return await(c, link, *deadline, error);
    /* Room may have come already. */
    return command_deadline(c, deadline) == VALKEY_OK ? progress(c, link, error) : VALKEY_ERR;
}

static vkrdma_status status_of(const struct link *link) {
    vkrdma_status status = {0};
    vkrdma_status_of(link->endpoint, link->connection, &status, sizeof status, NULL);
    return status;
}

/* Takes all of the output, also when the connection has ended: reads report that, after all
 * bytes that arrived before. (And valkey-benchmark retries a failed write without end.) Only an
 * asynchronous context is told when there is room again. Other contexts wait for it, as in
 * libvalkey's own library. */
static ssize_t write_output(valkeyContext *c) {
    struct link *link = c->privctx;
    size_t len = sdslen(c->obuf), done = 0, now;
    int64_t deadline = 0;
    vkrdma_error error;
    int result = VALKEY_OK;
    if (!atomic_load_explicit(&link->made, memory_order_acquire)) return 0;
    while (done < len && result == VALKEY_OK) {
        switch (vkrdma_write(link->endpoint, link->connection, c->obuf + done, len - done, &now, &error)) {
        case VKRDMA_OK: done += now; break;
        case VKRDMA_AGAIN:
            if (link->async) {
                link_rest(c, link);
                return (ssize_t)done;
            }
            atomic_store_explicit(&link->busy, true, memory_order_relaxed);
            result = room(c, link, &deadline, &error);
            atomic_store_explicit(&link->busy, false, memory_order_release);
            break;
        default:
            link->ended = link->ended || status_of(link).ended;
            if (!link->ended) result = broken(c, &error);
        }
        if (link->ended) done = len;
    }
    /* A program that polls the descriptor must see what was taken meanwhile. */
    if (link->ended || (deadline != 0 && status_of(link).readable)) link_wake(link);
    if (deadline != 0) link_rest(c, link);
    return result == VALKEY_OK ? (ssize_t)done : VALKEY_ERR;
}

/* ---- asynchronous contexts */

/* Writes what is left of the output. Returns false when the context is gone. */
static bool write_some(valkeyAsyncContext *ac) {
    valkeyContext *c = &ac->c;
    struct link *link = c->privctx;
    int done = 0;
    /* Set before the write, so that room which comes later is reported. */
    atomic_store(&link->wants_room, true);
    if (valkeyBufferWrite(c, &done) != VALKEY_OK) {
        valkeyAsyncDisconnectInternal(ac);
        return false;
    }
    atomic_store(&link->wants_room, !done);
    return true;
}

static void async_write(valkeyAsyncContext *ac) {
    struct link *link = ac->c.privctx;
    if (!link->async) {
        int error;
        socklen_t len = sizeof error;
        link->async = true;
        /* connect(2) has dissolved the pair, which is an error of the other end, and wake-ups may
         * be lost with it. */
        getsockopt(link->waker, SOL_SOCKET, SO_ERROR, &error, &len);
        link_wake(link);
    }
    if (!write_some(ac)) return;
    /* The socket always has room. A read finds out that the peer has some. */
    _EL_DEL_WRITE(ac);
    _EL_ADD_READ(ac);
}

static void async_read(valkeyAsyncContext *ac) {
    valkeyContext *c = &ac->c;
    struct link *link = c->privctx;
    /* This takes what has come, including room. */
    if (valkeyBufferRead(c) != VALKEY_OK) {
        valkeyAsyncDisconnectInternal(ac);
        return;
    }
    if (atomic_load(&link->wants_room) && !write_some(ac)) return;
    _EL_ADD_READ(ac);
    valkeyProcessCallbacks(ac);
}

/* ---- the table */

static void close_context(valkeyContext *c) {
    struct link *link = c->privctx;
    if (!link) return;
    c->privctx = NULL;
    /* The keeper owns the link from here on. */
    keeper_end(link);
    if (c->fd != VALKEY_INVALID_FD) close(c->fd);
    c->fd = VALKEY_INVALID_FD;
}

/* Closing has freed it. */
static void free_context(void *none) { (void)none; }

/* Calls look it up when they wait. */
static int set_timeout(valkeyContext *c, const struct timeval timeout) {
    (void)c, (void)timeout;
    return VALKEY_OK;
}

static valkeyContextFuncs functions = {
    .connect = link_connect,
    .close = close_context,
    .free_privctx = free_context,
    .async_read = async_read,
    .async_write = async_write,
    .read = read_copy,
    .read_zc = read_zc,
    .read_zc_done = read_zc_done,
    .write = write_output,
    .set_timeout = set_timeout,
};

static void register_functions(void) { valkeyContextRegisterFuncs(&functions, VALKEY_CONN_RDMA); }

int valkeyInitiateRdma(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_functions);
    return VALKEY_OK;
}
