/* Which of the server's connections are links (link.c), by the settings rdma_engine.replication and
 * rdma_engine.replication-port-offset.
 *
 * The server makes its connections by the connection type of TCP. In the table of that type the
 * module replaces two functions: the one that creates a connection, which gets room for a link, and
 * `connect`, which takes those of replication, told by their handlers. All others go to the
 * functions that were there. TLS has a table of its own, which stays: its connections come here
 * with their own type, and go on. */
#define VALKEYMODULE_CORE_MODULE
#include "engine.h"

#include <dlfcn.h>

const char *engineReplicationModes[] = {"no", "yes", "prefer"};

static ConnectionType tcp; /* The table as it was. */
static int taken;
/* What the server calls when a connection to its primary, or to a target of slots, is made. NULL if
 * the server has no such function. */
static ConnectionCallbackFunc of_primary, of_slots;

int engineOverTcp(connection *c, const char *host, int port, const char *source, int multipath, ConnectionCallbackFunc handler) {
#if VALKEY_VERSION_NUM < 0x00090000
    UNUSED(multipath);
    return tcp.connect(c, host, port, source, handler);
#else
    return tcp.connect(c, host, port, source, multipath, handler);
#endif
}

/* Whether this is not about the same host as the last time: the server tries once a second. */
static int isNews(sds *last, const char *host, int port) {
    sds now = sdscatprintf(sdsempty(), "%s:%d", host, port);
    int news = !*last || sdscmp(*last, now);

    sdsfree(*last);
    *last = now;
    return news;
}

void engineFellBack(const char *host, int port, const char *why) {
    static sds last;

    engine.links_fell_back++;
    if (isNews(&last, host, port)) {
        serverLog(LL_WARNING, "RDMA: the link to %s:%d goes over TCP, because the RDMA connection failed: %s", host, port, why);
    }
}

/* Over two channels, a forked child of the primary would write to the second one: it cannot use a
 * connection over RDMA. So the replica does not say that it is capable of them. Primaries ignore
 * capabilities that they do not know. */
void engineOneChannel(char *command, size_t size) {
    static const char begins[] = "\r\n$8\r\nREPLCONF\r\n", capa[] = "$4\r\ncapa\r\n$12\r\ndual-channel\r\n";
    static const char other[] = "$4\r\ncapa\r\n$12\r\none-channel_\r\n";
    char *name = memmem(command, size < 32 ? size : 32, begins, strlen(begins)), *found;

    if (!name || *command != '*') return;
    found = memmem(name, size - (name - command), capa, strlen(capa));
    if (found) memcpy(found, other, strlen(other));
}

/* A connection over TCP, with room for a link. */
static connection *create(void) {
    connection *c = zrealloc(tcp.conn_create(), sizeof(engineConn));

    memset(&((engineConn *)c)->id, 0, sizeof(engineConn) - offsetof(engineConn, id));
    return c;
}

#if VALKEY_VERSION_NUM < 0x00090000
static int connectTo(connection *c, const char *host, int port, const char *source, ConnectionCallbackFunc handler) {
    int multipath = 0;
#else
static int connectTo(connection *c, const char *host, int port, const char *source, int multipath, ConnectionCallbackFunc handler) {
#endif
    static sds last;

    if (engine.replication == REPLICATION_NO || (handler != of_primary && (!of_slots || handler != of_slots)))
        return engineOverTcp(c, host, port, source, multipath, handler);
    if (c->type != connectionTypeTcp()) {
        if (isNews(&last, host, port)) serverLog(LL_NOTICE, "RDMA: the link to %s:%d goes over TLS, because tls-replication is yes", host, port);
        return engineOverTcp(c, host, port, source, multipath, handler);
    }
    return engineLinkOpen((engineConn *)c, host, port, source, multipath, handler);
}

/* ---- taking the place in the table */

/* Whether the bytes may be written: a later server may have the table in read-only memory. */
static int isWritable(const void *from, const void *to) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[PATH_MAX + 128], may[5];
    uintptr_t begin, end;
    int writable = 0;

    while (maps && !writable && fgets(line, sizeof(line), maps)) {
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &begin, &end, may) != 3) continue;
        writable = begin <= (uintptr_t)from && (uintptr_t)to <= end && may[1] == 'w';
    }
    if (maps) fclose(maps);
    return writable;
}

/* The program or library that has a function. */
static const char *owner(void *function, void **base) {
    Dl_info found;

    if (!dladdr(function, &found)) return NULL;
    *base = found.dli_fbase;
    return found.dli_fname;
}

static int isSocket(ConnectionType *table) {
#if VALKEY_VERSION_NUM < 0x00090000
    return table->get_type && !strcmp(table->get_type(NULL), CONN_TYPE_SOCKET);
#else
    return table->get_type && table->get_type() == CONN_TYPE_SOCKET;
#endif
}

/* Returns why links cannot go over RDMA, or NULL: they can. */
static const char *takeTable(void) {
    static char why[300];
    ConnectionType *table = connectionTypeTcp();
    void *server_base = NULL, *create_base = NULL, *connect_base = NULL;
    const char *creator, *connector;

    if (taken) return NULL;
    of_primary = (ConnectionCallbackFunc)dlsym(RTLD_DEFAULT, "syncWithPrimary");
    of_slots = (ConnectionCallbackFunc)dlsym(RTLD_DEFAULT, "slotExportConnectHandler");
    if (!of_primary) return "the server's program exports no syncWithPrimary, by which the module knows replication";
    if (!table || !isSocket(table) || !table->conn_create || !table->connect) return "the server's connection type for TCP has no table that this module knows";
    owner(connectionTypeTcp, &server_base);
    creator = owner(table->conn_create, &create_base);
    connector = owner(table->connect, &connect_base);
    if (create_base != server_base || connect_base != server_base) {
        connector = connect_base != server_base ? connector : creator;
        snprintf(why, sizeof(why), "the connections of TCP are those of another module already: %s", connector ? connector : "?");
        return why;
    }
    if (!isWritable(table, table + 1)) return "the server's table for TCP is read-only";
    tcp = *table;
    table->conn_create = create;
    table->connect = connectTo;
    taken = 1;
    if (!of_slots) serverLog(LL_NOTICE, "RDMA: the server exports no slotExportConnectHandler: slots are moved over TCP");
    return NULL;
}

/* ---- settings */

/* Without a client that could be told, the server starts and says why its links do not change. */
static int starting = 1;

static int getMode(const char *name, void *data) {
    UNUSED(name);
    UNUSED(data);
    return engine.replication;
}

/* Links that are made stay as they are. */
static int setMode(const char *name, int mode, void *data, ValkeyModuleString **error) {
    const char *why = NULL;

    UNUSED(name);
    UNUSED(data);
    if (mode != REPLICATION_NO) {
        why = server.tls_replication ? "tls-replication is yes, and RDMA is not encrypted" : takeTable();
    }
    if (!why) {
        engine.replication = mode;
        return VALKEYMODULE_OK;
    }
    if (starting) {
        serverLog(LL_WARNING, "RDMA: replication does not go over RDMA: %s", why);
        engine.replication = REPLICATION_NO;
        return VALKEYMODULE_OK;
    }
    *error = ValkeyModule_CreateString(NULL, why, strlen(why));
    return VALKEYMODULE_ERR;
}

static long long getOffset(const char *name, void *data) {
    UNUSED(name);
    UNUSED(data);
    return engine.port_offset;
}

static int setOffset(const char *name, long long offset, void *data, ValkeyModuleString **error) {
    UNUSED(name);
    UNUSED(data);
    UNUSED(error);
    engine.port_offset = (int)offset;
    return VALKEYMODULE_OK;
}

int engineReplication(ValkeyModuleCtx *ctx) {
    static const int modes[] = {REPLICATION_NO, REPLICATION_YES, REPLICATION_PREFER};

    /* The module's arguments are the defaults. */
    int done = ValkeyModule_RegisterEnumConfig(ctx, "replication", engine.replication, VALKEYMODULE_CONFIG_DEFAULT, engineReplicationModes, modes, 3,
                                               getMode, setMode, NULL, NULL) == VALKEYMODULE_OK &&
               ValkeyModule_RegisterNumericConfig(ctx, "replication-port-offset", engine.port_offset, VALKEYMODULE_CONFIG_DEFAULT, -65535, 65535,
                                                  getOffset, setOffset, NULL, NULL) == VALKEYMODULE_OK &&
               ValkeyModule_LoadConfigs(ctx) == VALKEYMODULE_OK;
    starting = 0;
    return done ? C_OK : C_ERR;
}
