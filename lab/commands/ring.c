/* A ring and an allreduce of several lengths between MPI's ranks, checked; for lab/run programs. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 1 << 18 };

static int bytes[MOST], sums[MOST];

static void expect(int length, int place, int found, int expected)
{
    if (found == expected)
        return;
    fprintf(stderr, "of %d numbers that at %d is %d, not %d\n", length, place, found, expected);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv)
{
    int rank, size, rounds = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int length = 1; length <= MOST; length *= 8, rounds++) {
        /* Each rank adds one on the way round. */
        for (int place = 0; place < length; place++)
            bytes[place] = place;
        if (rank == 0) {
            MPI_Send(bytes, length, MPI_INT, 1 % size, 0, MPI_COMM_WORLD);
            MPI_Recv(bytes, length, MPI_INT, size - 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else {
            MPI_Recv(bytes, length, MPI_INT, rank - 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            for (int place = 0; place < length; place++)
                bytes[place]++;
            MPI_Send(bytes, length, MPI_INT, (rank + 1) % size, 0, MPI_COMM_WORLD);
        }
        for (int place = 0; rank == 0 && place < length; place++)
            expect(length, place, bytes[place], place + size - 1);
        for (int place = 0; place < length; place++)
            bytes[place] = place * rank;
        MPI_Allreduce(bytes, sums, length, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        for (int place = 0; place < length; place++)
            expect(length, place, sums[place], place * (size * (size - 1) / 2));
    }
    if (rank == 0)
        printf("%d lengths, %d ranks\n", rounds, size);
    MPI_Finalize();
    return 0;
}
