/* Other calls on an endpoint do not wait for one that registers memory: here for one that does not
 * return, because softrdma's fabric stands still. PROGRAM verbs ADDRESS; FABRIC is a command that
 * stops the fabric and prints its process. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>

#include "common.h"

static vkrdma_endpoint *servers, *clients;
static uint64_t listener, here, there;
static pid_t fabric;
static atomic_long thread;
static atomic_int returned;
static char bytes[8192];

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

static void *registers(void *unused) {
    vkrdma_buffer *buffer;
    vkrdma_error error;
    thread = syscall(SYS_gettid);
    MUST(vkrdma_register_memory(clients, here, bytes, sizeof bytes, VKRDMA_LEND, NULL, NULL, &buffer, &error));
    returned = 1;
    vkrdma_buffer_free(buffer);
    return unused;
}

/* Whether the thread sleeps: in the call, and for the fabric. */
static bool sleeps(void) {
    char path[64], line[512] = "";
    if (thread == 0) return false;
    snprintf(path, sizeof path, "/proc/self/task/%ld/stat", (long)thread);
    FILE *file = fopen(path, "r");
    CHECK(file && fgets(line, sizeof line, file));
    fclose(file);
    const char *state = strrchr(line, ')');
    return state && state[1] && state[2] == 'S';
}

static void waited(int number) {
    static const char text[] = "a call waits for one that registers memory\n";
    (void)number;
    kill(fabric, SIGCONT);
    if (write(2, text, sizeof text - 1)) _exit(1);
    _exit(1);
}

int main(int count, char **arguments) {
    pthread_t registrar;
    open_devices(count, arguments);
    MUST(vkrdma_endpoint_new(server_device, NULL, &servers, &failed));
    MUST(vkrdma_endpoint_new(client_device, NULL, &clients, &failed));
    connect_one();
    FILE *said = popen(getenv("FABRIC"), "r");
    CHECK(said && fscanf(said, "%d", &fabric) == 1);
    CHECK(pclose(said) == 0);
    signal(SIGALRM, waited);
    alarm(120);
    CHECK(pthread_create(&registrar, NULL, registers, NULL) == 0);
    while (!sleeps()) usleep(1000);
    CHECK(status_of(clients, here).open);
    CHECK(!returned);
    CHECK(kill(fabric, SIGCONT) == 0);
    CHECK(pthread_join(registrar, NULL) == 0 && returned);
    vkrdma_endpoint_free(clients);
    vkrdma_endpoint_free(servers);
    free_devices();
    return 0;
}
