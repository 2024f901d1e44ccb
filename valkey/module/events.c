/* Events of the endpoint, and the queue of connections whose handlers are due. Only the main
 * thread uses them.
 *
 * The endpoint reports each arrival once, but the server's handlers are level-triggered: they
 * expect to be called while there is more. So a connection stays in the queue while a call may
 * return something else than "not now".
 *
 * A cycle of the server's loop has four phases. The first two are alike for this module; in the
 * others it does nothing by itself.
 *
 * 1. Descriptors and timers that are due: connections are accepted, and handlers called. Read
 *    handlers execute commands, or hand reads to IO threads, whose commands begin the next phase.
 * 2. engineProcessPending: the same, for connections in the queue.
 * 3. The server writes its AOF, and waits for the disk with `appendfsync always`.
 * 4. The server writes replies itself, or hands them to IO threads.
 *
 * With `appendfsync always`, replies leave in phase 4 only, because the AOF has all commands only
 * then. So in the others a connection that is writable is put among those that the server writes
 * to in phase 4, and its write handler is not called. An IO thread that was handed replies before
 * phase 3 leaves them for phase 4. */
#include "engine.h"

/* Consecutive reads of a connection before the next one is served: 16 KiB each, unless a long
 * argument is being received. */
#define READS_IN_A_ROW 4

/* Events of the endpoint that are taken in one cycle of the server's loop at most. Peers may cause
 * more without an end. */
#define EVENTS 64

/* Queued connections are served before the loop sleeps. */
static int serving;
/* A time event will serve connections that were queued when the loop was about to sleep. */
static int kicked;
/* The endpoint has more to do, although its descriptor is not readable. */
static int unfinished;
/* IO threads were given work after the server had checked whether they are busy. It would sleep
 * until another event. */
static int handed_over;
/* Commands may have been executed since the server has written its AOF. */
static int unflushed;
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
    listLinkNodeTail(engine.queue, &conn->of_queue);
    /* The server installs write handlers, and takes results of IO threads, after it has asked
     * whether it may sleep. */
    if (!serving && !kicked) kicked = aeCreateTimeEvent(server.el, 0, kick, NULL, NULL) != AE_ERR;
}

void engineUnqueue(engineConn *conn) {
    if (!conn->queued) return;
    conn->queued = 0;
    listUnlinkNode(engine.queue, &conn->of_queue);
}

/* Whether an IO thread has the connection, or its result was not taken yet. Handlers would have
 * no effect. `engineTakeBack` follows. */
static int isOffloaded(engineConn *conn) {
    /* The private data of a link is a client only once it executes or answers commands. Before, it
     * is none, or the migration of slots. */
    if (conn->link && conn->c.read_handler != readQueryFromClient && conn->c.write_handler != sendReplyToClient) return 0;
    client *c = connGetPrivateData(&conn->c);
    return c && clientHasPendingIO(c);
}

/* In a handshake, handlers wait for seconds if they are called too early. */
static int mayRead(engineConn *conn) {
    return conn->readable && conn->c.read_handler && (!conn->link || conn->c.read_handler == readQueryFromClient || engineLinkReadable(conn));
}

static int mayWrite(engineConn *conn) {
    return conn->writable && conn->c.write_handler;
}

/* Whether replies wait for the AOF, whatever was set when the write handler was installed. */
static int waitsForDisk(engineConn *conn) {
    return conn->c.flags & CONN_FLAG_WRITE_BARRIER ||
           (conn->c.write_handler == sendReplyToClient && server.aof_fsync == AOF_FSYNC_ALWAYS);
}

/* Calls the read handler. Returns 0 if the connection was freed. */
static int serveReads(engineConn *conn) {
    for (int j = 0; j < READS_IN_A_ROW && mayRead(conn) && !isOffloaded(conn); j++) {
        unflushed = 1;
        if (!callHandler(&conn->c, conn->c.read_handler)) return 0;
        if (conn->c.state != CONN_STATE_CONNECTED) break;
    }
    return 1;
}

static void serve(engineConn *conn) {
    int waits;

    if (isOffloaded(conn) || !serveReads(conn)) return;
    waits = waitsForDisk(conn);
    if (mayWrite(conn) && !isOffloaded(conn)) {
        if (waits) {
            /* What the server cannot write then is a write handler again. */
            putClientInPendingWriteQueue(connGetPrivateData(&conn->c));
        } else if (!callHandler(&conn->c, conn->c.write_handler)) {
            return;
        }
    }
    if (isOffloaded(conn)) {
        handed_over = 1;
    } else if (conn->c.state == CONN_STATE_CONNECTED && (mayRead(conn) || (mayWrite(conn) && !waits))) {
        /* If it has failed, the handlers have told the server, which frees it. */
        engineQueue(conn);
    }
}

/* Serves the connections that are in the queue now. Handlers may close any connection, and run
 * the event loop. */
static int serveQueue(void) {
    int served = 0;

    serving++;
    for (unsigned long left = listLength(engine.queue); left > 0 && listLength(engine.queue) > 0; left--, served++) {
        engineConn *conn = listNodeValue(listFirst(engine.queue));
        engineUnqueue(conn);
        serve(conn);
    }
    serving--;
    return served;
}

void engineServe(engineConn *conn) {
    serving++;
    if (conn && (mayRead(conn) || mayWrite(conn))) engineQueue(conn);
    serving--;
    serveQueue();
}

/* The server hands the connection to an IO thread, to read or to write. */
void engineHandOver(connection *conn, int postponed) {
#if VALKEY_VERSION_NUM < 0x00090000
    /* It hands over replies in phase 4 only. */
    UNUSED(conn);
    UNUSED(postponed);
#else
    int held = postponed & CONN_POSTPONE_WRITE && unflushed && server.aof_fsync == AOF_FSYNC_ALWAYS;
    ((engineConn *)conn)->held = held;
    /* The thread is done as soon as it begins. */
    if (held) handed_over = 1;
#endif
}

/* An IO thread has finished with the connection. Events that came meanwhile have waited. The
 * commands that it has read follow. */
void engineTakeBack(connection *conn) {
    unflushed = 1;
    if (mayRead((engineConn *)conn) || mayWrite((engineConn *)conn)) engineQueue((engineConn *)conn);
}

/* The endpoint has failed: its connections end, and the server listens again when rdma-port is
 * set. */
void engineFail(const char *why) {
    listIter all;
    listNode *node;

    serverLog(LL_WARNING, "RDMA: all connections end: %s. CONFIG SET rdma-port begins anew.", why);
    aeDeleteFileEvent(server.el, vkrdma_descriptor(engine.endpoint), AE_READABLE);
    listRewind(engine.connections, &all);
    while ((node = listNext(&all)) != NULL) {
        engineConn *conn = listNodeValue(node);
        /* An IO thread may be in a call on the endpoint. Later jobs find no endpoint. */
        client *c = connGetPrivateData(&conn->c);
        if (c) waitForClientIO(c);
        /* A later endpoint may give this number to a connection of its own. */
        conn->id = 0;
        conn->ended = conn->readable = 1;
        engineQueue(conn);
    }
    vkrdma_endpoint_free(engine.endpoint);
    engine.endpoint = NULL;
    unfinished = 0;
    listRewind(engine.connections, &all);
    while ((node = listNext(&all)) != NULL) engineEndLoans(listNodeValue(node));
}

static void logAcceptError(uint64_t listener) {
    static monotime logged;
    vkrdma_error error;
    monotime now = getMonotonicUs();

    if (vkrdma_accept_error(engine.endpoint, listener, &error) == VKRDMA_OK || now - logged < 1000000) return;
    logged = now;
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
    if (event->kinds & (VKRDMA_EVENT_WRITABLE | VKRDMA_EVENT_RETURNED)) conn->writable = 1;
    if (event->kinds & VKRDMA_EVENT_ENDED) conn->ended = 1;
    if (event->kinds & (VKRDMA_EVENT_READABLE | VKRDMA_EVENT_ENDED)) conn->readable = 1;
    if (mayRead(conn) || mayWrite(conn)) engineQueue(conn);
}

/* Makes turns, and accepts no more connections than the server wants in a cycle. */
static void turn(void) {
    vkrdma_event events[EVENTS];
    vkrdma_error error;
    size_t accepts = server.max_new_conns_per_cycle, left = EVENTS, room, count;

    if (!engine.endpoint) return;
    engineLendIfWanted();
    serving++;
    unfinished = 0;
    do {
        size_t accepted = 0;

        room = accepts < left ? accepts : left;
        if (vkrdma_progress(engine.endpoint, events, room, sizeof(events[0]), &count, &error) != VKRDMA_OK) {
            engineFail(error.text);
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
    int pending = unfinished || listLength(engine.queue) > 0 || handed_over;
    handed_over = 0;
    return pending;
}

/* Called before the server writes its AOF, and then asks whether there is more. */
int engineProcessPending(void) {
    if (unfinished) turn();
    int served = serveQueue();
    unflushed = 0;
    return served;
}

int engineIsAsked(void) {
    handed_over = unflushed = 1;
    return connTypeHasPendingData() && (connTypeProcessPendingData(), !handed_over && !unflushed);
}
