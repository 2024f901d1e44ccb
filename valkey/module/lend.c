/* Lending: long values leave from where they lie, without a copy.
 *
 * Valkey 9.1 hands `writev` the memory of a long value itself, and keeps a reference to the value
 * until it is told that the bytes are written. So a connection lends such memory to the endpoint
 * and delays that report. `vkrdma_loans` counts the bytes that the endpoint has taken, and those of
 * them that the server knows to be written. The pieces of a later call begin with the bytes between
 * the two.
 *
 * The rule of lifetime: A BYTE THAT IS LENT IS NOT REPORTED AS WRITTEN BEFORE THE ENDPOINT HAS
 * RELEASED IT, AND A CLIENT THAT IS FREED ENDS ITS LOANS BEFORE ITS REFERENCES GO.
 *
 * `vkrdma_loans_report` has the first half, and `disconnected` calls vkrdma_loans_end for the
 * second. This module changes no count of references: a thread of the server may change one at the
 * same time, without a lock. */
#define VALKEYMODULE_CORE_MODULE
#include "engine.h"

#include <dlfcn.h>
#include <pthread.h>

/* A part of a value that is lent. Registration pins its pages. Short loans let the first one leave
 * while the next is registered. */
#define LONGEST_LOAN (4u << 20)

/* Shorter values are never lent. Also longer than any piece that is not a value but precedes two
 * bytes: the prefix of a value that is empty. */
#define SHORTEST_VALUE 4096

static _Atomic uint64_t lend_from, lend_bytes;
/* Half of what the process may lock, and of what the module may register: the other half is for
 * windows of connections. */
static _Atomic uint64_t lendable;
static ValkeyModuleCtx *of_module; /* For calls that need one. */
/* Whether memory is lent. The first long value has the module watch clients, and not before: who
 * lends nothing changes nothing of what the server does when a client comes or goes. */
static atomic_int lends;
enum { NOT, WHEN_WANTED, NOW };
static atomic_int wanted;

static _Atomic uint64_t values, bytes_lent, refused, aborted, in_flight;

/* Connections that have `loans`. IO threads change the list. */
static pthread_mutex_t lenders_lock = PTHREAD_MUTEX_INITIALIZER;
static engineConn *lenders;

static void joinLenders(engineConn *self) {
    pthread_mutex_lock(&lenders_lock);
    self->lending.prev = NULL;
    self->lending.next = lenders;
    if (lenders) lenders->lending.prev = self;
    lenders = self;
    pthread_mutex_unlock(&lenders_lock);
}

static void leaveLenders(engineConn *self) {
    engineConn *prev, *next;

    pthread_mutex_lock(&lenders_lock);
    prev = self->lending.prev;
    next = self->lending.next;
    if (next) next->lending.prev = prev;
    if (prev) {
        prev->lending.next = next;
    } else {
        lenders = next;
    }
    pthread_mutex_unlock(&lenders_lock);
}

static engineConn *lenderOf(client *c) {
    engineConn *conn;

    pthread_mutex_lock(&lenders_lock);
    for (conn = lenders; conn && connGetPrivateData(&conn->c) != c; conn = conn->lending.next) {
    }
    pthread_mutex_unlock(&lenders_lock);
    return conn;
}

/* ---- what a value is */

/* Whether `at` lies in the frames of this thread's callers. */
static int isOnStack(const void *at) {
    static _Thread_local uintptr_t top;

    if (!top) {
        pthread_attr_t attributes;
        void *base;
        size_t size;
        if (pthread_getattr_np(pthread_self(), &attributes) != 0) return 0;
        if (pthread_attr_getstack(&attributes, &base, &size) == 0) top = (uintptr_t)base + size;
        pthread_attr_destroy(&attributes);
    }
    return (uintptr_t)at > (uintptr_t)__builtin_frame_address(0) && (uintptr_t)at < top;
}

/* Whether a piece is the memory of a value. The server writes the ends of such values from its
 * stack, and everything else that is longer than a prefix from the heap. So nothing that a client
 * stores can make a piece look like this. */
static int isValue(const struct iovec *pieces, int count, int j) {
    return j + 1 < count && pieces[j + 1].iov_len == 2 && isOnStack(pieces[j + 1].iov_base);
}

/* Whether a value's bytes from `at` in the stream, of which `left` are left, are to be lent. What
 * was begun goes on, also when the settings change. */
static int wantsLoan(const engineConn *self, uint64_t at, size_t left) {
    uint64_t from = lend_from;

    if (at < self->lending.copy_to) return 0;
    return (at >= self->lending.lend_at && at < self->lending.lend_to) || (from && left >= from && left >= SHORTEST_VALUE);
}

int engineMayLend(const engineConn *self, const struct iovec *pieces, int count) {
    uint64_t from = lend_from;

    if (self->lending.loans) return 1;
    if (lends == NOT || !from || self->link) return 0;
    for (int j = 0; j < count; j++) {
        if (pieces[j].iov_len < from || pieces[j].iov_len < SHORTEST_VALUE) continue;
        wanted = 1;
        /* A thread copies until the main thread has seen that. */
        if (inMainThread()) engineLendIfWanted();
        return lends == NOW;
    }
    return 0;
}

/* ---- loans */

/* In any thread, also under the endpoint's lock. */
static void release(void *context) {
    in_flight -= (uintptr_t)context;
}

static vkrdma_loans_state stateOf(const engineConn *self) {
    vkrdma_loans_state state = {0};

    vkrdma_loans_state_of(self->lending.loans, &state, NULL);
    return state;
}

/* Positions begin at 0 with the first loan, and with the next one after all were released. */
static vkrdma_code beginLoans(engineConn *self, vkrdma_error *error) {
    self->lending.lend_at = self->lending.lend_to = self->lending.copy_to = 0;
    error->code = vkrdma_loans_new(&self->lending.loans, error);
    if (error->code == VKRDMA_OK) joinLenders(self);
    return error->code;
}

static void forgetLoans(engineConn *self) {
    leaveLenders(self);
    vkrdma_loans_free(self->lending.loans);
    self->lending.loans = NULL;
}

/* Registers the next part of a value, whose first byte has the position `at` in the stream, and is
 * then open. If it is to be copied, none is. */
static void lend(engineConn *self, vkrdma_loans_state *state, uint64_t at, const char *base, size_t left) {
    /* Parts of one length: none is so short that its registration costs more than a copy. */
    size_t parts = (left + LONGEST_LOAN - 1) / LONGEST_LOAN, len = (left + parts - 1) / parts;
    uint64_t limit = lend_bytes, most = limit < lendable ? limit : lendable;

    if (atomic_fetch_add(&in_flight, len) + len > most ||
        vkrdma_loans_register(self->lending.loans, engine.endpoint, self->id, at, (void *)base, len, release, (void *)(uintptr_t)len, NULL) != VKRDMA_OK) {
        in_flight -= len;
        refused++;
        self->lending.copy_to = at + len;
        return;
    }
    if (at >= self->lending.lend_to) {
        values++;
        self->lending.lend_at = at;
    }
    self->lending.lend_to = at + left;
    state->start = at;
    state->end = at + len;
    state->next = base;
}

/* A place in the pieces, and its position in the stream. */
struct place {
    int j;
    size_t skip;
    uint64_t at;
};

static void advance(struct place *place, const struct iovec *pieces, int count, size_t bytes) {
    place->at += bytes;
    place->skip += bytes;
    while (place->j < count && place->skip >= pieces[place->j].iov_len) place->skip -= pieces[place->j++].iov_len;
}

/* Collects what is copied from `place` on, up to the part that is open, else up to the next bytes
 * that are to be lent. Returns how many pieces are in `run`, and moves `place` behind them. */
static int collect(const engineConn *self, const vkrdma_loans_state *open, const struct iovec *pieces, int count, struct place *place,
                   struct iovec *run) {
    int collected = 0;

    while (place->j < count) {
        size_t left = pieces[place->j].iov_len - place->skip;
        uint64_t copy_to = self->lending.copy_to;
        if (open ? place->at >= open->start : wantsLoan(self, place->at, left) && isValue(pieces, count, place->j)) break;
        if (open && left > open->start - place->at) left = open->start - place->at;
        /* Behind a part that was refused, the value may be lent again. */
        if (place->at < copy_to && left > copy_to - place->at) left = copy_to - place->at;
        if (left) run[collected++] = (struct iovec){.iov_base = (char *)pieces[place->j].iov_base + place->skip, .iov_len = left};
        advance(place, pieces, count, left);
    }
    return collected;
}

/* Has the endpoint take bytes from `place` on, by one call: what is copied, a part of a value that
 * is lent, and what is copied behind the value. Moves `place` behind what was taken. Returns
 * whether all of it was. */
static int take(engineConn *self, vkrdma_loans_state *state, const struct iovec *pieces, int count, struct place *place, vkrdma_error *error) {
    struct iovec before[count + 1], after[count + 1]; /* One piece may be in two parts. */
    struct place next = *place;
    int befores = collect(self, state->next ? state : NULL, pieces, count, &next, before), afters = 0;
    size_t taken = 0, copied = next.at - place->at, part = 0;

    /* What is copied before a new part is at most what the server collects of short replies. More
     * may have no room for long, and goes first: the loan would pin its pages meanwhile. */
    if (next.j < count && (state->next || copied <= PROTO_REPLY_CHUNK_BYTES)) {
        const char *base = (char *)pieces[next.j].iov_base + next.skip;
        if (!state->next) lend(self, state, next.at, base, pieces[next.j].iov_len - next.skip);
        if (state->next && base != state->next) {
            /* The server has other bytes in the place of those that it has handed over before. */
            *error = (vkrdma_error){.code = VKRDMA_BUG, .fault = VKRDMA_FAULT_LIBRARY};
            return 0;
        }
        if (state->next) part = state->end - next.at;
        advance(&next, pieces, count, part);
        /* Behind its last part. */
        if (part && next.at >= self->lending.lend_to) afters = collect(self, NULL, pieces, count, &next, after);
    }
    if (befores || part) {
        error->code = vkrdma_loans_write(self->lending.loans, engine.endpoint, self->id, before, befores, after, afters, &taken, error);
    }
    if (error->code != VKRDMA_OK) return 0;
    if (taken > copied) bytes_lent += taken - copied < part ? taken - copied : part;
    if (taken < next.at - place->at) error->code = VKRDMA_AGAIN;
    advance(place, pieces, count, taken);
    return error->code == VKRDMA_OK;
}

ssize_t engineWriteLending(engineConn *self, const struct iovec *pieces, int count, vkrdma_error *error) {
    vkrdma_loans_state state = {0};
    struct place place = {0};
    size_t news = 0;

    error->code = VKRDMA_OK;
    if (self->lending.loans) {
        state = stateOf(self);
    } else if (beginLoans(self, error) != VKRDMA_OK) {
        return -1;
    }
    place.at = state.reported;
    advance(&place, pieces, count, state.accepted - state.reported);
    while (place.j < count && take(self, &state, pieces, count, &place, error)) {
        if (place.j < count) state = stateOf(self);
    }
    if (error->code != VKRDMA_OK && error->code != VKRDMA_AGAIN) return -1;
    if (vkrdma_loans_report(self->lending.loans, INT_MAX, &news, error) != VKRDMA_OK) return -1;
    state = stateOf(self);
    /* Whether another call may do something now. Else an event follows: VKRDMA_EVENT_WRITABLE if
     * bytes were not taken, and VKRDMA_EVENT_RETURNED if a loan was not released. */
    if (state.reported == state.accepted ? place.j == count : news == INT_MAX) self->writable = 1;
    if (!state.in_flight && state.reported == state.accepted && state.accepted >= self->lending.lend_to && state.accepted >= self->lending.copy_to) {
        forgetLoans(self);
    }
    error->code = VKRDMA_AGAIN;
    return news ? (ssize_t)news : -1;
}

/* ---- the end of loans */

/* Ends the connection if it has loans: the device reads no more of them when this returns. Returns
 * whether it had. */
int engineEndLoans(engineConn *self) {
    vkrdma_error error;
    vkrdma_code code;
    uint64_t id = self->id, kept = 0;

    if (!self->lending.loans) return 0;
    if (!stateOf(self).in_flight) {
        forgetLoans(self);
        return 0;
    }
    self->id = 0;
    if (id) aborted++;
    code = vkrdma_loans_end(self->lending.loans, id ? engine.endpoint : NULL, id, &kept, &error);
    if (code != VKRDMA_OK && code != VKRDMA_FORKED) {
        /* An endpoint that cannot end a connection ends altogether, and its loans. */
        engineFail(error.text);
        if (!self->lending.loans) return 1;
        vkrdma_loans_end(self->lending.loans, NULL, 0, &kept, NULL);
    }
    /* Of a queue pair that is gone, which reads nothing: the pages stay pinned. */
    if (kept) serverLog(LL_WARNING, "RDMA: the device keeps %llu bytes of values registered", (unsigned long long)kept);
    forgetLoans(self);
    return 1;
}

/* The server is about to free a client, and first drops its references: the second half of the
 * rule. No IO thread uses the client any more. */
static void disconnected(ValkeyModuleCtx *ctx, ValkeyModuleEvent event, uint64_t kind, void *data) {
    UNUSED(ctx);
    UNUSED(event);
    if (kind != VALKEYMODULE_SUBEVENT_CLIENT_CHANGE_DISCONNECTED) return;
    client *c = lookupClientByID(((ValkeyModuleClientInfo *)data)->id);
    engineConn *conn = c ? lenderOf(c) : NULL;
    if (conn) engineEndLoans(conn);
}

/* ---- settings, and what INFO shows */

/* Versions whose server hands over values with a reference, as this file expects it. */
#define KNOWN_VERSION (VALKEY_VERSION_NUM >= 0x00090100 && VALKEY_VERSION_NUM < 0x00090200)

/* Whether a child of this process has the pages that are registered: not if the kernel copies none
 * at a fork, and libibverbs therefore keeps them from the child. A child that saves would end at
 * the first of them. */
static int childHasPages(void) {
    enum { FORK_UNNEEDED = 2 };
    void *library = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_NOLOAD);
    int (*asked)(void) = dlsym(RTLD_DEFAULT, "ibv_is_fork_initialized");
    int has;

    if (!asked && library) asked = dlsym(library, "ibv_is_fork_initialized");
    has = asked && asked() == FORK_UNNEEDED;
    if (library) dlclose(library);
    return has;
}

/* Has the server say when it is about to free a client. Returns whether it does. */
static int watchClients(void) {
    int verbosity = server.verbosity;

    /* Before that, it looks once whether it has TLS, and logs that it has not. Now all modules are
     * loaded, so it finds what there is. */
    server.verbosity = LL_NOTHING;
    connectionTypeTls();
    server.verbosity = verbosity;
    return ValkeyModule_SubscribeToServerEvent(of_module, ValkeyModuleEvent_ClientChange, disconnected) == VALKEYMODULE_OK;
}

/* In the main thread. */
void engineLendIfWanted(void) {
    if (wanted && lends == WHEN_WANTED) lends = watchClients() ? NOW : NOT;
}

/* The device is open, and `locked` bytes may be locked by this process. */
void engineMayLock(uint64_t locked) {
    static int logged;
    int has_pages;

    lendable = (locked < engine.limits.registered_bytes ? locked : engine.limits.registered_bytes) / 2;
    has_pages = KNOWN_VERSION && childHasPages();
    if (!has_pages) lends = NOT;
    if (has_pages && lends == NOT) lends = WHEN_WANTED;
    if (KNOWN_VERSION && !has_pages && lend_from && !logged++) {
        serverLog(LL_NOTICE, "RDMA: values are copied before they are sent, whatever lend-from is: a child that saves would lack pages that are "
                             "registered. Linux 5.12 and later, with rdma-core 35 and later, give it copies (ibv_fork_init(3)).");
    }
}

static long long getSetting(const char *name, void *data) {
    UNUSED(name);
    return *(_Atomic uint64_t *)data;
}

static int setSetting(const char *name, long long number, void *data, ValkeyModuleString **error) {
    UNUSED(name);
    UNUSED(error);
    *(_Atomic uint64_t *)data = number;
    return VALKEYMODULE_OK;
}

static int registerSetting(ValkeyModuleCtx *ctx, const char *name, uint64_t number, _Atomic uint64_t *setting) {
    return ValkeyModule_RegisterNumericConfig(ctx, name, number > LLONG_MAX ? LLONG_MAX : (long long)number, VALKEYMODULE_CONFIG_MEMORY, 0, LLONG_MAX,
                                              getSetting, setSetting, NULL, setting);
}

int engineLending(ValkeyModuleCtx *ctx) {
    /* The module's arguments are the defaults. */
    int done = registerSetting(ctx, "lend-from", engine.lend_from, &lend_from) == VALKEYMODULE_OK &&
               registerSetting(ctx, "lend-bytes", engine.lend_bytes, &lend_bytes) == VALKEYMODULE_OK;
    of_module = ValkeyModule_GetDetachedThreadSafeContext(ctx);
    return done ? C_OK : C_ERR;
}

void engineLendingInfo(ValkeyModuleInfoCtx *ctx) {
    ValkeyModule_InfoAddFieldULongLong(ctx, "lent_values", values);
    ValkeyModule_InfoAddFieldULongLong(ctx, "lent_bytes", bytes_lent);
    ValkeyModule_InfoAddFieldULongLong(ctx, "lent_refused", refused);
    ValkeyModule_InfoAddFieldULongLong(ctx, "lent_aborted", aborted);
    ValkeyModule_InfoAddFieldULongLong(ctx, "lent_in_flight", in_flight);
}
