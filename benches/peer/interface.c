/* The work of `peer endpoint` of benches/examples/peer.rs by the C interface of an endpoint.
 *
 *   interface endpoint ROUNDS    a request of 64 bytes and its answer, by an event loop
 *   interface after ROUNDS       the same with a buffer of 16 MiB, after a value of 32 MiB */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vkrdma.h>

enum { LEN = 64, EVENTS = 16, ROOM = 16 << 20, VALUE = 32 << 20 };

static vkrdma_endpoint *endpoint;
static uint64_t connection;

static void check(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "interface: %s\n", what);
    exit(1);
}

__attribute__((noinline)) void measured_write(const char *request) {
    size_t written;
    check(vkrdma_write(endpoint, connection, request, LEN, &written, NULL) == VKRDMA_OK && written == LEN, "write");
}

/* Returns how many answers there were. */
__attribute__((noinline)) int measured_read(char *answer, size_t room) {
    vkrdma_event events[EVENTS];
    size_t count, read;
    int answers = 0;
    check(vkrdma_progress(endpoint, events, EVENTS, sizeof events[0], &count, NULL) == VKRDMA_OK, "progress");
    for (size_t i = 0; i < count; i++) {
        if (!(events[i].kinds & VKRDMA_EVENT_READABLE)) continue;
        answers += vkrdma_read(endpoint, events[i].connection, answer, room, &read, NULL) == VKRDMA_OK && read == LEN;
    }
    return answers;
}

/* Gets a value, whose length and line ends are read as well. */
static void get_value(char *into) {
    static const char get[] = "*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n";
    vkrdma_event events[EVENTS];
    size_t count, now, left = VALUE + sizeof "$33554432\r\n\r\n" - 1;
    check(vkrdma_write(endpoint, connection, get, sizeof get - 1, &now, NULL) == VKRDMA_OK && now == sizeof get - 1, "write");
    while (left > 0) {
        check(vkrdma_progress(endpoint, events, EVENTS, sizeof events[0], &count, NULL) == VKRDMA_OK, "progress");
        while (vkrdma_read(endpoint, connection, into, ROOM, &now, NULL) == VKRDMA_OK && now > 0) left -= now;
    }
}

int main(int argc, char **argv) {
    vkrdma_device *device;
    vkrdma_event event;
    vkrdma_error error;
    char request[LEN], *answer = malloc(ROOM);
    size_t count;
    long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 0;
    int opened = 0, after = argc > 1 && !strcmp(argv[1], "after");
    check(rounds > 0 && answer, "usage: interface endpoint|after ROUNDS");
    check(vkrdma_verbs_open(&device, &error) == VKRDMA_OK && vkrdma_endpoint_new(device, NULL, &endpoint, &error) == VKRDMA_OK, "begin");
    check(vkrdma_connect(endpoint, "192.0.2.1", 6379, NULL, 5000000, NULL, &connection, &error) == VKRDMA_OK, "connect");
    while (!opened) {
        check(vkrdma_progress(endpoint, &event, 1, sizeof event, &count, &error) == VKRDMA_OK, "progress");
        opened = count > 0 && event.kinds & VKRDMA_EVENT_OPENED;
    }
    if (after) get_value(answer);
    memset(request, 'a', LEN);
    for (long round = 0; round < rounds; round++) {
        measured_write(request);
        while (!measured_read(answer, after ? ROOM : LEN)) {}
    }
    /* The connection goes with the process. */
    return 0;
}
