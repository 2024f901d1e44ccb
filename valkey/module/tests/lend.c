// Clients of libvalkey for values that a server sends from where they lie. Each value is one word of 8 bytes, again and again, so that a client sees
// any byte that is of another value, or of memory that was freed. All values are read and written by any number of these programs at a time.
//
//     lend HOST PORT read SEED STOP PIPELINE        GETs of all kinds, so many at a time; connects again when it is cut off
//     lend HOST PORT die SEED STOP PIPELINE         the same, and kills itself in the middle
//     lend HOST PORT hold 0 STOP 0                  asks for the value of `long`, and reads what comes of it only when there is a file STOP
//     lend SOCKET 0 write SEED STOP KILLS           writes values, deletes and moves them, saves, and changes settings; with KILLS not 0, it also
//                                                   kills connections over RDMA
//
// They work until there is a file STOP, and then print what they did. A wrong byte is printed as `wrong …`, and the program ends with 1.

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <valkey/rdma.h>
#include <valkey/valkey.h>

enum { KEYS = 6, WORD = 8, MIB = 1 << 20, LONGEST = 20 * MIB };

static const char *host;
static int port;
static const char *stop;
static unsigned long values, bytes, nothing, cuts, parts, written, kills;

static unsigned below(unsigned count) { return (unsigned)rand() % count; }

static void wrong(const char *what, const char *at, size_t offset, size_t length) {
    printf("wrong %s of %zu bytes, at %zu:", what, length, offset);
    for (size_t j = 0; j < 2 * WORD && offset + j < length; j++) printf(" %02x", (unsigned char)at[offset + j]);
    printf("; at 0: %.8s\n", at);
    exit(1);
}

// All of it, or the beginning of a value of which the rest is lost.
static void check(const char *what, const char *at, size_t length) {
    size_t offset = 0;
    if (length < WORD) return;
    if (memcmp(at, "VL", 2)) wrong(what, at, 0, length);
    if (!memcmp(at, at + WORD, length - WORD)) return;
    while (at[offset] == at[offset + WORD]) offset++;
    wrong(what, at, offset + WORD, length);
}

static void check_reply(const valkeyReply *reply) {
    switch (reply->type) {
    case VALKEY_REPLY_STRING:
        check("value", reply->str, reply->len);
        if (reply->len % WORD) wrong("length", reply->str, 0, reply->len);
        values++;
        bytes += reply->len;
        break;
    case VALKEY_REPLY_ARRAY:
        for (size_t j = 0; j < reply->elements; j++) check_reply(reply->element[j]);
        break;
    case VALKEY_REPLY_NIL: nothing++; break;
    case VALKEY_REPLY_ERROR:
        // Of BGSAVE.
        if (!strcmp(reply->str, "ERR Background save already in progress")) break;
        printf("wrong reply: %s\n", reply->str);
        exit(1);
    default: break;
    }
}

// What has arrived of a value whose rest does not come: the reader stands behind its `$`.
static void check_part(const valkeyReader *reader) {
    const char *from = reader->buf + reader->pos, *end = reader->buf + reader->len, *line;
    if (reader->ridx < 0 || reader->task[reader->ridx]->type != VALKEY_REPLY_STRING || from >= end) return;
    line = memchr(from, '\n', (size_t)(end - from));
    if (!line || ++line >= end) return;
    size_t length = strtoul(from, NULL, 10), arrived = (size_t)(end - line);
    check("part", line, length < arrived ? length : arrived);
    parts++;
}

static valkeyContext *connected(void) {
    struct timeval patience = {.tv_sec = 120};
    valkeyOptions options = {.connect_timeout = &patience, .command_timeout = &patience};
    if (port)
        VALKEY_OPTIONS_SET_RDMA(&options, host, port);
    else
        VALKEY_OPTIONS_SET_UNIX(&options, host);
    valkeyContext *context = valkeyConnectWithOptions(&options);
    if (context && !context->err && context->flags & VALKEY_CONNECTED) return context;
    valkeyFree(context);
    return NULL;
}

static void ask(valkeyContext *context) {
    unsigned key = below(KEYS);
    switch (below(20)) {
    case 0:
    case 4: valkeyAppendCommand(context, "GETEX key:%u", key); break;
    case 1:
    case 5: valkeyAppendCommand(context, "MGET key:%u key:%u key:%u", key, below(KEYS), below(KEYS)); break;
    case 2: valkeyAppendCommand(context, "GETRANGE key:%u 0 %u", key, (1 + below(20000)) * WORD - 1); break;
    case 3: valkeyAppendCommand(context, "GETDEL key:%u", key); break;
    default: valkeyAppendCommand(context, "GET key:%u", key);
    }
}

static int goes_on(void) { return access(stop, F_OK); }

static void read_on(int pipeline, int dies) {
    valkeyContext *context = NULL;
    while (goes_on()) {
        valkeyReply *reply;
        if (!context && !(context = connected())) {
            usleep(10000);
            continue;
        }
        for (int j = 0; j < pipeline; j++) ask(context);
        // Some wait while their values are in flight, and some go.
        int waits = below(8) == 0, leaves = below(dies ? 3 : 64) == 0 ? (int)below((unsigned)pipeline) : -1;
        if (waits) {
            int done;
            while (valkeyBufferWrite(context, &done) == VALKEY_OK && !done) {
            }
            usleep(below(30000));
        }
        for (int j = 0; j < pipeline; j++) {
            if (j == leaves && dies) raise(SIGKILL);
            if (j == leaves || valkeyGetReply(context, (void **)&reply) != VALKEY_OK) {
                check_part(context->reader);
                valkeyFree(context);
                context = NULL;
                cuts++;
                break;
            }
            check_reply(reply);
            freeReplyObject(reply);
        }
    }
    valkeyFree(context);
    printf("%lu values, %lu MiB, %lu were not there; cut off %lu times, with %lu parts of values\n", values, bytes / MIB, nothing, cuts, parts);
}

static char value[LONGEST];

static size_t some_length(void) {
    static const size_t most[] = {64 << 10, 200 << 10, 200 << 10, MIB, MIB, MIB, 6 * MIB, LONGEST};
    return (3000 + (size_t)below((unsigned)most[below(8)] / WORD - 3000)) * WORD;
}

static const char *some_word(void) {
    static char word[WORD + 1];
    snprintf(word, sizeof(word), "VL%06x", below(1 << 24));
    return word;
}

static size_t make_value(void) {
    size_t length = some_length();
    memcpy(value, some_word(), WORD);
    for (size_t made = WORD; made < length; made *= 2) memcpy(value + made, value, made < length - made ? made : length - made);
    return length;
}

// What it does by scripts is done in one step. Most values are made in the server, so that they are many.
static const char *set = "redis.call('SET', KEYS[1], string.rep(ARGV[1], tonumber(ARGV[2])))";
static const char *set_range = "local n = redis.call('STRLEN', KEYS[1]) "
                               "if n > 0 then redis.call('SETRANGE', KEYS[1], 0, string.rep(ARGV[1], n / 8)) end";
static const char *append = "local word = redis.call('GETRANGE', KEYS[1], 0, 7) if #word == 8 and redis.call('STRLEN', KEYS[1]) < 30000000 then "
                            "redis.call('APPEND', KEYS[1], string.rep(word, 5000)) end";

static const char *pick(const char *const *from, unsigned count) { return from[below(count)]; }

static valkeyReply *write_one(valkeyContext *context, int may_kill) {
    static const char *const lend_from[] = {"16384", "16384", "65536", "300000", "0"};
    static const char *const lend_bytes[] = {"256mb", "256mb", "256mb", "9mb", "300000", "0"};
    unsigned key = below(KEYS), other = (key + 1 + below(KEYS - 1)) % KEYS;
    switch (below(40)) {
    case 0 ... 1: return valkeyCommand(context, "EVAL %s 1 key:%u %s", set_range, key, some_word());
    case 2 ... 3: return valkeyCommand(context, "EVAL %s 1 key:%u", append, key);
    case 4: return valkeyCommand(context, "DEL key:%u", key);
    case 5: return valkeyCommand(context, "UNLINK key:%u", key);
    case 6: return valkeyCommand(context, "EXPIRE key:%u 100", key);
    case 7: return valkeyCommand(context, "PEXPIRE key:%u 1", key);
    case 8: return valkeyCommand(context, "PERSIST key:%u", key);
    case 9: return valkeyCommand(context, "COPY key:%u key:%u REPLACE", key, other);
    case 10: return valkeyCommand(context, "EVAL %s 2 key:%u key:%u", "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('RENAME', KEYS[1], KEYS[2]) end", key, other);
    case 11: return below(4) ? NULL : valkeyCommand(context, "FLUSHALL %s", below(2) ? "ASYNC" : "SYNC");
    case 12: return below(8) ? NULL : valkeyCommand(context, "BGSAVE SCHEDULE");
    case 13: return valkeyCommand(context, "CONFIG SET rdma_engine.lend-from %s", pick(lend_from, 5));
    case 14: return valkeyCommand(context, "CONFIG SET rdma_engine.lend-bytes %s", pick(lend_bytes, 6));
    case 15:
        if (!may_kill || below(3)) return NULL;
        kills++;
        return valkeyCommand(context, "CLIENT KILL LADDR %s", getenv("LADDR"));
    case 16: return valkeyCommand(context, "GETDEL key:%u", key);
    case 17 ... 21: {
        size_t length = make_value();
        return valkeyCommand(context, below(8) ? "SET key:%u %b" : "SET key:%u %b GET", key, value, length);
    }
    case 22 ... 24: return valkeyCommand(context, "COPY key:%u key:%u REPLACE", key, other);
    default: return valkeyCommand(context, "EVAL %s 1 key:%u %s %lu", set, key, some_word(), (unsigned long)(some_length() / WORD));
    }
}

static void write_on(int may_kill) {
    valkeyContext *context = connected();
    while (goes_on()) {
        valkeyReply *reply = context ? write_one(context, may_kill) : NULL;
        if (!context || context->err) {
            printf("wrong: %s\n", context ? context->errstr : "no connection");
            exit(1);
        }
        if (!reply) continue;
        check_reply(reply);
        freeReplyObject(reply);
        written++;
        // The readers are to find values that live for a while.
        usleep(below(2000));
    }
    valkeyFree(context);
    printf("%lu commands that change values, %lu kills\n", written, kills);
}

static void hold(void) {
    valkeyContext *context = connected();
    int done = 0;
    if (context) valkeyAppendCommand(context, "GET long");
    while (context && !done && valkeyBufferWrite(context, &done) == VALKEY_OK) {
    }
    while (goes_on()) usleep(10000);
    valkeyReply *reply;
    if (context && valkeyGetReply(context, (void **)&reply) == VALKEY_OK)
        check_reply(reply);
    else if (context)
        check_part(context->reader);
    printf("%lu values, %lu parts\n", values, parts);
}

int main(int count, char **words) {
    if (count != 7 || valkeyInitiateRdma() != VALKEY_OK) return 64;
    host = words[1];
    port = atoi(words[2]);
    srand((unsigned)atoi(words[4]));
    setvbuf(stdout, NULL, _IOLBF, 0);
    stop = words[5];
    if (!strcmp(words[3], "hold"))
        hold();
    else if (!strcmp(words[3], "write"))
        write_on(atoi(words[6]));
    else
        read_on(atoi(words[6]), !strcmp(words[3], "die"));
    return 0;
}
