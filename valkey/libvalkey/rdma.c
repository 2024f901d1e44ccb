/* libvalkey's RDMA connections, in place of its own src/rdma.c: the functions of its table, on
 * the C interface of an endpoint. */
#define _GNU_SOURCE
#include "rdma.h"

#include "async.h"
#include "async_private.h"
#include "valkey.h"
#include "valkey_private.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "link.h"

/* The longest sleep of a waiting call, in milliseconds. It bounds the delay of timers, and of
 * events that the keeper has taken. */
enum { LOOK = 100 };

/* The time-out of connecting if the program sets none. A reachable server takes much less. */
enum { CONNECT = 8000 };

/* ---- errors */

static int fail(valkeyContext *c, int type, const char *text) {
    char line[VKRDMA_ERROR_TEXT + 8];
    snprintf(line, sizeof line, "RDMA: %s", text);
    valkeySetError(c, type, line);
    return VALKEY_ERR;
}

/* Reports an error of an established connection. */
static int broken(valkeyContext *c, const vkrdma_error *error) {
    if (error->code == VKRDMA_DISCONNECTED) {
        valkeySetError(c, VALKEY_ERR_EOF, "Server closed the connection");
        return VALKEY_ERR;
    }
    return fail(c, VALKEY_ERR_IO, error->text);
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
    valkeySetError(c, VALKEY_ERR_EOF, "Server closed the connection");
    return VALKEY_ERR;
}

/* ---- waiting */

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
    /* A signal handler may close it to end the wait. */
    struct pollfd polled = {.fd = c->fd, .events = POLLIN};
    if (left <= 0) return timed_out(c);
    if (polled.fd < 0) return fail(c, VALKEY_ERR_IO, "the descriptor was closed");
    if (poll(&polled, 1, (int)(left < LOOK ? left : LOOK)) < 0 && errno != EINTR) {
        valkeySetError(c, VALKEY_ERR_IO, NULL);
        return VALKEY_ERR;
    }
    return progress(c, link, error);
}

static bool is_async(const struct link *link) { return link->signal >= 0; }

/* ---- reading and writing */

/* Returns the bytes that have arrived; a blocking context waits for some. Returns 1, or 0 for
 * nothing now, or an error. */
static int arrived(valkeyContext *c, struct link *link, vkrdma_pieces *pieces) {
    int64_t deadline = 0;
    vkrdma_error error;
    if (progress(c, link, &error) != VALKEY_OK) return VALKEY_ERR;
    for (;;) {
        bool ended = link->ended;
        if (vkrdma_arrived(link->endpoint, link->connection, pieces, &error) != VKRDMA_OK) return broken(c, &error);
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
    return result;
}

static ssize_t read_zc(valkeyContext *c, char **into) {
    struct link *link = c->privctx;
    vkrdma_pieces pieces;
    int some = arrived_alone(c, link, &pieces);
    link->shown = 0;
    if (some <= 0) return some;
    /* A program that polls the descriptor must see that more is left. */
    if (pieces.count > 1) vkrdma_wake(link->endpoint, NULL);
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
    if (read < pieces.bytes) vkrdma_wake(link->endpoint, NULL);
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
    while (done < len && result == VALKEY_OK) {
        switch (vkrdma_write(link->endpoint, link->connection, c->obuf + done, len - done, &now, &error)) {
        case VKRDMA_OK: done += now; break;
        case VKRDMA_AGAIN:
            if (is_async(link)) return (ssize_t)done;
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
    if (link->ended || (deadline != 0 && status_of(link).readable)) vkrdma_wake(link->endpoint, NULL);
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
    if (!write_some(ac)) return;
    /* The socket always has room. The keeper signals room at the peer. */
    _EL_DEL_WRITE(ac);
    _EL_ADD_READ(ac);
    /* A signal may have been lost to connect(2). */
    keeper_signal(link);
}

static void async_read(valkeyAsyncContext *ac) {
    valkeyContext *c = &ac->c;
    struct link *link = c->privctx;
    char signals[8];
    (void)!recv(c->fd, signals, sizeof signals, MSG_DONTWAIT);
    /* This takes what has come, including room. */
    if (valkeyBufferRead(c) != VALKEY_OK) {
        valkeyAsyncDisconnectInternal(ac);
        return;
    }
    if (atomic_load(&link->wants_room) && !write_some(ac)) return;
    keeper_signal(link);
    _EL_ADD_READ(ac);
    valkeyProcessCallbacks(ac);
}

/* Creates the socket that an asynchronous context polls. It has no room until the connection is
 * established. Then connect(2) on it succeeds, as with an address of no family, or is refused. */
static int make_socket(valkeyContext *c, struct link *link) {
    static const char filling[2048];
    int ends[2], least = 1;
    vk_free(c->saddr);
    c->addrlen = sizeof(struct sockaddr_un);
    c->saddr = vk_calloc(1, c->addrlen);
    if (!c->saddr) {
        valkeySetError(c, VALKEY_ERR_OOM, "Out of memory");
        return VALKEY_ERR;
    }
    link->answer = (struct sockaddr_un *)c->saddr;
    if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends)) return fail(c, VALKEY_ERR_IO, strerror(errno));
    c->fd = ends[0];
    link->signal = ends[1];
    if (setsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &least, sizeof least) || send(c->fd, filling, sizeof filling, MSG_DONTWAIT) < 0) {
        return fail(c, VALKEY_ERR_IO, strerror(errno));
    }
    return VALKEY_OK;
}

/* ---- connecting */

/* Opens the devices once per process, for the first connection, so that a process may fork
 * before. */
static int make_endpoint(valkeyContext *c, struct link *link) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static vkrdma_device *device;
    vkrdma_error error;
    pthread_mutex_lock(&lock);
    vkrdma_code code = device ? VKRDMA_OK : vkrdma_verbs_open(&device, &error);
    if (code == VKRDMA_OK) code = vkrdma_endpoint_new(device, NULL, &link->endpoint, &error);
    pthread_mutex_unlock(&lock);
    return code == VKRDMA_OK ? VALKEY_OK : fail(c, VALKEY_ERR_OTHER, error.text);
}

/* Copies a setting of the connection into the context, for valkeyReconnect. */
static int set_text(valkeyContext *c, char **where, const char *text) {
    if (*where == text) return VALKEY_OK;
    char *copy = text ? vk_strdup(text) : NULL;
    if (text && !copy) {
        valkeySetError(c, VALKEY_ERR_OOM, "Out of memory");
        return VALKEY_ERR;
    }
    vk_free(*where);
    *where = copy;
    return VALKEY_OK;
}

static int set_endpoint(valkeyContext *c, const valkeyOptions *options, long *timeout) {
    c->connection_type = VALKEY_CONN_RDMA;
    c->tcp.port = options->endpoint.tcp.port;
    if (c->tcp.port < 0 || c->tcp.port > UINT16_MAX) return fail(c, VALKEY_ERR_OTHER, "the port is not one of 0 to 65535");
    if (set_text(c, &c->tcp.host, options->endpoint.tcp.ip) != VALKEY_OK ||
        set_text(c, &c->tcp.source_addr, options->endpoint.tcp.source_addr) != VALKEY_OK) {
        return VALKEY_ERR;
    }
    if (!options->connect_timeout) {
        vk_free(c->connect_timeout);
        c->connect_timeout = NULL;
    } else if (valkeyContextUpdateConnectTimeout(c, options->connect_timeout) != VALKEY_OK) {
        valkeySetError(c, VALKEY_ERR_OOM, "Out of memory");
        return VALKEY_ERR;
    }
    return valkeyConnectTimeoutMsec(c, timeout);
}

static int resolve(valkeyContext *c, const char *name, struct addrinfo **found) {
    int prefer = c->flags & (VALKEY_PREFER_IPV4 | VALKEY_PREFER_IPV6);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    hints.ai_family = prefer == VALKEY_PREFER_IPV4 ? AF_INET : prefer == VALKEY_PREFER_IPV6 ? AF_INET6 : AF_UNSPEC;
    int code = getaddrinfo(name, NULL, &hints, found);
    return code == 0 ? VALKEY_OK : fail(c, VALKEY_ERR_OTHER, gai_strerror(code));
}

static bool numeric(const struct addrinfo *one, char *text) {
    return getnameinfo(one->ai_addr, one->ai_addrlen, text, NI_MAXHOST, NULL, 0, NI_NUMERICHOST) == 0;
}

static int refused(valkeyContext *c, const vkrdma_error *error) {
    int type = error->code == VKRDMA_TIMED_OUT ? VALKEY_ERR_TIMEOUT : error->fault == VKRDMA_FAULT_HERE ? VALKEY_ERR_OTHER : VALKEY_ERR_IO;
    return fail(c, type, error->text);
}

/* Waits until the connection is established and the server has registered a window. Nothing can
 * be sent before. */
static int made(valkeyContext *c, struct link *link, int64_t deadline) {
    vkrdma_error error;
    while (!link_is_ready(link)) {
        int64_t left = deadline - link_now();
        if (left <= 0) return fail(c, VALKEY_ERR_TIMEOUT, "the server has accepted the connection, and registers no window");
        /* The library itself limits the time until the connection is opened. */
        if (vkrdma_wait(link->endpoint, link->opened ? left * 1000 : -1, &error) != VKRDMA_OK || link_turn(link, &error) != VKRDMA_OK) {
            return refused(c, &error);
        }
        if (!link->ended) continue;
        if (vkrdma_check(link->endpoint, link->connection, &error) != VKRDMA_OK) return refused(c, &error);
        return fail(c, VALKEY_ERR_IO, "the server has closed the connection");
    }
    return VALKEY_OK;
}

/* Tries the addresses of the server in order. An asynchronous context tries only the first,
 * without waiting. */
static int connect_to(valkeyContext *c, struct link *link, const struct addrinfo *servers, const char *source, int64_t deadline) {
    char text[NI_MAXHOST];
    vkrdma_error error;
    for (const struct addrinfo *one = servers; one; one = one->ai_next) {
        int64_t left = deadline - link_now();
        if (!numeric(one, text)) continue;
        c->err = 0;
        link->opened = link->ended = false;
        if (vkrdma_connect(link->endpoint, text, (uint16_t)c->tcp.port, source, (uint64_t)(left > 0 ? left : 0) * 1000, NULL,
                           &link->connection, &error) != VKRDMA_OK) {
            refused(c, &error);
        } else if (is_async(link) || made(c, link, deadline) == VALKEY_OK) {
            return VALKEY_OK;
        } else {
            vkrdma_abort(link->endpoint, link->connection, NULL);
        }
    }
    return c->err ? VALKEY_ERR : fail(c, VALKEY_ERR_OTHER, "the server has no address");
}

static int connect_by_name(valkeyContext *c, struct link *link, int64_t deadline) {
    struct addrinfo *servers = NULL, *sources = NULL;
    char source[NI_MAXHOST];
    int result = VALKEY_ERR;
    if (resolve(c, c->tcp.host, &servers) == VALKEY_OK && (!c->tcp.source_addr || resolve(c, c->tcp.source_addr, &sources) == VALKEY_OK)) {
        result = connect_to(c, link, servers, sources && numeric(sources, source) ? source : NULL, deadline);
    }
    if (servers) freeaddrinfo(servers);
    if (sources) freeaddrinfo(sources);
    return result;
}

static int make_descriptor(valkeyContext *c, struct link *link) {
    /* A duplicate, which the program may close. */
    c->fd = fcntl(vkrdma_descriptor(link->endpoint), F_DUPFD_CLOEXEC, 0);
    return c->fd >= 0 ? VALKEY_OK : fail(c, VALKEY_ERR_IO, strerror(errno));
}

static void close_sockets(valkeyContext *c, int signal) {
    if (c->fd != VALKEY_INVALID_FD) close(c->fd);
    c->fd = VALKEY_INVALID_FD;
    if (signal >= 0) close(signal);
}

static int connect_context(valkeyContext *c, const valkeyOptions *options) {
    /* Only valkeyAsyncConnectWithOptions asks for this without a push handler. */
    bool async = !(c->flags & VALKEY_BLOCK) && !c->push_cb;
    long timeout = 0;
    c->flags &= ~VALKEY_CONNECTED;
    c->fd = VALKEY_INVALID_FD;
    c->privctx = NULL;
    if (set_endpoint(c, options, &timeout) != VALKEY_OK) return VALKEY_ERR;
    struct link *link = calloc(1, sizeof *link);
    if (!link) {
        valkeySetError(c, VALKEY_ERR_OOM, "Out of memory");
        return VALKEY_ERR;
    }
    link->signal = -1;
    link->until = link_now() + (c->connect_timeout ? timeout : CONNECT);
    if (make_endpoint(c, link) == VALKEY_OK && (!async || make_socket(c, link) == VALKEY_OK) &&
        connect_by_name(c, link, link->until) == VALKEY_OK && (async || make_descriptor(c, link) == VALKEY_OK)) {
        /* Without a keeper only calls of the program drive a connection, and there are none
         * while an asynchronous one is being established. */
        if (keeper_take(link, async ? LINK_MAKING : LINK_OPEN) || !async) {
            c->privctx = link;
            c->flags |= VALKEY_CONNECTED;
            return VALKEY_OK;
        }
        fail(c, VALKEY_ERR_OTHER, "there can be no thread");
    }
    close_sockets(c, link->signal);
    vkrdma_endpoint_free(link->endpoint);
    free(link);
    return VALKEY_ERR;
}

static void close_context(valkeyContext *c) {
    struct link *link = c->privctx;
    if (!link) return;
    /* The keeper owns the link from here on, and signals no more. */
    int signal = link->signal;
    c->privctx = NULL;
    keeper_end(link);
    close_sockets(c, signal);
}

/* Closing has freed it. */
static void free_context(void *none) { (void)none; }

/* Calls look it up when they wait. */
static int set_timeout(valkeyContext *c, const struct timeval timeout) {
    (void)c, (void)timeout;
    return VALKEY_OK;
}

static valkeyContextFuncs functions = {
    .connect = connect_context,
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
