/* Whether the server's structures have the layout of the headers that the module is built from.
 *
 * The layout depends on the version and on how the server was built. Here is each field that the
 * module reads or writes, with its place in the headers, and what the running server shows of it:
 *
 * - Of `server`, the server's table of settings has the addresses of those that are settings.
 * - The event loop is known by a function that the server has given to it.
 * - ConnectionType, connection, list and listNode are looked at in the server's TCP type, in a
 *   connection that this type makes, and in a list, while the module is loaded.
 * - What the server calls of the module's own type is called once, after it is registered.
 * - connListener and the private data of a connection are looked at when the server first has some.
 *
 * No pointer is followed before what precedes it has agreed. Of a connection that the server has
 * made, its own functions are called until its end. A server that differs is refused.
 * docs/versions.md says what to do for another version. */
#define VALKEYMODULE_CORE_MODULE
#include "engine.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/eventfd.h>

/* Logs which field differs. Not by serverLog, which reads `server.verbosity`. */
static int differs(const char *field, const char *places) {
    _serverLog(LL_WARNING,
               "RDMA: this module was built from other sources, or with other settings, than the server (%s), though both are " VALKEY_VERSION
               ": %s is %s. Build it with the server's sources and CFLAGS: `make VALKEY_SRC=`.",
               serverBuildIdRaw(), field, places);
    return 0;
}
#define SHOWS(field, condition) ((condition) || differs(field, "not where the module looks for it"))

/* ---- the server's program */

/* The parts of the program that has `server`. */
typedef struct {
    struct {
        uintptr_t from, to;
        int writable;
    } parts[16];
    int count;
} program;

static int addParts(struct dl_phdr_info *info, size_t size, void *data) {
    program *found = data;
    int has_server = 0;

    UNUSED(size);
    found->count = 0;
    for (int j = 0; j < info->dlpi_phnum && found->count < 16; j++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[j];
        uintptr_t from = info->dlpi_addr + header->p_vaddr, to = from + header->p_memsz;
        if (header->p_type != PT_LOAD || !(header->p_flags & PF_R)) continue;
        found->parts[found->count].from = from;
        found->parts[found->count].to = to;
        found->parts[found->count++].writable = (header->p_flags & PF_W) != 0;
        if (from <= (uintptr_t)&server && (uintptr_t)&server < to) has_server = 1;
    }
    return has_server;
}

/* Returns the part that has `len` bytes at `at`, or -1. */
static int partOf(const program *in, uintptr_t at, size_t len) {
    for (int j = 0; j < in->count; j++)
        if (in->parts[j].from <= at && at < in->parts[j].to && len <= in->parts[j].to - at) return j;
    return -1;
}

/* ---- fields of `server` */

#define SETTING(name, field) {name, "server." #field, offsetof(struct valkeyServer, field)}
static const struct {
    const char *name, *field;
    size_t offset;
} settings[] = {
    SETTING("loglevel", verbosity),
    SETTING("max-new-connections-per-cycle", max_new_conns_per_cycle),
    SETTING("appendfsync", aof_fsync),
    SETTING("repl-timeout", repl_timeout),
    SETTING("tls-replication", tls_replication),
    SETTING("rdma-port", rdma_ctx_config.port),
    SETTING("rdma-rx-size", rdma_ctx_config.rx_size),
    SETTING("rdma-completion-vector", rdma_ctx_config.completion_vector),
};

/* Words of an entry in the server's table of settings: at first its name, later where its value
 * is. What is between them points to strings and functions, which are not writable. */
#define ENTRY 16

/* Returns where the server has the value of a setting, or 0. */
static uintptr_t addressOf(const program *in, const char *setting) {
    size_t len = strlen(setting) + 1;

    for (int j = 0; j < in->count; j++) {
        const uintptr_t *end = (const uintptr_t *)(in->parts[j].to & ~(sizeof(uintptr_t) - 1));
        const uintptr_t *word = (const uintptr_t *)((in->parts[j].from + sizeof(*word) - 1) & ~(sizeof(*word) - 1));
        if (!in->parts[j].writable) continue;
        for (; word < end; word++) {
            if (partOf(in, *word, len) < 0 || memcmp((const char *)*word, setting, len)) continue;
            for (const uintptr_t *value = word + 1; value < end && value <= word + ENTRY; value++) {
                int part = partOf(in, *value, sizeof(int));
                if (part >= 0 && in->parts[part].writable) return *value;
            }
        }
    }
    return 0;
}

static int fitsSettings(void) {
    program in;
    char places[100];

    if (!dl_iterate_phdr(addParts, &in)) return differs("server", "in no part of a program");
    for (size_t j = 0; j < sizeof(settings) / sizeof(settings[0]); j++) {
        uintptr_t there = addressOf(&in, settings[j].name);
        if (there == (uintptr_t)&server + settings[j].offset) continue;
        if (there) {
            snprintf(places, sizeof(places), "at %zu here, and at %td there", settings[j].offset, (ptrdiff_t)(there - (uintptr_t)&server));
        } else {
            snprintf(places, sizeof(places), "the setting %s, which the server does not have", settings[j].name);
        }
        return differs(settings[j].field, places);
    }
    return 1;
}

/* The server's functions that its event loop calls show whether a pointer, which may be anything,
 * leads to the event loop. The kernel refuses to copy from where nothing is. */
static int isEventLoop(const void *at) {
    aeEventLoop loop;
    int ends[2], copied;

    if (pipe2(ends, O_CLOEXEC) != 0) {
        _serverLog(LL_WARNING, "RDMA: the module cannot see whether it fits the server: pipe2: %s", strerror(errno));
        return 0;
    }
    copied = write(ends[1], at, sizeof(loop)) == sizeof(loop) && read(ends[0], &loop, sizeof(loop)) == sizeof(loop);
    close(ends[0]);
    close(ends[1]);
    return copied && loop.beforesleep && (void *)loop.beforesleep == dlsym(RTLD_DEFAULT, "beforeSleep");
}

/* ---- the connection type */

/* What the server's type for TCP has, and what that for TLS has in addition. */
#define SET(field) {"ConnectionType." #field, offsetof(ConnectionType, field), IN_TCP}
#define SET_IN_TLS(field) {"ConnectionType." #field, offsetof(ConnectionType, field), IN_TLS}
#define UNSET(field) {"ConnectionType." #field, offsetof(ConnectionType, field), IN_NONE}
static const struct {
    const char *field;
    size_t offset;
    enum { IN_TCP, IN_TLS, IN_NONE } set;
} functions[] = {
    SET(get_type),
    UNSET(init),
    UNSET(cleanup),
    UNSET(configure),
    SET(ae_handler),
    SET(accept_handler),
    SET(addr),
    SET(is_local),
    SET(listen),
    SET(closeListener),
    SET(conn_create),
    SET(conn_create_accepted),
    SET(shutdown),
    SET(close),
    SET(connect),
    SET(blocking_connect),
    SET(accept),
    SET(write),
    SET(writev),
    SET(read),
    SET(set_write_handler),
    SET(set_read_handler),
    SET(get_last_error),
    SET(sync_write),
    SET(sync_read),
    SET(sync_readline),
    SET_IN_TLS(has_pending_data),
    SET_IN_TLS(process_pending_data),
    SET_IN_TLS(postpone_update_state),
    SET_IN_TLS(update_state),
};

/* A server without TLS does not show whether the last two are at their places. */
static int fitsType(const ConnectionType *tcp, const ConnectionType *tls) {
    Dl_info found;

    for (size_t j = 0; j < sizeof(functions) / sizeof(functions[0]); j++) {
        void *of_tcp = *(void *const *)((const char *)tcp + functions[j].offset);
        void *of_tls = tls ? *(void *const *)((const char *)tls + functions[j].offset) : NULL;
        int agrees = functions[j].set == IN_TCP ? of_tcp && dladdr(of_tcp, &found) : !of_tcp;
        if (tls && functions[j].set == IN_TLS) agrees = agrees && of_tls && dladdr(of_tls, &found);
        if (!SHOWS(functions[j].field, agrees)) return 0;
    }
    return 1;
}

/* ---- a connection, and a list */

/* What the server has done with a connection when it calls a handler. */
static int called_with_refs;
static void called(connection *conn) {
    called_with_refs = conn->refs;
}
static void called2(connection *conn) {
    UNUSED(conn);
}

/* Has the server change each field of a connection of its own. What is not seen is `private_data`
 * and `conn_handler`, which fill the place between two that are. */
static int fitsConnection(ConnectionType *tcp) {
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), fits;
    char byte = 0;
    connection *conn;

    if (fd == -1) {
        _serverLog(LL_WARNING, "RDMA: the module cannot see whether it fits the server: eventfd: %s", strerror(errno));
        return 0;
    }
    conn = tcp->conn_create_accepted(fd, NULL);
    fits = SHOWS("connection.type", conn->type == tcp) && SHOWS("connection.state", conn->state == CONN_STATE_ACCEPTING) &&
           SHOWS("connection.fd", conn->fd == fd) && SHOWS("connection.iovcnt", conn->iovcnt == IOV_MAX);
    if (fits) {
        /* Too short for an eventfd. */
        tcp->read(conn, &byte, sizeof(byte));
        fits = SHOWS("connection.last_errno", conn->last_errno == EINVAL);
        tcp->set_read_handler(conn, called);
        fits = fits && SHOWS("connection.read_handler", conn->read_handler == called && !conn->write_handler);
        tcp->set_write_handler(conn, called2, 1);
        fits = fits && SHOWS("connection.write_handler", conn->write_handler == called2 && conn->read_handler == called) &&
               SHOWS("connection.flags", conn->flags == CONN_FLAG_WRITE_BARRIER) && SHOWS("connection.conn_handler", !conn->conn_handler);
        tcp->accept(conn, called);
        fits = fits && SHOWS("connection.refs", called_with_refs == 1 && conn->refs == 0) &&
               SHOWS("connection.state", conn->state == CONN_STATE_CONNECTED);
    }
    tcp->close(conn);
    return fits;
}

static int fitsList(void) {
    char value[2];
    list *two = listCreate();
    int fits;

    listAddNodeTail(two, value);
    listAddNodeTail(two, value + 1);
    fits = SHOWS("list.len", listLength(two) == 2) && SHOWS("list.head", listFirst(two) && listNodeValue(listFirst(two)) == value) &&
           SHOWS("list.tail", listLast(two) && listNodeValue(listLast(two)) == value + 1) &&
           SHOWS("listNode.next", listNextNode(listFirst(two)) == listLast(two)) &&
           SHOWS("listNode.prev", listPrevNode(listLast(two)) == listFirst(two));
    listRelease(two);
    return fits;
}

int engineFits(void) {
    ConnectionType *tcp, *tls;
    int verbosity;

    if (!fitsSettings() || !SHOWS("server.el", isEventLoop(server.el)) || !fitsList()) return C_ERR;
    tcp = connectionTypeTcp();
    /* The call would log that there is none, which is not an error here. */
    verbosity = server.verbosity;
    server.verbosity = LL_NOTHING;
    tls = connectionByType(CONN_TYPE_TLS);
    server.verbosity = verbosity;
    return fitsType(tcp, tls) && fitsConnection(tcp) ? C_OK : C_ERR;
}

/* ---- later */

/* Registers the module's type, of which the server calls two functions. Where its types have
 * further functions before these, it would call the next two instead, with no connection. */
int engineRegister(void) {
    ConnectionType whole = engineType[0];
    int fits;

    engineType->postpone_update_state = NULL;
    engineType->update_state = NULL;
    fits = connTypeRegister(engineType) == C_OK && SHOWS("ConnectionType.has_pending_data", engineIsAsked());
    engineType[0] = whole;
    return fits ? C_OK : C_ERR;
}

/* The server has filled in what it wants to listen on. */
int engineFitsListener(const connListener *listener) {
    return SHOWS("connListener.ct", listener->ct == engineType) && SHOWS("connListener.count", listener->count == 0) &&
                   SHOWS("connListener.port", listener->port == server.rdma_ctx_config.port) &&
                   SHOWS("connListener.bindaddr_count", listener->bindaddr_count >= 0 && listener->bindaddr_count <= CONFIG_BINDADDR_MAX)
               ? C_OK
               : C_ERR;
}

/* The server has made a client of a connection. Of its fields the module reads none, but for
 * Valkey 8.1 `io_read_state` and `io_write_state`, which `resp` follows. */
int engineFitsClient(connection *conn) {
    static int refused;
    const char *field = NULL;

    if (!connGetPrivateData(conn) || conn->conn_handler) field = "connection.private_data";
#if VALKEY_VERSION_NUM < 0x00090000
    const client *c = connGetPrivateData(conn);
    if (field) {
    } else if (c->conn != conn) {
        field = "client.conn";
    } else if (c->io_read_state != CLIENT_IDLE) {
        field = "client.io_read_state";
    } else if (c->io_write_state != CLIENT_IDLE) {
        field = "client.io_write_state";
    } else if (c->resp != 2) {
        field = "client.resp";
    }
#endif
    if (field && !refused++) differs(field, "not where the module looks for it, so no client is accepted");
    return field ? C_ERR : C_OK;
}
