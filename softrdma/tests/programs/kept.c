/* Posts receives to a queue pair that is not connected, as many as there is room for and one more.
   Before and after posting it prints a line, and waits for one: meanwhile the test checks how many
   requests the fabric got. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>

#include "expect.h"

#define DEPTH 8

static struct ibv_qp *pair;
static struct ibv_cq *queue;
static uint64_t next;

static int post(void)
{
    struct ibv_recv_wr work = { .wr_id = next }, *refused = NULL;
    int posted = ibv_post_recv(pair, &work, &refused);
    EXPECT(posted ? refused == &work : !refused);
    if (!posted) next++;
    return posted;
}

static void move(enum ibv_qp_state state)
{
    struct ibv_qp_attr attributes = { .qp_state = state, .port_num = 1 };
    int mask = state == IBV_QPS_INIT ? IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS : 0;
    EXPECT(!ibv_modify_qp(pair, &attributes, IBV_QP_STATE | mask));
}

static void says(const char *what)
{
    puts(what);
    fflush(stdout);
    EXPECT(getchar() == '\n');
}

int main(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && devices[0]);
    struct ibv_context *context = ibv_open_device(devices[0]);
    struct ibv_pd *domain = ibv_alloc_pd(context);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    queue = ibv_create_cq(context, 64, NULL, channel, 0);
    EXPECT(domain && channel && queue);
    struct ibv_qp_init_attr attributes = { .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 1, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 } };
    pair = ibv_create_qp(domain, &attributes);
    EXPECT(pair);

    EXPECT(post() == EINVAL);
    move(IBV_QPS_INIT);
    says("initialised");
    for (int i = 0; i < DEPTH; i++) EXPECT(!post());
    says("posted");
    EXPECT(post() == ENOMEM);
    move(IBV_QPS_INIT);
    EXPECT(post() == ENOMEM);
    /* The posted receives are gone, and there is room again. */
    move(IBV_QPS_RESET);
    EXPECT(post() == EINVAL);
    move(IBV_QPS_INIT);
    uint64_t first = next;
    /* Two fewer than there is room for. */
    for (int i = 2; i < DEPTH; i++) EXPECT(!post());

    EXPECT(!ibv_req_notify_cq(queue, 0));
    struct ibv_wc wc;
    /* Each receive that was kept is flushed, in order. */
    move(IBV_QPS_ERR);
    for (int i = 0; i < DEPTH - 2; i++) {
        int polled;
        while ((polled = ibv_poll_cq(queue, 1, &wc)) == 0) { }
        EXPECT(polled == 1 && wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == first + i);
    }
    struct ibv_cq *of;
    void *user;
    EXPECT(!ibv_get_cq_event(channel, &of, &user) && of == queue);
    ibv_ack_cq_events(queue, 1);
    /* No receive is kept once the queue pair has left INIT: its flush is an event. */
    EXPECT(!ibv_req_notify_cq(queue, 0) && !post());
    EXPECT(!ibv_get_cq_event(channel, &of, &user) && of == queue);
    ibv_ack_cq_events(queue, 1);
    EXPECT(ibv_poll_cq(queue, 1, &wc) == 1 && wc.wr_id == first + DEPTH - 2);

    EXPECT(!ibv_destroy_qp(pair) && !ibv_destroy_cq(queue) && !ibv_destroy_comp_channel(channel));
    EXPECT(!ibv_dealloc_pd(domain) && !ibv_close_device(context));
    ibv_free_device_list(devices);
    puts("done");
    return 0;
}
