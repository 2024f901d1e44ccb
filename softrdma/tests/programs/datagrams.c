/* Tests queue pairs for datagrams: address handles, the header in front of the received bytes, an
   answer to where a datagram came from, and what is lost or refused. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

enum { KEY = 0x11, GRH = 40, ROOM = 8192 };

static char bytes[3 * ROOM];
static struct ibv_context *context;
static struct ibv_pd *domain;
static struct ibv_cq *queue;
static struct ibv_mr *region;

static struct ibv_qp *create(void)
{
    struct ibv_qp_init_attr_ex attributes = {
        .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_UD,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64 },
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = domain,
        .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
    };
    EXPECT(!ibv_create_qp_ex(context, &attributes) && errno == EOPNOTSUPP);
    attributes.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    struct ibv_qp *pair = ibv_create_qp_ex(context, &attributes);
    EXPECT(pair);
    struct ibv_qp_attr state = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = KEY };
    EXPECT(!ibv_modify_qp(pair, &state, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
    state.qp_state = IBV_QPS_RTR;
    EXPECT(!ibv_modify_qp(pair, &state, IBV_QP_STATE));
    state.qp_state = IBV_QPS_RTS;
    EXPECT(!ibv_modify_qp(pair, &state, IBV_QP_STATE | IBV_QP_SQ_PSN));
    struct ibv_qp_init_attr made;
    EXPECT(!ibv_query_qp(pair, &state, IBV_QP_QKEY, &made) && state.qkey == KEY && made.qp_type == IBV_QPT_UD);
    return pair;
}

static void receive(struct ibv_qp *pair, uint64_t id)
{
    struct ibv_sge sge = { .addr = (uintptr_t)bytes + ROOM, .length = ROOM, .lkey = region->lkey };
    struct ibv_recv_wr work = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
    EXPECT(!ibv_post_recv(pair, &work, &bad));
}

static struct ibv_wc next(uint64_t id, enum ibv_wc_status status)
{
    struct ibv_wc done;
    int count;
    while (!(count = ibv_poll_cq(queue, 1, &done)))
        ;
    EXPECT(count == 1 && done.wr_id == id && done.status == status);
    return done;
}

/* Sends bytes from the beginning of the memory. */
static int post(struct ibv_qp *from, enum ibv_wr_opcode opcode, struct ibv_ah *ah, struct ibv_qp *to, uint32_t key, unsigned len)
{
    struct ibv_sge sge = { .addr = (uintptr_t)bytes, .length = len, .lkey = region->lkey };
    struct ibv_send_wr work = {
        .wr_id = 9, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED, .imm_data = htobe32(5) };
    struct ibv_send_wr *bad = NULL;
    work.wr.ud.ah = ah;
    work.wr.ud.remote_qpn = to->qp_num;
    work.wr.ud.remote_qkey = key;
    int posted = ibv_post_send(from, &work, &bad);
    EXPECT(posted == 0 || bad == &work);
    return posted;
}

int main(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && *devices && (context = ibv_open_device(*devices)) && (domain = ibv_alloc_pd(context)));
    struct ibv_device_attr device;
    EXPECT(!ibv_query_device(context, &device) && device.max_ah > 0 && device.max_mcast_grp == 0);
    region = ibv_reg_mr(domain, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
    EXPECT(region && (queue = ibv_create_cq(context, 16, NULL, NULL, 0)));
    struct ibv_qp *one = create(), *other = create();

    /* Handles: RoCE needs a GID, of an entry that there is. */
    struct ibv_ah_attr path = { .is_global = 1, .port_num = 1 };
    EXPECT(!ibv_query_gid(context, 1, 0, &path.grh.dgid));
    struct ibv_ah_attr wrong[3] = { path, path, path };
    wrong[0].is_global = 0;
    wrong[1].port_num = 2;
    wrong[2].grh.sgid_index = 9;
    for (int i = 0; i < 3; i++)
        EXPECT(!ibv_create_ah(domain, &wrong[i]) && errno == EINVAL);
    struct ibv_ah *ah = ibv_create_ah(domain, &path);
    EXPECT(ah && ah->pd == domain && ah->context == context);

    /* A message arrives behind the header, and the answer finds its way by that. */
    strcpy(bytes, "question");
    receive(other, 1);
    EXPECT(!post(one, IBV_WR_SEND_WITH_IMM, ah, other, KEY, 9));
    next(9, IBV_WC_SUCCESS);
    struct ibv_wc done = next(1, IBV_WC_SUCCESS);
    EXPECT(done.byte_len == GRH + 9 && done.src_qp == one->qp_num && done.qp_num == other->qp_num && !done.slid);
    EXPECT(done.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM) && done.imm_data == htobe32(5));
    EXPECT(!strcmp(bytes + ROOM + GRH, "question"));
    struct ibv_grh *header = (struct ibv_grh *)(bytes + ROOM);
    struct ibv_ah_attr back;
    EXPECT(!ibv_init_ah_from_wc(context, 1, &done, header, &back));
    EXPECT(back.is_global && back.port_num == 1 && !memcmp(&back.grh.dgid, &path.grh.dgid, sizeof path.grh.dgid));
    EXPECT(ibv_init_ah_from_wc(context, 2, &done, header, &back) == -1 && errno == EINVAL);
    struct ibv_ah *returns = ibv_create_ah_from_wc(domain, &done, header, 1);
    EXPECT(returns);
    receive(one, 2);
    struct ibv_qp_ex *poster = ibv_qp_to_qp_ex(other);
    ibv_wr_start(poster);
    poster->wr_id = 9;
    poster->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_send(poster);
    ibv_wr_set_ud_addr(poster, returns, done.src_qp, KEY);
    ibv_wr_set_inline_data(poster, "answer", 7);
    EXPECT(!ibv_wr_complete(poster));
    next(9, IBV_WC_SUCCESS);
    EXPECT(next(2, IBV_WC_SUCCESS).src_qp == other->qp_num && !strcmp(bytes + ROOM + GRH, "answer"));
    done.wc_flags = 0;
    EXPECT(!ibv_create_ah_from_wc(domain, &done, header, 1) && errno == EINVAL);

    /* Lost in silence: another key, no receive. */
    receive(other, 3);
    EXPECT(!post(one, IBV_WR_SEND, ah, other, KEY + 1, 9));
    next(9, IBV_WC_SUCCESS);
    EXPECT(!post(one, IBV_WR_SEND, ah, one, KEY, 9));
    next(9, IBV_WC_SUCCESS);
    EXPECT(!ibv_poll_cq(queue, 1, &done));

    /* Refused: no handle, one of another domain, what is not for datagrams. */
    EXPECT(post(one, IBV_WR_SEND, NULL, other, KEY, 9) == EINVAL);
    struct ibv_pd *strange = ibv_alloc_pd(context);
    struct ibv_ah *of_another = ibv_create_ah(strange, &path);
    EXPECT(post(one, IBV_WR_SEND, of_another, other, KEY, 9) == EINVAL);
    EXPECT(post(one, IBV_WR_RDMA_WRITE, ah, other, KEY, 9) == EINVAL);
    EXPECT(post(one, IBV_WR_RDMA_READ, ah, other, KEY, 9) == EINVAL);
    union ibv_gid group = { .raw = { 0xff, 0x0e } };
    EXPECT(ibv_attach_mcast(one, &group, 0) == EOPNOTSUPP);

    /* As long as a packet, and longer. */
    EXPECT(!post(one, IBV_WR_SEND, ah, other, KEY, 4096));
    next(9, IBV_WC_SUCCESS);
    EXPECT(next(3, IBV_WC_SUCCESS).byte_len == GRH + 4096);
    EXPECT(!post(one, IBV_WR_SEND, ah, other, KEY, 4097));
    next(9, IBV_WC_LOC_LEN_ERR);

    EXPECT(!ibv_destroy_ah(of_another) && !ibv_destroy_ah(returns) && !ibv_destroy_ah(ah));
    EXPECT(!ibv_destroy_qp(one) && !ibv_destroy_qp(other));
    puts("done");
    return 0;
}
