/* A connection of a context, and the thread that keeps connections alive. */
#ifndef VALKEY_RDMA_LINK_H
#define VALKEY_RDMA_LINK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/un.h>

#include <vkrdma.h>

/* What a context has as its `privctx`. The context's thread makes it, and gives it to the keeper in the end, which frees it. */
struct link {
    vkrdma_endpoint *endpoint;
    uint64_t connection;
    /* Bytes that the reader has been shown and not given back. */
    size_t shown;
    /* The connection has been there. */
    bool opened;
    /* It has ended: what has arrived can still be read. */
    bool ended;
    /* A call of the context's thread is at it, which does what is to be done. */
    atomic_bool busy;
    /* Such a call has been, since the keeper looked last. */
    atomic_bool used;
    /* A write of an asynchronous context waits for room. */
    atomic_bool wants_room;

    /* Of an asynchronous context: the other end of what it polls, -1 for other contexts. Readable there is readable at the endpoint; while the
     * connection is being made, there is no room. */
    int signal;
    /* What its first connect(2) is to answer: success, unless this is the address of a socket. */
    struct sockaddr_un *answer;

    /* The keeper's. */
    enum link_state { LINK_OPEN, LINK_MAKING, LINK_CLOSING, LINK_GONE } state;
    bool watched;
    /* When making it, or ending it, is given up. */
    int64_t until;
    struct link *next, *previous;
};

/* Milliseconds of the monotonic clock. */
int64_t link_now(void);

/* Takes the events that are told. Returns whether there was one of bytes. */
bool link_events(struct link *link);

/* Returns whether the server has registered a window: each does, as soon as the connection is there. */
bool link_is_ready(const struct link *link);

/* Has the keeper look after a connection, in this state. Returns false if there can be no keeper. */
bool keeper_take(struct link *link, enum link_state state);

/* Has the keeper signal an asynchronous context once when there is something at its endpoint, or if there is already. */
void keeper_signal(struct link *link);

/* Has the keeper end a connection gracefully and free the link. No other call may be made with it. */
void keeper_end(struct link *link);

#endif
