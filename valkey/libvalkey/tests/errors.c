/* What must be said stands in the first 100 bytes of the text of each error:
 *
 *   errors HOST PORT UNUSED PID OTHER
 *
 * HOST and PORT are those of a Valkey server; on port UNUSED nothing listens. The server on port
 * OTHER is process PID, which is stopped and killed. The command FAULT, with the name of a fault
 * behind it, has it strike this machine.
 *
 * Each text names what failed, and whose it is: the server's address, a limit of this process, an
 * option. The linker gives this program the function that makes them, for what nothing provokes. */
#include "common.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "../link.h"

#define WORDS (const char *const[])
static const struct timeval soon = {.tv_usec = 200000};

/* Checks the error of a context, and frees it. */
static void fails(const char *what, valkeyContext *c, const char *const *words) {
    CHECK(c && c->err, "%s: no error", what);
    begins_with(what, c->errstr, words);
    valkeyFree(c);
}

/* The options of contexts. Without a handler of pushes they connect while the program goes on. */
static int kind;

static valkeyContext *connect_to(const char *server, int to, const char *source, const struct timeval *limit) {
    valkeyOptions options = {0};
    VALKEY_OPTIONS_SET_RDMA(&options, server, to);
    options.endpoint.tcp.source_addr = source;
    options.connect_timeout = limit;
    options.options = kind;
    valkeyContext *c = valkeyConnectWithOptions(&options);
    struct pollfd polled = {.fd = c ? c->fd : -1, .events = POLLIN};
    while (c && !c->err && kind) {
        CHECK(poll(&polled, 1, -1) == 1, "poll");
        (void)valkeyBufferRead(c);
    }
    return c;
}

/* Asks once more, after what the connection does not survive. */
static valkeyContext *asked(valkeyContext *c, const char *command) {
    freeReplyObject(valkeyCommand(c, command));
    return c;
}

static void addresses(int nobody) {
    char name[254];
    memset(name, 'x', sizeof name);
    for (size_t dot = 50; dot < sizeof name; dot += 50) name[dot] = '.';
    name[sizeof name - 1] = '\0';
    fails("unknown host", connect_to("no.such.name.invalid", port, NULL, NULL), WORDS{"host no.such.name.invalid: ", "not known", NULL});
    fails("long host", connect_to(name, port, NULL, NULL), WORDS{"host xxx", "...: ", "not known", NULL});
    fails("unknown source", connect_to(host, port, "no.such.name.invalid", NULL), WORDS{"source address no.such.name.invalid: ", "not known", NULL});
    fails("source of others", connect_to(host, port, "203.0.113.9", NULL), WORDS{"source address 203.0.113.9: ", "No RDMA device has this address", NULL});
    fails("source of another family", connect_to(host, port, "2001:db8::9", NULL), WORDS{"the local and the remote address", "not of one family", NULL});
    fails("no port", connect_to(host, 65536, NULL, NULL), WORDS{"the port", "65535", NULL});
    fails("nobody listens", connect_to(host, nobody, NULL, NULL), WORDS{host, "refused the connection", "nothing listens there", NULL});
    fails("no machine", connect_to("192.0.2.99", port, NULL, &soon), WORDS{"192.0.2.99", NULL});
    fails("no way", connect_to("2001:db8:1111:2222:3333:4444:5555:6666", 65535, NULL, NULL),
          WORDS{"[2001:db8:1111:2222:3333:4444:5555:6666]:65535", "cannot be reached", NULL});
}

/* What this process does, or has too little of. */
static void ours(void) {
    struct rlimit before, few;
    int next = dup(0);
    CHECK(next >= 0 && getrlimit(RLIMIT_NOFILE, &before) == 0, "limits");
    close(next);
    few = before;
    for (rlim_t more = 0; more < 4; more++) {
        few.rlim_cur = (rlim_t)next + more;
        CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0, "setrlimit");
        fails("no descriptor", connect_to(host, port, NULL, NULL), WORDS{"limit on open files", "`ulimit -n`", NULL});
    }
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0, "setrlimit");
    valkeyContext *c = connected();
    close(c->fd);
    c->fd = VALKEY_INVALID_FD;
    fails("closed descriptor", asked(c, "BLPOP nothing 0"), WORDS{"this program has closed", "descriptor", NULL});
    c = connected();
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        fails("forked, in use", asked(c, "PING"), WORDS{"this process is a forked child", "its parent", NULL});
        fails("forked", connect_to(host, port, NULL, NULL), WORDS{"this process is a forked child", "its parent", NULL});
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child: %x", status);
    valkeyFree(c);
}

/* A peer's end is found by its disconnect, or before by what was in flight to it. */
static void fails_by_peer(const char *what, valkeyContext *c) {
    fails(what, c, WORDS{strstr(c->errstr, "Server") ? "Server closed the connection" : "the peer", NULL});
}

static void ends(pid_t server, int to) {
    valkeyContext *c = connected(), *other = connected();
    freeReplyObject(valkeyCommand(other, "CLIENT KILL TYPE normal SKIPME yes"));
    valkeyFree(other);
    fails_by_peer("closed", asked(c, "BLPOP nothing 0"));
    /* The text is that of TCP, where read(2) says so; errno tells what it was. */
    c = connected();
    CHECK(valkeySetTimeout(c, soon) == VALKEY_OK, "%s", c->errstr);
    asked(c, "BLPOP nothing 0");
    CHECK(c->err == VALKEY_ERR_IO && errno == EAGAIN, "%d", errno);
    fails("command's time-out", c, WORDS{strerror(EAGAIN), NULL});
    c = connect_to(host, to, NULL, &a_minute);
    CHECK(c && !c->err && kill(server, SIGSTOP) == 0, "%s", c ? c->errstr : "no context");
    for (int times = 0; times < 2; times++) {
        fails("stopped", connect_to(host, to, NULL, &soon), WORDS{"timed out", host, NULL});
        kind = VALKEY_OPT_NONBLOCK | VALKEY_OPT_NO_PUSH_AUTOFREE;
    }
    kind = 0;
    CHECK(kill(server, SIGKILL) == 0, "kill");
    fails_by_peer("killed", asked(c, "BLPOP nothing 0"));
}

/* Faults of the device and the network. Some are of a request for a connection. */
static void faults(void) {
    static const struct {
        const char *what;
        bool connects;
        const char *words[4];
    } table[] = {
        {"address-error", true, {"192.0.2.1"}},
        {"route-error", true, {"192.0.2.1"}},
        {"unreachable", true, {"192.0.2.1"}},
        {"connect-error", true, {"192.0.2.1"}},
        {"rejected=28", true, {"192.0.2.1", "rejected the connection", "reason 28"}},
        {"exhausted", true, {"The device, or the limit on locked memory", "`ulimit -l`", "no room"}},
        {"key-refused", false, {"the peer"}},
        {"pair-fatal", false, {"the RDMA device ended the connection", "queue pair failed"}},
        {"device-removal", false, {"the RDMA device"}},
    };
    const char *fault = getenv("FAULT");
    CHECK(fault, "FAULT names no command");
    for (size_t at = 0; at < sizeof table / sizeof *table; at++) {
        char command[400];
        valkeyContext *c = table[at].connects ? NULL : connected();
        snprintf(command, sizeof command, "%s %s", fault, table[at].what);
        CHECK(system(command) == 0, "%s", command);
        if (!c) c = connect_to(host, port, NULL, NULL);
        for (int times = 0; times < 300 && !c->err; times++) asked(c, "BLPOP nothing 0.1");
        fails(table[at].what, c, table[at].words);
    }
}

/* Texts of rdma-conn and rdma-verbs that nothing here provokes, and the longest of them. */
static void others(void) {
    static const struct {
        const char *text, *words[4];
    } table[] = {
        {"opening RDMA: librdmacm.so.1 could not be loaded (librdmacm.so.1: cannot open shared object file: No such file or directory). "
         "To try without RDMA, put `softrdma run --` before the command: it needs no root.",
         {"librdmacm.so.1 could not be loaded"}},
        {"opening RDMA: rdma_create_event_channel: Permission denied (os error 13). Opening the devices in /dev/infiniband is not permitted: "
         "see `ls -l /dev/infiniband` (often the group is `rdma`), and pass them into the container if there is one",
         {"Opening the devices", "not permitted"}},
        {"opening RDMA: rdma_create_event_channel: No such file or directory (os error 2). There is no /dev/infiniband/rdma_cm. To try without a "
         "device, put `softrdma run --` before the command: it needs no root. With a device: `modprobe rdma_ucm`",
         {"There is no /dev/infiniband/rdma_cm"}},
        {"registering memory: ibv_reg_mr of 1048576 bytes: Cannot allocate memory (os error 12). The limit on locked memory (RLIMIT_MEMLOCK) is "
         "137438953472 bytes for everything this process registers: raise it with `ulimit -l unlimited`",
         {"limit on locked memory", "RLIMIT_MEMLOCK", "this process"}},
        {"registering memory: ibv_reg_mr of 1048576 bytes: Cannot allocate memory (os error 12). The limit on locked memory is off "
         "(RLIMIT_MEMLOCK is unlimited), so memory or the device's own resources are exhausted: `rdma resource show` counts what is in use",
         {"limit on locked memory is off", "the device's own"}},
        {"[2001:db8:1111:2222:3333:4444:5555:6666]:65535 refused the connection: nothing listens there for RDMA (a server that listens on the "
         "same port by TCP only does not count; for Valkey see --rdma-bind and --rdma-port)",
         {"6666]:65535 refused the connection", "nothing listens there"}},
        {"timed out after 120.000000001s waiting for a window of the server ([2001:db8:1111:2222:3333:4444:5555:6666]:65535)",
         {"timed out after 120.000000001s", "2001:db8:1111:2222"}},
        {"the peer broke the protocol: it notified 4294967295 bytes when 4294967294 of the window's 4294967295 were already used",
         {"the peer broke the protocol", "it notified"}},
        {"the peer is incompatible with this side's configuration: it registered a window of 4294967295 bytes, and this side takes 16777216 at most",
         {"the peer is incompatible with this side's configuration"}},
        {"the RDMA transport failed: the peer's host or the network did not answer, or the peer has vanished (RetryExceeded, vendor code 129)",
         {"the RDMA transport failed", "the peer's host"}},
        {"as much memory is registered as may be, 18446744073709551615 bytes: raise Limits::registered_bytes or close connections",
         {"as much memory is registered as may be"}},
        {"no descriptor is left: the system's limit on open files (`fs.file-max`) is reached", {"the system's limit on open files"}},
        {"the library panicked, which is a bug of it; please report it: a text that is as long as what a panic may say, which can be much longer",
         {"the library panicked", "a bug of it"}},
    };
    for (size_t at = 0; at < sizeof table / sizeof *table; at++) {
        valkeyContext c = {0};
        CHECK(link_fail(&c, VALKEY_ERR_OTHER, table[at].text) == VALKEY_ERR, "link_fail");
        begins_with("text", c.errstr, table[at].words);
    }
}

int main(int argc, char **argv) {
    start(argc, argv);
    CHECK(argc > 5, "usage: %s HOST PORT UNUSED PID OTHER", argv[0]);
    /* The test fails, and does not hang. */
    alarm(300);
    others();
    addresses(atoi(argv[3]));
    kind = VALKEY_OPT_NONBLOCK | VALKEY_OPT_NO_PUSH_AUTOFREE;
    addresses(atoi(argv[3]));
    kind = 0;
    ours();
    ends(atoi(argv[4]), atoi(argv[5]));
    faults();
    puts("errors: each says what failed, and whose it is, in 100 bytes");
    return 0;
}
