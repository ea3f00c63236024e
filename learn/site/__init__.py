"""Makes the pages of the site: the documents, and every file of `reference/` with its derivation next to its code."""
