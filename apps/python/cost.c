/*
 * For cost.py, which calls it by ctypes. Under callgrind it marks where counting begins and ends.
 * Preloaded, it counts the bytes that a program copies or clears in blocks of a KiB and more.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <valgrind/callgrind.h>

static atomic_ullong copied, cleared;

unsigned long long cost_copied(void) { return copied; }
unsigned long long cost_cleared(void) { return cleared; }

void cost_begin(void) { CALLGRIND_START_INSTRUMENTATION; }

void cost_end(void) {
    CALLGRIND_STOP_INSTRUMENTATION;
    CALLGRIND_DUMP_STATS;
}

void *memmove(void *to, const void *from, size_t n) {
    if (n >= 1024) copied += n;
    void *begin = to;
    if (to <= from || (char *)to >= (char *)from + n) {
        __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
    } else {
        char *end = (char *)to + n - 1;
        const char *last = (const char *)from + n - 1;
        __asm__ volatile("std; rep movsb; cld" : "+D"(end), "+S"(last), "+c"(n) : : "memory");
    }
    return begin;
}

void *memcpy(void *restrict to, const void *restrict from, size_t n) { return memmove(to, from, n); }

void *__memcpy_chk(void *to, const void *from, size_t n, size_t room) {
    (void)room;
    return memmove(to, from, n);
}

void *memset(void *to, int byte, size_t n) {
    if (n >= 1024) cleared += n;
    void *begin = to;
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(n) : "a"(byte) : "memory");
    return begin;
}
