/* Peers of raw verbs that ask for connections, and send nothing.
 *
 *     strangers ADDRESS PORT COUNT asks     never completes a connection
 *     strangers ADDRESS PORT COUNT silent   completes each, and keeps it
 *
 * It prints a line when all have asked, and a second one when each of them is established or
 * rejected. Then it waits until it is killed. */
#include <arpa/inet.h>
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MUST(what)                                                                                \
    do {                                                                                          \
        if (!(what)) {                                                                            \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno);          \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

static struct rdma_event_channel *channel;

static struct rdma_cm_event *next(void) {
    struct rdma_cm_event *event;
    MUST(!rdma_get_cm_event(channel, &event));
    return event;
}

/* Waits for this event, and returns its identifier. */
static struct rdma_cm_id *awaited(enum rdma_cm_event_type expected) {
    struct rdma_cm_event *event = next();
    struct rdma_cm_id *id = event->id;
    MUST(event->event == expected);
    MUST(!rdma_ack_cm_event(event));
    return id;
}

static void ask(struct sockaddr *server) {
    struct rdma_conn_param how = {.responder_resources = 1, .initiator_depth = 1, .retry_count = 6, .rnr_retry_count = 7};
    struct ibv_qp_init_attr queues = {
        .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
    struct rdma_cm_id *id;
    MUST(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
    MUST(!rdma_resolve_addr(id, NULL, server, 60000));
    awaited(RDMA_CM_EVENT_ADDR_RESOLVED);
    MUST(!rdma_resolve_route(id, 60000));
    awaited(RDMA_CM_EVENT_ROUTE_RESOLVED);
    MUST(!rdma_create_qp(id, NULL, &queues));
    MUST(!rdma_connect(id, &how));
}

int main(int count, char **arguments) {
    struct sockaddr_in server = {.sin_family = AF_INET};
    int asked, answered = 0, established = 0;
    MUST(count == 5 && inet_pton(AF_INET, arguments[1], &server.sin_addr) == 1);
    server.sin_port = htons((uint16_t)atoi(arguments[2]));
    setvbuf(stdout, NULL, _IOLBF, 0);
    /* Each resolves on a channel of its own, so that answers to earlier ones are not read here. */
    struct rdma_event_channel **channels = calloc((size_t)atoi(arguments[3]), sizeof *channels);
    MUST(channels);
    for (asked = 0; asked < atoi(arguments[3]); asked++) {
        MUST(channels[asked] = channel = rdma_create_event_channel());
        ask((struct sockaddr *)&server);
    }
    printf("%d have asked\n", asked);
    if (!strcmp(arguments[4], "silent")) {
        for (; answered < asked; answered++) {
            channel = channels[answered];
            struct rdma_cm_event *event = next();
            established += event->event == RDMA_CM_EVENT_ESTABLISHED;
            MUST(!rdma_ack_cm_event(event));
        }
        printf("%d are established\n", established);
    }
    for (;;) pause();
}
