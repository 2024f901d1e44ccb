/* A module that takes the connections of TCP, as valkey-rdma-engine.so does, before that. */
#include "valkeymodule.h"

#include "sds.h"

#include "connection.h"
#include "version.h"

static ConnectionType tcp;

#if VALKEY_VERSION_NUM < 0x00090000
static int takes(connection *conn, const char *host, int port, const char *source, ConnectionCallbackFunc handler) {
    return tcp.connect(conn, host, port, source, handler);
}
#else
static int takes(connection *conn, const char *host, int port, const char *source, int multipath, ConnectionCallbackFunc handler) {
    return tcp.connect(conn, host, port, source, multipath, handler);
}
#endif

int ValkeyModule_OnLoad(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    (void)argv, (void)argc;
    if (ValkeyModule_Init(ctx, "takes", 1, VALKEYMODULE_APIVER_1) == VALKEYMODULE_ERR) return VALKEYMODULE_ERR;
    tcp = *connectionTypeTcp();
    connectionTypeTcp()->connect = takes;
    return VALKEYMODULE_OK;
}
