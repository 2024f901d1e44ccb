/* Makes a completion queue on each of the device's completion vectors, and raises as many events on
   it as the vector's number. Prints how many vectors there are, and waits for a line before it
   ends. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>

#include "expect.h"
#include "connect.h"

static char bytes[64];
static struct ibv_context *context;
static struct ibv_pd *domain;
static struct ibv_mr *region;

static struct ibv_qp *create(struct ibv_cq *queue)
{
    struct ibv_qp_init_attr attributes = {
        .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
    };
    struct ibv_qp *pair = ibv_create_qp(domain, &attributes);
    EXPECT(pair);
    return pair;
}

static void connect_to(struct ibv_qp *pair, struct ibv_qp *peer)
{
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 1, .rnr_retry = 1, .max_rd_atomic = 1 };
    begin_receiving(pair, peer, 0, 0);
    EXPECT(!ibv_modify_qp(pair, &attributes, TO_SEND));
}

/* Raises `events` events, one after the other. */
static void raise_on(int vector, int events)
{
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct ibv_cq *queue = ibv_create_cq(context, 16, NULL, channel, vector), *found;
    EXPECT(channel && queue);
    struct ibv_qp *from = create(queue), *to = create(queue);
    connect_to(from, to);
    connect_to(to, from);
    for (int event = 0; event < events; event++) {
        struct ibv_sge element = { .addr = (uintptr_t)bytes, .length = 8, .lkey = region->lkey };
        struct ibv_recv_wr receive = { .sg_list = &element, .num_sge = 1 }, *refused_receive;
        struct ibv_send_wr send = { .sg_list = &element, .num_sge = 1, .opcode = IBV_WR_SEND }, *refused;
        struct ibv_wc wc;
        void *ignored;
        EXPECT(!ibv_req_notify_cq(queue, 0));
        EXPECT(!ibv_post_recv(to, &receive, &refused_receive) && !ibv_post_send(from, &send, &refused));
        EXPECT(!ibv_get_cq_event(channel, &found, &ignored) && found == queue);
        ibv_ack_cq_events(queue, 1);
        while (ibv_poll_cq(queue, 1, &wc) == 0) { }
        EXPECT(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV);
    }
    EXPECT(!ibv_destroy_qp(from) && !ibv_destroy_qp(to) && !ibv_destroy_cq(queue) && !ibv_destroy_comp_channel(channel));
}

int main(void)
{
    int count;
    struct ibv_device **devices = ibv_get_device_list(&count);
    EXPECT(devices && count == 1);
    context = ibv_open_device(devices[0]);
    domain = ibv_alloc_pd(context);
    region = ibv_reg_mr(domain, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
    EXPECT(region);
    for (int vector = 0; vector < context->num_comp_vectors; vector++)
        raise_on(vector, vector);
    EXPECT(!ibv_create_cq(context, 16, NULL, NULL, context->num_comp_vectors) && errno == EINVAL);
    printf("%d vectors\n", context->num_comp_vectors);
    fflush(stdout);
    getchar();
    return 0;
}
