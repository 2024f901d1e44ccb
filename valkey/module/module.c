/* Loading: checks that the module fits the server, parses its arguments, and registers what INFO
 * shows. */
#define VALKEYMODULE_CORE_MODULE
#include "engine.h"

#include <ctype.h>
#include <dlfcn.h>
#include <link.h>

/* Arguments, with their names in vkrdma.h. `window` and `completion_vector` are settings of the
 * server. */
static const struct argument {
    const char *name;
    void *field;
    int bytes;
} arguments[] = {
#define OPTION(name) {#name, &engine.options.name, sizeof(engine.options.name)}
    OPTION(windows),
    OPTION(send_buffer),
    OPTION(window_limit),
    OPTION(send_depth),
    OPTION(peer_receives),
    OPTION(receives),
    OPTION(inline_bytes),
    OPTION(rnr_timer),
    OPTION(eager_send_buffer),
    OPTION(keepalive_every),
    OPTION(keepalive_probe),
    OPTION(keepalive_limit),
    OPTION(stall_limit),
    OPTION(handshake_timeout),
    OPTION(keep_memory),
    OPTION(spin),
    {"connections", &engine.limits.connections, sizeof(engine.limits.connections)},
    {"registered_bytes", &engine.limits.registered_bytes, sizeof(engine.limits.registered_bytes)},
    {"linger", &engine.linger, sizeof(engine.linger)},
#undef OPTION
};

static int setArgument(const char *name, const char *value) {
    unsigned long long number;
    char *end;

    for (size_t j = 0; j < sizeof(arguments) / sizeof(arguments[0]); j++) {
        if (strcasecmp(arguments[j].name, name)) continue;
        errno = 0;
        number = strtoull(value, &end, 10);
        if (errno || !isdigit((unsigned char)*value) || *end || (arguments[j].bytes == 4 && number > UINT32_MAX)) {
            serverLog(LL_WARNING, "RDMA: the argument %s is a number, which '%s' is not", name, value);
            return C_ERR;
        }
        if (arguments[j].bytes == 4) {
            *(uint32_t *)arguments[j].field = (uint32_t)number;
        } else {
            *(uint64_t *)arguments[j].field = number;
        }
        return C_OK;
    }
    serverLog(LL_WARNING, "RDMA: there is no argument %s", name);
    return C_ERR;
}

/* Returns whether the server's structures, whose layout depends on the version, have the layout
 * of the headers here. */
static int fits(void) {
    const ElfW(Sym) *symbol = NULL;
    Dl_info found;
    int version = ValkeyModule_GetServerVersion();

    if (version != VALKEY_VERSION_NUM) {
        serverLog(LL_WARNING,
                  "RDMA: this module is for Valkey " VALKEY_VERSION ", and the server is %d.%d.%d (%s). "
                  "Build it with `make VALKEY_SRC=` and the sources of the server's version.",
                  version >> 16 & 0xff, version >> 8 & 0xff, version & 0xff, serverBuildIdRaw());
        return 0;
    }
    if (dladdr1(&server, &found, (void **)&symbol, RTLD_DL_SYMENT) && symbol && symbol->st_size != sizeof(server)) {
        serverLog(LL_WARNING,
                  "RDMA: this module was built from other sources, or with other settings, than the server (%s), though both are " VALKEY_VERSION
                  ": its state has %zu bytes here, and %zu there. Build it with the server's sources and CFLAGS.",
                  serverBuildIdRaw(), sizeof(server), (size_t)symbol->st_size);
        return 0;
    }
    return 1;
}

static int isTaken(void) {
    /* The call would log that there is none, which is not an error here. */
    int verbosity = server.verbosity;
    server.verbosity = LL_NOTHING;
    int taken = connectionByType(CONN_TYPE_RDMA) != NULL;
    server.verbosity = verbosity;
    return taken;
}

static void info(ValkeyModuleInfoCtx *ctx, int for_crash_report) {
    vkrdma_usage usage;

    /* The crashed thread may hold the endpoint's lock. */
    if (for_crash_report || ValkeyModule_InfoAddSection(ctx, "") != VALKEYMODULE_OK) return;
    ValkeyModule_InfoAddFieldCString(ctx, "version", vkrdma_version());
    if (vkrdma_usage_of(engine.endpoint, &usage, sizeof(usage), NULL) != VKRDMA_OK) return;
#define FIELD(name) ValkeyModule_InfoAddFieldULongLong(ctx, #name, usage.name)
    FIELD(connections);
    FIELD(registered_bytes);
    FIELD(completion_queues);
    FIELD(accepted);
    FIELD(rejected);
    FIELD(turns);
    FIELD(polls);
    FIELD(arms);
    FIELD(sleeps);
#undef FIELD
}

__attribute__((visibility("default"))) int ValkeyModule_OnLoad(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    if (ValkeyModule_Init(ctx, "rdma_engine", 1, VALKEYMODULE_APIVER_1) == VALKEYMODULE_ERR || !fits()) return VALKEYMODULE_ERR;
    if (!(ValkeyModule_GetContextFlags(ctx) & VALKEYMODULE_CTX_FLAGS_SERVER_STARTUP)) {
        serverLog(LL_WARNING, "RDMA: this module can only be loaded when the server starts: by --loadmodule, or loadmodule in valkey.conf");
        return VALKEYMODULE_ERR;
    }
    if (isTaken()) {
        serverLog(LL_WARNING, "RDMA: the server has RDMA of its own, built in or by valkey-rdma.so: leave out one of the two");
        return VALKEYMODULE_ERR;
    }
    vkrdma_server_options(&engine.options, sizeof(engine.options));
    engine.limits = (vkrdma_limits){.size = sizeof(engine.limits), .connections = UINT64_MAX, .registered_bytes = UINT64_MAX};
    engine.linger = 2000000;
    for (int j = 0; j < argc; j += 2) {
        const char *name = ValkeyModule_StringPtrLen(argv[j], NULL);
        const char *value = j + 1 < argc ? ValkeyModule_StringPtrLen(argv[j + 1], NULL) : "";
        if (setArgument(name, value) != C_OK) return VALKEYMODULE_ERR;
    }
    ValkeyModule_SetModuleOptions(ctx, VALKEYMODULE_OPTIONS_HANDLE_REPL_ASYNC_LOAD | VALKEYMODULE_OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION);
    ValkeyModule_RegisterInfoFunc(ctx, info);
    return connTypeRegister(&engineType) == C_OK ? VALKEYMODULE_OK : VALKEYMODULE_ERR;
}

__attribute__((visibility("default"))) int ValkeyModule_OnUnload(ValkeyModuleCtx *ctx) {
    UNUSED(ctx);
    serverLog(LL_NOTICE, "RDMA: the module stays until the server ends");
    return VALKEYMODULE_ERR;
}
