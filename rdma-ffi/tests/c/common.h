/* Each program here is both sides of its connections, on a device that its arguments name. */
#ifndef COMMON_H
#define COMMON_H

#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vkrdma.h"

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what);                     \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define EXPECT(expected, call) expect(__FILE__, __LINE__, #call, expected, call)
#define MUST(call) EXPECT(VKRDMA_OK, call)

static vkrdma_error failed;

static inline void expect(const char *file, int line, const char *call, vkrdma_code expected, vkrdma_code code) {
    if (code == expected) return;
    fprintf(stderr, "%s:%d: %s: %d, not %d: %s\n", file, line, call, code, expected,
            code > VKRDMA_AGAIN ? failed.text : "");
    exit(1);
}

static const char *server_address;
/* Of softsim, two hosts; of verbs, one and the same. */
static vkrdma_device *server_device, *client_device;

/* `softsim`, or `verbs ADDRESS`. */
static inline void open_devices(int count, char **arguments) {
    /* Rather than hang. */
    alarm(300);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count == 2 && strcmp(arguments[1], "softsim") == 0) {
        server_address = "10.0.0.1";
        MUST(vkrdma_softsim_open("10.0.0.1", &server_device, &failed));
        MUST(vkrdma_softsim_open("10.0.0.2", &client_device, &failed));
    } else if (count == 3 && strcmp(arguments[1], "verbs") == 0) {
        server_address = arguments[2];
        MUST(vkrdma_verbs_open(&server_device, &failed));
        MUST(vkrdma_verbs_open(&client_device, &failed));
    } else {
        fprintf(stderr, "usage: %s softsim | verbs ADDRESS\n", arguments[0]);
        exit(2);
    }
}

static inline void free_devices(void) {
    vkrdma_device_free(server_device);
    vkrdma_device_free(client_device);
}

/* Sleeps until one of these endpoints has something to do. */
static inline void rest(vkrdma_endpoint *const *endpoints, size_t count) {
    struct pollfd polled[4];
    int64_t sleep = -1;
    CHECK(count <= 4);
    for (size_t i = 0; i < count; i++) {
        int64_t left;
        MUST(vkrdma_next_timeout(endpoints[i], &left, &failed));
        if (left >= 0 && (sleep < 0 || left < sleep)) sleep = left;
        polled[i] = (struct pollfd){.fd = vkrdma_descriptor(endpoints[i]), .events = POLLIN};
        CHECK(polled[i].fd >= 0);
    }
    int milliseconds = sleep < 0 ? -1 : sleep > 1000000000 ? 1000000 : (int)((sleep + 999) / 1000);
    CHECK(poll(polled, count, milliseconds) >= 0);
}

/* Makes a turn. Returns how many events there are. */
static inline size_t turn(vkrdma_endpoint *endpoint, vkrdma_event *events, size_t capacity) {
    size_t count;
    MUST(vkrdma_progress(endpoint, events, capacity, sizeof *events, &count, &failed));
    CHECK(count <= capacity);
    return count;
}

static inline vkrdma_options server_options(void) {
    vkrdma_options options;
    MUST(vkrdma_server_options(&options, sizeof options));
    return options;
}

static inline vkrdma_options client_options(void) {
    vkrdma_options options;
    MUST(vkrdma_client_options(&options, sizeof options));
    return options;
}

/* Returns the port. */
static inline uint16_t serve(vkrdma_endpoint *endpoint, const vkrdma_options *options, uint64_t *listener) {
    vkrdma_address address;
    MUST(vkrdma_listen(endpoint, server_address, 0, options, listener, &failed));
    MUST(vkrdma_listener_address(endpoint, *listener, &address, &failed));
    CHECK(strcmp(address.text, server_address) == 0);
    return address.port;
}

static inline vkrdma_usage usage_of(vkrdma_endpoint *endpoint) {
    vkrdma_usage usage;
    MUST(vkrdma_usage_of(endpoint, &usage, sizeof usage, &failed));
    return usage;
}

static inline vkrdma_status status_of(vkrdma_endpoint *endpoint, uint64_t connection) {
    vkrdma_status status;
    MUST(vkrdma_status_of(endpoint, connection, &status, sizeof status, &failed));
    return status;
}

static inline unsigned char byte_at(size_t which, size_t place) {
    return (unsigned char)(place * 31 + (place >> 8) * 7 + (place >> 16) + which);
}

#endif
