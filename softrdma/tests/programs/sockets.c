/* A program of plain sockets, which `softrdma run --rsockets` makes rsockets.
 *
 *   sockets serve ADDRESS             returns the sums of three streams, one after the other; then
 *                                     has two peers that are killed
 *   sockets move ADDRESS MEBIBYTES    sends so much without blocking, shuts that way down, and
 *                                     compares the sum that comes back
 *   sockets hold ADDRESS              is connected, and waits to be killed
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "expect.h"

#define PORT 7471

struct sum {
    uint64_t bytes;
    uint64_t sum;
};

static void add(struct sum *sum, const unsigned char *data, size_t len)
{
    for (size_t i = 0; i < len; i++)
        sum->sum = (sum->sum ^ data[i]) * 0x100000001b3;
    sum->bytes += len;
}

static void wait_for(int fd, short events)
{
    struct pollfd entry = {.fd = fd, .events = events};
    EXPECT(poll(&entry, 1, -1) == 1);
    EXPECT(entry.revents & (events | POLLHUP | POLLERR));
}

static char block[1 << 16];

/* Reads until the peer has shut its way down, and returns the sum. */
static void serve_stream(int listener)
{
    struct sockaddr_in peer;
    socklen_t len = sizeof(peer);
    int fd = accept(listener, (struct sockaddr *)&peer, &len);
    EXPECT(fd >= 0);
    EXPECT(peer.sin_family == AF_INET && peer.sin_port != 0);
    struct sum sum = {0, 0};
    for (;;) {
        wait_for(fd, POLLIN);
        ssize_t got = recv(fd, block, sizeof(block), 0);
        EXPECT(got >= 0);
        if (got == 0)
            break;
        add(&sum, (unsigned char *)block, got);
    }
    EXPECT(send(fd, &sum, sizeof(sum), 0) == sizeof(sum));
    EXPECT(shutdown(fd, SHUT_RDWR) == 0);
    EXPECT(close(fd) == 0);
    printf("served %llu\n", (unsigned long long)sum.bytes);
}

/* Has a peer that is killed, while this side waits for its data or for room to send to it. It waits
   in poll(2): rsockets do not wake a call that blocks by itself. */
static void lose(int listener, int sends)
{
    int fd = accept(listener, NULL, NULL);
    EXPECT(fd >= 0);
    EXPECT(send(fd, "x", 1, 0) == 1);
    if (sends) {
        ssize_t sent;
        EXPECT(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
        while ((sent = send(fd, block, sizeof(block), MSG_NOSIGNAL)) > 0 || errno == EAGAIN)
            if (sent < 0)
                wait_for(fd, POLLOUT);
        EXPECT(errno == ECONNRESET || errno == ENOTCONN || errno == EPIPE);
    } else {
        wait_for(fd, POLLIN);
        EXPECT(recv(fd, block, sizeof(block), 0) <= 0);
    }
    EXPECT(close(fd) == 0);
    printf("lost\n");
}

static int serve(struct sockaddr_in *address)
{
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT(listener >= 0);
    EXPECT(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0);
    EXPECT(bind(listener, (struct sockaddr *)address, sizeof(*address)) == 0);
    EXPECT(listen(listener, 8) == 0);
    printf("listens\n");
    for (int i = 0; i < 3; i++)
        serve_stream(listener);
    lose(listener, 0);
    lose(listener, 1);
    EXPECT(close(listener) == 0);
    return 0;
}

static int connected(struct sockaddr_in *address)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT(fd >= 0);
    EXPECT(connect(fd, (struct sockaddr *)address, sizeof(*address)) == 0);
    return fd;
}

static int move(struct sockaddr_in *address, uint64_t bytes)
{
    int fd = connected(address);
    struct sum sum = {0, 0}, theirs;
    uint32_t state = 1;
    EXPECT(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
    while (sum.bytes < bytes) {
        for (size_t i = 0; i < sizeof(block); i++)
            block[i] = (state = state * 1103515245 + 12345) >> 16;
        add(&sum, (unsigned char *)block, sizeof(block));
        for (size_t sent = 0; sent < sizeof(block);) {
            ssize_t some = send(fd, block + sent, sizeof(block) - sent, 0);
            if (some < 0) {
                EXPECT(errno == EAGAIN);
                wait_for(fd, POLLOUT);
                continue;
            }
            sent += some;
        }
    }
    EXPECT(shutdown(fd, SHUT_WR) == 0);
    EXPECT(fcntl(fd, F_SETFL, 0) == 0);
    EXPECT(recv(fd, &theirs, sizeof(theirs), MSG_WAITALL) == sizeof(theirs));
    EXPECT(theirs.bytes == sum.bytes && theirs.sum == sum.sum);
    EXPECT(recv(fd, block, sizeof(block), 0) == 0);
    EXPECT(close(fd) == 0);
    printf("moved %llu\n", (unsigned long long)sum.bytes);
    return 0;
}

static int hold(struct sockaddr_in *address)
{
    int fd = connected(address);
    EXPECT(recv(fd, block, 1, 0) == 1);
    printf("holds\n");
    for (;;)
        pause();
}

int main(int count, char **words)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    setvbuf(stdout, NULL, _IOLBF, 0);
    EXPECT(count >= 3 && inet_pton(AF_INET, words[2], &address.sin_addr) == 1);
    if (!strcmp(words[1], "serve"))
        return serve(&address);
    if (!strcmp(words[1], "move") && count == 4)
        return move(&address, strtoull(words[3], NULL, 10) << 20);
    return hold(&address);
}
