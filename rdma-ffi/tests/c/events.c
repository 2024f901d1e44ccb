/* Events come in an array: none is lost that finds no room, and a connection has one. */
#include "common.h"

enum { CONNECTIONS = 3 };

static vkrdma_endpoint *servers, *clients;
static uint64_t here[CONNECTIONS], there[CONNECTIONS];

/* An event of a later version. */
struct later {
    vkrdma_event event;
    uint64_t more;
};

static void connect_all(uint16_t port) {
    vkrdma_endpoint *const both[] = {servers, clients};
    int opened = 0;
    for (size_t i = 0; i < CONNECTIONS; i++) {
        MUST(vkrdma_connect(clients, server_address, port, NULL, 60000000, NULL, &here[i], &failed));
        MUST(vkrdma_set_data(clients, here[i], &here[i], &failed));
    }
    for (size_t accepted = 0; accepted < CONNECTIONS || opened < CONNECTIONS;) {
        vkrdma_event events[CONNECTIONS];
        rest(both, 2);
        size_t count = turn(servers, events, CONNECTIONS);
        for (size_t i = 0; i < count; i++) {
            if (events[i].kinds & VKRDMA_EVENT_OPENED) there[accepted++] = events[i].connection;
        }
        count = turn(clients, events, CONNECTIONS);
        for (size_t i = 0; i < count; i++) opened += (events[i].kinds & VKRDMA_EVENT_OPENED) != 0;
    }
    vkrdma_event event;
    while (turn(clients, &event, 1) > 0) {}
}

/* Has a byte arrive on each connection of the clients, which make no turn. */
static void send_to_all(void) {
    for (size_t i = 0; i < CONNECTIONS; i++) {
        vkrdma_event event;
        vkrdma_buffer *buffer;
        size_t lent;
        MUST(vkrdma_register(servers, there[i], 1, VKRDMA_LEND, &buffer, &failed));
        MUST(vkrdma_lend(servers, there[i], buffer, 0, 1, &lent, &failed));
        CHECK(lent == 1);
        while (vkrdma_returned(servers, there[i], buffer, &failed) == VKRDMA_AGAIN) {
            rest(&servers, 1);
            turn(servers, &event, 1);
        }
        vkrdma_buffer_free(buffer);
    }
}

/* Returns which connection of the clients it is. */
static size_t which(const vkrdma_event *event) {
    size_t index = (size_t)((uint64_t *)event->data - here);
    CHECK(index < CONNECTIONS && event->connection == here[index]);
    CHECK(event->reserved == 0 && event->listener == 0);
    return index;
}

static void read_all(void) {
    char bytes[2];
    size_t read;
    for (size_t i = 0; i < CONNECTIONS; i++) {
        /* Fewer bytes than there is room for: nothing is left. */
        MUST(vkrdma_read(clients, here[i], bytes, sizeof bytes, &read, &failed));
        CHECK(read == 1);
        EXPECT(VKRDMA_AGAIN, vkrdma_read(clients, here[i], bytes, sizeof bytes, &read, &failed));
    }
}

static void full_array(void) {
    vkrdma_event event;
    unsigned seen = 0;
    int64_t left;
    send_to_all();
    for (size_t i = 0; i < CONNECTIONS; i++) {
        /* It would wait for ever if it slept. */
        MUST(vkrdma_wait(clients, -1, &failed));
        CHECK(turn(clients, &event, 1) == 1 && event.kinds == VKRDMA_EVENT_READABLE);
        seen |= 1u << which(&event);
        MUST(vkrdma_next_timeout(clients, &left, &failed));
        CHECK((left == 0) == (i + 1 < CONNECTIONS));
    }
    CHECK(seen == (1u << CONNECTIONS) - 1);
    CHECK(turn(clients, &event, 1) == 0);
    read_all();
}

static void wrong_arrays(void) {
    vkrdma_event events[CONNECTIONS];
    size_t count = 77;
    send_to_all();
    const size_t size = sizeof events[0], sizes[] = {0, 1, size - 1, 4097, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        EXPECT(VKRDMA_INVALID_OPTIONS, vkrdma_progress(clients, events, CONNECTIONS, sizes[i], &count, &failed));
        CHECK(failed.fault == VKRDMA_FAULT_CALLER && strstr(failed.text, "no size") != NULL);
    }
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_progress(clients, NULL, CONNECTIONS, size, &count, &failed));
    CHECK(strstr(failed.text, "null") != NULL);
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_progress(clients, events, 0, size, &count, &failed));
    CHECK(strstr(failed.text, "no room") != NULL);
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_progress(clients, events, SIZE_MAX / size, size, &count, &failed));
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_progress(clients, events, SIZE_MAX, size, &count, &failed));
    CHECK(strstr(failed.text, "longer than memory") != NULL);
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_progress(clients, events, CONNECTIONS, size, NULL, &failed));
    CHECK(strstr(failed.text, "null") != NULL);
    CHECK(count == 77);
    /* None of them has taken anything. */
    CHECK(turn(clients, events, CONNECTIONS) == CONNECTIONS);
    read_all();
}

/* Events of a later version are longer. What this version does not know is zero, and places
 * without an event are left alone. */
static void longer_events(void) {
    struct later events[CONNECTIONS + 1];
    size_t count;
    unsigned seen = 0;
    memset(events, 0x55, sizeof events);
    send_to_all();
    MUST(vkrdma_progress(clients, &events[0].event, CONNECTIONS + 1, sizeof events[0], &count, &failed));
    CHECK(count == CONNECTIONS);
    for (size_t i = 0; i < CONNECTIONS; i++) {
        CHECK(events[i].event.kinds == VKRDMA_EVENT_READABLE && events[i].more == 0);
        seen |= 1u << which(&events[i].event);
    }
    CHECK(seen == (1u << CONNECTIONS) - 1);
    CHECK(events[CONNECTIONS].more == UINT64_C(0x5555555555555555) && events[CONNECTIONS].event.kinds == 0x55555555);
    read_all();
}

/* A connection has one event in an array, whatever has happened. */
static void all_at_once(void) {
    vkrdma_event events[2 * CONNECTIONS];
    uint32_t kinds[CONNECTIONS] = {0};
    char byte;
    size_t read, ended = 0;
    send_to_all();
    for (size_t i = 0; i < CONNECTIONS; i++) {
        MUST(vkrdma_close(servers, there[i], 10000000, &failed));
        while (vkrdma_closed(servers, there[i], &failed) == VKRDMA_AGAIN) {
            rest(&servers, 1);
            turn(servers, events, 1);
        }
    }
    while (ended < CONNECTIONS) {
        unsigned seen = 0;
        MUST(vkrdma_wait(clients, -1, &failed));
        size_t count = turn(clients, events, 2 * CONNECTIONS);
        for (size_t i = 0; i < count; i++) {
            size_t at = which(&events[i]);
            CHECK(!(seen & 1u << at));
            seen |= 1u << at;
            kinds[at] |= events[i].kinds;
            ended += (events[i].kinds & VKRDMA_EVENT_ENDED) != 0;
        }
    }
    for (size_t i = 0; i < CONNECTIONS; i++) {
        CHECK(kinds[i] == (VKRDMA_EVENT_READABLE | VKRDMA_EVENT_ENDED));
        MUST(vkrdma_read(clients, here[i], &byte, 1, &read, &failed));
        CHECK(read == 1);
        MUST(vkrdma_read(clients, here[i], &byte, 1, &read, &failed));
        CHECK(read == 0);
        MUST(vkrdma_abort(clients, here[i], &failed));
    }
}

int main(int count, char **arguments) {
    open_devices(count, arguments);
    MUST(vkrdma_endpoint_new(server_device, NULL, &servers, &failed));
    MUST(vkrdma_endpoint_new(client_device, NULL, &clients, &failed));
    vkrdma_options options = server_options();
    options.keepalive_every = 0;
    uint64_t listener;
    connect_all(serve(servers, &options, &listener));
    full_array();
    wrong_arrays();
    longer_events();
    all_at_once();
    vkrdma_endpoint_free(servers);
    vkrdma_endpoint_free(clients);
    free_devices();
    puts("events: none was lost");
    return 0;
}
