/* A module that makes the server's table for TCP read-only while the modules after it are loaded:
 * a later server may have it so. The server's own writes to other data of that page succeed: each
 * is one instruction, which is stepped over. */
#include "fmacros.h"

#include "valkeymodule.h"

#include "sds.h"

#include "connection.h"

#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define TRAP_FLAG 0x100

static uintptr_t begin, length;

static void protect(int how) { mprotect((void *)begin, length, how); }

static void onWrite(int number, siginfo_t *info, void *context) {
    uintptr_t at = (uintptr_t)info->si_addr;

    if (at < begin || at >= begin + length) {
        signal(number, SIG_DFL);
        return;
    }
    protect(PROT_READ | PROT_WRITE);
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
}

static void onStep(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    protect(PROT_READ);
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
}

/* The server runs: all modules are loaded. */
static void giveBack(ValkeyModuleCtx *ctx, void *data) {
    (void)ctx, (void)data;
    protect(PROT_READ | PROT_WRITE);
}

int ValkeyModule_OnLoad(ValkeyModuleCtx *ctx, ValkeyModuleString **argv, int argc) {
    struct sigaction write = {.sa_sigaction = onWrite, .sa_flags = SA_SIGINFO}, step = {.sa_sigaction = onStep, .sa_flags = SA_SIGINFO};
    uintptr_t page = sysconf(_SC_PAGESIZE), table;

    (void)argv, (void)argc;
    if (ValkeyModule_Init(ctx, "table", 1, VALKEYMODULE_APIVER_1) == VALKEYMODULE_ERR) return VALKEYMODULE_ERR;
    table = (uintptr_t)connectionTypeTcp();
    begin = table & ~(page - 1);
    length = (table + sizeof(ConnectionType) - begin + page - 1) & ~(page - 1);
    sigaction(SIGSEGV, &write, NULL);
    sigaction(SIGTRAP, &step, NULL);
    ValkeyModule_CreateTimer(ctx, 0, giveBack, NULL);
    protect(PROT_READ);
    return VALKEYMODULE_OK;
}
