/* The work of `peer endpoint` of benches/examples/peer.rs by the C interface of an endpoint.
 *
 *   interface endpoint ROUNDS    a request of 64 bytes and its answer, by an event loop */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vkrdma.h>

enum { LEN = 64, EVENTS = 16 };

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
__attribute__((noinline)) int measured_read(char *answer) {
    vkrdma_event events[EVENTS];
    size_t count, read;
    int answers = 0;
    check(vkrdma_progress(endpoint, events, EVENTS, sizeof events[0], &count, NULL) == VKRDMA_OK, "progress");
    for (size_t i = 0; i < count; i++) {
        if (!(events[i].kinds & VKRDMA_EVENT_READABLE)) continue;
        answers += vkrdma_read(endpoint, events[i].connection, answer, LEN, &read, NULL) == VKRDMA_OK && read == LEN;
    }
    return answers;
}

int main(int argc, char **argv) {
    vkrdma_device *device;
    vkrdma_event event;
    vkrdma_error error;
    char request[LEN], answer[LEN];
    size_t count;
    long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 0;
    int opened = 0;
    check(rounds > 0, "usage: interface endpoint ROUNDS");
    check(vkrdma_verbs_open(&device, &error) == VKRDMA_OK && vkrdma_endpoint_new(device, NULL, &endpoint, &error) == VKRDMA_OK, "begin");
    check(vkrdma_connect(endpoint, "192.0.2.1", 6379, NULL, 5000000, NULL, &connection, &error) == VKRDMA_OK, "connect");
    while (!opened) {
        check(vkrdma_progress(endpoint, &event, 1, sizeof event, &count, &error) == VKRDMA_OK, "progress");
        opened = count > 0 && event.kinds & VKRDMA_EVENT_OPENED;
    }
    memset(request, 'a', LEN);
    for (long round = 0; round < rounds; round++) {
        measured_write(request);
        while (!measured_read(answer)) {}
    }
    /* The connection goes with the process. */
    return 0;
}
