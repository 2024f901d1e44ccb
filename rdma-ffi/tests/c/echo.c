/* A server sends back the bytes of several connections: by writes of many lengths and pieces, and
 * from lent memory. They are read, used in place, and received into registered memory. */
#include "common.h"

enum { CONNECTIONS = 6, PORTION = 70000 };

static const size_t lengths[] = {1,     2,     3,      7,      64,     127,     128,     129,     4095,    4096,
                                 4097,  65535, 65536,  65537,  131071, 131072,  131073,  1048575, 1048576, 1048577,
                                 100,   0,     200000, 262144, 5,      3145729, 1,       1,       64,      16384};
enum { LENGTHS = sizeof lengths / sizeof lengths[0] };

struct client {
    size_t which;
    uint64_t id;
    int open;
    size_t written, read, total;
    /* The entry of `lengths` that is being written, and how much of it is. */
    size_t nth, of_it;
    /* The whole stream, and what came back. */
    vkrdma_buffer *lent, *landed;
    unsigned char *out, *in;
    int closed, ended;
};

struct served {
    uint64_t id;
    /* Bytes read but not written back, unless used in place. */
    unsigned char held[PORTION];
    size_t from, until;
    int end;
    struct served *next;
};

static vkrdma_endpoint *servers, *clients;
static struct client client[CONNECTIONS];
static struct served *all_served;
static int opened_by_listener, released;

static void release(void *context) {
    free(context);
    released++;
}

static void serve_one(struct served *one) {
    for (;;) {
        size_t written;
        vkrdma_code code;
        if (one->id % 2 == 0) {
            vkrdma_pieces arrived;
            struct iovec pieces[VKRDMA_PIECES + 1];
            MUST(vkrdma_arrived(servers, one->id, &arrived, &failed));
            CHECK(arrived.count <= VKRDMA_PIECES && (arrived.count > 0) == (arrived.bytes > 0));
            if (arrived.bytes > 0) {
                for (size_t i = 0; i < arrived.count; i++) {
                    pieces[i] = (struct iovec){(void *)(uintptr_t)arrived.pieces[i].base, arrived.pieces[i].len};
                }
                /* C allows an empty piece anywhere. */
                pieces[arrived.count] = (struct iovec){NULL, 0};
                code = vkrdma_writev(servers, one->id, pieces, arrived.count + 1, &written, &failed);
                if (code == VKRDMA_AGAIN) return;
                CHECK(code == VKRDMA_OK && written > 0 && written <= arrived.bytes);
                MUST(vkrdma_consume(servers, one->id, written, &failed));
                continue;
            }
        }
        if (one->from == one->until) {
            size_t read;
            code = vkrdma_read(servers, one->id, one->held, sizeof one->held, &read, &failed);
            if (code == VKRDMA_AGAIN) return;
            CHECK(code == VKRDMA_OK);
            if (read == 0) {
                /* The client has closed. Bytes in flight still arrive. */
                one->end = 1;
                MUST(vkrdma_abandon(servers, one->id, 10000000, &failed));
                return;
            }
            one->from = 0;
            one->until = read;
        }
        code = vkrdma_write(servers, one->id, one->held + one->from, one->until - one->from, &written, &failed);
        if (code == VKRDMA_AGAIN) return;
        CHECK(code == VKRDMA_OK);
        one->from += written;
    }
}

/* Fewer places than there are connections: what finds no room comes in the next turn. */
static void serve_events(void) {
    vkrdma_event events[2];
    size_t count = turn(servers, events, 2);
    for (size_t i = 0; i < count; i++) {
        struct served *one = events[i].data;
        if (events[i].kinds & VKRDMA_EVENT_OPENED) {
            vkrdma_address address;
            CHECK(events[i].listener != 0 && one == NULL);
            one = calloc(1, sizeof *one);
            one->id = events[i].connection;
            one->next = all_served;
            all_served = one;
            MUST(vkrdma_set_data(servers, one->id, one, &failed));
            MUST(vkrdma_local_address(servers, one->id, &address, &failed));
            CHECK(strcmp(address.text, server_address) == 0);
            MUST(vkrdma_peer_address(servers, one->id, &address, &failed));
            CHECK(address.text[0] != 0 && address.port != 0);
            opened_by_listener++;
        }
        if (!one->end) serve_one(one);
    }
}

static void begin(struct client *one) {
    uint32_t local;
    CHECK(status_of(clients, one->id).open == 1);
    MUST(vkrdma_is_local(clients, one->id, &local, &failed));
    one->open = 1;
    if (one->which % 3 == 1) {
        MUST(vkrdma_register(clients, one->id, one->total, VKRDMA_LEND, &one->lent, &failed));
        one->out = vkrdma_buffer_base(one->lent);
        CHECK(one->out[0] == 0 && one->out[one->total - 1] == 0);
    } else if (one->which % 3 == 2) {
        one->out = malloc(one->total);
        MUST(vkrdma_register_memory(clients, one->id, one->out, one->total, VKRDMA_LEND, release, one->out, &one->lent,
                                    &failed));
        CHECK((unsigned char *)vkrdma_buffer_base(one->lent) == one->out);
    } else {
        one->out = malloc(one->total);
    }
    if (one->which >= 3) {
        MUST(vkrdma_register(clients, one->id, one->total, VKRDMA_LEND_AND_RECEIVE, &one->landed, &failed));
        one->in = vkrdma_buffer_base(one->landed);
        CHECK(vkrdma_buffer_len(one->landed) == one->total);
    } else {
        one->in = malloc(one->total);
    }
    for (size_t i = 0; i < one->total; i++) one->out[i] = byte_at(one->which, i);
}

static void write_some(struct client *one) {
    while (one->nth < LENGTHS) {
        size_t written, left = lengths[one->nth] - one->of_it;
        vkrdma_code code;
        if (one->lent != NULL) {
            code = vkrdma_lend(clients, one->id, one->lent, one->written, left, &written, &failed);
        } else {
            unsigned char *from = one->out + one->written;
            size_t third = left / 3;
            struct iovec pieces[] = {{from, third}, {from + third, third}, {from + 2 * third, left - 2 * third}};
            code = vkrdma_writev(clients, one->id, pieces, 3, &written, &failed);
        }
        if (code == VKRDMA_AGAIN) return;
        CHECK(code == VKRDMA_OK && written <= left);
        one->written += written;
        one->of_it += written;
        if (one->of_it == lengths[one->nth]) {
            one->nth++;
            one->of_it = 0;
        }
    }
}

static void read_some(struct client *one) {
    vkrdma_code code;
    if (one->landed != NULL) {
        vkrdma_received received;
        if (one->read == one->total) return;
        code = vkrdma_receive(clients, one->id, one->landed, 0, one->total, &received, &failed);
        if (code == VKRDMA_AGAIN) return;
        CHECK(code == VKRDMA_OK);
        CHECK(received.landed + received.copied == one->total);
        printf("connection %zu: %llu bytes landed, %llu were copied\n", one->which, (unsigned long long)received.landed,
               (unsigned long long)received.copied);
        one->read = one->total;
        MUST(vkrdma_stop_landing(clients, one->id, &failed));
        return;
    }
    while (one->read < one->total) {
        size_t read;
        code = vkrdma_read(clients, one->id, one->in + one->read, one->total - one->read, &read, &failed);
        if (code == VKRDMA_AGAIN) return;
        CHECK(code == VKRDMA_OK && read > 0);
        one->read += read;
    }
}

static int done(struct client *one) { return one->read == one->total && one->nth == LENGTHS; }

static void advance(struct client *one) {
    if (!one->open || one->closed) return;
    write_some(one);
    read_some(one);
    if (done(one) && (one->lent == NULL || vkrdma_returned(clients, one->id, one->lent, &failed) == VKRDMA_OK)) {
        MUST(vkrdma_close(clients, one->id, 10000000, &failed));
        one->closed = 1;
    }
}

static void client_events(void) {
    vkrdma_event event;
    if (turn(clients, &event, 1) == 1) {
        struct client *one = event.data;
        CHECK(one != NULL && one->id == event.connection && event.listener == 0);
        if (event.kinds & VKRDMA_EVENT_OPENED) begin(one);
        if (event.kinds & VKRDMA_EVENT_ENDED) {
            EXPECT(VKRDMA_OK, vkrdma_check(clients, one->id, &failed));
            CHECK(one->closed);
            MUST(vkrdma_closed(clients, one->id, &failed));
            one->ended = 1;
        } else {
            advance(one);
        }
    }
}

int main(int count, char **arguments) {
    open_devices(count, arguments);
    MUST(vkrdma_endpoint_new(server_device, NULL, &servers, &failed));
    MUST(vkrdma_endpoint_new(client_device, NULL, &clients, &failed));

    vkrdma_options options = server_options();
    options.window = 65536;
    uint64_t listener;
    uint16_t port = serve(servers, &options, &listener);

    options = client_options();
    options.window = 100001;
    for (size_t i = 0; i < CONNECTIONS; i++) {
        client[i].which = i;
        for (size_t nth = 0; nth < LENGTHS; nth++) client[i].total += lengths[nth];
        MUST(vkrdma_connect(clients, server_address, port, NULL, 60000000, i % 2 ? &options : NULL, &client[i].id, &failed));
        MUST(vkrdma_set_data(clients, client[i].id, &client[i], &failed));
    }
    vkrdma_endpoint *const both[] = {servers, clients};
    for (size_t ended = 0; ended < CONNECTIONS;) {
        rest(both, 2);
        serve_events();
        client_events();
        ended = 0;
        for (size_t i = 0; i < CONNECTIONS; i++) ended += client[i].ended;
    }
    CHECK(opened_by_listener == CONNECTIONS);

    for (size_t i = 0; i < CONNECTIONS; i++) {
        struct client *one = &client[i];
        for (size_t at = 0; at < one->total; at++) CHECK(one->in[at] == byte_at(i, at));
        vkrdma_counters counters;
        MUST(vkrdma_counters_of(clients, one->id, &counters, sizeof counters, &failed));
        CHECK(counters.bytes_sent == one->total && counters.bytes_received == one->total);
        CHECK(counters.lent == (one->lent != NULL ? one->total : 0));
        vkrdma_status status = status_of(clients, one->id);
        CHECK(status.ended == 1 && status.unread == 0 && status.unconfirmed == 0);
        MUST(vkrdma_abort(clients, one->id, &failed));
        EXPECT(VKRDMA_NO_SUCH_CONNECTION, vkrdma_abort(clients, one->id, &failed));
        if (one->landed == NULL) free(one->in);
        if (one->lent == NULL) free(one->out);
        vkrdma_buffer_free(one->lent);
        vkrdma_buffer_free(one->landed);
    }
    CHECK(released == 2);
    for (; usage_of(servers).connections > 0; serve_events()) rest(&servers, 1);
    CHECK(usage_of(servers).accepted == CONNECTIONS);
    CHECK(usage_of(clients).registered_bytes == 0 && usage_of(servers).registered_bytes == 0);
    while (all_served != NULL) {
        struct served *one = all_served;
        all_served = one->next;
        free(one);
    }
    vkrdma_endpoint_free(servers);
    vkrdma_endpoint_free(clients);
    free_devices();
    puts("echo: all came back");
    return 0;
}
