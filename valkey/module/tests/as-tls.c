/* A module that gives a server without TLS a connection type of that name. It does what the real
 * one does first: connect by the table of TCP, with its own type. Nothing is encrypted. */
#include "valkeymodule.h"

#include "sds.h"

#include "connection.h"
#include "version.h"

static ConnectionType as_tls;

#if VALKEY_VERSION_NUM < 0x00090000
static const char *type(connection *conn) {
    (void)conn;
    return CONN_TYPE_TLS;
}

static int connectTo(connection *conn, const char *host, int port, const char *source, ConnectionCallbackFunc handler) {
    return connectionTypeTcp()->connect(conn, host, port, source, handler);
}
#else
static int type(void) {
    return CONN_TYPE_TLS;
}

static int connectTo(connection *conn, const char *host, int port, const char *source, int multipath, ConnectionCallbackFunc handler) {
    return connectionTypeTcp()->connect(conn, host, port, source, multipath, handler);
}
#endif

static int configure(void *settings, int again) {
    (void)settings, (void)again;
    return 0;
}

static connection *create(void) {
    connection *conn = connectionTypeTcp()->conn_create();
    conn->type = &as_tls;
    return conn;
}

int ValkeyModule_OnLoad(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    (void)argv, (void)argc;
    if (ValkeyModule_Init(ctx, "as-tls", 1, VALKEYMODULE_APIVER_1) == VALKEYMODULE_ERR) return VALKEYMODULE_ERR;
    as_tls = *connectionTypeTcp();
    as_tls.get_type = type;
    as_tls.configure = configure;
    as_tls.conn_create = create;
    as_tls.connect = connectTo;
    return connTypeRegister(&as_tls) == 0 ? VALKEYMODULE_OK : VALKEYMODULE_ERR;
}
