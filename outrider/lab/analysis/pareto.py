"""The Pareto front: the points that no other point beats in both coordinates."""

from collections.abc import Sequence


def pareto_front(
    points: Sequence[tuple[float, float]], *, x_lower: bool = False, y_lower: bool = False
) -> list[int]:
    """Indices of the points on the front, sorted by x.

    A point is off the front if another is at least as good in both coordinates and better in one.
    Of equal points, all are on the front or none.

    Args:
        points: x and y of each.
        x_lower: whether a smaller x is better.
        y_lower: the same of y.
    """
    signed = [(-x if x_lower else x, -y if y_lower else y) for x, y in points]
    front = [
        i
        for i, (x, y) in enumerate(signed)
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in signed)
    ]
    return sorted(front, key=lambda i: points[i])
