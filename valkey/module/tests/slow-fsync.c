// To be preloaded into a server: each fdatasync takes 20 ms longer, and then tells in the 8 bytes of the file $SYNCED how long the file was
// when it began. What a file holds up to there is on the disk.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static _Atomic uint64_t *synced;

__attribute__((constructor)) static void open_synced(void) {
    const char *path = getenv("SYNCED");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *mapped = fd == -1 ? MAP_FAILED : mmap(NULL, sizeof *synced, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) abort();
    synced = mapped;
    close(fd);
}

int fdatasync(int fd) {
    struct stat before;
    if (fstat(fd, &before)) return -1;
    usleep(20000);
    int status = ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
    if (status == 0) atomic_store(synced, (uint64_t)before.st_size);
    return status;
}
