/* Each error has a code, a fault and a text, and harms nothing else. */
#include "common.h"

/* Only in debug builds. */
#ifdef PANICS
vkrdma_code vkrdma_panic(const vkrdma_endpoint *endpoint, vkrdma_error *error);
#endif

/* The call fails with this code, fault and text. */
#define FAILS(expected, whose, says, call)                                                                             \
    do {                                                                                                               \
        memset(&failed, 0x55, sizeof failed);                                                                          \
        EXPECT(expected, call);                                                                                        \
        CHECK(failed.code == (expected));                                                                              \
        CHECK(failed.fault == (whose));                                                                                \
        CHECK(memchr(failed.text, 0, sizeof failed.text) != NULL);                                                     \
        if (strstr(failed.text, says) == NULL) {                                                                       \
            fprintf(stderr, "%s:%d: '%s' is not in: %s\n", __FILE__, __LINE__, says, failed.text);                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static vkrdma_endpoint *servers, *clients;

static void wrong_arguments(void) {
    vkrdma_endpoint *endpoint;
    vkrdma_device *device;
    vkrdma_event event;
    uint64_t id;
    size_t bytes;
    char text[8];
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "device is null", vkrdma_endpoint_new(NULL, NULL, &endpoint, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "null", vkrdma_endpoint_new(client_device, NULL, NULL, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "endpoint is null",
          vkrdma_progress(NULL, &event, 1, sizeof event, &bytes, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "endpoint is null", vkrdma_read(NULL, 1, text, 8, &bytes, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "numeric",
          vkrdma_connect(clients, "localhost", 1, NULL, 1, NULL, &id, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "null", vkrdma_connect(clients, NULL, 1, NULL, 1, NULL, &id, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "numeric", vkrdma_softsim_open("\xff", &device, &failed));
    /* No place for the error, and nothing to free. */
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_progress(NULL, NULL, 0, 0, NULL, NULL));
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_client_options(NULL, sizeof(vkrdma_options)));
    CHECK(vkrdma_descriptor(NULL) == -1 && vkrdma_buffer_base(NULL) == NULL && vkrdma_buffer_len(NULL) == 0);
    vkrdma_endpoint_free(NULL);
    vkrdma_device_free(NULL);
    vkrdma_buffer_free(NULL);
}

static void wrong_sizes(void) {
    uint64_t listener;
    vkrdma_endpoint *endpoint;
    vkrdma_options options = server_options();
    CHECK(options.size == sizeof options);
    /* `settings` was appended to the first version. */
    const size_t wrong[] = {0, 1, offsetof(vkrdma_options, settings) - 1, 4097, SIZE_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        options.size = wrong[i];
        FAILS(VKRDMA_INVALID_OPTIONS, VKRDMA_FAULT_CALLER, "no size",
              vkrdma_listen(servers, server_address, 0, &options, &listener, &failed));
        EXPECT(VKRDMA_INVALID_OPTIONS, vkrdma_server_options(&options, wrong[i]));
    }
    vkrdma_usage usage;
    FAILS(VKRDMA_INVALID_OPTIONS, VKRDMA_FAULT_CALLER, "no size",
          vkrdma_usage_of(servers, &usage, sizeof usage - 1, &failed));
    FAILS(VKRDMA_INVALID_OPTIONS, VKRDMA_FAULT_CALLER, "no size", vkrdma_usage_of(servers, &usage, 4097, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "null", vkrdma_usage_of(servers, NULL, sizeof usage, &failed));
    /* The zeros of a later version are ignored. */
    struct {
        vkrdma_options options;
        uint64_t more;
    } later = {server_options(), 7};
    MUST(vkrdma_server_options(&later.options, sizeof later));
    CHECK(later.options.size == sizeof later && later.more == 0);
    MUST(vkrdma_listen(servers, server_address, 0, &later.options, &listener, &failed));
    MUST(vkrdma_listener_close(servers, listener, &failed));
    later.more = 1;
    FAILS(VKRDMA_INVALID_OPTIONS, VKRDMA_FAULT_CALLER, "later",
          vkrdma_listen(servers, server_address, 0, &later.options, &listener, &failed));

    vkrdma_limits limits = {.size = 1, .connections = 1, .registered_bytes = 1};
    FAILS(VKRDMA_INVALID_OPTIONS, VKRDMA_FAULT_CALLER, "no size", vkrdma_endpoint_new(server_device, &limits, &endpoint, &failed));
}

static void out_of_bounds(void) {
    uint64_t id;
    vkrdma_options options;
#define BEYOND(field, value)                                                                                           \
    options = client_options();                                                                                        \
    options.field = value;                                                                                             \
    FAILS(VKRDMA_INVALID_OPTIONS, VKRDMA_FAULT_CALLER, "must be",                                                      \
          vkrdma_connect(clients, server_address, 1, NULL, 1, &options, &id, &failed))
    BEYOND(window, 0);
    BEYOND(windows, 0);
    BEYOND(windows, 258);
    BEYOND(send_buffer, (1u << 30) + 1);
    BEYOND(window_limit, 0);
    BEYOND(send_depth, 65536 + 256);
    BEYOND(peer_receives, 1);
    BEYOND(receives, 16385);
    BEYOND(rnr_timer, 32);
    BEYOND(rnr_timer, 256 + 12);
    BEYOND(negotiate, 2);
    BEYOND(eager_send_buffer, 2);
    BEYOND(keep_memory, 999);

    options = client_options();
    const vkrdma_options before = options;
#define UNKNOWN(name, value, text)                                                                                     \
    FAILS(VKRDMA_INVALID_OPTIONS, VKRDMA_FAULT_CALLER, text, vkrdma_options_set(&options, name, value, &failed));      \
    CHECK(memcmp(&options, &before, sizeof before) == 0)
    UNKNOWN("windws", "2", "there is no option windws; there are window windows");
    UNKNOWN("traffic", "2", "ack_timeout=0..31");
    UNKNOWN("size", "2", "there is no option");
    UNKNOWN("windows", "3", "must be");
    UNKNOWN("windows", "-1", "which '-1' is not");
    UNKNOWN("ack_timeout", "32", "must be");
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "null", vkrdma_options_set(&options, NULL, "1", &failed));
    MUST(vkrdma_options_set(&options, "ack_timeout", "16", NULL));
    MUST(vkrdma_options_set(&options, "Spin", "50", NULL));
    CHECK(options.spin == 50 && strstr(options.settings, "ack_timeout=16"));
    /* As of a program that was compiled with the first version of the header. */
    options = before;
    options.size = offsetof(vkrdma_options, settings);
    MUST(vkrdma_options_set(&options, "spin", "50", NULL));
    CHECK(options.spin == 50);
    FAILS(VKRDMA_INVALID_OPTIONS, VKRDMA_FAULT_CALLER, "the option ack_timeout needs a program that is compiled",
          vkrdma_options_set(&options, "ack_timeout", "16", &failed));
    FAILS(VKRDMA_INVALID_OPTIONS, VKRDMA_FAULT_CALLER, "there is no option windws",
          vkrdma_options_set(&options, "windws", "2", &failed));
    CHECK(usage_of(clients).connections == 0);
}

static void await_end(vkrdma_endpoint *endpoint, uint64_t id) {
    vkrdma_event event;
    do {
        MUST(vkrdma_wait(endpoint, -1, &failed));
    } while (turn(endpoint, &event, 1) == 0 || !(event.kinds & VKRDMA_EVENT_ENDED));
    CHECK(event.connection == id);
}

static void never_made(uint16_t free_port) {
    uint64_t id;
    MUST(vkrdma_connect(clients, server_address, free_port, NULL, 60000000, NULL, &id, &failed));
    await_end(clients, id);
    FAILS(VKRDMA_REFUSED, VKRDMA_FAULT_PEER, "nothing listens", vkrdma_check(clients, id, &failed));
    vkrdma_status status = status_of(clients, id);
    CHECK(status.open == 0 && status.ended == 1);
    size_t bytes;
    char byte = 0;
    FAILS(VKRDMA_REFUSED, VKRDMA_FAULT_PEER, "nothing listens", vkrdma_write(clients, id, &byte, 1, &bytes, &failed));
    MUST(vkrdma_abort(clients, id, &failed));
    MUST(vkrdma_connect(clients, "203.0.113.77", free_port, NULL, 1000000, NULL, &id, &failed));
    await_end(clients, id);
    CHECK(vkrdma_check(clients, id, &failed) == VKRDMA_UNREACHABLE || failed.code == VKRDMA_TIMED_OUT);
    CHECK(failed.fault == VKRDMA_FAULT_NETWORK);
    MUST(vkrdma_abort(clients, id, &failed));
    CHECK(usage_of(clients).connections == 0);
}

static int is_readable(vkrdma_endpoint *endpoint) {
    struct pollfd polled = {.fd = vkrdma_descriptor(endpoint), .events = POLLIN};
    return poll(&polled, 1, 0) == 1;
}

/* A call in another thread, which needs an earlier time-out, wakes a sleeping loop. */
static void roused(uint16_t port) {
    uint64_t id;
    int64_t left;
    vkrdma_event event;
    vkrdma_endpoint *sleeping;
    MUST(vkrdma_endpoint_new(client_device, NULL, &sleeping, &failed));
    do {
        CHECK(turn(sleeping, &event, 1) == 0);
        MUST(vkrdma_next_timeout(sleeping, &left, &failed));
    } while (left == 0 || is_readable(sleeping));
    CHECK(left == -1);
    MUST(vkrdma_connect(sleeping, "203.0.113.77", port, NULL, 60000000, NULL, &id, &failed));
    CHECK(is_readable(sleeping));
    CHECK(turn(sleeping, &event, 1) == 0);
    MUST(vkrdma_next_timeout(sleeping, &left, &failed));
    CHECK(left >= 0 && left <= 60000000);
    vkrdma_endpoint_free(sleeping);
}

/* Returns the ids of both sides. */
static void connect_one(uint16_t port, uint64_t *here, uint64_t *there) {
    vkrdma_endpoint *const both[] = {servers, clients};
    *there = 0;
    MUST(vkrdma_connect(clients, server_address, port, NULL, 60000000, NULL, here, &failed));
    for (int open = 0; *there == 0 || !open;) {
        vkrdma_event event;
        rest(both, 2);
        if (turn(servers, &event, 1) == 1 && event.kinds & VKRDMA_EVENT_OPENED) *there = event.connection;
        open |= turn(clients, &event, 1) == 1 && event.kinds & VKRDMA_EVENT_OPENED;
    }
}

static void await_bytes(vkrdma_endpoint *endpoint, uint64_t id, size_t bytes) {
    vkrdma_endpoint *const both[] = {servers, clients};
    vkrdma_event event;
    while (status_of(endpoint, id).unread < bytes) {
        rest(both, 2);
        turn(servers, &event, 1);
        turn(clients, &event, 1);
    }
}

static void stale_ids(uint64_t listener, uint16_t port) {
    uint64_t here, there, other;
    size_t bytes;
    char byte = 7;
    vkrdma_address address;
    connect_one(port, &here, &there);
    const uint64_t wrong[] = {0, 1, here ^ (1ull << 32), here + 1, UINT64_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        FAILS(VKRDMA_NO_SUCH_CONNECTION, VKRDMA_FAULT_CALLER, "no such connection",
              vkrdma_write(clients, wrong[i], &byte, 1, &bytes, &failed));
    }
    MUST(vkrdma_abort(clients, here, &failed));
    /* Reuses the place of the freed one. */
    connect_one(port, &other, &there);
    CHECK(other != here);
#define STALE(call) FAILS(VKRDMA_NO_SUCH_CONNECTION, VKRDMA_FAULT_CALLER, "no such connection", call)
    vkrdma_pieces pieces;
    vkrdma_buffer *buffer;
    vkrdma_status status;
    vkrdma_counters counters;
    uint32_t local;
    STALE(vkrdma_read(clients, here, &byte, 1, &bytes, &failed));
    STALE(vkrdma_arrived(clients, here, &pieces, &failed));
    STALE(vkrdma_consume(clients, here, 0, &failed));
    STALE(vkrdma_write(clients, here, &byte, 1, &bytes, &failed));
    STALE(vkrdma_flush(clients, here, &failed));
    STALE(vkrdma_register(clients, here, 1, VKRDMA_LEND, &buffer, &failed));
    STALE(vkrdma_stop_landing(clients, here, &failed));
    STALE(vkrdma_set_data(clients, here, &byte, &failed));
    STALE(vkrdma_peer_address(clients, here, &address, &failed));
    STALE(vkrdma_local_address(clients, here, &address, &failed));
    STALE(vkrdma_check(clients, here, &failed));
    STALE(vkrdma_close(clients, here, 0, &failed));
    STALE(vkrdma_closed(clients, here, &failed));
    STALE(vkrdma_abandon(clients, here, 0, &failed));
    STALE(vkrdma_abort(clients, here, &failed));
    STALE(vkrdma_status_of(clients, here, &status, sizeof status, &failed));
    STALE(vkrdma_counters_of(clients, here, &counters, sizeof counters, &failed));
    STALE(vkrdma_is_local(clients, here, &local, &failed));
    STALE(vkrdma_connect_in_domain(clients, clients, here, server_address, port, NULL, 1, NULL, &here, &failed));
    FAILS(VKRDMA_NO_SUCH_LISTENER, VKRDMA_FAULT_CALLER, "no such listener",
          vkrdma_listener_address(servers, listener + 100, &address, &failed));
    MUST(vkrdma_abort(clients, other, &failed));
}

static void misuse(uint16_t port) {
    uint64_t here, there, sibling, other_there;
    size_t bytes;
    vkrdma_received received;
    char byte = 7;
    connect_one(port, &here, &there);
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "null", vkrdma_write(clients, here, NULL, 1, &bytes, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "memory",
          vkrdma_read(clients, here, &byte, SIZE_MAX, &bytes, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "null", vkrdma_read(clients, here, &byte, 1, NULL, &failed));
    EXPECT(VKRDMA_AGAIN, vkrdma_read(clients, here, &byte, 1, &bytes, &failed));
    /* NULL is allowed for no bytes. */
    MUST(vkrdma_write(clients, here, NULL, 0, &bytes, &failed));
    CHECK(bytes == 0);
    MUST(vkrdma_writev(clients, here, NULL, 0, &bytes, &failed));
    MUST(vkrdma_read(clients, here, NULL, 0, &bytes, &failed));
    FAILS(VKRDMA_MISUSE, VKRDMA_FAULT_CALLER, "consumed", vkrdma_consume(clients, here, 1, &failed));

    /* One notification for many pieces. */
    vkrdma_counters before, after;
    struct iovec pieces[] = {{&byte, 1}, {NULL, 0}, {&byte, 1}, {&byte, 1}};
    MUST(vkrdma_counters_of(clients, here, &before, sizeof before, &failed));
    MUST(vkrdma_writev(clients, here, pieces, 4, &bytes, &failed));
    MUST(vkrdma_counters_of(clients, here, &after, sizeof after, &failed));
    CHECK(bytes == 3 && after.data_notifications_sent == before.data_notifications_sent + 1);
    await_bytes(servers, there, 3);

    vkrdma_buffer *buffer;
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "access", vkrdma_register(clients, here, 1, 2, &buffer, &failed));
    MUST(vkrdma_register(clients, here, 4096, VKRDMA_LEND_AND_RECEIVE, &buffer, &failed));
    FAILS(VKRDMA_MISUSE, VKRDMA_FAULT_CALLER, "lent", vkrdma_lend(clients, here, buffer, 1, 4096, &bytes, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "wraps",
          vkrdma_lend(clients, here, buffer, SIZE_MAX, 2, &bytes, &failed));
    FAILS(VKRDMA_MISUSE, VKRDMA_FAULT_CALLER, "lent",
          vkrdma_lend_framed(clients, here, pieces, 1, buffer, 1, 4096, NULL, 0, &bytes, &failed));
    FAILS(VKRDMA_INVALID_ARGUMENT, VKRDMA_FAULT_CALLER, "null",
          vkrdma_lend_framed(clients, here, NULL, 0, buffer, 0, 4096, NULL, 1, &bytes, &failed));
    /* One notification for what is copied and what is lent. */
    MUST(vkrdma_counters_of(clients, here, &before, sizeof before, &failed));
    MUST(vkrdma_lend_framed(clients, here, pieces, 4, buffer, 0, 4096, pieces, 2, &bytes, &failed));
    MUST(vkrdma_counters_of(clients, here, &after, sizeof after, &failed));
    CHECK(bytes == 4100 && after.data_notifications_sent == before.data_notifications_sent + 1);
    await_bytes(servers, there, 4103);
    FAILS(VKRDMA_MISUSE, VKRDMA_FAULT_CALLER, "buffer of 4096", vkrdma_receive(clients, here, buffer, 0, 4097, &received, &failed));
    EXPECT(VKRDMA_AGAIN, vkrdma_receive(clients, here, buffer, 0, 16, &received, &failed));
    FAILS(VKRDMA_MISUSE, VKRDMA_FAULT_CALLER, "another part", vkrdma_receive(clients, here, buffer, 0, 17, &received, &failed));
    MUST(vkrdma_stop_landing(clients, here, &failed));
    EXPECT(VKRDMA_AGAIN, vkrdma_receive(clients, here, buffer, 0, 17, &received, &failed));
    MUST(vkrdma_stop_landing(clients, here, &failed));

    connect_one(port, &sibling, &other_there);
    FAILS(VKRDMA_FOREIGN_BUFFER, VKRDMA_FAULT_CALLER, "domain", vkrdma_lend(clients, sibling, buffer, 0, 1, &bytes, &failed));
    MUST(vkrdma_abort(clients, sibling, &failed));
    MUST(vkrdma_connect_in_domain(clients, clients, here, server_address, port, NULL, 60000000, NULL, &sibling, &failed));
    vkrdma_endpoint *const both[] = {servers, clients};
    while (!status_of(clients, sibling).open) {
        vkrdma_event event;
        rest(both, 2);
        turn(servers, &event, 1);
        turn(clients, &event, 1);
    }
    MUST(vkrdma_lend(clients, sibling, buffer, 0, 1, &bytes, &failed));
    /* It is kept while it is needed. */
    vkrdma_buffer_free(buffer);

    MUST(vkrdma_close(clients, here, 10000000, &failed));
    FAILS(VKRDMA_MISUSE, VKRDMA_FAULT_CALLER, "after close", vkrdma_write(clients, here, &byte, 1, &bytes, &failed));
    MUST(vkrdma_abort(clients, here, &failed));
    MUST(vkrdma_abort(clients, sibling, &failed));
}

/* A closed listener frees its port; accepted connections go on. */
static void rebound(uint64_t *listener, uint16_t port) {
    uint64_t here, there, other;
    size_t bytes;
    connect_one(port, &here, &there);
    FAILS(VKRDMA_ADDRESS, VKRDMA_FAULT_HERE, "listening", vkrdma_listen(servers, server_address, port, NULL, &other, &failed));
    MUST(vkrdma_listener_close(servers, *listener, &failed));
    EXPECT(VKRDMA_NO_SUCH_LISTENER, vkrdma_listener_close(servers, *listener, &failed));
    MUST(vkrdma_listen(servers, server_address, port, NULL, listener, &failed));
    MUST(vkrdma_accept_error(servers, *listener, &failed));
    vkrdma_options options = server_options();
    options.window = 65536;
    MUST(vkrdma_listener_set_options(servers, *listener, &options, &failed));
    MUST(vkrdma_write(clients, here, "on", 2, &bytes, &failed));
    await_bytes(servers, there, 2);
    MUST(vkrdma_abort(clients, here, &failed));
    connect_one(port, &here, &there);
    MUST(vkrdma_abort(clients, here, &failed));
}

static void limits(uint16_t port) {
    vkrdma_limits one = {.size = sizeof one, .connections = 1, .registered_bytes = UINT64_MAX};
    vkrdma_endpoint *endpoint, *sharing;
    uint64_t id;
    MUST(vkrdma_endpoint_new(client_device, &one, &endpoint, &failed));
    MUST(vkrdma_endpoint_new_sharing(endpoint, &sharing, &failed));
    MUST(vkrdma_connect(endpoint, server_address, port, NULL, 60000000, NULL, &id, &failed));
    FAILS(VKRDMA_TOO_MANY_CONNECTIONS, VKRDMA_FAULT_HERE, "connections as may be, 1",
          vkrdma_connect(sharing, server_address, port, NULL, 60000000, NULL, &id, &failed));
    vkrdma_endpoint_free(endpoint);
    MUST(vkrdma_connect(sharing, server_address, port, NULL, 60000000, NULL, &id, &failed));
    vkrdma_endpoint_free(sharing);
    one = (vkrdma_limits){.size = sizeof one, .connections = 10, .registered_bytes = 4096};
    MUST(vkrdma_endpoint_new(client_device, &one, &endpoint, &failed));
    MUST(vkrdma_connect(endpoint, server_address, port, NULL, 60000000, NULL, &id, &failed));
    await_end(endpoint, id);
    FAILS(VKRDMA_REGISTERED_MEMORY, VKRDMA_FAULT_HERE, "4096", vkrdma_check(endpoint, id, &failed));
    vkrdma_endpoint_free(endpoint);
}

#ifdef PANICS
static void panics(uint16_t port) {
    uint64_t here, there;
    vkrdma_endpoint *broken;
    vkrdma_event event;
    size_t count;
    MUST(vkrdma_endpoint_new(client_device, NULL, &broken, &failed));
    MUST(vkrdma_connect(broken, server_address, port, NULL, 60000000, NULL, &here, &failed));
    FAILS(VKRDMA_PANIC, VKRDMA_FAULT_LIBRARY, "a test of panics", vkrdma_panic(broken, &failed));
    FAILS(VKRDMA_PANIC, VKRDMA_FAULT_LIBRARY, "earlier",
          vkrdma_progress(broken, &event, 1, sizeof event, &count, &failed));
    FAILS(VKRDMA_PANIC, VKRDMA_FAULT_LIBRARY, "earlier", vkrdma_wait(broken, -1, &failed));
    vkrdma_endpoint_free(broken);
    /* Other endpoints go on. */
    connect_one(port, &here, &there);
    MUST(vkrdma_abort(clients, here, &failed));
}
#endif

int main(int count, char **arguments) {
    open_devices(count, arguments);
    MUST(vkrdma_endpoint_new(server_device, NULL, &servers, &failed));
    MUST(vkrdma_endpoint_new(client_device, NULL, &clients, &failed));
    CHECK(strlen(vkrdma_version()) >= 5);
    uint64_t listener, unused;
    uint16_t port = serve(servers, NULL, &listener), free_port = serve(servers, NULL, &unused);
    MUST(vkrdma_listener_close(servers, unused, &failed));
    wrong_arguments();
    wrong_sizes();
    out_of_bounds();
    never_made(free_port);
    roused(free_port);
    stale_ids(listener, port);
    misuse(port);
    rebound(&listener, port);
    limits(port);
#ifdef PANICS
    panics(port);
#endif
    vkrdma_endpoint_free(servers);
    vkrdma_endpoint_free(clients);
    free_devices();
    puts("errors: each says what is wrong");
    return 0;
}
