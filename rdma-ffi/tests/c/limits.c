/* What limits refuse, and what they do not end. */
#include "common.h"

enum { CLIENTS = 8, LENGTH = 300000 };

static vkrdma_endpoint *servers, *clients;
static uint64_t here[CLIENTS], there[CLIENTS];
static unsigned char sent[LENGTH], got[LENGTH];
/* Connections that the servers may have beside those that the program knows. */
static uint64_t unknown = UINT64_MAX;

/* Returns how many of `count` clients get in. */
static size_t connect_some(uint16_t port, size_t count) {
    vkrdma_endpoint *const both[] = {servers, clients};
    vkrdma_event events[CLIENTS];
    size_t accepted = 0, opened = 0, refused = 0;
    for (size_t i = 0; i < count; i++) {
        MUST(vkrdma_connect(clients, server_address, port, NULL, 60000000, NULL, &here[i], &failed));
    }
    while (opened + refused < count) {
        rest(both, 2);
        size_t some = turn(servers, events, CLIENTS);
        for (size_t i = 0; i < some; i++) {
            if (events[i].kinds & VKRDMA_EVENT_OPENED) there[accepted++] = events[i].connection;
        }
        CHECK(unknown == UINT64_MAX || usage_of(servers).connections <= accepted + unknown);
        some = turn(clients, events, CLIENTS);
        for (size_t i = 0; i < some; i++) {
            if (events[i].kinds & VKRDMA_EVENT_OPENED) opened++;
            if (events[i].kinds & VKRDMA_EVENT_ENDED) {
                refused++;
                MUST(vkrdma_abort(clients, events[i].connection, &failed));
            }
        }
    }
    CHECK(accepted == opened);
    return opened;
}

static uint16_t begin(const vkrdma_limits *limits) {
    vkrdma_options options = server_options();
    uint64_t listener;
    options.window = 65536;
    MUST(vkrdma_endpoint_new(server_device, limits, &servers, &failed));
    MUST(vkrdma_endpoint_new(client_device, NULL, &clients, &failed));
    return serve(servers, &options, &listener);
}

static void end(void) {
    vkrdma_endpoint_free(servers);
    vkrdma_endpoint_free(clients);
}

/* Memory for the windows of two clients. Neither the second window nor the full send buffer of one
 * fits, and no third client. */
static void memory(void) {
    enum { IDLE = 65536 + 1280 * 32 + 4096 };
    vkrdma_limits limits = {.size = sizeof limits, .connections = UINT64_MAX, .registered_bytes = 2 * IDLE};
    uint16_t port = begin(&limits);
    vkrdma_endpoint *const both[] = {servers, clients};
    CHECK(connect_some(port, 2) == 2);
    CHECK(usage_of(servers).registered_bytes == 2 * IDLE);
    size_t written = 0, read = 0;
    for (size_t i = 0; i < LENGTH; i++) sent[i] = byte_at(1, i);
    while (read < LENGTH) {
        vkrdma_event events[CLIENTS];
        size_t some = 0;
        vkrdma_code code = VKRDMA_AGAIN;
        if (written < LENGTH) code = vkrdma_write(servers, there[0], sent + written, LENGTH - written, &some, &failed);
        if (code != VKRDMA_AGAIN) {
            EXPECT(VKRDMA_OK, code);
            written += some;
            CHECK(usage_of(servers).registered_bytes == 2 * IDLE);
        }
        turn(servers, events, CLIENTS);
        turn(clients, events, CLIENTS);
        if (vkrdma_read(clients, here[0], got + read, LENGTH - read, &some, &failed) == VKRDMA_OK) {
            CHECK(some > 0);
            read += some;
        } else if (code == VKRDMA_AGAIN) {
            rest(both, 2);
        }
    }
    CHECK(memcmp(sent, got, LENGTH) == 0);
    uint64_t kept = here[0];
    CHECK(connect_some(port, 1) == 0);
    CHECK(usage_of(servers).rejected == 1);
    MUST(vkrdma_check(clients, kept, &failed));
    end();
}

/* Connections that the server has not taken are few, however many ask. */
static void backlog(uint64_t most) {
    vkrdma_limits limits = {.size = sizeof limits, .connections = UINT64_MAX, .registered_bytes = UINT64_MAX, .backlog = most};
    uint16_t port = begin(&limits);
    unknown = most > 0 ? most : 256;
    CHECK(connect_some(port, CLIENTS) == CLIENTS);
    unknown = UINT64_MAX;
    CHECK(usage_of(servers).rejected == 0);
    end();
}

/* A program that was compiled before there was a backlog. */
static void shorter(void) {
    vkrdma_limits limits = {.size = offsetof(vkrdma_limits, backlog), .connections = 1, .registered_bytes = UINT64_MAX, .backlog = 0};
    uint16_t port = begin(&limits);
    CHECK(connect_some(port, 2) == 1);
    end();
}

int main(int count, char **arguments) {
    open_devices(count, arguments);
    memory();
    backlog(1);
    backlog(0);
    backlog(UINT64_MAX);
    shorter();
    free_devices();
    puts("limits: newcomers are refused, and clients stay");
    return 0;
}
