/* Checks a machine with two devices: what it is told of each, which objects belong to one of them,
   and which device the connection manager chooses. The arguments are their addresses and that of a
   peer on the network of the second. */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "connect.h"

static struct ibv_context *contexts[2];
static struct sockaddr_in addresses[3];

static struct ibv_qp *create(struct ibv_pd *domain, struct ibv_cq *queue)
{
    struct ibv_qp_init_attr attributes = {
        .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64 },
    };
    return ibv_create_qp(domain, &attributes);
}

static void connect_to(struct ibv_qp *pair, struct ibv_qp *peer)
{
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 1, .rnr_retry = 7, .max_rd_atomic = 1 };
    begin_receiving(pair, peer, 0, 0);
    EXPECT(!ibv_modify_qp(pair, &attributes, TO_SEND));
}

/* Sends a message from a queue pair of one device to that of another. */
static void send_between(struct ibv_qp *from, struct ibv_qp *to)
{
    struct ibv_recv_wr receive = { .wr_id = 1 }, *bad_receive;
    struct ibv_send_wr send = { .wr_id = 2, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad_send;
    struct ibv_wc done;
    int count;
    EXPECT(!ibv_post_recv(to, &receive, &bad_receive) && !ibv_post_send(from, &send, &bad_send));
    while (!(count = ibv_poll_cq(to->recv_cq, 1, &done)))
        ;
    EXPECT(count == 1 && done.wr_id == 1 && done.status == IBV_WC_SUCCESS && done.qp_num == to->qp_num);
    while (!(count = ibv_poll_cq(from->send_cq, 1, &done)))
        ;
    EXPECT(count == 1 && done.wr_id == 2 && done.status == IBV_WC_SUCCESS);
}

static void list(void)
{
    int count;
    struct ibv_device **devices = ibv_get_device_list(&count);
    EXPECT(devices && count == 2 && !devices[2]);
    EXPECT(!strcmp(ibv_get_device_name(devices[0]), "softrdma0") && !strcmp(ibv_get_device_name(devices[1]), "softrdma1"));
    EXPECT(ibv_get_device_guid(devices[0]) != ibv_get_device_guid(devices[1]));
    for (int i = 0; i < 2; i++) {
        struct ibv_device_attr attributes;
        struct ibv_port_attr port;
        union ibv_gid gid;
        EXPECT((contexts[i] = ibv_open_device(devices[i])) && contexts[i]->device == devices[i]);
        EXPECT(!ibv_query_device(contexts[i], &attributes) && attributes.node_guid == ibv_get_device_guid(devices[i]));
        EXPECT(!ibv_query_port(contexts[i], 1, &port) && port.gid_tbl_len == 1);
        EXPECT(!ibv_query_gid(contexts[i], 1, 0, &gid) && !memcmp(gid.raw + 12, &addresses[i].sin_addr, 4));
        EXPECT(ibv_query_gid(contexts[i], 1, 1, &gid));
    }
    EXPECT(contexts[0]->async_fd != contexts[1]->async_fd);
    ibv_free_device_list(devices);
    struct ibv_context **all = rdma_get_devices(&count);
    EXPECT(all && count == 2 && all[0] == contexts[0] && all[1] == contexts[1]);
    rdma_free_devices(all);
}

static void objects(void)
{
    struct ibv_pd *domains[2];
    struct ibv_cq *queues[2];
    struct ibv_qp *pairs[2];
    for (int i = 0; i < 2; i++)
        EXPECT((domains[i] = ibv_alloc_pd(contexts[i])) && (queues[i] = ibv_create_cq(contexts[i], 8, NULL, NULL, 0)));
    EXPECT(!create(domains[0], queues[1]) && errno == EINVAL);
    for (int i = 0; i < 2; i++)
        EXPECT((pairs[i] = create(domains[i], queues[i])) && pairs[i]->context == contexts[i]);
    for (int i = 0; i < 2; i++)
        connect_to(pairs[i], pairs[1 - i]);
    send_between(pairs[0], pairs[1]);
    send_between(pairs[1], pairs[0]);
    for (int i = 0; i < 2; i++)
        EXPECT(!ibv_destroy_qp(pairs[i]) && !ibv_destroy_cq(queues[i]) && !ibv_dealloc_pd(domains[i]));
}

static void connection_manager(void)
{
    struct rdma_cm_id *id;
    for (int i = 0; i < 2; i++) {
        EXPECT(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
        EXPECT(!rdma_bind_addr(id, (struct sockaddr *)&addresses[i]) && id->verbs == contexts[i]);
        EXPECT(!rdma_destroy_id(id));
    }
    struct sockaddr_in anywhere = { .sin_family = AF_INET };
    EXPECT(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
    EXPECT(!rdma_bind_addr(id, (struct sockaddr *)&anywhere) && !id->verbs && !rdma_listen(id, 1) && !rdma_destroy_id(id));
    /* The device is chosen by the peer's network, or by the source if there is one. */
    for (int source = 0; source < 2; source++) {
        struct ibv_pd *foreign;
        struct ibv_qp_init_attr attributes = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_recv_wr = 1 } };
        EXPECT(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
        EXPECT(!rdma_resolve_addr(id, source ? (struct sockaddr *)&addresses[0] : NULL, (struct sockaddr *)&addresses[2], 2000));
        EXPECT(id->verbs == contexts[!source] && id->pd->context == id->verbs);
        EXPECT((foreign = ibv_alloc_pd(contexts[source])));
        EXPECT(rdma_create_qp(id, foreign, &attributes) == -1 && errno == EINVAL);
        EXPECT(!rdma_create_qp(id, NULL, &attributes) && id->qp->context == id->verbs);
        rdma_destroy_qp(id);
        EXPECT(!ibv_dealloc_pd(foreign) && !rdma_destroy_id(id));
    }
}

int main(int count, char **arguments)
{
    EXPECT(count == 4);
    for (int i = 0; i < 3; i++) {
        addresses[i] = (struct sockaddr_in){ .sin_family = AF_INET };
        EXPECT(inet_pton(AF_INET, arguments[i + 1], &addresses[i].sin_addr) == 1);
    }
    list();
    objects();
    connection_manager();
    puts("done");
    return 0;
}
