/* Links: connections that the server makes, to its primary and to targets of slots.
 *
 * The main thread makes a link, and handles its events while the server waits for any: until it is
 * established, and while it has a handler. Without handlers it belongs to the thread that calls,
 * which drives it: the main thread in a handshake or a diskless load, and the thread that writes an
 * RDB to the disk. */
#include "engine.h"

#include <fcntl.h>
#include <sys/socket.h>

static ConnectionType link_type[2]; /* As engineType. */

/* Takes what has happened, and returns its kinds. */
static uint32_t drive(engineConn *conn) {
    vkrdma_event events[4];
    uint32_t kinds = 0;
    size_t count = 0;

    if (vkrdma_progress(conn->link->endpoint, events, 4, sizeof(events[0]), &count, &conn->link->error) != VKRDMA_OK) kinds = VKRDMA_EVENT_ENDED;
    for (size_t j = 0; j < count; j++) {
        if (events[j].connection == conn->id) kinds |= events[j].kinds;
    }
    if (kinds & VKRDMA_EVENT_WRITABLE) conn->writable = 1;
    if (kinds & VKRDMA_EVENT_ENDED) conn->ended = 1;
    if (kinds & (VKRDMA_EVENT_READABLE | VKRDMA_EVENT_ENDED)) conn->readable = 1;
    return kinds;
}

static void stopTimer(engineLink *link) {
    if (link->timer != AE_ERR) aeDeleteTimeEvent(server.el, link->timer);
    link->timer = AE_ERR;
}

/* A forked child has no such descriptor, and shares the event loop's with its parent. */
static void unwatch(engineLink *link) {
    int fd = vkrdma_descriptor(link->endpoint);

    if (fd != -1) aeDeleteFileEvent(server.el, fd, AE_READABLE);
    link->watched = 0;
    stopTimer(link);
}

static long long timeOut(struct aeEventLoop *el, long long id, void *data);

static void setTimer(engineConn *conn) {
    engineLink *link = conn->link;
    int64_t left = -1;

    vkrdma_next_timeout(link->endpoint, &left, NULL);
    if (left < 0) return;
    monotime due = getMonotonicUs() + left;
    if (link->timer != AE_ERR && link->due <= due) return;
    stopTimer(link);
    link->timer = aeCreateTimeEvent(server.el, (left + 999) / 1000, timeOut, conn, NULL);
    link->due = due;
}

static int tryNext(engineConn *conn);
static void drop(engineConn *conn);

/* Goes on over TCP, in the same connection. */
static int fallBack(engineConn *conn) {
    engineLink *link = conn->link;
    ConnectionCallbackFunc handler = conn->c.conn_handler;
    char *host = sdsdup(link->host), *source = link->source ? sdsdup(link->source) : NULL;
    int port = link->port, multipath = link->multipath;

    engineFellBack(host, port, link->error.text);
    drop(conn);
    conn->c.type = connectionTypeTcp();
    conn->c.state = CONN_STATE_NONE;
    conn->c.conn_handler = NULL;
    int status = engineOverTcp(&conn->c, host, port, source, multipath, handler);
    sdsfree(host);
    sdsfree(source);
    return status;
}

/* It is established, or not. Returns 0 if it is no link any more. */
static int conclude(engineConn *conn, int opened) {
    engineLink *link = conn->link;
    ConnectionCallbackFunc handler = conn->c.conn_handler;

    if (opened) {
        conn->c.state = CONN_STATE_CONNECTED;
        conn->writable = 1;
        *link->error.text = '\0';
        engine.links_made++;
        serverLog(LL_NOTICE, "RDMA: connected to %s:%u", link->host, link->rdma_port);
    } else {
        vkrdma_check(link->endpoint, conn->id, &link->error);
        if (tryNext(conn) == C_OK) return 1;
        if (engine.replication == REPLICATION_PREFER) {
            /* The server waits for its handler in either case. */
            if (fallBack(conn) != C_OK) callHandler(&conn->c, handler);
            return 0;
        }
        conn->c.state = CONN_STATE_ERROR;
        conn->c.last_errno = ECONNREFUSED;
    }
    conn->c.conn_handler = NULL;
    return callHandler(&conn->c, handler) && conn->link;
}

static int watch(engineConn *conn);

static void turn(engineConn *conn) {
    uint32_t kinds = drive(conn);

    if (conn->c.state == CONN_STATE_CONNECTING && kinds & (VKRDMA_EVENT_OPENED | VKRDMA_EVENT_ENDED)) {
        if (!conclude(conn, kinds & VKRDMA_EVENT_OPENED)) conn = NULL;
        if (conn) watch(conn);
    }
    if (conn && conn->link->watched) setTimer(conn);
    engineServe(conn);
}

static void descriptorReadable(struct aeEventLoop *el, int fd, void *data, int mask) {
    UNUSED(el);
    UNUSED(fd);
    UNUSED(mask);
    turn(data);
}

static long long timeOut(struct aeEventLoop *el, long long id, void *data) {
    UNUSED(el);
    UNUSED(id);
    ((engineConn *)data)->link->timer = AE_ERR;
    turn(data);
    return AE_NOMORE;
}

/* Has the event loop watch the link if the server waits for its events. */
static int watch(engineConn *conn) {
    engineLink *link = conn->link;
    int wanted = conn->c.state == CONN_STATE_CONNECTING || conn->c.read_handler || conn->c.write_handler;

    if (!link || wanted == link->watched) return C_OK;
    if (wanted) {
        if (aeCreateFileEvent(server.el, vkrdma_descriptor(link->endpoint), AE_READABLE, descriptorReadable, conn) == AE_ERR) return C_ERR;
        link->watched = 1;
        setTimer(conn);
    } else {
        unwatch(link);
    }
    return C_OK;
}

/* ---- the beginning and the end */

static void freeLink(engineLink *link) {
    listUnlinkNode(engine.links, &link->of_links);
    vkrdma_endpoint_free(link->endpoint);
    if (link->found) freeaddrinfo(link->found);
    sdsfree(link->host);
    sdsfree(link->source);
    zfree(link);
}

static int isDelivered(engineLink *link) {
    vkrdma_event event;
    vkrdma_usage usage;
    size_t count;

    return vkrdma_progress(link->endpoint, &event, 1, sizeof(event), &count, NULL) != VKRDMA_OK ||
           vkrdma_usage_of(link->endpoint, &usage, sizeof(usage), NULL) != VKRDMA_OK || usage.connections == 0;
}

/* Frees a link that was closed, if its last bytes are delivered. */
static int reap(engineLink *link) {
    if (!isDelivered(link)) return 0;
    unwatch(link);
    freeLink(link);
    return 1;
}

static void closedReadable(struct aeEventLoop *el, int fd, void *data, int mask) {
    UNUSED(el);
    UNUSED(fd);
    UNUSED(mask);
    reap(data);
}

static long long closedTimeOut(struct aeEventLoop *el, long long id, void *data) {
    UNUSED(el);
    UNUSED(id);
    return reap(data) ? AE_NOMORE : 10;
}

/* What was written is delivered, as with TCP. The second call, by callHandler, has no effect. */
static void drop(engineConn *conn) {
    engineLink *link = conn->link;

    if (!link) return;
    engineUnqueue(conn);
    unwatch(link);
    link->conn = NULL;
    conn->link = NULL;
    conn->readable = conn->writable = conn->ended = 0;
    if (conn->c.fd != -1) close(conn->c.fd);
    conn->c.fd = -1;
    if (conn->id) vkrdma_abandon(link->endpoint, conn->id, engine.linger, NULL);
    conn->id = 0;
    /* The peer hears of the end as soon as it has the last bytes. */
    if (reap(link)) return;
    aeCreateFileEvent(server.el, vkrdma_descriptor(link->endpoint), AE_READABLE, closedReadable, link);
    link->timer = aeCreateTimeEvent(server.el, 10, closedTimeOut, link, NULL);
}

static void closeLink(connection *c) {
    drop((engineConn *)c);
    if (connHasRefs(c)) {
        c->flags |= CONN_FLAG_CLOSE_SCHEDULED;
        return;
    }
    zfree(c);
}

/* Without the event loop, when the server shuts down. */
void engineLinksDeliver(monotime until) {
    listIter all;
    listNode *node;

    listRewind(engine.links, &all);
    while ((node = listNext(&all)) != NULL) {
        engineLink *link = listNodeValue(node);
        if (link->conn) vkrdma_abandon(link->endpoint, link->conn->id, engine.linger, NULL);
        while (!isDelivered(link) && getMonotonicUs() < until && vkrdma_wait(link->endpoint, 10000, NULL) == VKRDMA_OK) {
        }
    }
}

uint64_t engineLinksOpen(void) {
    uint64_t open = 0;
    listIter all;
    listNode *node;

    listRewind(engine.links, &all);
    while ((node = listNext(&all)) != NULL) {
        engineConn *conn = ((engineLink *)listNodeValue(node))->conn;
        if (conn && conn->c.state == CONN_STATE_CONNECTED) open++;
    }
    return open;
}

static int resolve(const char *name, struct addrinfo **found, vkrdma_error *error) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    int status = getaddrinfo(name, NULL, &hints, found);

    if (status == 0) return C_OK;
    *found = NULL;
    snprintf(error->text, sizeof(error->text), "%s: %s", name, gai_strerror(status));
    return C_ERR;
}

/* Begins to connect from `source` to `to`. The addresses that follow have a share of the time. */
static int try(engineConn *conn, const struct addrinfo *to, const struct addrinfo *source) {
    engineLink *link = conn->link;
    vkrdma_options options = engineOptions();
    char there[VKRDMA_ADDRESS_TEXT], here[VKRDMA_ADDRESS_TEXT];
    monotime now = getMonotonicUs();
    uint64_t shares = 1;

    while (source && source->ai_family != to->ai_family) source = source->ai_next;
    if (engineAddressText(to, there, sizeof(there)) != C_OK || (link->source && !source)) {
        snprintf(link->error.text, sizeof(link->error.text), "bind-source-addr %s has no address of this family", link->source);
        return C_ERR;
    }
    if (source) engineAddressText(source, here, sizeof(here));
    for (const struct addrinfo *one = to->ai_next; one; one = one->ai_next) shares++;
    if (now >= link->until) {
        snprintf(link->error.text, sizeof(link->error.text), "the time to connect is over");
        return C_ERR;
    }
    return vkrdma_connect(link->endpoint, there, link->rdma_port, source ? here : NULL, (link->until - now) / shares, &options, &conn->id, &link->error) ==
                   VKRDMA_OK
               ? C_OK
               : C_ERR;
}

/* Begins to connect to the next address of the host to which that can be begun. */
static int tryNext(engineConn *conn) {
    engineLink *link = conn->link;
    struct addrinfo *source = NULL;
    int status = C_ERR;

    if (conn->id) vkrdma_abort(link->endpoint, conn->id, NULL);
    conn->id = 0;
    conn->readable = conn->writable = conn->ended = 0;
    if (!link->next || (link->source && resolve(link->source, &source, &link->error) != C_OK)) return C_ERR;
    while (link->next && status != C_OK) {
        struct addrinfo *to = link->next;
        link->next = to->ai_next;
        status = try(conn, to, source);
    }
    if (source) freeaddrinfo(source);
    return status;
}

static int openEndpoint(engineLink *link) {
    vkrdma_device *device = NULL;
    int made;

    /* All connections of the server count towards the same limits. */
    if (engine.endpoint) return vkrdma_endpoint_new_sharing(engine.endpoint, &link->endpoint, &link->error) == VKRDMA_OK ? C_OK : C_ERR;
    made = vkrdma_verbs_open(&device, &link->error) == VKRDMA_OK &&
           vkrdma_endpoint_new(device, &engine.limits, &link->endpoint, &link->error) == VKRDMA_OK;
    vkrdma_device_free(device);
    return made ? C_OK : C_ERR;
}

/* Begins to make the connection, which is one over TCP so far, a link. */
int engineLinkOpen(engineConn *conn, const char *host, int port, const char *source, int multipath, ConnectionCallbackFunc handler) {
    engineLink *link = zcalloc(sizeof(*link));
    monotime limit = (monotime)server.repl_timeout * 1000000;

    /* TCP is to be tried before the server gives up. */
    if (engine.replication == REPLICATION_PREFER) limit = limit / 2 < 5000000 ? limit / 2 : 5000000;
    link->conn = conn;
    link->timer = AE_ERR;
    link->host = sdsnew(host);
    link->source = source ? sdsnew(source) : NULL;
    link->port = port;
    link->rdma_port = (uint16_t)(port + engine.port_offset);
    link->multipath = multipath;
    link->until = getMonotonicUs() + limit;
    listInitNode(&link->of_links, link);
    listLinkNodeTail(engine.links, &link->of_links);
    listInitNode(&conn->of_queue, conn);
    conn->link = link;
    conn->c.type = link_type;
    conn->c.state = CONN_STATE_CONNECTING;
    conn->c.conn_handler = handler;
    /* Nothing passes through it. By O_NONBLOCK and SO_RCVTIMEO of a connection's descriptor, the
     * server says whether and how long a read waits. */
    conn->c.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (conn->c.fd == -1) {
        snprintf(link->error.text, sizeof(link->error.text), "socket: %s", strerror(errno));
    } else if (port + engine.port_offset < 1 || port + engine.port_offset > UINT16_MAX) {
        snprintf(link->error.text, sizeof(link->error.text), "port %d, with rdma_engine.replication-port-offset, is no port", port);
    } else if (openEndpoint(link) == C_OK && resolve(host, &link->found, &link->error) == C_OK) {
        link->next = link->found;
        if (tryNext(conn) == C_OK) {
            if (watch(conn) == C_OK) return C_OK;
            snprintf(link->error.text, sizeof(link->error.text), "the event loop takes no more descriptors");
        }
    }
    if (engine.replication == REPLICATION_PREFER) return fallBack(conn);
    conn->c.state = CONN_STATE_ERROR;
    conn->c.last_errno = EHOSTUNREACH;
    return C_ERR;
}

/* The flag may be set although all is read: after a read of as many bytes as there were, and by an
 * event that is spurious. */
int engineLinkReadable(engineConn *conn) {
    vkrdma_status status;

    conn->readable = 0;
    if (vkrdma_status_of(conn->link->endpoint, conn->id, &status, sizeof(status), NULL) != VKRDMA_OK || status.readable) conn->readable = 1;
    return conn->readable;
}

/* ---- what the server calls of a link */

/* Waits until a read or a write may do something, for at most `microseconds`. */
static int await(engineConn *conn, int64_t microseconds) {
    if (vkrdma_wait(conn->link->endpoint, microseconds, NULL) != VKRDMA_OK) return C_ERR;
    drive(conn);
    if (!conn->link->watched) return C_OK;
    /* The event loop does not hear of it any more. */
    engineQueue(conn);
    setTimer(conn);
    return C_OK;
}

/* Waits if the descriptor is set so. After a time-out the server reads again: the state stays. */
static int readLink(connection *c, void *buffer, size_t size) {
    engineConn *conn = (engineConn *)c;
    struct timeval limit = {0};
    socklen_t length = sizeof(limit);
    int count = engineType->read(c, buffer, size), flags;

    if (count != -1 || c->state != CONN_STATE_CONNECTED) return count;
    flags = fcntl(c->fd, F_GETFL);
    if (flags != -1 && !(flags & O_NONBLOCK)) {
        getsockopt(c->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, &length);
        int64_t microseconds = limit.tv_sec * 1000000LL + limit.tv_usec;
        monotime now = getMonotonicUs(), until = microseconds ? now + microseconds : 0;
        while (count == -1 && c->state == CONN_STATE_CONNECTED && (!until || now < until)) {
            if (await(conn, until ? (int64_t)(until - now) : -1) != C_OK) break;
            count = engineType->read(c, buffer, size);
            now = getMonotonicUs();
        }
        if (count != -1) return count;
    }
    errno = c->state == CONN_STATE_CONNECTED ? EAGAIN : c->last_errno;
    return -1;
}

/* Reads or writes all bytes, for at most `milliseconds`. */
static ssize_t transfer(connection *c, char *bytes, ssize_t size, long long milliseconds, int write) {
    monotime now = getMonotonicUs(), until = now + milliseconds * 1000;
    ssize_t done = 0;

    while (done < size) {
        int count = write ? engineType->write(c, bytes + done, size - done) : engineType->read(c, bytes + done, size - done);
        if (count > 0) {
            done += count;
        } else if (c->state != CONN_STATE_CONNECTED) {
            if (count == 0) c->last_errno = ECONNRESET;
            errno = c->last_errno;
            return -1;
        } else if ((now = getMonotonicUs()) >= until || await((engineConn *)c, until - now) != C_OK) {
            errno = c->last_errno = ETIMEDOUT;
            return -1;
        }
    }
    return done;
}

static ssize_t writeAll(connection *c, char *bytes, ssize_t size, long long milliseconds) {
    engineOneChannel(bytes, size);
    return transfer(c, bytes, size, milliseconds, 1);
}

static ssize_t readAll(connection *c, char *bytes, ssize_t size, long long milliseconds) {
    return transfer(c, bytes, size, milliseconds, 0);
}

/* The time is that of each byte, as with TCP. */
static ssize_t readLine(connection *c, char *bytes, ssize_t size, long long milliseconds) {
    ssize_t count = 0;

    for (; count < size - 1; count++) {
        if (transfer(c, bytes + count, 1, milliseconds, 0) != 1) return -1;
        if (bytes[count] != '\n') continue;
        bytes[count] = '\0';
        if (count && bytes[count - 1] == '\r') bytes[count - 1] = '\0';
        return count;
    }
    if (size > 0) bytes[count] = '\0';
    return count;
}

static int setWriteHandler(connection *c, ConnectionCallbackFunc handler, int barrier) {
    engineType->set_write_handler(c, handler, barrier);
    return watch((engineConn *)c);
}

static int setReadHandler(connection *c, ConnectionCallbackFunc handler) {
    engineType->set_read_handler(c, handler);
    return watch((engineConn *)c);
}

static const char *getLastError(connection *c) {
    engineLink *link = ((engineConn *)c)->link;
    return link && *link->error.text ? link->error.text : engineType->get_last_error(c);
}

/* Beside these, a link does what accepted connections do. */
__attribute__((constructor)) static void makeType(void) {
    link_type[0] = engineType[0];
    link_type->close = closeLink;
    link_type->read = readLink;
    link_type->set_write_handler = setWriteHandler;
    link_type->set_read_handler = setReadHandler;
    link_type->get_last_error = getLastError;
    link_type->sync_write = writeAll;
    link_type->sync_read = readAll;
    link_type->sync_readline = readLine;
}
