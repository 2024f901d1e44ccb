/* Tests the extended calls of libibverbs between two queue pairs of its own: completion queues and
   queue pairs with functions, shared receive queues, solicited events, SQD, and acknowledgements
   for which destruction waits. */
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "expect.h"
#include "connect.h"

static char bytes[4096];
static struct ibv_context *context;
static struct ibv_comp_channel *channel;
static struct ibv_cq_ex *queue;
static struct ibv_srq *shared;
static struct ibv_mr *region;

static struct ibv_qp *create(struct ibv_pd *domain)
{
    struct ibv_qp_init_attr_ex attributes = {
        .send_cq = ibv_cq_ex_to_cq(queue),
        .recv_cq = ibv_cq_ex_to_cq(queue),
        .srq = shared,
        .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64 },
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = domain,
        .send_ops_flags = IBV_QP_EX_WITH_BIND_MW,
    };
    EXPECT(!ibv_create_qp_ex(context, &attributes) && errno == EOPNOTSUPP);
    attributes.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ;
    struct ibv_qp *pair = ibv_create_qp_ex(context, &attributes);
    EXPECT(pair && pair->srq == shared);
    return pair;
}

static void connect_to(struct ibv_qp *pair, struct ibv_qp *peer)
{
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_RTS, .timeout = 32, .retry_cnt = 1, .rnr_retry = 2, .max_rd_atomic = 1, .sq_psn = 9 };
    begin_receiving(pair, peer, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE, 7);
    /* A refused call changes nothing: a timeout has five bits. */
    struct ibv_qp_attr found;
    struct ibv_qp_init_attr made;
    EXPECT(ibv_modify_qp(pair, &attributes, TO_SEND) == EINVAL && pair->state == IBV_QPS_RTR);
    EXPECT(!ibv_query_qp(pair, &found, IBV_QP_STATE, &made) && found.qp_state == IBV_QPS_RTR);
    attributes.timeout = 15;
    EXPECT(!ibv_modify_qp(pair, &attributes, TO_SEND));
    EXPECT(!ibv_query_qp(pair, &attributes, IBV_QP_STATE, &made));
    EXPECT(attributes.qp_state == IBV_QPS_RTS && attributes.path_mtu == IBV_MTU_1024 && attributes.timeout == 15);
    EXPECT(attributes.rq_psn == 7 && attributes.sq_psn == 9 && attributes.rnr_retry == 2 && attributes.min_rnr_timer == 12);
    EXPECT(made.srq == shared);
}

static void receive(uint64_t id)
{
    struct ibv_sge sge = { .addr = (uintptr_t)bytes + 2048, .length = 512, .lkey = region->lkey };
    struct ibv_recv_wr work = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
    EXPECT(!ibv_post_srq_recv(shared, &work, &bad));
}

/* Expects the next completion to be of this kind. Returns how many bytes it brought. */
static unsigned next(uint64_t id, enum ibv_wc_opcode opcode)
{
    struct ibv_poll_cq_attr how = { 0 };
    int started;
    while ((started = ibv_start_poll(queue, &how)) == ENOENT)
        ;
    EXPECT(!started && queue->status == IBV_WC_SUCCESS && queue->wr_id == id);
    EXPECT(ibv_wc_read_opcode(queue) == opcode);
    unsigned len = ibv_wc_read_byte_len(queue);
    ibv_end_poll(queue);
    return len;
}

/* Waits for a completion event that must come: moving bytes takes time. */
static int becomes_readable(int fd)
{
    struct pollfd entry = { .fd = fd, .events = POLLIN };
    return poll(&entry, 1, -1);
}

static int readable(int fd)
{
    struct pollfd entry = { .fd = fd, .events = POLLIN };
    return poll(&entry, 1, 0);
}

static int destroyed;

static void *destroy(void *unused)
{
    (void)unused;
    EXPECT(!ibv_destroy_cq(ibv_cq_ex_to_cq(queue)));
    __atomic_store_n(&destroyed, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

int main(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && *devices && (context = ibv_open_device(*devices)));
    struct ibv_device_attr_ex device;
    EXPECT(!ibv_query_device_ex(context, NULL, &device));
    EXPECT(device.orig_attr.max_srq > 0 && device.phys_port_cnt_ex == 1 && !device.odp_caps.general_caps);
    struct ibv_pd *domain = ibv_alloc_pd(context);
    EXPECT(domain && (channel = ibv_create_comp_channel(context)));
    region = ibv_reg_mr(domain, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    struct ibv_cq_init_attr_ex wanted = { .cqe = 16, .channel = channel, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP };
    EXPECT(region && !ibv_create_cq_ex(context, &wanted) && errno == EOPNOTSUPP);
    wanted.wc_flags = IBV_WC_STANDARD_FLAGS;
    EXPECT((queue = ibv_create_cq_ex(context, &wanted)));
    struct ibv_srq_init_attr limits = { .attr = { .max_wr = 4, .max_sge = 1 } };
    EXPECT((shared = ibv_create_srq(domain, &limits)));
    struct ibv_qp *one = create(domain), *other = create(domain);
    connect_to(one, other);
    connect_to(other, one);
    EXPECT(ibv_destroy_srq(shared) == EBUSY);

    /* A chain: inline bytes, then a WRITE that asks for an event. The receives are shared. */
    receive(1);
    receive(2);
    struct ibv_srq_attr limit = { .srq_limit = 1 };
    EXPECT(!ibv_modify_srq(shared, &limit, IBV_SRQ_LIMIT));
    EXPECT(!ibv_req_notify_cq(ibv_cq_ex_to_cq(queue), 1));
    struct ibv_qp_ex *poster = ibv_qp_to_qp_ex(one);
    EXPECT(poster);
    ibv_wr_start(poster);
    poster->wr_id = 10;
    poster->wr_flags = 0;
    ibv_wr_send(poster);
    ibv_wr_set_inline_data(poster, "newer", 5);
    EXPECT(!ibv_wr_complete(poster));
    EXPECT(!readable(channel->fd));
    ibv_wr_start(poster);
    poster->wr_id = 11;
    poster->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;
    ibv_wr_rdma_write_imm(poster, region->rkey, (uintptr_t)bytes + 1024, htobe32(5));
    ibv_wr_set_sge(poster, region->lkey, (uintptr_t)bytes + 2048, 5);
    EXPECT(!ibv_wr_complete(poster));
    EXPECT(becomes_readable(channel->fd) == 1);
    EXPECT(next(1, IBV_WC_RECV) == 5);
    struct ibv_poll_cq_attr how = { 0 };
    EXPECT(!ibv_start_poll(queue, &how));
    EXPECT(queue->wr_id == 2 && ibv_wc_read_wc_flags(queue) == IBV_WC_WITH_IMM && be32toh(ibv_wc_read_imm_data(queue)) == 5);
    EXPECT(ibv_wc_read_qp_num(queue) == other->qp_num);
    EXPECT(!ibv_next_poll(queue) && queue->wr_id == 11 && ibv_next_poll(queue) == ENOENT);
    ibv_end_poll(queue);
    EXPECT(!memcmp(bytes + 1024, "newer", 5));

    /* The limit of the shared queue was reached, once. */
    struct ibv_async_event event;
    EXPECT(!ibv_get_async_event(context, &event));
    EXPECT(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == shared);
    EXPECT(!ibv_query_srq(shared, &limit) && limit.srq_limit == 0 && limit.max_wr == 4);
    ibv_ack_async_event(&event);

    /* Requests without room for all of them: none is posted. Then a begun one is given up. */
    ibv_wr_start(poster);
    for (int count = 0; count < 5; count++) {
        ibv_wr_rdma_read(poster, region->rkey, (uintptr_t)bytes);
        ibv_wr_set_sge(poster, region->lkey, (uintptr_t)bytes + 512, 8);
    }
    EXPECT(ibv_wr_complete(poster) == ENOMEM);
    ibv_wr_start(poster);
    ibv_wr_rdma_read(poster, region->rkey, (uintptr_t)bytes);
    ibv_wr_abort(poster);
    EXPECT(ibv_start_poll(queue, &how) == ENOENT);

    /* SQD: an event says that no request is in flight; new requests wait for RTS. */
    struct ibv_qp_attr state = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
    EXPECT(!ibv_modify_qp(one, &state, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
    EXPECT(!ibv_get_async_event(context, &event) && event.event_type == IBV_EVENT_SQ_DRAINED && event.element.qp == one);
    ibv_ack_async_event(&event);
    ibv_wr_start(poster);
    poster->wr_id = 12;
    poster->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_read(poster, region->rkey, (uintptr_t)bytes + 1024);
    ibv_wr_set_sge(poster, region->lkey, (uintptr_t)bytes, 5);
    EXPECT(!ibv_wr_complete(poster) && ibv_start_poll(queue, &how) == ENOENT);
    state.qp_state = IBV_QPS_RTS;
    EXPECT(!ibv_modify_qp(one, &state, IBV_QP_STATE));
    next(12, IBV_WC_RDMA_READ);
    EXPECT(!memcmp(bytes, "newer", 5));
    state.qp_state = IBV_QPS_SQE;
    EXPECT(ibv_modify_qp(one, &state, IBV_QP_STATE) == EINVAL);

    /* A child has a device of its own, and cannot use its parent's objects. */
    pid_t child = fork();
    if (!child) {
        EXPECT(ibv_destroy_qp(one) == EINVAL);
        struct ibv_pd *own = ibv_alloc_pd(context);
        EXPECT(own && ibv_reg_mr(own, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE));
        _exit(0);
    }
    int status;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);

    /* The destruction of the queue waits for the event that was read. */
    struct ibv_cq *told;
    void *user;
    EXPECT(!ibv_get_cq_event(channel, &told, &user) && told == ibv_cq_ex_to_cq(queue));
    EXPECT(!ibv_destroy_qp(one) && !ibv_destroy_qp(other) && !ibv_destroy_srq(shared));
    pthread_t thread;
    EXPECT(!pthread_create(&thread, NULL, destroy, NULL));
    /* When the channel is free, the fabric has destroyed its queue. */
    while (ibv_destroy_comp_channel(channel) == EBUSY)
        ;
    EXPECT(!__atomic_load_n(&destroyed, __ATOMIC_SEQ_CST));
    ibv_ack_cq_events(told, 1);
    EXPECT(!pthread_join(thread, NULL) && destroyed);
    puts("done");
    return 0;
}
