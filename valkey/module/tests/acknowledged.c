// A client of libvalkey that keeps account of what a server has acknowledged, so that another one can read all of it back.
//
//     acknowledged HOST PORT write NAME SECONDS   SETs of new keys, and GETs of those it has set; connects again when it is cut off
//     acknowledged HOST PORT read                 reads back what the lines on standard input name
//
// A line of the first is `NAME.NUMBER COUNT`: connection NUMBER of this client has had COUNT SETs acknowledged, in their order.
// `lost NAME.NUMBER REASON`: that connection ended. `wrong KEY`: this is not what was stored, and the program ends with 1.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <valkey/rdma.h>
#include <valkey/valkey.h>

enum { SETS = 4, GETS = 12, SMALL = 64, LARGE = 16384 };

static const char *host;
static int port;
static char value[LARGE];

// What is stored under a key: the key again and again, in a value of 64 B, or of 16 KiB for one of 64 keys.
static size_t value_of(const char *key, unsigned long number) {
    size_t length = number % 64 ? SMALL : LARGE, of_key = strlen(key);
    for (size_t at = 0; at < length; at++) value[at] = key[at % of_key];
    return length;
}

static void key_of(char *key, size_t room, const char *connection, unsigned long number) {
    snprintf(key, room, "%s:%lu", connection, number);
}

static int right(const valkeyReply *reply, const char *key, unsigned long number) {
    size_t length = value_of(key, number);
    if (reply->type == VALKEY_REPLY_STRING && reply->len == length && !memcmp(reply->str, value, length)) return 1;
    printf("wrong %s\n", key);
    return 0;
}

static valkeyContext *connected(void) {
    // A server that is alive answers within this on any machine.
    struct timeval patience = {.tv_sec = 120};
    valkeyOptions options = {.connect_timeout = &patience, .command_timeout = &patience};
    VALKEY_OPTIONS_SET_RDMA(&options, host, port);
    valkeyContext *context = valkeyConnectWithOptions(&options);
    // A connect that fails by time does not set `err`.
    if (context && !context->err && context->flags & VALKEY_CONNECTED) return context;
    valkeyFree(context);
    return NULL;
}

// Works until the connection ends, or the time, which it looks at when it has done something. Returns 0 if a value was wrong.
static int write_on(valkeyContext *context, const char *connection, time_t end) {
    unsigned long stored = 0, asked[SETS + GETS];
    char key[128];
    do {
        for (int at = 0; at < SETS + GETS; at++) {
            int set = at < SETS;
            asked[at] = set ? stored + 1 + (unsigned long)at : 1 + (unsigned long)rand() % (stored + SETS);
            key_of(key, sizeof key, connection, asked[at]);
            if (set)
                valkeyAppendCommand(context, "SET %s %b", key, value, value_of(key, asked[at]));
            else
                valkeyAppendCommand(context, "GET %s", key);
        }
        void *reply = NULL;
        for (int at = 0; at < SETS + GETS; at++) {
            if (valkeyGetReply(context, &reply) != VALKEY_OK) {
                printf("%s %lu\nlost %s %s\n", connection, stored, connection, context->errstr);
                return 1;
            }
            key_of(key, sizeof key, connection, asked[at]);
            int good = at >= SETS ? right(reply, key, asked[at]) : ((valkeyReply *)reply)->type == VALKEY_REPLY_STATUS;
            if (at < SETS && good) stored++;
            if (!good && at < SETS) printf("wrong %s: %s\n", key, ((valkeyReply *)reply)->str);
            freeReplyObject(reply);
            if (!good) return 0;
        }
        printf("%s %lu\n", connection, stored);
    } while (time(NULL) < end);
    return 1;
}

static int write_for(const char *name, long seconds) {
    time_t end = time(NULL) + seconds;
    char connection[64];
    unsigned number = 0;
    // The first connection may come late.
    while (time(NULL) < end + (number ? 0 : 120)) {
        valkeyContext *context = connected();
        if (!context) continue;
        snprintf(connection, sizeof connection, "%s.%u", name, ++number);
        int good = write_on(context, connection, end);
        valkeyFree(context);
        if (!good) return 1;
    }
    return !number;
}

static int read_back(void) {
    valkeyContext *context = NULL;
    for (int tries = 0; tries < 20 && !context; tries++) context = connected();
    if (!context) return 2;
    char connection[64], key[128];
    unsigned long count, connections = 0, values = 0;
    while (scanf("%63s %lu", connection, &count) == 2) {
        for (unsigned long first = 1; first <= count; first += 64) {
            unsigned long last = first + 63 < count ? first + 63 : count;
            for (unsigned long number = first; number <= last; number++) {
                key_of(key, sizeof key, connection, number);
                valkeyAppendCommand(context, "GET %s", key);
            }
            for (unsigned long number = first; number <= last; number++) {
                void *reply = NULL;
                if (valkeyGetReply(context, &reply) != VALKEY_OK) {
                    printf("lost %s\n", context->errstr);
                    return 2;
                }
                key_of(key, sizeof key, connection, number);
                if (!right(reply, key, number)) return 1;
                freeReplyObject(reply);
            }
            values += last - first + 1;
        }
        connections++;
    }
    valkeyFree(context);
    printf("%lu SETs of %lu connections were read back\n", values, connections);
    return values == 0;
}

int main(int argc, char **argv) {
    if (argc < 4 || valkeyInitiateRdma() != VALKEY_OK) return 64;
    // What a line says stays said when the process is killed.
    setvbuf(stdout, NULL, _IOLBF, 0);
    host = argv[1];
    port = atoi(argv[2]);
    if (argc == 6 && !strcmp(argv[3], "write")) return write_for(argv[4], atol(argv[5]));
    if (argc == 4 && !strcmp(argv[3], "read")) return read_back();
    return 64;
}
