// Whether a server with `appendfsync always` acknowledges a SET before it is on the disk. The server runs with slow-fsync.c, which says in the
// file SYNCED up to which byte its append-only file is on the disk.
//
//     synced HOST PORT ask NAME COUNT SYNCED   COUNT SETs of new keys, while large replies are received. With PORT 0, HOST is a Unix socket's path
//     synced judge AOF                         judges what the lines on standard input say about the SETs in that append-only file
//
// A line of the first is `KEY SYNCED`: what the file SYNCED said after the acknowledgement had come. A SET that ends behind that byte was
// acknowledged too early. So the order of the two is judged, and no time.

#include <fcntl.h>
#include <inttypes.h>
#include <search.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <valkey/rdma.h>
#include <valkey/valkey.h>

// One of EACH requests wants up to PARTS of PART bytes, of which a server writes 64 KiB at a time. A request follows whenever something was received,
// so that SETs arrive while the server has such a reply left to write.
enum { IN_FLIGHT = 32, EACH = 16, PARTS = 600, PART = 1000 };

static void fail(const char *why) {
    fprintf(stderr, "synced: %s\n", why);
    exit(2);
}

static void *mapped(const char *path, size_t *length, int flags, int protection) {
    int fd = open(path, flags);
    struct stat status;
    if (fd == -1 || fstat(fd, &status)) fail(path);
    void *bytes = mmap(NULL, (size_t)status.st_size, protection, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) fail("mmap");
    close(fd);
    if (length) *length = (size_t)status.st_size;
    return bytes;
}

static valkeyContext *connected(const char *host, int port) {
    valkeyOptions options = {0};
    if (port) {
        VALKEY_OPTIONS_SET_RDMA(&options, host, port);
    } else {
        VALKEY_OPTIONS_SET_UNIX(&options, host);
    }
    valkeyContext *context = valkeyConnectWithOptions(&options);
    if (!context || context->err) fail(context ? context->errstr : "no context");
    return context;
}

static int ask(valkeyContext *context, const char *name, unsigned long count, _Atomic uint64_t *synced) {
    char part[PART];
    unsigned long asked = 0, answered = 0, set = 0;
    memset(part, 'x', sizeof part);
    for (int parts = 0; parts < PARTS; parts++) valkeyAppendCommand(context, "RPUSH %s %b", name, part, sizeof part);
    for (int parts = 0; parts < PARTS; parts++) {
        void *pushed = NULL;
        if (valkeyGetReply(context, &pushed) != VALKEY_OK) fail(context->errstr);
        freeReplyObject(pushed);
    }
    while (set < count) {
        if (asked < answered + IN_FLIGHT) {
            if (asked % EACH == 0)
                valkeyAppendCommand(context, "LRANGE %s 0 %lu", name, 1 + asked * 37 % PARTS);
            else
                valkeyAppendCommand(context, "SET %s:%lu x", name, asked);
            asked++;
        }
        int written = 0;
        while (!written)
            if (valkeyBufferWrite(context, &written) != VALKEY_OK) fail(context->errstr);
        if (valkeyBufferRead(context) != VALKEY_OK) fail(context->errstr);
        // Read after all that was received.
        uint64_t on_disk = atomic_load(synced);
        void *reply;
        while (valkeyGetReplyFromReader(context, &reply) == VALKEY_OK && reply) {
            if (((valkeyReply *)reply)->type == VALKEY_REPLY_ERROR) fail(((valkeyReply *)reply)->str);
            freeReplyObject(reply);
            if (answered % EACH) {
                printf("%s:%lu %" PRIu64 "\n", name, answered, on_disk);
                set++;
            }
            answered++;
        }
        if (context->err) fail(context->errstr);
    }
    return 0;
}

// Fills the table with where in an append-only file each SET ends, by its key.
static void table_of(char *at, size_t length) {
    char *begin = at, *end = at + length;
    if (!hcreate(length / 16)) fail("hcreate");
    while (at < end) {
        long words = 0;
        char *key = NULL;
        if (*at == '#') {
            // A time.
            at = memchr(at, '\n', (size_t)(end - at)) + 1;
            continue;
        }
        if (*at != '*' || (words = strtol(at + 1, &at, 10)) <= 0) fail("this is no append-only file");
        at += 2;
        for (long word = 0; word < words; word++) {
            long bytes = strtol(at + 1, &at, 10);
            at += 2;
            if (word == 1) key = strndup(at, (size_t)bytes);
            at += bytes + 2;
        }
        if (words == 3 && strchr(key, ':')) hsearch((ENTRY){.key = key, .data = (void *)(uintptr_t)(at - begin)}, ENTER);
    }
}

static int judge(const char *file) {
    size_t length;
    char *bytes = mapped(file, &length, O_RDONLY, PROT_READ), key[128];
    unsigned long all = 0, early = 0;
    uint64_t on_disk;
    table_of(bytes, length);
    while (scanf("%127s %" SCNu64, key, &on_disk) == 2) {
        ENTRY *found = hsearch((ENTRY){.key = key}, FIND);
        if (!found) fail("a SET that was acknowledged is not in the file");
        all++;
        early += (uintptr_t)found->data > on_disk;
    }
    printf("%lu of %lu SETs were acknowledged before their fsync had ended\n", early, all);
    return early > 0 || all == 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "judge")) return judge(argv[2]);
    if (argc != 7 || strcmp(argv[3], "ask") || valkeyInitiateRdma() != VALKEY_OK) return 64;
    return ask(connected(argv[1], atoi(argv[2])), argv[4], strtoul(argv[5], NULL, 10), mapped(argv[6], NULL, O_RDWR, PROT_READ | PROT_WRITE));
}
