"""The pages of a KV cache, with reference counts and a prefix cache.

A page stores the keys and values of `size` consecutive tokens in all layers. A request holds the pages of its tokens,
in order. Several requests may hold the same page once no request writes to it any more.

The prefix cache is a tree of full pages of prompts. The key of a page has three parts: the page before it in the
prompt, the owner (the client's API key and the adapter), and the page's tokens. We compare the parts themselves, so two
prompts cannot be confused as they could with a hash. A page that no request holds stays in the tree until we need its
memory. Then we evict the page that was released longest ago. A request that holds a page also holds all pages before
it, and releases the last page first, so an evicted page never has a page after it in the tree.
"""

from collections.abc import Sequence

NULL_PAGE = 0  # fills unused entries of page tables; no request holds this page or writes to it

Owner = tuple[str, str]  # the tenant and the adapter of a request; only requests with the same owner share pages
Node = tuple[int, Owner, tuple[int, ...]]  # the previous page (NULL_PAGE: none), the owner, the tokens


class PagePool:
    """A pool of `count` pages for `size` tokens each. One of them is NULL_PAGE, which no request gets."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.free = list(range(count - 1, NULL_PAGE, -1))
        self.holders: dict[int, int] = {}  # page: number of requests that hold it
        self.idle: dict[int, None] = {}  # pages in the tree without holders, in the order of their release
        self.tree: dict[Node, int] = {}
        self.nodes: dict[int, Node] = {}  # page: its node in the tree

    @property
    def available(self) -> int:
        """The number of pages that no request holds."""
        return len(self.free) + len(self.idle)

    def match(self, tokens: Sequence[int], owner: Owner) -> list[int]:
        """Find the longest prefix of `tokens` in the prefix cache, and return its pages. Adds no holder to them."""
        pages: list[int] = []
        before = NULL_PAGE
        for start in range(0, len(tokens) - self.size + 1, self.size):
            page = self.tree.get((before, owner, tuple(tokens[start : start + self.size])))
            if page is None:
                break
            pages.append(page)
            before = page
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Add one holder to each of `pages`, which `match` returned."""
        for page in pages:
            self.idle.pop(page, None)
            self.holders[page] = self.holders.get(page, 0) + 1

    def take(self) -> int:
        """Return a page for new tokens, with one holder.

        Evicts a page if needed. Raises IndexError if all pages are held.
        """
        if not self.free:
            if not self.idle:
                raise IndexError("all pages are held by requests")
            oldest = next(iter(self.idle))
            del self.idle[oldest], self.tree[self.nodes.pop(oldest)]
            self.free.append(oldest)
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def publish(self, page: int, *, before: int, tokens: Sequence[int], owner: Owner) -> None:
        """Put a held page into the tree, after the page `before`. Does nothing if `page` is in the tree already.

        Raises ValueError if the page is not full, or if a different page with these tokens comes after `before`.
        """
        node = (before, owner, tuple(tokens))
        if len(tokens) != self.size or self.tree.setdefault(node, page) != page:
            raise ValueError(
                f"page {page} must be full and new, but it has {len(tokens)} of {self.size} tokens, "
                "or the tree already has a different page with these tokens"
            )
        self.nodes[page] = node

    def release(self, pages: Sequence[int]) -> None:
        """Remove one holder from each page of a request.

        `pages` are in order, and the last page will be evicted first.
        """
        for page in reversed(pages):
            self.holders[page] -= 1
            if self.holders[page]:
                continue
            del self.holders[page]
            if page in self.nodes:
                self.idle[page] = None
            else:
                self.free.append(page)
