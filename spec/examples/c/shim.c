/*
 * The machine behind the protocol of ../../vectors/README.md, on standard input and output.
 *
 *     ./check && valkey-rdma-conformance vectors check --shim target/shim
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

enum { LINE = 4096 };

static const char *const KIND[VKR_KINDS] = {"GetServerFeature", "SetClientFeature", "Keepalive", "RegisterXferMemory"};
static const char *const STATE[] = {"connecting", "open", "closing", "closed", "failed"};
static const char *const BLAME[] = {NULL, "invalid-message", "peer-misbehaved", "peer-incompatible", "transport"};

/* ----------------------------------------------------- lines: flat JSON objects, nothing nested */

static void stop(const char *what, const char *where) {
    fprintf(stderr, "%s: %s\n", what, where);
    exit(1);
}

/* The value of a field as text, without quotes; false if the line has no such field. */
static bool field(const char *line, const char *name, char *value, size_t size) {
    char key[64];
    const char *at;
    size_t length;
    snprintf(key, sizeof key, "\"%s\":", name);
    at = strstr(line, key);
    if (at == NULL) return false;
    at += strlen(key);
    while (*at == ' ') at++;
    if (*at == '"') {
        at++;
        length = strcspn(at, "\"");
    } else {
        length = strcspn(at, ",} ");
    }
    if (length >= size) stop("a value is too long", line);
    memcpy(value, at, length);
    value[length] = '\0';
    return true;
}

static const char *text(const char *line, const char *name) {
    static char value[LINE];
    if (!field(line, name, value, sizeof value)) stop(name, line);
    return value;
}

static uint64_t number(const char *line, const char *name) { return strtoull(text(line, name), NULL, 0); }

static size_t bytes_of(const char *line, uint8_t *bytes, size_t size) {
    const char *digits = text(line, "hex");
    size_t i, length = strlen(digits) / 2;
    if (length > size) stop("too many bytes", line);
    for (i = 0; i < length; i++) {
        unsigned byte;
        if (sscanf(digits + 2 * i, "%2x", &byte) != 1) stop("hex", line);
        bytes[i] = (uint8_t)byte;
    }
    return length;
}

static void reply(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vprintf(format, values);
    va_end(values);
    putchar('\n');
}

static void reply_hex(const char *is, const uint8_t *bytes) {
    int i;
    printf("{\"is\":\"%s\",\"hex\":\"", is);
    for (i = 0; i < VKR_MESSAGE; i++) printf("%02x", bytes[i]);
    reply("\"}");
}

/* ----------------------------------------------------------------------------- control messages */

static void decode(const char *line) {
    struct vkr_message message;
    uint8_t bytes[LINE];
    size_t length = bytes_of(line, bytes, sizeof bytes);
    const char *wrong = vkr_decode(bytes, length, &message);
    if (wrong != NULL) {
        reply("{\"is\":\"invalid\",\"reason\":\"%s\"}", wrong);
        return;
    }
    printf("{\"is\":\"message\",\"kind\":\"%s\"", KIND[message.kind]);
    if (message.kind == VKR_REGISTER_XFER_MEMORY) {
        printf(",\"address\":\"0x%llx\",\"length\":%lu,\"rkey\":\"0x%lx\"", (unsigned long long)message.address,
               (unsigned long)message.length, (unsigned long)message.rkey);
    } else if (message.kind != VKR_KEEPALIVE) {
        printf(",\"select\":%u,\"features\":\"0x%llx\"", message.select, (unsigned long long)message.features);
    }
    reply("}");
}

static void encode(const char *line) {
    struct vkr_message message = {0};
    uint8_t bytes[VKR_MESSAGE];
    const char *kind = text(line, "kind");
    while (message.kind < VKR_KINDS && strcmp(kind, KIND[message.kind]) != 0) message.kind++;
    if (message.kind == VKR_KINDS) stop("kind", line);
    if (message.kind == VKR_REGISTER_XFER_MEMORY) {
        message.address = number(line, "address");
        message.length = (uint32_t)number(line, "length");
        message.rkey = (uint32_t)number(line, "rkey");
    } else if (message.kind != VKR_KEEPALIVE) {
        message.select = (uint16_t)number(line, "select");
        message.features = number(line, "features");
    }
    vkr_encode(&message, bytes);
    reply_hex("bytes", bytes);
}

/* --------------------------------------------------------------------------------------- traces */

static struct vkr_machine m;
static uint64_t now;

static void act(void) {
    struct vkr_action action;
    while (vkr_next(&m, now, &action)) {
        if (action.what == VKR_DISCONNECT) {
            reply("{\"is\":\"disconnect\"}");
        } else if (action.what == VKR_SEND) {
            reply_hex("send", action.message);
        } else {
            printf("{\"is\":\"write\",\"address\":\"0x%llx\",\"rkey\":\"0x%lx\",\"length\":%lu", (unsigned long long)action.address,
                   (unsigned long)action.rkey, (unsigned long)action.length);
            if (action.has_immediate) printf(",\"immediate\":%lu", (unsigned long)action.immediate);
            reply("}");
        }
    }
}

static void where_it_stands(void) {
    printf("{\"is\":\"ok\",\"state\":\"%s\",\"unread\":%llu,\"unsent\":%llu", STATE[m.state], (unsigned long long)vkr_unread(&m),
           (unsigned long long)(m.written - m.posted));
    if (m.blame != VKR_NOBODY) printf(",\"blame\":\"%s\"", BLAME[m.blame]);
    reply("}");
}

static void start(const char *line) {
    struct vkr_settings set = {0};
    set.server = strcmp(text(line, "role"), "server") == 0;
    set.negotiate = strcmp(text(line, "negotiate"), "true") == 0;
    set.windows = (unsigned)number(line, "windows");
    set.window = (uint32_t)number(line, "window");
    set.window_limit = (uint32_t)number(line, "window_limit");
    set.region[0].address = number(line, "address");
    set.region[0].rkey = (uint32_t)number(line, "rkey");
    set.region[1].address = number(line, "address2");
    set.region[1].rkey = (uint32_t)number(line, "rkey2");
    set.send_buffer = (uint32_t)number(line, "send_buffer");
    set.send_depth = (uint32_t)number(line, "send_depth");
    set.peer_receives = (uint32_t)number(line, "peer_receives");
    set.features = number(line, "features");
    set.keepalive = number(line, "keepalive_ms");
    set.silence = number(line, "silence_ms");
    set.stall = number(line, "stall_ms");
    now = 0;
    vkr_start(&m, &set);
    where_it_stands();
}

static enum vkr_failure failure(const char *status) {
    if (strcmp(status, "LOC_LEN_ERR") == 0) return VKR_TOO_LONG;
    if (strcmp(status, "REM_ACCESS_ERR") == 0) return VKR_REFUSED;
    if (strcmp(status, "RNR_RETRY_EXC_ERR") == 0) return VKR_NO_RECEIVE;
    return strcmp(status, "WR_FLUSH_ERR") == 0 ? VKR_FLUSHED : VKR_OTHER_FAILURE;
}

/* What was posted before the event has completed; what the event leads to has not. */
static void acknowledge(void) {
    uint64_t requested = m.requested;
    while (m.completed < requested) vkr_completed(&m);
}

static void advance(uint64_t ms) {
    uint64_t until = now + ms;
    while (vkr_due(&m) <= until) {
        if (vkr_due(&m) > now) now = vkr_due(&m);
        vkr_tick(&m, now);
        act();
    }
    now = until;
}

/* Nothing is taken after a close or the end. */
static void write_bytes(uint64_t length, const char *line) {
    uint32_t offset;
    bool open = m.state == VKR_CONNECTING || m.state == VKR_OPEN;
    while (open && length > 0) {
        uint32_t space = vkr_space(&m, &offset);
        if (space > length) space = (uint32_t)length;
        if (space == 0) stop("the send buffer of this trace is too small for it", line);
        vkr_wrote(&m, space);
        length -= space;
    }
}

static void read_bytes(uint64_t length) {
    unsigned region;
    uint32_t offset, there;
    while (length > 0 && (there = vkr_readable(&m, &region, &offset)) > 0) {
        if (there > length) there = (uint32_t)length;
        vkr_consumed(&m, there);
        length -= there;
    }
}

static void event(const char *what, const char *line) {
    uint8_t bytes[LINE];
    if (strcmp(what, "established") == 0) {
        vkr_established(&m, now, (unsigned)number(line, "rnr_retry"));
    } else if (strcmp(what, "receive") == 0) {
        size_t length = bytes_of(line, bytes, sizeof bytes);
        vkr_received(&m, now, bytes, length);
    } else if (strcmp(what, "immediate") == 0) {
        vkr_immediate(&m, now, (uint32_t)number(line, "value"));
    } else if (strcmp(what, "write") == 0) {
        write_bytes(number(line, "length"), line);
    } else if (strcmp(what, "read") == 0) {
        read_bytes(number(line, "length"));
    } else if (strcmp(what, "acknowledged") == 0) {
        acknowledge();
    } else if (strcmp(what, "failed") == 0) {
        vkr_failed(&m, failure(text(line, "status")));
    } else if (strcmp(what, "disconnected") == 0) {
        vkr_disconnected(&m);
    } else if (strcmp(what, "advance") == 0) {
        advance(number(line, "ms"));
    } else if (strcmp(what, "close") == 0) {
        vkr_close(&m, now, number(line, "within_ms"));
    } else {
        stop("not a request", line);
    }
    act();
    where_it_stands();
}

int main(void) {
    static char line[LINE], what[64];
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (!field(line, "do", what, sizeof what)) stop("not a request", line);
        if (strcmp(what, "hello") == 0) reply("{\"is\":\"hello\",\"name\":\"c-example\",\"version\":\"1\",\"protocol\":1}");
        else if (strcmp(what, "decode") == 0) decode(line);
        else if (strcmp(what, "encode") == 0) encode(line);
        else if (strcmp(what, "start") == 0) start(line);
        else event(what, line);
        fflush(stdout);
    }
    return 0;
}
