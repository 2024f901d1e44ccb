/* Makes queue pairs until the fabric has no more memory for them. Then it prints a line, and waits
   for one. Those that it gives up make room. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>

#include "expect.h"

int main(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && devices[0]);
    struct ibv_context *context = ibv_open_device(devices[0]);
    struct ibv_device_attr device;
    EXPECT(context && !ibv_query_device(context, &device));
    struct ibv_pd *domain = ibv_alloc_pd(context);
    struct ibv_cq *queue = ibv_create_cq(context, 8, NULL, NULL, 0);
    EXPECT(domain && queue);
    struct ibv_qp_init_attr attributes = { .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = device.max_qp_wr, .max_recv_wr = device.max_qp_wr,
            .max_send_sge = device.max_sge, .max_recv_sge = device.max_sge } };
    struct ibv_qp *pairs[1024];
    int count = 0;
    while (count < 1024 && (pairs[count] = ibv_create_qp(domain, &attributes))) count++;
    EXPECT(count > 1 && count < 1024 && errno == ENOMEM);
    EXPECT(!ibv_create_qp(domain, &attributes) && errno == ENOMEM);
    puts("full");
    fflush(stdout);
    EXPECT(getchar() == '\n');
    EXPECT(!ibv_destroy_qp(pairs[--count]) && (pairs[count++] = ibv_create_qp(domain, &attributes)));
    while (count > 0) EXPECT(!ibv_destroy_qp(pairs[--count]));
    EXPECT(!ibv_destroy_cq(queue) && !ibv_dealloc_pd(domain) && !ibv_close_device(context));
    ibv_free_device_list(devices);
    puts("done");
    return 0;
}
