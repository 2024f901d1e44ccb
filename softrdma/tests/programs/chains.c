/* Posts long chains of inline WRITEs between two queue pairs of its own, by `ibv_wr_post(3)` and by
   `ibv_post_send(3)`, and chains whose last requests find no room. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "connect.h"

#define CHAIN 700
#define INLINE 256

static char window[CHAIN][INLINE], expected[CHAIN][INLINE];
static struct ibv_context *context;
static struct ibv_cq *queue;
static struct ibv_mr *region;

static struct ibv_qp *create(struct ibv_pd *domain)
{
    struct ibv_qp_init_attr_ex attributes = {
        .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = CHAIN, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = INLINE },
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = domain,
        .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
    };
    struct ibv_qp *pair = ibv_create_qp_ex(context, &attributes);
    EXPECT(pair);
    return pair;
}

static void connect_to(struct ibv_qp *pair, struct ibv_qp *peer)
{
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 1, .max_rd_atomic = 1 };
    begin_receiving(pair, peer, IBV_ACCESS_REMOTE_WRITE, 0);
    EXPECT(!ibv_modify_qp(pair, &attributes, TO_SEND));
}

static void fill(int seed)
{
    memset(window, 0, sizeof window);
    for (int i = 0; i < CHAIN; i++)
        memset(expected[i], 1 + (i + seed) % 250, INLINE);
}

/* Checks that the first `count` WRITEs arrived, and that each has its completion, in order. */
static void written(int count)
{
    for (int next = 0; next < count;) {
        struct ibv_wc wc[32];
        int given = ibv_poll_cq(queue, 32, wc);
        EXPECT(given >= 0);
        for (int i = 0; i < given; i++, next++)
            EXPECT(wc[i].status == IBV_WC_SUCCESS && wc[i].wr_id == (unsigned)next);
    }
    EXPECT(!memcmp(window, expected, (size_t)count * INLINE));
    EXPECT(count == CHAIN || !window[count][0]);
}

static int post_newer(struct ibv_qp *pair, int count)
{
    struct ibv_qp_ex *poster = ibv_qp_to_qp_ex(pair);
    ibv_wr_start(poster);
    for (int i = 0; i < count; i++) {
        poster->wr_id = i;
        poster->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
        ibv_wr_rdma_write(poster, region->rkey, (uintptr_t)window[i % CHAIN]);
        ibv_wr_set_inline_data(poster, expected[i % CHAIN], INLINE);
    }
    return ibv_wr_complete(poster);
}

static int post_older(struct ibv_qp *pair, int count, int wrong, int *bad)
{
    static struct ibv_send_wr chain[CHAIN + 1];
    static struct ibv_sge lists[CHAIN + 1];
    for (int i = 0; i < count; i++) {
        lists[i] = (struct ibv_sge){ .addr = (uintptr_t)expected[i % CHAIN], .length = INLINE };
        chain[i] = (struct ibv_send_wr){ .wr_id = i, .next = i + 1 < count ? &chain[i + 1] : NULL, .sg_list = &lists[i],
            .num_sge = i == wrong ? 1000 : 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
            .wr.rdma = { .remote_addr = (uintptr_t)window[i % CHAIN], .rkey = region->rkey } };
    }
    struct ibv_send_wr *refused = NULL;
    int posted = ibv_post_send(pair, chain, &refused);
    *bad = refused ? (int)(refused - chain) : -1;
    return posted;
}

int main(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && *devices && (context = ibv_open_device(*devices)));
    struct ibv_pd *domain = ibv_alloc_pd(context);
    EXPECT(domain && (queue = ibv_create_cq(context, 2 * CHAIN, NULL, NULL, 0)));
    EXPECT((region = ibv_reg_mr(domain, window, sizeof window, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)));
    struct ibv_qp *one = create(domain), *other = create(domain);
    connect_to(one, other);
    connect_to(other, one);

    /* `ibv_wr_complete` posts all requests, or none. */
    for (int count = 255; count <= CHAIN; count = count == 257 ? CHAIN : count + 1) {
        fill(count);
        EXPECT(!post_newer(one, count));
        written(count);
    }
    fill(1);
    EXPECT(post_newer(one, CHAIN + 1) == ENOMEM);
    EXPECT(!window[0][0]);

    /* `ibv_post_send` posts the requests before the first one that is refused. */
    int bad;
    fill(2);
    EXPECT(!post_older(one, CHAIN, -1, &bad) && bad == -1);
    written(CHAIN);
    fill(3);
    EXPECT(post_older(one, CHAIN + 1, -1, &bad) == ENOMEM && bad == CHAIN);
    written(CHAIN);
    fill(4);
    EXPECT(post_older(one, CHAIN, 300, &bad) == EINVAL && bad == 300);
    written(300);

    EXPECT(!ibv_destroy_qp(one) && !ibv_destroy_qp(other) && !ibv_dereg_mr(region));
    EXPECT(!ibv_destroy_cq(queue) && !ibv_dealloc_pd(domain));
    puts("done");
    return 0;
}
