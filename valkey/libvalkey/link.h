/* A connection of a context, and the thread that keeps connections alive. */
#ifndef VALKEY_RDMA_LINK_H
#define VALKEY_RDMA_LINK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/un.h>

#include <vkrdma.h>

/* The `privctx` of a context. The context's thread creates it; at the end the keeper takes it
 * over and frees it. */
struct link {
    vkrdma_endpoint *endpoint;
    uint64_t connection;
    /* Bytes that the reader was shown and has not consumed. */
    size_t shown;
    /* The connection was established. */
    bool opened;
    /* It has ended. Bytes that have arrived can still be read. */
    atomic_bool ended;
    /* A call of the context's thread is running, which serves the connection. */
    atomic_bool busy;
    /* There was such a call since the keeper's last look. */
    atomic_bool used;
    /* A write of an asynchronous context waits for room. */
    atomic_bool wants_room;

    /* For an asynchronous context: the other end of the socket that it polls; -1 for other
     * contexts. The socket is readable when the endpoint is. While the connection is being
     * established, it has no room. */
    int signal;
    /* Decides what its first connect(2) returns: success, unless this is the address of a
     * socket. */
    struct sockaddr_un *answer;

    /* Used by the keeper only. */
    enum link_state { LINK_OPEN, LINK_MAKING, LINK_CLOSING, LINK_GONE } state;
    bool watched;
    /* When establishing or closing it is given up. */
    int64_t until;
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
    if (event.kinds & VKRDMA_EVENT_OPENED) link->opened = true;
    if (event.kinds & VKRDMA_EVENT_ENDED) atomic_store(&link->ended, true);
    return VKRDMA_OK;
}

/* Returns whether the server has registered a window. Every server does when the connection is
 * established. */
bool link_is_ready(const struct link *link);

/* Has the keeper serve a connection in this state. Returns false if there is no keeper. */
bool keeper_take(struct link *link, enum link_state state);

/* Has the keeper signal an asynchronous context once, as soon as its endpoint has something to
 * do. */
void keeper_signal(struct link *link);

/* Has the keeper close a connection gracefully and free the link. Do not use the link after this
 * call. */
void keeper_end(struct link *link);

#endif
