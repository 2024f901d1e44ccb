/*
 * A minimal consumer of the test vectors in C99: control messages, windows, immediates, and answers to feature questions,
 * written from the specification alone. It speaks the protocol of ../../README.md on standard input and output.
 *
 *     make && valkey-rdma-conformance vectors check --shim spec/vectors/consumers/c/consumer
 *
 * What it lacks it skips and says so: SKIPS below.
 */
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGE = 32, LINE = 4096, ANSWERS = 1024 };
enum { GET_SERVER_FEATURE, SET_CLIENT_FEATURE, KEEPALIVE, REGISTER_XFER_MEMORY, KINDS };

static const char *const KIND[KINDS] = {"GetServerFeature", "SetClientFeature", "Keepalive", "RegisterXferMemory"};

static const char *const SKIPS[][2] = {
    {"second-window", "one receive region"},        {"negotiation", "asks for no features"},
    {"keepalive", "sends no keepalives"},           {"credits", "does not count the peer's receives"},
    {"silence-limit", "has no clock"},              {"stall-limit", "has no clock"},
    {"graceful-close", "does not wait for last bytes"},
};

/* ------------------------------------------------------------------------------------------- control messages */

struct message {
    unsigned kind;
    uint16_t select;
    uint64_t features, address;
    uint32_t length, rkey;
};

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

/* NULL, or why the bytes are no message. */
static const char *decode(const uint8_t *bytes, size_t length, struct message *message) {
    memset(message, 0, sizeof *message);
    if (length != MESSAGE) return "length";
    message->kind = (unsigned)get(bytes, 2);
    switch (message->kind) {
    case GET_SERVER_FEATURE:
    case SET_CLIENT_FEATURE:
        message->select = (uint16_t)get(bytes + 2, 2);
        message->features = get(bytes + 24, 8);
        return NULL;
    case KEEPALIVE: return NULL;
    case REGISTER_XFER_MEMORY:
        message->address = get(bytes + 16, 8);
        message->length = (uint32_t)get(bytes + 24, 4);
        message->rkey = (uint32_t)get(bytes + 28, 4);
        return NULL;
    default: return "opcode";
    }
}

static void encode(const struct message *message, uint8_t *bytes) {
    memset(bytes, 0, MESSAGE);
    put(bytes, 2, message->kind);
    if (message->kind == REGISTER_XFER_MEMORY) {
        put(bytes + 16, 8, message->address);
        put(bytes + 24, 4, message->length);
        put(bytes + 28, 4, message->rkey);
    } else if (message->kind != KEEPALIVE) {
        put(bytes + 2, 2, message->select);
        put(bytes + 24, 8, message->features);
    }
}

/* ---------------------------------------------------------------------- lines: flat JSON objects, nothing nested */

static void fail(const char *what, const char *where) {
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
    if (length >= size) fail("a value is too long", line);
    memcpy(value, at, length);
    value[length] = '\0';
    return true;
}

static uint64_t number(const char *line, const char *name) {
    char value[64];
    if (!field(line, name, value, sizeof value)) fail(name, line);
    return strtoull(value, NULL, 0); /* 0x… and decimal */
}

static size_t bytes_of(const char *line, uint8_t *bytes, size_t size) {
    char text[LINE];
    size_t i, length;
    if (!field(line, "hex", text, sizeof text)) fail("hex", line);
    length = strlen(text) / 2;
    if (length > size) fail("too many bytes", line);
    for (i = 0; i < length; i++) {
        unsigned byte;
        if (sscanf(text + 2 * i, "%2x", &byte) != 1) fail("hex", line);
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

static void reply_hex(const char *is, const struct message *message) {
    uint8_t bytes[MESSAGE];
    int i;
    encode(message, bytes);
    printf("{\"is\":\"%s\",\"hex\":\"", is);
    for (i = 0; i < MESSAGE; i++) printf("%02x", bytes[i]);
    reply("\"}");
}

/* ------------------------------------------------------------------------------------------------- connection */

static struct {
    enum { CONNECTING, OPEN, CLOSED, FAILED } state;
    const char *blame;
    bool flushed; /* failed by a flush, whose cause may still come */
    bool server;
    /* Our window: received bytes, bytes read of them. */
    struct message region;
    bool announced;
    uint32_t received, read;
    /* The peer's window, and how much of it was written. */
    bool has_window;
    struct message window;
    uint32_t used, window_limit;
    uint64_t unsent;
    /* Send requests not completed. */
    uint32_t posted, depth;
    /* Answers that wait. */
    uint16_t answers[ANSWERS];
    unsigned waiting;
    uint64_t features;
} c;

static bool over(void) { return c.state == CLOSED || c.state == FAILED; }

static void breach(const char *blame) {
    if (!over()) {
        c.state = FAILED;
        c.blame = blame;
        reply("{\"is\":\"disconnect\"}");
    }
}

static void take_window(const struct message *window) {
    if (c.has_window && c.used < c.window.length) {
        breach("peer-misbehaved"); /* the old one has room: bytes under way could be in either */
    } else if (window->length > c.window_limit) {
        breach("peer-incompatible");
    } else if (window->length == 0 || window->address > UINT64_MAX - window->length) {
        breach("peer-misbehaved");
    } else {
        c.window = *window;
        c.has_window = true;
        c.used = 0;
    }
}

static void take_message(const uint8_t *bytes, size_t length) {
    struct message message;
    if (decode(bytes, length, &message) != NULL) {
        breach("invalid-message");
    } else if (message.kind == REGISTER_XFER_MEMORY) {
        take_window(&message);
    } else if (message.kind == GET_SERVER_FEATURE && c.server && c.waiting < ANSWERS) {
        c.answers[c.waiting++] = message.select;
    } else if (message.kind == GET_SERVER_FEATURE || (message.kind == SET_CLIENT_FEATURE && !c.server)) {
        breach("peer-misbehaved");
    }
}

static void take_immediate(uint32_t value) {
    if (value == 0) return;
    if (!c.announced || value > c.region.length - c.received) {
        breach("peer-misbehaved");
    } else {
        c.received += value;
    }
}

static void take_read(uint64_t length) {
    uint32_t unread = c.received - c.read;
    c.read += length < unread ? (uint32_t)length : unread;
    if (c.read == c.region.length) {
        c.received = c.read = 0;
        c.announced = false;
    }
}

static void take_failure(const char *status) {
    const char *blame = "transport";
    if (strcmp(status, "LOC_LEN_ERR") == 0) blame = "invalid-message";
    if (strcmp(status, "REM_ACCESS_ERR") == 0 || strcmp(status, "RNR_RETRY_EXC_ERR") == 0) blame = "peer-misbehaved";
    if (c.flushed) c.blame = blame;
    c.flushed = !over() && strcmp(status, "WR_FLUSH_ERR") == 0;
    breach(blame);
}

static void send_message(const struct message *message) {
    reply_hex("send", message);
    c.posted++;
}

/* Everything that can be done now. Payload leaves half of a short queue to messages. */
static void act(void) {
    uint32_t reserve = c.depth / 2 < 4 ? c.depth / 2 : 4;
    if (c.state != OPEN) return;
    if (!c.announced && c.posted < c.depth) {
        send_message(&c.region);
        c.announced = true;
    }
    while (c.waiting > 0 && c.posted < c.depth) {
        struct message answer = {0};
        answer.select = c.answers[0];
        answer.features = c.features;
        memmove(c.answers, c.answers + 1, --c.waiting * sizeof *c.answers);
        send_message(&answer);
    }
    if (c.has_window && c.unsent > 0 && c.used < c.window.length && c.posted + reserve < c.depth) {
        uint32_t room = c.window.length - c.used;
        uint32_t length = c.unsent < room ? (uint32_t)c.unsent : room;
        reply("{\"is\":\"write\",\"address\":\"0x%llx\",\"rkey\":\"0x%lx\",\"length\":%lu,\"immediate\":%lu}",
              (unsigned long long)(c.window.address + c.used), (unsigned long)c.window.rkey, (unsigned long)length,
              (unsigned long)length);
        c.used += length;
        c.unsent -= length;
        c.posted++;
    }
}

static void where_it_stands(void) {
    static const char *const STATE[] = {"connecting", "open", "closed", "failed"};
    printf("{\"is\":\"ok\",\"state\":\"%s\",\"unread\":%lu,\"unsent\":%llu", STATE[c.state],
           (unsigned long)(c.received - c.read), (unsigned long long)c.unsent);
    if (c.blame != NULL) printf(",\"blame\":\"%s\"", c.blame);
    reply("}");
}

static void start(const char *line) {
    char needs[256], role[16];
    size_t i;
    if (!field(line, "needs", needs, sizeof needs) || !field(line, "role", role, sizeof role)) fail("start", line);
    for (i = 0; i < sizeof SKIPS / sizeof *SKIPS; i++) {
        if (strstr(needs, SKIPS[i][0]) != NULL) {
            reply("{\"is\":\"skip\",\"reason\":\"%s\"}", SKIPS[i][1]);
            return;
        }
    }
    memset(&c, 0, sizeof c);
    c.server = strcmp(role, "server") == 0;
    c.region.kind = REGISTER_XFER_MEMORY;
    c.region.address = number(line, "address");
    c.region.rkey = (uint32_t)number(line, "rkey");
    c.region.length = (uint32_t)number(line, "window");
    c.window_limit = (uint32_t)number(line, "window_limit");
    c.depth = (uint32_t)number(line, "send_depth");
    c.features = number(line, "features");
    where_it_stands();
}

static void event(const char *what, const char *line) {
    uint8_t bytes[LINE];
    char status[64];
    bool is_read = strcmp(what, "read") == 0, is_failure = strcmp(what, "failed") == 0;
    if (is_read) {
        take_read(number(line, "length"));
    } else if (is_failure && field(line, "status", status, sizeof status)) {
        take_failure(status);
    } else if (!over()) {
        if (strcmp(what, "established") == 0) {
            c.state = OPEN;
        } else if (strcmp(what, "receive") == 0) {
            size_t length = bytes_of(line, bytes, sizeof bytes);
            take_message(bytes, length);
        } else if (strcmp(what, "immediate") == 0) {
            take_immediate((uint32_t)number(line, "value"));
        } else if (strcmp(what, "write") == 0) {
            c.unsent += number(line, "length");
        } else if (strcmp(what, "acknowledged") == 0) {
            c.posted = 0;
        } else if (strcmp(what, "disconnected") == 0 && c.state == CONNECTING) {
            breach("transport");
        } else if (strcmp(what, "disconnected") == 0) {
            c.state = CLOSED;
            reply("{\"is\":\"disconnect\"}");
        }
        /* Time means nothing here: "advance". */
    }
    act();
    where_it_stands();
}

static void answer(const char *line) {
    struct message message;
    uint8_t bytes[LINE];
    char text[64];
    const char *wrong;
    if (!field(line, "do", text, sizeof text)) fail("not a request", line);
    if (strcmp(text, "hello") == 0) {
        reply("{\"is\":\"hello\",\"name\":\"c-consumer\",\"version\":\"1\",\"protocol\":1}");
    } else if (strcmp(text, "decode") == 0) {
        size_t length = bytes_of(line, bytes, sizeof bytes);
        wrong = decode(bytes, length, &message);
        if (wrong != NULL) {
            reply("{\"is\":\"invalid\",\"reason\":\"%s\"}", wrong);
            return;
        }
        printf("{\"is\":\"message\",\"kind\":\"%s\"", KIND[message.kind]);
        if (message.kind == REGISTER_XFER_MEMORY) {
            printf(",\"address\":\"0x%llx\",\"length\":%lu,\"rkey\":\"0x%lx\"", (unsigned long long)message.address,
                   (unsigned long)message.length, (unsigned long)message.rkey);
        } else if (message.kind != KEEPALIVE) {
            printf(",\"select\":%u,\"features\":\"0x%llx\"", message.select, (unsigned long long)message.features);
        }
        reply("}");
    } else if (strcmp(text, "encode") == 0) {
        memset(&message, 0, sizeof message);
        if (!field(line, "kind", text, sizeof text)) fail("kind", line);
        while (message.kind < KINDS && strcmp(text, KIND[message.kind]) != 0) message.kind++;
        if (message.kind == KINDS) fail("kind", line);
        if (message.kind == REGISTER_XFER_MEMORY) {
            message.address = number(line, "address");
            message.length = (uint32_t)number(line, "length");
            message.rkey = (uint32_t)number(line, "rkey");
        } else if (message.kind != KEEPALIVE) {
            message.select = (uint16_t)number(line, "select");
            message.features = number(line, "features");
        }
        reply_hex("bytes", &message);
    } else if (strcmp(text, "start") == 0) {
        start(line);
    } else {
        event(text, line);
    }
}

int main(void) {
    static char line[LINE];
    while (fgets(line, sizeof line, stdin) != NULL) {
        answer(line);
        fflush(stdout);
    }
    return 0;
}
