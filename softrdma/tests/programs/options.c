/* Checks that rdma_set_option and ibv_reg_mr_iova2 answer as Linux does (ucma_set_option_id,
   ib_check_mr_access). */
#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "expect.h"

static struct rdma_cm_id *id;

/* Returns the `errno` that the call leaves, or 0. */
static int set(int level, int name, size_t len)
{
    int value = 1;
    errno = 0;
    return rdma_set_option(id, level, name, &value, len) ? errno : 0;
}

int main(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    EXPECT(channel && !rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
    EXPECT(set(RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, 1) == 0);
    EXPECT(set(RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, 4) == EINVAL);
    EXPECT(set(RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 1) == 0);
    EXPECT(set(RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 4) == EINVAL);
    EXPECT(set(RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, 4) == 0);
    EXPECT(set(RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, 1) == EINVAL);
    EXPECT(set(RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, 4) == 0);
    EXPECT(set(RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, 8) == EINVAL);
    EXPECT(set(RDMA_OPTION_ID, 99, 1) == ENOSYS);
    EXPECT(set(99, RDMA_OPTION_ID_TOS, 1) == ENOSYS);

    int count;
    struct ibv_device **devices = ibv_get_device_list(&count);
    EXPECT(devices && count == 1);
    struct ibv_context *context = ibv_open_device(devices[0]);
    struct ibv_pd *domain = ibv_alloc_pd(context);
    EXPECT(domain);
    static char bytes[4096];
    uint64_t address = (uintptr_t)bytes;
    /* An optional right has no visible effect, and does not change the others. */
    unsigned optional = IBV_ACCESS_RELAXED_ORDERING;
    struct ibv_mr *region =
        ibv_reg_mr_iova2(domain, bytes, sizeof bytes, address, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | optional);
    EXPECT(region && region->addr == bytes && region->length == sizeof bytes && region->pd == domain);
    EXPECT(!ibv_dereg_mr(region));
    errno = 0;
    EXPECT(!ibv_reg_mr_iova2(domain, bytes, sizeof bytes, address, IBV_ACCESS_REMOTE_WRITE | optional) && errno == EINVAL);
    EXPECT(!ibv_reg_mr_iova2(domain, bytes, sizeof bytes, address, IBV_ACCESS_ON_DEMAND) && errno == EOPNOTSUPP);
    /* A right to atomics requires local write access. */
    struct ibv_device_attr attributes;
    EXPECT(!ibv_query_device(context, &attributes) && attributes.atomic_cap == IBV_ATOMIC_HCA);
    region = ibv_reg_mr(domain, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
    EXPECT(region && !ibv_dereg_mr(region));
    EXPECT(!ibv_reg_mr(domain, bytes, sizeof bytes, IBV_ACCESS_REMOTE_ATOMIC) && errno == EINVAL);
    /* Peers may address the bytes from another address on. */
    region = ibv_reg_mr_iova2(domain, bytes, sizeof bytes, 0, optional);
    EXPECT(region && !ibv_dereg_mr(region));

    EXPECT(!ibv_dealloc_pd(domain) && !ibv_close_device(context));
    ibv_free_device_list(devices);
    EXPECT(!rdma_destroy_id(id));
    rdma_destroy_event_channel(channel);
    printf("done\n");
    return 0;
}
