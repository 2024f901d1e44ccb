// A module that ends each connection, except by Unix socket, in the event that tells of it: while the server accepts it.

#include "valkeymodule.h"

static void changed(ValkeyModuleCtx *ctx, ValkeyModuleEvent event, uint64_t kind, void *data) {
    (void)ctx;
    (void)event;
    ValkeyModuleClientInfo *client = data;
    if (kind != VALKEYMODULE_SUBEVENT_CLIENT_CHANGE_CONNECTED || client->flags & VALKEYMODULE_CLIENTINFO_FLAG_UNIXSOCKET) return;
    // In a context of another client. One that ends itself does so later.
    ValkeyModuleCtx *own = ValkeyModule_GetThreadSafeContext(NULL);
    ValkeyModuleCallReply *reply = ValkeyModule_Call(own, "CLIENT", "ccl", "KILL", "ID", (long long)client->id);
    if (reply) ValkeyModule_FreeCallReply(reply);
    ValkeyModule_FreeThreadSafeContext(own);
}

int ValkeyModule_OnLoad(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    (void)argv;
    (void)argc;
    if (ValkeyModule_Init(ctx, "kill_at_accept", 1, VALKEYMODULE_APIVER_1) == VALKEYMODULE_ERR) return VALKEYMODULE_ERR;
    return ValkeyModule_SubscribeToServerEvent(ctx, ValkeyModuleEvent_ClientChange, changed);
}
