/* Makes connections: from the options of a context to an established connection. */
#define _GNU_SOURCE
#include "link.h"

#include "valkey_private.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    /* The time-out of connecting if the program sets none, in milliseconds. A reachable server
     * takes much less. */
    CONNECT = 8000,
    /* The longest sleep, in milliseconds. */
    LOOK = 100,
};

static int out_of_memory(valkeyContext *c) {
    valkeySetError(c, VALKEY_ERR_OOM, "Out of memory");
    return VALKEY_ERR;
}

static int failed(valkeyContext *c) { return link_fail(c, VALKEY_ERR_IO, link_reason()); }

/* ---- the context's settings */

/* Copies a setting of the connection into the context, for valkeyReconnect. */
static int set_text(valkeyContext *c, char **where, const char *text) {
    if (*where == text) return VALKEY_OK;
    char *copy = text ? vk_strdup(text) : NULL;
    if (text && !copy) return out_of_memory(c);
    vk_free(*where);
    *where = copy;
    return VALKEY_OK;
}

static int set_endpoint(valkeyContext *c, const valkeyOptions *options, long *timeout) {
    c->connection_type = VALKEY_CONN_RDMA;
    c->tcp.port = options->endpoint.tcp.port;
    if (c->tcp.port < 0 || c->tcp.port > UINT16_MAX) return link_fail(c, VALKEY_ERR_OTHER, "the port is not one of 0 to 65535");
    if (set_text(c, &c->tcp.host, options->endpoint.tcp.ip) != VALKEY_OK ||
        set_text(c, &c->tcp.source_addr, options->endpoint.tcp.source_addr) != VALKEY_OK) {
        return VALKEY_ERR;
    }
    if (!options->connect_timeout) {
        vk_free(c->connect_timeout);
        c->connect_timeout = NULL;
    } else if (valkeyContextUpdateConnectTimeout(c, options->connect_timeout) != VALKEY_OK) {
        return out_of_memory(c);
    }
    return valkeyConnectTimeoutMsec(c, timeout);
}

/* ---- the context's descriptor */

/* Keeps an asynchronous context's socket without room until the connection is established.
 * Then connect(2) on it succeeds, as with an address of no family, or is refused. */
static int fill_socket(valkeyContext *c, struct link *link) {
    static const char filling[2048];
    int least = 1;
    vk_free(c->saddr);
    c->addrlen = sizeof(struct sockaddr_un);
    c->saddr = vk_calloc(1, c->addrlen);
    if (!c->saddr) return out_of_memory(c);
    link->answer = (struct sockaddr_un *)c->saddr;
    if (setsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &least, sizeof least) || send(c->fd, filling, sizeof filling, MSG_DONTWAIT) < 0) return failed(c);
    return VALKEY_OK;
}

static int add(valkeyContext *c, int descriptor) {
    struct epoll_event event = {.events = EPOLLIN};
    return epoll_ctl(c->fd, EPOLL_CTL_ADD, descriptor, &event) ? failed(c) : VALKEY_OK;
}

static int make_descriptors(valkeyContext *c, struct link *link) {
    int ends[2];
    if (link->direct) {
        c->fd = epoll_create1(EPOLL_CLOEXEC);
        link->waker = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (c->fd >= 0 && link->waker >= 0) return add(c, link->waker);
    } else if (!socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends)) {
        c->fd = ends[0];
        link->waker = ends[1];
        return VALKEY_OK;
    }
    return failed(c);
}

static int make_endpoint(valkeyContext *c, struct link *link) {
    vkrdma_error error;
    vkrdma_shared_events *events = keeper_events(&error);
    if (events && make_descriptors(c, link) != VALKEY_OK) {
        if (link->waker >= 0) close(link->waker);
        return VALKEY_ERR;
    }
    /* The waker belongs to the endpoint, and is closed if there is none. */
    if (events && vkrdma_endpoint_new_with_events(events, NULL, link->waker, &link->endpoint, &error) == VKRDMA_OK) return VALKEY_OK;
    return link_fail(c, VALKEY_ERR_OTHER, error.text);
}

/* ---- the connection */

/* What the text of an error about an address begins with, which has room for the cause as well. */
struct about {
    char text[61];
};

static struct about about(const char *role, const char *name) {
    const int most = 39;
    struct about about;
    snprintf(about.text, sizeof about.text, "%s %.*s%s: ", role, most, name, strlen(name) > (size_t)most ? "..." : "");
    return about;
}

static int resolve(valkeyContext *c, const char *role, const char *name, struct addrinfo **found) {
    int prefer = c->flags & (VALKEY_PREFER_IPV4 | VALKEY_PREFER_IPV6);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    hints.ai_family = prefer == VALKEY_PREFER_IPV4 ? AF_INET : prefer == VALKEY_PREFER_IPV6 ? AF_INET6 : AF_UNSPEC;
    int code = getaddrinfo(name, NULL, &hints, found);
    return code == 0 ? VALKEY_OK : link_fail_about(c, VALKEY_ERR_OTHER, about(role, name).text, gai_strerror(code));
}

static bool numeric(const struct addrinfo *one, char *text) {
    return getnameinfo(one->ai_addr, one->ai_addrlen, text, NI_MAXHOST, NULL, 0, NI_NUMERICHOST) == 0;
}

static int refused(valkeyContext *c, const char *source, const vkrdma_error *error) {
    int type = error->code == VKRDMA_TIMED_OUT ? VALKEY_ERR_TIMEOUT : error->fault == VKRDMA_FAULT_HERE ? VALKEY_ERR_OTHER : VALKEY_ERR_IO;
    bool about_source = source && error->code == VKRDMA_ADDRESS;
    return link_fail_about(c, type, about_source ? about("source address", source).text : "", error->text);
}

/* Notes the descriptor of completions as soon as there is one. */
static int find_completions(valkeyContext *c, struct link *link) {
    if (link->completions >= 0) return VALKEY_OK;
    if (vkrdma_completions_descriptor(link->endpoint, link->connection, &link->completions, NULL) != VKRDMA_OK) return VALKEY_OK;
    return link->direct ? add(c, link->completions) : VALKEY_OK;
}

/* Waits until the connection is established: the server has registered a window, or sent bytes. */
static int made(valkeyContext *c, struct link *link, const char *source) {
    vkrdma_error error;
    while (!atomic_load(&link->opened)) {
        if (link_sleep(c, link, LOOK) < 0) return failed(c);
        if (link_turn(link, &error) != VKRDMA_OK) return refused(c, source, &error);
        if (find_completions(c, link) != VALKEY_OK) return VALKEY_ERR;
        if (!atomic_load(&link->ended)) continue;
        if (vkrdma_check(link->endpoint, link->connection, &error) != VKRDMA_OK) return refused(c, source, &error);
        return link_fail(c, VALKEY_ERR_IO, "the server has closed the connection");
    }
    atomic_store(&link->made, true);
    return VALKEY_OK;
}

/* Tries the addresses of the server in order. An asynchronous context tries only the first,
 * without waiting. */
static int connect_to(valkeyContext *c, struct link *link, const struct addrinfo *servers, const char *source, bool waits) {
    char text[NI_MAXHOST];
    vkrdma_error error;
    for (const struct addrinfo *one = servers; one; one = one->ai_next) {
        int64_t left = link->until - link_now();
        if (!numeric(one, text)) continue;
        c->err = 0;
        atomic_store(&link->opened, false);
        atomic_store(&link->ended, false);
        link->completions = -1;
        if (vkrdma_connect(link->endpoint, text, (uint16_t)c->tcp.port, source, (uint64_t)(left > 0 ? left : 0) * 1000, NULL,
                           &link->connection, &error) != VKRDMA_OK) {
            refused(c, source, &error);
        } else if (!waits || made(c, link, source) == VALKEY_OK) {
            return VALKEY_OK;
        } else {
            vkrdma_abort(link->endpoint, link->connection, NULL);
        }
    }
    return c->err ? VALKEY_ERR : link_fail(c, VALKEY_ERR_OTHER, "the server has no address");
}

static int connect_by_name(valkeyContext *c, struct link *link, bool waits) {
    struct addrinfo *servers = NULL, *sources = NULL;
    char source[NI_MAXHOST];
    int result = VALKEY_ERR;
    if (resolve(c, "host", c->tcp.host, &servers) == VALKEY_OK &&
        (!c->tcp.source_addr || resolve(c, "source address", c->tcp.source_addr, &sources) == VALKEY_OK)) {
        result = connect_to(c, link, servers, sources && numeric(sources, source) ? source : NULL, waits);
    }
    if (servers) freeaddrinfo(servers);
    if (sources) freeaddrinfo(sources);
    return result;
}

int link_connect(valkeyContext *c, const valkeyOptions *options) {
    /* valkeyAsyncConnectWithOptions asks for this. A program may, too: its calls work as well. */
    bool making = !(c->flags & VALKEY_BLOCK) && !c->push_cb;
    long timeout = 0;
    c->flags &= ~VALKEY_CONNECTED;
    c->fd = VALKEY_INVALID_FD;
    c->privctx = NULL;
    if (set_endpoint(c, options, &timeout) != VALKEY_OK) return VALKEY_ERR;
    struct link *link = calloc(1, sizeof *link);
    if (!link) return out_of_memory(c);
    link->waker = link->completions = -1;
    link->waits = c->flags & VALKEY_BLOCK;
    link->direct = !link->waits && !making;
    /* 0 is none, as for the asynchronous interface over TCP. */
    link->until = link_now() + (c->connect_timeout && timeout > 0 ? timeout : CONNECT);
    if (make_endpoint(c, link) == VALKEY_OK && (!making || fill_socket(c, link) == VALKEY_OK) &&
        connect_by_name(c, link, !making) == VALKEY_OK) {
        if (keeper_take(link, making ? LINK_MAKING : LINK_OPEN)) {
            if (link->direct) link_rest(c, link);
            c->privctx = link;
            c->flags |= VALKEY_CONNECTED;
            return VALKEY_OK;
        }
        failed(c);
    }
    if (c->fd != VALKEY_INVALID_FD) close(c->fd);
    c->fd = VALKEY_INVALID_FD;
    vkrdma_endpoint_free(link->endpoint);
    free(link);
    return VALKEY_ERR;
}
