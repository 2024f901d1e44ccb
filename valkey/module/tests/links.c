/* A module that makes a connection as the server does for its primary, and so over RDMA, and gives
 * it to clients: the conformance suite's client profile can then judge links.
 *
 *   LINK.OPEN HOST PORT                       OK when it is established. An earlier one is closed.
 *   LINK.SWAP REQUEST EXPECTED MILLISECONDS   Sends, and answers OK when exactly EXPECTED has come.
 *   LINK.CLOSE
 */
#include "fmacros.h"

#include "valkeymodule.h"

#include "sds.h"

#include "connection.h"
#include "version.h"

#include <dlfcn.h>
#include <stdint.h>

static connection *conn;
static ValkeyModuleBlockedClient *waiting;
/* Counts commands, so that a timer knows whether its own still waits. */
static uintptr_t commands;
/* What is to be written, and what is to come. */
static sds request, expected;
static size_t written, come;

static int answer(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    (void)argv, (void)argc;
    const char *error = ValkeyModule_GetBlockedClientPrivateData(ctx);
    return error ? ValkeyModule_ReplyWithError(ctx, error) : ValkeyModule_ReplyWithSimpleString(ctx, "OK");
}

static void freeText(ValkeyModuleCtx *ctx, void *text) {
    (void)ctx;
    sdsfree(text);
}

/* Ends the command that waits: with an error unless `why` is NULL. */
static void conclude(const char *why) {
    if (!waiting) return;
    ValkeyModule_UnblockClient(waiting, why ? sdscatfmt(sdsempty(), "ERR %s", why) : NULL);
    waiting = NULL;
}

static void timedOut(ValkeyModuleCtx *ctx, void *number) {
    (void)ctx;
    if ((uintptr_t)number == commands) conclude("no answer came in time");
}

static void broken(void) { conclude(connGetState(conn) == CONN_STATE_CLOSED ? "the connection has ended" : connGetLastError(conn)); }

static void writes(connection *c) {
    while (written < sdslen(request)) {
        int count = connWrite(c, request + written, sdslen(request) - written);
        if (count <= 0) {
            if (connGetState(c) != CONN_STATE_CONNECTED) broken();
            connSetWriteHandler(c, connGetState(c) == CONN_STATE_CONNECTED ? writes : NULL);
            return;
        }
        written += count;
    }
    connSetWriteHandler(c, NULL);
}

static void reads(connection *c) {
    char bytes[16384];
    int count = connRead(c, bytes, sizeof(bytes));

    if (count <= 0) {
        if (connGetState(c) == CONN_STATE_CONNECTED) return;
        connSetReadHandler(c, NULL);
        broken();
    } else if (!waiting || (size_t)count > sdslen(expected) - come || memcmp(expected + come, bytes, count)) {
        conclude("another answer came");
    } else if ((come += count) == sdslen(expected)) {
        conclude(NULL);
    }
}

static void connected(connection *c) {
    if (connGetState(c) != CONN_STATE_CONNECTED) {
        broken();
        return;
    }
    connSetReadHandler(c, reads);
    conclude(NULL);
}

static void block(ValkeyModuleCtx *ctx, long long milliseconds) {
    waiting = ValkeyModule_BlockClient(ctx, answer, NULL, freeText, 0);
    commands++;
    if (milliseconds) ValkeyModule_CreateTimer(ctx, milliseconds, timedOut, (void *)commands);
}

static void closeIt(void) {
    if (conn) connClose(conn);
    conn = NULL;
}

static int begin(const char *host, int port, ConnectionCallbackFunc handler) {
#if VALKEY_VERSION_NUM < 0x00090000
    return connConnect(conn, host, port, NULL, handler);
#else
    return connConnect(conn, host, port, NULL, 0, handler);
#endif
}

static int openLink(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    long long port;
    /* By this handler the module tells what is to go over RDMA. */
    ConnectionCallbackFunc of_primary = (ConnectionCallbackFunc)dlsym(RTLD_DEFAULT, "syncWithPrimary");

    if (argc != 3 || ValkeyModule_StringToLongLong(argv[2], &port) != VALKEYMODULE_OK) return ValkeyModule_WrongArity(ctx);
    if (waiting) return ValkeyModule_ReplyWithError(ctx, "ERR another client waits");
    closeIt();
    conn = connCreate(connectionTypeTcp());
    if (begin(ValkeyModule_StringPtrLen(argv[1], NULL), (int)port, of_primary) != 0) {
        return ValkeyModule_ReplyWithError(ctx, "ERR the connection cannot be begun");
    }
    conn->conn_handler = connected;
    block(ctx, 0);
    return VALKEYMODULE_OK;
}

static int swap(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    long long milliseconds;
    size_t length;
    const char *text;

    if (argc != 4 || ValkeyModule_StringToLongLong(argv[3], &milliseconds) != VALKEYMODULE_OK) return ValkeyModule_WrongArity(ctx);
    if (waiting) return ValkeyModule_ReplyWithError(ctx, "ERR another client waits");
    if (!conn || connGetState(conn) != CONN_STATE_CONNECTED) return ValkeyModule_ReplyWithError(ctx, "ERR there is no connection");
    text = ValkeyModule_StringPtrLen(argv[1], &length);
    request = sdscpylen(request, text, length);
    text = ValkeyModule_StringPtrLen(argv[2], &length);
    expected = sdscpylen(expected, text, length);
    written = come = 0;
    block(ctx, milliseconds);
    writes(conn);
    return VALKEYMODULE_OK;
}

static int closeLink(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    (void)argv, (void)argc;
    if (waiting) return ValkeyModule_ReplyWithError(ctx, "ERR another client waits");
    closeIt();
    return ValkeyModule_ReplyWithSimpleString(ctx, "OK");
}

__attribute__((visibility("default"))) int ValkeyModule_OnLoad(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    (void)argv, (void)argc;
    if (ValkeyModule_Init(ctx, "links", 1, VALKEYMODULE_APIVER_1) == VALKEYMODULE_ERR) return VALKEYMODULE_ERR;
    request = sdsempty();
    expected = sdsempty();
    return ValkeyModule_CreateCommand(ctx, "link.open", openLink, "", 0, 0, 0) == VALKEYMODULE_OK &&
                   ValkeyModule_CreateCommand(ctx, "link.swap", swap, "", 0, 0, 0) == VALKEYMODULE_OK &&
                   ValkeyModule_CreateCommand(ctx, "link.close", closeLink, "", 0, 0, 0) == VALKEYMODULE_OK
               ? VALKEYMODULE_OK
               : VALKEYMODULE_ERR;
}
