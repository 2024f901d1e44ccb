/* A test client for `valkey-rdma-conformance run client`: client HOST PORT. It connects by TCP, which shows what the suite wants of a
 * client and tests nothing yet. Put your library behind dial, put and get. docs/adopt.md has the rules. */
#define _POSIX_C_SOURCE 200809L
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#ifndef LONG
#define LONG (5 << 20) /* more than three of your windows; at most 64 MiB */
#endif
static int stream;
enum { WRAPS = 3 << 20 }; /* a value that is longer than any send buffer */
static char value[WRAPS], reply[LONG > WRAPS ? LONG + 2 : WRAPS + 2];

static void fail(const char *what) { fprintf(stderr, "%s\n", what); exit(1); }

static void dial(const char *host, const char *port) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    struct timeval limit = {.tv_sec = 10};
    if (getaddrinfo(host, port, &hints, &found) != 0) fail("no such host");
    stream = socket(found->ai_family, SOCK_STREAM, 0);
    setsockopt(stream, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(stream, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(stream, found->ai_addr, found->ai_addrlen) != 0) fail("cannot connect");
    freeaddrinfo(found);
}
static void put(const char *bytes, size_t length) { /* all of it */
    for (ssize_t sent; length > 0; bytes += sent, length -= (size_t)sent)
        if ((sent = send(stream, bytes, length, MSG_NOSIGNAL)) <= 0) fail("cannot send");
}
static void get(char *bytes, size_t length) { /* all of it */
    for (ssize_t got; length > 0; bytes += got, length -= (size_t)got)
        if ((got = recv(stream, bytes, length, 0)) <= 0) fail("the server left, or is late, in the middle of a reply");
}

/* A command of two words, and of a third with `length` bytes if there is one; the reply's length, or -1 for +OK. */
static long ask(const char *name, const char *key, const char *third, size_t length) {
    char line[128];
    int used = snprintf(line, sizeof line, "*%d\r\n$%zu\r\n%s\r\n$%zu\r\n%s\r\n", third ? 3 : 2, strlen(name), name, strlen(key), key);
    put(line, (size_t)used);
    if (third) {
        put(line, (size_t)snprintf(line, sizeof line, "$%zu\r\n", length));
        put(third, length);
        put("\r\n", 2);
    }
    for (used = 0; used < 2 || line[used - 1] != '\n'; used++)
        if (used + 1 < (int)sizeof line) get(&line[used], 1); else fail("a reply without an end");
    line[used] = 0;
    if (strcmp(line, "+OK\r\n") == 0) return -1;
    long bytes = line[0] == '$' ? atol(line + 1) : -2;
    if (bytes < 0 || (size_t)bytes + 2 > sizeof reply) fail(line);
    get(reply, (size_t)bytes + 2);
    return bytes;
}

int main(int count, char **words) {
    static const size_t lengths[] = {0, 1, 100, 4096, 70000, 200000, WRAPS};
    char text[64];
    const char *variable = getenv("CONFORMANCE_CASE"), *name = variable ? variable : "";
    int rounds = strcmp(name, "flow.unhandled") == 0 || strcmp(name, "flow.room-to-ask") == 0 ? 2000 : 70;
    if (count != 3) fail("client HOST PORT");
    dial(words[1], words[2]);
    for (int round = 0; round < rounds; round++) {
        size_t length = (size_t)snprintf(text, sizeof text, "round %d", round);
        if (ask("ECHO", text, NULL, 0) != (long)length || memcmp(reply, text, length) != 0) fail("ECHO");
    }
    if (strcmp(name, "keep.idle") == 0) {
        if (ask("ECHO", "idle", NULL, 0) != 4) fail("ECHO");
        while (getchar() != EOF) {} /* no call of the library until stdin ends */
    }
    size_t count_of = sizeof lengths / sizeof *lengths - (strcmp(name, "xfer.send-memory") != 0);
    for (size_t one = 0; one < count_of; one++) {
        for (size_t at = 0; at < lengths[one]; at++) value[at] = (char)((one + at) % 251);
        if (ask("SET", "key", value, lengths[one]) != -1) fail("SET");
        if (ask("GET", "key", NULL, 0) != (long)lengths[one] || memcmp(reply, value, lengths[one]) != 0) fail("GET");
    }
    snprintf(text, sizeof text, "conformance:bytes:%d", LONG);
    if (ask("GET", text, NULL, 0) != LONG) fail("a long reply");
    return close(stream) != 0 && strcmp(name, "close.last-reply") != 0;
}
