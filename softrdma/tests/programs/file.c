/* Writes commands to /dev/infiniband/rdma_cm itself, as rdma/rdma_user_cm.h has them: good ones,
 * and arbitrary ones. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <rdma/rdma_user_cm.h>

#include "expect.h"

#define PATH "/dev/infiniband/rdma_cm"

/* Writes a command. Returns 0, or the errno. */
static int command(int file, int number, void *body, size_t len, size_t room)
{
    struct {
        struct rdma_ucm_cmd_hdr header;
        char body[512];
    } all = {.header = {.cmd = number, .in = len, .out = room}};
    memcpy(all.body, body, len);
    ssize_t written = write(file, &all, sizeof(all.header) + len);
    EXPECT(written == (ssize_t)(sizeof(all.header) + len) || written == -1);
    return written < 0 ? errno : 0;
}

static uint32_t create(int file, uint64_t uid)
{
    struct rdma_ucm_create_id_resp made;
    struct rdma_ucm_create_id create = {.uid = uid, .response = (uintptr_t)&made, .ps = RDMA_PS_TCP};
    EXPECT(command(file, RDMA_USER_CM_CMD_CREATE_ID, &create, sizeof(create), sizeof(made)) == 0);
    create.ps = RDMA_PS_UDP;
    EXPECT(command(file, RDMA_USER_CM_CMD_CREATE_ID, &create, sizeof(create), sizeof(made)) == EOPNOTSUPP);
    return made.id;
}

static uint32_t destroy(int file, uint32_t id)
{
    struct rdma_ucm_destroy_id_resp reported;
    struct rdma_ucm_destroy_id destroy = {.response = (uintptr_t)&reported, .id = id};
    EXPECT(command(file, RDMA_USER_CM_CMD_DESTROY_ID, &destroy, sizeof(destroy), sizeof(reported)) == 0);
    return reported.events_reported;
}

static int bind_to(int file, uint32_t id, const char *address, int port)
{
    struct rdma_ucm_bind_ip bind = {.id = id};
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons(port)};
    EXPECT(inet_pton(AF_INET, address, &place.sin_addr) == 1);
    memcpy(&bind.addr, &place, sizeof(place));
    return command(file, RDMA_USER_CM_CMD_BIND_IP, &bind, sizeof(bind), 0);
}

static struct rdma_ucm_event_resp next(int file)
{
    struct rdma_ucm_event_resp event;
    struct rdma_ucm_get_event get = {.response = (uintptr_t)&event};
    struct pollfd entry = {.fd = file, .events = POLLIN};
    EXPECT(poll(&entry, 1, -1) == 1);
    EXPECT(command(file, RDMA_USER_CM_CMD_GET_EVENT, &get, sizeof(get), sizeof(event)) == 0);
    return event;
}

static int opened(void)
{
    struct stat of;
    int file = open(PATH, O_RDWR | O_CLOEXEC);
    EXPECT(file >= 0);
    EXPECT(fstat(file, &of) == 0 && S_ISCHR(of.st_mode));
    EXPECT(fcntl(file, F_SETFL, O_NONBLOCK) == 0);
    return file;
}

/* Identifiers, their addresses and their events. */
static void good(void)
{
    int file = opened(), other = opened();
    uint32_t first = create(file, 7), second = create(file, 8);
    EXPECT(first != second);
    EXPECT(bind_to(file, first, "192.0.2.1", 7000) == 0);
    EXPECT(bind_to(file, second, "192.0.2.9", 7000) != 0);
    /* An identifier is of one file. */
    EXPECT(bind_to(other, second, "192.0.2.1", 7001) == EINVAL);
    struct rdma_ucm_query_route_resp route;
    struct rdma_ucm_query query = {.response = (uintptr_t)&route, .id = first};
    EXPECT(command(file, RDMA_USER_CM_CMD_QUERY_ROUTE, &query, sizeof(query), sizeof(route)) == 0);
    struct sockaddr_in *local = (struct sockaddr_in *)&route.src_addr;
    EXPECT(local->sin_port == htons(7000) && route.port_num == 1 && route.node_guid != 0 && route.ibdev_index == 0);
    /* An older header ends before the device's number. */
    memset(&route, 0xff, sizeof(route));
    EXPECT(command(file, RDMA_USER_CM_CMD_QUERY_ROUTE, &query, sizeof(query), sizeof(route) - 8) == 0);
    EXPECT(route.port_num == 1 && route.ibdev_index == UINT32_MAX);
    EXPECT(command(file, RDMA_USER_CM_CMD_QUERY_ROUTE, &query, sizeof(query), 100) == ENOSPC);
    struct rdma_ucm_listen listen = {.id = first, .backlog = 1};
    EXPECT(command(file, RDMA_USER_CM_CMD_LISTEN, &listen, sizeof(listen), 0) == 0);
    struct rdma_ucm_resolve_ip resolve = {.id = second, .timeout_ms = 1000};
    struct sockaddr_in *peer = (struct sockaddr_in *)&resolve.dst_addr;
    *peer = *local;
    peer->sin_family = AF_INET, peer->sin_port = htons(7000);
    EXPECT(inet_pton(AF_INET, "192.0.2.1", &peer->sin_addr) == 1);
    EXPECT(command(file, RDMA_USER_CM_CMD_RESOLVE_IP, &resolve, sizeof(resolve), 0) == 0);
    struct rdma_ucm_event_resp event = next(file);
    EXPECT(event.uid == 8 && event.id == second && event.event == 0 && event.status == 0);
    struct rdma_ucm_resolve_route leads = {.id = second, .timeout_ms = 1000};
    EXPECT(command(file, RDMA_USER_CM_CMD_RESOLVE_ROUTE, &leads, sizeof(leads), 0) == 0);
    /* The other file gets its event. */
    struct rdma_ucm_migrate_resp moved;
    struct rdma_ucm_migrate_id migrate = {.response = (uintptr_t)&moved, .id = second, .fd = file};
    EXPECT(command(other, RDMA_USER_CM_CMD_MIGRATE_ID, &migrate, sizeof(migrate), sizeof(moved)) == 0);
    EXPECT(moved.events_reported == 1);
    event = next(other);
    EXPECT(event.uid == 8 && event.event == 2);
    EXPECT(destroy(other, second) == 2);
    EXPECT(destroy(file, first) == 0);
    EXPECT(close(other) == 0);
    EXPECT(close(file) == 0);
    EXPECT(write(file, &event, sizeof(event)) == -1 && errno == EBADF);
}

/* Whatever is written fails, or is carried out; with a place for answers and without one. */
static void arbitrary(void)
{
    static union {
        uint64_t words[64];
        char bytes[512];
    } body, into;
    int file = opened();
    for (int number = 0; number < 40; number++)
        for (size_t len = 0; len <= 320; len += 4)
            for (int place = 0; place < 4; place++) {
                memset(&body, place == 3 ? 0xff : 0, sizeof(body));
                /* Where commands have it, which is their first or their second field. */
                body.words[0] = place & 1 ? (uintptr_t)&into : 0;
                body.words[1] = place & 2 ? (uintptr_t)&into : 0;
                command(file, number, &body, len, place == 2 ? 3 : sizeof(into));
            }
    /* Shorter than a header, or than it states. */
    struct rdma_ucm_cmd_hdr header = {.cmd = RDMA_USER_CM_CMD_CREATE_ID, .in = sizeof(struct rdma_ucm_create_id)};
    for (size_t len = 0; len <= sizeof(header); len++)
        EXPECT(write(file, &header, len) == -1 && errno == EINVAL);
    /* The file goes with its identifiers, and so do more than a program may have at once. */
    for (int i = 0; i < 100; i++)
        create(file, 1);
    EXPECT(close(file) == 0);
    for (int i = 0; i < 4200; i++)
        EXPECT(close(opened()) == 0);
}

/* A file whose number is given to another one, without close(2), is gone. */
static void replaced(void)
{
    int file = opened(), null = open("/dev/null", O_WRONLY);
    struct stat of;
    create(file, 1);
    EXPECT(dup2(null, file) == file);
    EXPECT(write(file, "ordinary", 8) == 8);
    EXPECT(fstat(file, &of) == 0 && of.st_rdev != 0);
    EXPECT(close(file) == 0 && close(null) == 0);
}

/* A child has none of its parent's files, and its parent loses none by it. */
static void children(void)
{
    int file = opened(), status;
    uint32_t id = create(file, 1);
    pid_t child = fork();
    if (child == 0) {
        int own = opened();
        /* Handles begin anew. */
        EXPECT(create(own, 2) == id);
        EXPECT(bind_to(own, id, "192.0.2.1", 7002) == 0);
        EXPECT(close(file) == 0);
        /* Its number is free for another one. */
        EXPECT(open("/dev/null", O_WRONLY) == file && write(file, "", 1) == 1);
        exit(0);
    }
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    child = vfork();
    if (child == 0) {
        close(file);
        _exit(0);
    }
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    EXPECT(bind_to(file, id, "192.0.2.1", 7003) == 0);
    EXPECT(destroy(file, id) == 0);
    EXPECT(close(file) == 0);
}

/* Commands and answers without memory. */
static void without_memory(void)
{
    int file = opened();
    EXPECT(write(file, (void *)8, 16) == -1 && errno == EFAULT);
    struct rdma_ucm_create_id create = {.response = 8, .ps = RDMA_PS_TCP};
    EXPECT(command(file, RDMA_USER_CM_CMD_CREATE_ID, &create, sizeof(create), 4) == EFAULT);
    create.response = (uintptr_t)"a constant";
    EXPECT(command(file, RDMA_USER_CM_CMD_CREATE_ID, &create, sizeof(create), 4) == EFAULT);
    EXPECT(close(file) == 0);
}

int main(void)
{
    good();
    without_memory();
    arbitrary();
    replaced();
    children();
    puts("done");
    return 0;
}
