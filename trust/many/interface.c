/* Many connections of one process by the C interface:
 *
 *     interface HOST PORT COUNT THREADS endpoint|endpoints
 *
 * Each thread has one endpoint for all of its connections, or one for each. All of them connect,
 * and each gets a reply while the others exist. Prints descriptors and time for each, or the text
 * of the error that ends them; the exit status is then 3. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <vkrdma.h>

enum {
    THREADS = 64,
    EVENTS = 64,
    /* How many connections an endpoint makes at a time: a listener's backlog is finite. */
    BATCH = 64,
    /* Microseconds. A busy machine is not a limit. */
    PATIENCE = 120000000,
};

struct member {
    vkrdma_endpoint *endpoint;
    uint64_t *connections;
    size_t count, open, asked;
};

struct share {
    pthread_t thread;
    struct member *members;
    size_t count, connections;
};

static vkrdma_device *device;
static const char *host;
static uint16_t port;
static bool one_for_all;
static pthread_barrier_t done, counted;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t made;
static char failure[1024];

/* Notes the first failure. Returns false. */
static bool fails(const char *text) {
    pthread_mutex_lock(&lock);
    if (!failure[0]) snprintf(failure, sizeof failure, "after %zu: %s", made, text);
    pthread_mutex_unlock(&lock);
    return false;
}

static void *room(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) abort();
    return memory;
}

/* Sleeps until there is something to do, and takes events. Counts those of a kind. */
static bool turn(struct member *member, uint32_t kind, size_t *count) {
    vkrdma_event events[EVENTS];
    vkrdma_error error;
    size_t taken;
    if (vkrdma_wait(member->endpoint, -1, &error) != VKRDMA_OK ||
        vkrdma_progress(member->endpoint, events, EVENTS, sizeof *events, &taken, &error) != VKRDMA_OK) {
        return fails(error.text);
    }
    for (size_t at = 0; at < taken; at++) {
        char reply[7];
        size_t read = 0;
        uint64_t id = events[at].connection;
        if (events[at].kinds & VKRDMA_EVENT_ENDED) {
            return fails(vkrdma_check(member->endpoint, id, &error) != VKRDMA_OK ? error.text : "the server has closed a connection");
        }
        if (!(events[at].kinds & kind)) continue;
        if (kind == VKRDMA_EVENT_READABLE) {
            vkrdma_code code = vkrdma_read(member->endpoint, id, reply, sizeof reply, &read, &error);
            if (code == VKRDMA_AGAIN) continue;
            if (code != VKRDMA_OK) return fails(error.text);
            if (read != sizeof reply || memcmp(reply, "+PONG\r\n", read)) return fails("the reply to PING is not PONG");
        }
        ++*count;
    }
    return true;
}

static bool gather(struct member *member, size_t count, size_t *all) {
    vkrdma_error error;
    member->connections = room(count, sizeof *member->connections);
    member->count = count;
    if (vkrdma_endpoint_new(device, NULL, &member->endpoint, &error) != VKRDMA_OK) return fails(error.text);
    while (member->open < count) {
        size_t before = member->open;
        for (; member->asked < count && member->asked - member->open < BATCH; member->asked++) {
            if (vkrdma_connect(member->endpoint, host, port, NULL, PATIENCE, NULL, &member->connections[member->asked], &error) != VKRDMA_OK)
                return fails(error.text);
        }
        if (!turn(member, VKRDMA_EVENT_OPENED, &member->open)) return false;
        pthread_mutex_lock(&lock);
        *all += member->open - before;
        pthread_mutex_unlock(&lock);
    }
    return true;
}

static bool make(struct share *share, size_t *all) {
    share->count = one_for_all ? 1 : share->connections;
    share->members = room(share->count, sizeof *share->members);
    for (size_t at = 0; at < share->count; at++) {
        if (!gather(&share->members[at], one_for_all ? share->connections : 1, all)) return false;
    }
    return true;
}

static bool ping(struct share *share) {
    vkrdma_error error;
    for (size_t at = 0; at < share->count; at++) {
        struct member *member = &share->members[at];
        size_t replies = 0;
        for (size_t to = 0; to < member->count; to++) {
            size_t written;
            if (vkrdma_write(member->endpoint, member->connections[to], "PING\r\n", 6, &written, &error) != VKRDMA_OK) return fails(error.text);
        }
        while (replies < member->count) {
            if (!turn(member, VKRDMA_EVENT_READABLE, &replies)) return false;
        }
    }
    return true;
}

static void *work(void *of) {
    struct share *share = of;
    bool all = make(share, &made);
    pthread_barrier_wait(&done);
    pthread_barrier_wait(&counted);
    if (all) ping(share);
    return NULL;
}

static int descriptors(void) {
    int count = 0;
    DIR *all = opendir("/proc/self/fd");
    if (!all) return 0;
    while (readdir(all)) count++;
    closedir(all);
    return count;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int main(int given, char **arguments) {
    static struct share first = {.connections = 1}, shares[THREADS];
    vkrdma_error error;
    size_t none = 0;
    if (given != 6) return fprintf(stderr, "usage: interface HOST PORT COUNT THREADS endpoint|endpoints\n"), 64;
    host = arguments[1];
    port = (uint16_t)atoi(arguments[2]);
    size_t count = (size_t)atoi(arguments[3]), threads = (size_t)atoi(arguments[4]);
    one_for_all = !strcmp(arguments[5], "endpoint");
    if (count < 1 || threads < 1 || threads > THREADS) return fprintf(stderr, "interface: 1 to %d threads\n", THREADS), 64;
    if (vkrdma_verbs_open(&device, &error) != VKRDMA_OK) return fprintf(stderr, "interface: %s\n", error.text), 69;
    /* The first connection opens what a process has once. */
    if (make(&first, &none) && ping(&first)) {
        int before = descriptors();
        double begun = seconds();
        pthread_barrier_init(&done, NULL, (unsigned)threads + 1);
        pthread_barrier_init(&counted, NULL, (unsigned)threads + 1);
        for (size_t at = 0; at < threads; at++) {
            shares[at].connections = (at + 1) * count / threads - at * count / threads;
            if (pthread_create(&shares[at].thread, NULL, work, &shares[at])) return fprintf(stderr, "interface: no thread\n"), 1;
        }
        pthread_barrier_wait(&done);
        double each = (seconds() - begun) * 1000 / (double)count, open = (double)(descriptors() - before) / (double)count;
        pthread_barrier_wait(&counted);
        for (size_t at = 0; at < threads; at++) pthread_join(shares[at].thread, NULL);
        if (!failure[0]) return printf("%.2f descriptors and %.2f ms each\n", open, each), 0;
    }
    puts(failure);
    return 3;
}
