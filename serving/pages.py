"""The pages of a KV cache: who holds them, and by which prompts they are found again.

A page holds the keys and values of `size` consecutive tokens, in all layers. A request holds the pages of its tokens,
in order, and several requests may hold a page that none of them writes any more.

The prefix cache is a tree. A full page of a prompt is found by the page before it, the tenant and its tokens, which are
all compared, so there is no hash that could collide. A page that nobody holds stays in the tree until its memory is
needed; the one released longest ago goes first. Whoever holds a page holds those before it, so a page is never released
after those before it are, and the first to go never has a page after it in the tree.
"""

from collections.abc import Sequence

NOBODY = 0  # the page that stands in a table for none; no request holds it, and nothing is written to it

Node = tuple[int, str, tuple[int, ...]]  # the page before (NOBODY: none), the tenant, the tokens


class PagePool:
    """`count` pages of `size` tokens each. The page NOBODY is one of them, and is never given out."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.free = list(range(count - 1, NOBODY, -1))
        self.holders: dict[int, int] = {}  # requests that hold a page
        self.idle: dict[int, None] = {}  # pages that only the tree holds, the one released longest ago first
        self.tree: dict[Node, int] = {}
        self.nodes: dict[int, Node] = {}  # the inverse of the tree

    @property
    def available(self) -> int:
        """Count the pages that nobody holds."""
        return len(self.free) + len(self.idle)

    def match(self, tokens: Sequence[int], tenant: str) -> list[int]:
        """Find the pages that hold the beginning of `tokens`. They are not held yet."""
        pages: list[int] = []
        before = NOBODY
        for start in range(0, len(tokens) - self.size + 1, self.size):
            found = self.tree.get((before, tenant, tuple(tokens[start : start + self.size])))
            if found is None:
                break
            pages.append(found)
            before = found
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Hold pages that `match` found, once more."""
        for page in pages:
            self.idle.pop(page, None)
            self.holders[page] = self.holders.get(page, 0) + 1

    def take(self) -> int:
        """Hold a page for new tokens. Raises IndexError where none is available."""
        if not self.free:
            if not self.idle:
                raise IndexError("no page is available")
            oldest = next(iter(self.idle))
            del self.idle[oldest], self.tree[self.nodes.pop(oldest)]
            self.free.append(oldest)
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def publish(self, page: int, *, before: int, tokens: Sequence[int], tenant: str) -> None:
        """Put a held page into the tree, after `before`. A page that is there already stays as it is.

        Raises ValueError for a page that is not full, or whose tokens are there in another page.
        """
        node = (before, tenant, tuple(tokens))
        if len(tokens) != self.size or self.tree.setdefault(node, page) != page:
            raise ValueError(f"page {page} is not full, or its tokens are in the tree twice")
        self.nodes[page] = node

    def release(self, pages: Sequence[int]) -> None:
        """Release the pages of a request, given in order; the last are the first to go."""
        for page in reversed(pages):
            self.holders[page] -= 1
            if self.holders[page]:
                continue
            del self.holders[page]
            if page in self.nodes:
                self.idle[page] = None
            else:
                self.free.append(page)
