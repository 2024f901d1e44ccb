/*
 * The protocol's machine for one connection, in either role. It has no memory of its own, no clock
 * and no device. The driver reports each event, posts the receive that it used (VR-RES-003), then
 * performs what vkr_next() returns until nothing is left (VR-RES-012). It takes all events before
 * it reports a flush (VR-CLOSE-009). Times are milliseconds of a clock that never goes back.
 *
 * Ids in comments are requirements of ../../requirements.md, sections those of ../../protocol.md.
 */
#ifndef VKR_MACHINE_H
#define VKR_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { VKR_MESSAGE = 32, VKR_MOST_REQUESTS = 1024, VKR_MOST_ANSWERS = 1024 };

/* ----------------------------------------------------------------------------- control messages */

enum vkr_kind { VKR_GET_SERVER_FEATURE, VKR_SET_CLIENT_FEATURE, VKR_KEEPALIVE, VKR_REGISTER_XFER_MEMORY, VKR_KINDS };

struct vkr_message {
    unsigned kind;
    uint16_t select;
    uint64_t features, address;
    uint32_t length, rkey;
};

/* NULL, or why the bytes are no message: "length" or "opcode". */
const char *vkr_decode(const uint8_t *bytes, size_t length, struct vkr_message *message);
void vkr_encode(const struct vkr_message *message, uint8_t bytes[VKR_MESSAGE]);

/* ----------------------------------------------------------------------------------- connection */

enum vkr_state { VKR_CONNECTING, VKR_OPEN, VKR_CLOSING, VKR_CLOSED, VKR_FAILED };
enum vkr_blame { VKR_NOBODY, VKR_INVALID_MESSAGE, VKR_PEER_MISBEHAVED, VKR_PEER_INCOMPATIBLE, VKR_TRANSPORT };
enum vkr_failure { VKR_TOO_LONG, VKR_REFUSED, VKR_NO_RECEIVE, VKR_FLUSHED, VKR_OTHER_FAILURE };

struct vkr_region {
    uint64_t address;
    uint32_t rkey;
};

/* A time of 0 is no limit. */
struct vkr_settings {
    bool server, negotiate;
    unsigned windows;                         /* 1 or 2, each `window` bytes long */
    uint32_t window, window_limit;            /* ours; the longest that the peer may have */
    struct vkr_region region[2];
    uint32_t send_buffer;                     /* bytes, a ring */
    uint32_t send_depth;                      /* work requests under way, at most VKR_MOST_REQUESTS */
    uint32_t peer_receives;
    uint64_t features;
    uint64_t keepalive, silence, stall;       /* ms */
};

struct vkr_machine {
    struct vkr_settings set;
    enum vkr_state state;
    enum vkr_blame blame;
    bool disconnect, flushed;

    /* Our windows (section 5): the region being filled, and what is unread of the other one. */
    unsigned filling;
    uint32_t received, read, drained;
    bool announced, draining;

    /* The peer's window. */
    bool has_window;
    struct vkr_message window;
    uint32_t used;

    /* Bytes of the stream since its beginning: taken from the application, posted, acknowledged. */
    uint64_t written, posted, done;

    /* Work requests in flight, oldest first. All ask for a completion. */
    struct request {
        uint64_t bytes, sent;                 /* the counts after it */
        bool keepalive;
    } request[VKR_MOST_REQUESTS];
    uint64_t requested, completed;

    /* Notifications (section 8): posted; of these, known to be handled; of these, known without
     * completions. */
    uint64_t sent, handled, shown;
    uint64_t filled, registered, asked;       /* marks, 0 if there is none; `asked` is one more than what it proves */
    bool patient;

    /* Features (section 9). */
    enum { VKR_NOT_ASKED, VKR_TO_ASK, VKR_ASKED, VKR_TO_CHOOSE, VKR_CHOSEN } negotiation;
    uint64_t chosen;
    uint16_t answer[VKR_MOST_ANSWERS];
    unsigned first_answer, answers;

    /* Time. */
    enum vkr_wait { VKR_NOTHING, VKR_FIRST_WINDOW, VKR_NEXT_WINDOW, VKR_RECEIVES } waits_for;
    uint64_t waits_since, heard, keepalive_at, keepalive_since, close_by;
    bool keepalive_due, keepalive_under_way;
};

struct vkr_action {
    enum { VKR_SEND, VKR_WRITE, VKR_DISCONNECT } what;
    uint8_t message[VKR_MESSAGE];             /* VKR_SEND */
    uint32_t offset, length;                  /* VKR_WRITE: bytes of the send buffer; an empty one has no address */
    uint64_t address;
    uint32_t rkey, immediate;
    bool has_immediate;
};

void vkr_start(struct vkr_machine *m, const struct vkr_settings *settings);

/* What happened. */
void vkr_established(struct vkr_machine *m, uint64_t now, unsigned peer_rnr_retry_count);
void vkr_received(struct vkr_machine *m, uint64_t now, const uint8_t *bytes, size_t length);
void vkr_immediate(struct vkr_machine *m, uint64_t now, uint32_t value);
void vkr_completed(struct vkr_machine *m);    /* the oldest request that is under way */
void vkr_failed(struct vkr_machine *m, enum vkr_failure failure);
void vkr_disconnected(struct vkr_machine *m); /* after all completions that are there */
void vkr_tick(struct vkr_machine *m, uint64_t now);
uint64_t vkr_due(const struct vkr_machine *m); /* when to call vkr_tick at the latest; UINT64_MAX: never */

/* The application's calls. It puts bytes at the offset that vkr_space() returns, then calls
 * vkr_wrote(). */
uint32_t vkr_space(const struct vkr_machine *m, uint32_t *offset);
void vkr_wrote(struct vkr_machine *m, uint32_t length);
uint32_t vkr_readable(const struct vkr_machine *m, unsigned *region, uint32_t *offset);
void vkr_consumed(struct vkr_machine *m, uint32_t length);
uint64_t vkr_unread(const struct vkr_machine *m);
void vkr_close(struct vkr_machine *m, uint64_t now, uint64_t within);

/* The next thing to do, in order; false when there is nothing. */
bool vkr_next(struct vkr_machine *m, uint64_t now, struct vkr_action *action);

#endif
