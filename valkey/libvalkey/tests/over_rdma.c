/* Linked with libvalkey's own tests and --wrap=valkeyContextRegisterFuncs: what they do over TCP
 * they do over RDMA. */
#include <rdma.h>
#include <valkey.h>
#include <valkey_private.h>

static valkeyContextFuncs *rdma, changed;

/* One test gives a connection ten milliseconds. On a busy machine an emulated device needs more. */
static int connect_later(valkeyContext *c, const valkeyOptions *options) {
    static const struct timeval longer = {.tv_sec = 30};
    valkeyOptions more = *options;
    const struct timeval *limit = options->connect_timeout;
    if (limit && limit->tv_sec == 0 && limit->tv_usec == 10000) more.connect_timeout = &longer;
    return rdma->connect(c, &more);
}

int __real_valkeyContextRegisterFuncs(valkeyContextFuncs *funcs, enum valkeyConnectionType type);
int __wrap_valkeyContextRegisterFuncs(valkeyContextFuncs *funcs, enum valkeyConnectionType type) {
    if (type == VALKEY_CONN_RDMA) {
        rdma = funcs;
        changed = *funcs;
        changed.connect = connect_later;
    }
    return __real_valkeyContextRegisterFuncs(type == VALKEY_CONN_TCP ? &changed : funcs, type);
}

__attribute__((constructor)) static void begin(void) { valkeyInitiateRdma(); }
