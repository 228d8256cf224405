"""How a prompt is cut into chunks. Boundaries lie at absolute multiples of the grid, so cuts leave no trace."""


def next_chunk(remaining: int, budget: int, grid: int) -> int:
    """Tokens of the next chunk of a prompt: at most `budget`, a multiple of `grid` unless it ends the prompt.

    The last chunk should be long, since the hand-off of the KDA states hides behind it (design.md P2): a rest that is
    not more than two budgets is split evenly on the grid instead of leaving a short tail. 0: nothing fits.
    """
    if remaining <= budget:
        return remaining
    if remaining < 2 * budget:
        half = -(-remaining // 2)
        even = -(-half // grid) * grid
        if even <= budget:
            return even
    return budget // grid * grid
