/* Connects queue pairs without a connection manager, with the attributes that ibv_modify_qp(3)
   lists for each state. Include it after expect.h. */

static void begin_receiving(struct ibv_qp *pair, struct ibv_qp *peer, int access, uint32_t psn)
{
    struct ibv_qp_attr attributes = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = access };
    EXPECT(!ibv_modify_qp(pair, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attributes = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = peer->qp_num,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .rq_psn = psn,
        .ah_attr = { .is_global = 1, .port_num = 1 } };
    EXPECT(!ibv_query_gid(peer->context, 1, 0, &attributes.ah_attr.grh.dgid));
    EXPECT(!ibv_modify_qp(pair, &attributes,
        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
            IBV_QP_MIN_RNR_TIMER));
}

/* The attributes that a queue pair needs to send. */
#define TO_SEND \
    (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)
