/* Posts work requests of several elements between two queue pairs of its own, and one too long. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "connect.h"

static char bytes[4096];
static struct ibv_context *context;
static struct ibv_cq *queue;
static struct ibv_mr *region;

static struct ibv_qp *create(struct ibv_pd *domain)
{
    struct ibv_qp_init_attr attributes = {
        .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 3, .max_recv_sge = 4, .max_inline_data = 64 },
    };
    struct ibv_qp *pair = ibv_create_qp(domain, &attributes);
    EXPECT(pair && attributes.cap.max_send_sge >= 3 && attributes.cap.max_recv_sge >= 4);
    return pair;
}

static void connect_to(struct ibv_qp *pair, struct ibv_qp *peer)
{
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 1, .rnr_retry = 1, .max_rd_atomic = 1 };
    begin_receiving(pair, peer, 0, 0);
    EXPECT(!ibv_modify_qp(pair, &attributes, TO_SEND));
}

static struct ibv_sge element(int offset, int len)
{
    struct ibv_sge sge = { .addr = (uintptr_t)bytes + offset, .length = len, .lkey = region->lkey };
    return sge;
}

static void completes(enum ibv_wc_opcode opcode, unsigned len)
{
    struct ibv_wc wc;
    while (ibv_poll_cq(queue, 1, &wc) == 0) { }
    EXPECT(wc.status == IBV_WC_SUCCESS && wc.opcode == opcode && (len == 0 || wc.byte_len == len));
}

static void send_from(struct ibv_qp *from, struct ibv_qp *to, int flags)
{
    memset(bytes, 0, sizeof bytes);
    memcpy(bytes, "abcdefghij", 10);
    struct ibv_sge into[] = { element(100, 4), element(200, 1), element(300, 5), element(400, 9) };
    struct ibv_recv_wr receive = { .sg_list = into, .num_sge = 4 }, *refused_receive;
    EXPECT(!ibv_post_recv(to, &receive, &refused_receive));
    struct ibv_sge list[] = { element(6, 4), element(0, 0), element(0, 6) };
    struct ibv_send_wr send = { .sg_list = list, .num_sge = 3, .opcode = IBV_WR_SEND, .send_flags = flags }, *refused;
    EXPECT(!ibv_post_send(from, &send, &refused));
    /* Both report to this queue; the responder's completion is the first. */
    completes(IBV_WC_RECV, 10);
    completes(IBV_WC_SEND, 0);
    EXPECT(!memcmp(bytes + 100, "ghij", 4) && !memcmp(bytes + 200, "a", 1) && !memcmp(bytes + 300, "bcdef", 5));
    EXPECT(!bytes[104] && !bytes[201] && !bytes[305] && !bytes[400]);
}

int main(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && devices[0]);
    context = ibv_open_device(devices[0]);
    struct ibv_pd *domain = ibv_alloc_pd(context);
    queue = ibv_create_cq(context, 16, NULL, NULL, 0);
    region = ibv_reg_mr(domain, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
    EXPECT(domain && queue && region);
    struct ibv_qp *one = create(domain), *two = create(domain);
    connect_to(one, two);
    connect_to(two, one);
    send_from(one, two, 0);
    send_from(two, one, IBV_SEND_INLINE);

    struct ibv_sge many[4] = { 0 };
    struct ibv_send_wr send = { .sg_list = many, .num_sge = 4, .opcode = IBV_WR_SEND }, *refused = NULL;
    EXPECT(ibv_post_send(one, &send, &refused) == EINVAL && refused == &send);

    EXPECT(!ibv_destroy_qp(one) && !ibv_destroy_qp(two) && !ibv_dereg_mr(region) && !ibv_destroy_cq(queue));
    EXPECT(!ibv_dealloc_pd(domain) && !ibv_close_device(context));
    ibv_free_device_list(devices);
    puts("done");
    return 0;
}
