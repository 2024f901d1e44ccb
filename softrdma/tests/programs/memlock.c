/* Registers pages up to its limit on locked memory, and beyond. With an argument, it expects that
   the limit applies. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "expect.h"

#define PAGE 4096

static _Alignas(PAGE) char memory[64 * PAGE];

static struct ibv_pd *domain_of(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    EXPECT(devices && devices[0]);
    struct ibv_pd *domain = ibv_alloc_pd(ibv_open_device(devices[0]));
    EXPECT(domain);
    return domain;
}

int main(int count, char **arguments)
{
    (void)arguments;
    struct rlimit limit = { .rlim_cur = 8 * PAGE, .rlim_max = 8 * PAGE };
    EXPECT(!setrlimit(RLIMIT_MEMLOCK, &limit));
    struct ibv_pd *domain = domain_of();
    if (count == 1) {
        EXPECT(ibv_reg_mr(domain, memory, sizeof memory, 0));
        puts("done");
        return 0;
    }
    /* Two bytes in two pages, and the same pages again. */
    struct ibv_mr *straddles = ibv_reg_mr(domain, memory + PAGE - 1, 2, 0);
    struct ibv_mr *again = ibv_reg_mr(domain, memory, 2 * PAGE, 0);
    EXPECT(straddles && again);
    EXPECT(!ibv_reg_mr(domain, memory, 5 * PAGE, 0) && errno == ENOMEM);
    struct ibv_mr *rest = ibv_reg_mr(domain, memory, 4 * PAGE, 0);
    EXPECT(rest && !ibv_reg_mr(domain, memory, 1, 0) && errno == ENOMEM);
    /* A refused one does not count. */
    EXPECT(!ibv_dereg_mr(straddles));
    EXPECT(!ibv_reg_mr(domain, memory, PAGE, 1 << 10) && errno == EOPNOTSUPP);
    EXPECT(ibv_reg_mr(domain, memory, 2 * PAGE, 0));
    pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        EXPECT(ibv_reg_mr(domain_of(), memory, 8 * PAGE, 0));
        exit(0);
    }
    int status;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    puts("done");
    return 0;
}
