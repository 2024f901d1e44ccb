/* Forks children that end, close, destroy, use and execute what they inherit. None of it changes
   anything for the parent, which exchanges a message with itself after each.

   With ADDRESS PORT WAY WHEN: one child, for trust/forks/run, which has the same for others. If
   WHEN is `busy`, a thread waits for an event meanwhile. Both sides are here, and need no server.

   With `executes`: executes another program while a child lives, which ends with standard input.
   With `again`: closes all descriptors and executes itself, as Valkey's DEBUG RESTART does.
   With `daemon`: forks twice, and both parents end.
   Both then use the device anew when a line comes. */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "expect.h"
#include "connect.h"

static struct ibv_context *context;
static struct ibv_pd *domain;
static struct ibv_comp_channel *channel;
static struct ibv_cq *queue;
static struct ibv_mr *region;
static struct ibv_qp *one, *other;
static struct rdma_event_channel *events;
static struct rdma_cm_id *listener;
static char bytes[128];

static struct ibv_qp *create(void)
{
    struct ibv_qp_init_attr attributes = { .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
    struct ibv_qp *pair = ibv_create_qp(domain, &attributes);
    EXPECT(pair);
    return pair;
}

static void connect_to(struct ibv_qp *pair, struct ibv_qp *peer)
{
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };
    begin_receiving(pair, peer, IBV_ACCESS_REMOTE_WRITE, 0);
    EXPECT(!ibv_modify_qp(pair, &attributes, TO_SEND));
}

static int receive(void)
{
    struct ibv_sge sge = { .addr = (uintptr_t)bytes + 64, .length = 64, .lkey = region->lkey };
    struct ibv_recv_wr work = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
    return ibv_post_recv(other, &work, &bad);
}

static int sends(void)
{
    struct ibv_sge sge = { .addr = (uintptr_t)bytes, .length = 64, .lkey = region->lkey };
    struct ibv_send_wr work = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
        .send_flags = IBV_SEND_SIGNALED }, *bad;
    return ibv_post_send(one, &work, &bad);
}

/* Sends a message, which raises an event. */
static void exchanges(void)
{
    struct ibv_cq *of;
    void *user;
    struct ibv_wc wc;
    EXPECT(!receive() && !ibv_req_notify_cq(queue, 0) && !sends());
    EXPECT(!ibv_get_cq_event(channel, &of, &user) && of == queue);
    ibv_ack_cq_events(queue, 1);
    for (int count = 0; count < 2;) {
        int polled = ibv_poll_cq(queue, 1, &wc);
        EXPECT(polled >= 0 && (!polled || wc.status == IBV_WC_SUCCESS));
        count += polled;
    }
}

static void just_ends(void) { }

static void closes(void)
{
    for (int file = 3; file < 1024; file++) close(file);
}

/* These are its parent's. */
static void destroys(void)
{
    EXPECT(ibv_destroy_qp(one) == EINVAL && ibv_destroy_cq(queue) == EINVAL);
    EXPECT(ibv_dereg_mr(region) == EINVAL && ibv_destroy_comp_channel(channel) == EINVAL);
    EXPECT(ibv_dealloc_pd(domain) == EINVAL && rdma_destroy_id(listener) == -1 && errno == EINVAL);
    rdma_destroy_event_channel(events);
    ibv_close_device(context);
}

static void makes_its_own(void)
{
    EXPECT((domain = ibv_alloc_pd(context)) && (channel = ibv_create_comp_channel(context)));
    EXPECT((queue = ibv_create_cq(context, 8, NULL, channel, 0)));
    EXPECT((region = ibv_reg_mr(domain, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE)));
    one = create();
    other = create();
    connect_to(one, other);
    connect_to(other, one);
    exchanges();
}

static void uses(void)
{
    struct ibv_wc wc;
    EXPECT(receive() && sends() && ibv_poll_cq(queue, 1, &wc) < 0 && ibv_req_notify_cq(queue, 0));
    /* It has a device of its own. */
    makes_its_own();
}

static void executes(void)
{
    execl("/proc/self/exe", "forks", "nothing", NULL);
    EXPECT(!"executed");
}

static void forks(void)
{
    pid_t child = fork();
    if (!child) {
        uses();
        exit(0);
    }
    int status;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
}

static void after(pid_t child, void (*act)(void), int at_once)
{
    int status;
    EXPECT(child >= 0);
    if (!child) {
        /* One that hangs ends with its parent. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        act();
        if (at_once) _exit(0);
        exit(0);
    }
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    exchanges();
}

static void open_device(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && devices[0] && (context = ibv_open_device(devices[0])));
}

/* Ends this process, and goes on in a child. */
static void hands_on(void)
{
    pid_t child = fork();
    EXPECT(child >= 0);
    if (child) _exit(0);
}

/* Uses the device when a line comes. */
static int comes_back(void)
{
    printf("is another\n");
    fflush(stdout);
    EXPECT(getchar() == '\n');
    open_device();
    makes_its_own();
    puts("done");
    return 0;
}

/* Has an event when its only queue pair, which has failed, gets a receive. */
static struct ibv_comp_channel *waited;

static void *waits(void *none)
{
    struct ibv_cq *of;
    void *user;
    EXPECT(!ibv_get_cq_event(waited, &of, &user));
    ibv_ack_cq_events(of, 1);
    return none;
}

static void clones(void)
{
    /* A child that the C library does not know of. It has not used what it inherits. */
    after(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0), just_ends, 0);
    after(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0), closes, 1);
    after(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0), executes, 1);
    pid_t child = vfork();
    if (!child) {
        execl("/proc/self/exe", "forks", "nothing", NULL);
        _exit(1);
    }
    int status;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    exchanges();
}

static int one_way(const char *way, int busy)
{
    static const struct {
        const char *name;
        void (*act)(void);
    } ways[] = { { "_exit", just_ends }, { "exit", just_ends }, { "drop", destroys }, { "close", closes },
        { "use", uses }, { "exec", executes }, { "fork", forks }, { "clone", NULL } };
    unsigned at = 0;
    while (at < sizeof ways / sizeof *ways && strcmp(way, ways[at].name)) at++;
    if (at == sizeof ways / sizeof *ways) return 77;
    pthread_t thread;
    struct ibv_qp *failed = NULL;
    if (busy) {
        struct ibv_cq *first = queue;
        EXPECT((waited = ibv_create_comp_channel(context)) && (queue = ibv_create_cq(context, 8, NULL, waited, 0)));
        EXPECT(!ibv_req_notify_cq(queue, 0));
        failed = create();
        queue = first;
        connect_to(failed, one);
        EXPECT(!ibv_modify_qp(failed, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR }, IBV_QP_STATE));
        EXPECT(!pthread_create(&thread, NULL, waits, NULL));
    }
    if (ways[at].act) after(fork(), ways[at].act, at == 0);
    else clones();
    if (busy) {
        struct ibv_recv_wr work = { .wr_id = 1 }, *bad;
        EXPECT(pthread_tryjoin_np(thread, NULL) == EBUSY && !ibv_post_recv(failed, &work, &bad));
        EXPECT(!pthread_join(thread, NULL));
    }
    exchanges();
    return 0;
}

int main(int count, char **arguments)
{
    if (count > 1 && !strcmp(arguments[1], "anew")) return comes_back();
    if (count > 1 && !strcmp(arguments[1], "nothing")) return 0;
    if (count > 1 && !strcmp(arguments[1], "waits")) {
        printf("is another\n");
        fflush(stdout);
        return getchar() != '\n';
    }
    open_device();
    makes_its_own();
    EXPECT((events = rdma_create_event_channel()) && !rdma_create_id(events, &listener, NULL, RDMA_PS_TCP));
    EXPECT(!rdma_listen(listener, 1));
    if (count > 1 && !strcmp(arguments[1], "again")) {
        closes();
        execl("/proc/self/exe", "forks", "anew", NULL);
        EXPECT(!"executed");
    }
    if (count > 1 && !strcmp(arguments[1], "daemon")) {
        hands_on();
        EXPECT(setsid() != -1);
        hands_on();
        return comes_back();
    }
    if (count > 1 && !strcmp(arguments[1], "executes")) {
        pid_t child = fork();
        EXPECT(child >= 0);
        if (!child) {
            while (getchar() != EOF) { }
            _exit(0);
        }
        execl("/proc/self/exe", "forks", "waits", NULL);
        EXPECT(!"executed");
    }

    if (count == 5) return one_way(arguments[3], !strcmp(arguments[4], "busy"));

    /* Memory that the program itself may not access is not registered. */
    char *own = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(own != MAP_FAILED && !mprotect(own + 4096, 4096, PROT_READ) && !mprotect(own + 8192, 4096, PROT_NONE));
    EXPECT(!ibv_reg_mr(domain, own, 4097, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
    EXPECT(!ibv_reg_mr(domain, own, 3 * 4096, 0) && errno == EFAULT);
    EXPECT(!ibv_reg_mr(domain, (void *)8, 8, 0) && errno == EFAULT);
    struct ibv_mr *readable = ibv_reg_mr(domain, own, 4097, 0);
    EXPECT(readable && !ibv_dereg_mr(readable));

    void (*acts[])(void) = { just_ends, closes, destroys, uses, executes, forks };
    for (unsigned act = 0; act < sizeof acts / sizeof *acts; act++)
        for (int at_once = 0; at_once < 2; at_once++) after(fork(), acts[act], at_once);
    clones();
    EXPECT(!ibv_destroy_qp(one) && !ibv_destroy_qp(other) && !ibv_destroy_cq(queue));
    EXPECT(!ibv_destroy_comp_channel(channel) && !ibv_dereg_mr(region) && !ibv_dealloc_pd(domain));
    EXPECT(!rdma_destroy_id(listener));
    rdma_destroy_event_channel(events);
    puts("done");
    return 0;
}
