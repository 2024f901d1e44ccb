/*
 * vkrdma: Valkey over RDMA, for programs in C. cbindgen makes this file of the Rust source. Change
 * the source, then run rdma-ffi/header --renew.
 *
 * Results
 *   Calls that can fail return a vkrdma_code: VKRDMA_OK, VKRDMA_AGAIN for "not now, an event
 *   follows", or an error. Their last argument, `error`, may be NULL. If it is not, an error
 *   fills it in with a text and with whose fault it is. Results are written to where their
 *   pointers say, and only with VKRDMA_OK. There is no global or thread-local error state. Only
 *   vkrdma_wait waits.
 *
 * Threads
 *   Every call may be made in any thread. Each call holds the endpoint's lock while it runs, also
 *   while it copies bytes or registers memory. vkrdma_descriptor and vkrdma_wake take no lock, and
 *   vkrdma_wait releases it while it sleeps. To work in parallel, use an endpoint per thread
 *   (vkrdma_endpoint_new_sharing). If a call gives the event loop of another thread something to
 *   do, the descriptor becomes readable. Freeing is different: while a handle is being freed, and
 *   afterwards, make no other call with it. In a signal handler only vkrdma_wake may be called.
 *
 * Lifetimes
 *   Endpoints, devices, buffers and loans are valid until they are freed, in any order. Ids of
 *   connections and listeners are numbers that are not reused: with the id of one that was freed a
 *   call returns an error (VKRDMA_NO_SUCH_CONNECTION). Memory behind a pointer argument is used
 *   only during the call, except registered memory. A null pointer where none is allowed is an
 *   error. Any other invalid pointer, and one place for two results, is undefined behaviour.
 *
 * Panics
 *   Nothing unwinds out of a call. A panic inside is VKRDMA_PANIC, and its endpoint can only be
 *   freed.
 *
 * Fork
 *   In a child that was forked after a device was opened, every call returns VKRDMA_FORKED, and
 *   freeing has no effect, so the child cannot harm the parent's connections, however it ends. It
 *   does not have the parent's descriptors: at the fork, others that are never readable get their
 *   numbers. So a child that lives on keeps nothing of a dead parent, such as the address of a
 *   listener. All descriptors are closed at exec. For what a parent needs to keep its registered
 *   memory, see ibv_fork_init(3): Linux 5.12 or later, or RDMAV_FORK_SAFE=1 in its environment.
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
 * Bytes of `vkrdma_options.settings`, the closing zero included.
 */
#define VKRDMA_SETTINGS_TEXT 256

/**
 * The largest number of pieces that arrived bytes can lie in.
 */
#define VKRDMA_PIECES 3

/**
 * Bytes of the text of an address, the closing zero included.
 */
#define VKRDMA_ADDRESS_TEXT 64

/**
 * The result of a call: `VKRDMA_OK`, `VKRDMA_AGAIN`, or what went wrong. More may be added.
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
   * Not now; an event follows. This is no error, and `vkrdma_error` is unchanged.
   */
  VKRDMA_AGAIN = 1,
  /**
   * An argument is null, out of bounds, or a text of the wrong form.
   */
  VKRDMA_INVALID_ARGUMENT = 100,
  /**
   * A field of options or limits is out of bounds, or `size` is wrong.
   */
  VKRDMA_INVALID_OPTIONS = 101,
  /**
   * The endpoint has no such connection: it was freed, or never existed. Or it is still being
   * established, and has no such property yet.
   */
  VKRDMA_NO_SUCH_CONNECTION = 102,
  /**
   * The endpoint has no such listener.
   */
  VKRDMA_NO_SUCH_LISTENER = 103,
  /**
   * The call is not allowed now: a write after the close, more bytes consumed than have arrived,
   * a range beyond a buffer's end.
   */
  VKRDMA_MISUSE = 104,
  /**
   * The buffer was registered for a connection in another protection domain.
   */
  VKRDMA_FOREIGN_BUFFER = 105,
  /**
   * The route to the peer uses another device than the protection domain.
   */
  VKRDMA_FOREIGN_DOMAIN = 106,
  /**
   * This process is a forked child, which cannot use the parent's handles. Nothing was done.
   */
  VKRDMA_FORKED = 107,
  /**
   * There is no RDMA device, or its run-time library is missing.
   */
  VKRDMA_NO_DEVICE = 200,
  /**
   * No RDMA device of this machine has the address, or it is in use.
   */
  VKRDMA_ADDRESS = 201,
  /**
   * No more memory can be registered: see RLIMIT_MEMLOCK, or the device's limits.
   */
  VKRDMA_MEMORY = 202,
  /**
   * The process or the system has reached its limit of descriptors.
   */
  VKRDMA_DESCRIPTORS = 203,
  /**
   * The device, its driver or the kernel refused something else.
   */
  VKRDMA_BACKEND = 204,
  /**
   * The limit `vkrdma_limits.connections` is reached.
   */
  VKRDMA_TOO_MANY_CONNECTIONS = 205,
  /**
   * The limit `vkrdma_limits.registered_bytes` is reached.
   */
  VKRDMA_REGISTERED_MEMORY = 206,
  /**
   * The device reported a failure.
   */
  VKRDMA_DEVICE_FAILED = 207,
  /**
   * The device was removed.
   */
  VKRDMA_DEVICE_REMOVED = 208,
  /**
   * Waiting for descriptors failed, or creating one.
   */
  VKRDMA_WAIT = 209,
  /**
   * Nothing listens at the peer's address and port.
   */
  VKRDMA_REFUSED = 300,
  /**
   * The peer rejected the connection.
   */
  VKRDMA_REJECTED = 301,
  /**
   * The peer cannot be reached by RDMA.
   */
  VKRDMA_UNREACHABLE = 302,
  /**
   * A time-out passed.
   */
  VKRDMA_TIMED_OUT = 303,
  /**
   * The peer disconnected before all bytes were delivered.
   */
  VKRDMA_DISCONNECTED = 304,
  /**
   * The fabric, a device on the path or the peer's host failed.
   */
  VKRDMA_TRANSPORT = 305,
  /**
   * The peer sent an invalid control message.
   */
  VKRDMA_INVALID_MESSAGE = 306,
  /**
   * The peer broke a rule of the protocol.
   */
  VKRDMA_PEER_MISBEHAVED = 307,
  /**
   * The options of this side do not allow what the peer does.
   */
  VKRDMA_PEER_INCOMPATIBLE = 308,
  /**
   * The library is in a state that should be impossible. Please report it.
   */
  VKRDMA_BUG = 400,
  /**
   * The library panicked. Nothing has unwound into the program. All further calls on the
   * endpoint return this code: free it.
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
   * There is no error.
   */
  VKRDMA_FAULT_NONE = 0,
  /**
   * The program that made the call.
   */
  VKRDMA_FAULT_CALLER = 1,
  /**
   * This machine: its device, its resources, or the limits that the program has set.
   */
  VKRDMA_FAULT_HERE = 2,
  /**
   * The peer.
   */
  VKRDMA_FAULT_PEER = 3,
  /**
   * The network or the peer's host. From this side they cannot be told apart.
   */
  VKRDMA_FAULT_NETWORK = 4,
  /**
   * This library.
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
 * What an event reports, as bits. Later versions may have more: ignore those that you do not know.
 */
enum vkrdma_event_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * A connection is established: one that the program asked for, or a new one of `listener`.
   */
  VKRDMA_EVENT_OPENED = 1,
  /**
   * Bytes have arrived. Read until VKRDMA_AGAIN, or until a read returns fewer than it may.
   */
  VKRDMA_EVENT_READABLE = 2,
  /**
   * A write, lend or flush that could not complete can go on.
   */
  VKRDMA_EVENT_WRITABLE = 4,
  /**
   * Some lent memory was returned.
   */
  VKRDMA_EVENT_RETURNED = 8,
  /**
   * The connection has ended, or could not be established. Arrived bytes can still be read.
   * `vkrdma_check` returns the reason; then `vkrdma_abort` frees it.
   */
  VKRDMA_EVENT_ENDED = 16,
  /**
   * A listener cannot accept, for a reason on this side. `vkrdma_accept_error` returns it.
   */
  VKRDMA_EVENT_ACCEPT_FAILED = 32,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum vkrdma_event_kind vkrdma_event_kind;
#else
typedef uint32_t vkrdma_event_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What a buffer may be used for.
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
   * To send from, and to receive into. From the first `vkrdma_receive` until it is deregistered,
   * the peer can write to all of it.
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
 * Registered memory of one connection, and of all in its protection domain. Created by
 * `vkrdma_register` or `vkrdma_register_memory`.
 */
typedef struct vkrdma_buffer vkrdma_buffer;

/**
 * Access to RDMA devices. Created by `vkrdma_verbs_open` or `vkrdma_softsim_open`.
 */
typedef struct vkrdma_device vkrdma_device;

/**
 * Connections and listeners that share one descriptor, for one event loop.
 *
 * The loop: wait until the descriptor is readable or the time-out has passed, call
 * `vkrdma_progress`, handle the events that it returns, and ask for the next time-out. Any thread
 * may make any call, because the endpoint has a lock. A call of another thread that gives a
 * sleeping loop something to do makes the descriptor readable.
 */
typedef struct vkrdma_endpoint vkrdma_endpoint;

/**
 * Loans of one connection. Their memory has an owner, which keeps it until the bytes are reported
 * as written. The rule: a byte that is lent is not reported before the memory is released, and an
 * owner that goes ends the loans before its memory goes.
 *
 * Created by `vkrdma_loans_new`. It counts all bytes that are written from then on, by
 * `vkrdma_loans_write`; positions are such numbers. It has a lock of its own.
 */
typedef struct vkrdma_loans vkrdma_loans;

/**
 * One channel of connection-manager events, for many endpoints. Created by
 * `vkrdma_shared_events_new`.
 */
typedef struct vkrdma_shared_events vkrdma_shared_events;

/**
 * Describes an error. A call that fails fills it in; any other call leaves it unchanged.
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
   * What happened and, if known, what to do: a line of UTF-8, closed by a zero, cut if too long.
   */
  char text[VKRDMA_ERROR_TEXT];
} vkrdma_error;

/**
 * Settings of a connection. Fill it in with `vkrdma_client_options` or `vkrdma_server_options`,
 * then change fields. Calls that take it also take NULL for these defaults.
 *
 * Later versions append fields; a program compiled with fewer gets the defaults of the others.
 * Durations are microseconds.
 */
typedef struct vkrdma_options {
  /**
   * The size of this structure that the program was compiled with.
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
   * How long a peer waits before it retries without a posted receive: InfiniBand's code for
   * `min_rnr_timer`, 0 to 31. 12, which is 0.64 ms.
   */
  uint32_t rnr_timer;
  /**
   * Whether a client asks for the server's features: 0 or 1. 0.
   */
  uint32_t negotiate;
  /**
   * Whether to register the send buffer when the connection is established, not by its first
   * write: 0 or 1. 0.
   */
  uint32_t eager_send_buffer;
  /**
   * Send a keepalive this often; 0 for never. Clients 0, servers 3 s.
   */
  uint64_t keepalive_every;
  /**
   * Send a keepalive when the peer has sent nothing for this long; 0 for never. Clients 10 s,
   * servers 0.
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
   * How long the endpoint busy-polls before it waits for a wake-up; its time-out is then 0. The
   * longest of its connections applies. 0.
   */
  uint64_t spin;
  /**
   * Options that a network or a card may want, which `vkrdma_options_set` writes:
   * `ack_timeout=16 huge_pages=yes`, closed by a zero. Empty.
   */
  char settings[VKRDMA_SETTINGS_TEXT];
} vkrdma_options;

/**
 * Limits for all connections of an endpoint and of those that share them by
 * `vkrdma_endpoint_new_sharing`.
 *
 * Set `size` to `sizeof(vkrdma_limits)`, and all other fields. NULL stands for 10,000 connections,
 * 2 GiB of registered memory and the default backlog.
 */
typedef struct vkrdma_limits {
  /**
   * The size of this structure that the program was compiled with.
   */
  size_t size;
  /**
   * Simultaneous connections, including those being established or closed; UINT64_MAX for no
   * limit. Others are rejected.
   */
  uint64_t connections;
  /**
   * Bytes of registered memory; UINT64_MAX for no limit. A connection beyond is rejected. An
   * established one continues, with a send buffer of a page if there is no more memory.
   */
  uint64_t registered_bytes;
  /**
   * Connections that were accepted and that the program does not have yet: handshakes, those
   * whose VKRDMA_EVENT_OPENED was not taken, and those closed before the next `vkrdma_progress`.
   * None of them has a receive window. Further requests wait, and then a handshake is ended that
   * is not complete after 0.1 s. 0 for 256, UINT64_MAX for no limit.
   */
  uint64_t backlog;
} vkrdma_limits;

/**
 * What has happened to a connection or a listener since its last event. It may be spurious. Later
 * versions append fields.
 */
typedef struct vkrdma_event {
  /**
   * Bits of vkrdma_event_kind.
   */
  uint32_t kinds;
  /**
   * 0.
   */
  uint32_t reserved;
  /**
   * The connection; 0 if the event concerns only a listener.
   */
  uint64_t connection;
  /**
   * The listener that accepted or cannot accept; 0 in other events, and if it was closed.
   */
  uint64_t listener;
  /**
   * The value of `vkrdma_set_data` for the connection, or NULL.
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
 * Bytes that have arrived, where the peer has written them.
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
 * Unread bytes, in order.
 */
typedef struct vkrdma_pieces {
  /**
   * How many of `pieces` are set.
   */
  size_t count;
  /**
   * Bytes in all pieces together.
   */
  size_t bytes;
  /**
   * Each.
   */
  struct vkrdma_piece pieces[VKRDMA_PIECES];
} vkrdma_pieces;

/**
 * Called once, with the `context` of `vkrdma_register_memory`, when the library no longer uses the
 * memory, by any call of this library in any thread: at the latest by the one that frees the last
 * of the buffer, the connections that use it and their endpoints. Never called if the device
 * refuses to deregister the memory. It must not call this library, nor leave by longjmp or an
 * exception.
 */
typedef void (*vkrdma_release)(void *context);

/**
 * How received bytes came into a buffer.
 */
typedef struct vkrdma_received {
  /**
   * Bytes that the peer wrote to their destination directly.
   */
  uint64_t landed;
  /**
   * Bytes copied from an ordinary window.
   */
  uint64_t copied;
} vkrdma_received;

/**
 * How far a stream with loans is.
 */
typedef struct vkrdma_loans_state {
  /**
   * The position up to which the connection has taken bytes.
   */
  uint64_t accepted;
  /**
   * The position up to which `vkrdma_loans_report` has reported them.
   */
  uint64_t reported;
  /**
   * The positions of the part that is open, which means that some of its bytes are not taken:
   * its first byte,
   */
  uint64_t start;
  /**
   * and the one behind its last. Both are 0 if no part is open.
   */
  uint64_t end;
  /**
   * The address of its first byte that is not taken; NULL if no part is open.
   */
  const void *next;
  /**
   * How many parts are not released, or not behind `reported`.
   */
  size_t in_flight;
} vkrdma_loans_state;

/**
 * The state of a connection. Boolean fields are 1 or 0. Later versions append fields.
 */
typedef struct vkrdma_status {
  /**
   * Whether the connection was established.
   */
  uint64_t open;
  /**
   * Whether it has ended, in order or by the error that `vkrdma_check` returns.
   */
  uint64_t ended;
  /**
   * Whether `vkrdma_read` would return bytes, the end or an error now.
   */
  uint64_t readable;
  /**
   * Whether `vkrdma_write` would take a byte or fail now.
   */
  uint64_t writable;
  /**
   * Unread bytes that have arrived.
   */
  uint64_t unread;
  /**
   * Written bytes that the peer has not acknowledged.
   */
  uint64_t unconfirmed;
  /**
   * Whether the device has been given all written bytes.
   */
  uint64_t flushed;
  /**
   * Bytes of memory registered for it, its buffers included.
   */
  uint64_t registered_bytes;
  /**
   * Its queue pair number, which devices and traces show.
   */
  uint64_t queue_pair;
} vkrdma_status;

/**
 * Counters of a connection. Later versions append fields.
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
   * The largest number of unacknowledged notifications and messages.
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
   * Writes that found no room, and buffers that could not be lent.
   */
  uint64_t stalls;
  /**
   * Bytes sent from memory of the program, without a copy.
   */
  uint64_t lent;
  /**
   * Times that a lent part of a buffer was returned.
   */
  uint64_t returned;
} vkrdma_counters;

/**
 * Resources and counters of an endpoint. Later versions append fields.
 */
typedef struct vkrdma_usage {
  /**
   * Connections now, including those that are being established or closed.
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
   * Requests that were rejected because of a limit or a shortage of resources. Also accepted
   * ones whose connections were ended for that before the program used them: both counts have
   * these.
   */
  uint64_t rejected;
  /**
   * Times that the endpoint looked for completions and events.
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
   * Times that the endpoint asked the kernel for wake-ups.
   */
  uint64_t sleeps;
} vkrdma_usage;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the version of the library, for example `1.2.3`. Versions with the same first number are
 * compatible; while it is 0, those with the same second number.
 */
const char *vkrdma_version(void);

/**
 * Opens the machine's RDMA devices through librdmacm and libibverbs, which are loaded at run time.
 *
 * VKRDMA_NO_DEVICE: no device, or a missing library. The text says what to install or load.
 */
vkrdma_code vkrdma_verbs_open(struct vkrdma_device **device, struct vkrdma_error *error);

/**
 * Opens a simulated device with a numeric address, for tests on machines without RDMA. The
 * simulated devices of a process are the only hosts of one network, so both sides of a connection
 * are in that process.
 *
 * If another simulated device has the address, it moves to this one. VKRDMA_INVALID_ARGUMENT: the
 * text is not a numeric address.
 */
vkrdma_code vkrdma_softsim_open(const char *address,
                                struct vkrdma_device **device,
                                struct vkrdma_error *error);

/**
 * Frees a device. Its endpoints remain usable. NULL is ignored.
 */
void vkrdma_device_free(struct vkrdma_device *device);

/**
 * Fills in the defaults of clients. `size` is `sizeof(vkrdma_options)`.
 */
vkrdma_code vkrdma_client_options(struct vkrdma_options *options, size_t size);

/**
 * Fills in the defaults of servers. `size` is `sizeof(vkrdma_options)`.
 */
vkrdma_code vkrdma_server_options(struct vkrdma_options *options, size_t size);

/**
 * Sets an option by its name: a field of `vkrdma_options`, or one that a network or a card may
 * want, such as `ack_timeout`. The text of the error for an unknown name lists all.
 *
 * The options must be filled in. VKRDMA_INVALID_OPTIONS: there is no such option, or it does not
 * take this value; nothing is changed.
 */
vkrdma_code vkrdma_options_set(struct vkrdma_options *options,
                               const char *name,
                               const char *value,
                               struct vkrdma_error *error);

/**
 * Creates an endpoint without connections. `limits` may be NULL.
 */
vkrdma_code vkrdma_endpoint_new(const struct vkrdma_device *device,
                                const struct vkrdma_limits *limits,
                                struct vkrdma_endpoint **endpoint,
                                struct vkrdma_error *error);

/**
 * Creates another endpoint on the device of `of`, for another thread. The connections of both
 * count towards the same limits.
 */
vkrdma_code vkrdma_endpoint_new_sharing(const struct vkrdma_endpoint *of,
                                        struct vkrdma_endpoint **endpoint,
                                        struct vkrdma_error *error);

/**
 * Frees an endpoint: closes its listeners, aborts its connections and closes its descriptor. Make
 * no other call on it meanwhile or later. NULL is ignored. In a forked child it has no effect.
 */
void vkrdma_endpoint_free(struct vkrdma_endpoint *endpoint);

/**
 * Returns the endpoint's descriptor, which the endpoint closes when it is freed; -1 for NULL, and
 * in a forked child. When it is readable, level- or edge-triggered, call `vkrdma_progress`.
 */
int vkrdma_descriptor(const struct vkrdma_endpoint *endpoint);

/**
 * Returns the microseconds, rounded up, after which `vkrdma_progress` must be called: 0 for now,
 * -1 for never. Ask before sleeping. If a later call makes the time shorter, it makes the
 * descriptor readable.
 */
vkrdma_code vkrdma_next_timeout(const struct vkrdma_endpoint *endpoint,
                                int64_t *microseconds,
                                struct vkrdma_error *error);

/**
 * Sleeps until `vkrdma_progress` has something to do, for at most `microseconds` (-1 for no
 * limit), for programs without an event loop. Other threads may call the endpoint meanwhile. It
 * may return although nothing has happened.
 */
vkrdma_code vkrdma_wait(const struct vkrdma_endpoint *endpoint,
                        int64_t microseconds,
                        struct vkrdma_error *error);

/**
 * Makes the descriptor readable, and ends the current or next `vkrdma_wait`. It takes no lock.
 */
vkrdma_code vkrdma_wake(const struct vkrdma_endpoint *endpoint, struct vkrdma_error *error);

/**
 * Makes a turn: takes completions and events of all connections, and does what is due, without
 * waiting. Returns what has happened in `events`, an array of `capacity` structures of `size`
 * bytes, which is `sizeof(vkrdma_event)`, and how many it has filled in `*count`, which may be 0.
 *
 * A connection has one event in the array, for all that has happened to it. Events that find no
 * room are kept: if `*count` is `capacity`, call again. Until then, and while bounded work is
 * left, `vkrdma_next_timeout` returns 0.
 *
 * While the program handles an event, it may free the connection of a later one: what `data`
 * points to must be valid until the whole array is handled.
 *
 * A failure of a connection ends only that. An error of this call concerns the endpoint: free it.
 * VKRDMA_INVALID_ARGUMENT, VKRDMA_INVALID_OPTIONS: the array is null or empty, or `size` is wrong;
 * nothing was done.
 */
vkrdma_code vkrdma_progress(const struct vkrdma_endpoint *endpoint,
                            struct vkrdma_event *events,
                            size_t capacity,
                            size_t size,
                            size_t *count,
                            struct vkrdma_error *error);

/**
 * Creates a channel of events, which no endpoint uses yet.
 */
vkrdma_code vkrdma_shared_events_new(const struct vkrdma_device *device,
                                     struct vkrdma_shared_events **events,
                                     struct vkrdma_error *error);

/**
 * Frees a channel of events. It closes with the last of its endpoints. NULL is ignored. In a
 * forked child it has no effect.
 */
void vkrdma_shared_events_free(struct vkrdma_shared_events *events);

/**
 * Returns the channel's descriptor; -1 for NULL, and in a forked child. When it is readable, call
 * `vkrdma_shared_events_dispatch`.
 */
int vkrdma_shared_events_descriptor(const struct vkrdma_shared_events *events);

/**
 * Hands events to their endpoints, and wakes these. A call is bounded: while events are left, the
 * descriptor stays readable. It takes no lock of an endpoint.
 *
 * It does not wait for an event. It waits while another thread hands events out. On a device it
 * also waits, for at most a second, for an asynchronous event that another thread is taking.
 */
vkrdma_code vkrdma_shared_events_dispatch(const struct vkrdma_shared_events *events,
                                          struct vkrdma_error *error);

/**
 * Creates an endpoint that takes its events from `events` and connects, but does not listen. It
 * costs a descriptor for each connection, and `waker`. `limits` may be NULL.
 *
 * A wake-up writes eight bytes to `waker`, without blocking and without SIGPIPE: a non-blocking
 * eventfd, or one end of a socket pair, whose other end is then readable. The program takes the
 * bytes out. It calls `vkrdma_progress` when they come, when a `vkrdma_completions_descriptor` is
 * readable, and after `vkrdma_next_timeout`. `vkrdma_descriptor` returns `waker`, which the
 * endpoint closes when it is freed. `vkrdma_wait` returns VKRDMA_MISUSE. If the call fails, also
 * in a forked child, `waker` is closed. VKRDMA_INVALID_ARGUMENT: also if it is a pipe.
 */
vkrdma_code vkrdma_endpoint_new_with_events(const struct vkrdma_shared_events *events,
                                            const struct vkrdma_limits *limits,
                                            int waker,
                                            struct vkrdma_endpoint **endpoint,
                                            struct vkrdma_error *error);

/**
 * Returns the descriptor of a connection's completions in `*descriptor`: when it is readable, call
 * `vkrdma_progress`. It is open until the connection is freed. Programs need it only for
 * endpoints of `vkrdma_endpoint_new_with_events`.
 *
 * VKRDMA_NO_SUCH_CONNECTION: also while there is none yet, because the route is being resolved.
 */
vkrdma_code vkrdma_completions_descriptor(const struct vkrdma_endpoint *endpoint,
                                          uint64_t connection,
                                          int *descriptor,
                                          struct vkrdma_error *error);

/**
 * Listens on a numeric address and a port; 0 chooses a free port. Accepted connections get these
 * options; NULL stands for those of `vkrdma_server_options`. An endpoint may have many listeners.
 * VKRDMA_EVENT_OPENED reports each new connection.
 *
 * VKRDMA_ADDRESS: no RDMA device has the address, or it is in use.
 */
vkrdma_code vkrdma_listen(const struct vkrdma_endpoint *endpoint,
                          const char *text,
                          uint16_t port,
                          const struct vkrdma_options *accepted,
                          uint64_t *listener,
                          struct vkrdma_error *error);

/**
 * Returns the address and port of a listener.
 */
vkrdma_code vkrdma_listener_address(const struct vkrdma_endpoint *endpoint,
                                    uint64_t listener,
                                    struct vkrdma_address *address,
                                    struct vkrdma_error *error);

/**
 * Sets the options of connections that a listener accepts later; NULL stands for those of
 * `vkrdma_server_options`.
 */
vkrdma_code vkrdma_listener_set_options(const struct vkrdma_endpoint *endpoint,
                                        uint64_t listener,
                                        const struct vkrdma_options *accepted,
                                        struct vkrdma_error *error);

/**
 * Closes a listener; its address becomes free. Accepted connections stay open.
 */
vkrdma_code vkrdma_listener_close(const struct vkrdma_endpoint *endpoint,
                                  uint64_t listener,
                                  struct vkrdma_error *error);

/**
 * Returns the error that kept a listener from accepting, after VKRDMA_EVENT_ACCEPT_FAILED.
 * VKRDMA_OK: none. If its device was removed, every call returns that error: close the listener.
 */
vkrdma_code vkrdma_accept_error(const struct vkrdma_endpoint *endpoint,
                                uint64_t listener,
                                struct vkrdma_error *error);

/**
 * Begins to connect to a numeric address and a port, from the address `source` unless NULL, within
 * `timeout` microseconds. VKRDMA_EVENT_OPENED follows, or VKRDMA_EVENT_ENDED, if connecting fails;
 * `vkrdma_check` returns the reason. NULL for `how`: the options of `vkrdma_client_options`.
 *
 * The id is valid immediately and never 0. Ids are not reused.
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
 * Connects like `vkrdma_connect`, in the protection domain of the connection `sibling` of the
 * endpoint `other`, which may be the same: both can use memory that is registered for one.
 *
 * A peer of either that knows or guesses keys can write to the windows of both: use it only for
 * connections to the same server. If the route to the peer uses another device, VKRDMA_EVENT_ENDED
 * with VKRDMA_FOREIGN_DOMAIN follows.
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
 * Reads up to `len` bytes that have arrived, and returns their number in `*read`. If `*read` is 0
 * and `len` is not, the stream has ended: the peer has closed. VKRDMA_AGAIN: nothing has arrived;
 * VKRDMA_EVENT_READABLE or VKRDMA_EVENT_ENDED follows.
 *
 * An error is the one that ended the connection, returned after all bytes that arrived before.
 */
vkrdma_code vkrdma_read(const struct vkrdma_endpoint *endpoint,
                        uint64_t connection,
                        void *into,
                        size_t len,
                        size_t *read,
                        struct vkrdma_error *error);

/**
 * Returns the places of all unread bytes: a read without a copy. If `count` is 0, nothing has
 * arrived or the stream has ended; `vkrdma_read` tells which. Return the bytes to the peer with
 * `vkrdma_consume`.
 *
 * The pieces are valid until they are consumed or read, the connection is aborted or abandoned, or
 * the endpoint is freed. Do not write to them. A hostile peer can, at any time: copy what you base
 * a decision on, and decide on the copy.
 */
vkrdma_code vkrdma_arrived(const struct vkrdma_endpoint *endpoint,
                           uint64_t connection,
                           struct vkrdma_pieces *arrived,
                           struct vkrdma_error *error);

/**
 * Returns the first `bytes` bytes of `vkrdma_arrived` to the peer. VKRDMA_MISUSE: fewer bytes have
 * arrived, and none is returned.
 */
vkrdma_code vkrdma_consume(const struct vkrdma_endpoint *endpoint,
                           uint64_t connection,
                           size_t bytes,
                           struct vkrdma_error *error);

/**
 * Copies as many bytes of `from` as there is room for, sends them as one notification, and returns
 * their number. VKRDMA_AGAIN: there is no room. After that, or if not all bytes were taken,
 * VKRDMA_EVENT_WRITABLE follows. The caller may reuse `from` when the call returns.
 */
vkrdma_code vkrdma_write(const struct vkrdma_endpoint *endpoint,
                         uint64_t connection,
                         const void *from,
                         size_t len,
                         size_t *written,
                         struct vkrdma_error *error);

/**
 * Writes `count` pieces in order, like one `vkrdma_write`: one notification for all bytes that
 * have room, so the peer wakes up once. Pieces may be empty.
 */
vkrdma_code vkrdma_writev(const struct vkrdma_endpoint *endpoint,
                          uint64_t connection,
                          const struct iovec *pieces,
                          size_t count,
                          size_t *written,
                          struct vkrdma_error *error);

/**
 * Returns VKRDMA_OK if the device has been given all written bytes. VKRDMA_AGAIN: some of them
 * wait for the peer's window; VKRDMA_EVENT_WRITABLE or VKRDMA_EVENT_ENDED follows.
 */
vkrdma_code vkrdma_flush(const struct vkrdma_endpoint *endpoint,
                         uint64_t connection,
                         struct vkrdma_error *error);

/**
 * Allocates `len` zero bytes and registers them for a connection; `access` is one of
 * vkrdma_access. Registration takes much longer than copying a few kilobytes: keep the buffer and
 * use it again. Other calls on the endpoint do not wait for it.
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
 * Registers `len` bytes of the program for a connection, like `vkrdma_register`. They must stay
 * readable and writable until the library calls `release`, which may be NULL, with `context`. If
 * the call fails, it is not called, and the program owns the memory as before.
 *
 * Memory that is registered to send from may overlap other such memory: several connections may
 * send from the same bytes. Memory that is received into must overlap no registered memory.
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
 * Returns the address of a buffer; NULL for NULL. It is valid until the buffer is freed and no
 * connection uses it.
 *
 * Lent memory may be read; the peer may or may not see a write to it. Memory that is received into
 * can change at any time, see vkrdma_access: copy it, then decide on the copy.
 */
void *vkrdma_buffer_base(const struct vkrdma_buffer *buffer);

/**
 * Returns the length of a buffer in bytes; 0 for NULL.
 */
size_t vkrdma_buffer_len(const struct vkrdma_buffer *buffer);

/**
 * Frees a buffer: deregisters and releases it once no connection uses it. NULL is ignored.
 */
void vkrdma_buffer_free(struct vkrdma_buffer *buffer);

/**
 * Sends up to `len` bytes from `offset` of a buffer without a copy, after all bytes written
 * before, and returns their number. VKRDMA_AGAIN: nothing can be lent now. After that, or if not
 * all bytes were taken, VKRDMA_EVENT_WRITABLE follows. VKRDMA_EVENT_RETURNED reports returned
 * memory. The same bytes may be lent several times.
 */
vkrdma_code vkrdma_lend(const struct vkrdma_endpoint *endpoint,
                        uint64_t connection,
                        const struct vkrdma_buffer *buffer,
                        size_t offset,
                        size_t len,
                        size_t *lent,
                        struct vkrdma_error *error);

/**
 * Sends the `before_count` pieces of `before`, then `len` bytes from `offset` of a buffer without
 * a copy, then the `after_count` pieces of `after`. It does what vkrdma_writev, vkrdma_lend and
 * vkrdma_writev do, but by one doorbell, and with one notification if the peer's window has room
 * for all. `taken` is the number of bytes taken, from the start of `before`. VKRDMA_AGAIN: no byte
 * can be taken now. After that, or if not all bytes were taken, VKRDMA_EVENT_WRITABLE follows.
 */
vkrdma_code vkrdma_lend_framed(const struct vkrdma_endpoint *endpoint,
                               uint64_t connection,
                               const struct iovec *before,
                               size_t before_count,
                               const struct vkrdma_buffer *buffer,
                               size_t offset,
                               size_t len,
                               const struct iovec *after,
                               size_t after_count,
                               size_t *taken,
                               struct vkrdma_error *error);

/**
 * Returns VKRDMA_OK if the peer has all lent bytes of a buffer. VKRDMA_AGAIN: some of them are in
 * flight; VKRDMA_EVENT_RETURNED or VKRDMA_EVENT_ENDED follows.
 */
vkrdma_code vkrdma_returned(const struct vkrdma_endpoint *endpoint,
                            uint64_t connection,
                            const struct vkrdma_buffer *buffer,
                            struct vkrdma_error *error);

/**
 * Receives the next `len` unread bytes of the stream at `offset` of a buffer. The peer writes
 * whole windows there; the rest is copied, and all bytes for a buffer of VKRDMA_LEND.
 * VKRDMA_AGAIN: not all bytes have arrived; call again, with the same arguments, after
 * VKRDMA_EVENT_READABLE.
 *
 * Do not read by other calls between the first call and the one that returns VKRDMA_OK.
 * `vkrdma_stop_landing` gives up; other calls then read the bytes that have not arrived.
 * VKRDMA_MISUSE: the range is outside the buffer, or bytes of an earlier part still land there.
 */
vkrdma_code vkrdma_receive(const struct vkrdma_endpoint *endpoint,
                           uint64_t connection,
                           const struct vkrdma_buffer *buffer,
                           size_t offset,
                           size_t len,
                           struct vkrdma_received *received,
                           struct vkrdma_error *error);

/**
 * Gives up what `vkrdma_receive` has begun, and announces no further window in registered memory.
 * An announced one stays until it is full, and its bytes are read like any others.
 */
vkrdma_code vkrdma_stop_landing(const struct vkrdma_endpoint *endpoint,
                                uint64_t connection,
                                struct vkrdma_error *error);

/**
 * Creates loans, at position 0.
 */
vkrdma_code vkrdma_loans_new(struct vkrdma_loans **loans, struct vkrdma_error *error);

/**
 * Frees loans. Call `vkrdma_loans_end` first, unless no part is in flight. NULL is ignored. In a
 * forked child it has no effect.
 */
void vkrdma_loans_free(struct vkrdma_loans *loans);

/**
 * Registers `len` bytes of the program as the part that begins at the position `start`, and opens
 * it. As for `vkrdma_register_memory` with VKRDMA_LEND, they must stay readable until the library
 * calls `release`, which may be NULL, with `context`.
 *
 * VKRDMA_MISUSE: a part is open, bytes at `start` were taken, or the loans have ended.
 */
vkrdma_code vkrdma_loans_register(const struct vkrdma_loans *loans,
                                  const struct vkrdma_endpoint *endpoint,
                                  uint64_t connection,
                                  uint64_t start,
                                  void *base,
                                  size_t len,
                                  vkrdma_release release,
                                  void *context,
                                  struct vkrdma_error *error);

/**
 * Writes the `before_count` pieces of `before`, then the rest of the open part without a copy,
 * then the `after_count` pieces of `after`, as `vkrdma_lend_framed` does, and counts the bytes
 * taken, whose number is `taken`. If no part is open, writes the pieces of `before`.
 *
 * VKRDMA_MISUSE: `before` is not what lies before the open part, or there are pieces behind a part
 * although none is open.
 */
vkrdma_code vkrdma_loans_write(const struct vkrdma_loans *loans,
                               const struct vkrdma_endpoint *endpoint,
                               uint64_t connection,
                               const struct iovec *before,
                               size_t before_count,
                               const struct iovec *after,
                               size_t after_count,
                               size_t *taken,
                               struct vkrdma_error *error);

/**
 * Returns in `*bytes` how many further bytes may be reported as written, at most `most`, and
 * counts them as reported. 0: call again after VKRDMA_EVENT_RETURNED, or when more bytes were
 * taken.
 */
vkrdma_code vkrdma_loans_report(const struct vkrdma_loans *loans,
                                size_t most,
                                size_t *bytes,
                                struct vkrdma_error *error);

/**
 * Returns how far the stream is.
 */
vkrdma_code vkrdma_loans_state_of(const struct vkrdma_loans *loans,
                                  struct vkrdma_loans_state *state,
                                  struct vkrdma_error *error);

/**
 * Ends all loans, before their memory goes: if a part is in flight, aborts the connection as
 * `vkrdma_abort` does, and the device reads no byte of it when this returns. Nothing is lent or
 * reported from now on. Returns in `*kept` how many bytes the device keeps registered, because it
 * refuses to deregister them; their release is not called.
 *
 * `endpoint` may be NULL if it was freed. If the call fails, the memory must stay: free the
 * endpoint, and call again.
 */
vkrdma_code vkrdma_loans_end(const struct vkrdma_loans *loans,
                             const struct vkrdma_endpoint *endpoint,
                             uint64_t connection,
                             uint64_t *kept,
                             struct vkrdma_error *error);

/**
 * Sets the `data` of all later events of a connection: an address for the program, or NULL.
 */
vkrdma_code vkrdma_set_data(const struct vkrdma_endpoint *endpoint,
                            uint64_t connection,
                            void *data,
                            struct vkrdma_error *error);

/**
 * Returns the peer's address. For an accepted connection it is the one in the peer's request.
 */
vkrdma_code vkrdma_peer_address(const struct vkrdma_endpoint *endpoint,
                                uint64_t connection,
                                struct vkrdma_address *address,
                                struct vkrdma_error *error);

/**
 * Returns this side's address. VKRDMA_NO_SUCH_CONNECTION: also until it is established.
 */
vkrdma_code vkrdma_local_address(const struct vkrdma_endpoint *endpoint,
                                 uint64_t connection,
                                 struct vkrdma_address *address,
                                 struct vkrdma_error *error);

/**
 * Returns the error that ended a connection. VKRDMA_OK: it is open, or has ended in order.
 */
vkrdma_code vkrdma_check(const struct vkrdma_endpoint *endpoint,
                         uint64_t connection,
                         struct vkrdma_error *error);

/**
 * Closes a connection gracefully: written bytes are delivered first, for at most `linger`
 * microseconds. VKRDMA_EVENT_ENDED follows; `vkrdma_closed` then tells whether all bytes were
 * delivered, and `vkrdma_abort` frees the connection.
 */
vkrdma_code vkrdma_close(const struct vkrdma_endpoint *endpoint,
                         uint64_t connection,
                         uint64_t linger,
                         struct vkrdma_error *error);

/**
 * Returns VKRDMA_OK if a closed connection has ended in order. VKRDMA_AGAIN: its last bytes are in
 * flight; VKRDMA_EVENT_ENDED follows. An error: not all bytes were delivered.
 */
vkrdma_code vkrdma_closed(const struct vkrdma_endpoint *endpoint,
                          uint64_t connection,
                          struct vkrdma_error *error);

/**
 * Closes a connection like `vkrdma_close`, without further events, and frees it when it has ended.
 * Do not use its id after this call.
 */
vkrdma_code vkrdma_abandon(const struct vkrdma_endpoint *endpoint,
                           uint64_t connection,
                           uint64_t linger,
                           struct vkrdma_error *error);

/**
 * Ends a connection immediately and frees it. Written bytes may be lost. Its id becomes invalid,
 * and no event of it follows.
 */
vkrdma_code vkrdma_abort(const struct vkrdma_endpoint *endpoint,
                         uint64_t connection,
                         struct vkrdma_error *error);

/**
 * Fills in the state of a connection. `size` is `sizeof(vkrdma_status)`. While the connection is
 * being established, `open` is 0.
 */
vkrdma_code vkrdma_status_of(const struct vkrdma_endpoint *endpoint,
                             uint64_t connection,
                             struct vkrdma_status *status,
                             size_t size,
                             struct vkrdma_error *error);

/**
 * Fills in the counters of a connection. `size` is `sizeof(vkrdma_counters)`.
 */
vkrdma_code vkrdma_counters_of(const struct vkrdma_endpoint *endpoint,
                               uint64_t connection,
                               struct vkrdma_counters *counters,
                               size_t size,
                               struct vkrdma_error *error);

/**
 * Fills in the counters of an endpoint. `size` is `sizeof(vkrdma_usage)`.
 */
vkrdma_code vkrdma_usage_of(const struct vkrdma_endpoint *endpoint,
                            struct vkrdma_usage *usage,
                            size_t size,
                            struct vkrdma_error *error);

/**
 * Sets `*local` to 1 if the peer is on the same device of this machine, else to 0. It asks the
 * device for the queue pair's path: the address in a request may be forged.
 */
vkrdma_code vkrdma_is_local(const struct vkrdma_endpoint *endpoint,
                            uint64_t connection,
                            uint32_t *local,
                            struct vkrdma_error *error);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VKRDMA_H */
