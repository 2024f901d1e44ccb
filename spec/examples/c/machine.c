#include "machine.h"

#include <string.h>

/* How long a Keepalive may be in flight while nothing arrives from the peer (VR-KEEP-006). */
static const uint64_t UNACKNOWLEDGED = 120000;
static const uint64_t NEVER = UINT64_MAX;

static uint64_t least(uint64_t one, uint64_t other) { return one < other ? one : other; }
static uint64_t most(uint64_t one, uint64_t other) { return one > other ? one : other; }

/* ----------------------------------------------------------------- control messages (section 4) */

static uint64_t get(const uint8_t *from, int bytes) {
    uint64_t value = 0;
    while (bytes-- > 0) value = value << 8 | *from++;
    return value;
}

static void put(uint8_t *to, int bytes, uint64_t value) {
    while (bytes-- > 0) {
        to[bytes] = (uint8_t)value;
        value >>= 8;
    }
}

const char *vkr_decode(const uint8_t *bytes, size_t length, struct vkr_message *message) {
    memset(message, 0, sizeof *message);
    if (length != VKR_MESSAGE) return "length"; /* VR-CTRL-011 */
    message->kind = (unsigned)get(bytes, 2);
    if (message->kind >= VKR_KINDS) return "opcode"; /* VR-CTRL-012 */
    if (message->kind == VKR_REGISTER_XFER_MEMORY) {
        message->address = get(bytes + 16, 8);
        message->length = (uint32_t)get(bytes + 24, 4);
        message->rkey = (uint32_t)get(bytes + 28, 4);
    } else if (message->kind != VKR_KEEPALIVE) {
        message->select = (uint16_t)get(bytes + 2, 2);
        message->features = get(bytes + 24, 8);
    }
    return NULL;
}

void vkr_encode(const struct vkr_message *message, uint8_t bytes[VKR_MESSAGE]) {
    memset(bytes, 0, VKR_MESSAGE); /* VR-CTRL-005 */
    put(bytes, 2, message->kind);
    if (message->kind == VKR_REGISTER_XFER_MEMORY) {
        put(bytes + 16, 8, message->address);
        put(bytes + 24, 4, message->length);
        put(bytes + 28, 4, message->rkey);
    } else if (message->kind != VKR_KEEPALIVE) {
        put(bytes + 2, 2, message->select);
        put(bytes + 24, 8, message->features);
    }
}

/* ---------------------------------------------------------------- beginning and end (3, 11, 12) */

void vkr_start(struct vkr_machine *m, const struct vkr_settings *settings) {
    memset(m, 0, sizeof *m);
    m->set = *settings;
    m->negotiation = settings->negotiate && !settings->server ? VKR_TO_ASK : VKR_NOT_ASKED;
    m->keepalive_at = m->close_by = NEVER;
}

static bool over(const struct vkr_machine *m) { return m->state == VKR_CLOSED || m->state == VKR_FAILED; }

/* The first error stays (VR-CLOSE-006), and is answered by a disconnect at once (VR-CLOSE-007). */
static void fail(struct vkr_machine *m, enum vkr_blame blame) {
    if (over(m)) return;
    m->state = VKR_FAILED;
    m->blame = blame;
    m->disconnect = true;
}

static void end(struct vkr_machine *m) {
    m->state = VKR_CLOSED;
    m->disconnect = true;
}

void vkr_established(struct vkr_machine *m, uint64_t now, unsigned peer_rnr_retry_count) {
    if (m->state != VKR_CONNECTING) return;
    m->state = m->close_by == NEVER ? VKR_OPEN : VKR_CLOSING;
    m->patient = peer_rnr_retry_count == 7 || m->set.server; /* VR-FLOW-015 */
    m->heard = now;
    if (m->set.keepalive > 0) m->keepalive_at = now + m->set.keepalive;
}

void vkr_failed(struct vkr_machine *m, enum vkr_failure failure) {
    static const enum vkr_blame BLAME[] = {VKR_INVALID_MESSAGE, VKR_PEER_MISBEHAVED, VKR_PEER_MISBEHAVED, VKR_TRANSPORT,
                                           VKR_TRANSPORT};
    if (m->flushed && failure != VKR_FLUSHED) { /* VR-CLOSE-008: the cause of what was flushed */
        m->flushed = false;
        m->blame = BLAME[failure];
    } else if (!over(m)) {
        m->flushed = failure == VKR_FLUSHED;
        fail(m, BLAME[failure]);
    }
}

void vkr_disconnected(struct vkr_machine *m) {
    if (m->state == VKR_CONNECTING) fail(m, VKR_TRANSPORT);
    else if (!over(m)) end(m); /* VR-CLOSE-005 */
}

void vkr_close(struct vkr_machine *m, uint64_t now, uint64_t within) {
    if (over(m) || m->close_by != NEVER) return;
    if (m->state == VKR_CONNECTING && m->written == 0) {
        end(m);
    } else {
        if (m->state == VKR_OPEN) m->state = VKR_CLOSING; /* else once there is a connection (VR-CLOSE-001) */
        m->close_by = now + within;
    }
}

/* ---------------------------------------------------------------------------- notifications (8) */

enum kept { FOR_QUESTION = 0, FOR_REGISTRATION = 1, FOR_ANYTHING_ELSE = 2 };

/* Whether a notification finds a receive, and enough receives stay for messages that must not wait
 * behind it (VR-FLOW-005, VR-FLOW-009). */
static bool may_notify(const struct vkr_machine *m, enum kept kept) {
    uint64_t keep = (uint64_t)kept;
    /* No place for a question if an answer will give credits back, or if none can be asked. */
    if (kept == FOR_REGISTRATION && (m->asked > m->handled + 1 || m->set.peer_receives < 3)) keep = 0;
    if (kept == FOR_ANYTHING_ELSE && m->set.peer_receives <= 3) keep = 1; /* section 8: three receives are enough */
    return m->sent - m->handled + keep < m->set.peer_receives;
}

static bool has_request(const struct vkr_machine *m, uint64_t kept) {
    return m->requested - m->completed + kept < m->set.send_depth; /* VR-FLOW-011 */
}

static void handled(struct vkr_machine *m, uint64_t mark) {
    if (mark <= m->handled) return;
    m->handled = mark;
    if (m->waits_for == VKR_RECEIVES) m->waits_for = VKR_NOTHING;
}

static void shown(struct vkr_machine *m, uint64_t mark) {
    m->shown = most(m->shown, mark);
    handled(m, mark);
}

/* For keepalives: a peer that sends has handled what its device had acknowledged (section 10). */
static void hear(struct vkr_machine *m, uint64_t now) {
    m->heard = now;
    m->shown = m->handled;
}

static bool should_ask(const struct vkr_machine *m) {
    return !m->patient && m->asked == 0 && m->set.peer_receives >= 3 &&
           2 * (m->sent - m->handled) >= m->set.peer_receives;
}

/* ----------------------------------------------------------------------- what arrives (5, 7, 9) */

static void take_window(struct vkr_machine *m, const struct vkr_message *window) {
    if (m->has_window && m->used < m->window.length) {
        fail(m, VKR_PEER_MISBEHAVED); /* VR-MEM-017 */
    } else if (window->length > m->set.window_limit) {
        fail(m, VKR_PEER_INCOMPATIBLE); /* VR-MEM-005 */
    } else if (window->length == 0 || window->address > UINT64_MAX - window->length) {
        fail(m, VKR_PEER_MISBEHAVED); /* VR-MEM-006, VR-MEM-007 */
    } else {
        m->window = *window;
        m->has_window = true;
        m->used = 0;
        m->waits_for = VKR_NOTHING;
        shown(m, m->filled);
        m->filled = 0;
    }
}

static void take_question_or_answer(struct vkr_machine *m, const struct vkr_message *message) {
    if (m->set.server && m->answers < VKR_MOST_ANSWERS) {
        m->answer[(m->first_answer + m->answers++) % VKR_MOST_ANSWERS] = message->select;
    } else if (m->set.server || m->asked == 0 || message->select != 0) { /* every question has select 0 */
        fail(m, VKR_PEER_MISBEHAVED); /* VR-FEAT-007, VR-FEAT-014 */
    } else {
        shown(m, m->asked - 1);
        m->asked = 0;
        if (m->negotiation == VKR_ASKED) {
            m->negotiation = VKR_TO_CHOOSE;
            m->chosen = message->features & m->set.features; /* VR-FEAT-010 */
        }
    }
}

void vkr_received(struct vkr_machine *m, uint64_t now, const uint8_t *bytes, size_t length) {
    struct vkr_message message;
    if (over(m)) return;
    hear(m, now);
    if (vkr_decode(bytes, length, &message) != NULL) {
        fail(m, VKR_INVALID_MESSAGE);
    } else if (message.kind == VKR_REGISTER_XFER_MEMORY) {
        take_window(m, &message);
    } else if (message.kind == VKR_GET_SERVER_FEATURE) {
        take_question_or_answer(m, &message);
    } else if (message.kind == VKR_SET_CLIENT_FEATURE && !m->set.server) {
        fail(m, VKR_PEER_MISBEHAVED); /* VR-FEAT-014 */
    }
}

/* Goes on to the next window once this one is full and its memory free (VR-MEM-010, VR-MEM-003). */
static void rotate(struct vkr_machine *m) {
    bool is_read = m->read == m->set.window;
    if (m->received < m->set.window || m->draining || (m->set.windows == 1 && !is_read)) return;
    if (m->set.windows == 2) {
        m->draining = !is_read;
        m->drained = m->read;
        m->filling ^= 1;
    }
    m->received = m->read = 0;
    m->announced = false;
}

void vkr_immediate(struct vkr_machine *m, uint64_t now, uint32_t value) {
    if (over(m)) return;
    hear(m, now);
    if (value == 0) return; /* VR-XFER-005 */
    if (!m->announced || value > m->set.window - m->received) {
        fail(m, VKR_PEER_MISBEHAVED); /* VR-FLOW-003, VR-FLOW-002 */
        return;
    }
    m->received += value;
    shown(m, m->registered);
    m->registered = 0;
    rotate(m);
}

uint32_t vkr_readable(const struct vkr_machine *m, unsigned *region, uint32_t *offset) {
    *region = m->draining ? m->filling ^ 1 : m->filling;
    *offset = m->draining ? m->drained : m->read;
    return (m->draining ? m->set.window : m->received) - *offset;
}

uint64_t vkr_unread(const struct vkr_machine *m) {
    return (uint64_t)(m->received - m->read) + (m->draining ? m->set.window - m->drained : 0);
}

void vkr_consumed(struct vkr_machine *m, uint32_t length) {
    if (m->draining) {
        m->drained += length;
        m->draining = m->drained < m->set.window;
    } else {
        m->read += length;
    }
    rotate(m);
}

/* ---------------------------------------------------------------------------------- sending (6) */

uint32_t vkr_space(const struct vkr_machine *m, uint32_t *offset) {
    uint64_t free = m->set.send_buffer - (m->written - m->done); /* VR-XFER-011 */
    *offset = (uint32_t)(m->written % m->set.send_buffer);
    if (over(m) || m->close_by != NEVER) return 0; /* section 11 */
    return (uint32_t)least(free, m->set.send_buffer - *offset);
}

void vkr_wrote(struct vkr_machine *m, uint32_t length) { m->written += length; }

void vkr_completed(struct vkr_machine *m) {
    struct request *request;
    if (m->completed == m->requested) return;
    request = &m->request[m->completed++ % VKR_MOST_REQUESTS];
    m->done = request->bytes;
    if (request->keepalive) m->keepalive_under_way = false;
    if (m->patient) handled(m, request->sent);
}

static void book(struct vkr_machine *m, uint32_t bytes, bool notifies, bool keepalive) {
    struct request *request = &m->request[m->requested++ % VKR_MOST_REQUESTS];
    m->posted += bytes;
    m->sent += notifies;
    request->bytes = m->posted;
    request->sent = m->sent;
    request->keepalive = keepalive;
}

static bool send_message(struct vkr_machine *m, const struct vkr_message *message, struct vkr_action *action) {
    action->what = VKR_SEND;
    vkr_encode(message, action->message);
    book(m, 0, true, message->kind == VKR_KEEPALIVE);
    return true;
}

static bool send_registration(struct vkr_machine *m, struct vkr_action *action) {
    struct vkr_message message = {0};
    message.kind = VKR_REGISTER_XFER_MEMORY;
    message.address = m->set.region[m->filling].address;
    message.rkey = m->set.region[m->filling].rkey;
    message.length = m->set.window; /* VR-MEM-008 */
    m->announced = true;
    send_message(m, &message, action);
    m->registered = m->sent;
    return true;
}

static bool send_feature(struct vkr_machine *m, unsigned kind, uint16_t select, uint64_t features, struct vkr_action *action) {
    struct vkr_message message = {0};
    message.kind = kind;
    message.select = select;
    message.features = features;
    return send_message(m, &message, action);
}

static bool send_keepalive(struct vkr_machine *m, uint64_t now, struct vkr_action *action) {
    struct vkr_message message = {0};
    m->keepalive_due = false;
    m->keepalive_under_way = true;
    m->keepalive_since = now;
    /* If the peer may have no receive left, an empty WRITE asks its device (VR-KEEP-004,
     * VR-KEEP-006). */
    if (may_notify(m, FOR_ANYTHING_ELSE) && m->sent - m->shown + 1 < m->set.peer_receives) {
        message.kind = VKR_KEEPALIVE;
        return send_message(m, &message, action);
    }
    action->what = VKR_WRITE;
    book(m, 0, false, true);
    return true;
}

static bool next_message(struct vkr_machine *m, uint64_t now, struct vkr_action *action) {
    if (!has_request(m, 0)) return false;
    if (!m->announced && may_notify(m, FOR_REGISTRATION)) return send_registration(m, action); /* VR-MEM-001 */
    if ((m->negotiation == VKR_TO_ASK || should_ask(m)) && may_notify(m, FOR_QUESTION)) {
        if (m->negotiation == VKR_TO_ASK) m->negotiation = VKR_ASKED;
        send_feature(m, VKR_GET_SERVER_FEATURE, 0, 0, action);
        m->asked = m->sent; /* it proves what was before it */
        return true;
    }
    if (m->keepalive_due && !m->keepalive_under_way) return send_keepalive(m, now, action);
    if (!may_notify(m, FOR_ANYTHING_ELSE)) return false;
    if (m->answers > 0) {
        uint16_t select = m->answer[m->first_answer];
        m->first_answer = (m->first_answer + 1) % VKR_MOST_ANSWERS;
        m->answers--;
        return send_feature(m, VKR_GET_SERVER_FEATURE, select, m->set.features, action); /* VR-FEAT-002 */
    }
    if (m->negotiation == VKR_TO_CHOOSE) {
        m->negotiation = VKR_CHOSEN;
        return send_feature(m, VKR_SET_CLIENT_FEATURE, 0, m->chosen, action);
    }
    return false;
}

static bool next_write(struct vkr_machine *m, struct vkr_action *action) {
    uint64_t room = m->has_window ? m->window.length - m->used : 0; /* VR-FLOW-004, VR-FLOW-007 */
    uint64_t length = least(m->written - m->posted, room);
    uint64_t kept = least(m->set.send_depth / 2, 2); /* VR-FLOW-009 */
    if (length == 0 || !has_request(m, kept) || !may_notify(m, FOR_ANYTHING_ELSE)) return false;
    action->what = VKR_WRITE;
    action->offset = (uint32_t)(m->posted % m->set.send_buffer);
    action->length = (uint32_t)least(length, m->set.send_buffer - action->offset);
    action->address = m->window.address + m->used; /* VR-MEM-002 */
    action->rkey = m->window.rkey;
    action->has_immediate = true;
    action->immediate = action->length; /* VR-XFER-004 */
    m->used += action->length;
    book(m, action->length, true, false);
    if (m->used == m->window.length) m->filled = m->sent;
    return true;
}

/* ----------------------------------------------------------------------------------------- time */

static enum vkr_wait waits_for(const struct vkr_machine *m) {
    bool bytes = m->written > m->posted;
    if (bytes && !m->has_window) return VKR_FIRST_WINDOW;
    if (bytes && m->used == m->window.length) return VKR_NEXT_WINDOW;
    return bytes || !m->announced || m->answers > 0 ? VKR_RECEIVES : VKR_NOTHING;
}

bool vkr_next(struct vkr_machine *m, uint64_t now, struct vkr_action *action) {
    enum vkr_wait wait;
    memset(action, 0, sizeof *action);
    if (m->state == VKR_OPEN || m->state == VKR_CLOSING) {
        if (next_message(m, now, action) || next_write(m, action)) return true;
        if (m->state == VKR_CLOSING && m->done == m->written) end(m); /* VR-CLOSE-001 */
    }
    if (m->disconnect) {
        m->disconnect = false;
        action->what = VKR_DISCONNECT;
        return true;
    }
    wait = waits_for(m);
    if (wait != m->waits_for) {
        m->waits_for = wait;
        m->waits_since = now;
    }
    return false;
}

static uint64_t after(uint64_t since, uint64_t limit) { return limit > 0 ? since + limit : NEVER; }

static uint64_t silence_at(const struct vkr_machine *m) { return after(m->heard, m->set.silence); }

static uint64_t stall_at(const struct vkr_machine *m) {
    return m->waits_for == VKR_NOTHING ? NEVER : after(m->waits_since, m->set.stall);
}

static uint64_t vanished_at(const struct vkr_machine *m) {
    return m->keepalive_under_way ? most(m->keepalive_since, m->heard) + UNACKNOWLEDGED : NEVER;
}

uint64_t vkr_due(const struct vkr_machine *m) {
    uint64_t due;
    if (over(m)) return NEVER;
    if (m->state == VKR_CONNECTING) return m->close_by;
    due = least(least(silence_at(m), stall_at(m)), vanished_at(m));
    return least(due, least(m->keepalive_at, m->close_by));
}

void vkr_tick(struct vkr_machine *m, uint64_t now) {
    if (over(m) || (m->state == VKR_CONNECTING && now < m->close_by)) return;
    if (now >= m->close_by || now >= vanished_at(m)) {
        fail(m, VKR_TRANSPORT); /* VR-CLOSE-004, VR-KEEP-006 */
    } else if (now >= silence_at(m) || now >= stall_at(m)) {
        fail(m, VKR_PEER_MISBEHAVED); /* VR-KEEP-005, VR-RES-004, VR-RES-005 */
    } else if (now >= m->keepalive_at) {
        m->keepalive_at = now + m->set.keepalive;
        m->keepalive_due = !m->keepalive_under_way; /* VR-KEEP-004 */
    }
}
