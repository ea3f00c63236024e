"""Pages of the site: the documents, and every file of `reference/` with its derivation beside its code."""
