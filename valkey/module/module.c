/* Loading: parses the module's arguments, and registers what INFO shows. */
#define VALKEYMODULE_CORE_MODULE
#include "engine.h"

#include <ctype.h>

/* Arguments beside the options of connections, which libvkrdma knows by name. */
static const struct argument {
    const char *name;
    uint64_t *field;
} arguments[] = {
    {"connections", &engine.limits.connections},
    {"registered_bytes", &engine.limits.registered_bytes},
    {"backlog", &engine.limits.backlog},
    {"linger", &engine.linger},
    {"lend_from", &engine.lend_from},
    {"lend_bytes", &engine.lend_bytes},
};
#define ARGUMENTS (sizeof(arguments) / sizeof(arguments[0]))

/* Numbers that libvkrdma would take, and with which no server is meant to run: a wrong unit, or
 * one digit too many. docs/operate.md has these bounds. */
#define SECOND 1000000ULL
#define HOUR (3600 * SECOND)
static const struct {
    const char *name, *why;
    uint64_t least, most;
} bounds[] = {
    {"connections", "", 1, UINT64_MAX},
    {"registered_bytes", "", 65536, UINT64_MAX},
    {"backlog", "", 1, 65536},
    {"linger", " microseconds", 0, 60 * SECOND},
    {"spin", " microseconds: the server does nothing else meanwhile", 0, SECOND},
    {"keep_memory", " microseconds", 1000, HOUR},
    {"handshake_timeout", " microseconds", 1000, HOUR},
    {"keepalive_every", " microseconds", 0, HOUR},
    {"keepalive_probe", " microseconds", 0, HOUR},
    {"keepalive_limit", " microseconds", 0, 24 * HOUR},
    {"stall_limit", " microseconds", 0, 24 * HOUR},
};

static int isWithinBounds(const char *name, uint64_t number) {
    for (size_t j = 0; j < sizeof(bounds) / sizeof(bounds[0]); j++) {
        if (strcasecmp(bounds[j].name, name) || (bounds[j].least <= number && number <= bounds[j].most)) continue;
        serverLog(LL_WARNING, "RDMA: the argument %s is %llu to %llu%s, and not %llu", bounds[j].name, (unsigned long long)bounds[j].least,
                  (unsigned long long)bounds[j].most, bounds[j].why, (unsigned long long)number);
        return 0;
    }
    return 1;
}

static int setReplication(const char *value) {
    for (int mode = REPLICATION_NO; mode <= REPLICATION_PREFER; mode++) {
        if (strcasecmp(engineReplicationModes[mode], value)) continue;
        engine.replication = mode;
        return C_OK;
    }
    serverLog(LL_WARNING, "RDMA: the argument replication is no, yes or prefer, and not '%s'", value);
    return C_ERR;
}

static void logUnknown(const char *why) {
    sds own = sdsempty();

    for (size_t j = 0; j < ARGUMENTS; j++) own = sdscatprintf(own, " %s", arguments[j].name);
    serverLog(LL_WARNING, "RDMA: the module's arguments: %s. Its own are%s replication", why, own);
    sdsfree(own);
}

static int setArgument(const char *name, const char *value) {
    vkrdma_error error;
    unsigned long long number;
    char *end;

    if (!strcasecmp(name, "replication")) return setReplication(value);
    errno = 0;
    number = strtoull(value, &end, 10);
    if (!errno && isdigit((unsigned char)*value) && !*end) {
        if (!isWithinBounds(name, number)) return C_ERR;
    } else {
        end = NULL;
    }
    for (size_t j = 0; j < ARGUMENTS; j++) {
        if (strcasecmp(arguments[j].name, name)) continue;
        if (!end) {
            serverLog(LL_WARNING, "RDMA: the argument %s is a number, which '%s' is not", name, value);
            return C_ERR;
        }
        *arguments[j].field = number;
        return C_OK;
    }
    if (!strcasecmp(name, "window") || !strcasecmp(name, "completion_vector")) {
        serverLog(LL_WARNING, "RDMA: %s is no argument of the module, but a setting of the server: see rdma-rx-size, rdma-completion-vector", name);
        return C_ERR;
    }
    if (vkrdma_options_set(&engine.options, name, value, &error) == VKRDMA_OK) return C_OK;
    if (strstr(error.text, "there is no option")) {
        logUnknown(error.text);
    } else {
        serverLog(LL_WARNING, "RDMA: the module's arguments: %s", error.text);
    }
    return C_ERR;
}

static int isOfThisVersion(void) {
    int version = ValkeyModule_GetServerVersion();

    if (version == VALKEY_VERSION_NUM) return 1;
    _serverLog(LL_WARNING,
               "RDMA: this module is for Valkey " VALKEY_VERSION ", and the server is %d.%d.%d (%s). "
               "Build it with `make VALKEY_SRC=` and the sources of the server's version.",
               version >> 16 & 0xff, version >> 8 & 0xff, version & 0xff, serverBuildIdRaw());
    return 0;
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
    ValkeyModule_InfoAddFieldULongLong(ctx, "links", engineLinksOpen());
    ValkeyModule_InfoAddFieldULongLong(ctx, "links_made", engine.links_made);
    ValkeyModule_InfoAddFieldULongLong(ctx, "links_fell_back", engine.links_fell_back);
    engineLendingInfo(ctx);
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

static int shutting_down;

/* The server has saved its data, and ends. */
static void shutDown(ValkeyModuleCtx *ctx, ValkeyModuleEvent event, uint64_t kind, void *data) {
    UNUSED(ctx);
    UNUSED(event);
    UNUSED(kind);
    UNUSED(data);
    shutting_down = 1;
    /* The server does this afterwards, when no connection takes bytes any more. */
    flushReplicasOutputBuffers();
    engineDeliver();
}

__attribute__((visibility("default"))) int ValkeyModule_OnLoad(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    if (ValkeyModule_Init(ctx, "rdma_engine", 1, VALKEYMODULE_APIVER_1) == VALKEYMODULE_ERR) return VALKEYMODULE_ERR;
    if (!isOfThisVersion() || engineFits() != C_OK) return VALKEYMODULE_ERR;
    if (!(ValkeyModule_GetContextFlags(ctx) & VALKEYMODULE_CTX_FLAGS_SERVER_STARTUP)) {
        serverLog(LL_WARNING, "RDMA: this module can only be loaded when the server starts: by --loadmodule, or loadmodule in valkey.conf");
        return VALKEYMODULE_ERR;
    }
    if (isTaken()) {
        serverLog(LL_WARNING, "RDMA: the server has RDMA of its own, built in or by valkey-rdma.so: leave out one of the two");
        return VALKEYMODULE_ERR;
    }
    vkrdma_server_options(&engine.options, sizeof(engine.options));
    /* `maxclients` limits those that the server has counted, and the default backlog the others.
     * Clients that do not log in must not pin all of the machine's memory. */
    engine.limits = (vkrdma_limits){
        .size = sizeof(engine.limits),
        .connections = UINT64_MAX,
        .registered_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 2,
    };
    engine.linger = 2000000;
    engine.lend_from = 256 << 10;
    engine.lend_bytes = 256 << 20;
    for (int j = 0; j < argc; j += 2) {
        const char *name = ValkeyModule_StringPtrLen(argv[j], NULL);
        const char *value = j + 1 < argc ? ValkeyModule_StringPtrLen(argv[j + 1], NULL) : "";
        if (setArgument(name, value) != C_OK) return VALKEYMODULE_ERR;
    }
    /* Like ibv_fork_init(3): registered memory stays with the parent when it forks for BGSAVE.
     * libibverbs reads it when it is loaded, and the server has no other threads yet. */
    setenv("RDMAV_FORK_SAFE", "1", 0);
    engine.connections = listCreate();
    engine.queue = listCreate();
    engine.links = listCreate();
    ValkeyModule_SetModuleOptions(ctx, VALKEYMODULE_OPTIONS_HANDLE_REPL_ASYNC_LOAD | VALKEYMODULE_OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION);
    ValkeyModule_RegisterInfoFunc(ctx, info);
    ValkeyModule_SubscribeToServerEvent(ctx, ValkeyModuleEvent_Shutdown, shutDown);
    if (engineLending(ctx) != C_OK || engineReplication(ctx) != C_OK) return VALKEYMODULE_ERR;
    return engineRegister() == C_OK ? VALKEYMODULE_OK : VALKEYMODULE_ERR;
}

/* Valkey 9.1 calls this when it shuts down, too, and warns if a module stays. The code stays: the
 * connection type has pointers to it (-z nodelete). */
__attribute__((visibility("default"))) int ValkeyModule_OnUnload(ValkeyModuleCtx *ctx) {
    UNUSED(ctx);
    if (shutting_down) return VALKEYMODULE_OK;
    serverLog(LL_NOTICE, "RDMA: the module stays until the server ends");
    return VALKEYMODULE_ERR;
}
