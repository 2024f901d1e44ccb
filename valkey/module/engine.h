/* Shared by the files of the module: the engine, which is one endpoint of libvkrdma for the
 * whole server, and its connections. */
#ifndef VALKEY_RDMA_ENGINE_H
#define VALKEY_RDMA_ENGINE_H

#include "server.h"

#include "connhelpers.h"
#include "io_threads.h"
#include "version.h"

#include <netdb.h>
#include <stdatomic.h>
#include <vkrdma.h>

/* Names that differ in Valkey 8.1. */
#if VALKEY_VERSION_NUM < 0x00090000
#define clientHasPendingIO(c) ((c)->io_read_state != CLIENT_IDLE || (c)->io_write_state != CLIENT_IDLE)
#define VALKEYMODULE_OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION 0
#else
/* A server of 8.1 has no such function. With a weak symbol it loads the module, which then says
 * that it is for another version. */
#pragma weak clientHasPendingIO
#endif

/* What a connection has lent: lend.c. The thread that writes uses it, and the main thread when none
 * does. Positions are those of `loans`. */
typedef struct engineLoans {
    vkrdma_loans *loans;       /* NULL if it has lent nothing that is not released. */
    uint64_t lend_at, lend_to; /* The last value of which a part was registered, */
    uint64_t copy_to;          /* and the end of the last part that was refused, and is copied. */
    struct engineConn *prev, *next;
} engineLoans;

/* A connection of the server. IO threads read and write it, and so change `readable` and
 * `writable`, `id` and `held`; `lending` says who uses it. Only the main thread uses the other
 * fields. */
typedef struct engineConn {
    connection c;   /* First, because the server knows this part only. */
    void *room[8];  /* For a server whose connections are longer. */
    uint64_t id;  /* Its number in the endpoint; 0 when it is closed. */
    /* Whether the next read or write may return something else than "not now". Each call clears
     * its own flag first, so that an event that comes meanwhile is not lost. */
    atomic_int readable, writable;
    atomic_int ended; /* The peer has closed, or the connection has failed. A read tells which. */
    /* An IO thread was handed replies that must wait for the AOF: it writes nothing. */
    atomic_int held;
    int queued;                   /* It is in the queue. */
    listNode of_queue, of_all;    /* Its places in the lists of the engine. */
    engineLoans lending;
    struct engineLink *link;      /* Of a connection that the server has made; NULL for others. */
} engineConn;

/* What a connection has that the server makes itself: to its primary, or to a target of slots. It
 * has an endpoint of its own, because a thread that waits for its bytes drives that, and may not
 * take the events of others. */
typedef struct engineLink {
    vkrdma_endpoint *endpoint;
    engineConn *conn;  /* NULL when the server has closed it, and its last bytes are delivered. */
    listNode of_links; /* Its place in the list of the engine. */
    int watched;       /* The event loop watches it. Else the thread that reads or writes drives it. */
    long long timer;   /* The time event for its next time-out, or AE_ERR; */
    monotime due;      /* and when that is. */
    monotime until;    /* When the server gives up connecting. */
    struct addrinfo *found, *next; /* The addresses of the host, and the next one to try. */
    char *host, *source;           /* What the server has asked for: TCP can take over. */
    int port, multipath;
    uint16_t rdma_port;
    vkrdma_error error; /* Why it could not be made. */
} engineLink;

/* Whether links go over RDMA: the setting rdma_engine.replication. */
enum { REPLICATION_NO, REPLICATION_YES, REPLICATION_PREFER };

typedef struct engineState {
    vkrdma_endpoint *endpoint; /* NULL until the server listens for the first time. */
    /* From the module's arguments. Window and completion vector are settings of the server,
     * which are filled in when it listens. */
    vkrdma_options options;
    vkrdma_limits limits;
    /* The module's arguments, which are the defaults of the settings. */
    uint64_t lend_from, lend_bytes;
    uint64_t linger;   /* How long a connection that the server has closed may deliver what was written, in microseconds. */
    list *connections; /* Those that the server has not closed, */
    list *queue;       /* and those of them that have something to do. */
    list *links;       /* Also those that the server has closed, until their last bytes are delivered. */
    int replication;   /* One of REPLICATION_…. */
    int port_offset;   /* What is added to the port of a primary or target. */
    uint64_t links_made, links_fell_back;
} engineState;

extern engineState engine;
extern ConnectionType engineType[2];

static inline vkrdma_endpoint *engineEndpoint(const engineConn *conn) {
    return conn->link ? conn->link->endpoint : engine.endpoint;
}

/* events.c */
int engineIsAsked(void);                        /* Whether the server calls engineHasPending and engineProcessPending. */
int engineWatch(void);                          /* Has the event loop watch the endpoint. */
void engineQueue(engineConn *conn);             /* Has the handlers of a connection called soon. */
void engineUnqueue(engineConn *conn);
void engineServe(engineConn *conn);             /* Calls the handlers that are due, of this one (unless NULL) and those in the queue. */
int engineHasPending(void);
int engineProcessPending(void);
void engineFail(const char *why); /* The endpoint has failed: its connections end. */
void engineHandOver(connection *conn, int postponed);
void engineTakeBack(connection *conn);

/* layout.c: return C_ERR, and log why, if the server's structures differ from the headers. */
int engineFits(void);
int engineRegister(void);
int engineFitsListener(const connListener *listener);
int engineFitsClient(connection *conn);

/* connection.c */
void engineAccept(const vkrdma_event *opened);

/* lend.c */
int engineLending(struct ValkeyModuleCtx *ctx); /* Registers the settings. */
void engineMayLock(uint64_t locked);
int engineMayLend(const engineConn *self, const struct iovec *pieces, int count);
void engineLendIfWanted(void);
/* As `writev` of a connection; with VKRDMA_AGAIN if the connection goes on. */
ssize_t engineWriteLending(engineConn *self, const struct iovec *pieces, int count, vkrdma_error *error);
int engineEndLoans(engineConn *self);
void engineLendingInfo(struct ValkeyModuleInfoCtx *ctx);

/* listener.c */
int engineListen(connListener *listener);
void engineCloseListener(connListener *listener);
vkrdma_options engineOptions(void); /* The options of connections, from arguments and settings. */
int engineAddressText(const struct addrinfo *found, char *text, size_t size);
void engineDeliver(void); /* Delivers the last bytes of all connections, when the server shuts down. */
void engineIgnore(struct aeEventLoop *el, int fd, void *data, int mask);

/* link.c */
int engineLinkOpen(engineConn *conn, const char *host, int port, const char *source, int multipath, ConnectionCallbackFunc handler);
int engineLinkReadable(engineConn *conn); /* Whether a read finds bytes, or the end. */
void engineLinksDeliver(monotime until);
uint64_t engineLinksOpen(void); /* How many are established. */

/* replication.c */
extern const char *engineReplicationModes[];
int engineReplication(struct ValkeyModuleCtx *ctx); /* Registers the settings. */
int engineOverTcp(connection *conn, const char *host, int port, const char *source, int multipath, ConnectionCallbackFunc handler);
void engineFellBack(const char *host, int port, const char *why);
void engineOneChannel(char *command, size_t size);

#endif
