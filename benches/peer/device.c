/* A stand-in for librdmacm and libibverbs, so that a client's own cost can be counted: one device
 * with one connection, whose other end is a server inside this file. As with a network card's
 * provider, the data path makes no system call, except for the completion channel, which is a
 * descriptor as well. Everything happens on the client's thread, so every run gives the same count.
 *
 * The server answers each notification with 64 bytes. The first byte of a request says when:
 *   'a'  at once, with all answers that were held back;
 *   'l'  later, with the next answer that is not held back;
 *   'w'  when the client waits: it has armed the queue, has polled, and found nothing new;
 *   's'  when the client has polled three times and found nothing, armed or not.
 * A command of RESP, which begins with '*', is answered at once with a value of 32 MiB, with one
 * notification for each window that it fills. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#undef ibv_reg_mr
#undef ibv_query_port

enum { ANSWER = 64, WINDOW = 16 << 20, DEPTH = 1 << 14, VALUE = 32 << 20, MESSAGE = 32, LOOKS = 3, REGISTER = 3 };

/* The server's window, and how far it is full. */
static _Alignas(4096) unsigned char window[WINDOW];
static uint32_t window_used;
/* The client's window, and how far it is full. */
static unsigned char *client_window;
static uint32_t client_length, client_used;

static struct ibv_device device_itself = {.name = "peer0"};
static struct ibv_context context;
static struct ibv_comp_channel channel;
static struct ibv_cq queue;
static struct ibv_qp pair;
static struct ibv_wc completions[DEPTH];
static unsigned first_completion, last_completion;
static struct ibv_sge receives[DEPTH];
static uint64_t receive_ids[DEPTH];
static unsigned first_receive, last_receive;
static int armed, looks;
/* Answers that are due at once, later, when the client waits, and when it has looked. */
static unsigned due, later, on_wait, on_look;
/* Bytes of a long reply that were not sent yet. */
static const char value_head[] = "$33554432\r\n", value_end[] = "\r\n";
enum { HEAD = sizeof value_head - 1, END = sizeof value_end - 1, REPLY = HEAD + VALUE + END };
static uint32_t value_left;

static struct rdma_event_channel events;
static struct rdma_cm_event told[8];
static unsigned first_told, last_told;

static void device_fail(const char *what) {
    fprintf(stderr, "device: %s\n", what);
    abort();
}

static void device_signal(int fd) {
    uint64_t one = 1;
    if (write(fd, &one, sizeof one) != sizeof one) device_fail("a descriptor is full");
}

static int device_take_signal(int fd) {
    uint64_t one;
    return read(fd, &one, sizeof one) == sizeof one ? 0 : -1;
}

static void device_complete(struct ibv_wc completion) {
    if (last_completion - first_completion == DEPTH) device_fail("the completion queue is full");
    completion.qp_num = pair.qp_num;
    completions[last_completion++ % DEPTH] = completion;
    if (armed) device_signal(channel.fd);
    armed = 0;
}

static unsigned device_take_receive(void) {
    if (first_receive == last_receive) device_fail("no receive is posted");
    return first_receive++ % DEPTH;
}

static void device_say(const unsigned char *message) {
    unsigned at = device_take_receive();
    memcpy((void *)(uintptr_t)receives[at].addr, message, MESSAGE);
    device_complete((struct ibv_wc){.wr_id = receive_ids[at], .opcode = IBV_WC_RECV, .byte_len = MESSAGE});
}

static void device_register_window(void) {
    unsigned char message[MESSAGE] = {0, REGISTER};
    uint64_t address = htobe64((uint64_t)(uintptr_t)window);
    uint32_t length = htonl(WINDOW), key = htonl(1);
    memcpy(message + 16, &address, 8);
    memcpy(message + 24, &length, 4);
    memcpy(message + 28, &key, 4);
    window_used = 0;
    device_say(message);
}

/* Notifies the client of so many bytes more in its window. */
static void device_notify(uint32_t bytes) {
    unsigned at = device_take_receive();
    client_used += bytes;
    device_complete((struct ibv_wc){
        .wr_id = receive_ids[at],
        .opcode = IBV_WC_RECV_RDMA_WITH_IMM,
        .byte_len = bytes,
        .wc_flags = IBV_WC_WITH_IMM,
        .imm_data = htonl(bytes),
    });
}

/* Fills the client's window with the next bytes of the reply that has the value. */
static void device_answer_value(void) {
    uint32_t room = client_length - client_used, bytes = value_left < room ? value_left : room;
    for (uint32_t byte = 0; byte < bytes; byte++) {
        uint32_t at = REPLY - value_left + byte;
        client_window[client_used + byte] = at < HEAD ? value_head[at] : at < HEAD + VALUE ? 'v' : value_end[at - HEAD - VALUE];
    }
    value_left -= bytes;
    if (bytes > 0) device_notify(bytes);
}

/* Gives the answers that are due, as far as the client's window takes them. */
static void device_answer(void) {
    device_answer_value();
    while (due > 0 && client_length - client_used >= ANSWER) {
        memset(client_window + client_used, 'r', ANSWER);
        due--;
        device_notify(ANSWER);
    }
}

/* The client has looked and found no more than it took. */
static void device_found_end(int taken) {
    if (armed) {
        due += on_wait;
        on_wait = 0;
    }
    if (taken == 0 && on_look > 0 && ++looks == LOOKS) {
        due += on_look;
        on_look = 0;
    }
    device_answer();
}

static void device_notified(const unsigned char *request) {
    switch (*request) {
    case 'a':
        due += later + 1;
        later = 0;
        break;
    case 'l': later++; break;
    case 'w': on_wait++; break;
    case 's':
        on_look++;
        looks = 0;
        break;
    case '*': value_left = REPLY; break;
    default: device_fail("a request that says not when its answer is to come");
    }
    device_answer();
}

static void device_message(const unsigned char *message) {
    uint64_t address;
    uint32_t length;
    /* A question for features is answered: there are none. */
    if (message[1] == 0) device_say(message);
    if (message[1] != REGISTER) return;
    memcpy(&address, message + 16, 8);
    memcpy(&length, message + 24, 4);
    client_window = (unsigned char *)(uintptr_t)be64toh(address);
    client_length = ntohl(length);
    client_used = 0;
    device_answer();
}

static int device_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    (void)qp, (void)bad;
    for (; wr; wr = wr->next) {
        const unsigned char *bytes = wr->num_sge ? (const unsigned char *)(uintptr_t)wr->sg_list->addr : NULL;
        uint32_t length = wr->num_sge ? wr->sg_list->length : 0;
        enum ibv_wc_opcode opcode = wr->opcode == IBV_WR_SEND ? IBV_WC_SEND : IBV_WC_RDMA_WRITE;
        if (wr->opcode == IBV_WR_SEND) {
            device_message(bytes);
        } else if (length > 0) {
            unsigned char *to = (unsigned char *)(uintptr_t)wr->wr.rdma.remote_addr;
            if (length > WINDOW - window_used || to != window + window_used) device_fail("a WRITE outside of the window");
            memcpy(to, bytes, length);
            window_used += length;
        }
        if (wr->send_flags & IBV_SEND_SIGNALED) device_complete((struct ibv_wc){.wr_id = wr->wr_id, .opcode = opcode});
        if (wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
            device_notified(window + window_used - ntohl(wr->imm_data));
            if (window_used == WINDOW) device_register_window();
        }
    }
    return 0;
}

static int device_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    (void)qp, (void)bad;
    for (; wr; wr = wr->next) {
        receives[last_receive % DEPTH] = *wr->sg_list;
        receive_ids[last_receive++ % DEPTH] = wr->wr_id;
    }
    return 0;
}

static int device_poll(struct ibv_cq *cq, int most, struct ibv_wc *wc) {
    int count = 0;
    (void)cq;
    while (count < most && first_completion != last_completion) wc[count++] = completions[first_completion++ % DEPTH];
    if (count < most) device_found_end(count);
    return count;
}

static int device_arm(struct ibv_cq *cq, int solicited) {
    (void)cq, (void)solicited;
    armed = 1;
    return 0;
}

/* libibverbs */

int ibv_query_device(struct ibv_context *of, struct ibv_device_attr *attributes) {
    (void)of;
    *attributes = (struct ibv_device_attr){.max_qp_wr = DEPTH, .max_cqe = DEPTH, .max_mr_size = UINT32_MAX, .max_sge = 4};
    return 0;
}

int ibv_query_port(struct ibv_context *of, uint8_t port, struct _compat_ibv_port_attr *attributes) {
    (void)of, (void)port, (void)attributes;
    return ENOSYS;
}

int ibv_query_gid(struct ibv_context *of, uint8_t port, int index, union ibv_gid *gid) {
    (void)of, (void)port, (void)index, (void)gid;
    return ENOSYS;
}

int ibv_query_qp(struct ibv_qp *of, struct ibv_qp_attr *attributes, int mask, struct ibv_qp_init_attr *init) {
    (void)of, (void)attributes, (void)mask, (void)init;
    return ENOSYS;
}

int ibv_modify_qp(struct ibv_qp *of, struct ibv_qp_attr *attributes, int mask) {
    (void)of, (void)attributes, (void)mask;
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *of) { return of != &pair; }

struct ibv_pd *ibv_alloc_pd(struct ibv_context *of) {
    struct ibv_pd *domain = calloc(1, sizeof *domain);
    if (domain) domain->context = of;
    return domain;
}

int ibv_dealloc_pd(struct ibv_pd *domain) {
    free(domain);
    return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *domain, void *address, size_t length, int access) {
    struct ibv_mr *region = calloc(1, sizeof *region);
    (void)access;
    if (region) *region = (struct ibv_mr){.context = domain->context, .pd = domain, .addr = address, .length = length, .lkey = 2, .rkey = 3};
    return region;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    (void)domain, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
    errno = EOPNOTSUPP;
    return NULL;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *domain, void *address, size_t length, uint64_t iova, unsigned access) {
    (void)iova;
    return ibv_reg_mr(domain, address, length, (int)access);
}

int ibv_dereg_mr(struct ibv_mr *region) {
    free(region);
    return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *of) {
    channel = (struct ibv_comp_channel){.context = of, .fd = eventfd(0, EFD_SEMAPHORE)};
    return channel.fd < 0 ? NULL : &channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *of) { return close(of->fd); }

struct ibv_cq *ibv_create_cq(struct ibv_context *of, int depth, void *with, struct ibv_comp_channel *on, int vector) {
    (void)vector;
    queue = (struct ibv_cq){.context = of, .channel = on, .cq_context = with, .cqe = depth};
    return &queue;
}

int ibv_destroy_cq(struct ibv_cq *of) { return of != &queue; }

int ibv_get_cq_event(struct ibv_comp_channel *on, struct ibv_cq **cq, void **with) {
    if (device_take_signal(on->fd) < 0) {
        int error = errno;
        if (first_completion == last_completion) device_found_end(0);
        errno = error;
        return -1;
    }
    *cq = &queue;
    *with = queue.cq_context;
    return 0;
}

void ibv_ack_cq_events(struct ibv_cq *of, unsigned count) { (void)of, (void)count; }

int ibv_get_async_event(struct ibv_context *of, struct ibv_async_event *event) {
    (void)event;
    return device_take_signal(of->async_fd);
}

void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; }

const char *ibv_wc_status_str(enum ibv_wc_status status) { return status == IBV_WC_SUCCESS ? "success" : "failure"; }

/* librdmacm */

static void device_tell(struct rdma_cm_id *id, enum rdma_cm_event_type event) {
    told[last_told++ % 8] = (struct rdma_cm_event){.id = id, .event = event, .param.conn = {.retry_count = 7, .rnr_retry_count = 0}};
    device_signal(events.fd);
}

struct rdma_event_channel *rdma_create_event_channel(void) {
    events.fd = eventfd(0, EFD_SEMAPHORE);
    return events.fd < 0 ? NULL : &events;
}

void rdma_destroy_event_channel(struct rdma_event_channel *of) { close(of->fd); }

int rdma_get_cm_event(struct rdma_event_channel *of, struct rdma_cm_event **event) {
    if (device_take_signal(of->fd) < 0) return -1;
    *event = &told[first_told++ % 8];
    return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *event) {
    (void)event;
    return 0;
}

const char *rdma_event_str(enum rdma_cm_event_type event) { return event == RDMA_CM_EVENT_ESTABLISHED ? "established" : "event"; }

struct ibv_context **rdma_get_devices(int *count) {
    static struct ibv_context *all[] = {&context, NULL};
    if (!context.device) {
        context.device = &device_itself;
        context.ops.post_send = device_post_send;
        context.ops.post_recv = device_post_recv;
        context.ops.poll_cq = device_poll;
        context.ops.req_notify_cq = device_arm;
        context.async_fd = eventfd(0, EFD_NONBLOCK);
        context.num_comp_vectors = 1;
    }
    if (count) *count = 1;
    return all;
}

void rdma_free_devices(struct ibv_context **all) { (void)all; }

int rdma_create_id(struct rdma_event_channel *on, struct rdma_cm_id **id, void *with, enum rdma_port_space space) {
    *id = calloc(1, sizeof **id);
    if (!*id) return -1;
    **id = (struct rdma_cm_id){.verbs = *rdma_get_devices(NULL), .channel = on, .context = with, .ps = space, .port_num = 1};
    return 0;
}

int rdma_destroy_id(struct rdma_cm_id *id) {
    free(id);
    return 0;
}

int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *to) {
    id->channel = to;
    return 0;
}

int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t length) {
    (void)id, (void)level, (void)name, (void)value, (void)length;
    return 0;
}

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *address) {
    (void)id, (void)address;
    return 0;
}

int rdma_listen(struct rdma_cm_id *id, int backlog) {
    (void)id, (void)backlog;
    errno = ENOSYS;
    return -1;
}

int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints, struct rdma_addrinfo **found) {
    static struct sockaddr_in address;
    static struct rdma_addrinfo result;
    (void)hints;
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(service))};
    inet_pton(AF_INET, node, &address.sin_addr);
    result = (struct rdma_addrinfo){.ai_dst_addr = (struct sockaddr *)&address, .ai_src_addr = (struct sockaddr *)&address};
    *found = &result;
    return 0;
}

void rdma_freeaddrinfo(struct rdma_addrinfo *found) { (void)found; }

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int limit) {
    (void)from, (void)limit;
    memcpy(&id->route.addr.dst_addr, to, sizeof(struct sockaddr_in));
    memcpy(&id->route.addr.src_addr, to, sizeof(struct sockaddr_in));
    device_tell(id, RDMA_CM_EVENT_ADDR_RESOLVED);
    return 0;
}

int rdma_resolve_route(struct rdma_cm_id *id, int limit) {
    (void)limit;
    device_tell(id, RDMA_CM_EVENT_ROUTE_RESOLVED);
    return 0;
}

int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *domain, struct ibv_qp_init_attr *attributes) {
    pair = (struct ibv_qp){.context = id->verbs, .pd = domain, .qp_num = 17, .send_cq = attributes->send_cq, .recv_cq = attributes->recv_cq};
    id->qp = &pair;
    return 0;
}

void rdma_destroy_qp(struct rdma_cm_id *id) { id->qp = NULL; }

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *parameters) {
    (void)parameters;
    device_tell(id, RDMA_CM_EVENT_ESTABLISHED);
    device_register_window();
    return 0;
}

int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *parameters) {
    (void)id, (void)parameters;
    errno = ENOSYS;
    return -1;
}

int rdma_reject(struct rdma_cm_id *id, const void *data, uint8_t length) {
    (void)id, (void)data, (void)length;
    return 0;
}

int rdma_notify(struct rdma_cm_id *id, enum ibv_event_type event) {
    (void)id, (void)event;
    return 0;
}

int rdma_disconnect(struct rdma_cm_id *id) {
    device_tell(id, RDMA_CM_EVENT_DISCONNECTED);
    return 0;
}
