// Many small commands while the server is busy with another one, by libvalkey: each is a message of its own, and meets a
// receive of the server or waits for one.
//
//     busy HOST PORT COMMANDS

#include <stdio.h>
#include <stdlib.h>
#include <valkey/rdma.h>
#include <valkey/valkey.h>

// Sends what was appended, and nothing else with it.
static int flush(valkeyContext *context) {
    int done = 0;
    while (!done)
        if (valkeyBufferWrite(context, &done) != VALKEY_OK) return VALKEY_ERR;
    return VALKEY_OK;
}

int main(int argc, char **argv) {
    if (argc != 4 || valkeyInitiateRdma() != VALKEY_OK) return 2;
    struct timeval patience = {.tv_sec = 60};
    valkeyOptions options = {.connect_timeout = &patience, .command_timeout = &patience};
    VALKEY_OPTIONS_SET_RDMA(&options, argv[1], atoi(argv[2]));
    // A route has 100 ms, which a busy machine may miss; no connect that fails by time sets `err`.
    valkeyContext *context = NULL;
    for (int tries = 0; tries < 20 && !(context && context->flags & VALKEY_CONNECTED); tries++) {
        valkeyFree(context);
        context = valkeyConnectWithOptions(&options);
    }
    if (!context || context->err || !(context->flags & VALKEY_CONNECTED)) {
        printf("no connection\n");
        return 2;
    }
    int commands = atoi(argv[3]), sent = 0, answered = 0;
    valkeyAppendCommand(context, "DEBUG SLEEP 10");
    int alive = flush(context) == VALKEY_OK;
    while (alive && sent < commands) {
        valkeyAppendCommand(context, "PING");
        alive = flush(context) == VALKEY_OK;
        sent += alive;
    }
    void *reply;
    alive = alive && valkeyGetReply(context, &reply) == VALKEY_OK;
    while (alive && answered < commands) {
        freeReplyObject(reply);
        alive = valkeyGetReply(context, &reply) == VALKEY_OK;
        answered += alive;
    }
    if (alive) {
        freeReplyObject(reply);
        printf("%d of %d replies\n", answered, commands);
    } else {
        printf("the connection ended\n");
        fprintf(stderr, "after %d commands and %d replies: %s\n", sent, answered, context->errstr);
    }
    valkeyFree(context);
    return !alive;
}
