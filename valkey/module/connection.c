/* The connection type: what the server calls of a connection. */
#include "engine.h"

static connection *create(void) {
    engineConn *conn = zcalloc(sizeof(*conn));
    conn->c.type = engineType;
    conn->c.fd = vkrdma_descriptor(engine.endpoint);
    conn->c.iovcnt = IOV_MAX;
    conn->writable = 1;
    listInitNode(&conn->of_queue, conn);
    listInitNode(&conn->of_all, conn);
    listLinkNodeTail(engine.connections, &conn->of_all);
    return &conn->c;
}

static connection *createAccepted(int fd, void *priv) {
    engineConn *conn = (engineConn *)create();
    UNUSED(fd);
    conn->id = *(uint64_t *)priv;
    conn->c.state = CONN_STATE_ACCEPTING;
    return &conn->c;
}

/* The connection that the server is accepting, and whether it has written to it: only a refusal is
 * written so early. Both are the main thread's. */
static engineConn *accepting;
static int refused;

void engineAccept(const vkrdma_event *opened) {
    struct ClientFlags flags = {0};
    char ip[NET_IP_STR_LEN];
    int port;
    uint64_t id = opened->connection;
    connection *conn = connCreateAccepted(engineType, -1, &id);

    ((engineConn *)conn)->ended = (opened->kinds & VKRDMA_EVENT_ENDED) != 0;
    ((engineConn *)conn)->readable = (opened->kinds & (VKRDMA_EVENT_READABLE | VKRDMA_EVENT_ENDED)) != 0;
    vkrdma_set_data(engine.endpoint, id, conn, NULL);
    connAddrPeerName(conn, ip, sizeof(ip), &port);
    serverLog(LL_VERBOSE, "RDMA: accepted %s:%d", ip, port);
    /* It stays until this returns, although the server may close it. */
    connIncrRefs(conn);
    accepting = (engineConn *)conn;
    refused = 0;
    acceptCommonHandler(conn, flags, ip);
    accepting = NULL;
    connDecrRefs(conn);
    if (conn->flags & CONN_FLAG_CLOSE_SCHEDULED) {
        connClose(conn);
        return;
    }
    /* A client that protected mode refuses is to be closed later in this cycle. Before the next
     * turn it has no window, and costs little until it has read why. */
    if (refused) freeClient(connGetPrivateData(conn));
}

static int acceptNow(connection *conn, ConnectionCallbackFunc handler) {
    if (conn->state != CONN_STATE_ACCEPTING || engineFitsClient(conn) != C_OK) return C_ERR;
    conn->state = CONN_STATE_CONNECTED;
    /* A handler that closes the connection has freed its client, and the connection is freed after
     * the handler. After C_ERR the server would use both. */
    callHandler(conn, handler);
    return C_OK;
}

static int getAddress(connection *conn, char *ip, size_t size, int *port, int remote) {
    uint64_t id = ((engineConn *)conn)->id;
    vkrdma_address address;
    vkrdma_code code = remote ? vkrdma_peer_address(engineEndpoint((engineConn *)conn), id, &address, NULL)
                              : vkrdma_local_address(engineEndpoint((engineConn *)conn), id, &address, NULL);
    int known = code == VKRDMA_OK && (!ip || strlen(address.text) < size);

    if (ip && size > 0) snprintf(ip, size, "%s", known ? address.text : "?");
    if (port) *port = known ? address.port : 0;
    return known ? 0 : -1;
}

static int isLocal(connection *conn) {
    uint32_t local;
    return vkrdma_is_local(engineEndpoint((engineConn *)conn), ((engineConn *)conn)->id, &local, NULL) == VKRDMA_OK ? (int)local : -1;
}

/* The kernel of TCP delivers what was written before a close; so does this. A client that is freed
 * has ended its loans before. */
static void closeConnection(connection *conn) {
    engineConn *self = (engineConn *)conn;

    /* The second call is that of callHandler. */
    if (!(conn->flags & CONN_FLAG_CLOSE_SCHEDULED)) listUnlinkNode(engine.connections, &self->of_all);
    engineUnqueue(self);
    if (engineEndLoans(self)) serverLog(LL_WARNING, "RDMA: a connection is closed that lends memory of its client");
    if (self->id) vkrdma_abandon(engine.endpoint, self->id, engine.linger, NULL);
    self->id = 0;
    conn->fd = -1;
    if (connHasRefs(conn)) {
        conn->flags |= CONN_FLAG_CLOSE_SCHEDULED;
        return;
    }
    zfree(conn);
}

/* TCP shuts down a socket that a child process shares. A child cannot use this connection. */
static void shutdownConnection(connection *conn) {
    UNUSED(conn);
}

/* Returns -1 for a call that failed. Unless a later call may succeed, the connection is no
 * longer in the state connected. */
static int nothing(connection *conn, const vkrdma_error *error) {
    if (error->code == VKRDMA_AGAIN || error->code == VKRDMA_FORKED) return -1;
    switch (error->fault) {
    case VKRDMA_FAULT_PEER: conn->last_errno = error->code == VKRDMA_DISCONNECTED ? ECONNRESET : EPROTO; break;
    case VKRDMA_FAULT_NETWORK: conn->last_errno = error->code == VKRDMA_TIMED_OUT ? ETIMEDOUT : ECONNABORTED; break;
    case VKRDMA_FAULT_HERE: conn->last_errno = error->code == VKRDMA_MEMORY ? ENOMEM : EIO; break;
    default: conn->last_errno = ENOTCONN;
    }
    if (conn->state == CONN_STATE_CONNECTED) conn->state = CONN_STATE_ERROR;
    return -1;
}

static int readInto(connection *conn, void *buffer, size_t size) {
    engineConn *self = (engineConn *)conn;
    vkrdma_error error;
    size_t bytes;

    /* A replica passes on what a primary says of its length. As with read(2), a negative one is an
     * error, whatever the buffer is, and the result of 0 is the end. */
    if (size > SSIZE_MAX || size == 0) {
        if (size) conn->last_errno = EFAULT;
        if (conn->state == CONN_STATE_CONNECTED) conn->state = size ? CONN_STATE_ERROR : CONN_STATE_CLOSED;
        return size ? -1 : 0;
    }
    if (size > INT_MAX) size = INT_MAX;
    self->readable = 0;
    error.code = vkrdma_read(engineEndpoint(self), self->id, buffer, size, &bytes, &error);
    if (error.code != VKRDMA_OK) return nothing(conn, &error);
    if (bytes == 0) {
        conn->state = CONN_STATE_CLOSED;
    } else if (bytes == size || self->ended) {
        self->readable = 1;
    }
    return (int)bytes;
}

static int writePieces(connection *conn, const struct iovec *pieces, int count) {
    engineConn *self = (engineConn *)conn;
    vkrdma_error error;
    size_t bytes, all = 0;

    if (self->held && !inMainThread()) return -1;
    if (inMainThread() && self == accepting) refused = 1;
    self->writable = 0;
    if (engineMayLend(self, pieces, count)) {
        ssize_t reported = engineWriteLending(self, pieces, count, &error);
        return reported > 0 ? (int)reported : nothing(conn, &error);
    }
    for (int j = 0; j < count; j++) all += pieces[j].iov_len;
    error.code = vkrdma_writev(engineEndpoint(self), self->id, pieces, count, &bytes, &error);
    if (error.code != VKRDMA_OK) return nothing(conn, &error);
    if (bytes == all) self->writable = 1;
    /* It fits: it is at most the length of the send buffer. */
    return (int)bytes;
}

static int writeBytes(connection *conn, const void *data, size_t size) {
    struct iovec piece = {.iov_base = (void *)data, .iov_len = size};
    return writePieces(conn, &piece, 1);
}

static int setWriteHandler(connection *conn, ConnectionCallbackFunc handler, int barrier) {
    engineConn *self = (engineConn *)conn;

    conn->write_handler = handler;
    if (barrier) {
        conn->flags |= CONN_FLAG_WRITE_BARRIER;
    } else {
        conn->flags &= ~CONN_FLAG_WRITE_BARRIER;
    }
    if (handler && self->writable) engineQueue(self);
    return C_OK;
}

static int setReadHandler(connection *conn, ConnectionCallbackFunc handler) {
    engineConn *self = (engineConn *)conn;

    conn->read_handler = handler;
    if (handler && self->readable) engineQueue(self);
    return C_OK;
}

static const char *getLastError(connection *conn) {
    static vkrdma_error error;

    if (vkrdma_check(engineEndpoint((engineConn *)conn), ((engineConn *)conn)->id, &error) != VKRDMA_OK) return error.text;
    return strerror(conn->last_errno);
}

/* The server makes no connections by this type: those of replication are made in link.c, and the
 * cluster's bus and MIGRATE go over TCP or TLS. */
static int connectNow(connection *conn, const char *address, int port, long long timeout) {
    UNUSED(address);
    UNUSED(port);
    UNUSED(timeout);
    conn->state = CONN_STATE_ERROR;
    conn->last_errno = EOPNOTSUPP;
    return C_ERR;
}

#if VALKEY_VERSION_NUM < 0x00090000
static const char *getType(connection *conn) {
    UNUSED(conn);
    return CONN_TYPE_RDMA;
}

static int connectTo(connection *conn, const char *address, int port, const char *source, ConnectionCallbackFunc handler) {
#else
static int getType(void) {
    return CONN_TYPE_RDMA;
}

static int connectTo(connection *conn, const char *address, int port, const char *source, int multipath, ConnectionCallbackFunc handler) {
    UNUSED(multipath);
#endif
    UNUSED(source);
    UNUSED(handler);
    return connectNow(conn, address, port, 0);
}

static ssize_t waitForBytes(connection *conn, char *bytes, ssize_t size, long long timeout) {
    UNUSED(bytes);
    UNUSED(size);
    UNUSED(timeout);
    conn->last_errno = EOPNOTSUPP;
    return -1;
}

/* A server whose tables are longer finds no functions behind the first one. */
ConnectionType engineType[2] = {{
    .get_type = getType,
    .accept_handler = engineIgnore,
    .addr = getAddress,
    .is_local = isLocal,
    .listen = engineListen,
    .closeListener = engineCloseListener,
    .conn_create = create,
    .conn_create_accepted = createAccepted,
    .shutdown = shutdownConnection,
    .close = closeConnection,
    .connect = connectTo,
    .blocking_connect = connectNow,
    .accept = acceptNow,
    .write = writeBytes,
    .writev = writePieces,
    .read = readInto,
    .set_write_handler = setWriteHandler,
    .set_read_handler = setReadHandler,
    .get_last_error = getLastError,
    .sync_write = waitForBytes,
    .sync_read = waitForBytes,
    .sync_readline = waitForBytes,
    .has_pending_data = engineHasPending,
    .process_pending_data = engineProcessPending,
    .postpone_update_state = engineHandOver,
    .update_state = engineTakeBack,
}};
