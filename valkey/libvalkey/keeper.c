/* The keeper: one thread for all connections of the process.
 *
 * A program whose contexts are idle makes no calls, and still has keepalives to answer for: a receive that a peer's message has taken is
 * posted again by vkrdma_progress alone. So the keeper makes that call for every connection that no other call was made for.
 *
 * It also ends connections after their contexts are gone, and stands between the endpoint and what an asynchronous context polls: libvalkey's
 * async.c wants a socket there, on which connect(2) tells whether it is connected, and which can be polled for room. */
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
    /* How often idle connections are looked at: a few times per interval of keepalives, which is 3 s. */
    TICK = 500,
    /* How often those that are being made or ended, beside what their descriptors tell. */
    OFTEN = 10,
    /* How long what was written last may take to be delivered. */
    LINGER = 1000,
    EVENTS = 64,
};

struct list {
    struct link *first;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Connections whose contexts are gone. */
static atomic_int closing;
/* Idle until something comes, and those that the keeper drives. */
static struct list open_links, driven;
static int epoll = -1, changed = -1;
/* The process that has the thread: in a child that was forked there is none. 0 for not yet. */
static pid_t owner;

int64_t link_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

bool link_events(struct link *link) {
    vkrdma_event event;
    bool readable = false;
    while (vkrdma_next_event(link->endpoint, &event, NULL) == VKRDMA_OK) {
        link->opened = link->opened || event.kind == VKRDMA_EVENT_OPENED;
        link->ended = link->ended || event.kind == VKRDMA_EVENT_ENDED;
        readable = readable || event.kind == VKRDMA_EVENT_READABLE;
    }
    return readable;
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
    /* Fails only if it is due already. */
    (void)!write(changed, &one, sizeof one);
}

/* Has the context's event loop come. It has one datagram to take at most. */
static void signal_context(struct link *link) {
    /* The first may tell that the context's connect(2) has made it forget this end, which is no error of the second. */
    if (send(link->signal, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN) {
        (void)!send(link->signal, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

/* Goes on with a connection that is being made for an asynchronous context. */
static void make(struct link *link) {
    char filling[64];
    bool failed = vkrdma_progress(link->endpoint, NULL) != VKRDMA_OK || link_now() >= link->until;
    link_events(link);
    bool ready = link_is_ready(link);
    if (!ready && !link->ended && !failed) return;
    if (!ready) {
        link->ended = true;
        /* An abstract address that no socket has: connection refused. */
        link->answer->sun_family = AF_UNIX;
        memcpy(link->answer->sun_path, "\0libvalkey_rdma: not connected", 31);
    }
    leave(&driven, link);
    link->state = LINK_OPEN;
    enter(&open_links, link);
    /* What has come already is seen by the first call of the context, which asks for signals. */
    vkrdma_wake(link->endpoint, NULL);
    watch(link, 0);
    /* There is room. */
    (void)!recv(link->signal, filling, sizeof filling, MSG_DONTWAIT);
}

/* Does what is due for an idle connection. */
static void keep(struct link *link) {
    vkrdma_status status;
    if (atomic_load(&link->busy) || atomic_exchange(&link->used, false)) return;
    if (vkrdma_progress(link->endpoint, NULL) != VKRDMA_OK ||
        vkrdma_status_of(link->endpoint, link->connection, &status, sizeof status, NULL) != VKRDMA_OK) {
        return;
    }
    /* What the context would have seen at the descriptor, it must still see there. */
    if (status.readable || (status.writable && atomic_load(&link->wants_room))) vkrdma_wake(link->endpoint, NULL);
}

static bool is_gone(struct link *link) {
    vkrdma_usage usage;
    return vkrdma_progress(link->endpoint, NULL) != VKRDMA_OK ||
           vkrdma_usage_of(link->endpoint, &usage, sizeof usage, NULL) != VKRDMA_OK || usage.connections == 0 || link_now() >= link->until;
}

/* Drives what it has to, and returns those that are gone, which nothing names any more. */
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
        /* Freed here alone, where no event that was taken names them. */
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

/* Without the thread, connections are driven by the calls that are made for them. */
static void start(void) {
    struct epoll_event event = {.events = EPOLLIN};
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    epoll = epoll_create1(EPOLL_CLOEXEC);
    changed = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll < 0 || changed < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, changed, &event)) return;
    /* Signals are the program's. */
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
    /* In a child that was forked the lock may be held by the parent's thread, and nothing of the endpoint can be freed. */
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

/* What was written last is delivered before the process ends, as it would be by TCP. It takes no lock: handlers of signals call exit. */
__attribute__((destructor)) static void deliver(void) {
    struct timespec millisecond = {.tv_nsec = 1000000};
    if (owner != getpid()) return;
    for (int times = 0; atomic_load(&closing) > 0 && times < LINGER; times++) nanosleep(&millisecond, NULL);
}
