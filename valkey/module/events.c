/* Events of the endpoint, and the queue of connections whose handlers are due. Only the main
 * thread uses them.
 *
 * The endpoint reports each arrival once, but the server's handlers are level-triggered: they
 * expect to be called while there is more. So a connection stays in the queue while a call may
 * return something else than "not now". */
#include "engine.h"

#include "io_threads.h"

/* Consecutive reads of a connection before the next one is served: 16 KiB each, unless a long
 * argument is being received. */
#define READS_IN_A_ROW 4

/* Events of the endpoint that are taken in one cycle of the server's loop at most. Peers may cause
 * more without an end. */
#define EVENTS 64

static engineConn *first, *last;
static long long queued;
/* Queued connections are served before the loop sleeps. */
static int serving;
/* A time event will serve connections that were queued when the loop was about to sleep. */
static int kicked;
/* The endpoint has more to do, although its descriptor is not readable. */
static int unfinished;
/* IO threads were given reads after the server had checked whether they are busy. It would sleep
 * until another event. */
static int handed_over;
/* The time event for the endpoint's next time-out. */
static long long timer = AE_ERR;
static monotime timer_due;

static int serveQueue(void);

static long long kick(struct aeEventLoop *el, long long id, void *data) {
    UNUSED(el);
    UNUSED(id);
    UNUSED(data);
    kicked = 0;
    serveQueue();
    return AE_NOMORE;
}

void engineQueue(engineConn *conn) {
    if (conn->queued) return;
    conn->queued = 1;
    conn->next = NULL;
    conn->prev = last;
    if (last) {
        last->next = conn;
    } else {
        first = conn;
    }
    last = conn;
    queued++;
    /* The server installs write handlers, and takes results of IO threads, after it has asked
     * whether it may sleep. */
    if (!serving && !kicked) kicked = aeCreateTimeEvent(server.el, 0, kick, NULL, NULL) != AE_ERR;
}

void engineUnqueue(engineConn *conn) {
    if (!conn->queued) return;
    conn->queued = 0;
    if (conn->prev) {
        conn->prev->next = conn->next;
    } else {
        first = conn->next;
    }
    if (conn->next) {
        conn->next->prev = conn->prev;
    } else {
        last = conn->prev;
    }
    queued--;
}

/* Whether an IO thread has the connection, or its result was not taken yet. Handlers would have
 * no effect. `update_state` follows. */
static int isOffloaded(engineConn *conn) {
    client *c = connGetPrivateData(&conn->c);
    return c && clientConnPostponeMaskFromIOState(c);
}

static int isDue(engineConn *conn) {
    return (conn->readable && conn->c.read_handler) || (conn->writable && conn->c.write_handler);
}

/* Calls the read handler. Returns 0 if the connection was freed. */
static int serveReads(engineConn *conn) {
    for (int j = 0; j < READS_IN_A_ROW && conn->readable && conn->c.read_handler && !isOffloaded(conn); j++) {
        if (!callHandler(&conn->c, conn->c.read_handler)) return 0;
        if (conn->c.state != CONN_STATE_CONNECTED) break;
    }
    return 1;
}

static void serve(engineConn *conn) {
    int write_first = conn->c.flags & CONN_FLAG_WRITE_BARRIER;

    if (isOffloaded(conn)) return;
    if (!write_first && !serveReads(conn)) return;
    if (conn->writable && conn->c.write_handler && !isOffloaded(conn)) {
        if (!callHandler(&conn->c, conn->c.write_handler)) return;
    }
    if (write_first && !serveReads(conn)) return;
    /* If it has failed, the handlers have told the server, which frees it. */
    if (conn->c.state == CONN_STATE_CONNECTED && !isOffloaded(conn) && isDue(conn)) engineQueue(conn);
}

/* Serves the connections that are in the queue now. Handlers may close any connection, and run
 * the event loop. */
static int serveQueue(void) {
    int served = 0;

    serving++;
    for (long long left = queued; left > 0 && first; left--, served++) {
        engineConn *conn = first;
        engineUnqueue(conn);
        serve(conn);
    }
    serving--;
    return served;
}

/* The endpoint has failed: its connections end, and the server listens again when rdma-port is
 * set. */
static void fail(const char *why) {
    listIter clients;
    listNode *node;

    serverLog(LL_WARNING, "RDMA: all connections end: %s. CONFIG SET rdma-port begins anew.", why);
    aeDeleteFileEvent(server.el, vkrdma_descriptor(engine.endpoint), AE_READABLE);
    /* IO threads may be in a call on the endpoint. Later jobs of theirs find no endpoint. */
    drainIOThreadsQueue();
    vkrdma_endpoint_free(engine.endpoint);
    engine.endpoint = NULL;
    unfinished = 0;
    listRewind(server.clients, &clients);
    while ((node = listNext(&clients)) != NULL) {
        engineConn *conn = (engineConn *)((client *)listNodeValue(node))->conn;
        if (!conn || conn->c.type != &engineType) continue;
        /* A later endpoint may give this number to a connection of its own. */
        conn->id = 0;
        conn->ended = conn->readable = 1;
        engineQueue(conn);
    }
}

static void logAcceptError(uint64_t listener) {
    static mstime_t logged;
    vkrdma_error error;

    if (vkrdma_accept_error(engine.endpoint, listener, &error) == VKRDMA_OK || server.mstime - logged < 1000) return;
    logged = server.mstime;
    serverLog(LL_WARNING, "RDMA: cannot accept connections: %s", error.text);
}

static long long timeOut(struct aeEventLoop *el, long long id, void *data);

static void setTimer(void) {
    int64_t left = -1;

    vkrdma_next_timeout(engine.endpoint, &left, NULL);
    if (left == 0) unfinished = 1;
    if (left <= 0) return;
    monotime due = getMonotonicUs() + left;
    if (timer != AE_ERR) {
        if (timer_due <= due) return;
        aeDeleteTimeEvent(server.el, timer);
    }
    timer = aeCreateTimeEvent(server.el, (left + 999) / 1000, timeOut, NULL, NULL);
    timer_due = due;
}

/* Marks the connection that an event concerns. */
static void mark(const vkrdma_event *event) {
    engineConn *conn = event->data;

    if (event->kinds & VKRDMA_EVENT_ACCEPT_FAILED) logAcceptError(event->listener);
    if (!conn) return;
    if (event->kinds & VKRDMA_EVENT_WRITABLE) conn->writable = 1;
    if (event->kinds & VKRDMA_EVENT_ENDED) conn->ended = 1;
    if (event->kinds & (VKRDMA_EVENT_READABLE | VKRDMA_EVENT_ENDED)) conn->readable = 1;
    if (isDue(conn)) engineQueue(conn);
}

/* Makes turns, and accepts no more connections than the server wants in a cycle. */
static void turn(void) {
    vkrdma_event events[EVENTS];
    vkrdma_error error;
    size_t accepts = server.max_new_conns_per_cycle, left = EVENTS, room, count;

    if (!engine.endpoint) return;
    serving++;
    unfinished = 0;
    do {
        size_t accepted = 0;

        room = accepts < left ? accepts : left;
        if (vkrdma_progress(engine.endpoint, events, room, sizeof(events[0]), &count, &error) != VKRDMA_OK) {
            fail(error.text);
            serving--;
            return;
        }
        /* The server may close connections while it accepts: all are marked before. */
        for (size_t j = 0; j < count; j++) mark(&events[j]);
        for (size_t j = 0; j < count; j++) {
            if (!(events[j].kinds & VKRDMA_EVENT_OPENED)) continue;
            engineAccept(&events[j]);
            accepted++;
        }
        accepts -= accepted;
        left -= count;
    } while (count == room && accepts > 0 && left > 0);
    /* Events that were left make this time-out 0. */
    setTimer();
    serving--;
}

static void descriptorReadable(struct aeEventLoop *el, int fd, void *data, int mask) {
    UNUSED(el);
    UNUSED(fd);
    UNUSED(data);
    UNUSED(mask);
    turn();
    serveQueue();
}

static long long timeOut(struct aeEventLoop *el, long long id, void *data) {
    UNUSED(el);
    UNUSED(id);
    UNUSED(data);
    timer = AE_ERR;
    turn();
    serveQueue();
    return AE_NOMORE;
}

int engineWatch(void) {
    return aeCreateFileEvent(server.el, vkrdma_descriptor(engine.endpoint), AE_READABLE, descriptorReadable, NULL) == AE_ERR
               ? C_ERR
               : C_OK;
}

int engineHasPending(void) {
    return unfinished || queued > 0 || handed_over;
}

/* Called before each sleep of the loop. */
int engineProcessPending(void) {
    if (unfinished) turn();
    int served = serveQueue();
    handed_over = served > 0 && engineReadsPending() > 0;
    return served;
}
