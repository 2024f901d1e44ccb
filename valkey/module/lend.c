/* Lending: long values leave from where they lie, without a copy.
 *
 * Valkey 9.1 hands `writev` the memory of a long value itself, and keeps a reference to the value
 * until it is told that the bytes are written. So a connection lends such memory to the endpoint
 * and delays that report. It counts `accepted` bytes, which the endpoint has taken, and `reported`
 * ones, which the server knows to be written. The pieces of a later call begin with the bytes
 * between the two.
 *
 * The rule of lifetime: A BYTE THAT IS LENT IS NOT REPORTED AS WRITTEN BEFORE THE ENDPOINT HAS
 * RELEASED IT, AND A CLIENT THAT IS FREED ENDS ITS LOANS BEFORE ITS REFERENCES GO.
 *
 * `reportable` has the first half, and `disconnected` the second. This module changes no count of
 * references: a thread of the server may change one at the same time, without a lock. */
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

struct engineLoan {
    struct engineLoan *next;
    const char *base;
    size_t len, lent;
    uint64_t start;        /* The position of its first byte in the stream of the connection. */
    vkrdma_buffer *buffer; /* NULL once all of it is lent: then the endpoint alone uses it. */
    atomic_int released;   /* The peer has it, or the connection has ended. */
};

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

/* Connections with loans. IO threads change the list. */
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

    if (self->lending.first || self->lending.accepted < self->lending.lend_to) return 1;
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
    engineLoan *loan = context;

    in_flight -= loan->len;
    /* From now on the thread that writes may free it. */
    atomic_store_explicit(&loan->released, 1, memory_order_release);
}

static int isReleased(engineLoan *loan) {
    return atomic_load_explicit(&loan->released, memory_order_acquire);
}

/* Registers the next part of a value, whose first byte has the position `at` in the stream. Returns
 * NULL if it is to be copied. */
static engineLoan *newLoan(engineConn *self, uint64_t at, const char *base, size_t left) {
    /* Parts of one length: none is so short that its registration costs more than a copy. */
    size_t parts = (left + LONGEST_LOAN - 1) / LONGEST_LOAN, len = (left + parts - 1) / parts;
    uint64_t limit = lend_bytes, most = limit < lendable ? limit : lendable;
    engineLoan *loan = zcalloc(sizeof(*loan));

    loan->base = base;
    loan->len = len;
    loan->start = at;
    if (atomic_fetch_add(&in_flight, len) + len > most ||
        vkrdma_register_memory(engine.endpoint, self->id, (void *)base, len, VKRDMA_LEND, release, loan, &loan->buffer, NULL) != VKRDMA_OK) {
        in_flight -= len;
        refused++;
        zfree(loan);
        self->lending.copy_to = at + len;
        return NULL;
    }
    if (at >= self->lending.lend_to) {
        values++;
        self->lending.lend_at = at;
    }
    self->lending.lend_to = at + left;
    if (self->lending.first) {
        self->lending.last->next = loan;
    } else {
        self->lending.first = loan;
        joinLenders(self);
    }
    self->lending.last = loan;
    return loan;
}

/* The loan of which a part is still to be lent, or NULL. */
static engineLoan *openLoan(const engineConn *self) {
    return self->lending.first && self->lending.last->buffer ? self->lending.last : NULL;
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

/* Collects what is copied from `place` on, up to `loan` if there is one, else up to the next bytes
 * that are to be lent. Returns how many pieces are in `run`, and moves `place` behind them. */
static int collect(const engineConn *self, const engineLoan *loan, const struct iovec *pieces, int count, struct place *place, struct iovec *run) {
    int collected = 0;

    while (place->j < count) {
        size_t left = pieces[place->j].iov_len - place->skip;
        uint64_t copy_to = self->lending.copy_to;
        if (loan ? place->at >= loan->start : wantsLoan(self, place->at, left) && isValue(pieces, count, place->j)) break;
        if (loan && left > loan->start - place->at) left = loan->start - place->at;
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
static int take(engineConn *self, const struct iovec *pieces, int count, struct place *place, vkrdma_error *error) {
    struct iovec before[count + 1], after[count + 1]; /* One piece may be in two parts. */
    struct place next = *place;
    engineLoan *loan = openLoan(self);
    int befores = collect(self, loan, pieces, count, &next, before), afters = 0;
    size_t taken = 0, copied = next.at - place->at, lent = 0;

    /* What is copied before a new loan is at most what the server collects of short replies. More
     * may have no room for long, and goes first: the loan would pin its pages meanwhile. */
    if (next.j < count && (loan || copied <= PROTO_REPLY_CHUNK_BYTES)) {
        const char *base = (char *)pieces[next.j].iov_base + next.skip;
        if (!loan) loan = newLoan(self, next.at, base, pieces[next.j].iov_len - next.skip);
        if (loan && base != loan->base + loan->lent) {
            /* The server has other bytes in the place of those that it has handed over before. */
            *error = (vkrdma_error){.code = VKRDMA_BUG, .fault = VKRDMA_FAULT_LIBRARY};
            return 0;
        }
        if (loan) advance(&next, pieces, count, loan->len - loan->lent);
        /* Behind its last part. */
        if (loan && next.at >= self->lending.lend_to) afters = collect(self, NULL, pieces, count, &next, after);
    }
    if (loan) {
        error->code = vkrdma_lend_framed(engine.endpoint, self->id, before, befores, loan->buffer, loan->lent, loan->len - loan->lent, after, afters,
                                         &taken, error);
    } else if (befores) {
        error->code = vkrdma_writev(engine.endpoint, self->id, before, befores, &taken, error);
    }
    if (error->code != VKRDMA_OK) return 0;
    self->lending.accepted += taken;
    if (loan && taken > copied) {
        lent = taken - copied < loan->len - loan->lent ? taken - copied : loan->len - loan->lent;
        loan->lent += lent;
        bytes_lent += lent;
        if (loan->lent == loan->len) {
            vkrdma_buffer_free(loan->buffer);
            loan->buffer = NULL;
        }
    }
    if (taken < next.at - place->at) error->code = VKRDMA_AGAIN;
    advance(place, pieces, count, taken);
    return error->code == VKRDMA_OK;
}

/* Returns the position up to which the server may be told that its bytes are written: the first
 * half of the rule. */
static uint64_t reportable(engineConn *self) {
    engineLoan *loan;

    while ((loan = self->lending.first) && !loan->buffer && isReleased(loan)) {
        self->lending.first = loan->next;
        zfree(loan);
        if (!self->lending.first) leaveLenders(self);
    }
    /* A loan may begin behind bytes that the endpoint has not taken so far. */
    return loan && loan->start < self->lending.accepted ? loan->start : self->lending.accepted;
}

ssize_t engineWriteLending(engineConn *self, const struct iovec *pieces, int count, vkrdma_error *error) {
    struct place place = {.at = self->lending.reported};
    uint64_t news;

    error->code = VKRDMA_OK;
    advance(&place, pieces, count, self->lending.accepted - self->lending.reported);
    while (place.j < count && take(self, pieces, count, &place, error)) {
    }
    if (error->code != VKRDMA_OK && error->code != VKRDMA_AGAIN) return -1;
    news = reportable(self) - self->lending.reported;
    if (news > INT_MAX) news = INT_MAX;
    self->lending.reported += news;
    /* Whether another call may do something now. Else an event follows: VKRDMA_EVENT_WRITABLE if
     * bytes were not taken, and VKRDMA_EVENT_RETURNED if a loan was not released. */
    if (self->lending.reported == self->lending.accepted ? place.j == count : news == INT_MAX) self->writable = 1;
    error->code = VKRDMA_AGAIN;
    return news ? (ssize_t)news : -1;
}

/* ---- the end of loans */

/* Ends the connection if it has loans: the device reads no more of them when this returns. */
void engineEndLoans(engineConn *self) {
    vkrdma_error error = {.code = VKRDMA_OK};
    uint64_t id = self->id;
    engineLoan *loan, *next;

    if (!self->lending.first) return;
    for (loan = self->lending.first; loan; loan = loan->next) {
        vkrdma_buffer_free(loan->buffer);
        loan->buffer = NULL;
    }
    self->id = 0;
    if (id) {
        aborted++;
        error.code = vkrdma_abort(engine.endpoint, id, &error);
        /* An endpoint that cannot end a connection ends altogether. */
        if (error.code != VKRDMA_OK && error.code != VKRDMA_FORKED) engineFail(error.text);
    }
    /* It may be that its failure has ended them. */
    if (!self->lending.first) return;
    for (loan = self->lending.first; loan; loan = next) {
        next = loan->next;
        if (isReleased(loan)) {
            zfree(loan);
        } else if (error.code != VKRDMA_FORKED) {
            /* Of a queue pair that is gone, which reads nothing: the pages stay pinned. */
            serverLog(LL_WARNING, "RDMA: the device keeps %zu bytes of a value registered", loan->len);
        }
    }
    self->lending.first = NULL;
    leaveLenders(self);
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
