/* Workers read and write while another thread runs the event loop. Time-outs are so long that the
 * program would not end if a call did not wake the loop. */
#include <pthread.h>

#include "common.h"

enum { WORKERS = 4, ROUNDS = 200, LARGE = 300000 };

struct worker {
    size_t which;
    uint64_t id;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t told;
    /* Kinds of events since the last look. */
    unsigned events;
    unsigned char out[LARGE], in[LARGE];
};

static vkrdma_endpoint *servers, *clients;
static struct worker workers[WORKERS];
static volatile int finished;

static void echo(uint64_t id) {
    for (;;) {
        vkrdma_error error;
        vkrdma_pieces arrived;
        struct iovec pieces[VKRDMA_PIECES];
        size_t written;
        MUST(vkrdma_arrived(servers, id, &arrived, &error));
        if (arrived.bytes == 0) return;
        for (size_t i = 0; i < arrived.count; i++) {
            pieces[i] = (struct iovec){(void *)(uintptr_t)arrived.pieces[i].base, arrived.pieces[i].len};
        }
        if (vkrdma_writev(servers, id, pieces, arrived.count, &written, &error) != VKRDMA_OK) return;
        MUST(vkrdma_consume(servers, id, written, &error));
    }
}

static void *run_servers(void *unused) {
    (void)unused;
    while (!finished) {
        vkrdma_event events[8];
        rest(&servers, 1);
        size_t count = turn(servers, events, 8);
        for (size_t i = 0; i < count; i++) {
            if (events[i].kinds & VKRDMA_EVENT_ENDED) {
                MUST(vkrdma_abort(servers, events[i].connection, NULL));
            } else if (events[i].connection != 0) {
                echo(events[i].connection);
            }
        }
    }
    return NULL;
}

static void *run_clients(void *unused) {
    (void)unused;
    while (!finished) {
        vkrdma_event events[2];
        rest(&clients, 1);
        size_t count = turn(clients, events, 2);
        for (size_t i = 0; i < count; i++) {
            struct worker *worker = events[i].data;
            CHECK(worker != NULL);
            pthread_mutex_lock(&worker->lock);
            worker->events |= events[i].kinds;
            pthread_cond_signal(&worker->told);
            pthread_mutex_unlock(&worker->lock);
        }
    }
    return NULL;
}

/* Sleeps until there was one of these events. */
static void await(struct worker *worker, unsigned kinds) {
    pthread_mutex_lock(&worker->lock);
    while ((worker->events & kinds) == 0) pthread_cond_wait(&worker->told, &worker->lock);
    worker->events = 0;
    pthread_mutex_unlock(&worker->lock);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    vkrdma_error error;
    await(worker, VKRDMA_EVENT_OPENED);
    size_t place = 0;
    for (size_t round = 0; round < ROUNDS; round++) {
        size_t len = round % 10 == 9 ? LARGE : 1 + round * 37, written = 0, read = 0;
        for (size_t i = 0; i < len; i++) worker->out[i] = byte_at(worker->which, place + i);
        while (read < len) {
            size_t now;
            int went_on = 0;
            if (written < len &&
                vkrdma_write(clients, worker->id, worker->out + written, len - written, &now, &error) == VKRDMA_OK) {
                written += now;
                went_on = 1;
            }
            vkrdma_code code = vkrdma_read(clients, worker->id, worker->in + read, len - read, &now, &error);
            if (code == VKRDMA_OK) {
                CHECK(now > 0);
                read += now;
                went_on = 1;
            } else {
                CHECK(code == VKRDMA_AGAIN);
            }
            if (!went_on) await(worker, ~0u);
        }
        CHECK(memcmp(worker->in, worker->out, len) == 0);
        place += len;
    }
    /* The end wakes the loop from a long sleep. */
    MUST(vkrdma_close(clients, worker->id, 100000000, &error));
    await(worker, VKRDMA_EVENT_ENDED);
    MUST(vkrdma_closed(clients, worker->id, &error));
    MUST(vkrdma_abort(clients, worker->id, &error));
    return NULL;
}

int main(int count, char **arguments) {
    open_devices(count, arguments);
    MUST(vkrdma_endpoint_new(server_device, NULL, &servers, &failed));
    MUST(vkrdma_endpoint_new(client_device, NULL, &clients, &failed));
    vkrdma_options options = server_options();
    options.window = 65536;
    options.keepalive_every = 0;
    options.keep_memory = UINT64_C(1000000000);
    uint64_t listener;
    uint16_t port = serve(servers, &options, &listener);
    options = client_options();
    options.window = 65536;
    options.send_buffer = 65536;
    options.keepalive_probe = 0;
    options.keep_memory = UINT64_C(1000000000);
    pthread_t loops[2];
    CHECK(pthread_create(&loops[0], NULL, run_servers, NULL) == 0);
    for (size_t i = 0; i < WORKERS; i++) {
        struct worker *worker = &workers[i];
        worker->which = i;
        pthread_mutex_init(&worker->lock, NULL);
        pthread_cond_init(&worker->told, NULL);
        MUST(vkrdma_connect(clients, server_address, port, NULL, 60000000, &options, &worker->id, &failed));
        MUST(vkrdma_set_data(clients, worker->id, worker, &failed));
    }
    CHECK(pthread_create(&loops[1], NULL, run_clients, NULL) == 0);
    for (size_t i = 0; i < WORKERS; i++) CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    for (size_t i = 0; i < WORKERS; i++) CHECK(pthread_join(workers[i].thread, NULL) == 0);
    finished = 1;
    MUST(vkrdma_wake(servers, &failed));
    MUST(vkrdma_wake(clients, &failed));
    for (size_t i = 0; i < 2; i++) CHECK(pthread_join(loops[i], NULL) == 0);
    CHECK(usage_of(clients).connections == 0);
    vkrdma_endpoint_free(servers);
    vkrdma_endpoint_free(clients);
    free_devices();
    puts("threads: nothing was missed");
    return 0;
}
