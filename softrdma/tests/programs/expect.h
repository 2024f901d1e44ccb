/* Ends the program, with the place, if what is expected is not so. Needs errno.h, stdio.h and stdlib.h. */
#define EXPECT(what)                                                                             \
    do {                                                                                         \
        if (!(what)) {                                                                           \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno);         \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)
