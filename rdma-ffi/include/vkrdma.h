/*
 * vkrdma: Valkey over RDMA, for programs in C. Made of the Rust source by cbindgen; change that, then run rdma-ffi/header --renew.
 *
 * What a call returns
 *   Calls that can fail return a vkrdma_code: VKRDMA_OK, VKRDMA_AGAIN for "not now, an event follows", or an error. Their last argument,
 *   `error`, may be NULL; an error is put there in words, with whose fault it is. Results are put where a pointer says, and only with
 *   VKRDMA_OK. There is no global or thread-local state of errors. No call waits but vkrdma_wait.
 *
 * Threads
 *   Every call may be made in any thread. An endpoint has a lock, which each call on it takes for as long as it lasts (vkrdma_descriptor
 *   and vkrdma_wake take none, vkrdma_wait does not keep it while it sleeps): copying of bytes, and registering of memory, hold others up
 *   meanwhile. So what is to run in parallel has an endpoint each (vkrdma_endpoint_new_sharing). What one thread has to do because of a
 *   call in another it hears by the descriptor. Only freeing is different: nothing else may be done with a handle that is being freed, or
 *   was. No call may be made in a signal handler but vkrdma_wake.
 *
 * What is valid until when
 *   Endpoints, devices and buffers are valid until they are freed, in any order. Ids of connections and listeners are numbers: one of a
 *   connection that is gone is an error (VKRDMA_NO_SUCH_CONNECTION), and names no other later. What a pointer argument points to is used
 *   during the call alone, but for memory that is registered. A null pointer that should be none is an error; any other that is
 *   invalid, and one place for two results, is undefined, as in all of C.
 *
 * Panics
 *   Nothing unwinds out of a call: a panic inside is VKRDMA_PANIC, and the endpoint that it was in can only be freed.
 *
 * Fork
 *   In a child that was forked after a device was opened every call returns VKRDMA_FORKED, and freeing does nothing: it can do the
 *   parent's connections no harm. Descriptors are closed at exec. A child that lives long keeps the parent's device objects in
 *   existence as far as it inherited descriptors. For what a parent needs so that its registered memory stays its own, see ibv_fork_init(3):
 *   Linux 5.12 or later, or RDMAV_FORK_SAFE=1 in its environment.
 */

#ifndef VKRDMA_H
#define VKRDMA_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/**
 * Bytes of the text of an error, the closing zero included.
 */
#define VKRDMA_ERROR_TEXT 504

/**
 * The most pieces that what has arrived can lie in.
 */
#define VKRDMA_PIECES 3

/**
 * Bytes of the text of an address, the closing zero included.
 */
#define VKRDMA_ADDRESS_TEXT 64

/**
 * The result of a call: `VKRDMA_OK`, `VKRDMA_AGAIN`, or what went wrong. Later versions may have more of them.
 */
enum vkrdma_code
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * Done.
   */
  VKRDMA_OK = 0,
  /**
   * Not now: an event follows when it can be. No error: `vkrdma_error` is left as it was.
   */
  VKRDMA_AGAIN = 1,
  /**
   * An argument is null, out of its bounds, or no text of the kind that is asked for.
   */
  VKRDMA_INVALID_ARGUMENT = 100,
  /**
   * A field of options or limits is out of its bounds, or `size` is no size of them.
   */
  VKRDMA_INVALID_OPTIONS = 101,
  /**
   * The endpoint has no such connection: it was forgotten, or never was. Or it is still being made, and there is nothing to ask.
   */
  VKRDMA_NO_SUCH_CONNECTION = 102,
  /**
   * The endpoint has no such listener.
   */
  VKRDMA_NO_SUCH_LISTENER = 103,
  /**
   * A call that makes no sense now: a write after the close, more consumed than has arrived, a range beyond a buffer's end.
   */
  VKRDMA_MISUSE = 104,
  /**
   * The buffer was registered for a connection in another protection domain.
   */
  VKRDMA_FOREIGN_BUFFER = 105,
  /**
   * The way to the peer leads through another device than that of the protection domain.
   */
  VKRDMA_FOREIGN_DOMAIN = 106,
  /**
   * The process was forked, and this is the child: nothing of the parent's can be used here. The call did nothing.
   */
  VKRDMA_FORKED = 107,
  /**
   * There is no RDMA device, or no run-time library for one.
   */
  VKRDMA_NO_DEVICE = 200,
  /**
   * The address is not one of this machine's RDMA devices, or is taken.
   */
  VKRDMA_ADDRESS = 201,
  /**
   * No more memory can be registered: see RLIMIT_MEMLOCK, or the device's limits.
   */
  VKRDMA_MEMORY = 202,
  /**
   * The process, or the system, may open no more descriptors.
   */
  VKRDMA_DESCRIPTORS = 203,
  /**
   * The device, its driver or the kernel refused something else.
   */
  VKRDMA_BACKEND = 204,
  /**
   * As many connections as `vkrdma_limits.connections` allows.
   */
  VKRDMA_TOO_MANY_CONNECTIONS = 205,
  /**
   * As many bytes are registered as `vkrdma_limits.registered_bytes` allows.
   */
  VKRDMA_REGISTERED_MEMORY = 206,
  /**
   * The device told of a failure.
   */
  VKRDMA_DEVICE_FAILED = 207,
  /**
   * The device went away.
   */
  VKRDMA_DEVICE_REMOVED = 208,
  /**
   * Waiting for descriptors failed, or making one.
   */
  VKRDMA_WAIT = 209,
  /**
   * The peer's host has nothing that listens there.
   */
  VKRDMA_REFUSED = 300,
  /**
   * The peer rejected the connection.
   */
  VKRDMA_REJECTED = 301,
  /**
   * There is no way to the peer by RDMA.
   */
  VKRDMA_UNREACHABLE = 302,
  /**
   * A time-out passed.
   */
  VKRDMA_TIMED_OUT = 303,
  /**
   * The peer has disconnected, before all was delivered.
   */
  VKRDMA_DISCONNECTED = 304,
  /**
   * The fabric, a device on the way or the peer's host failed.
   */
  VKRDMA_TRANSPORT = 305,
  /**
   * The peer sent something that is no control message.
   */
  VKRDMA_INVALID_MESSAGE = 306,
  /**
   * The peer broke a rule of the protocol.
   */
  VKRDMA_PEER_MISBEHAVED = 307,
  /**
   * The peer does what the options of this side do not allow.
   */
  VKRDMA_PEER_INCOMPATIBLE = 308,
  /**
   * A state that the library should never reach. Please report it.
   */
  VKRDMA_BUG = 400,
  /**
   * The library panicked. Nothing has unwound into the program. The endpoint can only be freed: its other calls say the same from
   * now on.
   */
  VKRDMA_PANIC = 401,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum vkrdma_code vkrdma_code;
#else
typedef int32_t vkrdma_code;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Whose fault an error is.
 */
enum vkrdma_fault
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * Nobody's.
   */
  VKRDMA_FAULT_NONE = 0,
  /**
   * The program's that made the call.
   */
  VKRDMA_FAULT_CALLER = 1,
  /**
   * This machine's: its device, its resources, or the limits that the program has set.
   */
  VKRDMA_FAULT_HERE = 2,
  /**
   * The peer's.
   */
  VKRDMA_FAULT_PEER = 3,
  /**
   * The network's, or of the peer's host: from here that looks the same.
   */
  VKRDMA_FAULT_NETWORK = 4,
  /**
   * This library's.
   */
  VKRDMA_FAULT_LIBRARY = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum vkrdma_fault vkrdma_fault;
#else
typedef int32_t vkrdma_fault;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * The kinds of events. Later versions may have more: pass over those that you do not know.
 */
enum vkrdma_event_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * A connection is there: one that was asked for, or a new one of `listener`.
   */
  VKRDMA_EVENT_OPENED = 1,
  /**
   * Bytes have arrived. Read until VKRDMA_AGAIN.
   */
  VKRDMA_EVENT_READABLE = 2,
  /**
   * There is room again, after a write that found too little; or memory can be lent again; or all is flushed.
   */
  VKRDMA_EVENT_WRITABLE = 3,
  /**
   * Some of what was lent has come back.
   */
  VKRDMA_EVENT_RETURNED = 4,
  /**
   * The connection has ended, or one that was asked for was not made. What has arrived can still be read. `vkrdma_check` says why;
   * then `vkrdma_abort` forgets it.
   */
  VKRDMA_EVENT_ENDED = 5,
  /**
   * A listener cannot accept, for a reason that is not a peer's. `vkrdma_accept_error` says which.
   */
  VKRDMA_EVENT_ACCEPT_FAILED = 6,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum vkrdma_event_kind vkrdma_event_kind;
#else
typedef uint32_t vkrdma_event_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What a buffer is for.
 */
enum vkrdma_access
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * To send from.
   */
  VKRDMA_LEND = 0,
  /**
   * To send from, and to receive into: the peer can write to all of it, by its key, from the first `vkrdma_receive` on until it
   * is deregistered.
   */
  VKRDMA_LEND_AND_RECEIVE = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum vkrdma_access vkrdma_access;
#else
typedef uint32_t vkrdma_access;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Registered memory of one connection, or of those that share its protection domain. Made by `vkrdma_register` or
 * `vkrdma_register_memory`.
 */
typedef struct vkrdma_buffer vkrdma_buffer;

/**
 * A way to RDMA devices. Made by `vkrdma_verbs_open` or `vkrdma_softsim_open`.
 */
typedef struct vkrdma_device vkrdma_device;

/**
 * Connections and listeners that share one descriptor, for one event loop.
 *
 * The loop: wait until the descriptor is readable or the time-out has come, call `vkrdma_progress`, take events with
 * `vkrdma_next_event` until it returns VKRDMA_AGAIN, and ask for the next time-out. Any thread may make any call: the endpoint has a
 * lock. A call of another thread that leaves something to do for a loop that sleeps makes the descriptor readable.
 */
typedef struct vkrdma_endpoint vkrdma_endpoint;

/**
 * An error in words. A call that fails fills the one that it is given; one that does not, leaves it as it was.
 */
typedef struct vkrdma_error {
  /**
   * What the call returned.
   */
  vkrdma_code code;
  /**
   * Whose fault it is.
   */
  vkrdma_fault fault;
  /**
   * What happened and, where that is known, what to do about it: one line of UTF-8, closed by a zero, cut where it is longer.
   */
  char text[VKRDMA_ERROR_TEXT];
} vkrdma_error;

/**
 * Settings of a connection. Fill it with `vkrdma_client_options` or `vkrdma_server_options`, then change what should be otherwise.
 *
 * What takes it also takes NULL, for what these calls would fill in. Later versions append fields; a program that was compiled with
 * fewer gets the defaults of the rest. Durations are microseconds.
 */
typedef struct vkrdma_options {
  /**
   * Bytes of this structure, as the program was compiled with it.
   */
  size_t size;
  /**
   * Length of a receive window in bytes, 1 to 2^32 - 1: `rdma-rx-size` of Valkey. 1 MiB.
   */
  uint32_t window;
  /**
   * Receive windows, 1 or 2. With two, the second is announced as soon as the first is full. 2.
   */
  uint32_t windows;
  /**
   * Length of the send buffer in bytes, 1 to 2^30. 1 MiB.
   */
  uint32_t send_buffer;
  /**
   * The longest window that a peer may register, in bytes, at least 1. 16 MiB.
   */
  uint32_t window_limit;
  /**
   * Work requests that the send queue holds, 1 to 16384. 256.
   */
  uint32_t send_depth;
  /**
   * Receives that the peer is assumed to keep posted, 2 to 16384. 1024.
   */
  uint32_t peer_receives;
  /**
   * Receives kept posted, 1 to 16384. 1024, which peers count on.
   */
  uint32_t receives;
  /**
   * Bytes that a work request may carry within itself; the device may grant less. 128.
   */
  uint32_t inline_bytes;
  /**
   * Which completion vector signals completions, modulo the device's number of them. 0.
   */
  uint32_t completion_vector;
  /**
   * How long a peer waits before it repeats what met no posted receive: the code of InfiniBand for `min_rnr_timer`, 0 to 31.
   * 12, which is 0.64 ms.
   */
  uint32_t rnr_timer;
  /**
   * Whether a client asks for the server's features: 0 or 1. 0.
   */
  uint32_t negotiate;
  /**
   * Whether the send buffer is registered with the connection rather than by its first write: 0 or 1. 0.
   */
  uint32_t eager_send_buffer;
  /**
   * Send a keepalive this often; 0 for never. Clients 0, servers 3 s.
   */
  uint64_t keepalive_every;
  /**
   * Send a keepalive when nothing was heard for this long; 0 for never. 10 s for clients, 0 for servers.
   */
  uint64_t keepalive_probe;
  /**
   * End the connection when the peer has sent nothing for this long; 0 for never. 0.
   */
  uint64_t keepalive_limit;
  /**
   * End the connection when the peer keeps data waiting for this long; 0 for never. 0.
   */
  uint64_t stall_limit;
  /**
   * How long an accepted connection may take to be established. 5 s.
   */
  uint64_t handshake_timeout;
  /**
   * How long an idle connection keeps memory that only a busy one needs; at least 1000. 5 s.
   */
  uint64_t keep_memory;
  /**
   * How long the endpoint looks again and again, before it waits to be woken: while it does, its time-out is 0. It goes by the
   * longest of its connections. 0.
   */
  uint64_t spin;
} vkrdma_options;

/**
 * Limits on what the connections of an endpoint, and of those made from it by `vkrdma_endpoint_new_sharing`, use together.
 *
 * Set `size` to `sizeof(vkrdma_limits)`, and all other fields. Where NULL is given instead, there may be 10,000 connections and
 * 2 GiB of registered memory.
 */
typedef struct vkrdma_limits {
  /**
   * Bytes of this structure, as the program was compiled with it.
   */
  size_t size;
  /**
   * Connections at the same time, those included that are being made or closed; UINT64_MAX for any number. Others are rejected.
   */
  uint64_t connections;
  /**
   * Bytes of registered memory; UINT64_MAX for any number. A peer whose connection does not fit is rejected.
   */
  uint64_t registered_bytes;
} vkrdma_limits;

/**
 * An event. Each is told once for all that has happened since it was told last. Any of them may turn out to be for nothing.
 */
typedef struct vkrdma_event {
  /**
   * What it is.
   */
  vkrdma_event_kind kind;
  /**
   * 0.
   */
  uint32_t reserved;
  /**
   * The connection; 0 where it is about a listener alone.
   */
  uint64_t connection;
  /**
   * The listener that accepted it, or cannot; 0 in other events, and where the listener was closed.
   */
  uint64_t listener;
  /**
   * What `vkrdma_set_data` has given for the connection; NULL if nothing.
   */
  void *data;
} vkrdma_event;

/**
 * An address, as text, and a port.
 */
typedef struct vkrdma_address {
  /**
   * The numeric address, closed by a zero: `192.0.2.1`, `2001:db8::1`, `fe80::1%2`.
   */
  char text[VKRDMA_ADDRESS_TEXT];
  /**
   * The port.
   */
  uint16_t port;
} vkrdma_address;

/**
 * Bytes that have arrived, where the peer has put them.
 */
typedef struct vkrdma_piece {
  /**
   * The first of them.
   */
  const void *base;
  /**
   * How many.
   */
  size_t len;
} vkrdma_piece;

/**
 * Bytes that have arrived and were not read, in order.
 */
typedef struct vkrdma_pieces {
  /**
   * How many of `pieces` there are.
   */
  size_t count;
  /**
   * Bytes in all of them.
   */
  size_t bytes;
  /**
   * Each.
   */
  struct vkrdma_piece pieces[VKRDMA_PIECES];
} vkrdma_pieces;

/**
 * Called with what was given to `vkrdma_register_memory` when the library uses the memory no more. It is called once, in any thread, out
 * of any call of this library, at the latest that which frees the last of the buffer, the connections that use it and their endpoints;
 * never if the device refuses to deregister the memory. It may not call this library, nor leave by longjmp or an exception.
 */
typedef void (*vkrdma_release)(void *context);

/**
 * How the bytes came that were received into a buffer.
 */
typedef struct vkrdma_received {
  /**
   * Bytes that the peer wrote where they belong.
   */
  uint64_t landed;
  /**
   * Bytes that were copied from an ordinary window.
   */
  uint64_t copied;
} vkrdma_received;

/**
 * What a connection is like now. Fields that are yes or no are 1 or 0. Later versions append fields.
 */
typedef struct vkrdma_status {
  /**
   * Whether bytes can flow, or could before it ended.
   */
  uint64_t open;
  /**
   * Whether it has ended: in order, or by the error of `vkrdma_check`.
   */
  uint64_t ended;
  /**
   * Whether `vkrdma_read` has an answer now: bytes, the end, or an error.
   */
  uint64_t readable;
  /**
   * Whether `vkrdma_write` has an answer now: it would take a byte, or fail.
   */
  uint64_t writable;
  /**
   * Bytes that have arrived and were not read.
   */
  uint64_t unread;
  /**
   * Bytes that were written and are not known to have arrived.
   */
  uint64_t unconfirmed;
  /**
   * Whether everything that was written was handed to the device.
   */
  uint64_t flushed;
  /**
   * Bytes of memory registered for it, its buffers included.
   */
  uint64_t registered_bytes;
  /**
   * The number of its queue pair, by which devices and traces know it.
   */
  uint64_t queue_pair;
} vkrdma_status;

/**
 * Counts of what a connection has said and heard, and asked of the device. Later versions append fields.
 */
typedef struct vkrdma_counters {
  /**
   * Bytes handed to the device.
   */
  uint64_t bytes_sent;
  /**
   * Bytes that have arrived.
   */
  uint64_t bytes_received;
  /**
   * Notifications of bytes sent.
   */
  uint64_t data_notifications_sent;
  /**
   * WRITEs without immediate sent.
   */
  uint64_t plain_writes_sent;
  /**
   * Notifications of bytes received.
   */
  uint64_t data_notifications_received;
  /**
   * Control messages sent.
   */
  uint64_t messages_sent;
  /**
   * Control messages received.
   */
  uint64_t messages_received;
  /**
   * Keepalives received.
   */
  uint64_t keepalives_received;
  /**
   * Windows that the peer has registered.
   */
  uint64_t windows_received;
  /**
   * The most notifications and messages that were under way at once.
   */
  uint64_t most_in_flight;
  /**
   * Chains of send requests posted.
   */
  uint64_t doorbells;
  /**
   * Send requests in them.
   */
  uint64_t requests;
  /**
   * Chains of receives posted.
   */
  uint64_t receive_doorbells;
  /**
   * Completions taken.
   */
  uint64_t completions;
  /**
   * Writes that found no room at all, and buffers that could not be lent.
   */
  uint64_t stalls;
  /**
   * Bytes sent from where the program had them.
   */
  uint64_t lent;
  /**
   * Times that a lent part of a buffer came back.
   */
  uint64_t returned;
} vkrdma_counters;

/**
 * Counts of what an endpoint holds and has done. Later versions append fields.
 */
typedef struct vkrdma_usage {
  /**
   * Connections there are now, those included that are being made or on their way to their end.
   */
  uint64_t connections;
  /**
   * Bytes registered now, by all endpoints that share its limits.
   */
  uint64_t registered_bytes;
  /**
   * Completion queues now, each with a descriptor.
   */
  uint64_t completion_queues;
  /**
   * Requests for a connection that were accepted.
   */
  uint64_t accepted;
  /**
   * Requests that were rejected, because of a limit or for want of resources.
   */
  uint64_t rejected;
  /**
   * Times that the endpoint looked for what had come.
   */
  uint64_t turns;
  /**
   * Times that a completion queue was polled.
   */
  uint64_t polls;
  /**
   * Times that a completion queue was armed.
   */
  uint64_t arms;
  /**
   * Times that the kernel was asked what had come.
   */
  uint64_t sleeps;
} vkrdma_usage;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the version of the library, as `1.2.3`. Versions that begin with the same number, or with 0 and the same second number, are
 * compatible.
 */
const char *vkrdma_version(void);

/**
 * Opens the machine's RDMA devices, by librdmacm and libibverbs, which are loaded at run time.
 *
 * VKRDMA_NO_DEVICE: there is none, or no library. The text says what to install or load.
 */
vkrdma_code vkrdma_verbs_open(struct vkrdma_device **device, struct vkrdma_error *error);

/**
 * Opens a simulated device with this address, which is numeric. All those of the process are hosts of one network, and nothing else is
 * on it: both sides of a connection are in the process then. For tests, on machines without RDMA.
 *
 * An address that another one has moves to this one. VKRDMA_INVALID_ARGUMENT: the address is none.
 */
vkrdma_code vkrdma_softsim_open(const char *address,
                                struct vkrdma_device **device,
                                struct vkrdma_error *error);

/**
 * Frees a device. Endpoints on it go on. NULL is nothing.
 */
void vkrdma_device_free(struct vkrdma_device *device);

/**
 * Fills `options` with the settings that suit most clients. `size` is `sizeof(vkrdma_options)`.
 */
vkrdma_code vkrdma_client_options(struct vkrdma_options *options, size_t size);

/**
 * Fills `options` with the settings that suit most servers. `size` is `sizeof(vkrdma_options)`.
 */
vkrdma_code vkrdma_server_options(struct vkrdma_options *options, size_t size);

/**
 * Makes an endpoint without connections. `limits` may be NULL.
 */
vkrdma_code vkrdma_endpoint_new(const struct vkrdma_device *device,
                                const struct vkrdma_limits *limits,
                                struct vkrdma_endpoint **endpoint,
                                struct vkrdma_error *error);

/**
 * Makes another endpoint on the device of `of`, whose connections count towards the same limits: for another thread.
 */
vkrdma_code vkrdma_endpoint_new_sharing(const struct vkrdma_endpoint *of,
                                        struct vkrdma_endpoint **endpoint,
                                        struct vkrdma_error *error);

/**
 * Frees an endpoint: its listeners are closed, its connections aborted, its descriptor closed. No other call may be under way on it,
 * and none made later. NULL is nothing. In a child that was forked it does nothing.
 *
 * A program that forks takes the descriptor out of its epoll instances before (EPOLL_CTL_DEL).
 */
void vkrdma_endpoint_free(struct vkrdma_endpoint *endpoint);

/**
 * Returns the endpoint's descriptor: when it is readable, call `vkrdma_progress`. It may be watched for its level or its edges, and
 * stays the endpoint's, which closes it when it is freed. Returns -1 for NULL, and in a child that was forked.
 */
int vkrdma_descriptor(const struct vkrdma_endpoint *endpoint);

/**
 * Tells in how many microseconds `vkrdma_progress` must be called at the latest: 0 for at once, -1 for never. Rounded up.
 *
 * A loop asks before it sleeps. What other calls change afterwards makes the descriptor readable, if it would have changed the answer to
 * an earlier one.
 */
vkrdma_code vkrdma_next_timeout(const struct vkrdma_endpoint *endpoint,
                                int64_t *microseconds,
                                struct vkrdma_error *error);

/**
 * Takes what has come for any connection, and does what is due, within bounds: what is left makes `vkrdma_next_timeout` say 0. Events
 * tell what came of it. It does not wait.
 *
 * What one connection does wrong ends that one only. An error of this call concerns the endpoint: free it.
 */
vkrdma_code vkrdma_progress(const struct vkrdma_endpoint *endpoint,
                            struct vkrdma_error *error);

/**
 * Sleeps until there is something to do, at most `microseconds` (-1 for any time), and does it: for a program without an event loop.
 * Other threads may make calls on the endpoint meanwhile. It may return for nothing.
 */
vkrdma_code vkrdma_wait(const struct vkrdma_endpoint *endpoint,
                        int64_t microseconds,
                        struct vkrdma_error *error);

/**
 * Makes the descriptor readable, and ends a `vkrdma_wait` that is under way or the next one. It takes no lock.
 */
vkrdma_code vkrdma_wake(const struct vkrdma_endpoint *endpoint,
                        struct vkrdma_error *error);

/**
 * Takes the next event. VKRDMA_AGAIN: there is none.
 */
vkrdma_code vkrdma_next_event(const struct vkrdma_endpoint *endpoint,
                              struct vkrdma_event *event,
                              struct vkrdma_error *error);

/**
 * Listens on a numeric address and a port; port 0 takes a free one. Connections that it accepts have these options; NULL for those of
 * `vkrdma_server_options`. An endpoint may have any number of listeners. Each new connection is told by VKRDMA_EVENT_OPENED.
 *
 * VKRDMA_ADDRESS: no RDMA device has that address, or it is taken.
 */
vkrdma_code vkrdma_listen(const struct vkrdma_endpoint *endpoint,
                          const char *text,
                          uint16_t port,
                          const struct vkrdma_options *accepted,
                          uint64_t *listener,
                          struct vkrdma_error *error);

/**
 * Tells the address of a listener, with its port.
 */
vkrdma_code vkrdma_listener_address(const struct vkrdma_endpoint *endpoint,
                                    uint64_t listener,
                                    struct vkrdma_address *address,
                                    struct vkrdma_error *error);

/**
 * Sets the options of the connections that a listener accepts from now on; NULL for those of `vkrdma_server_options`.
 */
vkrdma_code vkrdma_listener_set_options(const struct vkrdma_endpoint *endpoint,
                                        uint64_t listener,
                                        const struct vkrdma_options *accepted,
                                        struct vkrdma_error *error);

/**
 * Listens no more: its address can be listened on anew. Connections that were accepted go on.
 */
vkrdma_code vkrdma_listener_close(const struct vkrdma_endpoint *endpoint,
                                  uint64_t listener,
                                  struct vkrdma_error *error);

/**
 * Returns the error that kept a listener from accepting, after VKRDMA_EVENT_ACCEPT_FAILED, and VKRDMA_OK if there is none. A listener
 * whose device is gone returns it every time: close it.
 */
vkrdma_code vkrdma_accept_error(const struct vkrdma_endpoint *endpoint,
                                uint64_t listener,
                                struct vkrdma_error *error);

/**
 * Begins to connect to a numeric address and a port, from the address `source` unless that is NULL. It may take `timeout` microseconds.
 * VKRDMA_EVENT_OPENED follows, or VKRDMA_EVENT_ENDED if it fails, and `vkrdma_check` says why. `how` may be NULL, for what
 * `vkrdma_client_options` fills in.
 *
 * The connection has an id at once, which is never 0. The id of a connection that is gone names no other.
 */
vkrdma_code vkrdma_connect(const struct vkrdma_endpoint *endpoint,
                           const char *text,
                           uint16_t port,
                           const char *source,
                           uint64_t timeout,
                           const struct vkrdma_options *how,
                           uint64_t *connection,
                           struct vkrdma_error *error);

/**
 * Begins to connect as `vkrdma_connect` does, in the protection domain of the connection `sibling` of the endpoint `other`, which may be
 * the same: memory that is registered for one serves both.
 *
 * A peer of either connection that knows or guesses keys can write to the windows of both. So do this only for connections to one server
 * that is trusted as one. VKRDMA_EVENT_ENDED with VKRDMA_FOREIGN_DOMAIN follows if the way to the peer leads through another device.
 */
vkrdma_code vkrdma_connect_in_domain(const struct vkrdma_endpoint *endpoint,
                                     const struct vkrdma_endpoint *other,
                                     uint64_t sibling,
                                     const char *text,
                                     uint16_t port,
                                     const char *source,
                                     uint64_t timeout,
                                     const struct vkrdma_options *how,
                                     uint64_t *connection,
                                     struct vkrdma_error *error);

/**
 * Reads what has arrived, up to `len` bytes, and tells how many. `*read` 0, where `len` is not, is the end of the stream: the peer has
 * closed. VKRDMA_AGAIN: there is nothing now, and VKRDMA_EVENT_READABLE or VKRDMA_EVENT_ENDED follows.
 *
 * An error is what ended the connection, and comes after all that had arrived before.
 */
vkrdma_code vkrdma_read(const struct vkrdma_endpoint *endpoint,
                        uint64_t connection,
                        void *into,
                        size_t len,
                        size_t *read,
                        struct vkrdma_error *error);

/**
 * Tells where the bytes lie that have arrived and were not read: a read without a copy. `count` 0 is none now, or the end: `vkrdma_read`
 * tells which. Give them back with `vkrdma_consume`.
 *
 * The pieces stay where they are until they are consumed or read, or the connection is aborted or abandoned, or the endpoint is
 * freed. Do not write to them. The peer can write to them at any time, though one that obeys the protocol does not: so copy what you
 * decide on, and decide on the copy.
 */
vkrdma_code vkrdma_arrived(const struct vkrdma_endpoint *endpoint,
                           uint64_t connection,
                           struct vkrdma_pieces *arrived,
                           struct vkrdma_error *error);

/**
 * Gives the first `bytes` of `vkrdma_arrived` back to the peer. VKRDMA_MISUSE: so many have not arrived; none is given back then.
 */
vkrdma_code vkrdma_consume(const struct vkrdma_endpoint *endpoint,
                           uint64_t connection,
                           size_t bytes,
                           struct vkrdma_error *error);

/**
 * Takes as many bytes of `from` as there is room for, sends them as one notification, and tells how many. If that is not all, or
 * VKRDMA_AGAIN because there is no room, VKRDMA_EVENT_WRITABLE follows. The bytes are copied: they are the caller's again when the call
 * returns.
 */
vkrdma_code vkrdma_write(const struct vkrdma_endpoint *endpoint,
                         uint64_t connection,
                         const void *from,
                         size_t len,
                         size_t *written,
                         struct vkrdma_error *error);

/**
 * As `vkrdma_write`, of `count` pieces one behind the other: what of them there is room for is one notification, so that the peer wakes
 * up once. Pieces may be empty.
 */
vkrdma_code vkrdma_writev(const struct vkrdma_endpoint *endpoint,
                          uint64_t connection,
                          const struct iovec *pieces,
                          size_t count,
                          size_t *written,
                          struct vkrdma_error *error);

/**
 * Tells whether everything that was written was handed to the device. VKRDMA_AGAIN: some of it waits for the peer's window, and
 * VKRDMA_EVENT_WRITABLE or VKRDMA_EVENT_ENDED follows.
 */
vkrdma_code vkrdma_flush(const struct vkrdma_endpoint *endpoint,
                         uint64_t connection,
                         struct vkrdma_error *error);

/**
 * Registers `len` bytes for a connection, which the library allocates, all zero; `access` is one of vkrdma_access. It takes much longer
 * than to copy a few kilobytes, while other calls on the endpoint wait: so keep the buffer and use it again.
 *
 * VKRDMA_MEMORY, VKRDMA_REGISTERED_MEMORY: no memory can be registered.
 */
vkrdma_code vkrdma_register(const struct vkrdma_endpoint *endpoint,
                            uint64_t connection,
                            size_t len,
                            uint32_t access,
                            struct vkrdma_buffer **buffer,
                            struct vkrdma_error *error);

/**
 * Registers `len` bytes of the program for a connection, as `vkrdma_register` does. They stay where they are, readable and writable, until
 * `release`, unless it is NULL, is called with `context`. If the call fails, it is not called: the memory is the program's as before.
 *
 * Do not register memory twice at a time, nor memory that overlaps.
 */
vkrdma_code vkrdma_register_memory(const struct vkrdma_endpoint *endpoint,
                                   uint64_t connection,
                                   void *base,
                                   size_t len,
                                   uint32_t access,
                                   vkrdma_release release,
                                   void *context,
                                   struct vkrdma_buffer **buffer,
                                   struct vkrdma_error *error);

/**
 * Returns the first byte of a buffer; NULL for NULL. It is there until the buffer is freed, also for as long as a connection uses it.
 *
 * What is lent may be read, and what is written to it meanwhile may reach the peer or not. What is received into can change at any time,
 * see vkrdma_access: copy what you decide on, and decide on the copy.
 */
void *vkrdma_buffer_base(const struct vkrdma_buffer *buffer);

/**
 * Returns the length of a buffer in bytes; 0 for NULL.
 */
size_t vkrdma_buffer_len(const struct vkrdma_buffer *buffer);

/**
 * Frees a buffer. Its memory is deregistered, and given back, when no connection uses it any more: then, or later. NULL is nothing.
 */
void vkrdma_buffer_free(struct vkrdma_buffer *buffer);

/**
 * Sends up to `len` bytes from `offset` of a buffer, from where they are, and tells how many. They come behind all that was written
 * before. If that is not all, or VKRDMA_AGAIN because nothing can be lent now, VKRDMA_EVENT_WRITABLE follows; VKRDMA_EVENT_RETURNED when
 * memory has come back. The same bytes may be lent several times.
 */
vkrdma_code vkrdma_lend(const struct vkrdma_endpoint *endpoint,
                        uint64_t connection,
                        const struct vkrdma_buffer *buffer,
                        size_t offset,
                        size_t len,
                        size_t *lent,
                        struct vkrdma_error *error);

/**
 * Tells whether the peer has all that was lent of a buffer. VKRDMA_AGAIN: some of it is on its way, and VKRDMA_EVENT_RETURNED or
 * VKRDMA_EVENT_ENDED follows.
 */
vkrdma_code vkrdma_returned(const struct vkrdma_endpoint *endpoint,
                            uint64_t connection,
                            const struct vkrdma_buffer *buffer,
                            struct vkrdma_error *error);

/**
 * Receives the next `len` unread bytes of the stream at `offset` of a buffer. VKRDMA_AGAIN: not all of them have arrived; call it again,
 * with the same arguments, after VKRDMA_EVENT_READABLE. Whole windows are written there by the peer, the rest is copied.
 *
 * Between the first call and the one that returns VKRDMA_OK read nothing otherwise; `vkrdma_stop_landing` gives it up, and leaves the
 * bytes that have not arrived to what reads next. A buffer of VKRDMA_LEND takes copies only. VKRDMA_MISUSE: the range is not in the
 * buffer, or is where bytes of an earlier part still land.
 */
vkrdma_code vkrdma_receive(const struct vkrdma_endpoint *endpoint,
                           uint64_t connection,
                           const struct vkrdma_buffer *buffer,
                           size_t offset,
                           size_t len,
                           struct vkrdma_received *received,
                           struct vkrdma_error *error);

/**
 * Gives up what `vkrdma_receive` has begun, and has no further window lie in registered memory. One that was announced there stays until
 * it is full, and its bytes are read as any others.
 */
vkrdma_code vkrdma_stop_landing(const struct vkrdma_endpoint *endpoint,
                                uint64_t connection,
                                struct vkrdma_error *error);

/**
 * Has the events of a connection carry `data`, an address that means something to the program. NULL for none.
 */
vkrdma_code vkrdma_set_data(const struct vkrdma_endpoint *endpoint,
                            uint64_t connection,
                            void *data,
                            struct vkrdma_error *error);

/**
 * Tells the address of the peer. That of an accepted connection is what the peer's request said.
 */
vkrdma_code vkrdma_peer_address(const struct vkrdma_endpoint *endpoint,
                                uint64_t connection,
                                struct vkrdma_address *address,
                                struct vkrdma_error *error);

/**
 * Tells this side's address. VKRDMA_NO_SUCH_CONNECTION: one that is being made has none yet.
 */
vkrdma_code vkrdma_local_address(const struct vkrdma_endpoint *endpoint,
                                 uint64_t connection,
                                 struct vkrdma_address *address,
                                 struct vkrdma_error *error);

/**
 * Returns the error that ended a connection, and VKRDMA_OK if none did: it goes on, or has ended in order.
 */
vkrdma_code vkrdma_check(const struct vkrdma_endpoint *endpoint,
                         uint64_t connection,
                         struct vkrdma_error *error);

/**
 * Begins a graceful end: what was written is delivered first, for at most `linger` microseconds. VKRDMA_EVENT_ENDED follows, and
 * `vkrdma_closed` tells whether all of it arrived. `vkrdma_abort` forgets the connection then.
 */
vkrdma_code vkrdma_close(const struct vkrdma_endpoint *endpoint,
                         uint64_t connection,
                         uint64_t linger,
                         struct vkrdma_error *error);

/**
 * Tells whether a connection that was closed has ended in order. VKRDMA_AGAIN: its last bytes are on their way, and
 * VKRDMA_EVENT_ENDED follows. An error: not everything arrived.
 */
vkrdma_code vkrdma_closed(const struct vkrdma_endpoint *endpoint,
                          uint64_t connection,
                          struct vkrdma_error *error);

/**
 * As `vkrdma_close`, for a program that does not want to hear of it: no event follows, and the connection is forgotten when it has ended.
 * Do not use its id any more.
 */
vkrdma_code vkrdma_abandon(const struct vkrdma_endpoint *endpoint,
                           uint64_t connection,
                           uint64_t linger,
                           struct vkrdma_error *error);

/**
 * Ends a connection at once, if it has not ended, and forgets it: what was written may be lost. Its id is nothing from then on, and no
 * event of it follows.
 */
vkrdma_code vkrdma_abort(const struct vkrdma_endpoint *endpoint,
                         uint64_t connection,
                         struct vkrdma_error *error);

/**
 * Tells what a connection is like now. `size` is `sizeof(vkrdma_status)`. One that is still being made has no answer but
 * VKRDMA_OK with `open` 0.
 */
vkrdma_code vkrdma_status_of(const struct vkrdma_endpoint *endpoint,
                             uint64_t connection,
                             struct vkrdma_status *status,
                             size_t size,
                             struct vkrdma_error *error);

/**
 * Tells the counts of a connection. `size` is `sizeof(vkrdma_counters)`.
 */
vkrdma_code vkrdma_counters_of(const struct vkrdma_endpoint *endpoint,
                               uint64_t connection,
                               struct vkrdma_counters *counters,
                               size_t size,
                               struct vkrdma_error *error);

/**
 * Tells the counts of an endpoint. `size` is `sizeof(vkrdma_usage)`.
 */
vkrdma_code vkrdma_usage_of(const struct vkrdma_endpoint *endpoint,
                            struct vkrdma_usage *usage,
                            size_t size,
                            struct vkrdma_error *error);

/**
 * Tells whether the peer is on this machine's device, 1 or 0: whether the path of the queue pair leads back to where it leaves from.
 * Addresses prove nothing of the kind, since a request carries what its sender wrote. It asks the device.
 */
vkrdma_code vkrdma_is_local(const struct vkrdma_endpoint *endpoint,
                            uint64_t connection,
                            uint32_t *local,
                            struct vkrdma_error *error);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VKRDMA_H */
