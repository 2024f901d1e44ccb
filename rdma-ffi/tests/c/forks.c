/* Children change nothing for their parent, whatever they do with what they have of it, and however
 * they end: forks softsim, or forks ADDRESS PORT WAY WHEN on the device with this address, for
 * trust/forks/run, which has the same for other faces. Both sides are here, and need no port. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "common.h"

enum deed { UNDERSCORE_EXIT, EXIT, RETURN, FREE, CLOSE, USE, EXEC, DEEDS };

static const char *const ways[DEEDS] = {"_exit", "exit", "return", "drop", "close", "use", "exec"};

enum { DESCRIPTORS = 4096 };

static vkrdma_endpoint *servers, *clients;
static vkrdma_shared_events *shared;
static vkrdma_buffer *buffer;
static uint64_t listener, here, there;
static volatile bool finished;
static bool before[DESCRIPTORS];

static void connect_one(void) {
    uint16_t port = serve(servers, NULL, &listener);
    vkrdma_endpoint *both[] = {servers, clients};
    bool opened = false;
    MUST(vkrdma_connect(clients, server_address, port, NULL, 60000000, NULL, &here, &failed));
    while (!opened || there == 0) {
        vkrdma_event event;
        rest(both, 2);
        if (turn(servers, &event, 1) && event.kinds & VKRDMA_EVENT_OPENED) there = event.connection;
        if (turn(clients, &event, 1) && event.kinds & VKRDMA_EVENT_OPENED) opened = true;
    }
}

/* Moves bytes from one side to the other. */
static void move(vkrdma_endpoint *from, uint64_t sender, vkrdma_endpoint *to, uint64_t receiver) {
    vkrdma_endpoint *both[] = {from, to};
    vkrdma_event events[4];
    char bytes[5];
    size_t count = 0;
    MUST(vkrdma_write(from, sender, "hello", 5, &count, &failed));
    CHECK(count == 5);
    for (;;) {
        vkrdma_code code = vkrdma_read(to, receiver, bytes, 5, &count, &failed);
        if (code == VKRDMA_OK) break;
        EXPECT(VKRDMA_AGAIN, code);
        rest(both, 2);
        turn(from, events, 4);
        turn(to, events, 4);
    }
    CHECK(count == 5 && memcmp(bytes, "hello", 5) == 0);
}

/* A thread that is in a call nearly always. */
static void *wait_on(void *unused) {
    vkrdma_error error;
    while (!finished) MUST(vkrdma_wait(clients, -1, &error));
    return unused;
}

static void close_all(void) {
    EXPECT(VKRDMA_FORKED, vkrdma_close(clients, here, 0, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_listener_close(servers, listener, &failed));
}

static void use(void) {
    vkrdma_device *device;
    vkrdma_endpoint *endpoint;
    vkrdma_event event;
    vkrdma_buffer *other;
    uint64_t id;
    int64_t left;
    size_t bytes;
    memset(&failed, 0x55, sizeof failed);
    EXPECT(VKRDMA_FORKED, vkrdma_progress(clients, &event, 1, sizeof event, &bytes, &failed));
    CHECK(failed.code == VKRDMA_FORKED && failed.fault == VKRDMA_FAULT_CALLER);
    CHECK(strstr(failed.text, "forked child") && strstr(failed.text, "parent"));
    EXPECT(VKRDMA_FORKED, vkrdma_wait(clients, -1, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_next_timeout(clients, &left, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_write(clients, here, "no", 2, &bytes, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_read(clients, here, &bytes, 2, &bytes, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_lend(clients, here, buffer, 0, 4096, &bytes, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_register(clients, here, 4096, VKRDMA_LEND, &other, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_abort(clients, here, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_wake(clients, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_connect(clients, server_address, 1, NULL, 1, NULL, &id, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_endpoint_new(client_device, NULL, &endpoint, &failed));
    int waker = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECK(waker >= 0);
    EXPECT(VKRDMA_FORKED, vkrdma_endpoint_new_with_events(shared, NULL, waker, &endpoint, &failed));
    /* It is closed, although nothing was done. */
    CHECK(fcntl(waker, F_GETFD) == -1);
    EXPECT(VKRDMA_FORKED, vkrdma_softsim_open("10.0.0.9", &device, &failed));
    EXPECT(VKRDMA_FORKED, vkrdma_verbs_open(&device, &failed));
    CHECK(vkrdma_descriptor(clients) == -1);
}

static void free_all(void) {
    vkrdma_buffer_free(buffer);
    vkrdma_shared_events_free(shared);
    vkrdma_endpoint_free(clients);
    vkrdma_endpoint_free(servers);
    free_devices();
}

/* Returns true in a child that returns from main. */
static bool forked(enum deed deed) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        /* A child that hangs ends with its parent, whose alarm then rings. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        switch (deed) {
        case UNDERSCORE_EXIT: _exit(0);
        case EXIT: exit(0);
        case RETURN: return true;
        case FREE: free_all(); exit(0);
        case CLOSE: close_all(); exit(0);
        case USE: use(); exit(0);
        default: execl("/bin/true", "true", (char *)NULL); _exit(2);
        }
    }
    int status;
    while (waitpid(child, &status, 0) != child) CHECK(errno == EINTR);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    move(clients, here, servers, there);
    move(servers, there, clients, here);
    return false;
}

int main(int count, char **arguments) {
    pthread_t thread;
    bool one = count == 5;
    char *on_verbs[] = {arguments[0], "verbs", arguments[1], NULL};
    for (int fd = 0; fd < DESCRIPTORS; fd++) before[fd] = fcntl(fd, F_GETFD) >= 0;
    open_devices(one ? 3 : count, one ? on_verbs : arguments);
    MUST(vkrdma_endpoint_new(server_device, NULL, &servers, &failed));
    MUST(vkrdma_endpoint_new(client_device, NULL, &clients, &failed));
    MUST(vkrdma_shared_events_new(client_device, &shared, &failed));
    connect_one();
    MUST(vkrdma_register(clients, here, 4096, VKRDMA_LEND, &buffer, &failed));
    for (int fd = 0; fd < DESCRIPTORS; fd++) {
        int flags = fcntl(fd, F_GETFD);
        CHECK(before[fd] || flags < 0 || flags & FD_CLOEXEC);
    }
    for (int busy = 0; busy <= 1; busy++) {
        if (one && busy != (strcmp(arguments[4], "busy") == 0)) continue;
        if (busy) CHECK(pthread_create(&thread, NULL, wait_on, NULL) == 0);
        int done = 0;
        for (int deed = 0; deed < DEEDS; deed++) {
            if (one && strcmp(arguments[3], ways[deed]) != 0) continue;
            if (forked(deed)) return 0;
            done++;
        }
        if (!done) return 77;
        if (!busy) continue;
        finished = true;
        MUST(vkrdma_wake(clients, &failed));
        CHECK(pthread_join(thread, NULL) == 0);
    }
    free_all();
    puts("forks: done");
    return 0;
}
