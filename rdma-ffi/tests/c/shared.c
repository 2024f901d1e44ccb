/* Endpoints that share a channel of events: each is woken by two descriptors, one of them the
 * program's. */
#include <fcntl.h>
#include <sys/socket.h>

#include "common.h"

enum { CLIENTS = 3, LEN = 100000 };

struct client {
    vkrdma_endpoint *endpoint;
    uint64_t id;
    /* The other end of what the endpoint writes to. */
    int woken;
    int opened, ended;
    size_t written, read;
};

static vkrdma_endpoint *server;
static vkrdma_shared_events *events;
static struct client clients[CLIENTS];
static unsigned char in[LEN], out[LEN];

static void begin(struct client *client, uint16_t port) {
    int ends[2], none = -1;
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends) == 0);
    client->woken = ends[0];
    MUST(vkrdma_endpoint_new_with_events(events, NULL, ends[1], &client->endpoint, &failed));
    CHECK(vkrdma_descriptor(client->endpoint) == ends[1]);
    MUST(vkrdma_connect(client->endpoint, server_address, port, NULL, 100000000, NULL, &client->id, &failed));
    EXPECT(VKRDMA_NO_SUCH_CONNECTION, vkrdma_completions_descriptor(client->endpoint, client->id, &none, &failed));
    EXPECT(VKRDMA_MISUSE, vkrdma_wait(client->endpoint, 0, &failed));
}

static void go_on(struct client *client) {
    vkrdma_event event;
    size_t now;
    char wakeups[8];
    while (recv(client->woken, wakeups, sizeof wakeups, MSG_DONTWAIT) > 0) continue;
    if (turn(client->endpoint, &event, 1) == 1) {
        client->opened |= (event.kinds & VKRDMA_EVENT_OPENED) != 0;
        client->ended |= (event.kinds & VKRDMA_EVENT_ENDED) != 0;
    }
    if (!client->opened || client->ended) return;
    if (client->written < LEN &&
        vkrdma_write(client->endpoint, client->id, out + client->written, LEN - client->written, &now, &failed) == VKRDMA_OK) {
        client->written += now;
    }
    while (client->read < LEN && vkrdma_read(client->endpoint, client->id, in, LEN, &now, &failed) == VKRDMA_OK) {
        CHECK(now > 0 && now <= LEN - client->read && memcmp(in, out + client->read, now) == 0);
        client->read += now;
    }
}

/* Sends back what has come. */
static void serve_all(void) {
    vkrdma_event told[8];
    size_t count = turn(server, told, 8);
    for (size_t i = 0; i < count; i++) {
        uint64_t id = told[i].connection;
        size_t read, written;
        while (vkrdma_read(server, id, in, LEN, &read, &failed) == VKRDMA_OK && read > 0) {
            MUST(vkrdma_write(server, id, in, read, &written, &failed));
            CHECK(written == read);
        }
        if (told[i].kinds & VKRDMA_EVENT_ENDED) MUST(vkrdma_abort(server, id, &failed));
    }
}

/* Sleeps until one of all the descriptors is readable. */
static void sleep_for_all(void) {
    struct pollfd polled[2 + 2 * CLIENTS];
    size_t count = 0;
    int limit = -1;
    int64_t left;
    MUST(vkrdma_next_timeout(server, &left, &failed));
    if (left == 0) limit = 0;
    polled[count++] = (struct pollfd){.fd = vkrdma_descriptor(server), .events = POLLIN};
    polled[count++] = (struct pollfd){.fd = vkrdma_shared_events_descriptor(events), .events = POLLIN};
    for (size_t i = 0; i < CLIENTS; i++) {
        int completions;
        if (!clients[i].endpoint) continue;
        polled[count++] = (struct pollfd){.fd = clients[i].woken, .events = POLLIN};
        if (vkrdma_completions_descriptor(clients[i].endpoint, clients[i].id, &completions, NULL) == VKRDMA_OK) {
            polled[count++] = (struct pollfd){.fd = completions, .events = POLLIN};
        }
        MUST(vkrdma_next_timeout(clients[i].endpoint, &left, &failed));
        if (left == 0) limit = 0;
    }
    CHECK(poll(polled, count, limit) >= 0);
}

int main(int count, char **arguments) {
    uint64_t listener;
    size_t left = CLIENTS;
    open_devices(count, arguments);
    for (size_t i = 0; i < LEN; i++) out[i] = byte_at(1, i);
    MUST(vkrdma_endpoint_new(server_device, NULL, &server, &failed));
    vkrdma_options options = server_options();
    options.send_buffer = LEN;
    uint16_t port = serve(server, &options, &listener);
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_shared_events_new(NULL, &events, &failed));
    MUST(vkrdma_shared_events_new(client_device, &events, &failed));
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_endpoint_new_with_events(events, NULL, -1, &clients[0].endpoint, &failed));
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_endpoint_new_with_events(NULL, NULL, dup(0), &clients[0].endpoint, &failed));
    /* Without a reader it would end the program by SIGPIPE. */
    int ends[2];
    CHECK(pipe(ends) == 0);
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_endpoint_new_with_events(events, NULL, ends[1], &clients[0].endpoint, &failed));
    CHECK(fcntl(ends[1], F_GETFD) == -1 && close(ends[0]) == 0);
    for (size_t i = 0; i < CLIENTS; i++) begin(&clients[i], port);
    EXPECT(VKRDMA_MISUSE, vkrdma_listen(clients[0].endpoint, server_address, 0, NULL, &listener, &failed));
    while (left > 0) {
        sleep_for_all();
        MUST(vkrdma_shared_events_dispatch(events, &failed));
        serve_all();
        for (size_t i = 0; i < CLIENTS; i++) {
            struct client *client = &clients[i];
            if (!client->endpoint) continue;
            go_on(client);
            if (client->read < LEN) continue;
            /* The others go on. */
            vkrdma_endpoint_free(client->endpoint);
            close(client->woken);
            client->endpoint = NULL;
            left--;
        }
    }
    /* In any order. */
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0 && close(ends[0]) == 0);
    MUST(vkrdma_endpoint_new_with_events(events, NULL, ends[1], &clients[0].endpoint, &failed));
    /* The other end is closed, which ends no program. */
    MUST(vkrdma_wake(clients[0].endpoint, &failed));
    vkrdma_shared_events_free(events);
    vkrdma_endpoint_free(clients[0].endpoint);
    vkrdma_shared_events_free(NULL);
    CHECK(vkrdma_shared_events_descriptor(NULL) == -1);
    vkrdma_endpoint_free(server);
    free_devices();
    puts("shared: passed");
    return 0;
}
