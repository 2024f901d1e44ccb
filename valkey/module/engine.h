/* Shared by the files of the module: the engine, which is one endpoint of libvkrdma for the
 * whole server, and its connections. */
#ifndef VALKEY_RDMA_ENGINE_H
#define VALKEY_RDMA_ENGINE_H

#include "server.h"

#include "connhelpers.h"
#include "version.h"

#include <stdatomic.h>
#include <vkrdma.h>

/* Names that differ in Valkey 8.1. */
#if VALKEY_VERSION_NUM < 0x00090000
#define clientConnPostponeMaskFromIOState(c) ((c)->io_read_state != CLIENT_IDLE || (c)->io_write_state != CLIENT_IDLE)
#define engineReadsPending() listLength(server.clients_pending_io_read)
#define VALKEYMODULE_OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION 0
#else
#define engineReadsPending() server.stat_io_reads_pending
#endif

/* A connection of the server. IO threads read and write it, and so change `readable` and
 * `writable`. Only the main thread uses the other fields. */
typedef struct engineConn {
    connection c; /* First, because the server knows this part only. */
    uint64_t id;  /* Its number in the endpoint; 0 when it is closed. */
    /* Whether the next read or write may return something else than "not now". Each call clears
     * its own flag first, so that an event that comes meanwhile is not lost. */
    atomic_int readable, writable;
    atomic_int ended; /* The peer has closed, or the connection has failed. A read tells which. */
    int queued;       /* It is in the queue of connections that have something to do. */
    struct engineConn *prev, *next;
} engineConn;

typedef struct engineState {
    vkrdma_endpoint *endpoint; /* NULL until the server listens for the first time. */
    /* From the module's arguments. Window and completion vector are settings of the server,
     * which are filled in when it listens. */
    vkrdma_options options;
    vkrdma_limits limits;
    uint64_t linger; /* How long a connection that the server has closed may deliver what was written, in microseconds. */
} engineState;

extern engineState engine;
extern ConnectionType engineType;

/* events.c */
int engineWatch(void);                          /* Has the event loop watch the endpoint. */
void engineQueue(engineConn *conn);             /* Has the handlers of a connection called soon. */
void engineUnqueue(engineConn *conn);
int engineHasPending(void);
int engineProcessPending(void);

/* connection.c */
void engineAccept(const vkrdma_event *opened);

/* listener.c */
int engineListen(connListener *listener);
void engineCloseListener(connListener *listener);
void engineIgnore(struct aeEventLoop *el, int fd, void *data, int mask);

#endif
