"""Answers to the exercises of lab 01."""


def ring(chunks, rank, n, send, receive):
    right, left = (rank + 1) % n, (rank - 1) % n
    for k in range(2 * (n - 1)):
        out, back = (rank - k) % n, (rank - k - 1) % n
        if rank % 2 == 0:
            send(right, chunks[out])
            came = receive(left)
        else:
            came = receive(left)
            send(right, chunks[out])
        chunks[back] = chunks[back] + came if k < n - 1 else came
    return chunks


def reduce_scatter_only(chunks, rank, n, send, receive):
    right, left = (rank + 1) % n, (rank - 1) % n
    for k in range(n - 1):
        out, back = (rank - k) % n, (rank - k - 1) % n
        if rank % 2 == 0:
            send(right, chunks[out])
            chunks[back] += receive(left)
        else:
            came = receive(left)
            send(right, chunks[out])
            chunks[back] += came
    return chunks


RIGHT = {"bytes": 175, "halves": "reduce-scatter, all-gather", "ring": ring}
WRONG = {
    "bytes": (200, "how many hops"),
    "halves": ("reduce, broadcast", "through a single rank"),
    "ring": (reduce_scatter_only, "chunk 0 of rank 0 is wrong: the number of rank 1 is missing"),
}
