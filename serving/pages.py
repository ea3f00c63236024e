"""The pages of a KV cache: reference counts, and a prefix cache.

A page stores the keys and values of `size` consecutive tokens, in all layers. A request holds the pages of its tokens,
in order. Several requests may hold the same page once it is no longer written.

The prefix cache is a tree. A full page of a prompt is looked up by the page before it, the tenant and its tokens. All
of them are compared, so two prompts cannot be confused as by a hash. A page without holders stays in the tree until we
need its memory. We evict the page that was released longest ago. A request that holds a page also holds all pages
before it, and releases the last page first, so an evicted page never has a page after it in the tree.
"""

from collections.abc import Sequence

NULL_PAGE = 0  # fills unused entries of page tables; no request holds it, and nothing is written to it

Node = tuple[int, str, tuple[int, ...]]  # the page before (NULL_PAGE: none), the tenant, the tokens


class PagePool:
    """`count` pages of `size` tokens each, including NULL_PAGE, which is never given out."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.free = list(range(count - 1, NULL_PAGE, -1))
        self.holders: dict[int, int] = {}  # number of requests that hold a page
        self.idle: dict[int, None] = {}  # pages in the tree without holders, the one released longest ago first
        self.tree: dict[Node, int] = {}
        self.nodes: dict[int, Node] = {}  # the inverse of the tree

    @property
    def available(self) -> int:
        """Count the pages without holders."""
        return len(self.free) + len(self.idle)

    def match(self, tokens: Sequence[int], tenant: str) -> list[int]:
        """Look up the pages for the beginning of `tokens`, without holding them."""
        pages: list[int] = []
        before = NULL_PAGE
        for start in range(0, len(tokens) - self.size + 1, self.size):
            page = self.tree.get((before, tenant, tuple(tokens[start : start + self.size])))
            if page is None:
                break
            pages.append(page)
            before = page
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to pages that `match` returned."""
        for page in pages:
            self.idle.pop(page, None)
            self.holders[page] = self.holders.get(page, 0) + 1

    def take(self) -> int:
        """Hold a page for new tokens, and evict one if needed. Raises IndexError if none is available."""
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
        """Put a held page into the tree, after the page `before`. Does nothing if the page is in the tree already.

        Raises ValueError if the page is not full, or if the tree has another page with the same tokens.
        """
        node = (before, tenant, tuple(tokens))
        if len(tokens) != self.size or self.tree.setdefault(node, page) != page:
            raise ValueError(f"page {page} is not full, or its tokens are in the tree twice")
        self.nodes[page] = node

    def release(self, pages: Sequence[int]) -> None:
        """Release the pages of a request, listed in order. The last page is evicted first."""
        for page in reversed(pages):
            self.holders[page] -= 1
            if self.holders[page]:
                continue
            del self.holders[page]
            if page in self.nodes:
                self.idle[page] = None
            else:
                self.free.append(page)
