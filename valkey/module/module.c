/* Loading: checks that the module fits the server, parses its arguments, and registers what INFO
 * shows. */
#define VALKEYMODULE_CORE_MODULE
#include "engine.h"

#include <ctype.h>
#include <dlfcn.h>
#include <link.h>

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

static int setArgument(const char *name, const char *value) {
    vkrdma_error error;
    unsigned long long number;
    char *end;

    if (!strcasecmp(name, "replication")) {
        for (int mode = REPLICATION_NO; mode <= REPLICATION_PREFER; mode++) {
            if (strcasecmp(engineReplicationModes[mode], value)) continue;
            engine.replication = mode;
            return C_OK;
        }
        serverLog(LL_WARNING, "RDMA: the argument replication is no, yes or prefer, and not '%s'", value);
        return C_ERR;
    }

    for (size_t j = 0; j < sizeof(arguments) / sizeof(arguments[0]); j++) {
        if (strcasecmp(arguments[j].name, name)) continue;
        errno = 0;
        number = strtoull(value, &end, 10);
        if (errno || !isdigit((unsigned char)*value) || *end) {
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
    serverLog(LL_WARNING, "RDMA: the module's arguments: %s", error.text);
    return C_ERR;
}

/* A value of an enumeration by its name in the configuration. */
#define NAME(names, value) ((size_t)(value) < sizeof(names) / sizeof((names)[0]) ? (names)[value] : "?")

/* Returns whether CONFIG GET has for `setting` what the module reads in `field`. */
static int agrees(ValkeyModuleCtx *ctx, const char *setting, const char *field, const char *here) {
    size_t length = 0;
    ValkeyModuleCallReply *reply = ValkeyModule_Call(ctx, "CONFIG", "cc", "GET", setting);
    ValkeyModuleCallReply *value = reply ? ValkeyModule_CallReplyArrayElement(reply, 1) : NULL;
    const char *there = value ? ValkeyModule_CallReplyStringPtr(value, &length) : NULL;
    int same = there && strlen(here) == length && !memcmp(here, there, length);

    if (!there) {
        serverLog(LL_WARNING,
                  "RDMA: the module cannot see whether it fits the server: CONFIG GET %s has no value. It needs the command CONFIG by its name.",
                  setting);
    } else if (!same) {
        serverLog(LL_WARNING,
                  "RDMA: this module was built from other sources, or with other settings, than the server (%s), though both are " VALKEY_VERSION
                  ": %s is %s here, and CONFIG GET %s is %.*s. Build it with the server's sources and CFLAGS.",
                  serverBuildIdRaw(), field, here, setting, (int)length, there);
    }
    if (reply) ValkeyModule_FreeCallReply(reply);
    return same;
}

/* Returns whether the server's structures, whose layout depends on the version and on how it was
 * built, have the layout of the headers here. The module reads these fields of `server`, and
 * `server.el`, which lies between the first two. */
static int fits(ValkeyModuleCtx *ctx) {
    static const char *const levels[] = {"debug", "verbose", "notice", "warning", "nothing"};
    static const char *const answers[] = {"no", "yes"};
    static const char *const policies[] = {"no", "always", "everysec"};
    const ElfW(Sym) *symbol = NULL;
    Dl_info found;
    int version = ValkeyModule_GetServerVersion();
    char number[32];

    if (version != VALKEY_VERSION_NUM) {
        serverLog(LL_WARNING,
                  "RDMA: this module is for Valkey " VALKEY_VERSION ", and the server is %d.%d.%d (%s). "
                  "Build it with `make VALKEY_SRC=` and the sources of the server's version.",
                  version >> 16 & 0xff, version >> 8 & 0xff, version & 0xff, serverBuildIdRaw());
        return 0;
    }
    if (!dladdr1(&server, &found, (void **)&symbol, RTLD_DL_SYMENT) || !symbol || symbol->st_size == 0) {
        serverLog(LL_NOTICE, "RDMA: the server's program does not have the size of its state. Settings alone show whether the module fits.");
    } else if (symbol->st_size != sizeof(server)) {
        serverLog(LL_WARNING,
                  "RDMA: this module was built from other sources, or with other settings, than the server (%s), though both are " VALKEY_VERSION
                  ": its state has %zu bytes here, and %zu there. Build it with the server's sources and CFLAGS.",
                  serverBuildIdRaw(), sizeof(server), (size_t)symbol->st_size);
        return 0;
    }
#define AGREES(setting, field, ...) (snprintf(number, sizeof(number), __VA_ARGS__), agrees(ctx, setting, #field, number))
    return AGREES("hz", server.hz, "%d", server.hz) &&
           AGREES("loglevel", server.verbosity, "%s", NAME(levels, server.verbosity)) &&
           AGREES("appendfsync", server.aof_fsync, "%s", NAME(policies, server.aof_fsync)) &&
           AGREES("max-new-connections-per-cycle", server.max_new_conns_per_cycle, "%u", server.max_new_conns_per_cycle) &&
           AGREES("tls-replication", server.tls_replication, "%s", NAME(answers, server.tls_replication)) &&
           AGREES("repl-timeout", server.repl_timeout, "%d", server.repl_timeout) &&
           AGREES("rdma-rx-size", server.rdma_ctx_config.rx_size, "%d", server.rdma_ctx_config.rx_size) &&
           AGREES("rdma-completion-vector", server.rdma_ctx_config.completion_vector, "%d", server.rdma_ctx_config.completion_vector);
#undef AGREES
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
    if (ValkeyModule_Init(ctx, "rdma_engine", 1, VALKEYMODULE_APIVER_1) == VALKEYMODULE_ERR || !fits(ctx)) return VALKEYMODULE_ERR;
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
    return connTypeRegister(&engineType) == C_OK ? VALKEYMODULE_OK : VALKEYMODULE_ERR;
}

/* Valkey 9.1 calls this when it shuts down, too, and warns if a module stays. The code stays: the
 * connection type has pointers to it (-z nodelete). */
__attribute__((visibility("default"))) int ValkeyModule_OnUnload(ValkeyModuleCtx *ctx) {
    UNUSED(ctx);
    if (shutting_down) return VALKEYMODULE_OK;
    serverLog(LL_NOTICE, "RDMA: the module stays until the server ends");
    return VALKEYMODULE_ERR;
}
