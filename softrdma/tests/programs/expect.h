/* Ends the program, with the place, if what is expected is not so, and by SIGALRM if what it waits for does not come. Needs errno.h, stdio.h
   and stdlib.h. */
#include <unistd.h>

#define EXPECT(what)                                                                             \
    do {                                                                                         \
        if (!(what)) {                                                                           \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno);         \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

__attribute__((constructor)) static void ends(void)
{
    alarm(60);
}
