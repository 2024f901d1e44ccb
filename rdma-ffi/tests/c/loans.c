/* Memory of the program is lent in the middle of a stream: it is not reported as written before it
 * is released, and the end of the loans releases it. */
#include "common.h"

enum { PART = 300000 };

static vkrdma_endpoint *servers, *clients;
static uint64_t listener, here, there;
static unsigned char value[PART], got[PART + 8];
static size_t released;

static void release(void *context) {
    CHECK(context == value);
    released++;
}

static void turns(void) {
    vkrdma_endpoint *both[] = {servers, clients};
    vkrdma_event event;
    rest(both, 2);
    if (turn(servers, &event, 1) && event.kinds & VKRDMA_EVENT_OPENED) there = event.connection;
    turn(clients, &event, 1);
}

static void connect_one(uint16_t port) {
    there = 0;
    MUST(vkrdma_connect(clients, server_address, port, NULL, 60000000, NULL, &here, &failed));
    while (there == 0 || !status_of(clients, here).open) turns();
}

static vkrdma_loans_state state_of(const vkrdma_loans *loans) {
    vkrdma_loans_state state;
    MUST(vkrdma_loans_state_of(loans, &state, &failed));
    return state;
}

static size_t report(const vkrdma_loans *loans, size_t most) {
    size_t bytes;
    MUST(vkrdma_loans_report(loans, most, &bytes, &failed));
    return bytes;
}

static void opens(const vkrdma_loans *loans) {
    MUST(vkrdma_loans_register(loans, clients, here, 4, value, PART, release, value, &failed));
    vkrdma_loans_state state = state_of(loans);
    CHECK(state.start == 4 && state.end == 4 + PART && state.next == value && state.in_flight == 1);
}

/* `$4` and a line's end before it, and a line's end behind. */
static size_t writes(const vkrdma_loans *loans) {
    struct iovec before = {(void *)"abc", 3}, last = {(void *)"d", 1}, after = {(void *)"\r\n", 2};
    struct iovec both[] = {before, last};
    size_t taken;
    uint64_t accepted = state_of(loans).accepted;
    int befores = accepted == 0 ? 2 : accepted == 3 ? 1 : 0;
    vkrdma_code code = vkrdma_loans_write(loans, clients, here, both + 2 - befores, befores, &after, 1, &taken, &failed);
    if (code == VKRDMA_AGAIN) return 0;
    CHECK(code == VKRDMA_OK);
    return taken;
}

static void delivered(uint16_t port) {
    vkrdma_loans *loans;
    size_t bytes, taken = 0, read = 0;
    struct iovec piece = {(void *)"abcd", 4};
    connect_one(port);
    MUST(vkrdma_loans_new(&loans, &failed));
    EXPECT(VKRDMA_MISUSE, vkrdma_loans_write(loans, clients, here, NULL, 0, &piece, 1, &bytes, &failed));
    opens(loans);
    EXPECT(VKRDMA_MISUSE, vkrdma_loans_register(loans, clients, here, 4, value, PART, release, value, &failed));
    piece.iov_len = 3;
    EXPECT(VKRDMA_MISUSE, vkrdma_loans_write(loans, clients, here, &piece, 1, NULL, 0, &bytes, &failed));
    CHECK(state_of(loans).accepted == 0 && report(loans, SIZE_MAX) == 0);
    /* All of the part is accepted before what is behind it. */
    while (taken < 4 + PART) {
        taken += writes(loans);
        CHECK(state_of(loans).accepted == taken);
        if (state_of(loans).reported < 4 && taken >= 4) CHECK(report(loans, 3) == 3 && report(loans, SIZE_MAX) == 1);
        if (taken < 4 + PART) CHECK(report(loans, SIZE_MAX) == 0 && released == 0);
        while (vkrdma_read(servers, there, got + read, sizeof got - read, &bytes, &failed) == VKRDMA_OK) read += bytes;
        if (taken < 4 + PART) turns();
    }
    while (released == 0) {
        CHECK(report(loans, SIZE_MAX) == 0 || released);
        while (vkrdma_read(servers, there, got + read, sizeof got - read, &bytes, &failed) == VKRDMA_OK) read += bytes;
        if (released == 0) turns();
    }
    report(loans, SIZE_MAX);
    CHECK(released == 1 && state_of(loans).reported == taken && state_of(loans).in_flight == 0);
    while (read < taken) {
        if (vkrdma_read(servers, there, got + read, sizeof got - read, &bytes, &failed) == VKRDMA_OK) read += bytes;
        else turns();
    }
    CHECK(memcmp(got, "abcd", 4) == 0 && memcmp(got + 4, value, PART) == 0);
    /* Nothing is in flight: the connection goes on. */
    uint64_t kept;
    MUST(vkrdma_loans_end(loans, clients, here, &kept, &failed));
    CHECK(kept == 0 && status_of(clients, here).open);
    EXPECT(VKRDMA_MISUSE, vkrdma_loans_register(loans, clients, here, taken, value, PART, release, value, &failed));
    vkrdma_loans_free(loans);
    MUST(vkrdma_abort(clients, here, &failed));
}

/* The peer reads nothing. */
static void ended(uint16_t port) {
    vkrdma_loans *loans;
    uint64_t kept = 1;
    connect_one(port);
    released = 0;
    MUST(vkrdma_loans_new(&loans, &failed));
    opens(loans);
    CHECK(writes(loans) > 4);
    EXPECT(VKRDMA_NO_SUCH_CONNECTION, vkrdma_loans_end(loans, clients, 0, &kept, &failed));
    CHECK(released == 0 && state_of(loans).in_flight == 1 && report(loans, SIZE_MAX) == 0);
    MUST(vkrdma_loans_end(loans, clients, here, &kept, &failed));
    CHECK(kept == 0 && released == 1 && state_of(loans).in_flight == 0 && report(loans, SIZE_MAX) == 0);
    EXPECT(VKRDMA_NO_SUCH_CONNECTION, vkrdma_abort(clients, here, &failed));
    vkrdma_loans_free(loans);
}

static void refused(uint16_t port) {
    vkrdma_loans *loans;
    vkrdma_loans_state state;
    size_t bytes;
    connect_one(port);
    released = 0;
    MUST(vkrdma_loans_new(&loans, &failed));
    EXPECT(VKRDMA_NO_SUCH_CONNECTION, vkrdma_loans_register(loans, clients, 0, 4, value, PART, release, value, &failed));
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_loans_register(loans, clients, here, 4, NULL, PART, release, value, &failed));
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_loans_register(loans, clients, here, UINT64_MAX, value, PART, release, value, &failed));
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_loans_state_of(NULL, &state, &failed));
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_loans_report(loans, 1, NULL, &failed));
    EXPECT(VKRDMA_INVALID_ARGUMENT, vkrdma_loans_end(loans, clients, here, NULL, &failed));
    CHECK(released == 0 && state_of(loans).in_flight == 0);
    /* It is copied. */
    struct iovec piece = {value, 4096};
    MUST(vkrdma_loans_write(loans, clients, here, &piece, 1, NULL, 0, &bytes, &failed));
    CHECK(bytes > 0 && report(loans, SIZE_MAX) == bytes);
    vkrdma_loans_free(loans);
    vkrdma_loans_free(NULL);
    MUST(vkrdma_abort(clients, here, &failed));
}

int main(int count, char **arguments) {
    open_devices(count, arguments);
    MUST(vkrdma_endpoint_new(server_device, NULL, &servers, &failed));
    MUST(vkrdma_endpoint_new(client_device, NULL, &clients, &failed));
    vkrdma_options options = server_options();
    options.window = 65536;
    for (size_t at = 0; at < PART; at++) value[at] = byte_at(3, at);
    uint16_t port = serve(servers, &options, &listener);
    delivered(port);
    ended(port);
    refused(port);
    vkrdma_endpoint_free(clients);
    vkrdma_endpoint_free(servers);
    free_devices();
    puts("loans: nothing is reported before it is released");
    return 0;
}
