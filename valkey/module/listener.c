/* The device, the endpoint, and the addresses that the server listens on. */
#include "engine.h"

#include <arpa/inet.h>
#include <linux/capability.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>

engineState engine;

/* The endpoint's listeners, in the order of the addresses. */
static uint64_t listeners[CONFIG_BINDADDR_MAX];

/* The kernel of TCP delivers what was written before a process ends. The server calls this in a
 * clean shutdown, not in exit(3): Valkey calls that in a signal handler, which may have interrupted
 * a thread that holds the endpoint's lock. */
void engineDeliver(void) {
    vkrdma_usage usage = {0};
    vkrdma_event event;
    size_t count;
    monotime until = getMonotonicUs() + 500000;
    listIter all;
    listNode *node;

    listRewind(engine.connections, &all);
    while ((node = listNext(&all)) != NULL)
        vkrdma_abandon(engine.endpoint, ((engineConn *)listNodeValue(node))->id, engine.linger, NULL);
    engineLinksDeliver(until);
    while (vkrdma_usage_of(engine.endpoint, &usage, sizeof(usage), NULL) == VKRDMA_OK && usage.connections > 0 &&
           getMonotonicUs() < until && vkrdma_wait(engine.endpoint, 10000, NULL) == VKRDMA_OK &&
           vkrdma_progress(engine.endpoint, &event, 1, sizeof(event), &count, NULL) == VKRDMA_OK) {
    }
    serverLog(LL_VERBOSE, "RDMA: the last bytes of all connections but %llu are delivered", (unsigned long long)usage.connections);
}

vkrdma_options engineOptions(void) {
    vkrdma_options options = engine.options;

    options.window = server.rdma_ctx_config.rx_size;
    /* -1 is upstream's "any". It is chosen once, because one thread serves all connections and
     * each vector needs its own completion queues. */
    options.completion_vector = server.rdma_ctx_config.completion_vector >= 0
                                    ? server.rdma_ctx_config.completion_vector
                                    : (int)(getpid() & 1023);
    return options;
}

/* Whether the server may lock any amount of memory. The kernel asks for this capability when memory
 * is registered. Root of a container seldom has it. */
static int locksAnything(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3] = {{0}};

    return syscall(SYS_capget, &header, sets) == 0 && (sets[CAP_TO_INDEX(CAP_IPC_LOCK)].effective & CAP_TO_MASK(CAP_IPC_LOCK));
}

static int openEndpoint(void) {
    vkrdma_device *device = NULL;
    vkrdma_error error;
    struct rlimit locked;

    if (engine.endpoint) return C_OK;
    if (vkrdma_verbs_open(&device, &error) != VKRDMA_OK ||
        vkrdma_endpoint_new(device, &engine.limits, &engine.endpoint, &error) != VKRDMA_OK) {
        serverLog(LL_WARNING, "RDMA: %s", error.text);
        vkrdma_device_free(device);
        return C_ERR;
    }
    vkrdma_device_free(device);
    if (engineWatch() != C_OK) {
        serverLog(LL_WARNING, "RDMA: the event loop takes no more descriptors");
        vkrdma_endpoint_free(engine.endpoint);
        engine.endpoint = NULL;
        return C_ERR;
    }
    if (locksAnything() || getrlimit(RLIMIT_MEMLOCK, &locked) != 0) locked.rlim_cur = RLIM_INFINITY;
    engineMayLock(locked.rlim_cur == RLIM_INFINITY ? UINT64_MAX : locked.rlim_cur);
    if (locked.rlim_cur != RLIM_INFINITY) {
        serverLog(LL_WARNING,
                  "RDMA: the server may lock %llu KiB of memory, and refuses connections when that is used up. "
                  "Raise the limit: LimitMEMLOCK=infinity in the systemd unit, or ulimit -l.",
                  (unsigned long long)locked.rlim_cur / 1024);
    }
    return C_OK;
}

/* Puts an address into `text` as libvkrdma takes it. */
int engineAddressText(const struct addrinfo *found, char *text, size_t size) {
    if (found->ai_family == AF_INET6) {
        struct sockaddr_in6 *sa = (struct sockaddr_in6 *)found->ai_addr;
        inet_ntop(AF_INET6, &sa->sin6_addr, text, size);
        if (sa->sin6_scope_id) snprintf(text + strlen(text), size - strlen(text), "%%%u", sa->sin6_scope_id);
    } else if (found->ai_family == AF_INET) {
        inet_ntop(AF_INET, &((struct sockaddr_in *)found->ai_addr)->sin_addr, text, size);
    } else {
        return C_ERR;
    }
    return C_OK;
}

/* Puts the numeric address of a name or an address of rdma-bind into `text`. */
static int numeric(const char *address, char *text, size_t size) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found = NULL;
    int status;

    hints.ai_family = strchr(address, ':') ? AF_INET6 : AF_INET;
    if (!strcmp(address, "*") || !strcmp(address, "::*")) address = NULL;
    status = getaddrinfo(address, "0", &hints, &found);
    if (status != 0) {
        serverLog(LL_WARNING, "RDMA: rdma-bind %s: %s", address ? address : "*", gai_strerror(status));
        return C_ERR;
    }
    status = engineAddressText(found, text, size);
    freeaddrinfo(found);
    return status;
}

int engineListen(connListener *listener) {
    static char *everywhere[] = {"*", "-::*"};
    int count = listener->bindaddr_count;
    vkrdma_options options = engineOptions();

    if (engineFitsListener(listener) != C_OK || openEndpoint() != C_OK) return C_ERR;
    if (count == 0) {
        /* INFO prints an address for each descriptor. */
        listener->bindaddr = everywhere;
        count = 2;
    }
    for (int j = 0; j < count; j++) {
        char *address = listener->bindaddr[j], text[VKRDMA_ADDRESS_TEXT];
        int optional = *address == '-';
        vkrdma_error error;

        if (optional) address++;
        if (numeric(address, text, sizeof(text)) == C_OK) {
            uint64_t id = 0;
            /* The server wants a descriptor for each address. The endpoint's descriptor reports
             * all events, so this one is never readable. */
            int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
            if (fd == -1) {
                snprintf(error.text, sizeof(error.text), "eventfd: %s", strerror(errno));
            } else if (vkrdma_listen(engine.endpoint, text, listener->port, &options, &id, &error) == VKRDMA_OK) {
                listeners[listener->count] = id;
                listener->fd[listener->count++] = fd;
                serverLog(LL_NOTICE, "RDMA: listening on %s, port %d, with windows of %u bytes and completion vector %u modulo what the device has", text,
                          listener->port, options.window, options.completion_vector);
                continue;
            } else {
                close(fd);
            }
            serverLog(LL_WARNING, "RDMA: cannot listen on %s, port %d: %s", address, listener->port, error.text);
        }
        if (optional) continue;
        engineCloseListener(listener);
        return C_ERR;
    }
    return listener->count > 0 ? C_OK : C_ERR;
}

void engineIgnore(struct aeEventLoop *el, int fd, void *data, int mask) {
    UNUSED(el);
    UNUSED(fd);
    UNUSED(data);
    UNUSED(mask);
}

/* Connections stay open, as they do over TCP. */
void engineCloseListener(connListener *listener) {
    for (int j = 0; j < listener->count; j++) {
        vkrdma_listener_close(engine.endpoint, listeners[j], NULL);
        if (listener->fd[j] == -1) continue;
        aeDeleteFileEvent(server.el, listener->fd[j], AE_READABLE);
        close(listener->fd[j]);
        listener->fd[j] = -1;
    }
    listener->count = 0;
}
