"""The bytes that a rank sends in a collective, which no backend reports."""


def sent(operation: str, size: float, ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends with a ring algorithm for a payload of `size` bytes: 2(n−1)/n of it for an
    all-reduce, all of it for a send, nothing for a barrier or a receive, (n−1)/n for any other operation (Patarasuk and
    Yuan 2009)."""
    if operation in ("send", "recv", "barrier"):
        return float(size if operation == "send" else 0)
    return (2 if operation == "all_reduce" else 1) * size * (ranks - 1) / ranks
