/* Tests atomic operations: their results, by both ways to post; what is refused; and several
   threads that add to one number by queue pairs of their own. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "connect.h"

enum { THREADS = 3, TIMES = 200, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC };

static uint64_t numbers[64];
static struct ibv_context *context;
static struct ibv_pd *domain;
static struct ibv_mr *region;

struct end {
    struct ibv_cq *queue;
    struct ibv_qp *pair, *peer;
    uint64_t *found;
};

static struct ibv_qp *create(struct ibv_cq *queue)
{
    struct ibv_qp_init_attr_ex attributes = {
        .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = domain,
        .send_ops_flags = IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP,
    };
    struct ibv_qp *pair = ibv_create_qp_ex(context, &attributes);
    EXPECT(pair);
    return pair;
}

/* Connects two new queue pairs, the second with these rights. */
static struct end connected(int access)
{
    struct ibv_cq *queue = ibv_create_cq(context, 16, NULL, NULL, 0);
    EXPECT(queue);
    struct end end = { .queue = queue, .pair = create(queue), .peer = create(queue), .found = &numbers[1] };
    struct ibv_qp_attr state = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 1, .rnr_retry = 7, .max_rd_atomic = 1 };
    begin_receiving(end.pair, end.peer, 0, 0);
    begin_receiving(end.peer, end.pair, access, 0);
    EXPECT(!ibv_modify_qp(end.pair, &state, TO_SEND) && !ibv_modify_qp(end.peer, &state, TO_SEND));
    return end;
}

static struct ibv_wc next(struct end *end)
{
    struct ibv_wc done;
    int count;
    while (!(count = ibv_poll_cq(end->queue, 1, &done)))
        ;
    EXPECT(count == 1);
    return done;
}

static struct ibv_wc add(struct end *end, uint64_t at, uint32_t rkey, uint64_t number)
{
    struct ibv_sge sge = { .addr = (uintptr_t)end->found, .length = 8, .lkey = region->lkey };
    struct ibv_send_wr work = { .wr_id = 9, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
        .send_flags = IBV_SEND_SIGNALED, .wr.atomic = { .remote_addr = at, .compare_add = number, .rkey = rkey } };
    struct ibv_send_wr *bad;
    EXPECT(!ibv_post_send(end->pair, &work, &bad));
    return next(end);
}

static void swap(struct end *end, uint64_t compare, uint64_t number)
{
    struct ibv_qp_ex *poster = ibv_qp_to_qp_ex(end->pair);
    ibv_wr_start(poster);
    poster->wr_id = 9;
    poster->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_atomic_cmp_swp(poster, region->rkey, (uintptr_t)numbers, compare, number);
    ibv_wr_set_sge(poster, region->lkey, (uintptr_t)end->found, 8);
    EXPECT(!ibv_wr_complete(poster));
    struct ibv_wc done = next(end);
    EXPECT(done.status == IBV_WC_SUCCESS && done.opcode == IBV_WC_COMP_SWAP && done.byte_len == 8);
}

static void *adds(void *end)
{
    for (int i = 0; i < TIMES; i++) {
        struct ibv_wc done = add(end, (uintptr_t)numbers, region->rkey, 1);
        EXPECT(done.status == IBV_WC_SUCCESS && done.opcode == IBV_WC_FETCH_ADD && done.byte_len == 8);
    }
    return NULL;
}

int main(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && *devices && (context = ibv_open_device(*devices)) && (domain = ibv_alloc_pd(context)));
    struct ibv_device_attr device;
    EXPECT(!ibv_query_device(context, &device) && device.atomic_cap == IBV_ATOMIC_HCA);
    EXPECT(!ibv_reg_mr(domain, numbers, sizeof numbers, IBV_ACCESS_REMOTE_ATOMIC) && errno == EINVAL);
    EXPECT((region = ibv_reg_mr(domain, numbers, sizeof numbers, ALL)));

    struct end end = connected(IBV_ACCESS_REMOTE_ATOMIC);
    numbers[0] = UINT64_MAX;
    EXPECT(add(&end, (uintptr_t)numbers, region->rkey, 3).status == IBV_WC_SUCCESS);
    EXPECT(numbers[1] == UINT64_MAX && numbers[0] == 2);
    swap(&end, 1, 7);
    EXPECT(numbers[1] == 2 && numbers[0] == 2);
    swap(&end, 2, 7);
    EXPECT(numbers[1] == 2 && numbers[0] == 7);

    /* Not aligned; no right of the region, of the queue pair, or at the place of the result. */
    EXPECT(add(&end, (uintptr_t)numbers + 4, region->rkey, 1).status == IBV_WC_REM_INV_REQ_ERR);
    struct ibv_mr *plain = ibv_reg_mr(domain, numbers, sizeof numbers, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    end = connected(IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_REMOTE_WRITE);
    EXPECT(add(&end, (uintptr_t)numbers, plain->rkey, 1).status == IBV_WC_REM_ACCESS_ERR);
    end = connected(IBV_ACCESS_REMOTE_WRITE);
    EXPECT(add(&end, (uintptr_t)numbers, region->rkey, 1).status == IBV_WC_REM_INV_REQ_ERR);
    end = connected(IBV_ACCESS_REMOTE_ATOMIC);
    end.found = (uint64_t *)&end;
    EXPECT(add(&end, (uintptr_t)numbers, region->rkey, 1).status == IBV_WC_LOC_PROT_ERR);
    EXPECT(numbers[0] == 7);

    struct end ends[THREADS];
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        ends[i] = connected(IBV_ACCESS_REMOTE_ATOMIC);
        ends[i].found = &numbers[8 + i];
        EXPECT(!pthread_create(&threads[i], NULL, adds, &ends[i]));
    }
    for (int i = 0; i < THREADS; i++)
        EXPECT(!pthread_join(threads[i], NULL));
    EXPECT(numbers[0] == 7 + THREADS * TIMES);
    puts("done");
    return 0;
}
