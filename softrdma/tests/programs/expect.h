/* Ends the program, and prints the place, if a condition does not hold; SIGALRM ends it if an
   awaited event does not come. Needs errno.h, stdio.h and stdlib.h. */
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
