/* A connection of a context, and the threads that keep connections alive and wake contexts. */
#ifndef VALKEY_RDMA_LINK_H
#define VALKEY_RDMA_LINK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/un.h>

#include <vkrdma.h>

#include "valkey.h"

/* The `privctx` of a context. The context's thread creates it; at the end the keeper takes it
 * over and frees it.
 *
 * It has three descriptors, those of endpoint and context included. The context's own, which the
 * program polls and may close, is one of these:
 *
 *   one end of a socket pair, to whose other end the endpoint writes when it is woken. It always
 *   has room, and async.c can call connect(2) on it. The keeper makes it readable when
 *   completions have come, so a program that polls it is woken by way of a thread.
 *
 *   an epoll instance, for VALKEY_OPT_NONBLOCK with the usual handler of pushes: the program is
 *   woken directly. It never has room. */
struct link {
    vkrdma_endpoint *endpoint;
    uint64_t connection;
    /* Bytes that the reader was shown and has not consumed. */
    size_t shown;
    /* What the endpoint writes to when it is woken, and closes when it is freed. */
    int waker;
    /* Readable when completions have come; -1 until the connection has a queue pair. */
    int completions;
    /* The context's descriptor is an epoll instance. */
    bool direct;
    /* libvalkey's asynchronous interface has used the context. */
    bool async;

    /* The connection was established, or has failed. Until then calls have nothing to do. */
    atomic_bool made;
    /* It was established. */
    atomic_bool opened;
    /* It has ended. Bytes that have arrived can still be read. */
    atomic_bool ended;
    /* A call of the context's thread is running, which serves the connection. */
    atomic_bool busy;
    /* There was such a call since the keeper's last look. */
    atomic_bool used;
    /* The context's descriptor was made readable, and was not drained since. */
    atomic_bool woken;
    /* The keeper wakes the context when completions come. */
    atomic_bool armed;
    /* A write of an asynchronous context waits for room. */
    atomic_bool wants_room;

    /* Decides what the first connect(2) of an asynchronous context returns: success, unless this
     * is the address of a socket. */
    struct sockaddr_un *answer;

    /* Used by the keeper only, under its lock. */
    enum link_state { LINK_OPEN, LINK_MAKING, LINK_CLOSING } state;
    /* Whether calls of its context wait, so that few programs poll it. */
    bool waits;
    /* When establishing or closing it is given up. */
    _Atomic int64_t until;
    struct link *next, *previous;
};

/* Milliseconds of the monotonic clock. */
int64_t link_now(void);

/* Makes a turn, and notes whether the connection was opened or has ended. */
static inline vkrdma_code link_turn(struct link *link, vkrdma_error *error) {
    /* There is one connection, and so at most one event. */
    vkrdma_event event;
    size_t count;
    vkrdma_code code = vkrdma_progress(link->endpoint, &event, 1, sizeof event, &count, error);
    if (code != VKRDMA_OK || count == 0) return code;
    if (event.kinds & VKRDMA_EVENT_OPENED) atomic_store(&link->opened, true);
    if (event.kinds & VKRDMA_EVENT_ENDED) atomic_store(&link->ended, true);
    return VKRDMA_OK;
}

/* Makes the context's descriptor readable. */
static inline void link_wake(struct link *link) {
    vkrdma_wake(link->endpoint, NULL);
    /* Only now, so that a call which drains it meanwhile does not hide this. */
    atomic_store(&link->woken, true);
}

/* ---- rdma.c */

/* Sets the context's error, in the 128 bytes that it has for the text. */
int link_fail(valkeyContext *c, int type, const char *text);

/* The same. What it is about comes first, in at most 60 bytes. */
int link_fail_about(valkeyContext *c, int type, const char *what, const char *text);

/* What errno means, with the limit that is reached. */
const char *link_reason(void);

/* Sleeps until the link has something to do, for at most so many milliseconds, and drains the
 * context's descriptor if it was woken. Returns 0, or -1 as poll(2) does. */
int link_sleep(valkeyContext *c, struct link *link, int64_t most);

/* Ends a call of a context that does not wait: from here on, whatever there is to do makes the
 * context's descriptor readable. */
void link_rest(valkeyContext *c, struct link *link);

/* ---- connect.c */

int link_connect(valkeyContext *c, const valkeyOptions *options);

/* ---- keeper.c */

/* Opens the devices and starts the threads, once per process. Returns NULL after an error. */
vkrdma_shared_events *keeper_events(vkrdma_error *error);

/* Has the keeper serve a connection: one that is established, or establish one. Returns false if
 * the kernel refuses to watch it. */
bool keeper_take(struct link *link, enum link_state state);

/* Has the keeper wake the context once, as soon as completions have come. */
void keeper_arm(struct link *link);

/* Has the keeper close a connection gracefully and free the link. Do not use the link after this
 * call. */
void keeper_end(struct link *link);

#endif
