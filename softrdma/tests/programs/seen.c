/* Checks what programs see of a machine with two devices beside verbs: device files, sysfs, and
   interfaces. Other paths must be unchanged. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>

#include "expect.h"

static void says(const char *path, const char *text)
{
    char line[256];
    FILE *file = fopen(path, "r");
    EXPECT(file && fgets(line, sizeof line, file) && !fclose(file));
    line[strcspn(line, "\n")] = 0;
    if (strcmp(line, text)) {
        fprintf(stderr, "%s: %s, not %s\n", path, line, text);
        exit(1);
    }
    int directory = open("/", O_PATH), other = openat(directory, path, O_RDONLY), once = open(path, O_RDONLY);
    EXPECT(directory >= 0 && other >= 0 && once >= 0 && !close(other) && !close(once) && !close(directory));
}

/* Counts the interfaces that have this name and this address of a device. */
static int listed(const char *name, const char *address)
{
    struct ifaddrs *list, *other;
    EXPECT(!getifaddrs(&list) && !getifaddrs(&other));
    freeifaddrs(other);
    int count = 0;
    for (struct ifaddrs *each = list; each; each = each->ifa_next) {
        char text[INET6_ADDRSTRLEN] = "";
        if (!each->ifa_addr || strcmp(each->ifa_name, name))
            continue;
        if (each->ifa_addr->sa_family == AF_INET)
            inet_ntop(AF_INET, &((struct sockaddr_in *)each->ifa_addr)->sin_addr, text, sizeof text);
        if (each->ifa_addr->sa_family == AF_INET6)
            inet_ntop(AF_INET6, &((struct sockaddr_in6 *)each->ifa_addr)->sin6_addr, text, sizeof text);
        if (strcmp(text, address))
            continue;
        EXPECT(each->ifa_flags & IFF_UP && !(each->ifa_flags & IFF_LOOPBACK));
        EXPECT(each->ifa_netmask && each->ifa_netmask->sa_family == each->ifa_addr->sa_family);
        count++;
    }
    freeifaddrs(list);
    return count;
}

static void is_at(struct sockaddr *place, int family, const char *address)
{
    char text[INET6_ADDRSTRLEN];
    const void *bytes = family == AF_INET ? (void *)&((struct sockaddr_in *)place)->sin_addr
                                          : (void *)&((struct sockaddr_in6 *)place)->sin6_addr;
    EXPECT(place->sa_family == family && inet_ntop(family, bytes, text, sizeof text) && !strcmp(text, address));
}

/* Looks at a file from a stack of 4096 bytes, as signal handlers and coroutines have. */
static void looks(void)
{
    struct stat found;
    if (stat("/dev/null", &found))
        abort();
}

static void on_a_small_stack(void)
{
    static ucontext_t here, there;
    long page = sysconf(_SC_PAGESIZE);
    char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(memory != MAP_FAILED && !mprotect(memory, page, PROT_NONE) && !getcontext(&there));
    there.uc_stack.ss_sp = memory + page;
    there.uc_stack.ss_size = 4096;
    there.uc_link = &here;
    makecontext(&there, looks, 0);
    /* The dynamic linker has more to do at a function's first call. */
    looks();
    EXPECT(!swapcontext(&here, &there) && !munmap(memory, 2 * page));
}

/* Checks to which address loopback is bound, and which one it is as a source and a destination. */
static void bound(int family, const char *loopback, const char *address)
{
    struct rdma_cm_id *id;
    struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE | RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP }, *info, *same;
    EXPECT(!rdma_getaddrinfo(loopback, "0", &hints, &info) && info->ai_src_addr->sa_family == family && !info->ai_dst_addr);
    /* Without names the answer has the addresses of the hints. */
    hints.ai_src_addr = hints.ai_dst_addr = info->ai_src_addr;
    hints.ai_src_len = hints.ai_dst_len = info->ai_src_len;
    hints.ai_flags = 0;
    EXPECT(!rdma_getaddrinfo(NULL, NULL, &hints, &same) && same->ai_src_len == info->ai_src_len);
    EXPECT(same->ai_dst_len == info->ai_src_len && !info->ai_dst_len);
    EXPECT(!memcmp(same->ai_src_addr, info->ai_src_addr, info->ai_src_len));
    EXPECT(!memcmp(same->ai_dst_addr, info->ai_src_addr, info->ai_src_len));
    rdma_freeaddrinfo(same);
    size_t len = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    EXPECT(info->ai_src_len == len && !rdma_getaddrinfo(loopback, "0", NULL, &same));
    EXPECT(same->ai_dst_len == len && !same->ai_src_len);
    rdma_freeaddrinfo(same);
    EXPECT(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) && !rdma_bind_addr(id, info->ai_src_addr) && id->verbs);
    is_at(rdma_get_local_addr(id), family, address);
    EXPECT(!rdma_destroy_id(id));
    /* Without a channel this waits for the event. */
    EXPECT(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
    EXPECT(!rdma_resolve_addr(id, info->ai_src_addr, info->ai_src_addr, 1000) && id->verbs);
    is_at(rdma_get_local_addr(id), family, address);
    is_at(rdma_get_peer_addr(id), family, address);
    EXPECT(!rdma_destroy_id(id));
    rdma_freeaddrinfo(info);
}

/* A path without memory, or whose memory ends before it does, is an error of the call. */
static void without_memory(void)
{
    struct stat found;
    char path[] = "/sys/class/infiniband/";
    long page = sysconf(_SC_PAGESIZE);
    char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(memory != MAP_FAILED && !mprotect(memory + page, page, PROT_NONE));
    char *cut[] = { (char *)8, memory + page, memory + page - (sizeof path - 1), memory + page - 8 };
    memcpy(cut[2], path, sizeof path - 1);
    for (int at = 0; at < 4; at++) {
        errno = 0;
        EXPECT(open(cut[at], O_RDONLY) < 0 && errno == EFAULT);
        EXPECT(stat(cut[at], &found) < 0 && errno == EFAULT && access(cut[at], R_OK) < 0 && errno == EFAULT);
    }
    /* One that ends with its memory. */
    memory[page - 1] = 0;
    EXPECT(!stat(cut[2], &found) && S_ISDIR(found.st_mode) && !munmap(memory, 2 * page));
}

int main(void)
{
    struct stat found;
    for (int number = 0; number < 2; number++) {
        char path[64];
        snprintf(path, sizeof path, "/dev/infiniband/uverbs%d", number);
        EXPECT(!stat(path, &found) && S_ISCHR(found.st_mode) && !access(path, R_OK | W_OK));
        snprintf(path, sizeof path, "/sys/class/infiniband/softrdma%d/ports/1/gid_attrs/types/0", number);
        says(path, "RoCE v2");
        snprintf(path, sizeof path, "/sys/class/infiniband_verbs/uverbs%d/ibdev", number);
        EXPECT(!access(path, R_OK));
    }
    EXPECT(!lstat("/sys/class/infiniband/softrdma0", &found) && S_ISLNK(found.st_mode));
    EXPECT(stat("/dev/infiniband/uverbs2", &found) && errno == ENOENT);
    says("/sys/class/infiniband/softrdma0/node_guid", "0200:0000:c000:0201");
    says("/sys/class/infiniband/softrdma0/ports/1/gids/0", "0000:0000:0000:0000:0000:ffff:c000:0201");
    says("/sys/class/infiniband/softrdma0/ports/1/gids/1", "2001:0db8:0000:0000:0000:0000:0000:0001");
    says("/sys/class/infiniband/softrdma1/ports/1/gids/0", "0000:0000:0000:0000:0000:ffff:c633:6401");
    says("/sys/class/infiniband_verbs/uverbs1/ibdev", "softrdma1");

    int names = 0;
    DIR *directory = opendir("/sys/class/infiniband");
    EXPECT(directory);
    for (struct dirent *each; (each = readdir(directory));)
        names += !strncmp(each->d_name, "softrdma", 8);
    EXPECT(names == 2 && !closedir(directory));
    char real[PATH_MAX];
    EXPECT(realpath("/sys/class/infiniband/softrdma1", real) && strstr(real, "/sys/devices/virtual/infiniband/softrdma1"));

    /* Other paths are unchanged. */
    EXPECT(realpath("/dev/null", real) && !strcmp(real, "/dev/null") && !access("/proc/self", R_OK));
    errno = 0;
    EXPECT(open("/sys/class/infiniband_nothing", O_RDONLY) < 0 && errno == ENOENT);
    EXPECT(open(NULL, O_RDONLY) < 0 && errno == EFAULT);
    without_memory();
    int file = open("/tmp", O_TMPFILE | O_RDWR, 0640);
    EXPECT(file < 0 || (!fstat(file, &found) && (found.st_mode & 0777) == 0640 && !close(file)));

    EXPECT(listed("softrdma0", "192.0.2.1") == 1 && listed("softrdma0", "2001:db8::1") == 1);
    EXPECT(listed("softrdma1", "198.51.100.1") == 1 && listed("softrdma0", "198.51.100.1") == 0);
    EXPECT(listed("lo", "192.0.2.1") == 0);

    struct rdma_addrinfo *none;
    errno = 0;
    EXPECT(rdma_getaddrinfo(NULL, NULL, NULL, &none) == -1 && errno == EINVAL);
    on_a_small_stack();
    bound(AF_INET, "127.0.0.1", "192.0.2.1");
    bound(AF_INET6, "::1", "2001:db8::1");
    printf("done\n");
    return 0;
}
