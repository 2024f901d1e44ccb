/* A client of a Valkey server over RDMA: PING, SET and GET.

       cc -o client client.c $(pkg-config --cflags --libs vkrdma)
       ./client 192.0.2.1 6379 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vkrdma.h>

static vkrdma_endpoint *endpoint;
static vkrdma_error error;

static void must(vkrdma_code code, const char *doing) {
    if (code == VKRDMA_OK) return;
    fprintf(stderr, "%s: %s\n", doing, error.text);
    exit(1);
}

/* With one connection, the next call finds out what has happened. */
static void wait_for_news(void) {
    vkrdma_event event;
    size_t count;
    must(vkrdma_wait(endpoint, -1, &error), "waiting");
    must(vkrdma_progress(endpoint, &event, 1, sizeof event, &count, &error), "waiting");
}

/* Connects, and waits until bytes can flow. */
static uint64_t connect_to(const char *address, uint16_t port) {
    uint64_t connection;
    vkrdma_status status = {0};
    must(vkrdma_connect(endpoint, address, port, NULL, 5000000, NULL, &connection, &error), "connecting");
    while (!status.open) {
        wait_for_news();
        must(vkrdma_check(endpoint, connection, &error), "connecting");
        must(vkrdma_status_of(endpoint, connection, &status, sizeof status, &error), "connecting");
    }
    return connection;
}

/* Writes a RESP command: all its words are one notification. */
static void send_command(uint64_t connection, int count, const char *const *words) {
    char heads[8][32];
    struct iovec pieces[24];
    int used = 0;
    size_t left = 0, written;
    for (int i = 0; i < count; i++) {
        int head = i == 0 ? snprintf(heads[i], sizeof heads[i], "*%d\r\n$%zu\r\n", count, strlen(words[i]))
                          : snprintf(heads[i], sizeof heads[i], "$%zu\r\n", strlen(words[i]));
        pieces[used++] = (struct iovec){heads[i], (size_t)head};
        pieces[used++] = (struct iovec){(char *)words[i], strlen(words[i])};
        pieces[used++] = (struct iovec){"\r\n", 2};
    }
    for (int i = 0; i < used; i++) left += pieces[i].iov_len;
    struct iovec *next = pieces;
    while (left > 0) {
        vkrdma_code code = vkrdma_writev(endpoint, connection, next, (size_t)used, &written, &error);
        if (code == VKRDMA_AGAIN) {
            wait_for_news();
            continue;
        }
        must(code, "writing");
        left -= written;
        for (; used > 0 && written >= next->iov_len; next++, used--) written -= next->iov_len;
        if (used > 0) {
            next->iov_base = (char *)next->iov_base + written;
            next->iov_len -= written;
        }
    }
}

/* Reads until `want` bytes are there, or a line if `want` is 0. */
static size_t receive(uint64_t connection, char *into, size_t have, size_t want, size_t space) {
    while (want > 0 ? have < want : memchr(into, '\n', have) == NULL) {
        size_t read;
        vkrdma_code code = vkrdma_read(endpoint, connection, into + have, space - have, &read, &error);
        if (code == VKRDMA_AGAIN) {
            wait_for_news();
            continue;
        }
        must(code, "reading");
        if (read == 0) {
            fputs(have < space ? "the server has closed the connection\n" : "the reply is too long\n", stderr);
            exit(1);
        }
        have += read;
    }
    return have;
}

static void command(uint64_t connection, int count, const char *const *words) {
    char reply[4096];
    send_command(connection, count, words);
    size_t have = receive(connection, reply, 0, 0, sizeof reply);
    size_t line = (size_t)((char *)memchr(reply, '\n', have) - reply) + 1;
    if (reply[0] == '$' && reply[1] != '-') have = receive(connection, reply, have, line + strtoul(reply + 1, NULL, 10) + 2, sizeof reply);
    printf("%s: %.*s", words[0], (int)have, reply);
}

int main(int count, char **arguments) {
    vkrdma_device *device;
    if (count != 3) return fprintf(stderr, "usage: client ADDRESS PORT\n"), 2;
    must(vkrdma_verbs_open(&device, &error), "opening RDMA");
    must(vkrdma_endpoint_new(device, NULL, &endpoint, &error), "opening RDMA");
    uint64_t connection = connect_to(arguments[1], (uint16_t)atoi(arguments[2]));
    command(connection, 1, (const char *const[]){"PING"});
    command(connection, 3, (const char *const[]){"SET", "greeting", "hello, over RDMA"});
    command(connection, 2, (const char *const[]){"GET", "greeting"});
    must(vkrdma_close(endpoint, connection, 1000000, &error), "closing");
    while (vkrdma_closed(endpoint, connection, &error) == VKRDMA_AGAIN) wait_for_news();
    vkrdma_endpoint_free(endpoint);
    vkrdma_device_free(device);
    return 0;
}
