/*
 * get and set over RDMA: the machine on librdmacm and libibverbs, with the calls of ../../verbs.md.
 *
 *     client HOST PORT get KEY
 *     client HOST PORT set KEY VALUE
 *
 * Exit status 0: done, the value on standard output. 1: no such key, or the server refuses.
 * 2: no connection, or it was lost. 64: wrong arguments.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <rdma/rdma_cma.h>

#include "machine.h"

enum {
    RECEIVES = 1024,            /* VR-RES-002 */
    REQUESTS = 64,
    WINDOW = 1 << 20,           /* VR-MEM-016 */
    SEND_BUFFER = 1 << 20,
    LIMIT = 16 << 20,           /* VR-MEM-005 */
    PATIENCE = 10000,           /* ms for each step (VR-CONN-008) */
    LINGER = 2000
};

static struct {
    struct rdma_event_channel *events;
    struct rdma_cm_id *id;
    struct ibv_pd *pd;
    struct ibv_comp_channel *completions;
    struct ibv_cq *cq;
    struct ibv_mr *windows_mr, *send_mr, *receives_mr, *messages_mr;
    uint8_t *windows, *send_buffer;
    uint8_t receives[RECEIVES][VKR_MESSAGE], messages[REQUESTS][VKR_MESSAGE];
    uint64_t posted;            /* requests */
    struct vkr_machine machine;
} c;

static void stop(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
    exit(2);
}

static void *must(void *made, const char *what) {
    if (made == NULL) stop("%s: %s", what, strerror(errno));
    return made;
}

static void done(int result, const char *what) {
    if (result != 0) stop("%s: %s", what, strerror(result > 0 ? result : errno));
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
}

/* ----------------------------------------------------------------------------------- connecting */

static void unblock(int fd) { done(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0 ? -1 : 0, "fcntl"); }

/* Waits for an event of the connection manager, and acknowledges it. */
static struct rdma_conn_param expect(enum rdma_cm_event_type expected) {
    struct pollfd fd = {0};
    struct rdma_cm_event *event;
    struct rdma_conn_param param;
    enum rdma_cm_event_type came;
    fd.fd = c.events->fd;
    fd.events = POLLIN;
    if (poll(&fd, 1, PATIENCE) <= 0) stop("no %s within %d ms", rdma_event_str(expected), PATIENCE);
    done(rdma_get_cm_event(c.events, &event), "rdma_get_cm_event");
    came = event->event;
    param = event->param.conn;
    rdma_ack_cm_event(event);
    if (came != expected) stop("%s, not %s", rdma_event_str(came), rdma_event_str(expected)); /* VR-CONN-006 */
    return param;
}

static void post_receive(unsigned number) {
    struct ibv_sge piece = {0};
    struct ibv_recv_wr request = {0}, *bad;
    piece.addr = (uintptr_t)c.receives[number];
    piece.length = VKR_MESSAGE; /* VR-CTRL-007 */
    piece.lkey = c.receives_mr->lkey;
    request.wr_id = number;
    request.sg_list = &piece;
    request.num_sge = 1;
    done(ibv_post_recv(c.id->qp, &request, &bad), "ibv_post_recv");
}

static struct ibv_mr *region(void *bytes, size_t length, int rights) {
    return must(ibv_reg_mr(c.pd, bytes, length, rights), "ibv_reg_mr");
}

static void make_queue_pair(void) {
    struct ibv_qp_init_attr attributes = {0};
    unsigned i;
    c.pd = must(ibv_alloc_pd(c.id->verbs), "ibv_alloc_pd"); /* VR-SEC-002 */
    c.completions = must(ibv_create_comp_channel(c.id->verbs), "ibv_create_comp_channel");
    unblock(c.completions->fd);
    c.cq = must(ibv_create_cq(c.id->verbs, RECEIVES + REQUESTS, NULL, c.completions, 0), "ibv_create_cq"); /* VR-RES-011 */
    done(ibv_req_notify_cq(c.cq, 0), "ibv_req_notify_cq");
    attributes.qp_type = IBV_QPT_RC; /* VR-CONN-001 */
    attributes.send_cq = attributes.recv_cq = c.cq;
    attributes.cap.max_send_wr = REQUESTS;
    attributes.cap.max_recv_wr = RECEIVES;
    attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
    done(rdma_create_qp(c.id, c.pd, &attributes), "rdma_create_qp");
    c.windows = must(calloc(2, WINDOW), "calloc");
    c.send_buffer = must(calloc(1, SEND_BUFFER), "calloc");
    c.windows_mr = region(c.windows, 2 * (size_t)WINDOW, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE); /* VR-SEC-001 */
    c.receives_mr = region(c.receives, sizeof c.receives, IBV_ACCESS_LOCAL_WRITE);
    c.send_mr = region(c.send_buffer, SEND_BUFFER, 0);
    c.messages_mr = region(c.messages, sizeof c.messages, 0);
    for (i = 0; i < RECEIVES; i++) post_receive(i); /* VR-CONN-003 */
}

static void connect_to(const char *host, const char *port) {
    struct vkr_settings settings = {0};
    struct rdma_conn_param param = {0};
    struct addrinfo hints = {0}, *address;
    int wrong;
    hints.ai_socktype = SOCK_STREAM;
    if ((wrong = getaddrinfo(host, port, &hints, &address)) != 0) stop("%s: %s", host, gai_strerror(wrong));
    c.events = rdma_create_event_channel();
    if (c.events == NULL) stop("no RDMA here: %s", strerror(errno));
    done(rdma_create_id(c.events, &c.id, NULL, RDMA_PS_TCP), "rdma_create_id"); /* VR-CONN-015 */
    done(rdma_resolve_addr(c.id, NULL, address->ai_addr, PATIENCE), "rdma_resolve_addr");
    freeaddrinfo(address);
    expect(RDMA_CM_EVENT_ADDR_RESOLVED);
    done(rdma_resolve_route(c.id, PATIENCE), "rdma_resolve_route");
    expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
    make_queue_pair();

    settings.windows = 2;
    settings.window = WINDOW;
    settings.window_limit = LIMIT;
    settings.region[0].address = (uintptr_t)c.windows;
    settings.region[1].address = (uintptr_t)c.windows + WINDOW;
    settings.region[0].rkey = settings.region[1].rkey = c.windows_mr->rkey;
    settings.send_buffer = SEND_BUFFER;
    settings.send_depth = REQUESTS;
    settings.peer_receives = RECEIVES;
    settings.stall = PATIENCE;
    vkr_start(&c.machine, &settings);

    param.responder_resources = param.initiator_depth = 1; /* VR-CONN-005 */
    param.retry_count = param.rnr_retry_count = 7;         /* VR-CONN-004 */
    done(rdma_connect(c.id, &param), "rdma_connect");
    param = expect(RDMA_CM_EVENT_ESTABLISHED);
    unblock(c.events->fd);
    vkr_established(&c.machine, now(), param.rnr_retry_count); /* what the server gave us (VR-FLOW-008) */
}

/* -------------------------------------------------------------------------------------- running */

/* Posts what the machine says, each request signalled, so that completions come one for one. */
static void post(const struct vkr_action *action) {
    struct ibv_sge piece = {0};
    struct ibv_send_wr request = {0}, *bad;
    request.wr_id = UINT64_MAX;
    request.send_flags = IBV_SEND_SIGNALED;
    request.sg_list = &piece;
    if (action->what == VKR_SEND) {
        uint8_t *slot = c.messages[c.posted % REQUESTS]; /* free: its last request has completed */
        memcpy(slot, action->message, VKR_MESSAGE);
        piece.addr = (uintptr_t)slot;
        piece.length = VKR_MESSAGE;
        piece.lkey = c.messages_mr->lkey;
        request.opcode = IBV_WR_SEND; /* VR-CTRL-001 */
    } else {
        piece.addr = (uintptr_t)(c.send_buffer + action->offset);
        piece.length = action->length;
        piece.lkey = c.send_mr->lkey;
        request.opcode = action->has_immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
        request.imm_data = htonl(action->immediate); /* VR-XFER-003 */
        request.wr.rdma.remote_addr = action->address;
        request.wr.rdma.rkey = action->rkey;
    }
    request.num_sge = piece.length > 0;
    c.posted++;
    done(ibv_post_send(c.id->qp, &request, &bad), "ibv_post_send");
}

static void act(void) {
    struct vkr_action action;
    while (vkr_next(&c.machine, now(), &action)) {
        if (action.what == VKR_DISCONNECT) rdma_disconnect(c.id);
        else post(&action);
    }
}

static enum vkr_failure failure(enum ibv_wc_status status) {
    switch (status) {
    case IBV_WC_LOC_LEN_ERR: return VKR_TOO_LONG;
    case IBV_WC_REM_ACCESS_ERR: return VKR_REFUSED;
    case IBV_WC_RNR_RETRY_EXC_ERR: return VKR_NO_RECEIVE;
    case IBV_WC_WR_FLUSH_ERR: return VKR_FLUSHED;
    default: return VKR_OTHER_FAILURE;
    }
}

static void take(const struct ibv_wc *completion) {
    struct vkr_machine *m = &c.machine;
    if (completion->status != IBV_WC_SUCCESS) { /* the other fields mean nothing */
        vkr_failed(m, failure(completion->status)); /* this program ends with either, so it does not wait for DISCONNECTED */
    } else if (completion->wr_id == UINT64_MAX) {
        vkr_completed(m);
    } else {
        unsigned number = (unsigned)completion->wr_id;
        if (completion->opcode == IBV_WC_RECV) vkr_received(m, now(), c.receives[number], completion->byte_len);
        else vkr_immediate(m, now(), ntohl(completion->imm_data)); /* IBV_WC_RECV_RDMA_WITH_IMM */
        if (m->state != VKR_FAILED && m->state != VKR_CLOSED) post_receive(number); /* VR-RES-003 */
    }
}

static void poll_completions(void) {
    struct ibv_wc completion;
    struct ibv_cq *cq;
    void *context;
    while (ibv_get_cq_event(c.completions, &cq, &context) == 0) ibv_ack_cq_events(cq, 1);
    done(ibv_req_notify_cq(c.cq, 0), "ibv_req_notify_cq"); /* arm, then poll */
    while (ibv_poll_cq(c.cq, 1, &completion) > 0) {
        take(&completion);
        act();
    }
}

static void poll_events(void) {
    struct rdma_cm_event *event;
    while (rdma_get_cm_event(c.events, &event) == 0) {
        enum rdma_cm_event_type came = event->event;
        rdma_ack_cm_event(event);
        if (came == RDMA_CM_EVENT_ADDR_CHANGE) continue; /* a hint */
        poll_completions();                              /* VR-CLOSE-002 */
        if (came == RDMA_CM_EVENT_DEVICE_REMOVAL) vkr_failed(&c.machine, VKR_OTHER_FAILURE);
        else vkr_disconnected(&c.machine); /* DISCONNECTED, REJECTED, TIMEWAIT_EXIT: the end */
    }
}

/* Sleeps until something happens, or until `deadline` has come, and deals with it. */
static void turn(uint64_t deadline) {
    struct pollfd fds[2] = {{0}, {0}};
    uint64_t time = now(), due = vkr_due(&c.machine);
    if (due > deadline) due = deadline;
    fds[0].fd = c.completions->fd;
    fds[1].fd = c.events->fd;
    fds[0].events = fds[1].events = POLLIN;
    (void)poll(fds, 2, due > time ? (int)(due - time) : 0);
    poll_completions();
    poll_events();
    vkr_tick(&c.machine, now());
    act();
}

static bool is_open(void) { return c.machine.state == VKR_OPEN || c.machine.state == VKR_CLOSING; }

/* ---------------------------------------------------------------------------------- get and set */

static void send_bytes(const char *bytes, size_t length) {
    uint64_t deadline = now() + PATIENCE;
    while (length > 0) {
        uint32_t offset, space = vkr_space(&c.machine, &offset);
        if (space > length) space = (uint32_t)length;
        memcpy(c.send_buffer + offset, bytes, space);
        vkr_wrote(&c.machine, space);
        bytes += space;
        length -= space;
        act();
        if (length > 0) turn(deadline); /* VR-FLOW-016: input is taken meanwhile */
        if (!is_open() || now() >= deadline) stop("the connection was lost while sending");
    }
}

static void send_part(const char *part) {
    char head[32];
    send_bytes(head, (size_t)snprintf(head, sizeof head, "$%zu\r\n", strlen(part)));
    send_bytes(part, strlen(part));
    send_bytes("\r\n", 2);
}

/* The next byte of the stream, copied out of the window before it is examined (VR-SEC-005). */
static char next_byte(uint64_t deadline) {
    unsigned number;
    uint32_t offset;
    char byte;
    while (vkr_readable(&c.machine, &number, &offset) == 0) {
        if (!is_open()) stop("the connection was lost; to blame: %d (machine.h)", c.machine.blame);
        if (now() >= deadline) stop("no reply within %d ms", PATIENCE);
        turn(deadline);
    }
    byte = (char)c.windows[(size_t)number * WINDOW + offset];
    vkr_consumed(&c.machine, 1);
    act();
    return byte;
}

/* Prints a simple reply or a bulk string. */
static int print_reply(void) {
    uint64_t deadline = now() + PATIENCE;
    char line[512];
    size_t length = 0;
    long long bulk;
    do {
        if (length + 1 == sizeof line) stop("a line of the reply is too long");
        line[length++] = next_byte(deadline);
    } while (line[length - 1] != '\n');
    while (length > 0 && strchr("\r\n", line[length - 1]) != NULL) length--;
    line[length] = '\0';
    if (line[0] != '$') {
        puts(line + 1);
        return line[0] == '-';
    }
    bulk = strtoll(line + 1, NULL, 10);
    if (bulk < 0) return 1;
    for (; bulk > 0; bulk--) putchar(next_byte(deadline));
    putchar('\n');
    next_byte(deadline);
    next_byte(deadline);
    return 0;
}

/* Destroys queue pair, completion queue, channel, regions, domain, identifier, in this order
 * (VR-RES-001). */
static void finish(void) {
    uint64_t deadline = now() + LINGER;
    vkr_close(&c.machine, now(), LINGER);
    act();
    while (is_open()) turn(deadline);
    rdma_destroy_qp(c.id);
    ibv_destroy_cq(c.cq);
    ibv_destroy_comp_channel(c.completions);
    ibv_dereg_mr(c.windows_mr);
    ibv_dereg_mr(c.receives_mr);
    ibv_dereg_mr(c.send_mr);
    ibv_dereg_mr(c.messages_mr);
    ibv_dealloc_pd(c.pd);
    rdma_destroy_id(c.id);
    rdma_destroy_event_channel(c.events);
    free(c.windows);
    free(c.send_buffer);
}

int main(int count, char **arguments) {
    char head[16];
    int i, result;
    bool get = count == 5 && strcmp(arguments[3], "get") == 0, set = count == 6 && strcmp(arguments[3], "set") == 0;
    if (!get && !set) {
        fprintf(stderr, "usage: %s HOST PORT get KEY | set KEY VALUE\n", arguments[0]);
        return 64;
    }
    connect_to(arguments[1], arguments[2]);
    act();
    send_bytes(head, (size_t)snprintf(head, sizeof head, "*%d\r\n", count - 3));
    for (i = 3; i < count; i++) send_part(arguments[i]);
    result = print_reply();
    finish();
    return result;
}
