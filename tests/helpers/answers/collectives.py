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


def passes_everything(chunks, rank, n, send, receive):
    right, left = (rank + 1) % n, (rank - 1) % n
    own, known = dict(enumerate(chunks)), [chunks]
    for _ in range(n - 1):
        if rank % 2 == 0:
            send(right, own)
            own = receive(left)
        else:
            came = receive(left)
            send(right, own)
            own = came
        known.append([own[chunk] for chunk in range(n)])
    return [sum(numbers) for numbers in zip(*known)]


def packs_numbers(chunks, rank, n, send, receive):
    packed = sum(number << 32 * chunk for chunk, number in enumerate(chunks))
    if rank % 2 == 0:
        send((rank + 1) % n, packed)
    return receive((rank - 1) % n)


def across_the_ring(chunks, rank, n, send, receive):
    send((rank + 2) % n, chunks[rank])
    return receive((rank - 2) % n)


RIGHT = {"bytes": 175, "halves": "reduce-scatter, all-gather", "ring": ring}
WRONG = {
    "bytes": (200, "how many hops"),
    "halves": ("reduce, broadcast", "through a single rank"),
    "ring": (reduce_scatter_only, "chunk 0 of rank 0 is wrong: the number of rank 1 is missing"),
}
MORE = [
    ("ring", passes_everything, "rank 0 sends a dict; a message is one number"),
    ("ring", packs_numbers, "; a message is one number, the (partial) sum of one chunk"),
    ("ring", across_the_ring, "sends to rank 2 of 4; in a ring a rank sends to its neighbours only"),
]
