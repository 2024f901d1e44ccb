/* The keeper: two threads for all connections of the process.
 *
 * The waking thread makes the descriptors of contexts readable when completions have come. It
 * does nothing else, and takes no lock that is held during slow work: if it stood still, so would
 * every asynchronous context.
 *
 * The working thread does the rest. It hands out the connection manager's events, establishes the
 * connections of asynchronous contexts, closes connections after their contexts are freed, and
 * serves idle ones: their programs make no calls, but peers send keepalives. Each of these uses
 * up a receive, and only vkrdma_progress posts it again. */
#define _GNU_SOURCE
#include "link.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
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
     * their events. */
    OFTEN = 10,
    /* A context whose calls wait is armed when it has made no call for one to two of these: so
     * late its descriptor may be readable. To arm it after each call would cost each call. */
    QUIET = 5,
    /* How long the delivery of the last bytes may take. */
    LINGER = 1000,
    /* Connections that are freed before the working thread looks for other work. */
    FREED = 4,
    EVENTS = 64,
};

struct list {
    struct link *first;
    size_t count;
};

/* Protects the lists and each link's state. Nothing slow is done under it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Held while the devices are opened, and by fork(2): a child never finds it locked. */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
/* Connections whose contexts are freed. */
static atomic_int closing;
/* Connections of contexts, and those that only the working thread drives. Only that thread
 * removes a link from the second. */
static struct list open_links, driven;
/* The epoll instances of the two threads, and what wakes the working one. */
static int waking = -1, working = -1, changed = -1;
static vkrdma_shared_events *events;
/* The process that has the threads; a forked child has none. 0 before they are started. */
static pid_t owner;

int64_t link_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void enter(struct list *list, struct link *link) {
    link->previous = NULL;
    link->next = list->first;
    if (list->first) list->first->previous = link;
    list->first = link;
    list->count++;
}

static void leave(struct list *list, struct link *link) {
    list->count--;
    if (link->next) link->next->previous = link->previous;
    if (link->previous)
        link->previous->next = link->next;
    else
        list->first = link->next;
}

/* Copies a list, for the working thread: it uses links without the lock, and no other frees
 * them. */
static size_t copied(const struct list *list, struct link ***links) {
    static struct link **room;
    static size_t most;
    size_t count = 0;
    pthread_mutex_lock(&lock);
    if (list->count > most) {
        struct link **more = realloc(room, 2 * list->count * sizeof *more);
        if (more) {
            room = more;
            most = 2 * list->count;
        }
    }
    for (struct link *link = list->first; link && count < most; link = link->next) room[count++] = link;
    pthread_mutex_unlock(&lock);
    *links = room;
    return count;
}

static bool watch(int epoll, int how, int descriptor, uint32_t kinds, struct link *link) {
    struct epoll_event event = {.events = kinds, .data.ptr = link};
    return epoll_ctl(epoll, how, descriptor, &event) == 0;
}

static void wake_worker(void) {
    uint64_t one = 1;
    /* It fails only if the thread is due anyway. */
    (void)!write(changed, &one, sizeof one);
}

/* ---- the waking thread */

static void wake(struct link *link) {
    atomic_store(&link->armed, false);
    if (link->state != LINK_OPEN) return;
    /* It is armed again when its program is quiet. */
    if (link->waits) wake_worker();
    /* A call that waits takes what has come itself. */
    if (!link->waits || !atomic_load(&link->busy)) link_wake(link);
}

static void *run_waking(void *none) {
    struct epoll_event taken[EVENTS];
    struct pollfd polled = {.fd = waking, .events = POLLIN};
    (void)none;
    for (;;) {
        (void)poll(&polled, 1, -1);
        /* Events are taken under the lock, so that no link is freed that one of them refers to. */
        pthread_mutex_lock(&lock);
        int count = epoll_wait(waking, taken, EVENTS, 0);
        for (int at = 0; at < count; at++) wake(taken[at].data.ptr);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

void keeper_arm(struct link *link) {
    if (link->completions < 0) return;
    atomic_store(&link->armed, true);
    watch(waking, EPOLL_CTL_MOD, link->completions, EPOLLIN | EPOLLONESHOT, link);
}

/* ---- the working thread */

/* Continues establishing the connection of an asynchronous context. */
static void make(struct link *link) {
    char filling[64];
    bool failed = link_turn(link, NULL) != VKRDMA_OK || link_now() >= link->until;
    if (link->completions < 0 && vkrdma_completions_descriptor(link->endpoint, link->connection, &link->completions, NULL) == VKRDMA_OK) {
        watch(working, EPOLL_CTL_ADD, link->completions, EPOLLIN, link);
        failed = failed || !watch(waking, EPOLL_CTL_ADD, link->completions, 0, link);
    }
    if (!atomic_load(&link->opened) && !atomic_load(&link->ended) && !failed) return;
    pthread_mutex_lock(&lock);
    /* Else its context was freed meanwhile. */
    if (link->state == LINK_MAKING) {
        if (failed || !atomic_load(&link->opened)) {
            atomic_store(&link->ended, true);
            /* No socket has this abstract address, so connect(2) is refused. */
            link->answer->sun_family = AF_UNIX;
            memcpy(link->answer->sun_path, "\0libvalkey_rdma: not connected", 31);
        }
        if (link->completions >= 0) watch(working, EPOLL_CTL_DEL, link->completions, 0, NULL);
        leave(&driven, link);
        link->state = LINK_OPEN;
        enter(&open_links, link);
        atomic_store(&link->made, true);
        /* The first call of the context sees what has arrived. */
        link_wake(link);
        if (link->completions >= 0) keeper_arm(link);
        /* Now there is room in the socket. */
        (void)!recv(link->waker, filling, sizeof filling, MSG_DONTWAIT);
    }
    pthread_mutex_unlock(&lock);
}

/* Does what is due for an idle connection. */
static void keep(struct link *link) {
    vkrdma_status status;
    if (link_turn(link, NULL) != VKRDMA_OK ||
        vkrdma_status_of(link->endpoint, link->connection, &status, sizeof status, NULL) != VKRDMA_OK) {
        return;
    }
    /* The context must still see at the descriptor what it would have seen. */
    if (status.readable || (status.writable && atomic_load(&link->wants_room))) link_wake(link);
}

/* Looks after connections of contexts. Returns whether one of them is to be armed soon. */
static bool tend(bool keeps) {
    struct link **links;
    bool any = false;
    size_t count = copied(&open_links, &links);
    for (size_t at = 0; at < count; at++) {
        struct link *link = links[at];
        bool arms = link->waits && !atomic_load(&link->armed);
        if (!arms && !keeps) continue;
        if (atomic_exchange(&link->used, false)) {
            any = any || arms;
            continue;
        }
        if (!atomic_load(&link->busy)) keep(link);
        if (arms) keeper_arm(link);
    }
    return any;
}

static void finish(struct link *link) {
    pthread_mutex_lock(&lock);
    leave(&driven, link);
    /* Before the descriptor is closed: its number may soon be that of another. */
    if (link->completions >= 0) {
        watch(working, EPOLL_CTL_DEL, link->completions, 0, NULL);
        watch(waking, EPOLL_CTL_DEL, link->completions, 0, NULL);
    }
    pthread_mutex_unlock(&lock);
    vkrdma_endpoint_free(link->endpoint);
    free(link);
    atomic_fetch_sub(&closing, 1);
}

/* Drives the connections that are being established or closed. */
static void drive(void) {
    struct link **links;
    size_t count = copied(&driven, &links), freed = 0;
    for (size_t at = 0; at < count && freed < FREED; at++) {
        struct link *link = links[at];
        pthread_mutex_lock(&lock);
        enum link_state state = link->state;
        pthread_mutex_unlock(&lock);
        if (state == LINK_MAKING) {
            make(link);
        } else if (link_turn(link, NULL) != VKRDMA_OK || atomic_load(&link->ended) || link_now() >= link->until) {
            finish(link);
            freed++;
        }
    }
}

static void *run_working(void *none) {
    /* When idle connections are due, and before when no other is looked at: one look costs as much
     * as there are connections, and each wake-up of one of them asks for a look. */
    int64_t tick = link_now() + TICK, quiet = 0;
    bool soon = false;
    (void)none;
    for (;;) {
        struct epoll_event taken[EVENTS];
        uint64_t times;
        int64_t now = link_now();
        pthread_mutex_lock(&lock);
        int64_t due = soon && quiet < tick ? quiet : tick;
        int limit = driven.first ? OFTEN : !soon && !open_links.first ? -1 : due > now ? (int)(due - now) : 0;
        pthread_mutex_unlock(&lock);
        int count = epoll_wait(working, taken, EVENTS, limit);
        for (int at = 0; at < count; at++) {
            if (taken[at].data.ptr == &changed && read(changed, &times, sizeof times) > 0) soon = true;
        }
        /* A failure may pass, and must not keep this thread busy until then. */
        if (vkrdma_shared_events_dispatch(events, NULL) != VKRDMA_OK) (void)poll(NULL, 0, OFTEN);
        drive();
        now = link_now();
        if (now < tick && !(soon && now >= quiet)) continue;
        soon = tend(now >= tick);
        quiet = now + QUIET;
        if (now >= tick) tick = now + TICK;
    }
    return NULL;
}

/* ---- the program's threads */

static bool start(void *(*run)(void *)) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    /* The program handles signals, not these threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &attributes, run, NULL);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) errno = failed;
    return !failed;
}

static void lock_opening(void) { pthread_mutex_lock(&opening); }
static void unlock_opening(void) { pthread_mutex_unlock(&opening); }
static void watch_forks(void) { pthread_atfork(lock_opening, unlock_opening, unlock_opening); }

/* Returns false, with errno, if the process can have no more descriptors or threads. */
static bool open_keeper(void) {
    static bool wakes, works;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &changed};
    if (waking < 0) waking = epoll_create1(EPOLL_CLOEXEC);
    if (working < 0) working = epoll_create1(EPOLL_CLOEXEC);
    if (changed < 0) changed = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (waking < 0 || working < 0 || changed < 0) return false;
    if (epoll_ctl(working, EPOLL_CTL_ADD, changed, &event) && errno != EEXIST) return false;
    if (!watch(working, EPOLL_CTL_ADD, vkrdma_shared_events_descriptor(events), EPOLLIN, NULL) && errno != EEXIST) return false;
    wakes = wakes || start(run_waking);
    works = works || (wakes && start(run_working));
    return works;
}

vkrdma_shared_events *keeper_events(vkrdma_error *error) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static vkrdma_device *device;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&opening);
    if (!owner && (device || vkrdma_verbs_open(&device, error) == VKRDMA_OK) &&
        (events || vkrdma_shared_events_new(device, &events, error) == VKRDMA_OK)) {
        if (open_keeper())
            owner = getpid();
        else
            snprintf(error->text, sizeof error->text, "%s", link_reason());
    }
    vkrdma_shared_events *opened = owner ? events : NULL;
    pthread_mutex_unlock(&opening);
    return opened;
}

bool keeper_take(struct link *link, enum link_state state) {
    bool watched = state == LINK_MAKING || link->direct || watch(waking, EPOLL_CTL_ADD, link->completions, 0, link);
    if (!watched) return false;
    pthread_mutex_lock(&lock);
    link->state = state;
    enter(state == LINK_OPEN ? &open_links : &driven, link);
    pthread_mutex_unlock(&lock);
    wake_worker();
    return true;
}

void keeper_end(struct link *link) {
    /* In a forked child there are no threads, and nothing of the endpoint can be freed. */
    if (vkrdma_descriptor(link->endpoint) < 0) {
        free(link);
        return;
    }
    if (vkrdma_close(link->endpoint, link->connection, (uint64_t)LINGER * 1000, NULL) != VKRDMA_OK) atomic_store(&link->ended, true);
    pthread_mutex_lock(&lock);
    if (link->state == LINK_OPEN) {
        leave(&open_links, link);
        enter(&driven, link);
        if (link->completions >= 0) watch(working, EPOLL_CTL_ADD, link->completions, EPOLLIN, link);
    }
    atomic_fetch_add(&closing, 1);
    link->state = LINK_CLOSING;
    link->until = link_now() + LINGER;
    pthread_mutex_unlock(&lock);
    wake_worker();
}

/* Delivers the last bytes before the process ends, as TCP does. It takes no lock, because signal
 * handlers call exit. */
__attribute__((destructor)) static void deliver(void) {
    struct timespec millisecond = {.tv_nsec = 1000000};
    if (owner != getpid()) return;
    for (int times = 0; atomic_load(&closing) > 0 && times < LINGER; times++) nanosleep(&millisecond, NULL);
}
