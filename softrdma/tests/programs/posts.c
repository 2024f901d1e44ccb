/* Posts to a queue pair that is connected to itself: while the fabric stands still, into full
   queues, under a fault, and after completions of a former life. The test stops the fabric and
   injects the fault while this waits for a line.

   With `leaves`: a child posts while the fabric stands still, and ends at once. With `fills`: posts
   more than the ring holds while the fabric stands still. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "expect.h"
#include "connect.h"

enum { DEPTH = 4, MORE = DEPTH + 2 };

static struct ibv_context *context;
static struct ibv_pd *domain;
static struct ibv_cq *sends, *receives;
static struct ibv_mr *region;
static char bytes[8];

static void open_device(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && *devices && (context = ibv_open_device(*devices)) && (domain = ibv_alloc_pd(context)));
    EXPECT((sends = ibv_create_cq(context, 64, NULL, NULL, 0)) && (receives = ibv_create_cq(context, 64, NULL, NULL, 0)));
    EXPECT((region = ibv_reg_mr(domain, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE)));
}

static struct ibv_qp *create(void)
{
    struct ibv_qp_init_attr attributes = { .send_cq = sends,
        .recv_cq = receives,
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
        .cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 8 } };
    struct ibv_qp *pair = ibv_create_qp(domain, &attributes);
    EXPECT(pair);
    return pair;
}

static void connect_to(struct ibv_qp *pair, struct ibv_qp *peer)
{
    struct ibv_qp_attr attributes = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .max_rd_atomic = 1 };
    begin_receiving(pair, peer, IBV_ACCESS_REMOTE_WRITE, 0);
    EXPECT(!ibv_modify_qp(pair, &attributes, TO_SEND));
}

/* Posts so many requests in one chain. Returns how many were posted; the next one was refused with
   ENOMEM. */
static int send_chain(struct ibv_qp *pair, enum ibv_wr_opcode opcode, int count)
{
    char byte = 7;
    struct ibv_sge sge = { .addr = (uintptr_t)&byte, .length = 1 };
    struct ibv_send_wr chain[MORE] = { 0 }, *bad = NULL;
    for (int i = 0; i < count; i++) {
        chain[i].next = i + 1 < count ? chain + i + 1 : NULL;
        chain[i].opcode = opcode;
        chain[i].send_flags = IBV_SEND_INLINE;
        /* A WRITE without bytes needs no region. */
        if (opcode == IBV_WR_SEND) chain[i].sg_list = &sge, chain[i].num_sge = 1;
    }
    int posted = ibv_post_send(pair, chain, &bad);
    EXPECT(posted == (bad ? ENOMEM : 0));
    return bad ? bad - chain : count;
}

static int receive_chain(struct ibv_qp *pair, int count)
{
    struct ibv_sge sge = { .addr = (uintptr_t)bytes, .length = sizeof bytes, .lkey = region->lkey };
    struct ibv_recv_wr chain[MORE] = { 0 }, *bad = NULL;
    for (int i = 0; i < count; i++) {
        chain[i].next = i + 1 < count ? chain + i + 1 : NULL;
        chain[i].sg_list = &sge, chain[i].num_sge = 1;
    }
    int posted = ibv_post_recv(pair, chain, &bad);
    EXPECT(posted == (bad ? ENOMEM : 0));
    return bad ? bad - chain : count;
}

static void take(struct ibv_cq *queue, int count)
{
    for (int taken = 0; taken < count;) {
        struct ibv_wc done;
        int polled = ibv_poll_cq(queue, 1, &done);
        EXPECT(polled >= 0 && (!polled || done.status == IBV_WC_SUCCESS));
        taken += polled;
    }
}

static void says(const char *what)
{
    puts(what);
    fflush(stdout);
    EXPECT(getchar() == '\n');
}

/* Fills both queues, whose room the last answer or the depth has said. */
static void fill(struct ibv_qp *pair)
{
    EXPECT(send_chain(pair, IBV_WR_RDMA_WRITE, 1) == 1);
    take(sends, 1);
    EXPECT(send_chain(pair, IBV_WR_RDMA_WRITE, MORE) == DEPTH);
    EXPECT(send_chain(pair, IBV_WR_RDMA_WRITE, 1) == 0);
    take(sends, DEPTH);
    EXPECT(receive_chain(pair, MORE) == DEPTH);
    EXPECT(receive_chain(pair, 1) == 0);
}

/* Leaves as many completions of receives as there is room for. */
static void leave_completions(struct ibv_qp *pair)
{
    EXPECT(send_chain(pair, IBV_WR_SEND, DEPTH) == DEPTH);
    take(sends, DEPTH);
}

/* Posts receives while completions of others wait, whose places are free already. They are not free
   again when these completions are taken. */
static void post_before_taking(struct ibv_qp *pair)
{
    EXPECT(receive_chain(pair, DEPTH) == DEPTH);
    take(receives, DEPTH);
    EXPECT(receive_chain(pair, 1) == 0);
}

/* Fills the receive queue. The completions of before make no room in it. */
static void fill_again(struct ibv_qp *pair)
{
    connect_to(pair, pair);
    EXPECT(receive_chain(pair, DEPTH) == DEPTH);
    take(receives, DEPTH);
    EXPECT(receive_chain(pair, 1) == 0);
}

static int leaves(void)
{
    int down[2], up[2];
    EXPECT(!pipe(down) && !pipe(up));
    pid_t child = fork();
    EXPECT(child >= 0);
    int in = child ? up[0] : down[0], out = child ? down[1] : up[1];
    open_device();
    struct ibv_qp *pair = create(), peer = { .context = context };
    EXPECT(write(out, &pair->qp_num, sizeof pair->qp_num) == sizeof pair->qp_num);
    EXPECT(read(in, &peer.qp_num, sizeof peer.qp_num) == sizeof peer.qp_num);
    connect_to(pair, &peer);
    if (child) {
        struct ibv_qp_attr attributes;
        struct ibv_qp_init_attr made;
        EXPECT(receive_chain(pair, DEPTH) == DEPTH);
        /* The answer comes after the receives are there. */
        EXPECT(!ibv_query_qp(pair, &attributes, IBV_QP_STATE, &made));
    }
    /* Both are connected, and the parent has receives. */
    char byte = 0;
    EXPECT(write(out, &byte, 1) == 1 && read(in, &byte, 1) == 1);
    if (!child) {
        EXPECT(send_chain(pair, IBV_WR_SEND, 1) == 1);
        take(sends, 1);
        says("ready");
        EXPECT(send_chain(pair, IBV_WR_SEND, DEPTH - 1) == DEPTH - 1);
        _exit(0);
    }
    int status;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    says("posted");
    take(receives, DEPTH);
    puts("done");
    return 0;
}

/* So many long posts are more than the ring holds. The first of them certainly fit. */
enum { MANY = 700, FIT = 400, LONG = 256 };

static char window[MANY][LONG];
static struct ibv_mr *written;
static _Atomic int posted;

static void post_long(struct ibv_qp *pair, int number)
{
    char data[LONG];
    memset(data, 1 + number % 250, LONG);
    struct ibv_sge sge = { .addr = (uintptr_t)data, .length = LONG };
    struct ibv_send_wr *bad, wr = { .wr_id = number, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
        .send_flags = IBV_SEND_INLINE, .wr.rdma = { .remote_addr = (uintptr_t)window[number], .rkey = written->rkey } };
    EXPECT(!ibv_post_send(pair, &wr, &bad));
}

static void *post_the_rest(void *pair)
{
    for (int number = 1; number < MANY; number++) {
        post_long(pair, number);
        posted = number;
    }
    return NULL;
}

static int fills(void)
{
    open_device();
    EXPECT((written = ibv_reg_mr(domain, window, sizeof window, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)));
    struct ibv_cq *queue = ibv_create_cq(context, 2 * MANY, NULL, NULL, 0);
    struct ibv_qp_init_attr attributes = { .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
        .cap = { .max_send_wr = MANY, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = LONG } };
    struct ibv_qp *pair = ibv_create_qp(domain, &attributes);
    EXPECT(queue && pair);
    connect_to(pair, pair);
    /* The first answer says how much room there is. */
    post_long(pair, 0);
    says("ready");
    pthread_t rest;
    EXPECT(!pthread_create(&rest, NULL, post_the_rest, pair));
    while (posted < FIT) sched_yield();
    says("posted");
    EXPECT(!pthread_join(rest, NULL));
    for (int taken = 0; taken < MANY;) {
        struct ibv_wc done;
        int polled = ibv_poll_cq(queue, 1, &done);
        EXPECT(polled >= 0 && (!polled || (done.status == IBV_WC_SUCCESS && done.wr_id == (unsigned)taken)));
        taken += polled;
    }
    for (int number = 0; number < MANY; number++)
        for (int at = 0; at < LONG; at++) EXPECT(window[number][at] == (char)(1 + number % 250));
    puts("done");
    return 0;
}

int main(int count, char **arguments)
{
    if (count > 1) return strcmp(arguments[1], "fills") ? leaves() : fills();
    open_device();
    struct ibv_qp *pair = create();
    connect_to(pair, pair);

    /* The first answer says how much room there is. The next posts have none. */
    EXPECT(send_chain(pair, IBV_WR_RDMA_WRITE, 1) == 1);
    take(sends, 1);
    says("ready");
    EXPECT(receive_chain(pair, DEPTH) == DEPTH && send_chain(pair, IBV_WR_SEND, DEPTH - 1) == DEPTH - 1);
    says("posted");
    take(sends, DEPTH - 1);
    take(receives, DEPTH - 1);
    EXPECT(receive_chain(pair, DEPTH - 1) == DEPTH - 1);
    leave_completions(pair);
    take(receives, DEPTH);

    /* The sends whose completions were taken gave their room back. */
    says("again");
    EXPECT(send_chain(pair, IBV_WR_RDMA_WRITE, DEPTH) == DEPTH);
    says("posted again");
    take(sends, DEPTH);

    fill(pair);
    leave_completions(pair);
    post_before_taking(pair);

    leave_completions(pair);
    uint32_t number = pair->qp_num;
    EXPECT(!ibv_destroy_qp(pair));
    EXPECT((pair = create())->qp_num == number);
    fill_again(pair);
    EXPECT(send_chain(pair, IBV_WR_RDMA_WRITE, 1) == 1);
    take(sends, 1);
    leave_completions(pair);
    struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
    EXPECT(!ibv_modify_qp(pair, &reset, IBV_QP_STATE));
    fill_again(pair);

    /* A fault that comes when there is room, and is known to be. */
    EXPECT(send_chain(pair, IBV_WR_RDMA_WRITE, 1) == 1);
    take(sends, 1);
    says("faultless");
    EXPECT(send_chain(pair, IBV_WR_RDMA_WRITE, 1) == 0);
    EXPECT(send_chain(pair, IBV_WR_RDMA_WRITE, 1) == 1);
    take(sends, 1);
    EXPECT(!ibv_destroy_qp(pair));
    puts("done");
    return 0;
}
