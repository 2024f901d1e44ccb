/* Posts from several threads to one queue pair, and polls its completion queue in several others,
   while one more reads its events and arms it. Meanwhile it forks and executes itself. Each
   completion must be seen once, and the executed program must have a device. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "expect.h"
#include "connect.h"

#define POSTERS 4
#define POLLERS 3
#define EACH 250
#define ALL (POSTERS * EACH)
#define DEPTH 32

static uint64_t source[ALL], target[ALL];
static atomic_int sent[ALL], received[ALL], ended;
static struct ibv_cq *queue;
static struct ibv_comp_channel *channel;
static struct ibv_mr *region, *remote;
static struct ibv_qp *one, *two;

static struct ibv_qp *create(struct ibv_pd *domain)
{
    struct ibv_qp_init_attr attributes = {
        .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
        .cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
    };
    struct ibv_qp *pair = ibv_create_qp(domain, &attributes);
    EXPECT(pair);
    return pair;
}

static void connect_to(struct ibv_qp *pair, struct ibv_qp *peer)
{
    /* `rnr_retry` of 7 waits for receives without limit. */
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };
    begin_receiving(pair, peer, IBV_ACCESS_REMOTE_WRITE, 0);
    EXPECT(!ibv_modify_qp(pair, &attributes, TO_SEND));
}

static void receive(void)
{
    struct ibv_recv_wr work = { 0 }, *refused;
    EXPECT(!ibv_post_recv(two, &work, &refused));
}

static void *post(void *first)
{
    for (int id = (int)(intptr_t)first; id < ALL; id += POSTERS) {
        struct ibv_sge sge = { .addr = (uintptr_t)(source + id), .length = sizeof *source, .lkey = region->lkey };
        struct ibv_send_wr work = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
            .imm_data = id, .wr.rdma = { .remote_addr = (uintptr_t)(target + id), .rkey = remote->rkey } }, *refused;
        int posted;
        /* The queue is full: another thread polls it. */
        while ((posted = ibv_post_send(one, &work, &refused)) == ENOMEM) sched_yield();
        EXPECT(!posted);
    }
    return NULL;
}

static void *poll_all(void *unused)
{
    while (ended < 2 * ALL) {
        struct ibv_wc wc;
        int polled = ibv_poll_cq(queue, 1, &wc);
        EXPECT(polled >= 0);
        if (polled == 0) continue;
        EXPECT(wc.status == IBV_WC_SUCCESS);
        if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
            EXPECT(wc.imm_data < ALL && target[wc.imm_data] == source[wc.imm_data]);
            EXPECT(!received[wc.imm_data]++);
            receive();
        } else {
            EXPECT(wc.opcode == IBV_WC_RDMA_WRITE && wc.wr_id < ALL && !sent[wc.wr_id]++);
        }
        ended++;
    }
    return unused;
}

/* Polls nothing: an event that is read here must not hide a completion that others poll. */
static void *arm(void *unused)
{
    while (ended < 2 * ALL) {
        struct ibv_cq *of;
        void *context;
        if (ibv_get_cq_event(channel, &of, &context)) {
            EXPECT(errno == EAGAIN);
            sched_yield();
        } else {
            EXPECT(of == queue);
            ibv_ack_cq_events(queue, 1);
            EXPECT(!ibv_req_notify_cq(queue, 0));
        }
    }
    return unused;
}

static struct ibv_context *opened(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && devices[0]);
    struct ibv_context *context = ibv_open_device(devices[0]);
    EXPECT(context);
    ibv_free_device_list(devices);
    return context;
}

int main(int count, char **arguments)
{
    struct ibv_context *context = opened();
    struct ibv_pd *domain = ibv_alloc_pd(context);
    EXPECT(domain);
    if (count > 1) return ibv_dealloc_pd(domain) || ibv_close_device(context);
    for (int id = 0; id < ALL; id++) source[id] = ~(uint64_t)id;
    channel = ibv_create_comp_channel(context);
    EXPECT(channel && !fcntl(channel->fd, F_SETFL, O_NONBLOCK));
    queue = ibv_create_cq(context, 4 * DEPTH, NULL, channel, 0);
    region = ibv_reg_mr(domain, source, sizeof source, 0);
    remote = ibv_reg_mr(domain, target, sizeof target, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    EXPECT(queue && region && remote);
    one = create(domain), two = create(domain);
    connect_to(one, two);
    connect_to(two, one);
    for (int i = 0; i < DEPTH; i++) receive();
    EXPECT(!ibv_req_notify_cq(queue, 0));
    pthread_t threads[POSTERS + POLLERS + 1];
    for (intptr_t i = 0; i < POSTERS + POLLERS + 1; i++)
        EXPECT(!pthread_create(threads + i, NULL, i < POSTERS ? post : i == POSTERS ? arm : poll_all, (void *)i));
    for (int i = 0; i < 5; i++) {
        pid_t child = fork();
        EXPECT(child >= 0);
        if (child == 0) {
            execl("/proc/self/exe", arguments[0], "child", NULL);
            _exit(127);
        }
        int status;
        EXPECT(waitpid(child, &status, 0) == child && status == 0);
    }
    for (int i = 0; i < POSTERS + POLLERS + 1; i++) EXPECT(!pthread_join(threads[i], NULL));
    for (int id = 0; id < ALL; id++) EXPECT(sent[id] == 1 && received[id] == 1);
    EXPECT(!ibv_destroy_qp(one) && !ibv_destroy_qp(two) && !ibv_dereg_mr(region) && !ibv_dereg_mr(remote));
    EXPECT(!ibv_destroy_cq(queue) && !ibv_destroy_comp_channel(channel) && !ibv_dealloc_pd(domain) && !ibv_close_device(context));
    puts("done");
    return 0;
}
