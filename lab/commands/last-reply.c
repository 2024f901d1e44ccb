// Asks for the last reply before a server's disconnect, again and again: QUIT, each time on a new connection, with libvalkey.
// Prints how many replies arrived, and what the client said of the first that did not. lab/run deployed compiles it.
//
//   last-reply HOST PORT ROUNDS

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <valkey/rdma.h>
#include <valkey/valkey.h>

int main(int argc, char **argv) {
    if (argc != 4 || valkeyInitiateRdma() != VALKEY_OK) {
        return 2;
    }
    int rounds = atoi(argv[3]), arrived = 0;
    char lost[256] = "";
    for (int round = 0; round < rounds; round++) {
        struct timeval patience = {.tv_sec = 1};
        valkeyOptions options = {.connect_timeout = &patience, .command_timeout = &patience};
        VALKEY_OPTIONS_SET_RDMA(&options, argv[1], atoi(argv[2]));
        valkeyContext *context = valkeyConnectWithOptions(&options);
        if (!context || context->err) {
            fprintf(stderr, "round %d: no connection: %s\n", round, context ? context->errstr : "no memory");
            return 1;
        }
        valkeyReply *reply = valkeyCommand(context, "QUIT");
        if (reply && reply->type == VALKEY_REPLY_STATUS && !strcmp(reply->str, "OK")) {
            arrived++;
        } else if (!*lost) {
            snprintf(lost, sizeof lost, "; of the others: %s", context->errstr);
        }
        freeReplyObject(reply);
        valkeyFree(context);
    }
    printf("%d of %d replies%s\n", arrived, rounds, lost);
    return 0;
}
