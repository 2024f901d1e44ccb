/* A module that looks whether the server has the layout of the headers that it is built from, says
 * so, and has the server end. It needs no device, and not the rest of the module. */
#include "../layout.c"

engineState engine;
static int asked, processed;

static int hasPending(void) {
    return ++asked;
}
static int process(void) {
    return ++processed;
}
int engineIsAsked(void) {
    connTypeHasPendingData();
    connTypeProcessPendingData();
    return asked && processed;
}

#if VALKEY_VERSION_NUM < 0x00090000
static const char *getType(connection *conn) {
    UNUSED(conn);
#else
static int getType(void) {
#endif
    return CONN_TYPE_RDMA;
}
ConnectionType engineType[2] = {{.get_type = getType, .has_pending_data = hasPending, .process_pending_data = process}};

__attribute__((visibility("default"))) int ValkeyModule_OnLoad(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    UNUSED(argv);
    UNUSED(argc);
    if (ValkeyModule_Init(ctx, "layout", 1, VALKEYMODULE_APIVER_1) == VALKEYMODULE_OK && engineFits() == C_OK && engineRegister() == C_OK)
        _serverLog(LL_WARNING, "RDMA: the server has this layout");
    return VALKEYMODULE_ERR;
}
