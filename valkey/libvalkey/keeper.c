/* The keeper: one thread for all connections of the process.
 *
 * A program with idle contexts makes no calls, but its peers send keepalives: each uses up a
 * receive, and only vkrdma_progress posts it again. So the keeper makes that call for every
 * connection without other calls.
 *
 * It also closes connections after their contexts are freed. For an asynchronous context it
 * connects the endpoint with the socket that the context polls: libvalkey's async.c needs a
 * socket, because it calls connect(2) to find out whether it is connected, and polls for room. */
#define _GNU_SOURCE
#include "link.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    /* How often idle connections are served: a few times per keepalive interval, which is 3 s. */
    TICK = 500,
    /* How often connections that are being established or closed are served, in addition to
     * events of their descriptors. */
    OFTEN = 10,
    /* How long the delivery of the last bytes may take. */
    LINGER = 1000,
    EVENTS = 64,
};

struct list {
    struct link *first;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Connections whose contexts are freed. */
static atomic_int closing;
/* Connections that only need their events, and those that the keeper drives. */
static struct list open_links, driven;
static int epoll = -1, changed = -1;
/* The process that has the thread; a forked child has none. 0 before it is started. */
static pid_t owner;

int64_t link_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

bool link_is_ready(const struct link *link) {
    vkrdma_counters counters;
    return link->opened && vkrdma_counters_of(link->endpoint, link->connection, &counters, sizeof counters, NULL) == VKRDMA_OK &&
           counters.windows_received > 0;
}

static void enter(struct list *list, struct link *link) {
    link->previous = NULL;
    link->next = list->first;
    if (list->first) list->first->previous = link;
    list->first = link;
}

static void leave(struct list *list, struct link *link) {
    if (link->next) link->next->previous = link->previous;
    if (link->previous)
        link->previous->next = link->next;
    else
        list->first = link->next;
}

static void watch(struct link *link, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = link};
    int how = link->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    link->watched = !epoll_ctl(epoll, how, vkrdma_descriptor(link->endpoint), &event) || link->watched;
}

static void wake_keeper(void) {
    uint64_t one = 1;
    /* It fails only if the keeper is due anyway. */
    (void)!write(changed, &one, sizeof one);
}

/* Wakes the context's event loop, which has at most one datagram to take. */
static void signal_context(struct link *link) {
    /* The first send may report that the context's connect(2) has dissolved the pair; the second
     * then succeeds. */
    if (send(link->signal, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN) {
        (void)!send(link->signal, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

/* Continues establishing the connection of an asynchronous context. */
static void make(struct link *link) {
    char filling[64];
    bool failed = link_turn(link, NULL) != VKRDMA_OK || link_now() >= link->until;
    bool ready = link_is_ready(link);
    if (!ready && !link->ended && !failed) return;
    if (!ready) {
        link->ended = true;
        /* No socket has this abstract address, so connect(2) is refused. */
        link->answer->sun_family = AF_UNIX;
        memcpy(link->answer->sun_path, "\0libvalkey_rdma: not connected", 31);
    }
    leave(&driven, link);
    link->state = LINK_OPEN;
    enter(&open_links, link);
    /* The first call of the context sees what has arrived, and asks for signals. */
    vkrdma_wake(link->endpoint, NULL);
    watch(link, 0);
    /* Now there is room in the socket. */
    (void)!recv(link->signal, filling, sizeof filling, MSG_DONTWAIT);
}

/* Does what is due for an idle connection. */
static void keep(struct link *link) {
    vkrdma_status status;
    if (atomic_load(&link->busy) || atomic_exchange(&link->used, false)) return;
    if (link_turn(link, NULL) != VKRDMA_OK ||
        vkrdma_status_of(link->endpoint, link->connection, &status, sizeof status, NULL) != VKRDMA_OK) {
        return;
    }
    /* The context must still see at the descriptor what it would have seen. */
    if (status.readable || (status.writable && atomic_load(&link->wants_room))) vkrdma_wake(link->endpoint, NULL);
}

static bool is_gone(struct link *link) {
    vkrdma_usage usage;
    return link_turn(link, NULL) != VKRDMA_OK ||
           vkrdma_usage_of(link->endpoint, &usage, sizeof usage, NULL) != VKRDMA_OK || usage.connections == 0 || link_now() >= link->until;
}

/* Drives connections, and returns those that have ended. Nothing refers to them any more. */
static struct link *drive(void) {
    struct link *next, *gone = NULL;
    for (struct link *link = driven.first; link; link = next) {
        next = link->next;
        if (link->state == LINK_MAKING) {
            make(link);
        } else if (is_gone(link)) {
            leave(&driven, link);
            if (link->watched) epoll_ctl(epoll, EPOLL_CTL_DEL, vkrdma_descriptor(link->endpoint), NULL);
            link->state = LINK_GONE;
            link->next = gone;
            gone = link;
        }
    }
    return gone;
}

static void free_all(struct link *gone) {
    while (gone) {
        struct link *next = gone->next;
        vkrdma_endpoint_free(gone->endpoint);
        free(gone);
        gone = next;
        atomic_fetch_sub(&closing, 1);
    }
}

static void *run(void *none) {
    (void)none;
    int64_t tick = link_now() + TICK;
    for (;;) {
        struct epoll_event events[EVENTS];
        pthread_mutex_lock(&lock);
        /* They are freed only here, where no taken event refers to them. */
        struct link *gone = drive();
        int64_t now = link_now();
        if (now >= tick) {
            for (struct link *link = open_links.first; link; link = link->next) keep(link);
            tick = now + TICK;
        }
        int limit = driven.first ? OFTEN : open_links.first ? (int)(tick - now) : -1;
        pthread_mutex_unlock(&lock);
        free_all(gone);
        int count = epoll_wait(epoll, events, EVENTS, limit);
        pthread_mutex_lock(&lock);
        for (int at = 0; at < count; at++) {
            struct link *link = events[at].data.ptr;
            uint64_t times;
            if (!link)
                (void)!read(changed, &times, sizeof times);
            else if (link->state == LINK_OPEN && link->signal >= 0)
                signal_context(link);
        }
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

/* Without the thread, only calls of the program drive connections. */
static void start(void) {
    struct epoll_event event = {.events = EPOLLIN};
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    epoll = epoll_create1(EPOLL_CLOEXEC);
    changed = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll < 0 || changed < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, changed, &event)) return;
    /* The program handles signals, not this thread. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (!pthread_create(&thread, &attributes, run, NULL)) owner = getpid();
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

bool keeper_take(struct link *link, enum link_state state) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
    if (!owner) return false;
    pthread_mutex_lock(&lock);
    link->state = state;
    enter(state == LINK_OPEN ? &open_links : &driven, link);
    if (state != LINK_OPEN) watch(link, EPOLLIN);
    pthread_mutex_unlock(&lock);
    wake_keeper();
    return true;
}

void keeper_signal(struct link *link) { watch(link, EPOLLIN | EPOLLONESHOT); }

void keeper_end(struct link *link) {
    /* In a forked child the parent's thread may hold the lock, and nothing of the endpoint can
     * be freed. */
    if (vkrdma_descriptor(link->endpoint) < 0) {
        free(link);
        return;
    }
    if (!owner) {
        vkrdma_endpoint_free(link->endpoint);
        free(link);
        return;
    }
    vkrdma_abandon(link->endpoint, link->connection, (uint64_t)LINGER * 1000, NULL);
    pthread_mutex_lock(&lock);
    leave(link->state == LINK_OPEN ? &open_links : &driven, link);
    atomic_fetch_add(&closing, 1);
    link->state = LINK_CLOSING;
    link->until = link_now() + LINGER;
    enter(&driven, link);
    watch(link, EPOLLIN);
    pthread_mutex_unlock(&lock);
    wake_keeper();
}

/* Delivers the last bytes before the process ends, as TCP does. It takes no lock, because signal
 * handlers call exit. */
__attribute__((destructor)) static void deliver(void) {
    struct timespec millisecond = {.tv_nsec = 1000000};
    if (owner != getpid()) return;
    for (int times = 0; atomic_load(&closing) > 0 && times < LINGER; times++) nanosleep(&millisecond, NULL);
}
